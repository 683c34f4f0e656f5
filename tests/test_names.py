"""Where a warning points to."""

import os

import pytest

import jaxfed
from jaxfed import _names

PACKAGE = os.path.dirname(jaxfed.__file__)


@pytest.mark.parametrize(
    ("file", "module"),
    [
        (f"{PACKAGE}_project/run.py", "__main__"),
        ("/home/me/run.py", "sklearn_tools"),
        ("/home/me/run.py", "equinoxes.run"),
    ],
)
def test_a_callers_code_only_resembles_the_package(file, module):
    """Folders and modules whose names begin like those of a package are not part of it."""
    space = {"__name__": module, "caller": _names.caller}
    exec(compile("level = (lambda: caller())()", file, "exec"), space)
    assert space["level"] == 1
    inside = {"__name__": "jaxfed.core", "caller": _names.caller}
    exec(compile("def warn(): return caller()", f"{PACKAGE}/core/x.py", "exec"), inside)
    exec(compile("level = warn()", file, "exec"), space | inside | {"__name__": module})
    assert inside["warn"]() == 2
