"""Options of commands, written by hand or derived from the signature of an algorithm's class."""

import argparse
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

METAVARS = {int: "N", float: "X", str: "NAME", Path: "DIR"}
_REQUIRED = object()


class Option(NamedTuple):
    """An option of a command."""

    flag: str  # `--shared-rank`, or a name without dashes for a positional argument
    keywords: dict[str, Any]  # keyword arguments of `argparse.ArgumentParser.add_argument`


def option(flag: str, kind: Any, about: str, default: Any = _REQUIRED, **keywords: Any) -> Option:
    """Describe an option.

    Args:
        flag: see `Option`.
        kind: a function that converts a word to a value, a tuple of allowed words, a list of one
            function for several values, or `bool` for a flag without a value.
        about: its help, to which the default is appended.
        default: its default value; an option without one is required.
        keywords: further keyword arguments of `add_argument`.
    """
    if default is not _REQUIRED:
        keywords["default"] = default
        if default is not None and default != () and kind is not bool:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else "%(default)s"
            about += f"; default: {shown}"
    elif flag.startswith("-"):
        keywords["required"] = True
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif isinstance(kind, tuple):
        keywords["choices"] = kind
    else:
        if isinstance(kind, list):
            keywords = {"nargs": "+"} | keywords
            (kind,) = kind
        keywords = {"type": kind, "metavar": METAVARS.get(kind)} | keywords
    return Option(flag, {"help": about, **keywords})


def options_of(algorithm: Callable[..., Any], *, without: Collection[str] = ()) -> list[Option]:
    """Describe an option for each parameter of a class, except those in `without`.

    The annotation determines the type, and the docstring of the constructor the help.
    """
    about = descriptions(algorithm)
    return [
        option(flag_of(name), _kind(parameter.annotation), about.get(name, ""), _default(parameter))
        for name, parameter in inspect.signature(algorithm).parameters.items()
        if name not in without
    ]


def optional_of(algorithm: Callable[..., Any], defaults: Mapping[str, str]) -> list[Option]:
    """Describe options for some parameters of a class whose defaults the command chooses.

    Args:
        algorithm: the class.
        defaults: the default of each, as stated in the help; the value is None.
    """
    about, parameters = descriptions(algorithm), inspect.signature(algorithm).parameters
    return [
        option(flag_of(x), _kind(parameters[x].annotation), f"{about[x]}; default: {words}", None)
        for x, words in defaults.items()
    ]


def call(arguments: argparse.Namespace, algorithm: Callable[..., Any], **others: Any) -> Any:
    """Call a class with the values of its options; `others` replace them or are added."""
    names = inspect.signature(algorithm).parameters
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return algorithm(**(values | others))


def flag_of(name: str) -> str:
    """Return the flag of a parameter."""
    return "--" + name.replace("_", "-")


def descriptions(algorithm: Callable[..., Any]) -> dict[str, str]:
    """Return the help text of each parameter, from the docstring of a constructor."""
    text = inspect.getdoc(getattr(algorithm, "__init__", algorithm)) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\w|\Z)", text, re.M | re.S)
    parts = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.M)[1:]
    # A command leaves an option out instead of passing None, and has no mathematics.
    plain = re.compile(r"(; |(?<=\.) )None [^.;]*\.?|\\[()]|\\(?=\w)")
    return {
        name: plain.sub("", " ".join(about.split())).replace("`", "").rstrip(".").replace("%", "%%")
        for name, about in zip(parts[::2], parts[1::2], strict=True)
    }


def first_line(algorithm: Callable[..., Any]) -> str:
    """Return the first line of a docstring, without its markup."""
    return (inspect.getdoc(algorithm) or "").split("\n")[0].rstrip(".").replace("`", "")


def _default(parameter: inspect.Parameter) -> Any:
    return _REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default


def _kind(annotation: Any) -> Any:
    """Return the type of an option: of several types, one that a word can be converted to."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for part in get_args(annotation) if (kind := _kind(part)) is not None]
        return float if float in kinds else kinds[0]
    if get_origin(annotation) is tuple:
        return [_kind(get_args(annotation)[0])]
    return annotation if annotation in (int, float, bool) else None
