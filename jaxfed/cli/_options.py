"""Options of commands, written by hand or derived from the signature of an algorithm's class."""

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import CoercionError, Group, Parameter, Token, convert


def option(flag: str, kind: Any, about: str, default: Any = ..., **more: Any) -> inspect.Parameter:
    """Describe an option.

    Args:
        flag: `--shared-rank`, or a name without dashes for an argument without a flag.
        kind: the type of its value, or a tuple of allowed words.
        about: its help.
        default: its default value; an option without one is required.
        more: further arguments of `cyclopts.Parameter`.
    """
    if default is ...:
        default = inspect.Parameter.empty
    if isinstance(kind, tuple):
        kind = Literal[kind]
    if default is None:
        kind = kind | None
    if default is None or default is False or default == ():
        more["show_default"] = False
    if default is False:
        more["negative"] = ""
    if _has_whole_numbers(kind):
        more.setdefault("converter", exactly)
    is_named = flag.startswith("--")
    name = flag.removeprefix("--").replace("-", "_")
    place = inspect.Parameter.KEYWORD_ONLY if is_named else inspect.Parameter.POSITIONAL_ONLY
    annotation = Annotated[kind, Parameter(help=about, **more)]
    return inspect.Parameter(name, place, default=default, annotation=annotation)


def options_of(
    algorithm: Callable[..., Any], *, without: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Describe an option for each parameter of a class, except those in `without`.

    The annotation determines the type, and the docstring of the constructor the help.
    """
    about = descriptions(algorithm)
    return [
        option(flag_of(name), _kind(parameter.annotation), about.get(name, ""), parameter.default)
        for name, parameter in inspect.signature(algorithm).parameters.items()
        if name not in without
    ]


def optional_of(
    algorithm: Callable[..., Any], defaults: Mapping[str, str]
) -> list[inspect.Parameter]:
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


def define(
    run: Callable[[SimpleNamespace], bool | None],
    options: Mapping[str, Sequence[inspect.Parameter]],
    about: str = "",
    **fixed: Any,
) -> Callable[..., bool | None]:
    """Make the function that cyclopts calls for a command.

    Args:
        run: runs the command, given the values of the options. A `ValueError`, `OSError`,
            `ImportError` or `FloatingPointError` that it raises is printed in one line. It returns
            True if it wrote results of a run that did not converge.
        options: the options by the title of their group in the help; `""` for no title.
        about: its line in a list of commands, and further paragraphs of its own help.
        fixed: values for options that it does not have.
    """
    parameters = []
    for number, (title, group) in enumerate(options.items()):
        shown = Parameter(group=Group(title or "Options", sort_key=number))
        parameters += [each.replace(annotation=Annotated[each.annotation, shown]) for each in group]
    # Those without a flag come first.
    signature = inspect.Signature(sorted(parameters, key=lambda each: each.kind))

    def called(*positional: Any, **named: Any) -> bool | None:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return run(SimpleNamespace(**fixed, **bound.arguments))

    called.__doc__ = paragraphs(about)
    called.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def paragraphs(about: str) -> str:
    """Return a text without the line breaks within its paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in about.split("\n\n"))


def call(arguments: SimpleNamespace, algorithm: Callable[..., Any], **others: Any) -> Any:
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
        name: plain.sub("", " ".join(about.split())).replace("`", "").rstrip(".")
        for name, about in zip(parts[::2], parts[1::2], strict=True)
    }


def first_line(algorithm: Callable[..., Any]) -> str:
    """Return the first line of a docstring, without its markup."""
    return (inspect.getdoc(algorithm) or "").split("\n")[0].rstrip(".").replace("`", "")


def _has_whole_numbers(kind: Any) -> bool:
    return kind is int or any(map(_has_whole_numbers, get_args(kind)))


def exactly(kind: Any, words: Sequence[Token]) -> Any:
    """Convert the words of an option, but no number that would be rounded to a whole one."""
    for word in words:
        with suppress(ValueError):  # of what is no number, which `convert` refuses
            if not (number := float(word.value)).is_integer():
                # With the word, which names the option; the number of its values is not known here.
                raise CoercionError(msg=f"wanted a whole number, got {number:g}", token=word)
    return convert(kind, words)


def _kind(annotation: Any) -> Any:
    """Return the type of an option: of several types, one that a word can be converted to."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for part in get_args(annotation) if (kind := _kind(part)) is not None]
        return float if float in kinds else kinds[0]
    known = annotation in (int, float, bool) or get_origin(annotation) in (Literal, tuple)
    return annotation if known else None
