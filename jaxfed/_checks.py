"""Checks of arguments, which raise a `ValueError` of the form `name: wanted ..., got ...`.

Functions named `check_...` return nothing; those named `checked_...` return the argument in its
final form. Of traced numbers and arrays, only shapes and types are checked.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key

from jaxfed._refusals import closest
from jaxfed._refusals import refuse as refuse
from jaxfed._refusals import shown as shown

LARGEST = 2**31 - 1
"""The largest integer that every index of JAX can hold."""


def check_name(argument: str, given: object, known: Sequence[str]) -> None:
    """Accept one of the known names."""
    if not isinstance(given, str) or given not in known:
        raise refuse(argument, f"one of {', '.join(known)}", given)


def check_options(
    given: Mapping[str, object], *takers: Callable, without: Sequence[str] = ()
) -> None:
    """Refuse options that are passed on to functions which do not have them.

    Args:
        given: the options by name.
        takers: the functions that have them, as keyword arguments.
        without: names of arguments that the caller sets itself.
    """
    taken = [each for taker in takers for each in inspect.signature(taker).parameters.values()]
    named = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    known = [each.name for each in taken if each.kind in named and each.name not in without]
    for name in given:
        if name not in known:
            hint = closest(name, known) or f"; the options are {', '.join(known)}"
            raise ValueError(f"{name}: no such option{hint}")


def check_flag(argument: str, given: object) -> None:
    """Accept True and False."""
    if not isinstance(given, bool | np.bool_):
        raise refuse(argument, "True or False", given)


def check_text(argument: str, given: object) -> None:
    """Accept a string."""
    if not isinstance(given, str):
        raise refuse(argument, "a text", given)


def check_texts(argument: str, given: object) -> None:
    """Accept a list of strings."""
    if not is_list(given) or not all(isinstance(each, str) for each in given):
        raise refuse(argument, "a list of texts", given)


def check_list(argument: str, given: object, wanted: str) -> None:
    """Accept a list that is not empty."""
    if not is_list(given) or len(given) == 0:
        raise refuse(argument, f"a list of {wanted}, at least one", given)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list or another sequence, but not a string."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def check_count(argument: str, given: object, *, least: int = 1, most: int = LARGEST) -> None:
    """Accept a Python int from `least` to `most`.

    Equinox treats NumPy integers as arrays, which static fields must not hold; see `check_whole`.
    """
    if isinstance(given, np.integer):
        raise refuse(argument, "an int of Python", given)
    check_whole(argument, given, least=least, most=most)


def check_whole(argument: str, given: object, *, least: int = 1, most: int = LARGEST) -> None:
    """Accept an integer, Python's or NumPy's, from `least` to `most`."""
    if not is_whole(given) or given < least:
        raise refuse(argument, f"a whole number of at least {least}", given)
    if given > most:
        raise refuse(argument, f"a whole number from {least} to {most}", given)


def counts_of(argument: str, given: object, owners: int) -> tuple[int, ...]:
    """A positive integer for each client, from one for all or a list."""
    if is_whole(given):
        given = (given,) * owners
    if isinstance(given, np.ndarray | jax.Array):
        given = host_array(argument, given, "whole numbers").tolist()
    if not is_list(given) or len(given) != owners:
        raise refuse(argument, f"one whole number or {owners}, one per client", given)
    for number in given:
        check_whole(argument, number)
    return tuple(int(number) for number in given)


def is_whole(given: object) -> TypeGuard[int]:
    """Whether a value is an integer, Python's or NumPy's, and not a boolean."""
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def check_factor(
    argument: str, given: object, *, optional: bool = False, single: bool = False
) -> None:
    """Accept finite numbers of at least 0, in the precision that JAX gives them.

    Args:
        argument: its name.
        given: one number, or an array of them.
        optional: whether it may be None.
        single: whether it must be one number.
    """
    if not (optional and given is None):
        _check_numbers(argument, given, "a finite number of at least 0", lambda x: x >= 0, single)


def check_positive(
    argument: str, given: object, *, optional: bool = False, single: bool = False
) -> None:
    """Accept positive finite numbers, in the precision that JAX gives them.

    Args:
        argument: its name.
        given: one number, or an array of them.
        optional: whether it may be None.
        single: whether it must be one number.
    """
    if not (optional and given is None):
        _check_numbers(argument, given, "a positive finite number", lambda x: x > 0, single)


def check_number(
    argument: str, given: object, wanted: str, holds: Callable[[Any], Any] = np.isfinite
) -> None:
    """Accept ONE finite real number that meets a condition.

    Args:
        argument: its name.
        given: the number.
        wanted: the condition in words.
        holds: the condition.
    """
    _check_numbers(argument, given, wanted, holds, single=True)


def check_probability(argument: str, given: object) -> None:
    """Accept ONE number strictly between 0 and 1."""
    check_number(argument, given, "a number between 0 and 1", lambda x: (x > 0) & (x < 1))


def _check_numbers(
    argument: str, given: object, wanted: str, holds: Callable[[Any], Any], single: bool
) -> None:
    if isinstance(given, Tracer):
        fits = not single or given.ndim == 0
    else:
        values = _in_precision(given)
        if values is None or (single and values.ndim):
            fits = False
        else:
            fits = bool((np.isfinite(values) & holds(values)).all())
    if not fits:
        raise refuse(argument, wanted, given)


def check_callable(argument: str, given: object, wanted: str = "a function") -> None:
    """Accept a callable."""
    if not callable(given):
        raise refuse(argument, wanted, given)


def check_instance(argument: str, given: object, kind: type, wanted: str) -> None:
    """Accept an instance of a class."""
    if isinstance(given, type) and issubclass(given, kind):
        name = given.__name__
        raise ValueError(f"{argument}: wanted {wanted}, got the class {name}; call it: {name}(...)")
    if not isinstance(given, kind):
        raise refuse(argument, wanted, given)


def checked_key(argument: str, given: object) -> Key[Array, ""]:
    """One random key; a key of another generator is converted to a Threefry key.

    Other generators draw by the batch under `jax.vmap`, so results would depend on how clients
    are spread over devices.
    """
    if isinstance(given, jax.Array | np.ndarray):
        key = given
        if given.dtype == np.uint32 and given.ndim > 0:
            with suppress(TypeError):  # of another length
                key = jax.random.wrap_key_data(jnp.asarray(given))
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return threefry(jnp.asarray(key))
    raise refuse(argument, "one random key, such as jax.random.key(0)", given)


def threefry(key: Key[Array, ""]) -> Key[Array, ""]:
    """The key if it is a Threefry key, else a Threefry key made from all its words."""
    if jax.random.key_impl(key) == "threefry2x32":
        return key
    words = jax.random.key_data(key)
    first = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return reduce(jax.random.fold_in, words[2:], first)


def checked_dtype(argument: str, given: object) -> np.dtype:
    """A floating-point type."""
    try:
        found = jnp.dtype(given) if isinstance(given, str | type | np.dtype) else None
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise refuse(argument, "a type of floating-point numbers, such as 'float32'", given)
    return found


def checked_path(argument: str, given: object) -> Path:
    """A path that a file system could have, whether or not it exists."""
    if not isinstance(given, str | os.PathLike):
        raise refuse(argument, "a path", given)
    name = os.fspath(given)
    if not isinstance(name, str) or not name or "\0" in name:
        raise refuse(argument, "a path", given)
    return Path(name)


def checked_array(
    argument: str,
    given: Any,
    axes: str,
    *,
    finite: bool = False,
    missing: bool = False,
    whole: bool = True,
    half: bool = False,
) -> Array:
    """Real numbers as a JAX array with at least one entry; integers become floats.

    Args:
        argument: its name.
        given: an array, or lists of numbers.
        axes: names of its axes, such as `"clients features rank"`; a number is the axis's length,
            `"..."` stands for any number of axes.
        finite: whether NaN and infinity are refused.
        missing: whether NaN is accepted all the same.
        whole: whether integers are accepted.
        half: whether half precision is kept; otherwise it becomes single precision.
    """
    kind = "real" if whole else "floating-point"
    wanted = f"an array of {kind} numbers of shape ({', '.join(axes.split())})"
    array = given if isinstance(given, jax.Array) else host_array(argument, given, wanted)
    numbers = is_real(array.dtype) if whole else jnp.issubdtype(array.dtype, jnp.floating)
    if not numbers or not _has_axes(array.shape, axes.split()):
        raise refuse(argument, wanted, given)
    if 0 in array.shape:
        raise refuse(argument, f"{wanted}, with at least one entry", given)
    if array.dtype.itemsize > 8:  # of which JAX says little
        raise refuse(argument, f"{wanted} in double precision at most", given)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(float)
    elif not half and array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    if finite and not isinstance(array, Tracer):
        values = np.asarray(array)
        if (np.isinf(values) if missing else ~np.isfinite(values)).any():
            raise ValueError(f"{argument}: wanted finite numbers, got NaN or infinity")
    return jnp.asarray(array)


def host_array(argument: str, given: object, wanted: str) -> np.ndarray:
    """A NumPy array of any type but objects, in the machine's byte order."""
    listed = is_list(given) or isinstance(given, np.ndarray | np.generic | int | float | jax.Array)
    try:
        array = np.asarray(given) if listed else None
    except (ValueError, TypeError, OverflowError):  # ragged, or of random keys
        array = None
    if array is None or array.dtype.kind == "O" or isinstance(given, np.ma.MaskedArray):
        raise refuse(argument, wanted, given)
    # JAX accepts no other byte order.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def checked_table(argument: str, given: object) -> np.ndarray:
    """A table of finite real numbers in double precision, on the host."""
    wanted = "a table (rows, columns) of finite real numbers"
    table = host_array(argument, given, wanted)
    if not is_real(table.dtype) or table.ndim != 2 or not table.size:
        raise refuse(argument, wanted, given)
    if not np.isfinite(table).all():
        raise refuse(argument, wanted, given)
    return table.astype(np.float64)


def checked_labels(argument: str, given: object, length: int | None = None) -> np.ndarray:
    """Groups or classes by numbers or names, on the host.

    Args:
        argument: its name.
        given: the labels.
        length: the wanted number; any positive number by default.
    """
    wanted = f"{'' if length is None else f'{length} '}labels, numbers or names, in a list"
    labels = host_array(argument, given, wanted)
    if labels.dtype.kind not in "biufU" or labels.ndim != 1 or not labels.size:
        raise refuse(argument, wanted, given)
    if length not in (None, len(labels)):
        raise refuse(argument, wanted, given)
    return labels


def checked_weights(weights: Any, clients: int) -> np.ndarray:
    """The clients' weights, of any scale, as numbers on the host.

    Raises:
        ValueError: if they are not one finite, non-negative number per client.
    """
    wanted = f"{clients} numbers, one per client"
    raw = host_array("weights", weights, wanted)
    if not is_real(raw.dtype) or raw.shape != (clients,):
        raise refuse("weights", wanted, weights)
    raw = raw.astype(float)
    if not np.isfinite(raw).all() or (raw < 0).any():
        raise ValueError("weights: wanted finite, non-negative numbers, not all of them zero")
    return raw


def _has_axes(shape: tuple[int, ...], axes: list[str]) -> bool:
    if "..." in axes:
        axes = axes[1:]
        if len(shape) < len(axes):
            return False
        shape = shape[len(shape) - len(axes) :]
    return len(shape) == len(axes) and all(
        not axis.isdecimal() or int(axis) == length
        for axis, length in zip(axes, shape, strict=True)
    )


def is_real(dtype: Any) -> bool:
    """Whether a type holds real numbers, floating-point or integer."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _in_precision(given: object) -> np.ndarray | None:
    """Real numbers in the precision that JAX will use; None for anything else."""
    if not isinstance(given, int | float | np.number | np.ndarray | jax.Array):
        return None
    try:
        values = np.asarray(given)
    except TypeError:  # random keys
        return None
    if isinstance(given, bool | np.ma.MaskedArray) or not is_real(values.dtype) or not values.size:
        return None
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(jax.dtypes.canonicalize_dtype(np.float64))
