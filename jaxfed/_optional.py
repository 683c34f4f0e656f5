"""Imports optional packages, with one error message for all that are missing."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: dotted name of the module, e.g. `"matplotlib.pyplot"`.
        extra: the extra of jaxfed that installs it.

    Returns:
        The imported module.

    Raises:
        ImportError: if it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here and is not installed: pip install 'jaxfed[{extra}]'"
        ) from error
