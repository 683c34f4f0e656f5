"""Versions of Python and of the packages that results may depend on."""

import functools
import platform
from importlib import metadata

try:
    VERSION = metadata.version("jaxfed")
    """The installed version of jaxfed."""
except metadata.PackageNotFoundError:  # only its sources are on the path
    VERSION = "0+unknown"


def versions() -> dict[str, str]:
    """The versions of Python, jaxfed and the packages that compute, by name."""
    return dict(_read())


@functools.cache
def _read() -> dict[str, str]:
    packages = ("jax", "jaxlib", "equinox", "numpy")
    found = {"python": platform.python_version(), "jaxfed": VERSION}
    return found | {package: metadata.version(package) for package in packages}
