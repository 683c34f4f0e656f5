"""`jaxfed demo`: shared and local components of clients with different handwritten digits."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxfed import data, pca, plot
from jaxfed._optional import require
from jaxfed.cli import _evaluate, _report
from jaxfed.cli._common import FORCE
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import define, option
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution

SHARED_RANK, LOCAL_RANK = 10, 2
PICTURE = "demo.png"
IMAGE = (8, 8)


class Digits(NamedTuple):
    """Images of clients with one or two digits each, without the mean image."""

    train: list[Float[np.ndarray, "n_i 64"]]
    held_out: list[Float[np.ndarray, "n_i 64"]]
    classes: list[tuple[int, ...]]
    mean: Float[np.ndarray, " 64"]


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    # Fail before anything is computed.
    require("sklearn.datasets", extra="data")
    require("matplotlib.figure", extra="plot")
    folder = Folder(arguments.out)
    folder.check(force=arguments.force)
    key = jax.random.key(arguments.seed)
    digits = load_digits(key)
    sizes = [len(samples) for samples in digits.train]
    print(
        f"{len(sizes)} clients with one or two digits each and {min(sizes)} to {max(sizes)} images "
        f"of 8 x 8 pixels to learn from;\n{sum(map(len, digits.held_out))} more images are held "
        f"out. {SHARED_RANK} shared and {LOCAL_RANK} local components.\n"
    )
    solutions, held_out = fit_all(digits, key, arguments.rounds)
    rows = compare(solutions, Clients.from_samples(digits.train), held_out)
    best = min(rows, key=lambda row: row["residual, held out"])["method"]
    _report.show(rows)
    personalized = solutions["PerPCA"]
    for remark in personalized.remarks():
        print(f"\nPerPCA: {remark}")
    print(
        "\nresidual, in shared, in local: percent of the energy, the squared deviation from the "
        "mean image.\nmisalignment: 0 if some direction is in every client's local part, where it "
        f"does not belong.\nkB sent: in total by each client. Lowest held-out error: {best}.\n"
    )
    figure = picture(digits, personalized, rows)
    folder.begin()
    arrays = {**personalized.entries(), "mean": digits.mean}
    settings = {"seed": arguments.seed, "rounds": arguments.rounds}
    settings |= {"shared_rank": SHARED_RANK, "local_rank": LOCAL_RANK}
    summary = {"settings": settings, "classes": digits.classes, "table": rows}
    _report.finish(folder, arguments, arrays, summary, {PICTURE: figure})


def load_digits(key) -> Digits:
    """Split the digits over 50 clients: 30 with one class, 20 with two; hold 40 % of each out."""
    bundled = require("sklearn.datasets", extra="data").load_digits()
    pixels, labels = (bundled.data / 16).astype(np.float32), bundled.target
    keys = jax.random.split(key, 5)
    halves = data.partition_iid(pixels, labels, 2, key=keys[0])
    samples, classes = [], []
    for half, (clients, each) in enumerate([(30, 1), (20, 2)]):
        part = data.partition_by_class(
            halves.samples[half], halves.labels[half], clients, each, key=keys[1 + half]
        )
        samples += part.samples
        classes += [tuple(np.unique(labels).tolist()) for labels in part.labels]
    # Make clients unequal: drop a random part of their images, mostly a large one, but leave as
    # many as there are components.
    spare = [max(len(y) - 20, 0) for y in samples]
    chance = np.sqrt(jax.random.uniform(keys[3], (len(samples),)))
    dropped = [1 + int(u * count) for count, u in zip(spare, chance, strict=True)]
    samples, _ = data.train_test_split(samples, dropped, key=keys[3])
    train, held_out = data.train_test_split(samples, 0.4, key=keys[4])
    # A server can compute the mean from one sum and one count of each client.
    mean = np.concatenate(train).mean(axis=0)
    return Digits([y - mean for y in train], [y - mean for y in held_out], classes, mean)


def fit_all(digits: Digits, key, rounds: int) -> tuple[dict[str, Solution], Clients]:
    """Fit all methods with the same number of components per client; also return held-out data."""
    clients = Clients.from_samples(digits.train)
    held_out = Clients.from_samples(digits.held_out)
    rank = SHARED_RANK + LOCAL_RANK
    solutions = {
        "Local": fit(pca.Local(rank), clients, rounds=1, key=key),
        "Pooled": fit(pca.Pooled(rank), clients, rounds=1, key=key),
        "OneShot": fit(pca.OneShot(SHARED_RANK, LOCAL_RANK), clients, rounds=1, key=key),
    }
    solutions["PerPCA"] = fit(
        pca.PerPCA(SHARED_RANK, LOCAL_RANK),
        clients,
        rounds=rounds,
        key=key,
        warm_start=solutions["OneShot"],
        metrics=lambda result: {"held out": 100 * _evaluate.shares(result, held_out.data).residual},
        progress=_report.on_terminal(),
        rounds_per_chunk=max(1, rounds // 20),
    )
    return solutions, held_out


def compare(
    solutions: dict[str, Solution], train: Clients, held_out: Clients
) -> list[dict[str, Any]]:
    """Return the rows of the table, one for each method."""
    rows = []
    for name, solution in solutions.items():
        train_shares = _evaluate.shares(solution.result, train.data)
        held_out_shares = _evaluate.shares(solution.result, held_out.data)
        rows.append(
            {
                "method": name,
                "residual, training": 100 * float(train_shares.residual),
                "residual, held out": 100 * float(held_out_shares.residual),
                "in shared": 100 * float(train_shares.shared),
                "in local": 100 * float(train_shares.local),
                "misalignment": _evaluate.theta(solution.result),
                "kB sent": solution.history["bits_up"][-1] / 8e3,
            }
        )
    # PerPCA started from the solution of OneShot, which was sent first.
    rows[-1]["kB sent"] += rows[-2]["kB sent"]
    return rows


def picture(digits: Digits, solution: Solution, rows: Sequence[dict[str, Any]]) -> Any:
    """Draw shared components, some local ones, samples split into parts, and the convergence."""
    shared, local = (np.asarray(part) for part in solution.result)
    # For each digit, a client that has no other digits.
    owners = [digits.classes.index((digit,)) for digit in range(10)]
    matplotlib = require("matplotlib.figure", extra="plot")
    figure = matplotlib.Figure(figsize=(8.5, 6.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    figure.suptitle(
        f"Handwritten digits on {len(digits.train)} clients: what they share, what is their own",
        fontsize=13,
    )
    upper, middle, lower = figure.subfigures(3, 1, height_ratios=[1.1, 1.1, 4.0])
    principal = pca.principal_axes(shared, digits.train)
    plot.components({f"{SHARED_RANK} shared components": principal}, IMAGE, figure=upper)
    for digit, part in zip((0, 1, 2, 6, 7), middle.subfigures(1, 5, wspace=0.02), strict=True):
        client = owners[digit]
        principal = pca.principal_axes(local[client], [digits.train[client]])
        plot.components({f"local, {digit}s": principal}, IMAGE, figure=part)

    left, right = lower.subfigures(1, 2, width_ratios=[1.5, 1.1], wspace=0.03)
    chosen = [owners[digit] for digit in (0, 1, 2, 4, 6, 7)]
    samples, bases = np.stack([digits.held_out[client][0] for client in chosen]), local[chosen]
    plot.separation(
        samples + digits.mean,
        samples @ shared @ shared.T,
        np.einsum("kd,kdr,ker->ke", samples, bases, bases),
        IMAGE,
        mean=digits.mean,
        figure=left,
    )
    left.suptitle("held-out images split into parts", fontsize=10, x=0.01, ha="left")
    levels = {row["method"]: row["residual, held out"] for row in rows[:-1]}
    plot.convergence(
        {"PerPCA": solution.history["held out"]},
        ["PerPCA"],
        levels=levels,
        label="held-out error (% of energy)",
        figure=right,
    )
    return figure


OPTIONS = [
    option("--out", Path, "folder for the results", Path("jaxfed-demo")),
    FORCE,
    option("--seed", int, "seed of the split", 0),
    option("--rounds", int, "number of rounds of personalized PCA", 60),
]
command = define(run, {"": OPTIONS})
