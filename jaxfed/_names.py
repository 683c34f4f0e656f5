"""Public names that are imported when they are asked for, and old ones, with their successors."""

import contextlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    module: str, places: Mapping[str, str], old: Mapping[str, str | tuple[str, Any]]
) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports what is asked for, and knows old names.

    Hide it from type checkers by `if not TYPE_CHECKING`, or they take every misspelt name of the
    module for one of these.

    Args:
        module: the module's `__name__`.
        places: by the name, where it lives, `"jaxfed.core.run:fit"`.
        old: by the old name, the full dotted new one, `"jaxfed.DivergenceError"`; or, where the
            arguments changed too, the new one with what the old name still stands for.

    Returns:
        `f(name)`, which returns what the name stands for, with a warning for an old one, and raises
        an `AttributeError` for any other.
    """

    def attribute(name: str) -> Any:
        if name in places:
            # With a colon even for a module: what fails in one is told as it is.
            place = places[name] + ":" * (":" not in places[name])
            found = vars(sys.modules[module])[name] = pkgutil.resolve_name(place)
            return found
        if name not in old:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        known = old[name]
        new = known if isinstance(known, str) else known[0]
        warnings.warn(
            f"{module}.{name} is now {new}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return pkgutil.resolve_name(new) if isinstance(known, str) else known[1]

    return attribute


def caller() -> int:
    """The `stacklevel` of a warning at which it is told of whoever called this package."""
    # A context manager that is used as a decorator calls from within its own module.
    level, frame, inside = 1, sys._getframe(1), (os.path.dirname(__file__), contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def renamed_argument(old: str, new: str) -> None:
    """Warn that an argument has another name now."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in the next release",
        DeprecationWarning,
        stacklevel=caller(),
    )
