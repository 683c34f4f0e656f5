"""Options of a command from a class's own signature and docstring, so that they are said once."""

import argparse
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin


def add_settings(parser: Any, made: Callable[..., Any], *, without: Collection[str] = ()) -> None:
    """Add an option for each argument of a class.

    Its name and whether it is required are the argument's, its help is what the docstring of the
    constructor says of it.

    Args:
        parser: what they are added to.
        made: the class.
        without: arguments that get no option.
    """
    about = descriptions(made)
    for name, parameter in inspect.signature(made).parameters.items():
        if name not in without:
            add_setting(parser, name, parameter, about.get(name, ""))


def add_setting(parser: Any, name: str, parameter: inspect.Parameter, about: str) -> None:
    """Add the option for one argument."""
    option, default = "--" + name.replace("_", "-"), parameter.default
    kinds = list(_kinds(parameter.annotation))
    if kinds == [bool]:
        action = argparse.BooleanOptionalAction if default else "store_true"
        parser.add_argument(option, action=action, default=default, help=_help(about))
        return
    given: dict[str, Any] = {"required": True, "help": _help(about)}
    if default is not inspect.Parameter.empty:
        shown = "" if default is None else "; default: %(default)s"
        given = {"default": default, "help": _help(about) + shown}
    if names := names_of(parameter):
        given["choices"] = names
    else:
        real = float in kinds
        given |= {"type": float if real else int, "metavar": "X" if real else "N"}
    parser.add_argument(option, **given)


def add_optional(parser: Any, made: Callable[..., Any], defaults: Mapping[str, str]) -> None:
    """Add an option for some arguments of a class that a command has its own defaults for.

    Args:
        parser: what they are added to.
        made: the class, whose docstring says what they are.
        defaults: by the argument, what is said of its default; None is what is parsed without it.
    """
    about, known = descriptions(made), inspect.signature(made).parameters
    for name, words in defaults.items():
        parameter = known[name].replace(default=None)
        add_setting(parser, name, parameter, f"{about[name].rstrip('.')}; default: {words}")


def names_of(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The names that an argument may be, where it is one of several."""
    return tuple(kind for kind in _kinds(parameter.annotation) if isinstance(kind, str))


def chosen(arguments: argparse.Namespace, made: Callable[..., Any], **others: Any) -> Any:
    """What the options that `add_settings` added ask for."""
    names = inspect.signature(made).parameters
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return made(**(given | others))


def descriptions(made: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a constructor says of each argument."""
    text = inspect.cleandoc(inspect.getdoc(getattr(made, "__init__", made)) or "")
    section = re.search(r"^Args:\n(.*?)(?=^\w|\Z)", text, re.M | re.S)
    parts = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.M)[1:]
    return {name: " ".join(about.split()) for name, about in zip(*[iter(parts)] * 2, strict=True)}


def summary(made: Callable[..., Any]) -> str:
    """The first line of a docstring, without its marks."""
    return (inspect.getdoc(made) or "").split("\n")[0].rstrip(".").replace("`", "")


def _kinds(annotation: Any) -> Any:
    """The types and names that an annotation allows."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation in (int, float, bool):
        yield annotation


def _help(about: str) -> str:
    return about.replace("`", "").rstrip(".").replace("%", "%%")
