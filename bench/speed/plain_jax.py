"""PerPCA in plain JAX, as a user would write it: vmap, a decomposition, scan, jit.

It has one variant, no checks, no history except the objective, and all clients in every round. The
benchmarks compare jaxfed's first call and rounds with it.
"""

from functools import partial

import jax
import jax.numpy as jnp


def qr(w):
    """The Q factor, with the signs of a retraction."""
    q, r = jnp.linalg.qr(w)
    return q * jnp.sign(jnp.diagonal(r))


def svd(w):
    """The polar factor."""
    left, _, right = jnp.linalg.svd(w, full_matrices=False)
    return left @ right


@partial(jax.jit, static_argnames=("rounds", "retraction"))
def perpca(samples, shared, local, step_size, rounds, retraction=qr):
    """Algorithm 2 of Shi & Kontar (2024), choice 1.

    Args:
        samples: `(clients, n, d)`.
        shared: the start, `(d, r1)`.
        local: the start, `(clients, d, r2)`.
        step_size: for S W.
        rounds: how many.
        retraction: `qr` or `svd`.

    Returns:
        Shared and local components, and the objective of each round.
    """
    moments = jnp.einsum("mnd,mne->mde", samples, samples) / samples.shape[1]
    r1 = shared.shape[1]

    def client(shared, local, moment):
        local = retraction(local - shared @ (shared.T @ local))
        w = jnp.concatenate([shared, local], axis=1)
        product = moment @ w
        inner = w.T @ product
        objective = jnp.trace(moment) - jnp.trace(inner)
        w = w + step_size * (product - w @ inner)
        return w[:, :r1], retraction(w[:, r1:]), objective

    def one_round(carry, _):
        shared, local = carry
        copies, local, objective = jax.vmap(client, in_axes=(None, 0, 0))(shared, local, moments)
        return (retraction(copies.mean(0)), local), objective.mean()

    (shared, local), objectives = jax.lax.scan(one_round, (shared, local), length=rounds)
    local = jax.vmap(lambda v: retraction(v - shared @ (shared.T @ v)))(local)
    return shared, local, objectives


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def random_start(key, clients, features, r1, r2):
    """Random components, `(d, r1)` and `(clients, d, r2)`."""
    one, other = jax.random.split(key)
    shared = qr(jax.random.normal(one, (features, r1)))
    return shared, jax.vmap(qr)(jax.random.normal(other, (clients, features, r2)))
