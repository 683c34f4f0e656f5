"""Six views of handwritten digits: cost, rounds and classification, by bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxfed import Personalized, fit
from jaxfed import channel as channels
from jaxfed._optional import require
from jaxfed.gcca import MVLSA, MaxVar, cost, optimum
from papers.gcca._digits import OFF, SPLITS, off, read_digits, splits
from papers.gcca._linear import FULL, first_at
from papers.report import Found, Labels
from papers.runs import Seeds


def svm_accuracies(
    shared: Any, labels: Int[np.ndarray, " entities"], seed: int
) -> Float[np.ndarray, " splits"]:
    """Of a linear support vector machine on the representation, for each split."""
    svm = require("sklearn.svm", extra="data")
    rows = np.asarray(shared) * len(labels) ** 0.5
    scores = []
    for test, train in splits(len(labels), seed):
        classifier = svm.SVC(kernel="linear").fit(rows[train], labels[train])
        scores.append(float(classifier.score(rows[test], labels[test])))
    return np.array(scores)


def _measure(views, labels, rank, bits, seeds, rounds, measured, arrays) -> None:
    """Everything for one rank, into `measured` and `arrays`."""

    def note(name: str, quantity: str, value: Any) -> None:
        measured.setdefault((rank, name, quantity), []).append(float(value))

    best = jax.jit(optimum, static_argnums=1)(views, rank)
    key = jax.random.key(0)
    start = fit(MVLSA(rank, view_rank=rank), views, rounds=1, key=key)

    def metrics(result):
        return {"cost": cost(views, *result)}

    wires = {FULL: None} | {f"{b} bits": channels.difference(channels.quantize(b)) for b in bits}

    def run(solver: str, wire: channels.Channel, seed: int) -> tuple[Personalized, np.ndarray]:
        algorithm = MaxVar(rank, solver="exact" if solver == "exact" else "gradient", memory=0)
        solution = fit(
            algorithm,
            views,
            rounds=rounds,
            key=jax.random.key(seed),
            warm_start=start,
            channel=wire,
            metrics=metrics,
        )
        costs = np.append(cost(views, *start.result), solution.history["cost"])
        return solution.result, costs

    # Nothing is random in full precision: one run for all seeds.
    exactly = {solver: run(solver, channels.lossless(), 0) for solver in ("steps", "exact")}
    for seed in seeds:
        for name, found in (("pooled optimum", best), ("warm start", start.result)):
            note(name, "cost", cost(views, found.shared, found.local))
            note(name, "accuracy", svm_accuracies(found.shared, labels, seed).mean())
        of_full = svm_accuracies(exactly["exact"][0].shared, labels, seed)
        for name, wire in wires.items():
            for solver in ("steps", "exact"):  # what follows is of the last
                result, costs = exactly[solver] if wire is None else run(solver, wire, seed)
                arrays[f"{rank} | {solver}, {name} | seed {seed}"] = costs
                if solver == "steps":
                    note(f"steps, {name}", "cost / least", costs[-1] / best.cost)
            position = first_at(costs, 1.01 * float(best.cost))
            note(f"exact, {name}", "rounds to 1.01x", position)
            accuracies = svm_accuracies(result.shared, labels, seed)
            note(f"exact, {name}", "accuracy", accuracies.mean())
            if wire is not None:
                note(f"exact, {name}", OFF, off(accuracies, of_full, len(labels)))


def run(
    seeds: Seeds,
    *,
    data: Path | None = None,
    rounds: int = 100,
    ranks: Sequence[int] = (10, 15, 20),
    bits: Sequence[int] = (3, 4),
) -> Found:
    """All ranks, maps and messages."""
    with jax.enable_x64(True):
        views, labels = read_digits(data)
        measured: dict[Labels, list[float]] = {}
        arrays: dict[str, Any] = {}
        for rank in ranks:
            _measure(views, labels, rank, bits, seeds, rounds, measured, arrays)
    return Found(
        measured,
        notes=[
            f"{rounds} rounds from the one-round start with views cut to rank K; accuracy of a "
            f"linear support vector machine on 30 per cent of the entities, {SPLITS} splits a "
            "seed. `steps` are 10 gradient steps a round, `exact` the least-squares map."
        ],
        arrays=arrays,
    )
