"""Synthetic data whose truth is known, a file for each paper."""
