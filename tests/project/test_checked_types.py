"""The types of the package are checked while its tests run, after what it refuses itself."""

from typing import Self

import jax
import jax.numpy as jnp
import pytest
from checked_types import after_the_call
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from jaxfed._checks import check_flag, refuse
from jaxfed.channel import lossless
from jaxfed.cli._options import first_line
from jaxfed.deploy.masks import least_threshold
from jaxfed.linalg._factor import by_sums
from jaxfed.manifolds import stiefel
from jaxfed.multi_start import _check_alike


@jaxtyped(typechecker=after_the_call)
def halves(x: Float[Array, " n"], share: float, result: object = None) -> Float[Array, " n"]:
    if jnp.shape(x) == (0,):
        raise ValueError("x: wanted at least one entry")
    return x * share if result is None else result


def test_arguments_and_results_are_checked():
    x = jnp.ones(3)
    assert halves(x, 1).shape == (3,)
    for arguments in ((x, "0.5", x), (jnp.ones((3, 2)), 0.5), (x, 0.5, jnp.ones(2)), (x, 0.5, "x")):
        with pytest.raises(TypeCheckError):
            halves(*arguments)


def test_a_refusal_comes_first():
    with pytest.raises(ValueError, match=r"^x: wanted"):
        halves(jnp.ones(0), "half")


def test_methods_that_return_their_class_are_checked_but_for_that():
    class Box:
        @jaxtyped(typechecker=after_the_call)
        def add(self, number: int) -> Self:
            return self

    assert Box().add(1).add(2)
    with pytest.raises(TypeCheckError):
        Box().add("one")


@pytest.mark.parametrize(
    "call",
    [
        lambda: by_sums(2.5, 1),
        lambda: check_flag(1, True),
        lambda: refuse(1, "a text", None),
        lambda: first_line("PerPCA"),
        lambda: least_threshold(2.5),
        lambda: _check_alike(lossless(), lossless()),
    ],
)
def test_every_part_of_the_package_is_checked(call):
    with pytest.raises(TypeCheckError):
        call()


def test_the_package_refuses_before_its_types_are_checked():
    with pytest.raises(ValueError, match=r"^rank: wanted"):
        stiefel.random(2, "three", key=jax.random.key(0))
