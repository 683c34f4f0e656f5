"""Low-rank factors of ONE client's samples with missing entries, by alternating least squares.

With the components given, each sample's scores are a small least-squares problem, and the other way
round each feature's.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxfed.linalg import orthonormalize
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca.components import Rows, beside

Table = Float[Array, "samples features"]
Seen = Bool[Array, "samples features"]


def scores_of(values: Table, observed: Seen, components: Rows) -> Float[Array, "samples rank"]:
    """Return the least-squares scores of samples in orthonormal components.

    Args:
        values: the samples; missing entries are zero.
        observed: which entries count.
        components: orthonormal rows.
    """
    rank = len(components)
    pairs = (components[:, None] * components).reshape(rank * rank, -1)
    gram = data_matmul(observed.astype(values.dtype), pairs.T).reshape(-1, rank, rank)
    # Keeps scores finite that too few observed entries determine. Components have unit length, so
    # it does not depend on the scale of the samples.
    ridge = jnp.finfo(values.dtype).eps ** 0.75 * jnp.eye(rank, dtype=values.dtype)
    right = data_matmul(values, components.T)
    return jnp.linalg.solve(gram + ridge, right[..., None])[..., 0]


def best_components(values: Table, observed: Seen, shared: Rows, local: Rows, steps: int) -> Rows:
    """Improve local components beside shared ones by steps of alternating least squares."""
    rank = len(shared)

    def step(_, local):
        scores = scores_of(values, observed, jnp.concatenate([shared, local]))
        rest = observed * (values - client_matmul(scores[:, :rank], shared))
        # With orthonormal scores, which span the same, the ridge has the same scale as above.
        span = orthonormalize(scores[:, rank:])
        found = scores_of(rest.T, observed.T, span.T)
        return beside(shared.T, found).T

    return lax.fori_loop(0, steps, step, local)
