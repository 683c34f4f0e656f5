"""Runs that measure what the papers' convergence theorems bound, for `bench.tables.theorems`.

Each function sweeps one setting of its theorem over several draws, in one compiled call and in
double precision.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

import jaxfed as jf
from bench.formulas import adept, convergence, stationarity
from jaxfed.core.round.problem import Problem
from jaxfed.core.round.rounds import one_round
from jaxfed.core.round.whole import WHOLE
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.loop import prepare_run
from papers.synthetic import gcca_synthetic, spectrum_synthetic

Schedule = Callable[[Problem, Array], Problem]


class States(NamedTuple):
    """States of a run, of the start and after each round."""

    server: PyTree
    local: PyTree
    sent: PyTree  # the last messages as the server decoded them, where differences are sent


class Curves(NamedTuple):
    """What a theorem bounds, and its bound, by setting, draw and place."""

    measured: Float[Array, "settings draws places"]
    bound: Float[Array, "settings draws places"]


def states(
    algorithm: jf.Algorithm,
    clients: jf.Clients,
    rounds: int,
    key: Key[Array, ""],
    *,
    channel: jf.channel.Channel | None = None,
    warm_start: jf.Personalized | None = None,
    schedule: Schedule | None = None,
) -> States:
    """All states of a run; a schedule changes the problem by the round."""
    wire, everybody = channel or jf.channel.lossless(), jf.participation.everybody()
    problem, warm_start = problem_of(
        algorithm, clients, rounds, key, warm_start, wire, everybody, jf.backend.vmap()
    )
    problem, first, _ = prepare_run(problem, warm_start, rounds)

    def kept(state):
        return States(state.server, state.local, state.uplink.sender)

    def step(state, _):
        now = problem if schedule is None else schedule(problem, state.round)
        state = one_round(now, state, WHOLE)[0]
        return state, kept(state)

    later = jax.lax.scan(step, first, length=rounds)[1]
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), kept(first), later)


def swept(one: Callable[..., Any], settings: Any, *draws: PyTree) -> Any:
    """What one call returns, of all settings and draws in one compiled call.

    They have one axis together: XLA's CPU compiler refuses some products of clients under two.
    """
    settings, number = jnp.asarray(settings), len(jax.tree.leaves(draws)[0])
    pairs = jnp.repeat(settings, number, axis=0)
    tiled = jax.tree.map(lambda x: x[jnp.tile(jnp.arange(number), len(settings))], draws)
    found = jax.jit(jax.vmap(one))(pairs, *tiled)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, number, *x.shape[1:]), found)


def means(squared: Float[Array, " rounds"]) -> Float[Array, " rounds"]:
    """The mean of the first so many."""
    return jnp.cumsum(squared) / jnp.arange(1, len(squared) + 1)


def keys_of(draws: int) -> Key[Array, " draws"]:
    return jax.random.split(jax.random.key(0), draws)


RANK = 2  # of each kind of components

# --- Shi & Kontar (2024), Theorem 8 --------------------------------------------------------------

STEPS = (0.1, 1.0, 2.0, 3.0)  # as multiples of one over the largest eigenvalue


def personalized(draws: int = 5, rounds: int = 2000) -> Curves:
    """Mean squared violations of the first rounds, by the step size."""
    law: dict[str, Any] = {"clients": 10, "features": 10, "samples": 40, "noise_variance": 0.5}
    law |= {"shared_rank": RANK, "local_rank": RANK, "dtype": jnp.float64}

    def drawn(key):
        return jf.data.perpca_synthetic(key=key, **law).samples

    def one(multiple, samples, key):
        moments = samples.mT @ samples / samples.shape[1]
        step = multiple / jnp.linalg.eigvalsh(moments).max()
        algorithm = jf.pca.PerPCA(RANK, RANK, solver="gradient", step_size=step, start="random")
        path = states(algorithm, jf.Clients.from_samples(samples), rounds, key)
        frames = path.server.shared.mT, path.local.mT
        found = jax.vmap(partial(stationarity.perpca_violation, moments))(*frames)
        decrease = found.objective[0] - found.objective[1:]
        bound = convergence.mean_gradient_bound(decrease, step, jnp.arange(1, rounds + 1))
        return Curves(means(found.squared[:-1]), bound)

    keys = keys_of(draws)
    return swept(one, STEPS, jnp.stack([drawn(key) for key in keys]), keys)


# --- Ozkara, Huang & Diggavi (2023), Theorem 1 ---------------------------------------------------

PRIORS, NOISE, SAMPLES = (0.01, 0.1, 1.0), 0.5, 20


def hierarchical_samples(draws: int) -> Float[Array, "draws clients samples d"]:
    """Samples of each draw's clients."""
    law = {"clients": 10, "features": 8, "rank": RANK, "samples": SAMPLES, "noise_variance": NOISE}
    make = partial(jf.data.hierarchical_synthetic, prior_variance=0.1, dtype=jnp.float64, **law)
    return jnp.stack([make(key=key).samples for key in keys_of(draws)])


def hierarchical_step(moments: Float[Array, "clients d d"], prior: Any) -> Float[Array, ""]:
    """The default local step size, but one for all clients."""
    largest = jnp.linalg.eigvalsh(moments).max()
    return 1 / (SAMPLES * largest / (NOISE * (1 + NOISE)) + 1 / prior)


def hierarchical(draws: int = 5, rounds: int = 2000) -> Curves:
    """Mean squared gradients of the first rounds, by the prior variance."""

    def one(prior, samples, key):
        moments = samples.mT @ samples / SAMPLES
        step = hierarchical_step(moments, prior)
        # As printed: bases are not aligned.
        algorithm = jf.pca.HierarchicalPCA(
            RANK, NOISE, prior, step_size=step, align=False, start="random"
        )
        path = states(algorithm, jf.Clients.from_samples(samples), rounds, key)
        shared, local = path.server.shared.mT, path.local.mT
        law = moments, SAMPLES, NOISE, prior

        def violation(shared, local, moved):
            return stationarity.hierarchical_violation(law[0], shared, local, moved, *law[1:])

        found = jax.vmap(violation)(shared[:-1], local[:-1], local[1:])
        last = stationarity.hierarchical_objective(law[0], shared[-1], local[-1], *law[1:])
        decrease = found.objective[0] - jnp.append(found.objective[1:], last)
        smaller = jnp.minimum(step, prior)  # the shared step size is the prior variance
        bound = convergence.mean_gradient_bound(decrease, smaller, jnp.arange(1, rounds + 1))
        return Curves(means(found.squared), bound)

    return swept(one, PRIORS, hierarchical_samples(draws), keys_of(draws))


# --- Wang, Liu & Zhang (2022), Theorem 8 ---------------------------------------------------------

PENALTIES = (0.15, 1.5, 15.0, np.inf)  # multiples of the clients' norms, at most the least allowed


def consensus_samples(draws: int) -> Float[Array, "draws clients samples d"]:
    """Samples of each draw's clients, of norm one, so that both terms of a violation count."""
    law: dict[str, Any] = {"clients": 4, "features": 10, "samples": 50, "dtype": jnp.float64}
    made = [spectrum_synthetic(key, decay=1.2, **law).samples for key in keys_of(draws)]
    return jnp.stack([samples / jnp.linalg.norm(samples) for samples in made])


class Assumption(NamedTuple):
    """What FAPS's proof assumes of one problem."""

    norms: Float[Array, " clients"]
    tolerance: Float[Array, ""]  # half of the largest one
    penalty: Float[Array, ""]  # the least one, as a multiple of the norms


def assumed(matrices: Float[Array, "clients d d"]) -> Assumption:
    """Assumption 6, for penalties that are proportional to the clients' norms."""
    norms = jnp.linalg.norm(matrices, 2, (1, 2))
    tolerance = convergence.consensus_tolerance(len(norms), norms.max() / norms.min()) / 2
    given = norms, jnp.trace(matrices.sum(0)), norms, tolerance, 0.0, RANK
    least = convergence.consensus_bound(*given).least_penalty
    return Assumption(norms, tolerance, least / norms.min())


def consensus(draws: int = 5, rounds: int = 3000) -> Curves:
    """The least squared violation of the first rounds, by the penalty."""

    def one(multiple, samples, key):
        matrices = samples.mT @ samples
        norms, tolerance, least = assumed(matrices)
        penalty = jnp.minimum(multiple, least)
        algorithm = jf.pca.FAPS(
            RANK,
            penalty=penalty,
            penalty_growth=None,
            local_solver="sufficient_decrease",
            local_tol=tolerance,
        )
        path = states(algorithm, jf.Clients.from_samples(samples), rounds, key)
        frames = path.server.shared, path.local.x
        found = jax.vmap(partial(stationarity.consensus_violation, matrices))(*frames)
        optimum = -jnp.linalg.eigvalsh(matrices.sum(0))[-RANK:].sum() / 2
        energy, decrease = jnp.trace(matrices.sum(0)), found.objective[0] - optimum
        given = norms, energy, penalty * norms, tolerance, decrease, RANK
        constant = convergence.consensus_bound(*given).constant
        bound = jnp.where(penalty < least, jnp.nan, constant) / jnp.arange(1, rounds + 1)
        return Curves(jax.lax.cummin(found.squared[:-1]), bound)

    return swept(one, PENALTIES, consensus_samples(draws), keys_of(draws))


# --- Shrestha & Fu (2023), Theorems 1 and 3 ------------------------------------------------------

ENTITIES, BITS = 60, 3
DECAYS = (0.0, 0.75, 1.0)  # exponents of the step sizes; above 1/2 as Theorem 1 wants them
NOISES = (0.3, 1.0, 2.0)  # standard deviations


def views_of(key: Key[Array, ""], noise: float) -> Float[Array, "views entities d"]:
    """Three views of two components that they have in common."""
    drawn = gcca_synthetic(key, entities=ENTITIES, features=8, latent=RANK, noise=noise).views
    return jnp.stack([x.astype(float) for x in drawn])


def critical_points(draws: int = 5, rounds: int = 3000) -> Curves:
    """Squared gradients before each round, with SGD, by how fast the steps get short."""

    def one(decay, views, key):
        def schedule(problem, round):
            length = (1 + round / 20) ** -decay
            data = problem.clients.data
            return eqx.tree_at(
                lambda p: (p.algorithm.proximal, p.clients.data.curvature),
                problem,
                (problem.algorithm.proximal / length, data.curvature / length),
            )

        algorithm = jf.gcca.MaxVar(RANK, inner_steps=5, batch_size=20, proximal=0.1)
        wire = jf.channel.difference(jf.channel.quantize(BITS))
        clients = jf.gcca.Views.from_arrays(list(views))
        path = states(algorithm, clients, rounds, key, channel=wire, schedule=schedule)
        at = path.local.weights, path.server.shared
        found = jax.vmap(partial(stationarity.correlation_violation, views))(*at)
        return Curves(found.squared, jnp.full_like(found.squared, jnp.nan))

    keys = keys_of(draws)
    return swept(one, DECAYS, jnp.stack([views_of(key, 0.6) for key in keys]), keys)


class Subspaces(NamedTuple):
    """Distances to the optimal subspace from some round on, and the ratio beside the gap."""

    curves: Curves
    ratio: Float[Array, "settings draws"]  # of the first eigenvalue left out to the last kept


def subspaces(
    algorithm: jf.Algorithm,
    bits: int | None,
    noises: Any = NOISES,
    draws: int = 5,
    rounds: int = 100,
    since: int = 0,
) -> Subspaces:
    """Distances to the optimal subspace, by the noise in the views, which closes the gap.

    The bound starts from the state after `since` rounds, and takes the largest noise from there on.
    """
    wire = None if bits is None else jf.channel.difference(jf.channel.quantize(bits))

    def one(noise, key):
        views = views_of(key, noise)
        bases = jnp.linalg.svd(views, full_matrices=False)[0]
        values, vectors = jnp.linalg.eigh((bases @ bases.mT).sum(0))
        kept, left_out = values[-RANK], values[-RANK - 1]
        clients = jf.gcca.Views.from_arrays(list(views))
        path = states(algorithm, clients, rounds, key, channel=wire)
        (sent,) = jax.tree.leaves(path.local.scores if bits is None else path.sent)
        shared, sent = path.server.shared[since:], sent[since + 1 :]
        exact = bases @ (bases.mT @ shared[:-1, None])
        lost = jnp.linalg.norm((sent - exact).sum(1), 2, (1, 2)).max()
        turned = vectors.T @ shared
        others, best = turned[:, :-RANK], turned[:, -RANK:]
        tangent = jnp.linalg.norm(others[0] @ jnp.linalg.inv(best[0]), 2)
        lost = jnp.full(rounds - since, lost)
        bound = convergence.subspace_distance_bound(tangent, kept, left_out, lost)
        return Subspaces(Curves(jnp.linalg.norm(others[1:], 2, (1, 2)), bound), left_out / kept)

    return swept(one, noises, keys_of(draws))


# --- ADEPT, Theorem 4.5 --------------------------------------------------------------------------

SAMPLING = (0.3, 1.0, 3.0)  # variances of a sample mean, as multiples of the true variance
ASSUMED = np.geomspace(0.03, 30, 40)  # prior variances, as multiples of the true one


def gains(draws: int = 5, clients: int = 2000) -> Curves:
    """The share of the squared error that personalized means save, by the sampling variance."""
    dimension = 10

    def one(sampling, key):
        own, noise = jax.random.normal(key, (2, clients, dimension))
        means = own + jnp.sqrt(sampling) * noise

        def gain(assumed):
            found = adept.personalized_means(means, sampling, assumed).local
            return 1 - jnp.sum((found - own) ** 2) / jnp.sum((means - own) ** 2)

        formula = adept.collaboration_gain(1.0, ASSUMED, sampling)
        return Curves(jax.vmap(gain)(jnp.asarray(ASSUMED)), formula)

    return swept(one, SAMPLING, keys_of(draws))
