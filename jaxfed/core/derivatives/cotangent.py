"""A look at the cotangent that comes back to a value, in programs that run in both modes.

`jax.custom_vjp` would do, but that forward mode refuses it.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from jaxfed.linalg.derivatives import with_rule

# (value, its cotangent) -> what goes on in place of the cotangent
Look = Callable[[PyTree, PyTree], PyTree]


def hooked(value: PyTree, look: Look) -> PyTree:
    """The value, whose cotangent is replaced in reverse mode; forward mode sees the identity.

    Args:
        value: arrays with derivatives.
        look: what comes in place of the cotangent. It is traced where that is known, and
            differentiated as it stands where that is.
    """

    def rule(value, given, change):
        zeros = jax.tree.map(jnp.zeros_like, value)
        operands = jax.tree.leaves((eqx.combine(change, zeros), value))
        out = _hook.bind(*operands, look=_Looked(look, value))
        return given, jax.tree.unflatten(jax.tree.structure(value), out)

    return with_rule(value, value, rule)


class _Looked:
    """A look at flat lists of arrays."""

    def __init__(self, look: Look, like: PyTree):
        self.look, self.structure = look, jax.tree.structure(like)

    def __call__(self, values: list[Array], cotangents: list[Array]) -> list[Array]:
        trees = (jax.tree.unflatten(self.structure, x) for x in (values, cotangents))
        return jax.tree.leaves(self.look(*trees))


# The first half of its operands is passed on, the second is for the look.
_hook = Primitive("cotangent_hook")
_hook.multiple_results = True


@_hook.def_impl
def _first_half(*operands, look):
    del look
    return list(operands[: len(operands) // 2])


_hook.def_abstract_eval(_first_half)
mlir.register_lowering(_hook, mlir.lower_fun(_first_half, multiple_results=True))


def _jvp(primals, tangents, *, look):
    count = len(primals) // 2
    changes = [ad.instantiate_zeros(t) for t in tangents[:count]]
    return (
        _hook.bind(*primals, look=look),
        _hook.bind(*changes, *primals[count:], look=look),
    )


def _transpose(cotangents, *operands, look):
    count = len(operands) // 2
    found = look(list(operands[count:]), [ad.instantiate_zeros(ct) for ct in cotangents])
    return [*found, *[None] * count]


def _batch(operands, axes, *, look):
    count = len(operands) // 2
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    moved = [batching.bdim_at_front(x, a, size) for x, a in zip(operands, axes, strict=True)]
    return _hook.bind(*moved, look=_Batched(look)), [0] * count


class _Batched:
    """A look at batches."""

    def __init__(self, look):
        self.look = look

    def __call__(self, values, cotangents):
        return jax.vmap(self.look)(values, cotangents)


ad.primitive_jvps[_hook] = _jvp
ad.primitive_transposes[_hook] = _transpose
batching.primitive_batchers[_hook] = _batch
