"""Predicates that decide which values a parameter accepts, one for each kind of parameter.

A predicate returns whether the library must accept ONE value. It must refuse all others.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Kind = Callable[[Any], bool]

REAL = "fiu"  # the kinds of dtypes that are real numbers
LARGEST = 2**31 - 1


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
    """A whole number of Python."""
    return lambda value: type(value) is int and least <= value <= most


def whole(least: int = 1, most: int = LARGEST) -> Kind:
    """A whole number of Python or NumPy."""
    return lambda value: type(value) in (int, np.int64) and least <= value <= most


def listed(kind: Kind, length: int | None = None, least: int = 1) -> Kind:
    """A list or tuple of so many values of a kind."""
    return lambda value: (
        isinstance(value, list | tuple | range)
        and (len(value) >= least if length is None else len(value) == length)
        and all(map(kind, value))
    )


def number(above: float = -np.inf, least: float = -np.inf, most: float = np.inf, arrays=False):
    """Finite real numbers in single precision within bounds, and arrays of them."""

    def fits(value) -> bool:
        if isinstance(value, bool | np.ma.MaskedArray) or not isinstance(
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
            known.size
            and (np.isfinite(known) & (known > above) & (known >= least) & (known <= most)).all()
        )

    return fits


def positive(arrays: bool = True) -> Kind:
    """A hyperparameter that is positive."""
    return number(above=0, arrays=arrays)


def factor(arrays: bool = True) -> Kind:
    """A hyperparameter that may be zero."""
    return number(least=0, arrays=arrays)


def tolerance(value) -> bool:
    """At least zero, or infinity; NaN is none."""
    return number(least=0)(value) or value == float("inf")


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
    return isinstance(value, str | os.PathLike) and str(value) != "" and "\0" not in str(value)


def instance(*classes: type) -> Kind:
    """An object of a class."""
    return lambda value: isinstance(value, classes)


def function(value) -> bool:
    """What can be called; a class can."""
    return callable(value)


def key(value) -> bool:
    """One random key, of the new or the old style."""
    if not isinstance(value, np.ndarray | jax.Array):
        return False
    new = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.ndim == 0 if new else value.dtype == np.uint32 and value.shape == (2,)


def known(value: Any, kinds: str) -> np.ndarray | None:
    """An array, or lists of numbers, of some kinds and at least one entry; None for others."""
    if isinstance(value, list | tuple | range):
        try:
            value = np.asarray(value)
        except (ValueError, TypeError, OverflowError):
            return None
    if not isinstance(value, np.ndarray | jax.Array) or isinstance(value, np.ma.MaskedArray):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    found = np.asarray(value)
    return found if found.dtype.kind in kinds and found.size else None


def array(*shape: int | None, kinds: str = "f", finite: bool = False) -> Kind:
    """An array of a shape, None for any length; `...` first for any leading axes."""

    def fits(value) -> bool:
        found = known(value, kinds)
        if found is None or (finite and not np.isfinite(found).all()):
            return False
        wanted, given = shape, found.shape
        if wanted[:1] == (...,):
            wanted = wanted[1:]
            given = given[max(0, len(given) - len(wanted)) :]
        return len(given) == len(wanted) and all(
            w in (None, g) for w, g in zip(wanted, given, strict=True)
        )

    return fits


def real(*shape: int | None, finite: bool = False) -> Kind:
    """The same of any real numbers, whole ones too."""
    return array(*shape, kinds=REAL, finite=finite)


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


OF_KINDS = {"either", "listed", "mapping", "optional"}
# Functions that make a kind; what else is here is one.
MAKERS = {"array", "count", "factor", "number", "one_of", "positive", "real", "whole", *OF_KINDS}
