"""How close federated PCA comes to PCA of the pooled samples, and at what cost.

With the samples of all clients as the columns of one matrix A, federated PCA seeks its top left
singular vectors. Every sample has the same weight, whichever client it belongs to. For `samples`,
see `jaxfed.metrics.reconstruction`; moments are weighted by their numbers of samples.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from jaxfed._checks import checked_array
from jaxfed.core.run.result import Fitted, result_of
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.linalg.sums import scaled_norm
from jaxfed.metrics.reconstruction import Data, in_enough_precision, moments


def scaled_kkt_violation(
    fitted: Fitted, samples: Data, *, counts: Real[ArrayLike, " m"] | None = None
) -> Float[Array, ""]:
    """Distance of components from an invariant subspace, `|(I - P) A Aᵀ U|_F / |A|_F²`.

    Zero if and only if the first-order condition of PCA holds. For personalized PCA, see
    `kkt_violation`.

    Source: Wang, Liu & Zhang (2022), section 5.2.

    Args:
        fitted: what has orthonormal shared components `(d, r)`: a solution, its result, an
            estimator, or what `jaxfed.load` returned; an array as
            `jaxfed.Personalized(array, None)`.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        counts: number of valid rows of each client, `(m,)`, if `samples` is an array.

    Returns:
        The violation, a scalar; 0 if all samples are zero.

    Raises:
        ValueError: if shapes do not match, or counts are negative or exceed the rows.
    """
    return in_enough_precision(_scaled_violation, *_checked(fitted, samples, counts))


def _scaled_violation(data: Moment, shared: Float[Array, "d r"]) -> Float[Array, ""]:
    product = _product(data, shared)
    energy = jnp.sum(data.count * data.trace)
    rest = scaled_norm(product - shared @ (shared.T @ product))
    return ratio(rest, energy)


def relative_singular_value_error(
    fitted: Fitted,
    samples: Data,
    singular_values: Real[ArrayLike, " r"],
    *,
    counts: Real[ArrayLike, " m"] | None = None,
) -> Float[Array, ""]:
    """Relative error of the singular values within components, `|σ(Aᵀ U) - σ|_2 / |σ|_2`.

    It is of second order in the error of the components.

    Source: Wang, Liu & Zhang (2022), section 5.2.

    Args:
        fitted: what has orthonormal shared components `(d, r)`: a solution, its result, an
            estimator, or what `jaxfed.load` returned; an array as
            `jaxfed.Personalized(array, None)`.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        singular_values: the largest singular values σ of the pooled matrix A in descending
            order, `(r,)`, such as `numpy.linalg.svd(numpy.concatenate(samples))[1][:r]`.
        counts: number of valid rows of each client, `(m,)`, if `samples` is an array.

    Returns:
        The error, a scalar.

    Raises:
        ValueError: if shapes do not match, or counts are negative or exceed the rows.
    """
    data, shared = _checked(fitted, samples, counts)
    singular_values = checked_array("singular_values", singular_values, f"{shared.shape[1]}")
    found = in_enough_precision(_singular_values, data, shared)
    return scaled_norm(found - singular_values) / scaled_norm(singular_values)


def _singular_values(data: Moment, shared: Float[Array, "d r"]) -> Float[Array, " r"]:
    within = shared.T @ _product(data, shared)
    squares = jnp.linalg.eigvalsh(within)[::-1]  # rounding may make zeros negative
    return jnp.sqrt(jnp.maximum(squares, 0))


def _checked(fitted, samples, counts) -> tuple[Moment, Float[Array, "d r"]]:
    data, shared = moments(samples, counts), result_of(fitted, "PCA").shared
    return data, checked_array("shared", shared, f"{data.dim} r")


def _product(data: Moment, shared: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """A Aᵀ U."""
    # A client's second moment is a mean over its samples; AAᵀ is their sum.
    each = jax.vmap(lambda moment: moment.count * moment.mv(shared))(data)
    return each.sum(0)
