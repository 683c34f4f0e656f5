"""Measurements of jaxfed: times, tables of the documentation, robustness, and the papers' results.

Run a script from the root of the checkout, such as `python -m bench.speed.polar`. What it measured
last is in `RESULTS.md`.
"""
