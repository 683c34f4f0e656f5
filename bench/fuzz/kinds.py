"""Which values a parameter takes: a small predicate for each kind of parameter.

A predicate says of ONE value whether it must be accepted; everything else must be refused.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Kind = Callable[[Any], bool]

LARGEST = 2**31 - 1
WHOLE = (int, np.integer)


def anything(value) -> bool:
    """No value is wrong."""
    return True


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return lambda value: value is None or kind(value)


def either(*kinds: Kind) -> Kind:
    """One of several kinds."""
    return lambda value: any(kind(value) for kind in kinds)


def count(least: int = 1, most: int = LARGEST) -> Kind:
    """A whole number."""
    return lambda value: (
        isinstance(value, WHOLE) and not isinstance(value, bool) and least <= value <= most
    )


def listed(kind: Kind, length: int | None = None, least: int = 1) -> Kind:
    """A list or tuple of so many values of a kind."""
    return lambda value: (
        isinstance(value, list | tuple)
        and (len(value) >= least if length is None else len(value) == length)
        and all(map(kind, value))
    )


def number(above: float = -np.inf, least: float = -np.inf, most: float = np.inf, arrays=False):
    """Finite real numbers in single precision within bounds, and arrays of them."""

    def fits(value) -> bool:
        if isinstance(value, bool) or not isinstance(
            value, int | float | np.number | np.ndarray | jax.Array
        ):
            return False
        if not arrays and np.ndim(value) > 0:
            return False
        known = np.asarray(value)
        if known.dtype.kind not in "fiu":
            return False
        with np.errstate(over="ignore", under="ignore"):
            known = known.astype(np.float32)
        return bool(
            known.size and (np.isfinite(known) & (known > above) & (known >= least) & (known <= most)).all()
        )

    return fits


def positive(arrays: bool = True) -> Kind:
    """A hyperparameter that is positive."""
    return number(above=0, arrays=arrays)


def factor(arrays: bool = True) -> Kind:
    """A hyperparameter that may be zero."""
    return number(least=0, arrays=arrays)


def flag(value) -> bool:
    """True or False."""
    return isinstance(value, bool | np.bool_)


def one_of(*names: Any) -> Kind:
    """One of the known names."""
    return lambda value: any(type(value) is type(name) and value == name for name in names)


def text(value) -> bool:
    """A text."""
    return isinstance(value, str)


def path(value) -> bool:
    """A path, whether or not there is anything."""
    return isinstance(value, str | os.PathLike) and os.fspath(value) != ""


def instance(*classes: type) -> Kind:
    """An object of a class."""
    return lambda value: isinstance(value, classes)


def function(value) -> bool:
    """What can be called; a class can."""
    return callable(value)


def key(value) -> bool:
    """One random key."""
    return (
        isinstance(value, jax.Array)
        and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        and value.ndim == 0
    )


def array(*shape: int | None, kinds: str = "f", finite: bool = False) -> Kind:
    """An array of a shape (None for any length) and kinds of numbers, of at least one entry."""

    def fits(value) -> bool:
        if isinstance(value, list | tuple):
            try:
                value = np.asarray(value)
            except (ValueError, TypeError, OverflowError):
                return False
        if not isinstance(value, np.ndarray | jax.Array):
            return False
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return False
        known = np.asarray(value)
        if known.dtype.kind not in kinds or known.ndim != len(shape) or not known.size:
            return False
        if finite and not np.isfinite(known).all():
            return False
        return all(wanted in (None, given) for wanted, given in zip(shape, known.shape, strict=True))

    return fits


def mapping(kind: Kind) -> Kind:
    """A dictionary of values of a kind, at least one."""
    return lambda value: (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and kind(x) for name, x in value.items())
    )


def texts(value) -> bool:
    """A list of texts."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(each, str) for each in value)
    )
