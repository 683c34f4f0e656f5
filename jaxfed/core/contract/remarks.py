"""Remarks on a result: what its reader should know before relying on it."""

import abc
from collections.abc import Mapping

import equinox as eqx
import numpy as np
from jaxtyping import Float

from jaxfed.core.contract.algorithm import Personalized

# A relative fall of the objective in the second half of a run that is worth a remark.
FALL = 1e-3


class HasRemarks(eqx.Module):
    """An algorithm that knows what is wrong with a result, or easily misread in it."""

    @abc.abstractmethod
    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """What a reader of this result should know, in sentences.

        Called on the host, once a run is over.

        Args:
            result: the run's.
            history: the run's, `(rounds,)` arrays by name.
        """


def still_falling(objective: Float[np.ndarray, " rounds"]) -> tuple[str, ...]:
    """A remark if the objective was still falling when the rounds were over.

    The fall of the second half of the rounds is what the next ones may well bring again. Tenths of
    the rounds are compared, so that what scatters from round to round does not count as a fall.

    Args:
        objective: of each round; entries that are not finite are passed over.
    """
    objective = objective[np.isfinite(objective)]
    rounds = len(objective)
    if rounds < 10:
        return ()
    tenth = max(2, rounds // 10)
    middle, last = objective[rounds // 2 - tenth : rounds // 2], objective[-tenth:]
    before = objective[-2 * tenth : -tenth]
    scale = max(abs(objective[-1]), 1e-3 * abs(objective).max())
    fall = (middle.min() - last.max()) / scale if scale else 0.0
    if not (fall > FALL and before.mean() - last.mean() > 1e-2 * FALL * scale):
        return ()
    return (
        f"The objective still fell by {100 * fall:.2g} % in the second half of the rounds: the run "
        "has not converged; run more rounds (warm_start=) or choose a faster solver.",
    )
