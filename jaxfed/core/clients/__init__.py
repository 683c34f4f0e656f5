"""Clients and their data: padded arrays, buckets, spread over processes, read from a source."""
