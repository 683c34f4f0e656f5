"""Attempts to break jaxfed: malformed arguments and files, degenerate data, killed runs."""
