"""Runners execute a run as one compiled program, or round by round from the host."""

import abc
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jaxtyping import Array

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client
from jaxfed.core.round.problem import Costs, Problem, State, blank
from jaxfed.core.round.rounds import Engine, begin, one_round, result_of
from jaxfed.core.round.server import shared_result
from jaxfed.core.round.whole import WHOLE
from jaxfed.core.run import loop
from jaxfed.core.run.loop import (
    History,
    Options,
    check_metric_names,
    evaluated,
    solution_of,
    with_bits,
    with_history,
)
from jaxfed.core.run.solution import Solution

Tolerance = Array | float | None


class Programs:
    """Compiles each function once."""

    def __init__(self, **options: bool | int):
        """Compile with these options."""
        self._options: Any = options
        self._compiled: dict[Callable[..., Any], Any] = {}

    def __call__(self, function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Any:
        """The compiled function; always the same object."""
        if function not in self._compiled:
            self._compiled[function] = jax.jit(
                function, static_argnums=static_argnums, compiler_options=self._options
            )
        return self._compiled[function]


# For the whole process, so that runs of equal shapes share what is compiled.
@cache
def programs(**options: bool | int) -> Programs:
    """The compiled functions for these compiler options; always the same object."""
    return Programs(**options)


class Start(NamedTuple):
    """The state and the costs before the first round."""

    state: State
    costs: Costs  # on the host


class Runner(abc.ABC):
    """Runs one problem, at once or in chunks.

    Attributes:
        problem: the problem, with prepared data after `prepare`.
    """

    problem: Problem

    @abc.abstractmethod
    def prepare(self, warm_start: Personalized | None, rounds: int) -> Start:
        """Prepare a run of this many rounds, and run everything before the first."""

    @abc.abstractmethod
    def advance(
        self, state: State, tol: Tolerance, options: Options
    ) -> tuple[State, dict[str, np.ndarray]]:
        """Run a chunk; return the state after it and the history of the rounds that ran."""

    @abc.abstractmethod
    def finish(self, state: State, costs: Costs, history: History, tol: Tolerance) -> Solution:
        """The solution at this state, with the history from `advance`."""


class LocalRunner(Runner):
    """Runs clients on this machine."""

    @abc.abstractmethod
    def lower(self, state: State, tol: Tolerance, options: Options) -> str:
        """The text of the program of a chunk, which is part of a run's identity."""

    @abc.abstractmethod
    def run(self, warm_start: Personalized | None, tol: Tolerance, options: Options) -> Solution:
        """Run all rounds in one chunk."""


@final
class OneProgram(LocalRunner):
    """Clients in memory: a chunk is one program, and so is a whole run."""

    def __init__(self, problem: Problem, programs: Programs):
        """Run this problem by these programs."""
        self.problem, self._programs = problem, programs

    def prepare(self, warm_start, rounds):
        prepare = self._programs(loop.prepare_run, static_argnums=(2,))
        self.problem, state, costs = prepare(self.problem, warm_start, rounds)
        return Start(state, _on_host(costs))

    def advance(self, state, tol, options):
        done = int(state.round)
        state, history = self._programs(loop.advance)(self.problem, state, tol, options)
        return state, _first(history, int(state.round) - done)

    def finish(self, state, costs, history, tol):
        solution = self._programs(_without_history)(self.problem, state, costs, tol)
        return with_history(solution, with_bits(history, costs, self.problem.size, np), tol, np)

    def lower(self, state, tol, options):
        return jax.jit(loop.advance).lower(self.problem, state, tol, options).as_text()

    def run(self, warm_start, tol, options):
        solution, history, costs = self._programs(whole_run)(self.problem, warm_start, tol, options)
        history = _first(history, int(solution.rounds))
        history = with_bits(history, _on_host(costs), self.problem.size, np)
        return with_history(solution, history, tol, np)


class WholeRun(NamedTuple):
    """The result of a whole run's program. The host counts the bits, in double precision."""

    solution: Solution  # without its history and status
    history: History  # without bits
    costs: Costs


def whole_run(
    problem: Problem, warm_start: Personalized | None, tol: Tolerance, options: Options
) -> WholeRun:
    """A whole run as one program, which compiles faster than its parts."""
    problem, state, costs = loop.prepare_run(problem, warm_start, options.rounds)
    state, history = loop.advance(problem, state, tol, options)
    return WholeRun(_without_history(problem, state, costs, tol), history, costs)


def _without_history(problem: Problem, state: State, costs: Costs, tol: Tolerance) -> Solution:
    return solution_of(problem, state, costs, result_of(problem, state, WHOLE), tol)


def _first(history: History, rounds: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(values)[:rounds] for name, values in history.items()}


def _on_host(costs: Costs) -> Costs:
    return jax.tree.map(np.asarray, costs)


class FromHost(Runner, Engine):
    """Runs round after round from the host, for clients that no single program can hold."""

    programs: Programs

    @abc.abstractmethod
    def prepared(self, problem: Problem, rounds: int) -> Problem:
        """The problem with prepared data, if the data are in memory."""

    @abc.abstractmethod
    def before_round(self, state: State) -> State:
        """The state from which the next round starts; clients may join here."""

    @final
    def call(self, function, *arguments):
        return self.programs(function)(*arguments)

    @final
    def prepare(self, warm_start, rounds):
        self.problem = self.prepared(self.problem, rounds)
        state, costs = begin(self.problem, warm_start, self)
        return Start(state, _on_host(costs))

    @final
    def advance(self, state, tol, options):
        records: list[dict[str, np.ndarray]] = []
        while len(records) < options.rounds:
            # Always run one round, even if first messages are not finite: its record names the
            # entries of the history.
            met = tol is not None and bool(state.measure <= tol)
            if records and (met or int(state.failure.round)):
                break
            state = self.before_round(state)
            state, record = one_round(self.problem, state, self)
            if options.metrics is not None:
                record |= self._measured(state, record, options)
            records.append(jax.tree.map(np.asarray, record))
        return state, {name: np.stack([one[name] for one in records]) for name in records[0]}

    @final
    def finish(self, state, costs, history, tol):
        history = with_bits(history, costs, self.problem.size, np)
        result = result_of(self.problem, state, self)
        solution = solution_of(self.problem, state, costs, result, tol)
        return with_history(solution, history, tol, np)

    @final
    def run(self, warm_start, tol, options):
        state, costs = self.prepare(warm_start, options.rounds)
        state, history = self.advance(state, tol, options)
        return self.finish(state, costs, history, tol)

    def _measured(
        self, state: State, record: dict[str, Array], options: Options
    ) -> dict[str, Array]:
        """The requested metrics after a round; NaN in rounds that do not evaluate them."""
        metrics = options.metrics
        assert metrics is not None
        if int(state.round) % options.metrics_every == 0:
            values = evaluated(metrics, result_of(self.problem, state, self))
        else:
            shapes = jax.eval_shape(partial(evaluated, metrics), self._result_shapes(state))
            values = {name: blank((), x.dtype) for name, x in shapes.items()}
        check_metric_names(values, record)
        return values

    def _text_of_metrics(self, state: State, options: Options) -> str:
        """The text of the program of metrics, which run outside that of a chunk."""
        if options.metrics is None:
            return ""
        # Metrics in NumPy have no program.
        with suppress(jax.errors.JAXTypeError):
            measure = jax.jit(partial(evaluated, options.metrics))
            return measure.lower(self._result_shapes(state)).as_text()
        return ""

    def _result_shapes(self, state: State) -> Personalized:
        problem, kind = self.problem, self.kinds(self.problem)[0]
        shared, downlink = jax.eval_shape(shared_result, problem.for_server, state.for_server)
        local = jax.eval_shape(partial(jax.tree.map, lambda x: x[0]), state.local)
        model = partial(client.result, problem.for_client)
        one = jax.eval_shape(model, downlink, local, kind.data)
        local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype), one)
        return Personalized(shared, local)
