"""Derive which values a parameter accepts from its annotation and its name.

The annotation determines the type. A name such as `step_size` determines the bounds, which are the
same throughout the library. `callables.toml` describes all other conditions.
"""

import inspect
import os
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from jaxtyping import ArrayLike

from .kinds import (
    REAL,
    Kind,
    array,
    count,
    either,
    factor,
    flag,
    function,
    instance,
    key,
    listed,
    mapping,
    number,
    one_of,
    path,
    positive,
    text,
    tolerance,
    whole,
)


def nothing(value) -> bool:
    """None alone."""
    return value is None


def dtype(value) -> bool:
    """A floating type of single or double precision, by its class, its name or as a dtype."""
    if not isinstance(value, str | type | np.dtype):
        return False
    try:
        return jnp.dtype(value) in (np.float32, np.float64)
    except TypeError:
        return False


TABLE = tomllib.loads(Path(__file__).with_name("callables.toml").read_text(encoding="utf-8"))
NUMBERS = TABLE["numbers"]  # names of parameters by the bounds of their values
CLIENTS = 3  # of the cases
UNPACKED = whole(1, 2**63 - 1)

# What annotations leave open, by the parameter's name.
NAMED: dict[str, Kind] = {
    "ax": nothing,  # axes are drawn into, and those of one case would be full
    "figure": either(nothing, instance(matplotlib.figure.Figure, matplotlib.figure.SubFigure)),
    "client": whole(0, CLIENTS - 1),
    "max_bytes": UNPACKED,
    "metric": one_of("euclidean", "canonical"),
    "optimizer": instance(optax.GradientTransformation),
    "random_state": lambda value: (
        nothing(value) or isinstance(value, bool) or whole(0, 2**32 - 1)(value)
    ),
    "tol": either(nothing, tolerance),
    "warm_start": nothing,
}


def kind_of(
    name: str, parameters: Mapping[str, inspect.Parameter], right: Mapping[str, Any]
) -> Kind:
    """Which values a parameter takes.

    Args:
        name: of the parameter.
        parameters: all of the callable.
        right: arguments that are right, whose shapes the others must fit.
    """
    if name in NAMED:
        return NAMED[name]
    if name == "dtype":
        return either(dtype, nothing) if parameters[name].default is None else dtype
    return _derived(parameters[name].annotation, name, _sizes(name, parameters, right))


def _derived(annotation: Any, name: str, sizes: Mapping[str, int]) -> Kind:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if hasattr(annotation, "dim_str"):
        return _array(annotation, sizes)
    if origin in (typing.Union, types.UnionType):
        return _one_of_several(arguments, name, sizes)
    if origin is typing.Literal:
        return one_of(*arguments)
    if origin is tuple and arguments[-1] is not ...:
        kinds = [_derived(each, name, sizes) for each in arguments]
        return lambda value: (
            isinstance(value, list | tuple)
            and len(value) == len(kinds)
            and all(kind(each) for kind, each in zip(kinds, value, strict=True))
        )
    if origin in (tuple, Sequence, Collection):
        return listed(_derived(arguments[0], name, sizes))
    if origin is Mapping:
        return mapping(_derived(arguments[1], name, sizes))
    if origin is Callable:
        return function
    simple = {
        Any: lambda value: True,
        None: nothing,
        type(None): nothing,
        bool: flag,
        str: text,
        float: _number(name, arrays=False),
        int: _whole(name),
    }
    return simple[annotation] if annotation in simple else instance(annotation)


def _one_of_several(arguments: Sequence[Any], name: str, sizes: Mapping[str, int]) -> Kind:
    if any(getattr(each, "__name__", "").startswith("Key[") for each in arguments):
        return either(key, nothing) if type(None) in arguments else key
    kinds = []
    if {os.PathLike, Path} & {typing.get_origin(each) or each for each in arguments}:
        arguments = [each for each in arguments if each in (None, type(None))]
        kinds.append(path)
    arrays = jax.Array in arguments
    if float in arguments and arrays:
        kinds.append(_number(name, arrays=True))
        numbers = typing.get_args(ArrayLike)  # which has truth values too, and is meant without
        arguments = [each for each in arguments if each not in numbers]
    return either(*kinds, *(_derived(each, name, sizes) for each in arguments))


def _number(name: str, arrays: bool) -> Kind:
    if name in NUMBERS["positive"] or (name in NUMBERS["steps"] and arrays):
        return positive(arrays)
    if name in NUMBERS["steps"]:
        return factor()
    return factor(arrays) if name in NUMBERS["at_least_zero"] else number(arrays=arrays)


def _whole(name: str) -> Kind:
    if name in NUMBERS["whole_of_numpy"]:
        return whole()
    return count(0) if name in NUMBERS["whole_from_zero"] else count()


def _array(annotation: Any, sizes: Mapping[str, int]) -> Kind:
    """An array; axes that other arguments have too must be as long as theirs."""
    dtype, names = annotation.__name__.partition("[")[0], annotation.dim_str.split()
    if dtype == "Key":
        return key
    known = {"Float": REAL, "Int": "iu", "UInt": "u", "Bool": "b"}
    shape: list[Any] = []
    for each in names:
        if each == "..." or each.startswith("*"):
            shape = [...]
        else:
            shape.append(int(each) if each.isdigit() else sizes.get(each))
    return array(*shape, kinds=known.get(dtype, "biufU"))


def _sizes(
    name: str, parameters: Mapping[str, inspect.Parameter], right: Mapping[str, Any]
) -> dict[str, int]:
    """Lengths by the names of axes, of all other arguments."""
    found: dict[str, int] = {}
    for other, value in right.items():
        if other == name or other not in parameters or not hasattr(value, "shape"):
            continue
        annotation = parameters[other].annotation
        for each in typing.get_args(annotation) or (annotation,):
            names = getattr(each, "dim_str", "").split()
            if len(names) == np.ndim(value):
                found = dict(zip(names, np.shape(value), strict=True)) | found
    return found
