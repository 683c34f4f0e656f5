"""What fitting any algorithm of the PCA family has in common: files in, files and pictures out."""

import argparse
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxfed import data, pca, plot, report
from jaxfed._optional import require
from jaxfed.cli import _evaluate
from jaxfed.cli._folder import Folder
from jaxfed.cli.fit import _common, _processes
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.pca.fitted import side_by_side

PICTURES = ("components.png", "convergence.png")
WARM_STARTS = ("projector", "spectrum")
DRAWN = 4  # clients whose local components are drawn


class Plan(NamedTuple):
    """What to run, and what to run before it as a start."""

    algorithm: Algorithm
    start: Algorithm | None = None


class Split(NamedTuple):
    """The clients' samples, centred as asked for."""

    names: list[str]
    train: list[Float[np.ndarray, "n_i d"]]
    held_out: list[Float[np.ndarray, "k_i d"]]  # empty where nothing is held out
    mean: Float[np.ndarray, "m d"]  # what was subtracted


# --- arguments -----------------------------------------------------------------------------------


def add_command(
    subparsers, name: str, summary: str, build: Callable[[argparse.Namespace], Plan]
) -> argparse.ArgumentParser:
    """Add an algorithm with the options that all of them have; return its parser."""
    parser = subparsers.add_parser(name, help=summary, description=summary)
    _common.add_files(
        parser,
        "folder with one file a client (.npy, .csv, .parquet, images with rows as samples), "
        "or one file that holds all clients",
    )
    parser.add_argument(
        "--client-column", metavar="NAME", help="of one table: the column that names the client"
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of each client's samples, to test on; 0 for none; default: %(default)s",
    )
    parser.add_argument(
        "--center",
        choices=("none", "own", "common"),
        nargs="?",
        const="own",
        default="none",
        help="subtract each client's own mean, or the mean of all training samples; "
        "default: %(default)s, without a value: own",
    )
    parser.add_argument(
        "--image-shape",
        type=_shape,
        metavar="HxW",
        help="draw components as images of this many pixels, e.g. 28x28",
    )
    _common.add_backend(parser)
    _processes.add_processes(parser)
    # One exchange, unless add_loop says otherwise.
    parser.set_defaults(
        run=partial(run, build=build),
        algorithm=name,
        rounds=1,
        tol=None,
        participation=None,
        checkpoint_every=None,
    )
    return parser


def add_loop(parser: argparse.ArgumentParser, *, starts: tuple[str, ...]) -> None:
    """Add the options of an iterative method; of `starts`, if any, the first is the default."""
    group = parser.add_argument_group("rounds")
    _common.add_rounds(group, 200)
    _common.add_tol(group)
    if starts:
        group.add_argument(
            "--start",
            choices=starts,
            default=starts[0],
            help="the first components: the algorithm's own choices, or those that oneshot finds "
            "by projector or spectrum; default: %(default)s",
        )
    _common.add_participation(group)
    _common.add_checkpoints(group)


def warm_start(arguments: argparse.Namespace) -> Algorithm | None:
    """The algorithm whose solution `--start` asks for, if it is another's."""
    if arguments.start not in WARM_STARTS:
        return None
    return pca.OneShot(arguments.shared_rank, arguments.local_rank, method=arguments.start)


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted HEIGHTxWIDTH, e.g. 28x28, got {text!r}")
    return int(match[1]), int(match[2])


# --- the command ---------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, *, build: Callable[[argparse.Namespace], Plan]) -> int:
    """Run the command.

    Args:
        arguments: the parsed arguments.
        build: makes the algorithm of them.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments, data or a checkpoint that do not fit.
        FileNotFoundError: if there are no data.
        ImportError: if an optional package is missing.
        FloatingPointError: if the objective becomes infinite.
    """
    together = _processes.Together.join(arguments)
    require("matplotlib.figure", extra="plot")
    plan, backend_ = build(arguments), _common.chosen_backend(arguments)
    split_key, key = jax.random.split(jax.random.key(arguments.seed))
    if together.place:
        split_key = jax.random.fold_in(split_key, together.place)
    held: list[tuple[Folder, Split]] = []

    def ready() -> list[str]:
        folder = _common.checked_folder(arguments, PICTURES)
        split = _read(arguments, split_key)
        held.append((folder, split))
        return split.names

    together.each("--data", ready)
    folder, split = held[0]
    together.check_names(split.names)
    own = Clients.from_samples(split.train)
    clients = together.spread(own, backend_)
    plan.algorithm.check(clients, None)
    _check_image_shape(arguments.image_shape, clients.features)

    run = _common.Run.begin(folder, arguments, together)
    of_this = f"{len(own)} in this process, " * (together.processes > 1)
    print(
        f"{len(clients)} clients, {of_this}{clients.features} features, "
        f"{sum(map(len, split.train))} samples to learn from and "
        f"{sum(map(len, split.held_out))} held out."
    )
    begun = time.perf_counter()
    start = None
    if plan.start is not None:
        start = fit(plan.start, clients, rounds=1, key=key, backend=backend_)
    solution = run.fit(
        plan.algorithm,
        clients,
        rounds=arguments.rounds,
        key=key,
        warm_start=start,
        participation=_common.chosen_participation(arguments),
        backend=backend_,
        tol=arguments.tol,
    )
    seconds = time.perf_counter() - begun

    solution = together.own(solution, clients)
    rows = _table(solution, start, own, split)
    _common.show(rows, solution)
    arrays = {**solution.entries(), "names": split.names, "mean": split.mean}
    samples = dict(zip(split.names, map(len, split.train), strict=True))
    summary = {"seconds": seconds, "samples": samples, "table": rows}
    page = partial(report.html, solution, own, names=split.names, image_shape=arguments.image_shape)
    run.write(arguments, arrays, summary, _drawn(solution, split, arguments.image_shape), page)
    return 0


def _read(arguments: argparse.Namespace, key) -> Split:
    arrays, names = data.read_folder(
        arguments.data,
        client_column=arguments.client_column,
        max_bytes=arguments.max_bytes,
    )
    share = _common.held_out_share(arguments)
    train, held_out = arrays, []
    if share > 0:
        train, held_out = data.train_test_split(arrays, share, key=key)
    # Of the training samples, so that nothing is known of the others.
    mean = np.stack([y.mean(axis=0) for y in train])
    if arguments.center == "common":
        mean[:] = np.concatenate(train).mean(axis=0)
    elif arguments.center == "none":
        mean[:] = 0
    train = [y - shift for y, shift in zip(train, mean, strict=True)]
    # Either every client has samples held out or none has.
    held_out = [y - shift for y, shift in zip(held_out, mean, strict=False)]
    return Split(names, train, held_out, mean)


def _check_image_shape(shape: tuple[int, int] | None, features: int) -> None:
    if shape is not None and shape[0] * shape[1] != features:
        raise ValueError(
            f"--image-shape: {shape[0]}x{shape[1]} is {shape[0] * shape[1]} pixels, the data "
            f"have {features} features"
        )


def _table(
    solution: Solution, start: Solution | None, clients: Clients, split: Split
) -> list[Mapping[str, Any]]:
    result = Personalized(*side_by_side(solution))
    learned = _evaluate.shares(result, clients.data)
    unseen = None
    if split.held_out:
        unseen = _evaluate.shares(result, Clients.from_samples(split.held_out).data)
    quantities = {
        "rounds": int(solution.rounds),
        "objective (mean squared error of a training sample)": _evaluate.objective(
            result, clients.data
        ),
        "error on training samples (% of their energy)": 100 * float(learned.residual),
        "error on held-out samples (% of their energy)": unseen and 100 * float(unseen.residual),
        "in shared components (% of the training energy)": 100 * float(learned.shared),
        "in local components (% of the training energy)": 100 * float(learned.local),
        "misalignment of the local components": _evaluate.theta(result),
        **_common.traffic(start, solution),
    }
    return [{"quantity": name, "value": value} for name, value in quantities.items()]


def _drawn(solution: Solution, split: Split, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Pictures by the names of their files."""
    shared, local = solution.result
    groups = {}
    if shared is not None:
        groups["shared components"] = pca.principal_axes(shared, split.train)
    if local is not None:
        for name, basis, samples in list(zip(split.names, local, split.train, strict=True))[:DRAWN]:
            groups[f"local components of {name}"] = pca.principal_axes(basis, [samples])
    figures = {"components.png": plot.components(groups, shape)}
    if solution.rounds > 1:
        figures["convergence.png"] = plot.convergence(solution.history)
    return figures
