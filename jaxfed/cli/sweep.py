"""`jaxfed sweep ALGORITHM`: errors on a grid of settings, samples, clients and seeds."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import App
from jax.tree_util import Partial

from jaxfed import data, metrics, pca, plot
from jaxfed._checks import is_whole
from jaxfed._optional import require
from jaxfed.cli import _report
from jaxfed.cli._common import (
    OUTPUT,
    SAMPLES,
    TABLE,
    UNITS,
    files,
    held_out,
    rounds,
    whole_or_share,
)
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import define, option
from jaxfed.cli.fit.pca import read
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import exceed_single_precision, warn_of_units
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.rollout import rollout
from jaxfed.core.sweeps.grid import grid
from jaxfed.core.sweeps.sweep import stack

if TYPE_CHECKING:
    from xarray import Dataset

PICTURE = "sweep.png"


class SweepSource(NamedTuple):
    """Where clients come from, and how to measure the error of what they learn."""

    errors: Callable  # `errors(prior_variance, samples, clients, seed)`, by method name
    samples: int  # largest number of samples of a client
    clients: int  # number of clients
    label: str  # the measured quantity


NOISE = 0.5  # of simulated clients
VARIANCE = "prior variances of the components, also used to simulate clients"
AXES = [
    option("--prior-variance", list[float], VARIANCE),
    option("--samples", list[int], "numbers of samples of each client; default: all, or 20", None),
    option("--clients", list[int], "numbers of clients; default: all, or 100", None),
    option("--seeds", int, "number of draws or splits", 3),
]
MODEL = [
    option("--rank", float, "number of components", 10, converter=whole_or_share),
    option(
        "--noise-variance",
        float,
        "variance of the noise in each entry of a sample, if scores have variance one; default: "
        f"estimated, or {NOISE} for simulated clients, whose noise it is",
        None,
    ),
    rounds(30),
]
SOURCE = [
    option("--features", int, "number of features of simulated clients", 30),
    *files(f"{SAMPLES}; default: simulated clients", None),
    *TABLE,
    held_out("share of each client's samples on which errors are measured", 0.2),
    *UNITS,
]


# --- the command ---------------------------------------------------------------------------------


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    with ExitStack() as precision:
        _run(arguments, precision)


def _run(arguments: SimpleNamespace, precision: ExitStack) -> None:
    require("matplotlib.figure", extra="plot")
    require("xarray", extra="sweep")
    folder = Folder(arguments.out)
    folder.check(force=arguments.force, resumable=True)
    if not is_whole(arguments.rank):
        wanted = "a whole number, since a share of the variance takes another in each run"
        raise ValueError(f"--rank: wanted {wanted}, got {arguments.rank}")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds: wanted a positive number, got {arguments.seeds}")
    if arguments.data is None and arguments.noise_variance is None:
        arguments.noise_variance = NOISE
    learn = Partial(
        _learn, rank=arguments.rank, noise=arguments.noise_variance, rounds=arguments.rounds
    )
    if arguments.data is None:
        source = _simulated(arguments, learn)
    else:
        source = _read(arguments, learn, precision)
    axes = _axes(arguments, source)
    attempt = folder.resume_or_begin("sweep", force=arguments.force)
    sizes = " x ".join(f"{len(values)} {name.replace('_', ' ')}" for name, values in axes.items())
    print(f"Runs: {sizes}.")
    start_time = time.perf_counter()
    errors = attempt(
        partial(
            grid,
            source.errors,
            axes,
            runs_at_once=arguments.runs_at_once,
            progress=_report.on_terminal(),
            folder=folder.checkpoint,
        )
    )
    seconds = time.perf_counter() - start_time

    rows, printed = _table(errors)
    print(f"\n{source.label}, mean ± standard deviation over seeds:\n")
    _report.show(printed)
    print()
    many = (name for name, values in axes.items() if len(values) > 1 and name != "seed")
    along = next(many, "prior_variance")
    picture = plot.grid(errors, along, over="seed", label=source.label)
    arrays = {name: errors[name].values for name in axes}
    arrays |= {f"error {name}": values.values for name, values in errors.items()}
    summary = {"seconds": seconds, "error": source.label, "table": rows}
    _report.finish(folder, arguments, arrays, summary, {PICTURE: picture})


def _axes(arguments: SimpleNamespace, source: SweepSource) -> dict[str, Sequence[float]]:
    for variance in arguments.prior_variance:
        # Refuses values that are not positive, which the compiled function cannot do.
        pca.HierarchicalPCA(arguments.rank, arguments.noise_variance, variance)
    axes: dict[str, Sequence[float]] = {"prior_variance": arguments.prior_variance}
    for name, most in (("samples", source.samples), ("clients", source.clients)):
        axes[name] = getattr(arguments, name) or [most]
        for number in axes[name]:
            if not 1 <= number <= most:
                raise ValueError(f"--{name}: wanted numbers from 1 to {most}, got {number}")
    fewest = min(axes["samples"])
    if arguments.noise_variance is None and fewest <= arguments.rank:
        raise ValueError(
            f"--noise-variance: wanted a number for {fewest} samples, which {arguments.rank} "
            "components reproduce without noise, got none"
        )
    return axes | {"seed": range(arguments.seeds)}


def _table(errors: "Dataset") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each setting, as numbers and as text."""
    mean = errors.mean("seed", skipna=False)
    # A single seed has no standard deviation.
    sd = errors.std("seed", ddof=1, skipna=False) if errors.sizes["seed"] > 1 else mean * np.nan
    tables = (part.to_dataframe().reset_index().to_dict("records") for part in (mean, sd))
    rows, printed = [], []
    for values, spreads in zip(*tables, strict=True):
        setting = {str(name).replace("_", " "): values[name] for name in mean.sizes}
        rows.append(dict(setting))
        printed.append(dict(setting))
        for name in mean:
            value, spread = values[name], spreads[name]
            alone = np.isnan(spread)
            rows[-1] |= {name: value, f"{name}, sd": None if alone else spread}
            printed[-1][name] = f"{value:.4g}" if alone else f"{value:.4g} ± {spread:.1g}"
    return rows, printed


# --- the errors at one point ---------------------------------------------------------------------


def _learn(clients: Clients, key, prior_variance, *, rank, noise, rounds) -> Mapping[str, Any]:
    """Learn each client's components by every method, all of the same rank."""
    methods = {
        "Local": (pca.Local(rank), 1),
        "Pooled": (pca.Pooled(rank), 1),
        "HierarchicalPCA": (
            pca.HierarchicalPCA(rank, noise, prior_variance, solver="eigenvectors"),
            rounds,
        ),
    }
    frames = {}
    for name, (algorithm, length) in methods.items():
        result = rollout(algorithm, clients, rounds=length, key=key).result
        frames[name] = result.local
        if result.local is None:
            frames[name] = jnp.broadcast_to(result.shared, (len(clients), *result.shared.shape))
    return frames


def _simulated(arguments: SimpleNamespace, learn: Callable) -> SweepSource:
    # The largest sizes that are asked for. Smaller ones take the first samples and clients of the
    # same draw, so settings differ in nothing else.
    law = {
        "clients": max(arguments.clients or [100]),
        "samples": max(arguments.samples or [20]),
        "features": arguments.features,
        "rank": arguments.rank,
        "noise_variance": arguments.noise_variance,
    }
    errors = Partial(_simulated_errors, learn, law=law)
    label = "error over that of the true components"
    return SweepSource(errors, law["samples"], law["clients"], label)


def _simulated_errors(learn, *, prior_variance, samples, clients, seed, law):
    """Return the expected errors on new samples, relative to those of the true components."""
    key = jax.random.key(seed)
    truth = data.hierarchical_synthetic(key=key, prior_variance=prior_variance, **law)
    subset = Clients.from_samples(truth.samples).restrict(clients=clients, samples=samples)

    def error(frames):
        errors = metrics.expected_reconstruction_error(
            frames, truth.local, law["noise_variance"], relative=True, per_client=True
        )
        return jnp.vdot(subset.weights, errors)

    return {name: error(frames) for name, frames in learn(subset, key, prior_variance).items()}


def _read(arguments: SimpleNamespace, learn: Callable, precision: ExitStack) -> SweepSource:
    """Split the samples in the files as `jaxfed fit` does, once for each seed."""
    if arguments.held_out == 0:
        raise ValueError(
            "--held-out: wanted a share above 0, on which the error is measured, got 0"
        )
    keys = [jax.random.split(jax.random.key(seed))[0] for seed in range(arguments.seeds)]
    splits = [read(arguments, key, precision) for key in keys]
    parts = [split.train for split in splits], [split.held_out for split in splits]
    model = pca.Pooled(arguments.rank)
    # The clients are traced later, where nothing shows their units.
    if any(exceed_single_precision(model, Clients.from_samples(tables)) for tables in parts[0]):
        precision.enter_context(jax.enable_x64(True))
        parts = jax.tree.map(lambda x: np.asarray(x, np.float64), parts)
    warn_of_units(model, Clients.from_samples(parts[0][0]), "take tables in double precision")
    train, held_out = (stack(list(map(Clients.from_samples, part))) for part in parts)
    most = int(np.max(train.data.count))
    label = "residual of held-out samples (% of their energy)"
    return SweepSource(Partial(_held_out_errors, learn, train, held_out), most, len(train), label)


def _held_out_errors(learn, train, held_out, *, prior_variance, samples, clients, seed):
    """Return the shares of the held-out samples' energy outside all components."""
    train, held_out = jax.tree.map(lambda x: x[seed], (train, held_out))
    subset = train.restrict(clients=clients, samples=samples)
    values, counts = held_out.data.values, held_out.data.count
    energies = jnp.sum(values**2, axis=(1, 2)) / counts

    def error(frames):
        left = metrics.reconstruction_error(
            Personalized(None, frames), values, counts=counts, per_client=True
        )
        return 100 * jnp.vdot(subset.weights, left) / jnp.vdot(subset.weights, energies)

    all_frames = learn(subset, jax.random.key(seed), prior_variance)
    return {name: error(frames) for name, frames in all_frames.items()}


CHUNK = option("--runs-at-once", int, "number of runs side by side; 1 is the fastest on a CPU", 1)
command = App("sweep")
command.command(
    define(
        run,
        {
            "": [*OUTPUT, CHUNK],
            "Axes": AXES,
            "Model": MODEL,
            "Clients, simulated unless files are given": SOURCE,
        },
        "how much clients should share: HierarchicalPCA between Local and Pooled",
    ),
    name="hierarchicalpca",
)
