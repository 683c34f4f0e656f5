"""Derivatives of whole runs: unrolled, checkpointed and implicit."""
