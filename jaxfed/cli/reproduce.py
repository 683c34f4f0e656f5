"""`jaxfed reproduce TARGET`: reproduce a table or figure of a paper.

The reproductions are not part of the package. They are in the checkout from which it runs.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

_BENCH = Path(__file__).parents[2] / "bench"


def absent(*_: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> None:
    """Say where the reproductions are.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "reproduce: wanted a checkout of jaxfed, whose folder bench/papers holds the "
        "reproductions, got an installed package without them; clone the repository and "
        "install it with pip install -e '.[cli]'"
    )


if (_BENCH / "papers" / "command.py").is_file():
    if str(_BENCH) not in sys.path:
        sys.path.insert(0, str(_BENCH))
    command = importlib.import_module("papers.command").command
else:
    command = absent
