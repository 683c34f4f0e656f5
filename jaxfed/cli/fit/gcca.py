"""`jaxfed fit gcca`: one representation of entities that every client has a view of."""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Float

from jaxfed import channel, gcca, plot, report
from jaxfed._optional import require
from jaxfed.cli.fit import _common, _signature, _views
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution

PICTURES = ("agreement.png", "convergence.png")
POOLED = 10**8  # numbers at most that the least cost is computed from


def add_parser(subparsers) -> None:
    """Add the algorithm.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = _command(
        subparsers, "gcca", "generalized CCA of views of the same entities (Shrestha & Fu 2023)"
    )
    group = parser.add_argument_group("rounds")
    _common.add_rounds(group, 100)
    _common.add_tol(group)
    group.add_argument(
        "--start",
        choices=("mvlsa", "random"),
        default="mvlsa",
        help="the first representation, that of mvlsa or a random one; default: %(default)s",
    )
    _signature.add_settings(group, gcca.MVLSA, without={"rank"})
    _common.add_checkpoints(group)
    _signature.add_settings(parser.add_argument_group("algorithm"), gcca.MaxVar)

    parser = _command(subparsers, "mvlsa", "the same in one round (Rastogi et al. 2015)")
    _signature.add_settings(parser.add_argument_group("algorithm"), gcca.MVLSA)
    parser.set_defaults(rounds=1, tol=None, start=None, checkpoint_every=None, ridge=0.0)


def _command(subparsers, name: str, summary: str) -> argparse.ArgumentParser:
    """Add an algorithm with the options that both have; return its parser."""
    parser = subparsers.add_parser(name, help=summary, description=summary)
    _common.add_files(
        parser,
        "folder with one file a view (.npy, .csv, .parquet, .npz of one array or as "
        "scipy.sparse.save_npz writes it), or one .npz file with an array for each; the rows of "
        "all views are the same entities",
    )
    _views.add_views(parser)
    _common.add_backend(parser)
    parser.set_defaults(run=run, algorithm=name)
    return parser


def _algorithm(arguments: argparse.Namespace) -> Algorithm:
    """What was asked for."""
    if arguments.algorithm == "mvlsa":
        return _signature.chosen(arguments, gcca.MVLSA)
    return _signature.chosen(arguments, gcca.MaxVar)


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
    algorithm = _algorithm(arguments)
    start_with = None
    if arguments.start == "mvlsa":
        start_with = _signature.chosen(arguments, gcca.MVLSA)
    wire = channel.lossless()
    if arguments.bits is not None:
        wire = channel.difference(channel.quantize(arguments.bits))
    backend = _common.chosen_backend(arguments)
    split = _views.read(arguments)
    views = _clients(split, center=arguments.scale != "none")
    algorithm.check(views, None)
    if start_with is not None:
        start_with.check(views, None)

    run = _common.Run.begin(folder, arguments)
    kept, total = len(split.entities), len(split.entities) + len(split.held_out[0])
    print(
        f"{len(views)} views, {kept} entities to learn from and {total - kept} held out; "
        f"features: {', '.join(f'{n} {len(m)}' for n, m in zip(*split[::4], strict=True))}."
    )
    key = jax.random.key(arguments.seed)
    begun = time.perf_counter()
    start = None
    if start_with is not None:
        start = fit(start_with, views, rounds=1, key=key, backend=backend)
    solution = run.fit(
        algorithm,
        views,
        rounds=arguments.rounds,
        key=key,
        warm_start=start,
        channel=wire,
        backend=backend,
        tol=arguments.tol,
    )
    seconds = time.perf_counter() - begun

    least = None
    if isinstance(views.data, gcca.View) and views.data.values.size <= POOLED:
        least = float(gcca.optimum(views, arguments.rank, ridge=arguments.ridge).cost)
    fits = _fits(solution, views)
    rows = _table(solution, start, views, split, arguments.ridge, least, fits)
    _common.show(rows, solution)
    drawn = _drawn(solution, split.names, fits, least)
    widest = views.features
    arrays = {
        **solution.entries(),
        "names": split.names,
        "entities": split.entities,
        "features": [len(mean) for mean in split.mean],
        "mean": [np.pad(mean, (0, widest - len(mean))) for mean in split.mean],
        "scale": [np.pad(scale, (0, widest - len(scale))) for scale in split.scale],
    }
    page = partial(report.html, solution, views, names=split.names)
    run.write(arguments, arrays, {"seconds": seconds, "table": rows}, drawn, page)
    return 0


def _clients(split: _views.Split, *, center: bool) -> gcca.Views:
    if scipy.sparse.issparse(split.train[0]):
        return gcca.Views.from_sparse(split.train, center=center)
    return gcca.Views.from_arrays(split.train)


def _fits(solution: Solution, views: gcca.Views) -> Float[np.ndarray, "views rank"]:
    """Share of each component of the representation that each view's map gives."""
    shared, local = solution.result
    scores = jax.vmap(lambda view, weights: view.mv(weights))(views.data, local)
    scores = np.asarray(scores) / len(shared) ** 0.5
    return _views.shares(np.asarray(shared), scores)


def _table(
    solution: Solution,
    start: Solution | None,
    views: gcca.Views,
    split: _views.Split,
    ridge: float,
    least: float | None,
    fits: Float[np.ndarray, "views rank"],
) -> list[Mapping[str, Any]]:
    cost = float(gcca.cost(views, *solution.result, ridge=ridge))
    found = None
    if len(split.held_out[0]) > 1:
        scores = [
            x @ np.asarray(q)[: x.shape[1]]
            for x, q in zip(split.held_out, solution.result.local, strict=True)
        ]
        found = 100 * float(gcca.alignment_accuracy(jnp.stack(scores)))
    quantities = {
        "rounds": int(solution.rounds),
        "cost": cost,
        "least cost, of pooled views": least,
        **{
            f"representation that {name} gives (%)": 100 * float(share)
            for name, share in zip(split.names, fits.mean(1), strict=True)
        },
        "held-out entities whose nearest in another view is themselves (%)": found,
        **_common.traffic(start, solution),
    }
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _drawn(solution: Solution, names: Sequence[str], fits, least: float | None) -> dict[str, Any]:
    """Pictures by the names of their files."""
    figures = {"agreement.png": plot.agreement(fits, names)}
    if solution.rounds > 1:
        levels = None if least is None else {"least cost / views": least / len(names)}
        figures["convergence.png"] = plot.convergence(
            solution.history, levels=levels, label="cost / views"
        )
    return figures
