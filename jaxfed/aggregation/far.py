"""Find the clients that were far from the aggregate of a robust run."""

import numpy as np
from jaxtyping import Array, Int

from jaxfed.aggregation.robust import FAR, Robust
from jaxfed.core.run.result import check_run
from jaxfed.core.run.solution import Solution


def far_clients(
    solution: Solution, ids: Int[Array | np.ndarray, " clients"]
) -> Int[np.ndarray, " far"]:
    """Return the clients in groups that were far from the aggregate in the last round.

    Args:
        solution: solution of a `Robust` algorithm.
        ids: ids of the run's clients.

    Returns:
        Ids of the clients whose group was at more than three times the median distance. With fewer
        groups than clients, most clients of a far group may be honest.

    Raises:
        ValueError: if this is no solution of one run, or that of another algorithm.
    """
    check_run(solution)
    if not isinstance(solution.algorithm, Robust):
        name = type(solution.algorithm).__name__
        raise ValueError(f"solution: wanted one of jaxfed.aggregation.Robust, got one of {name}")
    far = np.asarray(solution.server.distances) > FAR
    ids = np.asarray(ids)
    # The same groups as in `Robust.prepare`.
    return ids[far[ids % solution.algorithm.groups]]
