"""Values with a derivative that is not that of the operations which made them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

# (value, given, changes of what is given) -> (value, its change)
Rule = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def with_rule(value: PyTree, given: PyTree, rule: Rule) -> PyTree:
    """The value, with a derivative by what is given and no other one.

    `jax.custom_jvp` would do, but for loops that are differentiated in reverse mode: JAX (0.10 at
    least) forgets its rule there, and a second derivative is that of the operations.

    Args:
        value: arrays of real numbers.
        given: arrays.
        rule: from the value and from what is given with its changes, which are None where they are
            zero, the value and its change, linear in the changes. It holds no traced arrays. What
            it returns is what a further derivative is of.
    """
    values, structure = jax.tree.flatten(value)
    others, arrangement = jax.tree.flatten(given)

    def of_lists(operands, changes):
        known = jax.tree.unflatten(structure, operands[: len(values)])
        by = jax.tree.unflatten(arrangement, operands[len(values) :])
        found, change = rule(known, by, jax.tree.unflatten(arrangement, changes))
        return jax.tree.leaves(found), jax.tree.leaves(change)

    found = _ruled.bind(*values, *others, rule=of_lists, count=len(values))
    return jax.tree.unflatten(structure, found)


_ruled = Primitive("value_with_rule")
_ruled.multiple_results = True


@_ruled.def_impl
def _values(*operands, rule, count):
    del rule
    return list(operands[:count])


_ruled.def_abstract_eval(_values)
mlir.register_lowering(_ruled, mlir.lower_fun(_values, multiple_results=True))


def _jvp(primals, tangents, *, rule, count):
    changes = [None if isinstance(t, ad.Zero) else t for t in tangents[count:]]
    return rule(primals, changes)


def _batch(operands, axes, *, rule, count):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    # A value that is the same for all has changes that are not.
    own = [
        batching.bdim_at_front(x, axis, size)
        for x, axis in zip(operands[:count], axes[:count], strict=True)
    ]
    given = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[count:], axes[count:], strict=True)
    ]
    mapped = [0] * count + [None if axis is None else 0 for axis in axes[count:]]

    def batched(operands, changes):
        return jax.vmap(rule, in_axes=(mapped, mapped[count:]))(list(operands), changes)

    return _ruled.bind(*own, *given, rule=batched, count=count), [0] * count


ad.primitive_jvps[_ruled] = _jvp
batching.primitive_batchers[_ruled] = _batch
