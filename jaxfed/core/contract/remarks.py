"""Remarks on a result: what its reader should know before relying on it."""

import abc
from collections.abc import Mapping

import equinox as eqx
import numpy as np
from jaxtyping import Float

from jaxfed.core.contract.algorithm import Personalized

# A relative fall of the objective in the second half of a run, and a stopping measure at its end,
# that are worth a remark.
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


def not_converged(history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """A remark if the run was still on its way when the rounds were over.

    It was if its objective fell in the second half of the rounds, a fall that the next ones may
    well repeat, or if the stopping measure of the algorithm's own is still large. Tenths of the
    rounds are compared, so that what scatters from round to round does not count.

    Args:
        history: the run's, `(rounds,)` arrays by name; entries that are not finite do not count.
    """
    fall = _fall(_finite(history, "objective"))
    measure = _finite(history, "stopping_measure")
    left = float(np.median(measure[-max(2, len(measure) // 10) :])) if len(measure) >= 10 else 0.0
    if fall > FALL:
        finding = f"The objective still fell by {100 * fall:.2g} % in the second half of the rounds"
    elif left > FALL:
        finding = f"The stopping measure is still {left:.2g}"
    else:
        return ()
    advice = "run more rounds (warm_start=) or choose a faster solver"
    return (f"{finding}: the run has not converged; {advice}.",)


def _finite(history: Mapping[str, np.ndarray], name: str) -> Float[np.ndarray, " rounds"]:
    values = np.asarray(history.get(name, ()), float)
    return values[np.isfinite(values)]


def _fall(objective: Float[np.ndarray, " rounds"]) -> float:
    """The relative fall in the second half of the rounds; zero if the end is level."""
    rounds = len(objective)
    if rounds < 10:
        return 0.0
    tenth = max(2, rounds // 10)
    middle, last = objective[rounds // 2 - tenth : rounds // 2], objective[-tenth:]
    before = objective[-2 * tenth : -tenth]
    scale = max(abs(objective[-1]), 1e-3 * abs(objective).max())
    if not before.mean() - last.mean() > 1e-2 * FALL * scale:
        return 0.0
    return (middle.min() - last.max()) / scale
