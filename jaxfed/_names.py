"""Names of modules, of the caller of a warning, and in natural order."""

import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Create a module's `__getattr__`, which imports a name on first use.

    Hide it from type checkers by `if not TYPE_CHECKING`; otherwise they accept every misspelt name
    of the module.

    Args:
        module: the module's `__name__`.
        places: where each name is defined, such as `"jaxfed.core.run:fit"`.

    Returns:
        `f(name)`, which returns the named object, or raises an `AttributeError` for an unknown
        name.
    """

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # Add a colon even for a module, so that errors during its import are raised unchanged.
        place = places[name] + ":" * (":" not in places[name])
        found = vars(sys.modules[module])[name] = pkgutil.resolve_name(place)
        return found

    return attribute


def public_names(module: str) -> Callable[[], list[str]]:
    """Create a module's `__dir__`, which lists only its public names.

    These are `__all__` if it exists, and otherwise the functions and classes that the module and
    its submodules define.

    Args:
        module: the module's `__name__`.
    """

    def names() -> list[str]:
        members = vars(sys.modules[module])
        own = (
            name
            for name, member in members.items()
            if not name.startswith("_")
            and f"{getattr(member, '__module__', '')}.".startswith(f"{module}.")
        )
        return sorted(members.get("__all__", own))

    return names


def caller() -> int:
    """The `stacklevel` of a warning that points to the line that called this package."""
    level, frame, package = 1, sys._getframe(1), os.path.dirname(__file__) + os.sep
    # A type checker of this function stands between it and the function that warns.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jaxtyping."):
        frame = frame.f_back
    # Skip context managers used as decorators, type checkers and wrappers of methods: they call
    # from their own modules.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(package)
        or frame.f_globals.get("__name__", "").partition(".")[0]
        in ("contextlib", "equinox", "jaxtyping", "sklearn")
    ):
        level, frame = level + 1, frame.f_back
    return level


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that compares runs of digits as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part) if k % 2 else -1, part) for k, part in enumerate(parts)]
