"""What noise guarantees about the persons whose data are behind moments or gradients."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxfed._checks import check_count, check_name, check_number

Rows = Literal["pairs", "directions", "clip"]
Neighbours = Literal["replace", "add_remove"]
ROWS: tuple[Rows, ...] = ("pairs", "directions", "clip")
GRADIENTS = "gradients"
# The mechanism of noise that is exact, and not of floating-point numbers.
DISCRETE = "discrete Gaussian"
NEIGHBOURS: tuple[Neighbours, ...] = ("replace", "add_remove")


class Guarantee(NamedTuple):
    r"""The privacy of one release, of `jaxfed.privacy.release_moments` or `release_units`.

    Or that of all gradients of a training, of `jaxfed.privacy.training_guarantee`.

    Attributes:
        unit: `"row"`, where each row is one person's, or `"person"`, with all rows of a person.
        neighbours: what one unit may change: `"replace"`, its data by any other, or `"add_remove"`,
            whether its data are there; the number of units is public.
        epsilon: \(\varepsilon\).
        delta: \(\delta\).
        noise_multiplier: \(\sigma\), the standard deviation of the noise relative to the
            sensitivity; with `"gradients"` that of one step relative to `bound`.
        rows: what a row contributes; `"ranges"` of `release_units`, `"gradients"` of a training.
        bound: of the length of a row with `"clip"`, or of its gradient, else None.
        mechanism: how the noise was calibrated.
        sharers: number of clients that share the noise. Above one, it protects persons in sums over
            at least as many clients, and in nothing else.
    """

    unit: Literal["row", "person"]
    neighbours: Neighbours
    epsilon: float
    delta: float
    noise_multiplier: float
    rows: Rows | Literal["ranges", "gradients"]
    bound: float | None = None
    mechanism: str = "analytic Gaussian"
    sharers: int = 1

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:g}, delta {self.delta:g} per {self.unit} "
            f"({self.neighbours}, {self.rows}, {self.mechanism}"
            + f", in sums over {self.sharers} clients" * (self.sharers > 1)
            + ")"
        )


def checked_guarantee(**given: Any) -> Guarantee:
    """A guarantee that a file describes.

    Raises:
        ValueError: names what is impossible.
    """
    found = Guarantee(**given)
    check_name("unit", found.unit, ("row", "person"))
    check_name("neighbours", found.neighbours, NEIGHBOURS)
    check_name("rows", found.rows, (*ROWS, "ranges", GRADIENTS))
    bound = ["bound"] * (found.rows in ("clip", GRADIENTS))
    for name in ("epsilon", "delta", "noise_multiplier", *bound):
        check_number(name, getattr(found, name), "a positive number", lambda x: x > 0)
    check_count("sharers", found.sharers)
    return found


def people_in(people: Array, rows: Rows) -> Array:
    """The numbers of persons that moments are made of: with pairs, an odd one is left out."""
    return 2 * jnp.floor(people / 2) if rows == "pairs" else people


def least_deviation(guarantee: Guarantee) -> float:
    """The smallest standard deviation of noise in a client's moment times its number of persons."""
    assert guarantee.rows not in ("ranges", "gradients")  # of which no moments are made
    size = 1.0 if guarantee.bound is None else guarantee.bound
    # Plain numbers, known within `jit`: how far one person moves it, see `sensitivity`.
    far = (2**0.5 if guarantee.neighbours == "replace" else 1.0) * size**2
    far *= 2 if guarantee.rows == "pairs" else 1
    # Beside the diagonal, it is smaller than on it.
    return guarantee.noise_multiplier * far / (2 * guarantee.sharers) ** 0.5


def terms_of(people: Array | float, rows: Rows) -> Array:
    """The number of terms whose mean is a moment."""
    return jnp.floor(jnp.asarray(people) / 2) if rows == "pairs" else jnp.asarray(people)


def sensitivity(people: Array | float, rows: Rows, bound: float, neighbours: Neighbours) -> Array:
    r"""The largest Frobenius distance of two neighbours' moments, \(\Delta\).

    A person contributes to one term of a mean of P (with pairs, of the floor of P/2) terms: a
    matrix \(A \succeq 0\) of trace at most \(C^2\), and C = 1 with directions and pairs. Then
    \(|A|_F \le C^2\), and \(|A - B|_F^2 = |A|_F^2 + |B|_F^2 - 2 \mathrm{tr}(AB) \le 2 C^4\).
    """
    return (2**0.5 if neighbours == "replace" else 1.0) * bound**2 / terms_of(people, rows)


def note(guarantee: Guarantee | None) -> str:
    """What printed clients say of a guarantee, if they have one."""
    return "" if guarantee is None else f"; released with {guarantee}"
