"""AJIVE: how near the joint and the individual parts of two views come to the true ones.

The toy example of Feng, Jiang, Hannig & Marron (2018), Section 1.1 and Figure 2: 100 entities, a
view of 100 and one of 10,000 features, one joint direction, one and two individual ones, noise of
the signals' size, the first view in units 5,000 times as large. JIVE (Lock, Hoadley, Marron & Nobel
2013) fits both parts to all views pooled, by turns, with the numbers of directions given; `MVLSA`
has joint scores alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxfed as jf
from jaxfed.gcca import AJIVE, MVLSA, Views, joint_rank
from papers.intervals import at_least, near
from papers.report import Found, Labels
from papers.runs import Seeds

ENTITIES, FEATURES, RANKS, UNIT = 100, (100, 10_000), (2, 3), 5000.0
GENEROUS = 2, 10  # signal ranks that reach far into the noise of the second view
DRAWS = 100  # of random directions, for the bounds of the rule
SCORES = "joint scores, sine"


class Toy(NamedTuple):
    """A draw: centred views, and their true parts."""

    views: list[np.ndarray]
    joint: list[np.ndarray]
    individual: list[np.ndarray]
    scores: np.ndarray  # the joint ones, of norm one


def steps(*heights: float) -> np.ndarray:
    """A step function of the entities, in pieces of equal length."""
    return np.repeat(heights, ENTITIES // len(heights)).astype(float)


def draw(seed: int) -> Toy:
    """The views of the paper's Figure 2."""
    rng = np.random.default_rng(seed)
    half, (dx, dy) = steps(-1, 1), FEATURES
    joint = [
        UNIT * np.outer(half, np.arange(dx) < dx // 2),
        np.outer(-half, np.arange(dy) >= 4 * dy // 5),
    ]
    first = np.arange(dy) < dy // 2
    individual = [
        UNIT * np.outer(steps(1, -1, 1, -1), np.ones(dx)),
        np.outer(steps(-1, 1, 0, -1, 1), first) + np.outer(steps(1, -1, -1, 1), ~first),
    ]
    noise = [UNIT * rng.normal(size=(ENTITIES, dx)), rng.normal(size=(ENTITIES, dy))]
    views = [sum(parts) for parts in zip(joint, individual, noise, strict=True)]
    scores = half[:, None] / np.linalg.norm(half)
    return Toy([x - x.mean(0) for x in views], joint, individual, scores)


class Parts(NamedTuple):
    """Joint scores, and both parts of each view where a method has them."""

    scores: np.ndarray
    joint: list[np.ndarray] | None = None
    individual: list[np.ndarray] | None = None


def clients_of(views: list[np.ndarray]) -> Views:
    """In single precision, as users have them."""
    return Views.from_arrays([x.astype(np.float32) for x in views])


def by_ajive(views: list[np.ndarray]) -> Parts:
    """All by thresholds but the number of joint directions."""
    run = jf.fit(AJIVE(1, RANKS), clients_of(views), rounds=1, key=jax.random.key(0))
    shared, local = run.result
    parts = (
        [np.asarray(part)[:, :d] for part, d in zip(each, FEATURES, strict=True)]
        for each in (local.joint(shared), local.individual())
    )
    return Parts(np.asarray(shared.scores), *parts)


def by_mvlsa(views: list[np.ndarray]) -> Parts:
    """From as many directions of both views as the second has."""
    algorithm = MVLSA(1, view_rank=max(RANKS))
    run = jf.fit(algorithm, clients_of(views), rounds=1, key=jax.random.key(0))
    return Parts(np.asarray(run.result.shared))


def cut(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best approximation of a rank, and its left singular vectors."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank], u[:, :rank]


def by_jive(views: list[np.ndarray]) -> Parts:
    """Both parts by turns, of views of one norm, until they change by a millionth."""
    norms = [np.linalg.norm(x) for x in views]
    # In bases of the views' rows, of which there are as many as entities.
    bases = [np.linalg.qr(x.T)[0].T for x in views]
    scaled = [x @ b.T / norm for x, b, norm in zip(views, bases, norms, strict=True)]
    individual = [np.zeros_like(x) for x in scaled]
    change = np.inf
    while change > 1e-6:
        before, pooled = (
            individual,
            np.concatenate([x - a for x, a in zip(scaled, individual, strict=True)], axis=1),
        )
        both, scores = cut(pooled, 1)
        joint = np.split(both, [scaled[0].shape[1]], axis=1)
        individual = []
        for x, j, rank in zip(scaled, joint, RANKS, strict=True):
            rest = x - j
            individual.append(cut(rest - scores @ (scores.T @ rest), rank - 1)[0])
        change = max(np.linalg.norm(a - b) for a, b in zip(individual, before, strict=True))
    back = (
        [part @ b * norm for part, b, norm in zip(parts, bases, norms, strict=True)]
        for parts in (joint, individual)
    )
    return Parts(scores, *back)


def errors(toy: Toy, found: Parts) -> dict[str, float]:
    """Of the joint scores an angle, of the parts distances relative to the true norms."""
    inside = toy.scores.T @ found.scores
    row = {SCORES: float(np.sqrt(max(0.0, 1 - inside.item() ** 2)))}
    for name in ("joint", "individual"):
        parts, true = getattr(found, name), getattr(toy, name)
        if parts is not None:
            for view, part, whole in zip("XY", parts, true, strict=True):
                row[f"{view} {name}"] = float(np.linalg.norm(part - whole) / np.linalg.norm(whole))
    return row


METHODS: dict[str, Callable[[list[np.ndarray]], Parts]] = {
    "AJIVE": by_ajive,
    "JIVE, pooled": by_jive,
    "MVLSA": by_mvlsa,
}


def run(seeds: Seeds) -> Found:
    """Both parts by each method, and what the rule for the number of joint directions finds."""
    measured: dict[Labels, Any] = {}
    for seed in seeds:
        toy = draw(seed)
        for method, parts in METHODS.items():
            for quantity, error in errors(toy, parts(toy.views)).items():
                measured.setdefault((method, quantity), []).append(error)
        for ranks in (RANKS, GENEROUS):
            found = joint_rank(
                clients_of(toy.views), ranks, key=jax.random.key(seed), samples=DRAWS
            )
            values = {
                "joint directions": found.rank,
                "Wedin's bound": found.wedin_bound,
                "random bound": found.random_bound,
            }
            squares = found.squared_singular_values
            values |= {f"squared singular value {i + 1}": squares[i] for i in range(3)}
            for quantity, value in values.items():
                rule = f"rule, signal ranks {ranks[0]} and {ranks[1]}"
                measured.setdefault((rule, quantity), []).append(value)
    claims = {
        f"JIVE's error less AJIVE's, {quantity}": (
            np.subtract(measured["JIVE, pooled", quantity], measured["AJIVE", quantity]),
            at_least(0),
        )
        for quantity in (SCORES, "X joint", "Y joint")
    }
    claims["the rule finds the one joint direction"] = (
        measured[f"rule, signal ranks {RANKS[0]} and {RANKS[1]}", "joint directions"],
        near(1, 0),
    )
    return Found(measured, claims=claims)
