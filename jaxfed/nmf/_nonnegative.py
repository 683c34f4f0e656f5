"""Updates of non-negative factors: one sweep over components, or exact least squares."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxfed.linalg.blocks import map_in_blocks
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul

SWEEPS = 16  # between two tests of the active set; most problems need only one test
TESTS = 50
BLOCK = 512  # samples whose loadings are computed at once

Rows = Float[Array, "rank features"]


class Loadings(NamedTuple):
    """Loadings of samples."""

    values: Float[Array, "samples rank"]  # H_i
    gain: Float[Array, " samples"]  # what they take off the samples' squared norms


def loadings_of(
    shared: Rows,
    own: Rows,
    penalty: Float[Array, ""],
    values: Float[Array, "samples features"],
    observed: Bool[Array, "samples features"] | None,
) -> Loadings:
    """Compute ONE client's loadings: the least h ≥ 0 of ‖x - (W + V)ᵀh‖² + λ ‖Vᵀh‖².

    Args:
        shared: W.
        own: V.
        penalty: λ.
        values: samples; missing entries are zero.
        observed: which entries count; all by default.
    """
    together = shared + own
    product = data_matmul(values, together.T)
    # λ ‖Vᵀh‖² is quadratic in h and only adds to the Gram matrix.
    rest = jnp.asarray(penalty, own.dtype) * client_matmul(own, own.T)
    if observed is None:
        gram = client_matmul(together, together.T) + rest
        found = map_in_blocks(partial(nonnegative_least_squares, gram), product, BLOCK)
    else:
        # Every sample has its own Gram matrix, of the features that it has.
        pairs = (together[:, None] * together).reshape(-1, together.shape[1]).T

        def one(sample):
            seen, product = sample
            gram = (seen.astype(own.dtype) @ pairs).reshape(rest.shape) + rest
            return nonnegative_least_squares(gram, product)

        found = map_in_blocks(one, (observed, product), BLOCK)
    # At the least, hᵀ G h = hᵀ c.
    return Loadings(found, jnp.sum(found * product, axis=1))


def hals_sweep(
    factor: Float[Array, "rank ..."],
    gram: Float[Array, "rank rank"],
    product: Float[Array, "rank ..."],
) -> Float[Array, "rank ..."]:
    """Minimize ‖X - H F‖² over each row of F ≥ 0 in turn: one sweep of hierarchical ALS.

    Rows with a zero on the Gram matrix's diagonal, which nothing depends on, do not change.

    Source: Cichocki & Phan (2009), Fast local algorithms for large scale nonnegative matrix and
    tensor factorizations.

    Args:
        factor: F.
        gram: HᵀH.
        product: HᵀX.
    """

    def one(j, factor):
        step = ratio(product[j] - gram[j] @ factor, gram[j, j])
        return factor.at[j].set(jnp.maximum(factor[j] + step, 0))

    return jax.lax.fori_loop(0, len(gram), one, factor)


@jax.custom_jvp
def nonnegative_least_squares(
    gram: Float[Array, "rank rank"], product: Float[Array, " rank"]
) -> Float[Array, " rank"]:
    """Minimize hᵀ G h / 2 - cᵀ h over h ≥ 0.

    Coordinate descent finds which entries are positive; they then solve a linear system exactly.
    Where rounding prevents that, the result is that of coordinate descent. Derivatives are those of
    the linear system.

    Args:
        gram: G, positive semi-definite.
        product: c.
    """
    gram = _regular(gram)

    def test(state):
        found, _, _, count = state
        found = jax.lax.fori_loop(0, SWEEPS, lambda _, h: hals_sweep(h, gram, product), found)
        exact = _solve(gram, product, found > 0)
        return found, exact, _is_optimal(gram, product, exact, found > 0), count + 1

    zeros = jnp.zeros_like(product)
    state = (zeros, zeros, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    found, exact, optimal, _ = jax.lax.while_loop(
        lambda state: ~state[2] & (state[3] < TESTS), test, state
    )
    # The tests allow entries that are negative within rounding.
    return jnp.where(optimal, jnp.maximum(exact, 0), found)


@nonnegative_least_squares.defjvp
def _(primals, tangents):
    (gram, product), (gram_change, product_change) = primals, tangents
    found = nonnegative_least_squares(gram, product)
    # The positive entries solve G h = c; the others stay zero under small changes.
    change = product_change - gram_change @ found
    return found, _solve(_regular(gram), change, found > 0)


def _regular(gram: Float[Array, "rank rank"]) -> Float[Array, "rank rank"]:
    """Add what rounding may have removed, so that equal components do not make it singular."""
    info = jnp.finfo(gram.dtype)
    least = info.eps * jnp.trace(gram) + info.tiny
    return gram + least * jnp.eye(len(gram), dtype=gram.dtype)


def _solve(
    gram: Float[Array, "rank rank"], product: Float[Array, " rank"], kept: Bool[Array, " rank"]
) -> Float[Array, " rank"]:
    """Solve for the kept entries; the others are zero."""
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    factor = jnp.linalg.cholesky(jnp.where(kept[:, None] & kept, gram, identity))
    found = jax.scipy.linalg.cho_solve((factor, True), jnp.where(kept, product, 0))
    return jnp.where(kept, found, 0)


def _is_optimal(
    gram: Float[Array, "rank rank"],
    product: Float[Array, " rank"],
    found: Float[Array, " rank"],
    kept: Bool[Array, " rank"],
) -> Bool[Array, ""]:
    """Test the conditions of Karush, Kuhn and Tucker, up to rounding."""
    rounding = 100 * jnp.finfo(gram.dtype).eps
    size = jnp.abs(gram) @ jnp.abs(found) + jnp.abs(product)
    negative = found < -rounding * jnp.max(jnp.abs(found))
    falling = gram @ found - product < -rounding * size
    return ~jnp.any(jnp.where(kept, negative, falling))


def longer_parts(vectors: Rows) -> Rows:
    """Return the positive parts of vectors or of their negatives, whichever are longer."""
    positive, negative = jnp.maximum(vectors, 0), jnp.maximum(-vectors, 0)
    longer = jnp.sum(positive**2, axis=1) >= jnp.sum(negative**2, axis=1)
    return jnp.where(longer[:, None], positive, negative)


def lengths_of(components: Rows) -> Float[Array, "rank 1"]:
    """Return lengths, and 1 for components that are zero."""
    squares = jnp.sum(components**2, axis=1, keepdims=True)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 1)


def unit_of(components: Rows) -> Rows:
    """Return components of unit length."""
    return components / lengths_of(components)
