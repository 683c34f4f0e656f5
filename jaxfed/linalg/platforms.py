"""Functions that are computed in another way on another platform.

Which way it is, is decided when a program is lowered, and not where it is traced: programs for
accelerators can be made on machines that have none. All that differs between platforms is chosen
here: other operations of JAX, and the hand-written kernels that `jaxfed.linalg._dispatch` offers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

Maps = tuple[tuple[bool, ...], ...]
"""The `jax.vmap`s around a function, the innermost first: which of its arrays each of them maps."""


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
    default: Callable[..., PyTree],
    rule: Callable | None = None,
    kernels: Mapping[str, Callable[..., PyTree]] | None = None,
    **others: Callable[..., PyTree],
) -> Callable:
    """One function for all platforms but those that are named, each of which has its own.

    `jax.lax.platform_dependent` does the same, and traces all of them each time: a fifth of the
    time that a run's first call takes on a processor.

    A derivative rule stays with the function. That of `jax.custom_jvp` does not: where a loop is
    differentiated in reverse mode JAX (0.10 at least) forgets it, so that a second derivative goes
    through what the function does inside.

    Args:
        default: from arrays, or trees of them, to arrays of real numbers; what is differentiated
            unless there is a rule.
        rule: `(primals, tangents) -> (results, changes)`, as that of `jax.custom_jvp`, linear in
            the tangents.
        kernels: what does the same on a platform by one call, however often it is mapped:
            `(maps, *arrays) -> arrays`, all of which have an axis in front for each map, the
            outermost first; or None, where `default` does better. The compiler cannot part a
            kernel among devices, so programs that it parts have `default`.
        others: what does the same on a platform, `"tpu"` or `"cuda"`.

    Returns:
        A function of the same arguments, and of static ones by name. `jax.vmap` maps what is
        chosen.
    """

    def mapped(function):
        # Traced once for each shape, however often it is asked for.
        @partial(jax.jit, static_argnames=("tree", "maps", "static"))
        def result(*arrays, tree, maps, static):
            def inner(*arrays):
                found = function(*jax.tree.unflatten(tree, arrays), **dict(static))
                return jax.tree.leaves(found)

            for which in maps:
                inner = jax.vmap(inner, in_axes=tuple(0 if x else None for x in which))
            return inner(*arrays)

        return result

    def by_one_call(kernel):
        def result(*arrays, tree, maps, static):
            found = kernel(maps, *jax.tree.unflatten(tree, arrays), **dict(static))
            if found is None:
                return plain(*arrays, tree=tree, maps=maps, static=static)
            return jax.tree.leaves(found)

        return result

    def batched(arrays, axes, *, tree, maps, static):
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        which = tuple(axis is not None for axis in axes)
        found = choice.bind(*moved, tree=tree, maps=(*maps, which), static=static)
        return found, [0] * len(found)

    @cache
    def result_of(tree, static, described):
        """Shapes and structure of what is not mapped, from the arrays' shapes and types."""
        given = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*x) for x in described])
        return jax.tree.flatten(jax.eval_shape(partial(default, **dict(static)), *given))

    def shapes(*arrays, tree, maps, static):
        fronts = [sum(which[i] for which in maps) for i in range(len(arrays))]
        own = tuple((x.shape[n:], x.dtype) for x, n in zip(arrays, fronts, strict=True))
        sizes = sizes_of(maps, arrays)
        return [ShapedArray((*sizes, *x.shape), x.dtype) for x in result_of(tree, static, own)[0]]

    def jvp(primals, tangents, *, tree, maps, static):
        arrays = *primals, *(ad.instantiate_zeros(change) for change in tangents)
        if by_rule is None:  # forward, as the function may be a loop
            function = partial(plain, tree=tree, maps=maps, static=static)
            return jax.jvp(function, arrays[: len(primals)], arrays[len(primals) :])
        tree = jax.tree.structure((0, 0)).compose(tree)
        maps = tuple(which * 2 for which in maps)
        found = by_rule(*arrays, tree=tree, maps=maps, static=static)
        return found[: len(found) // 2], found[len(found) // 2 :]

    def transpose(changes, *arrays, tree, maps, static):
        """Of what is linear in those of its arrays that are not known, as a product is in one."""
        unknown = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]

        def function(*given):
            all_of_them = list(arrays)
            for i, x in zip(unknown, given, strict=True):
                all_of_them[i] = x
            return plain(*all_of_them, tree=tree, maps=maps, static=static)

        like = [arrays[i].aval for i in unknown]
        changes = [ad.instantiate_zeros(change) for change in changes]
        found = dict(zip(unknown, jax.linear_transpose(function, *like)(changes), strict=True))
        return [found.get(i) for i in range(len(arrays))]

    plain = mapped(default)
    by_rule = None if rule is None else mapped(rule)
    choice = Choice(getattr(default, "__name__", "per_platform"), plain)
    choice.def_impl(jax.jit(choice.bind, static_argnames=("tree", "maps", "static")))
    choice.def_abstract_eval(shapes)
    batching.primitive_batchers[choice] = batched
    ad.primitive_jvps[choice] = jvp
    if rule is None:
        ad.primitive_transposes[choice] = transpose
    by_default = mlir.lower_fun(plain, multiple_results=True)
    mlir.register_lowering(choice, by_default)
    for platform, function in others.items():
        own = mlir.lower_fun(mapped(function), multiple_results=True)
        mlir.register_lowering(choice, own, platform=platform)
    for platform, kernel in (kernels or {}).items():
        own = mlir.lower_fun(by_one_call(kernel), multiple_results=True)
        mlir.register_lowering(choice, _unless_parted(own, by_default), platform=platform)

    def chosen(*arguments, **static):
        arrays, tree = jax.tree.flatten(arguments)
        known = tuple(sorted(static.items()))
        described = tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)
        structure = result_of(tree, known, described)[1]
        return jax.tree.unflatten(structure, choice.bind(*arrays, tree=tree, maps=(), static=known))

    return chosen


def _unless_parted(own: Callable, by_default: Callable) -> Callable:
    """One lowering rule, or the other where the compiler parts the program among devices.

    It does that to what is given arrays that lie on several of them, outside of `jax.shard_map`.
    """

    def rule(context: mlir.LoweringRuleContext, *arguments: Any, **params: Any) -> Any:
        devices: Any = context.module_context.axis_context
        manual = getattr(devices, "manual_axes", None)
        if manual is None:
            parted = getattr(devices, "num_devices", 1) != 1
        else:
            parted = frozenset(manual) != frozenset(devices.mesh.axis_names)
        return (by_default if parted else own)(context, *arguments, **params)

    return rule


# --- for kernels ----------------------------------------------------------------------------------


def sizes_of(maps: Maps, arrays: Sequence[Array | ShapedArray]) -> tuple[int, ...]:
    """Over how many each of the maps goes, the outermost first."""
    sizes, fronts = [], [0] * len(arrays)
    for which in reversed(maps):
        sizes.append(next(x.shape[fronts[i]] for i, x in enumerate(arrays) if which[i]))
        fronts = [front + mapped for front, mapped in zip(fronts, which, strict=True)]
    return tuple(sizes)


def with_all_axes(maps: Maps, arrays: Sequence[Array]) -> list[Array]:
    """The arrays with an axis in front for each map, of length 1 where it does not map them."""
    missing = [
        [place for place, which in enumerate(reversed(maps)) if not which[i]]
        for i in range(len(arrays))
    ]
    return [jnp.expand_dims(x, axes) for x, axes in zip(arrays, missing, strict=True)]


def in_one_row(maps: Maps, arrays: Sequence[Array]) -> list[Array]:
    """The arrays with one axis in front for all maps, repeated where they are not mapped."""
    sizes = sizes_of(maps, arrays)

    def row(x):
        own = x.shape[len(sizes) :]
        return jnp.broadcast_to(x, (*sizes, *own)).reshape(math.prod(sizes), *own)

    return [row(x) for x in with_all_axes(maps, arrays)]
