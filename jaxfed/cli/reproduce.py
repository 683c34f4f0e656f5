"""`jaxfed reproduce TARGET`: the tables and figures of the papers, each by one command.

They are checks and no part of the package: this finds them in the checkout that it belongs to.
"""

import importlib
import sys
from pathlib import Path

_BENCH = Path(__file__).parents[2] / "bench"


def add_parser(subparsers) -> None:
    """Add the `reproduce` command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.

    Raises:
        ValueError: if the package is not in a checkout.
    """
    if not (_BENCH / "papers" / "command.py").is_file():
        raise ValueError(
            "reproduce: the reproductions are not installed with the package but run from a "
            "checkout of jaxfed, where they are in bench/papers: clone the repository and install "
            "it with pip install -e '.[cli]'"
        )
    if str(_BENCH) not in sys.path:
        sys.path.insert(0, str(_BENCH))
    importlib.import_module("papers.command").add_parser(subparsers)
