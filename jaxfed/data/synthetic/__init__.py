"""Synthetic data with known truth; one file per paper."""
