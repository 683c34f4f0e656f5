"""Attempts to break it: malformed arguments and files, degenerate data, killed runs."""
