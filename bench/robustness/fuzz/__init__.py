"""Malformed arguments and files for everything that is public."""
