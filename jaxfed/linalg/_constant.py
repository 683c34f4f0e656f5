"""How often a derivative rule may be differentiated: an error where it would be wrong."""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from jaxfed.linalg._platform import per_platform

# A primitive, because JAX drops the rules of `jax.custom_jvp` where it parts a loop in two.
_constant = Primitive("constant")


def constant(x: Float[Array, "*shape"], orders: int = 1) -> Float[Array, "*shape"]:
    """The same with derivative zero, in a rule that is right so many times more.

    Raises:
        NotImplementedError: where it is differentiated once more.
    """
    return lax.stop_gradient(_constant.bind(x, orders=orders))


def _zero(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.zeros_like(x)


def _as_of(primals, tangents):
    (x,), (change,) = primals, tangents
    # A second derivative would lack what turns the eigenvectors. Whatever it is, nothing is added.
    nothing = jnp.where(jnp.zeros_like(x, bool), constant(x, 0), 0)
    return nothing, change + nothing


zero_with_derivative = per_platform(_zero, _as_of)
"""Zero, with the first derivative of what is given, and no second one."""


def _derivative(primals, tangents, *, orders):
    del tangents
    if not orders:
        raise NotImplementedError(
            "eigenvectors: wanted at most second derivatives, and first ones of what tells single "
            "eigenvectors apart (empirical Bayes, shrinkage, ranks as arrays), got higher ones"
        )
    (x,) = primals
    return _constant.bind(x, orders=orders - 1), jnp.zeros_like(x)


def _batched(arguments, axes, *, orders):
    return _constant.bind(*arguments, orders=orders), axes[0]


def _same(x, *, orders):
    del orders
    return x


_constant.def_impl(_same)
_constant.def_abstract_eval(_same)
batching.primitive_batchers[_constant] = _batched
ad.primitive_jvps[_constant] = _derivative
mlir.register_lowering(_constant, mlir.lower_fun(_same, multiple_results=False))
