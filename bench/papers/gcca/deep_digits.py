"""Six views of handwritten digits: classification from what networks have in common."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxfed import fit
from jaxfed._optional import require
from jaxfed.gcca import MVLSA, DeepMaxVar, MaxVar, Views
from jaxfed.metrics import svm_accuracy
from jaxfed.models import Perceptron
from jaxfed.plot.drawing import colour
from papers.drawing import graphs
from papers.gcca._deep import ADAM, BITS, CHANNELS, FULL, QUANTIZED
from papers.gcca._digits import NAMES, OFF, SPLITS, off, read_digits, splits
from papers.gcca._linear import first_at, saved
from papers.report import Found, Labels, ahead
from papers.runs import Seeds

GOAL = 0.95
AT, RATIO = f"rounds to {GOAL:.0%}", f"compression ratio at {GOAL:.0%}"
TOGETHER, LINEAR, ONE_ROUND = "all features side by side", "linear GCCA", "linear GCCA, one round"


def run(
    seeds: Seeds,
    *,
    data: Path | None = None,
    rounds: int = 20,
    rank: int = 20,
    hidden: Sequence[int] = (64,),
    inner_epochs: int = 3,
    batch_size: int = 250,
) -> Found:
    """Learn linear maps once and networks for each seed, and classify with all of them."""
    measured: dict[Labels, list[float]] = {}

    def note(name: str, quantity: str, value: Any) -> None:
        measured.setdefault((name, quantity), []).append(float(value))

    # The views' second moments have condition numbers up to 1e8, which the linear maps must invert.
    with jax.enable_x64(True):
        views, labels = read_digits(data)
        widths = np.asarray(views.data.count).astype(int)
        tables = [
            np.asarray(x[:, :width]) for x, width in zip(views.data.values, widths, strict=True)
        ]
        key = jax.random.key(0)
        start = fit(MVLSA(rank, view_rank=rank), views, rounds=1, key=key)
        exact = MaxVar(rank, solver="exact", memory=0)
        linear = fit(exact, views, rounds=100, key=key, warm_start=start)
    root = len(labels) ** 0.5
    known = dict(zip(NAMES, tables, strict=True)) | {
        TOGETHER: np.concatenate(tables, axis=1),
        ONE_ROUND: np.asarray(start.result.shared) * root,
        LINEAR: np.asarray(linear.result.shared) * root,
    }
    views = Views.from_arrays([x.astype(np.float32) for x in tables])
    algorithm = DeepMaxVar(
        functools.partial(Perceptron, outputs=rank, hidden=tuple(hidden)),
        ADAM,
        rank=rank,
        inner_epochs=inner_epochs,
        batch_size=batch_size,
    )
    arrays: dict[str, Any] = {}
    embedded: dict[str, Any] = {f"a raw view, {NAMES[0]}": tables[0]}  # of the first seed
    for seed in seeds:
        for name, rows in known.items():
            note(name, "accuracy", np.mean(_accuracies(rows, labels, seed)))
        found, sent, at = {}, {}, {}
        for name, wire in CHANNELS.items():
            each = []  # round's accuracies
            solution = fit(
                algorithm,
                views,
                rounds=rounds,
                key=jax.random.key(seed),
                channel=wire,
                callbacks=[
                    lambda solution, each=each, seed=seed: each.append(
                        _accuracies(solution.result.shared * root, labels, seed)
                    )
                ],
                rounds_per_chunk=1,
            )
            found[name] = each[-1]
            embedded.setdefault(name, np.asarray(solution.result.shared * root))
            # Upside down, and a round more for the start, which is not classified.
            at[name] = 1 + first_at(-np.mean(each, axis=1), -GOAL)
            note(name, AT, at[name])
            arrays[f"{name} | accuracy | seed {seed}"] = np.mean(each, axis=1)
            history = solution.history
            sent[name] = history["bits_up"][-1] + history["bits_down"][-1]
            note(name, "accuracy", np.mean(found[name]))
            arrays[f"{name} | objective | seed {seed}"] = history["objective"]
        note(QUANTIZED, OFF, off(found[QUANTIZED], found[FULL], len(labels)))
        note(QUANTIZED, "share of the bits", sent[QUANTIZED] / sent[FULL])
        note(QUANTIZED, RATIO, saved(at[QUANTIZED], at[FULL], BITS))
    raw = np.mean([measured[name, "accuracy"] for name in NAMES], axis=0)
    above = {
        (name, "accuracy above single views', by"): ahead(raw, measured[name, "accuracy"], 0.04)
        for name in CHANNELS
    }
    sizes = "-".join(map(str, (*hidden, rank)))
    return Found(
        measured | above,
        notes=[
            f"Accuracy of a linear support vector machine on 30 per cent of the entities, {SPLITS} "
            "splits a seed. Representations are of all entities: no label is in them.",
            f"Networks d-{sizes}, batches of {batch_size}, {inner_epochs} passes a round, {rounds} "
            "rounds, Adam with step size 0.001. The linear methods have the same rank.",
        ],
        figures={"figure12": functools.partial(_draw_points, embedded, labels)},
        arrays=arrays,
    )


def _draw_points(embedded: Mapping[str, Any], labels: Int[np.ndarray, " n"]) -> Any:
    """The paper's picture: a plane by t-SNE, coloured by what no method has seen."""
    manifold, figure = require("sklearn.manifold", extra="data"), None
    titles = [(name, "", "") for name in embedded]
    for rows, axes in zip(embedded.values(), graphs(titles, 2.9), strict=True):
        x, y = manifold.TSNE(init="pca", random_state=0).fit_transform(rows).T
        for digit in np.unique(labels):
            at = labels == digit
            axes.scatter(x[at], y[at], s=2, color=colour(int(digit)), linewidths=0)
        figure = axes.figure
    return figure


def _accuracies(
    rows: Any, labels: Int[np.ndarray, " n"], seed: int
) -> Float[np.ndarray, " splits"]:
    """Of a linear classifier, for each split into 70 per cent to learn from and the rest."""
    table, found = np.asarray(rows), []
    for test, train in splits(len(labels), seed):
        found.append(svm_accuracy(table[train], labels[train], table[test], labels[test]))
    return np.array(found)
