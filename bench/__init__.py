"""Measurements of jaxfed: times, the documentation's tables, robustness, and the papers' results.

Run a script from the root of the checkout, such as `python -m bench.speed.polar`. `RESULTS.md`
contains the latest measurements.
"""

import sys
from pathlib import Path

# The papers' experiments are the package `papers`, for `jaxfed reproduce` as well.
sys.path.insert(0, str(Path(__file__).parent))
