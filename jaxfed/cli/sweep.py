"""`jaxfed sweep ALGORITHM`: a grid over settings, samples, clients and seeds, compiled once."""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxfed import data, metrics, pca, plot
from jaxfed._optional import require
from jaxfed.cli import _report
from jaxfed.cli._folder import CHECKPOINT, RESULT, Folder
from jaxfed.cli.fit import _common, _pca
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.rollout import rollout
from jaxfed.core.store.checkpoint import CheckpointError
from jaxfed.core.sweeps.grid import grid, stack

if TYPE_CHECKING:
    from xarray import Dataset

PICTURE = "sweep.png"


class Source(NamedTuple):
    """Where clients come from, and how the error of what they learn is measured.

    Attributes:
        errors: `f(prior_variance, samples, clients, seed)`, errors by method.
        samples: the most that a client has.
        clients: how many there are.
        label: what is measured.
    """

    errors: Callable
    samples: int
    clients: int
    label: str


def add_parser(subparsers) -> None:
    """Add the `sweep` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "sweep",
        help="a grid over settings, samples, clients and seeds, compiled once",
        description="Sweep an algorithm's settings, numbers of samples and clients, and seeds. "
        "Started again after an interruption, the same command goes on.",
    )
    algorithms = parser.add_subparsers(metavar="ALGORITHM", required=True)
    _add_hierarchical(algorithms)


def _add_hierarchical(subparsers) -> None:
    summary = "how much clients should share: HierarchicalPCA between Local and Pooled"
    parser = subparsers.add_parser("hierarchical", help=summary, description=summary)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results go here")
    parser.add_argument("--force", action="store_true", help="overwrite earlier results")
    axes = parser.add_argument_group("axes")
    axes.add_argument(
        "--prior-variance",
        type=float,
        nargs="+",
        required=True,
        metavar="V",
        help="of the clients' components around the shared ones; of simulated clients also the "
        "true one",
    )
    axes.add_argument(
        "--samples", type=int, nargs="+", metavar="N", help="of each client; default: all, or 20"
    )
    axes.add_argument(
        "--clients", type=int, nargs="+", metavar="M", help="how many; default: all, or 100"
    )
    axes.add_argument(
        "--seeds", type=int, default=3, metavar="K", help="draws or splits; default: %(default)s"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--rank", type=int, default=10, metavar="N", help="number of components; default: 10"
    )
    model.add_argument(
        "--noise-variance",
        type=float,
        default=0.5,
        metavar="X",
        help="of each entry of a sample; default: %(default)s",
    )
    _common.add_rounds(model, 30)
    source = parser.add_argument_group("clients, simulated unless files are given")
    source.add_argument(
        "--features", type=int, default=30, help="of simulated clients; default: %(default)s"
    )
    source.add_argument("--data", type=Path, metavar="DIR", help="files as for `jaxfed fit`")
    source.add_argument("--client-column", metavar="NAME", help="as for `jaxfed fit`")
    _common.add_max_bytes(source)
    source.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of each client's samples, which errors are measured on; default: %(default)s",
    )
    source.add_argument(
        "--center",
        choices=("none", "own", "common"),
        nargs="?",
        const="own",
        default="none",
        help="as for `jaxfed fit`; default: %(default)s, without a value: own",
    )
    parser.add_argument(
        "--block",
        type=int,
        default=1,
        metavar="RUNS",
        help="how many go side by side; default: %(default)s, the fastest on a processor",
    )
    parser.set_defaults(run=run)


# --- the command ---------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for settings that do not fit, and results that would be overwritten.
        OSError: if the data cannot be read.
        ImportError: if an optional package is missing.
    """
    require("matplotlib.figure", extra="plot")
    require("xarray", extra="sweep")
    folder = Folder(arguments.out)
    folder.check([PICTURE, CHECKPOINT], force=arguments.force, resumable=True)
    if arguments.seeds < 1:
        raise ValueError(f"--seeds: wanted a positive number, got {arguments.seeds}")
    learn = Partial(
        _learn, rank=arguments.rank, noise=arguments.noise_variance, rounds=arguments.rounds
    )
    source = (_simulated if arguments.data is None else _read)(arguments, learn)
    axes = _axes(arguments, source)
    resumes = folder.interrupted
    folder.begin(resume=resumes)
    folder.begin_checkpoint()
    sizes = " x ".join(f"{len(values)} {name.replace('_', ' ')}" for name, values in axes.items())
    print(f"Runs: {sizes}.")
    if resumes:
        print(f"Taking up the sweep that was interrupted in {folder.path}.")
    begun = time.perf_counter()

    def attempt() -> "Dataset":
        return grid(
            source.errors,
            axes,
            block=arguments.block,
            progress=_report.on_terminal(),
            folder=folder.checkpoint,
        )

    try:
        found = attempt()
    except CheckpointError:
        if not (resumes and arguments.force):
            raise
        # Another sweep's blocks, and leave to overwrite them.
        folder.discard_checkpoint()
        found = attempt()
    seconds = time.perf_counter() - begun

    rows, printed = _table(found)
    print(f"\n{source.label}, mean ± standard deviation over seeds:\n")
    _report.show(printed)
    print()
    along = next((name for name, values in axes.items() if len(values) > 1), "prior_variance")
    picture = plot.grid(found, along, over="seed", label=source.label)
    with folder.writing(PICTURE) as part:
        picture.savefig(part, dpi=150)
    settings = {name: value for name, value in vars(arguments).items() if name != "run"}
    arrays = {name: found[name].values for name in axes}
    arrays |= {f"error {name}": values.values for name, values in found.items()}
    summary = {"settings": settings, "seconds": seconds, "error": source.label, "table": rows}
    _report.write(folder, arrays, summary)
    print(f"Written to {folder.path}: {', '.join((*RESULT, PICTURE))}.")
    return 0


def _axes(arguments: argparse.Namespace, source: Source) -> dict[str, Sequence[float]]:
    for variance in arguments.prior_variance:
        # Refuses what is not positive; inside the compiled function it is not known.
        pca.HierarchicalPCA(arguments.rank, arguments.noise_variance, variance)
    axes: dict[str, Sequence[float]] = {"prior_variance": arguments.prior_variance}
    for name, most in (("samples", source.samples), ("clients", source.clients)):
        axes[name] = getattr(arguments, name) or [most]
        for number in axes[name]:
            if not 1 <= number <= most:
                raise ValueError(f"--{name}: wanted numbers from 1 to {most}, got {number}")
    return axes | {"seed": range(arguments.seeds)}


def _table(found: "Dataset") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each setting: its numbers, and as they are printed."""
    mean = found.mean("seed", skipna=False)
    # A single seed has no standard deviation.
    sd = found.std("seed", ddof=1, skipna=False) if found.sizes["seed"] > 1 else mean * np.nan
    rows, printed = [], []
    for position in itertools.product(*map(range, mean.sizes.values())):
        place = dict(zip(mean.sizes, position, strict=True))
        setting = {
            str(name).replace("_", " "): mean[name].values[i].item() for name, i in place.items()
        }
        rows.append(dict(setting))
        printed.append(dict(setting))
        for name in mean:
            value, spread = (float(part[name].isel(place)) for part in (mean, sd))
            alone = np.isnan(spread)
            rows[-1] |= {name: value, f"{name}, sd": None if alone else spread}
            printed[-1][name] = f"{value:.4g}" if alone else f"{value:.4g} ± {spread:.1g}"
    return rows, printed


# --- what is computed at one point ---------------------------------------------------------------


def _learn(clients: Clients, key, prior_variance, *, rank, noise, rounds) -> Mapping[str, Any]:
    """Each client's components by method, all of the same rank."""
    methods = {
        "Local": (pca.Local(rank), 1),
        "Pooled": (pca.Pooled(rank), 1),
        "HierarchicalPCA": (
            pca.HierarchicalPCA(rank, noise, prior_variance, solver="eigenvectors"),
            rounds,
        ),
    }
    found = {}
    for name, (algorithm, length) in methods.items():
        result = rollout(algorithm, clients, rounds=length, key=key).result
        found[name] = _frames(result, len(clients))
    return found


def _frames(result: Personalized, clients: int):
    if result.local is not None:
        return result.local
    return jnp.broadcast_to(result.shared, (clients, *result.shared.shape))


def _simulated(arguments: argparse.Namespace, learn: Callable) -> Source:
    law = {
        "clients": max(arguments.clients or [100]),
        "samples": max(arguments.samples or [20]),
        "features": arguments.features,
        "rank": arguments.rank,
        "noise_variance": arguments.noise_variance,
    }
    errors = Partial(_simulated_errors, learn, law=law)
    label = "error over that of the true components"
    return Source(errors, law["samples"], law["clients"], label)


def _simulated_errors(learn, *, prior_variance, samples, clients, seed, law):
    """Expected errors on fresh samples, over those of the truth."""
    key = jax.random.key(seed)
    truth = data.hierarchical_synthetic(key, prior_variance=prior_variance, **law)
    given = Clients.from_samples(truth.samples).restrict(clients=clients, samples=samples)

    def error(frames):
        errors = metrics.expected_reconstruction_error(
            frames, truth.local, law["noise_variance"], relative=True, per_client=True
        )
        return jnp.vdot(given.weights, errors)

    return {name: error(frames) for name, frames in learn(given, key, prior_variance).items()}


def _read(arguments: argparse.Namespace, learn: Callable) -> Source:
    """One split into training and held-out samples for each seed, that of `jaxfed fit`."""
    if arguments.held_out == 0:
        raise ValueError("--held-out: wanted a share above 0, which the error is measured on")
    keys = [jax.random.split(jax.random.key(seed))[0] for seed in range(arguments.seeds)]
    splits = [_pca._read(arguments, key) for key in keys]
    train, held_out = (
        stack([Clients.from_samples(getattr(split, part)) for split in splits])
        for part in ("train", "held_out")
    )
    most = int(np.max(train.data.count))
    label = "residual of held-out samples (% of their energy)"
    return Source(Partial(_held_out_errors, learn, train, held_out), most, len(train), label)


def _held_out_errors(learn, train, held_out, *, prior_variance, samples, clients, seed):
    """Shares of the held-out samples' energy that are in no component."""
    train, held_out = jax.tree.map(lambda x: x[seed], (train, held_out))
    given = train.restrict(clients=clients, samples=samples)
    values, counts = held_out.data.values, held_out.data.count
    energies = jnp.sum(values**2, axis=(1, 2)) / counts

    def error(frames):
        left = metrics.reconstruction_error(values, None, frames, counts, per_client=True)
        return 100 * jnp.vdot(given.weights, left) / jnp.vdot(given.weights, energies)

    learned = learn(given, jax.random.key(seed), prior_variance)
    return {name: error(frames) for name, frames in learned.items()}
