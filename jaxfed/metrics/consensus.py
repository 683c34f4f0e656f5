"""How near components of all samples together are to the exact ones, and what that took.

With the samples of all clients as the columns of one matrix A, federated PCA looks for its top
left singular vectors. Every sample counts the same, whichever client it belongs to. What `samples`
may be is said in `jaxfed.metrics.reconstruction`; moments count by their numbers of samples.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxfed._checks import check_number, check_whole, checked_array
from jaxfed.linalg import Moment
from jaxfed.metrics.reconstruction import Data, moments


def scaled_kkt_violation(
    samples: Data, shared: Float[Array, "d r"], counts: Float[Array, " m"] | None = None
) -> Float[Array, ""]:
    """How far components are from spanning an invariant subspace, `|(I - P) A Aᵀ U|_F / |A|_F²`.

    The first-order condition of PCA of all samples together; that of personalized PCA is
    `kkt_violation`.

    Source: Wang, Liu & Zhang (2022), section 5.2.

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: orthonormal components, `(d, r)`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.

    Returns:
        The violation, a scalar; 0 for data without energy.

    Raises:
        ValueError: if the shapes do not fit together, or counts are negative or exceed the rows.
    """
    data, shared = _checked(samples, counts, shared)
    product = _product(data, shared)
    energy = jnp.sum(data.count * data.trace)
    rest = jnp.linalg.norm(product - shared @ (shared.T @ product))
    return jnp.where(energy > 0, rest / jnp.where(energy > 0, energy, 1), 0)


def relative_singular_value_error(
    samples: Data,
    shared: Float[Array, "d r"],
    singular_values: Float[Array, " r"],
    counts: Float[Array, " m"] | None = None,
) -> Float[Array, ""]:
    """Error of the singular values that components give, `|σ(Aᵀ U) - σ|_2 / |σ|_2`.

    Of second order in the error of the components.

    Source: Wang, Liu & Zhang (2022), section 5.2.

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: orthonormal components, `(d, r)`.
        singular_values: the largest singular values σ of the pooled matrix A in descending
            order, `(r,)`, e.g. `numpy.linalg.svd(numpy.concatenate(samples))[1][:r]`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.

    Returns:
        The error, a scalar.

    Raises:
        ValueError: if the shapes do not fit together, or counts are negative or exceed the rows.
    """
    data, shared = _checked(samples, counts, shared)
    singular_values = checked_array("singular_values", singular_values, f"{shared.shape[1]}")
    within = shared.T @ _product(data, shared)
    squares = jnp.linalg.eigvalsh(within)[::-1]
    found = jnp.sqrt(jnp.maximum(squares, 0))
    return jnp.linalg.norm(found - singular_values) / jnp.linalg.norm(singular_values)


def rounds_to_accuracy(
    values: Float[ArrayLike, "*batch rounds"], accuracy: float
) -> Int[Array, "*batch"]:
    """After how many rounds a measure that should fall is for the first time small enough.

    Args:
        values: a measure of each round, such as `solution.history[...]` of a metric; NaN where it
            was not taken.
        accuracy: what is small enough.

    Returns:
        The number of rounds, from 1 on; -1 where it never is.

    Raises:
        ValueError: if there are no rounds.
    """
    reached = _reached(values, accuracy)
    return jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1) + 1, -1)


def floats_to_accuracy(
    values: Float[ArrayLike, "*batch rounds"],
    accuracy: float,
    bits: Float[ArrayLike, "*batch rounds"],
    *,
    precision: int = 32,
) -> Float[Array, "*batch"]:
    """How many numbers had gone over the wire when a measure was for the first time small enough.

    Args:
        values: a measure of each round, NaN where it was not taken.
        accuracy: what is small enough.
        bits: cumulative bits of each round, such as `solution.history["bits_up"]`, of one client.
        precision: bits of a number.

    Returns:
        The number of floats per client; infinite where the measure never is small enough.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    reached = _reached(values, accuracy)
    bits = checked_array("bits", bits, f"... {reached.shape[-1]}")
    check_whole("precision", precision)
    # Bits never fall, so the smallest of the rounds in question is that of the first.
    return jnp.min(jnp.where(reached, bits, jnp.inf), axis=-1) / precision


def _reached(values: Float[ArrayLike, "*batch rounds"], accuracy) -> Bool[Array, "*batch rounds"]:
    values = checked_array("values", values, "... rounds")
    check_number("accuracy", accuracy, "a number")
    return values <= accuracy


def _checked(samples, counts, shared) -> tuple[Moment, Float[Array, "d r"]]:
    data = moments(samples, counts)
    return data, checked_array("shared", shared, f"{data.dim} r")


def _product(data: Moment, shared: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """A Aᵀ U."""
    each = jax.vmap(lambda moment: moment.count * moment.mv(shared))(data)
    return each.sum(0)
