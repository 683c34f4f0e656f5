"""Accuracy of a linear classifier by rounds and by bits, quantized and not."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxfed import Personalized, Solution, fit
from jaxfed import channel as channels
from jaxfed.data import NonlinearViews, nonlinear_views_synthetic
from jaxfed.gcca import DeepMaxVar, Views
from jaxfed.linalg import polar
from jaxfed.metrics import svm_accuracy
from papers.drawing import curves as curves_drawn
from papers.gcca import _deep as deep
from papers.gcca._linear import saved
from papers.report import Cell, Found, Labels
from papers.runs import Seeds

RATIO, SHARE = "compression ratio", "share of the bits sent"
GOAL = 0.9
CLASSIFIED = 2000  # new entities, half of them to learn a classifier from
ROUNDS = 50


def run(seeds: Seeds, *, scale: float = 1.0, rounds: int = ROUNDS) -> Found:
    """Learn with both channels and both scales of the networks' outputs."""
    entities = deep.entities_at(scale)
    measured: dict[Labels, list[float]] = {}
    curves: dict[str, list[Any]] = {}
    per_variable: dict[str, Any] = {}
    for seed in seeds:
        train, test, key = jax.random.split(jax.random.key(seed), 3)
        views = deep.views_of(nonlinear_views_synthetic(key=train, entities=entities))
        others = nonlinear_views_synthetic(key=test, entities=CLASSIFIED)
        for scaling in (deep.TEXT, deep.PROGRAMS):
            at = {}
            for name, wire in deep.CHANNELS.items():
                algorithm = deep.algorithm_of(entities, scaling)
                start = _first(algorithm, views, key)
                if scaling == deep.PROGRAMS:
                    drawn = jax.random.normal(jax.random.fold_in(key, 1), start.shared.shape)
                    start = start._replace(shared=polar(drawn))
                accuracies, solution = _learning(algorithm, views, others, start, key, wire, rounds)
                at[name] = _position(accuracies)
                for quantity, value in (
                    (f"accuracy after {rounds} rounds", accuracies[-1]),
                    (f"rounds to {GOAL:.0%}", at[name]),
                ):
                    measured.setdefault((scaling, name, quantity), []).append(value)
                curves.setdefault(f"{name}, {scaling}", []).append(accuracies)
                up, down = (solution.history[f"bits_{way}"] for way in ("up", "down"))
                # Before the rounds one message travels each way, through the same channel.
                per_variable[name] = np.append(down[0], up) / (entities * deep.RANK)
            ratio = saved(at[deep.QUANTIZED], at[deep.FULL], deep.BITS)
            measured.setdefault((scaling, deep.QUANTIZED, RATIO), []).append(ratio)
            share = float(per_variable[deep.QUANTIZED][-1] / per_variable[deep.FULL][-1])
            measured.setdefault((scaling, deep.QUANTIZED, SHARE), []).append(share)
    means = {name: np.mean(values, axis=0) for name, values in curves.items()}
    positions = 1 + np.arange(rounds + 1)
    for (scaling, *others), values in measured.items():
        if scaling == deep.PROGRAMS and others[-1] != SHARE and entities < deep.ENTITIES:
            reason = "nothing is published of fewer entities"
            measured[scaling, *others] = Cell(values, incomparable=reason)
    return Found(
        measured,
        notes=[
            *deep.scaled(entities, rounds),
            f"{CLASSIFIED} entities that nothing was learned from, half of them to learn the "
            "classifier from. The paper averages ten trials and draws its curves.",
        ],
        figures={
            "figure11": curves_drawn(
                {
                    ("", "position", "accuracy"): {
                        name: (positions, y) for name, y in means.items()
                    },
                    ("", "bits per variable", "accuracy"): {
                        name: (per_variable[name.split(",")[0]], y) for name, y in means.items()
                    },
                },
                ("log", "linear"),
            )
        },
        arrays={name: np.stack(values) for name, values in curves.items()}
        | {f"bits per variable | {name}": bits for name, bits in per_variable.items()},
    )


@jax.jit
def _first(algorithm: DeepMaxVar, views: Views, key: Any) -> Personalized:
    """Representation and networks before the first round."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(views.ids)
    first = jax.vmap(lambda key, view: algorithm.first_message(key, view, None))(keys, views.data)
    like = jax.eval_shape(lambda view: jax.tree.map(lambda x: x[0], view), views.data)
    shared = algorithm.server_init(key, first.mean(0), like, None)

    def network(key, view):
        return algorithm.client_result(shared, algorithm.client_init(key, shared, view, None), view)

    return Personalized(shared, jax.vmap(network)(keys, views.data))


def _learning(
    algorithm: DeepMaxVar,
    views: Views,
    others: NonlinearViews,
    warm_start: Personalized,
    key: Any,
    wire: channels.Channel,
    rounds: int,
) -> tuple[list[float], Solution]:
    """The classifier's accuracies at the start and after each round, and the run."""
    validation, labels, half = deep.views_of(others), np.asarray(others.labels), CLASSIFIED // 2

    def accuracy(local: Any) -> float:
        rows = deep.represented(algorithm, local, validation) * CLASSIFIED**0.5
        return svm_accuracy(rows[:half], labels[:half], rows[half:], labels[half:])

    accuracies = [accuracy(warm_start.local)]

    def note(solution: Solution) -> None:
        accuracies.append(accuracy(solution.result.local))

    solution = fit(
        algorithm,
        views,
        rounds=rounds,
        key=key,
        channel=wire,
        warm_start=warm_start,
        callbacks=[note],
        rounds_per_chunk=1,
    )
    return accuracies, solution


def _position(accuracies: Sequence[float]) -> float:
    """The position, counted from 1, of the first that reaches the goal; infinity without one."""
    reached = np.flatnonzero(np.asarray(accuracies) >= GOAL)
    return float(reached[0] + 1) if len(reached) else np.inf
