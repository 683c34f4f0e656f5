"""Helpers for all of `core`: buckets, files, processes, meshes, printing and checks of results."""
