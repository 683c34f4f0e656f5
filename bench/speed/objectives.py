"""Objectives that several solvers minimize, on pooled data, and problems for each.

Digits, wine and breast cancer come from scikit-learn. The other files are read from a folder
`data`; without it, their problems are left out.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import jaxfed as jf
from jaxfed.pca import bingham

DRAWS = 3
Array = Any


class Problem(NamedTuple):
    """Several draws of one kind of problem."""

    kind: str
    clients: jf.Clients  # with a leading axis of draws
    settings: tuple[float, ...]  # of the algorithms, by family
    starts: Any = None  # warm starts, a draw each


class Objective(NamedTuple):
    """What solvers minimize, for a pooled one: a function of a flat vector and of some matrices."""

    value: Callable[[Problem, Array, Array], Array]
    matrices: Callable[[jf.Clients], Array]  # of one draw
    begin: Callable[[Problem, Array, int], Array]  # a vector to start from, by seed
    relative: bool  # gaps in units of the best value, else of what the start lies above it
    bounds: Callable[[Problem], tuple[float, float]] | None = None  # of the last number


# --- tables of samples ---------------------------------------------------------------------------


def standardized(x: Array, *, features: bool = True) -> Array:
    """Centred, and of unit variance: every feature, or all together."""
    x = x - x.mean(0)
    return x / (np.maximum(x.std(0), 1e-12) if features else x.std())


def dealt(x: Array, labels: Array, clients: int, seed: int) -> Array:
    """Half of the rows, dealt to clients of one label each and of equally many rows."""
    rng = np.random.default_rng(seed)
    names = np.unique(labels)
    parts = []
    for name in names:
        rows = rng.permutation(np.flatnonzero(labels == name))
        parts += np.array_split(rows[: len(rows) // 2], clients // len(names))
    return np.stack([x[part[: min(map(len, parts))]] for part in parts])


def speakers(data: Path) -> tuple[Array, Array]:
    """Frames of twelve features, and who speaks."""
    rows, labels = [], []
    for path in sorted((data / "japanese_vowels").glob("JapaneseVowels_*.ts")):
        text = path.read_text(encoding="utf-8").partition("@data")[2]
        for line in text.split():
            *features, name = line.split(":")
            rows.append(np.array([f.split(",") for f in features], float).T)
            labels += [name] * len(rows[-1])
    return np.concatenate(rows), np.asarray(labels)


def real_tables(data: Path | None) -> Iterator[tuple[str, Callable[[int], Array], int]]:
    """Names, tables `(clients, samples, features)` by seed, and a rank."""
    x, labels = datasets.load_digits(return_X_y=True)
    yield "digits", partial(dealt, standardized(x, features=False), labels, 40), 10
    x, labels = datasets.load_wine(return_X_y=True)
    yield "wine", partial(dealt, standardized(x), labels, 9), 3
    x, labels = datasets.load_breast_cancer(return_X_y=True)
    yield "breast cancer", partial(dealt, standardized(x), labels, 10), 4
    if data is not None and (data / "japanese_vowels").is_dir():
        x, labels = speakers(data)
        yield "speakers", partial(dealt, standardized(x), labels, 9), 3


def of_tables(make: Callable[[int], Array], draws: int = DRAWS) -> jf.Clients:
    """Draws of a table, side by side."""
    drawn = [jf.Clients.from_samples(make(seed)) for seed in range(draws)]
    return jax.tree.map(lambda *x: jnp.stack(x), *drawn)


def moments(clients: jf.Clients) -> Array:
    """Second moments of ONE draw."""
    x = clients.data.values
    return jnp.einsum("mnd,mne->mde", x, x) / x.shape[1]


def top(matrix: Array, rank: int) -> Array:
    """The top eigenvectors; an envelope's derivative needs none of them."""
    matrix = jax.lax.stop_gradient(matrix)
    return jax.lax.stop_gradient(jnp.linalg.eigh(matrix)[1][..., -rank:])


def frame(vector: Array, rank: int) -> Array:
    """The orthonormal matrix that a vector stands for."""
    return jf.linalg.polar(vector.reshape(-1, rank))


def begin(matrix: Array, rank: int, seed: int) -> Array:
    """The first seed's start is the pooled one, others are random."""
    if seed == 0:
        return np.ravel(top(matrix, rank))
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((len(matrix), rank)))[0].ravel()


# --- personalized PCA ----------------------------------------------------------------------------


def heavy_tailed(seed: int) -> Array:
    return np.random.default_rng(seed).standard_t(2, (20, 40, 12)) * np.linspace(2, 0.5, 12)


def few_samples(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((20, 5, 12)) * np.linspace(2, 0.5, 12)


def of_many_scales(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((20, 40, 12)) * np.linspace(2, 0.5, 12)
    return x * 10 ** rng.uniform(-3, 3, (20, 1, 1))


SYNTHETIC = {
    "t with 2 degrees": heavy_tailed,
    "5 samples in 12 features": few_samples,
    "scales 1e-3 to 1e3": of_many_scales,
}
SYNTHETIC_RANKS = dict(zip(SYNTHETIC, ((3, 2), (2, 2), (3, 2)), strict=True))


def pca_problems(data: Path | None) -> Iterator[Problem]:
    ranks = {"digits": (10, 2), "wine": (3, 2), "breast cancer": (3, 3), "speakers": (3, 3)}
    for name, make, _ in real_tables(data):
        yield Problem(name, of_tables(make), ranks[name])

    for name, make in SYNTHETIC.items():
        yield Problem(name, of_tables(make), SYNTHETIC_RANKS[name])


def pca_pooled(problem: Problem, vector: Array, matrices: Array) -> Array:
    shared_rank, local_rank = map(int, problem.settings)
    shared = frame(vector, shared_rank)
    projector = jnp.eye(len(shared)) - shared @ shared.T
    local = projector @ top(projector @ matrices @ projector, local_rank)
    held = jnp.vdot(shared, matrices.mean(0) @ shared)
    held += jnp.vdot(local, matrices @ local) / len(matrices)
    return jnp.trace(matrices.mean(0)) - held


def pca_begin(problem: Problem, matrices: Array, seed: int) -> Array:
    shared_rank, local_rank = map(int, problem.settings)
    own = top(matrices, local_rank)
    rest = matrices - own @ (own.mT @ matrices)
    return begin((rest - rest @ own @ own.mT).mean(0), shared_rank, seed)


# --- hierarchical PCA ----------------------------------------------------------------------------


def unit_latent(x: Array, rank: int) -> tuple[Array, float]:
    """A table whose components have variances of one on average, as the model has; its noise."""
    values = np.linalg.eigvalsh(np.einsum("mnd,mne->de", x, x) / (x.shape[0] * x.shape[1]))
    noise = values[:-rank].mean()
    signal = values[-rank:].mean() - noise
    return x / np.sqrt(signal), float(noise / signal)


def likelihood_problems(variances: tuple[float, ...], data: Path | None) -> Iterator[Problem]:
    for name, make, rank in real_tables(data):
        noise = unit_latent(make(0), rank)[1]
        clients = of_tables(lambda seed, make=make, rank=rank: unit_latent(make(seed), rank)[0])
        for variance in variances:
            kind = name if len(variances) == 1 else f"{name}, {variance:g}"
            yield Problem(kind, clients, (rank, noise, variance))


def fit_terms(problem: Problem, shared: Array, variance: Array, matrices: Array) -> Array:
    """Mean likelihood and distance of the best local components, of `HierarchicalPCA`."""
    (rank, noise), (count, features) = the_model(problem)
    local = top(count / (noise * (1 + noise)) * matrices + shared @ shared.T / variance, rank)
    energy = jnp.vdot(local, matrices @ local) / len(matrices)
    log_det = (features - rank) * jnp.log(noise) + rank * jnp.log1p(noise)
    trace = jnp.trace(matrices.mean(0))
    likelihood = count / 2 * (log_det + (trace - energy / (1 + noise)) / noise)
    return jnp.stack([likelihood, rank - jnp.sum((local.mT @ shared) ** 2) / len(matrices)])


def the_model(problem: Problem) -> tuple[tuple[int, float], tuple[int, int]]:
    """Rank and noise, samples and features."""
    rank, noise, _ = problem.settings
    return (int(rank), noise), problem.clients.data.values.shape[-2:]


def hierarchical_pooled(problem: Problem, vector: Array, matrices: Array) -> Array:
    (rank, _), variance = the_model(problem)[0], problem.settings[2]
    likelihood, distance = fit_terms(problem, frame(vector, rank), variance, matrices)
    return likelihood + distance / (2 * variance)


def hierarchical_begin(problem: Problem, matrices: Array, seed: int) -> Array:
    return begin(matrices.mean(0), int(problem.settings[0]), seed)


def adaptive_constants(problem: Problem) -> tuple[int, float]:
    """D, and the hyper prior."""
    (rank, noise), (count, features) = the_model(problem)
    dimension = rank * (features - rank)
    return dimension, dimension * noise * (1 + noise) / (6 * count)


def adaptive_pooled(problem: Problem, vector: Array, matrices: Array) -> Array:
    dimension, hyper_prior = adaptive_constants(problem)
    shared, variance = frame(vector[:-1], int(problem.settings[0])), jnp.exp(vector[-1])
    # What the best components change with the variance does not change the objective.
    likelihood, distance = fit_terms(problem, shared, variance, matrices)
    prior = dimension * vector[-1] / 2 + hyper_prior / variance
    return likelihood + distance / (2 * variance) + prior


def adaptive_begin(problem: Problem, matrices: Array, seed: int) -> Array:
    return np.append(hierarchical_begin(problem, matrices, seed), np.log(problem.settings[2]))


def bayes_pooled(problem: Problem, vector: Array, matrices: Array) -> Array:
    (rank, noise), (count, features) = the_model(problem)

    def log_normalizer(values):
        gaps = values[:rank, None] - values[rank:]
        return bingham.log_normalizer(gaps, features, rank).mean() + values[:rank].sum() / 2

    shared, concentration = frame(vector[:-1], rank), jnp.exp(vector[-1])
    joint = count / (noise * (1 + noise)) * matrices + concentration * shared @ shared.T
    posterior = jax.vmap(log_normalizer)(jnp.linalg.eigvalsh(joint)[:, ::-1]).mean()
    prior = bingham.log_normalizer(concentration, features, rank) + concentration / 2 * rank
    constant = features * jnp.log(noise) + rank * jnp.log1p(1 / noise)
    constant = constant + jnp.trace(matrices.mean(0)) / noise
    return count / 2 * constant - posterior + prior


def bayes_begin(problem: Problem, matrices: Array, seed: int) -> Array:
    (_, noise), (count, _) = the_model(problem)
    precision = count / (noise * (1 + noise))
    return np.append(hierarchical_begin(problem, matrices, seed), np.log(precision))


def bayes_bounds(problem: Problem) -> tuple[float, float]:
    """Of the logarithm of the concentration, as `EmpiricalBayesPCA` has them."""
    (rank, noise), (count, features) = the_model(problem)
    least, most = bingham.concentrations(features, rank, jnp.dtype(float))
    most = min(float(most), 100 * count / (noise * (1 + noise)))
    return float(np.log(least)), float(np.log(most))


# --- generalized CCA -----------------------------------------------------------------------------


def view_problems(data: Path | None) -> Iterator[Problem]:
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((300, 12))
    synthetic = [
        latent @ rng.standard_normal((12, 20)) + 0.5 * rng.standard_normal((300, 20))
        for _ in range(4)
    ]
    kinds = [("synthetic", synthetic, 5)]
    x, _ = datasets.load_digits(return_X_y=True)
    quarters = standardized(x[:600]).reshape(600, 2, 4, 2, 4).transpose(1, 3, 0, 2, 4)
    quarters = [part[:, part.std(0) > 0] for part in quarters.reshape(4, 600, 16)]
    kinds.append(("quarters of digits", quarters, 5))
    if data is not None:
        arrays = [
            standardized(np.asarray(x, float)[::4])
            for x in jf.data.read_views(data / "mfeat" / "mfeat.npz")[0]
        ]
        kinds += [("mfeat", arrays, 10), ("three of mfeat", arrays[:3], 3)]
    for name, arrays, rank in kinds:
        views = jf.gcca.Views.from_arrays(arrays)
        start = jf.fit(jf.gcca.MVLSA(rank), views, rounds=1, key=jax.random.key(0)).result
        representation = np.linalg.qr(rng.standard_normal(start.shared.shape))[0]
        maps = rng.standard_normal(start.local.shape)
        at_random = jf.Personalized(jnp.asarray(representation), jnp.asarray(maps))
        for kind, given in (("random start", at_random), ("MVLSA", start)):
            one = jax.tree.map(lambda x: x[None], (views, given))
            yield Problem(f"{name}, {rank}, {kind}", one[0], (rank,), one[1])


def mean_projector(views: jf.Clients) -> Array:
    """The mean of the projectors onto the views' columns."""
    left, singular, _ = jnp.linalg.svd(views.data.values, full_matrices=False)
    left = left * (singular > 1e-10 * singular[:, :1])[:, None]
    return jnp.einsum("mlk,mnk->ln", left, left) / len(left)


def views_pooled(problem: Problem, vector: Array, projector: Array) -> Array:
    shared = frame(vector, int(problem.settings[0]))
    return (shared.shape[1] - jnp.vdot(shared, projector @ shared)) / 2


def views_begin(problem: Problem, projector: Array, seed: int) -> Array:
    if seed == 0:
        return np.ravel(problem.starts.shared)
    return begin(projector, int(problem.settings[0]), seed)


PCA = Objective(pca_pooled, moments, pca_begin, True)
HIERARCHICAL = Objective(hierarchical_pooled, moments, hierarchical_begin, False)
ADAPTIVE = Objective(adaptive_pooled, moments, adaptive_begin, False)
EMPIRICAL_BAYES = Objective(bayes_pooled, moments, bayes_begin, False, bayes_bounds)
VIEWS = Objective(views_pooled, mean_projector, views_begin, True)
