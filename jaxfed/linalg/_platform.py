"""Functions that are computed in another way on another platform."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree


class Choice(Primitive):
    """Arrays that a platform may compute in a way of its own, all others by `plain`.

    Attributes:
        plain: the same by operations of JAX, for those who evaluate programs themselves.
    """

    multiple_results = True

    def __init__(self, name: str, plain: Callable):
        super().__init__(name)
        self.plain = plain


def per_platform(default: Callable[..., PyTree], **others: Callable[..., PyTree]) -> Callable:
    """One function for all platforms but those that are named, each of which has its own.

    Which one it is, is decided when a program is lowered, so that a program lowered for another
    machine gets that machine's. `jax.lax.platform_dependent` does the same, and traces all of them
    each time: a fifth of the time that a run's first call takes on a processor.

    Args:
        default: from arrays to arrays of real numbers, what is differentiated.
        others: what does the same on a platform, `"tpu"` or `"cuda"`.

    Returns:
        A function of the same arguments. `jax.vmap` maps what is chosen.
    """

    def mapped(function, levels):
        """The function, flattened and mapped over the axes before its own, innermost first."""

        def flat(*arrays, tree):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays)))

        def result(*arrays, tree):
            inner = partial(flat, tree=tree)
            for level in levels:
                inner = jax.vmap(inner, in_axes=tuple(0 if x else None for x in level))
            return inner(*arrays)

        return result

    def batched(arrays, axes, *, tree, levels):
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        level = tuple(axis is not None for axis in axes)
        found = choice.bind(*moved, tree=tree, levels=(*levels, level))
        return found, [0] * len(found)

    def plain(*arrays, tree, levels):
        return mapped(default, levels)(*arrays, tree=tree)

    def shapes(*arrays, tree, levels):
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        found = jax.eval_shape(partial(plain, tree=tree, levels=levels), *given)
        return [ShapedArray(x.shape, x.dtype) for x in found]

    def lowering(function):
        def lowered(*arrays, tree, levels):
            return mapped(function, levels)(*arrays, tree=tree)

        return mlir.lower_fun(lowered, multiple_results=True)

    def jvp(primals, tangents, *, tree, levels):
        # Of derivatives of higher order; forward, as the function may be a loop.
        function = partial(plain, tree=tree, levels=levels)
        changes = [ad.instantiate_zeros(change) for change in tangents]
        return jax.jvp(function, tuple(primals), tuple(changes))

    choice = Choice(getattr(default, "__name__", "per_platform"), plain)
    compiled = jax.jit(choice.bind, static_argnames=("tree", "levels"))
    choice.def_impl(compiled)
    choice.def_abstract_eval(shapes)
    batching.primitive_batchers[choice] = batched
    ad.primitive_jvps[choice] = jvp
    mlir.register_lowering(choice, lowering(default))
    for platform, function in others.items():
        mlir.register_lowering(choice, lowering(function), platform=platform)

    def chosen(*arguments):
        arrays, tree = jax.tree.flatten(arguments)
        found = choice.bind(*arrays, tree=tree, levels=())
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(default, *arguments)), found)

    return chosen
