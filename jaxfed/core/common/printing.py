"""How objects print: in one line, with values where they are known."""

import inspect
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
    """A module as the call that creates it, without settings at their defaults."""
    defaults = inspect.signature(type(module)).parameters
    settings = {name: value for name, value in _fields(module) if not _is(value, defaults, name)}
    return f"{type(module).__name__}({', '.join(f'{k}={brief(v)}' for k, v in settings.items())})"


def on_one_line(module: eqx.Module) -> str:
    """A module with all its settings, on one line."""
    return eqx.tree_pformat(module, width=10**6)


def brief(value: Any) -> str:
    """A value in a few characters: a number as it is, an array by its type and shape."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        if is_known(value) and value.shape == ():
            return f"{np.asarray(value).item():.6g}"
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if inspect.isroutine(value):
        return str(value.__name__)
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
