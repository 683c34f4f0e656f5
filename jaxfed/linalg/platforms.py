"""Functions with different implementations on different platforms, and compiler options.

The implementation is chosen when a program is lowered, not when it is traced, so that programs for
accelerators can be compiled on machines without one. Implementations are other JAX operations, or
the hand-written kernels in `jaxfed.linalg._dispatch`.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

Maps = tuple[tuple[bool, ...], ...]
"""The `jax.vmap`s around a function, innermost first: which of its arrays each one maps."""

# These compile a processor's programs in half the time. Only jaxlib 0.10 has old and new ones;
# later versions refuse the option.
OLD_EMITTERS = (
    {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
)


def unless_given(options: Mapping[str, bool | int]) -> dict[str, bool | int]:
    """Compiler options that `XLA_FLAGS` does not set."""
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}


def is_tracing(given: PyTree = None) -> bool:
    """Whether the caller is being traced, where processes cannot communicate, or an argument is."""
    # While a program is traced, the copy becomes a part of it; otherwise it compiles nothing.
    leaves = [jax.device_put(0.0), *jax.tree.leaves(given)]
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def processor_options(
    options: Mapping[str, bool | int], arguments: PyTree
) -> dict[str, bool | int]:
    """Compiler options of a processor's program, for `jax.jit`.

    There are none while another program is traced, of which this one becomes a part, since JAX
    refuses them then.

    Args:
        options: those of a program by itself; `XLA_FLAGS` overrides them.
        arguments: of the program.
    """
    if jax.default_backend() != "cpu" or is_tracing(arguments):
        return {}
    return unless_given(options)


class Choice(Primitive):
    """A primitive whose implementation depends on the platform.

    Attributes:
        plain: the default implementation, for code that evaluates programs itself.
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
    """A function with a default implementation, and others for named platforms.

    `jax.lax.platform_dependent` does the same, but traces all implementations each time, which was
    a fifth of the time of a run's first call on a CPU.

    A derivative rule stays with the function, unlike that of `jax.custom_jvp`: in a loop that is
    differentiated in reverse mode, JAX (0.10 at least) forgets it, and a second derivative is that
    of the operations inside.

    Args:
        default: maps arrays, or trees of them, to arrays of real numbers; without a rule, it is
            differentiated itself.
        rule: `(primals, tangents) -> (results, changes)`, like that of `jax.custom_jvp`, linear in
            the tangents.
        kernels: by platform, implementations that are called once, however often they are mapped:
            `(maps, *arrays) -> arrays`, where all arrays have a leading axis for each map,
            outermost first. They return None if `default` is better. The compiler cannot partition
            a kernel among devices, so programs that it partitions use `default`.
        others: implementations by platform, `"tpu"` or `"cuda"`.

    Returns:
        A function of the same arguments, and of static ones by name. `jax.vmap` maps the chosen
        implementation.
    """

    def mapped(function):
        # Traced once for each shape, however often it is used.
        @partial(jax.jit, static_argnames=("tree", "maps", "static"))
        def result(*arrays, tree, maps, static):
            def inner(*arrays):
                found = function(*jax.tree.unflatten(tree, arrays), **dict(static))
                return jax.tree.leaves(found)

            sizes = mapped_sizes(maps, arrays)
            if one_map := len(maps) > 2 and len(set(maps)) == 1:
                # XLA (of jaxlib 0.10 at least) does not compile some loops over three mapped axes.
                arrays = [
                    x.reshape(-1, *x.shape[len(maps) :]) if mapped else x
                    for x, mapped in zip(arrays, maps[0], strict=True)
                ]
            for which in maps[:1] if one_map else maps:
                inner = jax.vmap(inner, in_axes=tuple(0 if x else None for x in which))
            found = inner(*arrays)
            return [x.reshape(*sizes, *x.shape[1:]) for x in found] if one_map else found

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
        # Only record the map, so that a kernel sees all maps at once.
        which = tuple(axis is not None for axis in axes)
        found = choice.bind(*moved, tree=tree, maps=(*maps, which), static=static)
        return found, [0] * len(found)

    @cache
    def result_of(tree, static, described):
        """Shapes and structure of the unmapped result, from the arrays' shapes and types."""
        arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*x) for x in described])
        return jax.tree.flatten(jax.eval_shape(partial(default, **dict(static)), *arguments))

    def shapes(*arrays, tree, maps, static):
        # Each map has put one axis in front of the arrays that it maps.
        fronts = [sum(which[i] for which in maps) for i in range(len(arrays))]
        unmapped = tuple((x.shape[n:], x.dtype) for x, n in zip(arrays, fronts, strict=True))
        sizes, results = mapped_sizes(maps, arrays), result_of(tree, static, unmapped)[0]
        return [ShapedArray((*sizes, *x.shape), x.dtype) for x in results]

    def jvp(primals, tangents, *, tree, maps, static):
        arrays = *primals, *(ad.instantiate_zeros(change) for change in tangents)
        if by_rule is None:  # in forward mode, since the function may be a loop
            function = partial(plain, tree=tree, maps=maps, static=static)
            return jax.jvp(function, arrays[: len(primals)], arrays[len(primals) :])
        # A rule takes primals and tangents, each mapped as the primals are.
        tree = jax.tree.structure((0, 0)).compose(tree)
        maps = tuple(which * 2 for which in maps)
        found = by_rule(*arrays, tree=tree, maps=maps, static=static)
        return found[: len(found) // 2], found[len(found) // 2 :]

    def transpose(changes, *arrays, tree, maps, static):
        """Transpose a function that is linear in its undefined arrays, as a product is in one."""
        unknown = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]

        def function(*linear):
            operands = list(arrays)
            for i, x in zip(unknown, linear, strict=True):
                operands[i] = x
            return plain(*operands, tree=tree, maps=maps, static=static)

        like = [arrays[i].aval for i in unknown]
        changes = [ad.instantiate_zeros(change) for change in changes]
        found = dict(zip(unknown, jax.linear_transpose(function, *like)(changes), strict=True))
        return [found.get(i) for i in range(len(arrays))]

    plain = mapped(default)
    by_rule = None if rule is None else mapped(rule)
    choice = Choice(getattr(default, "__name__", "per_platform"), plain)
    choice.def_impl(_compiled(choice))
    choice.def_abstract_eval(shapes)
    batching.primitive_batchers[choice] = batched
    ad.primitive_jvps[choice] = jvp
    if rule is None:
        ad.primitive_transposes[choice] = transpose
    by_default = mlir.lower_fun(plain, multiple_results=True)
    mlir.register_lowering(choice, by_default)
    for platform, function in others.items():
        lowering = mlir.lower_fun(mapped(function), multiple_results=True)
        mlir.register_lowering(choice, lowering, platform=platform)
    for platform, kernel in (kernels or {}).items():
        lowering = mlir.lower_fun(by_one_call(kernel), multiple_results=True)
        lowering = _unless_partitioned(lowering, by_default)
        mlir.register_lowering(choice, lowering, platform=platform)

    def chosen(*arguments, **static):
        arrays, tree = jax.tree.flatten(arguments)
        settings = tuple(sorted(static.items()))
        described = tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)
        structure = result_of(tree, settings, described)[1]
        results = choice.bind(*arrays, tree=tree, maps=(), static=settings)
        return jax.tree.unflatten(structure, results)

    return chosen


def _compiled(choice: Choice) -> Callable:
    """Evaluate a choice outside of compiled functions by a program, which is lowered."""
    program = jax.jit(choice.bind, static_argnames=("tree", "maps", "static"))

    def evaluated(*arrays, **params):
        # With `jax.disable_jit`, the program would call this function without end.
        with jax.disable_jit(False):
            return program(*arrays, **params)

    return evaluated


def _unless_partitioned(kernel: Callable, by_default: Callable) -> Callable:
    """A lowering rule that uses the default if the compiler partitions the program.

    It partitions programs whose arrays lie on several devices, outside of `jax.shard_map`.
    """

    def rule(context: mlir.LoweringRuleContext, *arguments: Any, **params: Any) -> Any:
        devices: Any = context.module_context.axis_context
        manual = getattr(devices, "manual_axes", None)
        if manual is None:
            partitioned = getattr(devices, "num_devices", 1) != 1
        else:
            # Within `jax.shard_map` over all axes, each device runs its own program.
            partitioned = frozenset(manual) != frozenset(devices.mesh.axis_names)
        return (by_default if partitioned else kernel)(context, *arguments, **params)

    return rule


# --- for kernels ----------------------------------------------------------------------------------


def mapped_sizes(maps: Maps, arrays: Sequence[Array | ShapedArray]) -> tuple[int, ...]:
    """The sizes of the mapped axes, outermost map first."""
    sizes, fronts = [], [0] * len(arrays)
    for which in reversed(maps):
        sizes.append(next(x.shape[fronts[i]] for i, x in enumerate(arrays) if which[i]))
        fronts = [front + mapped for front, mapped in zip(fronts, which, strict=True)]
    return tuple(sizes)


def with_all_axes(maps: Maps, arrays: Sequence[Array]) -> list[Array]:
    """The arrays with a leading axis for each map, of length 1 if it does not map the array."""
    missing = [
        [place for place, which in enumerate(reversed(maps)) if not which[i]]
        for i in range(len(arrays))
    ]
    return [jnp.expand_dims(x, axes) for x, axes in zip(arrays, missing, strict=True)]


def in_one_row(maps: Maps, arrays: Sequence[Array]) -> list[Array]:
    """The arrays with one leading axis for all maps, repeated if they are not mapped."""
    sizes = mapped_sizes(maps, arrays)

    def row(x):
        unmapped = x.shape[len(sizes) :]
        return jnp.broadcast_to(x, (*sizes, *unmapped)).reshape(math.prod(sizes), *unmapped)

    return [row(x) for x in with_all_axes(maps, arrays)]
