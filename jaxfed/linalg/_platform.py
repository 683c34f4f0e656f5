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


def per_platform(
    default: Callable[..., PyTree], rule: Callable | None = None, **others: Callable[..., PyTree]
) -> Callable:
    """One function for all platforms but those that are named, each of which has its own.

    Which one it is, is decided when a program is lowered, so that a program lowered for another
    machine gets that machine's. `jax.lax.platform_dependent` does the same, and traces all of them
    each time: a fifth of the time that a run's first call takes on a processor.

    A derivative rule stays with the function. That of `jax.custom_jvp` does not: where a loop has
    been differentiated in reverse mode JAX (0.10 at least) forgets it, so that a second derivative
    goes through what the function does inside.

    Args:
        default: from arrays, or trees of them, to arrays of real numbers; what is differentiated
            unless there is a rule.
        rule: `(primals, tangents) -> (results, changes)`, as that of `jax.custom_jvp`, linear in
            the tangents.
        others: what does the same on a platform, `"tpu"` or `"cuda"`.

    Returns:
        A function of the same arguments. `jax.vmap` maps what is chosen. Its keyword arguments are
        static, and given to all these functions.
    """

    def flat(function, tree, how, *arrays):
        return function(*jax.tree.unflatten(tree, arrays), **dict(how))

    def mapped(function, levels):
        """The function mapped over the axes before its own, innermost first."""
        for level in levels:
            function = jax.vmap(function, in_axes=tuple(0 if x else None for x in level))
        return function

    def whole(function, arrays, tree, levels, how):
        return mapped(partial(flat, function, tree, how), levels)(*arrays)

    # Traced once for each shape, however often it is asked for.
    @partial(jax.jit, static_argnames=("tree", "levels", "how"))
    def by_default(*arrays, tree, levels, how):
        return whole(default, arrays, tree, levels, how)

    def result(arrays, static):
        given = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in arrays]
        return by_default.eval_shape(*given, **static)

    def plain(*arrays, **static):
        return jax.tree.leaves(by_default(*arrays, **static))

    def batched(arrays, axes, *, levels, **static):
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        level = tuple(axis is not None for axis in axes)
        found = choice.bind(*moved, levels=(*levels, level), **static)
        return found, [0] * len(found)

    def shapes(*arrays, **static):
        found = jax.tree.leaves(result(arrays, static))
        return [ShapedArray(x.shape, x.dtype) for x in found]

    def lowering(function):
        def lowered(*arrays, **static):
            return jax.tree.leaves(whole(function, arrays, **static))

        return mlir.lower_fun(lowered, multiple_results=True)

    def jvp(primals, tangents, *, tree, levels, how):
        arrays = *primals, *(ad.instantiate_zeros(change) for change in tangents)
        if rule is None:  # forward, as the function may be a loop
            function = partial(plain, tree=tree, levels=levels, how=how)
            return jax.jvp(function, arrays[: len(primals)], arrays[len(primals) :])
        tree = jax.tree.structure((0, 0)).compose(tree)
        found = whole(rule, arrays, tree, tuple(level * 2 for level in levels), how)
        return tuple(jax.tree.leaves(x) for x in found)

    choice = Choice(getattr(default, "__name__", "per_platform"), plain)
    compiled = jax.jit(choice.bind, static_argnames=("tree", "levels", "how"))
    choice.def_impl(compiled)
    choice.def_abstract_eval(shapes)
    batching.primitive_batchers[choice] = batched
    ad.primitive_jvps[choice] = jvp
    mlir.register_lowering(choice, mlir.lower_fun(plain, multiple_results=True))
    for platform, function in others.items():
        mlir.register_lowering(choice, lowering(function), platform=platform)

    def chosen(*arguments, **how):
        arrays, tree = jax.tree.flatten(arguments)
        static = {"tree": tree, "levels": (), "how": tuple(sorted(how.items()))}
        found = choice.bind(*arrays, **static)
        return jax.tree.unflatten(jax.tree.structure(result(arrays, static)), found)

    return chosen
