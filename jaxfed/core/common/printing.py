"""How objects print: in one line, with values where they are known."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from jaxfed._checks import shown
from jaxfed.core.common.processes import is_here


def as_call(module: eqx.Module) -> str:
    """A module as the call that makes it, without settings at their defaults.

    A class that a function makes has its name as `factory`.
    """
    kind = type(module)
    factory = getattr(kind, "factory", "")
    maker = getattr(sys.modules[kind.__module__], factory) if factory else kind
    parameters = inspect.signature(maker).parameters
    settings = {x: value for x, value in _fields(module) if not _is(value, parameters, x)}
    given = [name for name in parameters if name in settings]
    # What is no parameter has a default, or is one of several arguments without a name.
    rest = [name for name in settings if name not in parameters]
    if factory:
        unnamed = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
        rest = rest if unnamed else []
    words = []
    for name in [*given, *rest]:
        each = parameters.get(name)
        plain = factory and (each is None or each.kind is each.POSITIONAL_OR_KEYWORD)
        plain = plain and (each is None or each.default is each.empty)
        words.append(f"{'' if plain else f'{name}='}{brief(settings[name])}")
    return f"{factory or kind.__name__}({', '.join(words)})"


def brief(value: Any) -> str:
    """A value in a few characters: a number as it is, an array by its type and shape."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        if is_known(value) and value.shape == ():
            return f"{np.asarray(value).item():.6g}"
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, np.dtype):
        return repr(value.name)
    if inspect.isroutine(value):
        return str(value.__name__)
    if getattr(type(value), "factory", ""):
        return repr(value)
    text = shown(value)
    # Networks and optimizers would fill the line, including their functions' addresses.
    large = isinstance(value, eqx.Module | tuple) and (len(text) > 60 or " at 0x" in text)
    return f"{type(value).__name__}(...)" if large else text


def is_known(array: Any) -> bool:
    """Whether an array has values on this host, so is neither traced nor just a shape."""
    if isinstance(array, np.ndarray):
        return True
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and is_here(array)


def columns(rows: Mapping[str, str]) -> str:
    """Names and descriptions in two columns of text."""
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())


def _fields(module: eqx.Module) -> list[tuple[str, Any]]:
    return [(each.name, getattr(module, each.name, None)) for each in fields(module) if each.init]


def _is(value: Any, defaults: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Whether a setting has its default value."""
    if name not in defaults or defaults[name].default is inspect.Parameter.empty:
        return False
    default = defaults[name].default
    if is_known(value) and value.shape == () and isinstance(default, int | float):
        return bool(np.asarray(value) == np.asarray(default, value.dtype))
    return type(value) is type(default) and value == default


def in_bytes(number: float) -> str:
    """A number of bytes, in a unit that needs few digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.4g} {unit}"
        number /= 1000
    raise AssertionError
