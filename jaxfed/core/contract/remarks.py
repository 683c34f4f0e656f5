"""Remarks on a result that its reader should know before relying on it."""

import abc
from collections.abc import Mapping

import equinox as eqx
import numpy as np
from jaxtyping import Float

from jaxfed.core.contract.algorithm import Personalized

# Remark on a relative fall of the objective in the second half of a run, or a final stopping
# measure, above this value.
FALL = 1e-3


class HasRemarks(eqx.Module):
    """An algorithm that points out problems and pitfalls of its results."""

    @abc.abstractmethod
    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Return what a reader of this result should know, in sentences.

        Called on the host after a run.

        Args:
            result: the run's result.
            history: the run's `(rounds,)` arrays by name.
        """


def not_converged(history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Remark if the run had not converged when its rounds ended.

    The test is whether the objective rose, or fell in the second half of the rounds, so that more
    rounds may lower it further, or the algorithm's stopping measure is still large. It compares
    tenths of the rounds, to ignore scatter between rounds.

    Args:
        history: the run's `(rounds,)` arrays by name; entries that are not finite are ignored.
    """
    objective = _finite(history, "objective")
    fall = _fall(objective)
    measure = _finite(history, "stopping_measure")
    # What has a stopping measure may pass through higher values on its way.
    rise = 0.0 if len(measure) else _rise(objective)
    left = float(np.median(measure[-max(2, len(measure) // 10) :])) if len(measure) >= 10 else 0.0
    if rise > FALL:
        return (
            f"The objective rose by {100 * rise:.2g} % from the first round to the last: steps "
            "may be too long, or messages too noisy.",
        )
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


def _rise(objective: Float[np.ndarray, " rounds"]) -> float:
    """The relative rise from the first round to the last ones; zero if these scatter as much."""
    if len(objective) < 10:
        return 0.0
    last = objective[-max(5, len(objective) // 10) :]
    rise = last.min() - objective[0]
    # Not relative to an objective that starts near zero, which any change would exceed.
    scale = max(abs(objective[0]), 1e-3 * abs(objective).max())
    return rise / scale if rise > np.ptp(last) / 2 else 0.0


def _fall(objective: Float[np.ndarray, " rounds"]) -> float:
    """The relative fall in the second half of the rounds; zero if the end is level."""
    rounds = len(objective)
    if rounds < 10:
        return 0.0
    tenth = max(2, rounds // 10)
    middle, last = objective[rounds // 2 - tenth : rounds // 2], objective[-tenth:]
    before = objective[-2 * tenth : -tenth]
    # An objective may end near zero, as a residual does; then compare with its largest value.
    scale = max(abs(objective[-1]), 1e-3 * abs(objective).max())
    # Level at the end: the fall lies behind, and more rounds would not continue it.
    if not before.mean() - last.mean() > 1e-2 * FALL * scale:
        return 0.0
    # The least fall that the scatter within both tenths allows.
    return (middle.min() - last.max()) / scale
