"""Arrays with custom derivatives, for authors of algorithms.

It offers values with a derivative rule, constants that refuse higher derivatives, and zeros with a
derivative.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Num, PyTree

DECOMPOSITION = "decomposition"
"""The `checkpoint_name` of the most expensive results, for `jax.checkpoint` to store."""

# (value, operands, changes of the operands) -> (value, its change)
DerivativeRule = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def with_rule(value: PyTree, operands: PyTree, rule: DerivativeRule) -> PyTree:
    """The value, with a derivative with respect to the operands only.

    Unlike with `jax.custom_jvp`, the rule survives loops that are differentiated in reverse mode:
    there JAX (0.10 at least) forgets it, and differentiates the operations a second time.

    Args:
        value: arrays of real numbers.
        operands: arrays.
        rule: `(value, operands, changes) -> (value, change)`. Changes that are zero are None; the
            change must be linear in the others. The rule must not close over traced arrays. Its
            results are differentiated for higher derivatives.
    """
    values, structure = jax.tree.flatten(value)
    others, arrangement = jax.tree.flatten(operands)

    def of_lists(arrays, changes):
        value = jax.tree.unflatten(structure, arrays[: len(values)])
        operands = jax.tree.unflatten(arrangement, arrays[len(values) :])
        value, change = rule(value, operands, jax.tree.unflatten(arrangement, changes))
        return jax.tree.leaves(value), jax.tree.leaves(change)

    found = _ruled.bind(*values, *others, rule=of_lists, count=len(values))
    return jax.tree.unflatten(structure, found)


_ruled = Primitive("value_with_rule")
_ruled.multiple_results = True


@_ruled.def_impl
def _values(*operands, rule, count):
    return list(operands[:count])


_ruled.def_abstract_eval(_values)
mlir.register_lowering(_ruled, mlir.lower_fun(_values, multiple_results=True))


def _jvp(primals, tangents, *, rule, count):
    # None lets a rule skip the products with what does not change.
    changes = [None if isinstance(t, ad.Zero) else t for t in tangents[count:]]
    return rule(primals, changes)


def _batch(operands, axes, *, rule, count):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    # The changes differ along the mapped axis even if the value does not, so give it the axis.
    values = [
        batching.bdim_at_front(x, axis, size)
        for x, axis in zip(operands[:count], axes[:count], strict=True)
    ]
    others = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[count:], axes[count:], strict=True)
    ]
    mapped = [0] * count + [None if axis is None else 0 for axis in axes[count:]]

    def batched(operands, changes):
        return jax.vmap(rule, in_axes=(mapped, mapped[count:]))(list(operands), changes)

    return _ruled.bind(*values, *others, rule=batched, count=count), [0] * count


ad.primitive_jvps[_ruled] = _jvp
batching.primitive_batchers[_ruled] = _batch


def constant(x: Num[Array, "*shape"], name: str, orders: int = 1) -> Num[Array, "*shape"]:
    """The array with derivative zero, like `lax.stop_gradient`, but only up to some order.

    Use it for what does not affect a first derivative but would be missing in a second one. Pass 0
    orders within a rule that is itself differentiated.

    Raises:
        NotImplementedError: if it is differentiated more often; the message says what has no such
            derivative.
    """

    def rule(value, operand, change):
        if not orders:
            raise NotImplementedError(f"{name}: derivatives of this order are not available")
        return constant(value, name, orders - 1), jnp.zeros_like(value)

    return lax.stop_gradient(with_rule(x, x, rule))


def zero_with_derivative(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Zeros with the first derivative of `x`, and no second one."""
    return with_rule(jnp.zeros_like(x), x, _as_of)


def _as_of(zero, x, change):
    # A second derivative would lack the rotation of the eigenvectors; adding zero refuses it.
    fixed = constant(x, "what tells eigenvectors apart (empirical Bayes, shrinkage, ranks)", 0)
    nothing = jnp.where(jnp.zeros_like(zero, bool), fixed, 0)
    return nothing, change + nothing
