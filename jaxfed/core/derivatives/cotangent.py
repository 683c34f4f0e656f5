"""Hooks that replace the cotangent of a value, in programs that run in both modes.

`jax.custom_vjp` would suffice if forward mode did not refuse it.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, PyTree

from jaxfed.linalg.derivatives import with_rule

# (value, its cotangent) -> the cotangent that replaces it
Hook = Callable[[PyTree, PyTree], PyTree]


def with_hook(value: PyTree, hook: Hook) -> PyTree:
    """The value, with its cotangent replaced in reverse mode; forward mode sees the identity.

    Args:
        value: arrays with derivatives.
        hook: computes the replacement. It is traced where the cotangent is known, and can be
            differentiated.
    """

    def rule(value, given, change):
        # Changes that are zero are None here; the primitive wants an array for each.
        zeros = jax.tree.map(jnp.zeros_like, value)
        operands = jax.tree.leaves((eqx.combine(change, zeros), value))
        out = _hook.bind(*operands, hook=_FlatHook(hook, value))
        return given, jax.tree.unflatten(jax.tree.structure(value), out)

    return with_rule(value, value, rule)


class _FlatHook:
    """A hook on flat lists of arrays."""

    def __init__(self, hook: Hook, like: PyTree):
        self.hook, self.structure = hook, jax.tree.structure(like)

    def __call__(self, values: list[ArrayLike], cotangents: list[Array]) -> list[Array]:
        trees = (jax.tree.unflatten(self.structure, x) for x in (values, cotangents))
        return jax.tree.leaves(self.hook(*trees))


# It returns the first half of its operands; the second half is for the hook.
_hook = Primitive("cotangent_hook")
_hook.multiple_results = True


@_hook.def_impl
def _first_half(*operands, hook):
    del hook
    return list(operands[: len(operands) // 2])


_hook.def_abstract_eval(_first_half)
mlir.register_lowering(_hook, mlir.lower_fun(_first_half, multiple_results=True))


def _jvp(primals, tangents, *, hook):
    count = len(primals) // 2
    # Linear in the first half. The second is kept as it is for the hook, which transposition calls.
    changes = [ad.instantiate_zeros(t) for t in tangents[:count]]
    return (
        _hook.bind(*primals, hook=hook),
        _hook.bind(*changes, *primals[count:], hook=hook),
    )


def _transpose(cotangents, *operands, hook):
    count = len(operands) // 2
    found = hook(list(operands[count:]), [ad.instantiate_zeros(ct) for ct in cotangents])
    # The second half are values that the hook reads; nothing is transposed with respect to them.
    return [*found, *[None] * count]


def _batch(operands, axes, *, hook):
    count = len(operands) // 2
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    # Give every operand the axis, since the hook is mapped over values and cotangents alike.
    moved = [batching.bdim_at_front(x, a, size) for x, a in zip(operands, axes, strict=True)]
    return _hook.bind(*moved, hook=_BatchedHook(hook)), [0] * count


class _BatchedHook:
    """A hook on batches."""

    def __init__(self, hook):
        self.hook = hook

    def __call__(self, values, cotangents):
        return jax.vmap(self.hook)(values, cotangents)


ad.primitive_jvps[_hook] = _jvp
ad.primitive_transposes[_hook] = _transpose
batching.primitive_batchers[_hook] = _batch
