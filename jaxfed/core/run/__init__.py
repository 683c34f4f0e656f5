"""Whole runs: `rollout` and `fit`, their loops, and what they return."""
