"""How near the joint and the individual parts of two views come to the true ones.

    python -m bench.tables.joint_parts

The toy example of AJIVE's paper: 100 entities, a view of 100 and one of 10,000 features, one joint
direction, one and two individual ones, noise of the signals' size, the first view in units 5,000
times as large. JIVE (Lock, Hoadley, Marron & Nobel 2013) fits both parts to all views pooled, by
turns, with the numbers of directions given; `MVLSA` has joint scores alone. Errors are relative to
the norm of the true part, medians over the draws.

Source: Feng, Jiang, Hannig & Marron (2018), Section 1.1 and Figure 2.
"""

from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf
from bench.common import machine, table

ENTITIES, FEATURES, RANKS, SEEDS, UNIT = 100, (100, 10_000), (2, 3), 5, 5000.0


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


class Found(NamedTuple):
    """Joint scores, and both parts of each view where a method has them."""

    scores: np.ndarray
    joint: list[np.ndarray] | None = None
    individual: list[np.ndarray] | None = None


def clients_of(views: list[np.ndarray]) -> jf.gcca.Views:
    """In single precision, as users have them."""
    return jf.gcca.Views.from_arrays([x.astype(np.float32) for x in views])


def by_ajive(views: list[np.ndarray]) -> Found:
    """All by thresholds but the number of joint directions."""
    run = jf.fit(jf.gcca.AJIVE(1, RANKS), clients_of(views), rounds=1, key=jax.random.key(0))
    shared, local = run.result
    parts = (
        [np.asarray(part)[:, :d] for part, d in zip(each, FEATURES, strict=True)]
        for each in (local.joint(shared), local.individual())
    )
    return Found(np.asarray(shared.scores), *parts)


def by_mvlsa(views: list[np.ndarray]) -> Found:
    """From as many directions of both views as the second has."""
    algorithm = jf.gcca.MVLSA(1, view_rank=max(RANKS))
    run = jf.fit(algorithm, clients_of(views), rounds=1, key=jax.random.key(0))
    return Found(np.asarray(run.result.shared))


def cut(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best approximation of a rank, and its left singular vectors."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank], u[:, :rank]


def by_jive(views: list[np.ndarray]) -> Found:
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
    return Found(scores, *back)


def errors(toy: Toy, found: Found) -> dict[str, float]:
    """Of the joint scores an angle, of parts their relative distance."""
    inside = toy.scores.T @ found.scores
    row = {"joint scores, sine": float(np.sqrt(max(0.0, 1 - inside.item() ** 2)))}
    for name in ("joint", "individual"):
        parts, true = getattr(found, name), getattr(toy, name)
        for i, view in enumerate("XY"):
            off = np.nan if parts is None else np.linalg.norm(parts[i] - true[i])
            row[f"{view} {name}"] = float(off / np.linalg.norm(true[i]))
    return row


METHODS = {"`AJIVE`": by_ajive, "JIVE, pooled": by_jive, "`MVLSA`": by_mvlsa}


def rows() -> list[dict[str, object]]:
    """One row a method."""
    toys = [draw(seed) for seed in range(SEEDS)]
    result = []
    for name, method in METHODS.items():
        every = [errors(toy, method(toy.views)) for toy in toys]
        medians = {column: float(np.median([row[column] for row in every])) for column in every[0]}
        shown = {column: "" if np.isnan(x) else f"{x:.3f}" for column, x in medians.items()}
        result.append({"method": name} | shown)
    return result


def ranks() -> list[dict[str, object]]:
    """What the rule finds, by the signal ranks that are given."""
    result = []
    for given in ((2, 3), (2, 10)):
        found = [
            jf.gcca.joint_rank(clients_of(draw(seed).views), given, key=jax.random.key(seed))
            for seed in range(SEEDS)
        ]
        values = np.median([x.squared_singular_values[:3] for x in found], axis=0)
        result.append(
            {
                "signal ranks": f"{given[0]}, {given[1]}",
                "draws with one joint direction": f"{sum(x.rank == 1 for x in found)} of {SEEDS}",
                "first squared singular values": ", ".join(f"{x:.2f}" for x in values),
                "Wedin's bound": f"{np.median([x.wedin_bound for x in found]):.2f}",
                "random bound": f"{np.median([x.random_bound for x in found]):.2f}",
            }
        )
    return result


if __name__ == "__main__":
    print(machine())
    print(table(rows()))
    print(table(ranks()))
