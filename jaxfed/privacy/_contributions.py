"""What ONE client's rows contribute to a moment, and how far one person can move it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxfed.core.clients.guarantee import Rows
from jaxfed.linalg import matmul
from jaxfed.linalg.precision import precise

FEWEST = 4  # persons of a client: fewer are not even two pairs

Values = Float[Array, "rows features"]
Codes = Int[Array, " rows"]


@partial(jax.jit, static_argnames="rows")
@precise()
def released(
    rows: Rows,
    bound: Array | float,
    deviations: Float[Array, " clients"],
    values: Float[Array, "clients rows features"],
    codes: Int[Array, "clients rows"],
    people: Float[Array, " clients"],
    keys: Key[Array, " clients"],
) -> Float[Array, "clients features features"]:
    """The clients' moments with noise.

    Args:
        rows: what a row contributes.
        bound: of a row's length, where it is clipped.
        deviations: the standard deviation of each client's noise.
        values: the rows, in any order.
        codes: whose row each is, from 0 to `people` - 1; the number of rows of the array for rows
            that are not there.
        people: the public numbers of persons; one without rows contributes nothing.
        keys: one for each client, for nothing else.
    """

    def of_one(deviation, values, codes, people, key):
        pairing, noisy = jax.random.split(key)
        moment = moment_of(rows, bound, values, codes, people, pairing)
        return _mirrored(moment + deviation * noise(noisy, moment))

    return jax.vmap(of_one)(deviations, values, codes, people, keys)


def noise(
    key: Key[Array, ""], like: Float[Array, "features features"]
) -> Float[Array, "features features"]:
    """Noise for the upper triangle, isotropic in the Frobenius norm of symmetric matrices.

    Its standard deviation is 1 on the diagonal, and 1/√2 beside it, where each entry counts twice.
    """
    square = jax.random.normal(key, like.shape, like.dtype)
    return jnp.where(jnp.eye(len(like), dtype=bool), square, square / 2**0.5)


def _mirrored(square: Float[Array, "features features"]) -> Float[Array, "features features"]:
    """The symmetric matrix with this upper triangle.

    To the last bit: where rounding makes a matrix differ from its transpose, the difference has no
    noise.
    """
    # The compiler would compute both halves of a selection, by programs that round differently.
    size = len(square)
    rows, columns = np.triu_indices(size)
    places = np.zeros((size, size), int)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return lax.optimization_barrier(square[rows, columns])[places]


def moment_of(
    rows: Rows,
    bound: Array | float,
    values: Values,
    codes: Codes,
    people: Float[Array, ""],
    key: Key[Array, ""],
) -> Float[Array, "features features"]:
    """The moment without noise, a mean over persons or pairs of persons; see `released`."""
    if rows == "pairs":
        by_person = jnp.argsort(codes)
        values, codes = values[by_person], codes[by_person]
    sizes = jnp.bincount(codes, length=len(codes) + 1)[:-1]
    here = codes < len(codes)
    weights = jnp.where(here, 1 / jnp.maximum(sizes[codes], 1), 0).astype(values.dtype)
    if rows == "pairs":
        others, paired = _partners(codes, sizes, people, key)
        units = _direction(values, values[others])
        # A pair's rows each meet a row of the other person: both halves weigh 1/2.
        weights = jnp.where(paired, weights / 2, 0)
        terms = jnp.floor(people / 2)
    else:
        units = _direction(values) if rows == "directions" else _clipped(values, bound)
        terms = people
    weighted = units * (weights / terms)[:, None]
    return matmul(weighted.T, units)


def _partners(
    codes: Codes, sizes: Int[Array, " rows"], people: Float[Array, ""], key: Key[Array, ""]
) -> tuple[Codes, Bool[Array, " rows"]]:
    """Pair persons at random; return each row's partner and whether it has one.

    A person's rows, in their order, meet those of the other person, from the first again after the
    last. The rows must be sorted by person.
    """
    numbers = jnp.arange(len(codes))
    order = jnp.where(numbers < people, jax.random.uniform(key, codes.shape), jnp.inf)
    at = jnp.argsort(order)  # the person at each position
    place = jnp.zeros_like(at).at[at].set(numbers)  # and each person's position
    neighbour = place ^ 1  # 0 and 1, 2 and 3, ...
    of_person = at[jnp.minimum(neighbour, len(codes) - 1)]
    has = neighbour < 2 * jnp.floor(people / 2)
    starts = jnp.cumsum(sizes) - sizes
    own = jnp.minimum(codes, len(codes) - 1)
    other = of_person[own]
    size = sizes[other]
    row = starts[other] + (numbers - starts[own]) % jnp.maximum(size, 1)
    paired = (codes < len(codes)) & has[own] & (size > 0)
    return jnp.minimum(row, len(codes) - 1), paired


def _direction(values: Values, others: Values | None = None) -> Values:
    """The rows' directions, or those of their differences; zero where there is none."""
    # Divided first by the largest entry, so that neither a difference nor a square overflows.
    largest = jnp.abs(values).max(axis=1, keepdims=True)
    if others is not None:
        largest = jnp.maximum(largest, jnp.abs(others).max(axis=1, keepdims=True))
    divisor = _or_one(largest)
    rows = values / divisor if others is None else values / divisor - others / divisor
    # Again, since a difference may be small.
    rows = rows / _or_one(jnp.abs(rows).max(axis=1, keepdims=True))
    return rows / jnp.sqrt(_or_one(jnp.sum(rows**2, axis=1, keepdims=True)))


def _clipped(values: Values, bound: Array | float) -> Values:
    largest = _or_one(jnp.abs(values).max(axis=1, keepdims=True))
    norm = largest * jnp.linalg.norm(values / largest, axis=1, keepdims=True)
    return jnp.where(norm > bound, _direction(values) * bound, values)


def _or_one(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)
