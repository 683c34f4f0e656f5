"""`jaxfed fit inmf`: shared and local non-negative components of samples."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxfed import nmf, plot
from jaxfed.cli._common import (
    BACKEND,
    BITS,
    SAMPLES,
    TABLE,
    channel_of,
    files,
    held_out,
    read_samples,
    rounds,
    share_of,
)
from jaxfed.cli._options import call, define, first_line, option, options_of
from jaxfed.cli.fit import _run
from jaxfed.cli.fit._run import CHECKPOINTS, PARTICIPATION, ROBUST, RUN, TOL
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.solution import Solution

PICTURES = ("convergence.png",)
SCALE = (
    "divide each feature of each client's samples by its root mean square (rms), as LIGER does, "
    "or not (none)"
)


class Split(NamedTuple):
    """The clients' samples, scaled as requested; NaN for missing entries."""

    names: list[str]  # of the clients
    train: list[Float[np.ndarray, "samples_i features"]]  # held-out entries are NaN
    all: list[Float[np.ndarray, "samples_i features"]]
    features: list[str] | None  # their names


def commands() -> dict[str, Callable[..., bool | None]]:
    """Describe the command."""
    options = {
        "": [
            *files(SAMPLES),
            *RUN,
            *TABLE,
            option("--scale", ("none", "rms"), SCALE, "none"),
            held_out("share of the entries, drawn at random, to test on; 0 for none", 0.0),
            BITS,
            *BACKEND,
        ],
        "Algorithm": options_of(nmf.INMF),
        "Rounds": [rounds(100), TOL, PARTICIPATION, CHECKPOINTS],
        "Faulty or malicious clients": ROBUST,
    }
    run = partial(_run.run, prepare=prepare)
    return {"inmf": define(run, options, first_line(nmf.INMF), algorithm="inmf")}


def prepare(arguments: SimpleNamespace, precision: ExitStack) -> _run.FitInputs:
    """Make the algorithm, and read the samples."""
    algorithm, channel = call(arguments, nmf.INMF), channel_of(arguments)
    split = read(arguments, precision)
    named = {"names": split.names, "features": split.features}
    clients = Clients.from_samples(split.train, missing="mask", **named)
    return _run.FitInputs(
        algorithm,
        clients,
        split.names,
        f"{len(clients)} clients, {clients.features} features, {sum(map(len, split.train))} "
        "samples.",
        jax.random.key(arguments.seed),
        partial(_evaluated, split=split, penalty=arguments.penalty),
        options={"channel": channel},
    )


def read(arguments: SimpleNamespace, precision: ExitStack) -> Split:
    """Read and scale the samples in `--data`, and hold out entries."""
    share = share_of(arguments)
    tables, names, features = read_samples(arguments, precision, incomplete=True)
    if arguments.scale == "rms":
        sizes = [np.sqrt(np.nanmean(x**2, axis=0)) for x in tables]
        tables = [x / np.where(size > 0, size, 1) for x, size in zip(tables, sizes, strict=True)]
    rng = np.random.default_rng(arguments.seed)
    train = []
    for table in tables:
        draws = np.where(np.isnan(table), 1, rng.random(table.shape))
        # One entry of each sample remains.
        draws[np.arange(len(table)), np.argmax(np.where(draws < 1, draws, -1), axis=1)] = 1
        train.append(np.where(draws < share, np.nan, table))
    return Split(names, train, tables, features)


def _evaluated(solution: Solution, *, split: Split, penalty: float) -> _run.Findings:
    shared, local = (np.asarray(part) for part in solution.result)
    loadings = [np.asarray(x) for x in nmf.transform(solution.result, split.train, penalty=penalty)]
    fitted = [h @ (shared + v).T for h, v in zip(loadings, local, strict=True)]
    own = sum(float(np.sum((h @ v.T) ** 2)) for h, v in zip(loadings, local, strict=True))
    observed, found = np.concatenate(split.all), np.concatenate(fitted)
    seen = ~np.isnan(np.concatenate(split.train))
    unseen = ~np.isnan(observed) & ~seen

    def error(chosen: np.ndarray) -> float | None:
        """Return the error on some entries, in percent."""
        if not chosen.any():
            return None
        energy = float(np.sum(observed[chosen] ** 2)) or 1.0
        return 100 * float(np.sum((found - observed)[chosen] ** 2)) / energy

    quantities = {
        "objective (mean over clients)": float(solution.history["objective"][-1]),
        "error on training entries (% of their energy)": error(seen),
        "error on held-out entries (% of their energy)": error(unseen),
        "in clients' own parts (% of the fitted energy)": 100 * own / (np.sum(found**2) or 1),
    }
    arrays = {
        "client": np.repeat(np.arange(len(split.names)), list(map(len, split.all))),
        "loadings": np.concatenate(loadings),
    }
    return _run.Findings(quantities, {PICTURES[0]: plot.convergence(solution.history)}, arrays)
