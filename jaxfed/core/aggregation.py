"""Temporary: goes once every algorithm is ported."""
