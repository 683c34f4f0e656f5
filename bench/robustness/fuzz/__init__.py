"""Malformed arguments and files for all public names."""
