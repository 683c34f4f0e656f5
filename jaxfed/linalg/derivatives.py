"""Arrays whose derivative is not that of the operations that made them.

For authors of algorithms: a value with a derivative rule of its own, a constant that refuses to be
differentiated too often, a zero that has a derivative.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Num, PyTree

DECOMPOSITION = "decomposition"
"""The `checkpoint_name` of what costs most to compute, for `jax.checkpoint` to keep."""

# (value, operands, changes of the operands) -> (value, its change)
Rule = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def with_rule(value: PyTree, operands: PyTree, rule: Rule) -> PyTree:
    """The value, with a derivative with respect to the operands and no other one.

    `jax.custom_jvp` would do, but for loops that are differentiated in reverse mode: JAX (0.10 at
    least) forgets its rule there, and a second derivative is that of the operations.

    Args:
        value: arrays of real numbers.
        operands: arrays.
        rule: `(value, operands, changes) -> (value, change)`. The changes are None where they are
            zero; the change is linear in them. It closes over no traced arrays. Higher derivatives
            are those of what it returns.
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
    # A rule can leave out the products with what does not change.
    changes = [None if isinstance(t, ad.Zero) else t for t in tangents[count:]]
    return rule(primals, changes)


def _batch(operands, axes, *, rule, count):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    # The changes differ along the mapped axis even where the value does not, so it gets the axis.
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
    """The same array with derivative zero, as by `lax.stop_gradient`, but only so many times.

    For what makes no difference to a first derivative and would be missed in a second one. Orders
    are 0 within a rule that is itself differentiated.

    Raises:
        NotImplementedError: where it is differentiated more often, naming what has no such
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
    # A second derivative would lack what turns the eigenvectors. Adding zero makes it refuse.
    fixed = constant(x, "what tells eigenvectors apart (empirical Bayes, shrinkage, ranks)", 0)
    nothing = jnp.where(jnp.zeros_like(zero, bool), fixed, 0)
    return nothing, change + nothing
