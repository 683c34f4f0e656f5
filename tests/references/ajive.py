"""AJIVE in plain float64 NumPy.

Feng, Jiang, Hannig & Marron (2018), Angle-based joint and individual variation explained. Written
from the paper for tests of the library; it shares no code with it.
"""

from typing import NamedTuple

import numpy as np


class Parts(NamedTuple):
    """What AJIVE finds."""

    scores: np.ndarray  # joint
    joint: list[np.ndarray]
    individual: list[np.ndarray]
    individual_ranks: list[int]


def ajive(views, rank, signal_ranks, individual_ranks=None):
    """Section 2: signals, joint scores, those that every view has, and what is left of it."""
    bases, thresholds = [], []
    for x, r in zip(views, signal_ranks, strict=True):
        u, s, _ = np.linalg.svd(x, full_matrices=False)
        bases.append(u[:, :r])
        thresholds.append((s[r - 1] + np.append(s, 0)[r]) / 2)
    scores = np.linalg.svd(np.concatenate(bases, axis=1), full_matrices=False)[0][:, :rank]
    lengths = np.array([np.linalg.norm(x.T @ scores, axis=0) for x in views])
    scores = scores[:, (lengths > np.array(thresholds)[:, None]).all(0)]
    joint = [scores @ scores.T @ x for x in views]
    individual, ranks = [], []
    for i, (x, j) in enumerate(zip(views, joint, strict=True)):
        u, s, vt = np.linalg.svd(x - j, full_matrices=False)
        k = np.sum(s > thresholds[i]) if individual_ranks is None else individual_ranks[i]
        individual.append(u[:, :k] * s[:k] @ vt[:k])
        ranks.append(int(k))
    return Parts(scores, joint, individual, ranks)
