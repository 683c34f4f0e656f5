"""Agreement of two groupings, whatever the names of the groups. On the host, not traced."""

import numpy as np
from jaxtyping import Array, Int

from jaxfed._checks import checked_labels


def clustering_accuracy(labels: Int[Array, " m"], assigned: Int[Array, " m"]) -> float:
    """Share of items in the right group, under the best matching of groups.

    Each assigned group stands for at most one true group, and the other way round (Hungarian
    matching, Kuhn 1955).

    Args:
        labels: true groups, `(m,)`; any values that can be compared.
        assigned: groups found, `(m,)`.

    Returns:
        Accuracy between 0 and 1.

    Raises:
        ValueError: if the two are not of the same positive length.
    """
    from scipy.optimize import linear_sum_assignment  # takes longer to import than all of metrics

    table = _contingency(labels, assigned)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum())


def adjusted_rand_index(labels: Int[Array, " m"], assigned: Int[Array, " m"]) -> float:
    """Rand index corrected for chance (Hubert & Arabie 1985).

    Args:
        labels: true groups, `(m,)`; any values that can be compared.
        assigned: groups found, `(m,)`.

    Returns:
        1 for the same grouping, 0 on average for random ones of the same sizes.

    Raises:
        ValueError: if the two are not of the same positive length.
    """
    table = _contingency(labels, assigned)
    together = _pairs(table)
    rows, columns = _pairs(table.sum(axis=1)), _pairs(table.sum(axis=0))
    expected = rows * columns / max(_pairs(table.sum()), 1)
    largest = (rows + columns) / 2
    # Both groupings one group, or both all singletons: nothing chance could have spoiled.
    return 1.0 if largest == expected else float((together - expected) / (largest - expected))


def _pairs(sizes):
    return np.sum(sizes * (sizes - 1)) / 2


def _contingency(labels, assigned):
    labels = checked_labels("labels", labels)
    assigned = checked_labels("assigned", assigned, len(labels))
    rows, columns = (np.unique(x, return_inverse=True)[1] for x in (labels, assigned))
    table = np.zeros((rows.max() + 1, columns.max() + 1), int)
    np.add.at(table, (rows, columns), 1)
    return table
