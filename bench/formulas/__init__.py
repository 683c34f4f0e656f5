"""Closed forms from the papers, against which tests and benchmarks hold the library."""
