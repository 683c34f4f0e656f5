"""What the numbers may depend on: versions of the language and of the packages."""

import platform
from importlib import metadata

VERSION = metadata.version("jaxfed")
"""Of jaxfed, as it was installed."""


def versions() -> dict[str, str]:
    """The versions of Python, jaxfed and the packages that compute, by name."""
    packages = ("jaxfed", "jax", "jaxlib", "equinox", "numpy")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}
