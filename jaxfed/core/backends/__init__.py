"""Backends: map clients on one device or spread them over many."""
