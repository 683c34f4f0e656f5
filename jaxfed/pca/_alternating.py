"""Low-rank factors of ONE client's samples with missing entries, by alternating least squares.

With the components given, each sample's scores are a small least-squares problem, and the other way
round each feature's. Of complete samples, orthonormal components make it a product.
"""

from typing import NamedTuple, final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxfed.linalg import orthonormalize, polar
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca._ascent import Local, SolutionAscent
from jaxfed.pca.components import Frame, Rows, beside

# Steps of alternating least squares in a round.
STEPS = 4

Table = Float[Array, "samples features"]
Seen = Bool[Array, "samples features"]


def scores_of(
    values: Table, observed: Seen | None, components: Rows
) -> Float[Array, "samples rank"]:
    """Return the least-squares scores of samples in orthonormal components.

    Args:
        values: the samples; missing entries are zero.
        observed: which entries count; None for all.
        components: orthonormal rows.
    """
    if observed is None:
        return data_matmul(values, components.T)
    rank = len(components)
    pairs = (components[:, None] * components).reshape(rank * rank, -1)
    gram = data_matmul(observed.astype(values.dtype), pairs.T).reshape(-1, rank, rank)
    # Keeps scores finite that too few observed entries determine. Components have unit length, so
    # it does not depend on the scale of the samples. A larger one would shrink scores of samples
    # whose feature in the largest unit is missing.
    ridge = 64 * jnp.finfo(values.dtype).eps * jnp.eye(rank, dtype=values.dtype)
    right = data_matmul(values, components.T)
    return jnp.linalg.solve(gram + ridge, right[..., None])[..., 0]


class Evaluation(NamedTuple):
    """ONE client's error at given shared components, with its best factors beside these."""

    local: Float[Array, "local_rank features"]  # components
    objective: Float[Array, ""]  # half the squared error of the observed entries
    # Minus its derivative by the shared components U, plus U VᵀV with their scores V: only the
    # tangent part counts, and the norm is now near the curvature.
    ascent: Float[Array, "features shared_rank"]
    energies: Float[Array, " rank"]  # along shared and local components


def evaluate(
    values: Table,
    observed: Seen | None,
    shared: Float[Array, "shared_rank features"],
    local: Float[Array, "local_rank features"],
) -> Evaluation:
    """Improve local components beside shared ones, and evaluate the error of the samples."""
    rank = len(shared)
    seen = 1 if observed is None else observed
    of_features = None if observed is None else observed.T
    if observed is None:  # the shared components have moved since
        local = beside(shared.T, local.T).T

    def step(_, local):
        scores = scores_of(values, observed, jnp.concatenate([shared, local]))
        rest = seen * (values - client_matmul(scores[:, :rank], shared))
        # With orthonormal scores, which span the same, the ridge has the same scale as above.
        found = scores_of(rest.T, of_features, orthonormalize(scores[:, rank:]).T)
        return beside(shared.T, found).T

    local = lax.fori_loop(0, STEPS, step, local)
    together = jnp.concatenate([shared, local])
    scores = scores_of(values, observed, together)
    rest = seen * (values - client_matmul(scores, together))
    by_shared = scores[:, :rank]
    # By the envelope theorem the best factors' change with U does not count.
    inner = client_matmul(by_shared.T, by_shared)
    ascent = data_matmul(rest.T, by_shared) + client_matmul(shared.T, inner)
    return Evaluation(local, jnp.sum(rest**2) / 2, ascent, jnp.sum(scores**2, axis=0))


@final
class Alternated(SolutionAscent):
    """Gradient ascent from a solution of `HMF`, with alternating least squares at the clients."""

    def client_step(self, key, downlink: Frame, local: Local, data):
        """Improve the local components, in the basis nearest to the last one, and evaluate."""
        found = evaluate(data.values, data.observed, downlink.T, local.T)
        own = found.local.T
        return found.ascent, own @ polar(own.T @ local), {"objective": found.objective}
