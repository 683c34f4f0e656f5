"""What is taken for constant, and an error where that would make a derivative wrong."""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Num

from jaxfed.linalg._platform import per_platform

# A primitive, because JAX drops the rules of `jax.custom_jvp` where it parts a loop in two.
_constant = Primitive("constant")


def constant(x: Num[Array, "*shape"], name: str, orders: int = 1) -> Num[Array, "*shape"]:
    """The same with derivative zero, as `jax.lax.stop_gradient`, but only so many times.

    For what makes no difference to a first derivative, and would be missed in a second one.

    Args:
        x: the array.
        name: what has no more derivatives, for the error.
        orders: how often it may be differentiated; 0 within a rule that is itself differentiated.

    Raises:
        NotImplementedError: where it is differentiated more often.
    """
    return lax.stop_gradient(_constant.bind(x, name=name, orders=orders))


def _zero(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.zeros_like(x)


def _as_of(primals, tangents):
    (x,), (change,) = primals, tangents
    # A second derivative would lack what turns the eigenvectors. Nothing is ever added.
    fixed = constant(x, "what tells eigenvectors apart (empirical Bayes, shrinkage, ranks)", 0)
    nothing = jnp.where(jnp.zeros_like(x, bool), fixed, 0)
    return nothing, change + nothing


zero_with_derivative = per_platform(_zero, _as_of)
"""Zero, with the first derivative of what is given, and no second one."""


def _derivative(primals, tangents, *, name, orders):
    del tangents
    if not orders:
        raise NotImplementedError(f"{name}: derivatives of this order are not available")
    (x,) = primals
    return _constant.bind(x, name=name, orders=orders - 1), jnp.zeros_like(x)


def _batched(arguments, axes, **how):
    return _constant.bind(*arguments, **how), axes[0]


def _same(x, **_):
    return x


_constant.def_impl(_same)
_constant.def_abstract_eval(_same)
batching.primitive_batchers[_constant] = _batched
ad.primitive_jvps[_constant] = _derivative
mlir.register_lowering(_constant, mlir.lower_fun(_same, multiple_results=False))
