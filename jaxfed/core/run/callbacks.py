"""Callbacks between chunks of rounds. They are pure, so checkpoints can save their states."""

import abc
from collections.abc import Callable

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from jaxfed._checks import check_count, check_factor, check_text
from jaxfed.core.round.problem import State
from jaxfed.core.run.solution import Solution


class Callback(eqx.Module):
    """Called between chunks of rounds; may stop the run.

    A callback stores nothing in itself: `update` takes its state and returns the next one.
    Checkpoints save it, so that a resumed run, or a second run, behaves like the first.
    """

    @abc.abstractmethod
    def init(self) -> PyTree[np.ndarray]:
        """The initial state, as NumPy arrays."""

    @abc.abstractmethod
    def update(
        self, state: PyTree[np.ndarray], solution: Solution
    ) -> tuple[PyTree[np.ndarray], bool]:
        """The next state, and whether to stop."""


class EarlyStopping(Callback):
    """Stops a run when a metric has not improved for a while.

    Use it with a metric of held-out samples and `fit(..., best=monitor)`. With few, noisy samples
    the optimum of the training objective can be far from the truth; stopping early stays closer.
    """

    monitor: str = eqx.field(static=True)
    patience: int = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)

    def __init__(self, monitor: str, *, patience: int = 5, min_delta: float = 0.0):
        """Watch `history[monitor]`, where smaller is better.

        Args:
            monitor: name of a metric or diagnostic in the history.
            patience: number of measurements without improvement to allow, at most one per chunk.
            min_delta: the smallest decrease that counts as an improvement.

        Raises:
            ValueError: if `monitor` is not a string, `patience` is not a non-negative integer, or
                `min_delta` is negative or not finite.
        """
        check_text("monitor", monitor)
        check_count("patience", patience, least=0)
        check_factor("min_delta", min_delta, single=True)
        self.monitor, self.patience, self.min_delta = monitor, patience, float(min_delta)

    def init(self) -> dict[str, np.ndarray]:
        """The state before any measurement."""
        return {
            "lowest": np.full((), np.inf),
            "waited": np.zeros((), int),
            "seen": np.zeros((), int),
        }

    def update(
        self, state: dict[str, np.ndarray], solution: Solution
    ) -> tuple[dict[str, np.ndarray], bool]:
        """Stop once there are more than `patience` measurements since the last improvement."""
        value = newest(solution, "monitor", self.monitor)
        seen = np.count_nonzero(~np.isnan(solution.history[self.monitor]))
        if seen == state["seen"]:
            return state, False  # nothing new was measured
        better = value < state["lowest"] - self.min_delta
        waited = np.where(better, 0, state["waited"] + 1)
        lowest = np.where(better, value, state["lowest"])
        kept = {"lowest": lowest, "waited": waited, "seen": np.asarray(seen)}
        return kept, bool(waited > self.patience)


class Best(eqx.Module):
    """The lowest value of a metric so far, and the state at which it occurred.

    Before the first measurement, the value is infinite and the state the last one.
    """

    value: np.ndarray
    state: State

    @property
    def measured(self) -> bool:
        """Whether any value has been a number."""
        return bool(self.value < np.inf)


def initial(callback: Callback | Callable) -> PyTree:
    """A callback's initial state; None for a plain function."""
    return callback.init() if isinstance(callback, Callback) else None


def updated(
    callback: Callback | Callable, state: PyTree, solution: Solution
) -> tuple[PyTree, bool]:
    """A callback's next state, and whether it stops the run."""
    if isinstance(callback, Callback):
        return callback.update(state, solution)
    return None, bool(callback(solution))


def better(name: str | None, best: Best | None, solution: Solution) -> Best | None:
    """The best state so far by a history entry; None if no entry is named.

    Raises:
        ValueError: if the history has no such entry.
    """
    if name is None:
        return None
    value = newest(solution, "best", name)
    if best is None or not best.measured or value < best.value:
        return Best(np.asarray(value, float), solution.state)
    return best


def newest(solution: Solution, argument: str, name: str) -> float:
    """The last measured value of a history entry; infinity before the first measurement.

    Raises:
        ValueError: if the history has no such entry; the message names the argument.
    """
    if name not in solution.history:
        raise ValueError(
            f"{argument}: wanted one of {', '.join(sorted(solution.history))}, got {name!r}"
        )
    values = solution.history[name]
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else np.inf
