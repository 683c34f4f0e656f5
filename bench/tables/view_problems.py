"""Ordinary sets of views of which the least cost is known, in single precision.

All views are three latent variables that are mixed at random, and noise of deviation 0.5.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float

import jaxfed as jf

RANK = 3
Table = Float[np.ndarray, "entities columns"]


class Problem(NamedTuple):
    """Views, and what they were drawn from."""

    views: jf.gcca.Views
    latent: Table


def easy(seed: int) -> Problem:
    """Four views of 12 features, 300 entities."""
    latent, tables, _ = _drawn(seed, 300, 12, 4)
    return Problem(_views(tables), latent)


def ill_conditioned(seed: int) -> Problem:
    """The same, with features scaled by 1 to 1e-3, in another order in each view."""
    latent, tables, rng = _drawn(seed, 300, 12, 4)
    scales = [rng.permutation(np.logspace(0, -3, 12)) for _ in tables]
    return Problem(_views([x * s for x, s in zip(tables, scales, strict=True)]), latent)


def tall(seed: int) -> Problem:
    """Three views of four features, 20,000 entities, with features scaled by 1 to 1e-3."""
    latent, tables, _ = _drawn(seed, 20_000, 4, 3)
    return Problem(_views([x * np.logspace(0, -3, 4) for x in tables]), latent)


def gaps(seed: int) -> Problem:
    """The easy views, each without 60 % of the entities; of no entity all rows are missing."""
    latent, tables, rng = _drawn(seed, 300, 12, 4)
    seen = rng.random((len(tables), len(latent))) >= 0.6
    nobody = np.flatnonzero(~seen.any(0))
    seen[rng.integers(len(tables), size=len(nobody)), nobody] = True
    rows = [x[own] for x, own in zip(tables, seen, strict=True)]
    return Problem(_views(rows, jf.gcca.align([np.flatnonzero(own) for own in seen])), latent)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "easy": easy,
    "ill-conditioned": ill_conditioned,
    "tall": tall,
    "gaps": gaps,
}


def in_units(views: jf.gcca.Views, units: list[float]) -> jf.gcca.Views:
    """Multiply each view of complete views by a number."""
    return jf.gcca.Views.from_arrays(
        [np.asarray(x) * np.float32(u) for x, u in zip(views.data.values, units, strict=True)]
    )


def least_cost(views: jf.gcca.Views, rank: int = RANK) -> float:
    """Compute the cost of the closed form in double precision."""
    root, bases = _bases(views)
    together = np.concatenate([basis / root for basis in bases], axis=1)
    values = np.linalg.svd(together, compute_uv=False)[:rank] ** 2
    return float(len(bases) * rank - values.sum()) / 2


def cost_of(views: jf.gcca.Views, shared: ArrayLike) -> float:
    """Compute the cost of a representation, with the best maps, in double precision.

    The representation is first made feasible, as that of a method with another constraint is not.
    """
    root, bases = _bases(views)
    shared = np.linalg.qr(root * np.asarray(shared, np.float64))[0] / root
    # The rows of a basis are zero where its client has seen nothing.
    seen = [1.0] * len(bases) if views.data.observed is None else np.asarray(views.data.observed)
    misfits = [
        np.reshape(own, (-1, 1)) * shared - basis @ (basis.T @ shared)
        for own, basis in zip(seen, bases, strict=True)
    ]
    return sum(float(np.sum(x**2)) for x in misfits) / 2


def recovered(problem: Problem, shared: ArrayLike) -> float:
    """Compute the share of the latent variables' variance that is linear in a representation."""
    latent = problem.latent - problem.latent.mean(0)
    known = np.c_[np.asarray(shared, np.float64), np.ones(len(latent))]
    left = latent - known @ np.linalg.lstsq(known, latent)[0]
    return 1 - float(np.sum(left**2) / np.sum(latent**2))


def _drawn(
    seed: int, entities: int, features: int, views: int
) -> tuple[Table, list[Table], np.random.Generator]:
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(entities, RANK))
    tables = []
    for _ in range(views):
        signal = latent @ rng.normal(size=(RANK, features))
        tables.append(signal + 0.5 * rng.normal(size=signal.shape))
    return latent, tables, rng


def _views(tables: list[Table], alignment: jf.gcca.Alignment | None = None) -> jf.gcca.Views:
    single = [x.astype(np.float32) for x in tables]
    return jf.gcca.Views.from_arrays(single, center=True, alignment=alignment)


def _bases(views: jf.gcca.Views) -> tuple[Float[np.ndarray, "entities 1"], list[Table]]:
    """Orthonormal bases of the views, and the roots of the shares that have seen each entity."""
    widths = np.asarray(views.data.count).astype(int)
    tables = [
        np.asarray(x, np.float64)[:, :d] for x, d in zip(views.data.values, widths, strict=True)
    ]
    observed = views.data.observed
    shares = np.ones(len(tables[0])) if observed is None else np.asarray(observed).mean(0)
    return np.sqrt(shares)[:, None], [np.linalg.qr(x)[0] for x in tables]
