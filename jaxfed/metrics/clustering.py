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


def _contingency(labels: Labels, assigned: Labels) -> Int[np.ndarray, "groups found"]:
    labels = checked_labels("labels", labels)
    assigned = checked_labels("assigned", assigned, len(labels))
    rows, columns = (np.unique(x, return_inverse=True)[1] for x in (labels, assigned))
    table = np.zeros((rows.max() + 1, columns.max() + 1), int)
    np.add.at(table, (rows, columns), 1)
    return table
