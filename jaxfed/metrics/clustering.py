"""Agreement of two groupings, regardless of the groups' names. Computed on the host."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import ArrayLike, Int, Shaped

from jaxfed._checks import checked_labels

Labels: TypeAlias = Shaped[ArrayLike, " _m"] | Sequence[object]


def clustering_accuracy(labels: Labels, assigned: Labels) -> float:
    """Share of items in the right group under the best matching of groups.

    The matching of assigned and true groups is one to one (Hungarian method, Kuhn 1955).

    Args:
        labels: true groups, `(m,)`, by any numbers or names.
        assigned: groups found, `(m,)`.

    Returns:
        Accuracy between 0 and 1.

    Raises:
        ValueError: if the lengths differ or are zero.
    """
    from scipy.optimize import linear_sum_assignment  # its import is slower than all of metrics

    table = _contingency(labels, assigned)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum())


def adjusted_rand_index(labels: Labels, assigned: Labels) -> float:
    """Rand index corrected for chance (Hubert & Arabie 1985).

    Args:
        labels: true groups, `(m,)`, by any numbers or names.
        assigned: groups found, `(m,)`.

    Returns:
        1 for the same grouping, 0 on average for random ones of the same sizes.

    Raises:
        ValueError: if the lengths differ or are zero.
    """
    table = _contingency(labels, assigned)
    together = _pairs(table)
    rows, columns = _pairs(table.sum(axis=1)), _pairs(table.sum(axis=0))
    # Pairs that would be together in both groupings by chance.
    expected = rows * columns / max(_pairs(table.sum()), 1)
    largest = (rows + columns) / 2
    # If both groupings are one group, or both are all singletons, chance has no influence.
    return 1.0 if largest == expected else float((together - expected) / (largest - expected))


def _pairs(sizes):
    """The number of pairs of items within groups of these sizes."""
    return np.sum(sizes * (sizes - 1)) / 2


def _contingency(labels: Labels, assigned: Labels) -> Int[np.ndarray, "groups found"]:
    labels = checked_labels("labels", labels)
    assigned = checked_labels("assigned", assigned, len(labels))
    rows, columns = (np.unique(x, return_inverse=True)[1] for x in (labels, assigned))
    table = np.zeros((rows.max() + 1, columns.max() + 1), int)
    np.add.at(table, (rows, columns), 1)
    return table
