"""Comparisons that raise an AssertionError stating what should hold."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxfed import channel
from jaxfed._checks import refuse


def numbers(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def measured(x: Any) -> bool:
    """Whether an array holds measurements; integers are counts, masks or labels."""
    return eqx.is_inexact_array(x) and bool((np.asarray(x) % 1 != 0).any())


def floats_as(tree: PyTree, dtype: Any) -> PyTree:
    """Convert floating-point numbers to a type; weakly typed scalars stay weakly typed."""

    def cast(x):
        if not eqx.is_inexact_array(x):
            return x
        if x.weak_type and x.ndim == 0:
            return jnp.asarray(float(x))
        return jnp.asarray(np.asarray(x), dtype)

    return jax.tree.map(cast, tree)


def arrays(argument: str, tree: PyTree) -> PyTree:
    """Convert all leaves to arrays in double precision, or whole numbers.

    Raises:
        ValueError: if one is not an array of finite numbers.
    """
    try:
        found = jax.tree.map(jnp.asarray, tree)
    except (TypeError, ValueError, OverflowError):
        found = None
    leaves = jax.tree.leaves(found)
    kinds = jnp.floating, jnp.integer, jnp.bool_
    if not leaves or not all(
        any(jnp.issubdtype(x.dtype, kind) for kind in kinds) and np.isfinite(numbers(x)).all()
        for x in leaves
    ):
        raise refuse(argument, "arrays of finite numbers", tree)
    return floats_as(found, np.float64)


def check_same_shapes(given: PyTree, wanted: PyTree, sentence: str) -> None:
    """Check that both have the same structure, shapes and types."""
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise AssertionError(
            f"{sentence}: got {jax.tree.structure(given)}, wanted {jax.tree.structure(wanted)}"
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise AssertionError(
                f"{sentence}: at {jax.tree_util.keystr(path)} got {x.dtype}{list(x.shape)}, wanted "
                f"{y.dtype}{list(y.shape)}"
            )


def same(given: PyTree, wanted: PyTree, sentence: str, rtol: float, atol: float) -> None:
    """Check that both have the same numbers; bit for bit if the tolerances are zero."""
    leaves, others = jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(wanted)
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise AssertionError(
            f"{sentence}: got {jax.tree.structure(given)}, wanted {jax.tree.structure(wanted)}"
        )
    for (path, x), y in zip(leaves, others, strict=True):
        x, y = numbers(x), numbers(y)
        place = jax.tree_util.keystr(path) or "the only array"
        if x.shape != y.shape:
            raise AssertionError(f"{sentence}: at {place} got shape {x.shape}, wanted {y.shape}")
        if x.dtype.kind not in "fiub" or not np.allclose(x, y, rtol, atol, equal_nan=True):
            if np.array_equal(x, y):
                continue
            with np.errstate(invalid="ignore"):
                off = np.abs(x.astype(float) - y.astype(float)).max()
            raise AssertionError(
                f"{sentence}: at {place} they differ by up to {off:.3g} (numbers up to "
                f"{np.abs(y.astype(float)).max():.3g})"
            )


def check_finite(tree: PyTree, sentence: str) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        bad = ~np.isfinite(numbers(x).astype(float))
        if bad.any():
            raise AssertionError(
                f"{sentence}: {bad.sum()} of {bad.size} numbers at "
                f"{jax.tree_util.keystr(path) or 'the only array'} are not"
            )


def unpadded(x: Array, like: Array, sentence: str) -> np.ndarray:
    """Remove padding, which must be zero."""
    inside = tuple(map(slice, like.shape))
    outside = np.array(x)
    outside[inside] = 0
    if outside.any():
        raise AssertionError(f"{sentence}: got numbers other than zero in the padding")
    return np.asarray(x)[inside]


def checked_length(payload: PyTree) -> int:
    """Return the length of a payload in bytes, and check that it equals its counted bits."""
    length, bits = len(channel.to_bytes(payload)), int(channel.bits(payload))
    if 8 * length != bits:
        raise AssertionError(
            f"the counted bits are those of the payload: {bits} bits are counted for {length} bytes"
        )
    return length


def refused(run: Callable[[], Any], argument: str, what: str) -> None:
    """Check that a call raises a ValueError about an argument."""
    try:
        run()
    except ValueError as refusal:
        if str(refusal).startswith(f"{argument}: "):
            return
        raise AssertionError(
            f"{what} is refused by a ValueError that begins with {argument!r}: it says {refusal}"
        ) from refusal
    except Exception as error:
        raise AssertionError(
            f"{what} is refused by a ValueError that begins with {argument!r}: it ended in "
            f"{type(error).__name__}: {error}"
        ) from error
    raise AssertionError(f"{what} is refused by a ValueError: nothing was raised")


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of the functions that JAX compiles in the context."""
    compiled: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.match(r"Compiling (\S+)", record.getMessage()):
                compiled.append(found[1])

    logger = logging.getLogger("jax")
    before = logger.handlers, logger.propagate, logger.level
    # JAX logs compilations as warnings, which the user should not see here.
    logger.handlers, logger.propagate = [Listener()], False
    try:
        with jax.log_compiles():
            yield compiled
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
