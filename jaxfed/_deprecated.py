"""Old public names, which keep working for one release and say what they are called now."""

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, names: Mapping[str, str | tuple[str, Any]]) -> Callable[[str], Any]:
    """A module's `__getattr__` that knows its old names.

    Hide it from type checkers by `if not TYPE_CHECKING`, or they take every misspelt name of the
    module for an old one.

    Args:
        module: the module's `__name__`.
        names: by the old name, the full dotted new one, `"jaxfed.DivergenceError"`; or, where the
            arguments changed too, the new one with what the old name still stands for.

    Returns:
        `f(name)`, which warns and returns what the old name stands for, and raises an
        `AttributeError` for any other name.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        known = names[name]
        new = known if isinstance(known, str) else known[0]
        warnings.warn(
            f"{module}.{name} is now {new}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return pkgutil.resolve_name(new) if isinstance(known, str) else known[1]

    return attribute


def renamed_argument(old: str, new: str) -> None:
    """Warn that an argument has another name now."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
