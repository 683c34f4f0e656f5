"""`jaxfed reproduce TARGET`: reproduce a table or figure of a paper.

The reproductions are not part of the package. They are in the checkout from which it runs.
"""

import importlib
import sys
from pathlib import Path

from jaxfed.cli._command import Command

_BENCH = Path(__file__).parents[2] / "bench"


def command() -> Command:
    """Describe the command.

    Raises:
        ValueError: if the package is not in a checkout.
    """
    if not (_BENCH / "papers" / "command.py").is_file():
        raise ValueError(
            "reproduce: wanted a checkout of jaxfed, whose folder bench/papers holds the "
            "reproductions, got an installed package without them; clone the repository and "
            "install it with pip install -e '.[cli]'"
        )
    if str(_BENCH) not in sys.path:
        sys.path.insert(0, str(_BENCH))
    return importlib.import_module("papers.command").command()
