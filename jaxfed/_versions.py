"""What the numbers may depend on: versions of the language and of the packages."""

import platform
from importlib import metadata

try:
    VERSION = metadata.version("jaxfed")
    """Of jaxfed, as it was installed."""
except metadata.PackageNotFoundError:  # its sources alone are on the path
    VERSION = "0+unknown"


def versions() -> dict[str, str]:
    """The versions of Python, jaxfed and the packages that compute, by name."""
    packages = ("jax", "jaxlib", "equinox", "numpy")
    found = {"python": platform.python_version(), "jaxfed": VERSION}
    return found | {package: metadata.version(package) for package in packages}
