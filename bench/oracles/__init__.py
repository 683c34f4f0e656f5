"""Runs of code that nobody here wrote, which results are held against."""
