"""Scripts that make the tables of the documentation and of `bench/RESULTS.md`, except times."""

import sys
from pathlib import Path

# The papers' experiments are the package `papers`, for `jaxfed reproduce` as well.
sys.path.insert(0, str(Path(__file__).parents[1]))
