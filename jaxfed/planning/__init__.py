"""Predicts the memory, messages and compile time of a run before it starts."""
