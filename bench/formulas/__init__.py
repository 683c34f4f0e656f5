"""Closed forms from the papers, to test and benchmark the library against."""
