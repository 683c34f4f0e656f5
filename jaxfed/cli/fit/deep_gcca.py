"""`jaxfed fit deep-gcca`: one representation of entities, by a neural network for every view."""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import scipy.sparse
from jaxtyping import Array, Float

from jaxfed import channel, gcca, models, plot, report
from jaxfed._optional import require
from jaxfed.cli.fit import _common, _signature, _views
from jaxfed.core.run.solution import Solution

PICTURES = ("agreement.png", "convergence.png")
BATCH = 1000


def add_parser(subparsers) -> None:
    """Add the algorithm.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    summary = "generalized CCA by a neural network for every view (Shrestha & Fu 2023)"
    parser = subparsers.add_parser("deep-gcca", help=summary, description=summary)
    _common.add_files(
        parser,
        "folder with one file a view (.npy, .csv, .parquet or .npz of one array), or one .npz file "
        "with an array for each; the rows of all views are the same entities",
    )
    _views.add_views(parser)
    _common.add_backend(parser)
    group = parser.add_argument_group("rounds")
    _common.add_rounds(group, 50)
    _common.add_tol(group)
    _common.add_checkpoints(group)
    group = parser.add_argument_group("networks")
    group.add_argument(
        "--hidden",
        type=int,
        nargs="*",
        default=[128, 64],
        metavar="UNITS",
        help="of the hidden layers; none for linear maps; default: 128 64",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"entities in each step; default: {BATCH}, or all if they are fewer",
    )
    group.add_argument(
        "--step-size", type=float, default=1e-3, metavar="X", help="of Adam; default: %(default)s"
    )
    # What is not a number, and what has other defaults here, as Adam has its own size of steps.
    own = {"network", "optimizer", "batch_size", "step_size"}
    _signature.add_settings(parser.add_argument_group("algorithm"), gcca.DeepMaxVar, without=own)
    parser.set_defaults(run=run, algorithm="deep-gcca")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments, data or a checkpoint that do not fit.
        FileNotFoundError: if there are no data.
        ImportError: if an optional package is missing.
        FloatingPointError: if the objective becomes infinite.
    """
    folder = _common.checked_folder(arguments, PICTURES)
    require("matplotlib.figure", extra="plot")
    wire = channel.lossless()
    if arguments.bits is not None:
        wire = channel.difference(channel.quantize(arguments.bits))
    backend = _common.chosen_backend(arguments)
    split = _views.read(arguments)
    if scipy.sparse.issparse(split.train[0]):
        raise ValueError("--data: networks need dense views, got sparse ones; fit gcca takes them")
    views = gcca.Views.from_arrays(split.train)
    kept, out = len(split.entities), len(split.held_out[0])
    batch = min(BATCH, kept) if arguments.batch_size is None else arguments.batch_size
    algorithm = _signature.chosen(
        arguments,
        gcca.DeepMaxVar,
        network=partial(models.Perceptron, outputs=arguments.rank, hidden=tuple(arguments.hidden)),
        optimizer=optax.adam(1.0),
        batch_size=batch,
    )
    algorithm.check(views, None)

    run = _common.Run.begin(folder, arguments)
    sizes = "-".join(map(str, (*arguments.hidden, arguments.rank)))
    print(
        f"{len(views)} views, {kept} entities to learn from, in batches of {batch}, and {out} held "
        f"out; networks of "
        f"{', '.join(f'{n} {len(m)}-{sizes}' for n, m in zip(*split[::4], strict=True))}."
    )
    begun = time.perf_counter()
    solution = run.fit(
        algorithm,
        views,
        rounds=arguments.rounds,
        key=jax.random.key(arguments.seed),
        channel=wire,
        backend=backend,
        tol=arguments.tol,
    )
    seconds = time.perf_counter() - begun

    scores = np.asarray(algorithm.outputs(solution.result.local, views)) / kept**0.5
    shares = _views.shares(np.asarray(solution.result.shared), scores)
    others = None
    if out:
        held_out = gcca.Views.from_arrays(split.held_out)
        others = algorithm.outputs(solution.result.local, held_out)
    rows = _table(solution, scores, split.names, shares, others)
    _common.show(rows, solution)
    drawn = _drawn(solution, split.names, shares)
    widest = views.features
    arrays = {
        **solution.entries(),
        "scores": scores,
        "names": split.names,
        "entities": split.entities,
        "features": [len(mean) for mean in split.mean],
        "mean": [np.pad(mean, (0, widest - len(mean))) for mean in split.mean],
        "scale": [np.pad(scale, (0, widest - len(scale))) for scale in split.scale],
    }
    page = partial(report.html, solution, views, names=split.names)
    run.write(arguments, arrays, {"seconds": seconds, "table": rows}, drawn, page)
    return 0


def _table(
    solution: Solution,
    scores: Float[np.ndarray, "views entities rank"],
    names: Sequence[str],
    shares: Float[np.ndarray, "views rank"],
    others: Float[Array, "views k rank"] | None,
) -> list[Mapping[str, Any]]:
    found = None
    if others is not None and others.shape[1] > 1:
        found = 100 * float(gcca.alignment_accuracy(others))
    quantities = {
        "rounds": int(solution.rounds),
        "cost": float(np.square(scores - np.asarray(solution.result.shared)).sum() / 2),
        **{
            f"representation that {name} gives (%)": 100 * float(share)
            for name, share in zip(names, shares.mean(1), strict=True)
        },
        "held-out entities whose nearest in another view is themselves (%)": found,
        **_common.traffic(solution),
    }
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _drawn(solution: Solution, names: Sequence[str], shares) -> dict[str, Any]:
    """Pictures by the names of their files."""
    figures = {"agreement.png": plot.agreement(shares, names)}
    if solution.rounds > 1:
        figures["convergence.png"] = plot.convergence(solution.history, label="cost / views")
    return figures
