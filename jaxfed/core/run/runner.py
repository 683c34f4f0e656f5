"""Runners execute a run as one compiled program, or round by round from the host."""

import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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
from jaxfed.core.round.whole import rounds_alike
from jaxfed.core.run import loop
from jaxfed.core.run.compiling import options_for_linear_algebra
from jaxfed.core.run.loop import History, Options, check_metric_names, evaluated, with_history
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


def call_compiled(
    function: Callable[..., Any], *arguments: Any, static_argnums: tuple[int, ...] = ()
) -> Any:
    """Call a function, most of whose work libraries do, as one program that compiles fast."""
    compiled = programs(**options_for_linear_algebra(arguments))
    return compiled(function, static_argnums)(*arguments)


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

    @abc.abstractmethod
    def text(self, state: State, tol: Tolerance, options: Options) -> str:
        """The text of the program of a chunk, which is part of a run's identity."""

    @abc.abstractmethod
    def run(self, warm_start: Personalized | None, tol: Tolerance, options: Options) -> Solution:
        """Run all rounds in one chunk."""


@final
class Compiled(Runner):
    """Clients in memory: a chunk is one program, and so is a whole run."""

    def __init__(self, problem: Problem, programs: Programs):
        """Run this problem by these programs."""
        self.problem, self._programs = problem, programs

    def prepare(self, warm_start, rounds):
        prepare = self._programs(loop.prepare_run, static_argnums=(2,))
        alike = rounds_alike(self.problem, rounds)
        self.problem, state, costs = prepare(self.problem, warm_start, alike)
        return Start(state, _on_host(costs))

    def advance(self, state, tol, options):
        done = int(state.round)
        advance = self._programs(loop.advance, static_argnums=(4,))
        state, history = advance(self.problem, state, *_bounded(tol, options, 0))
        return state, _first(history, int(state.round) - done)

    def finish(self, state, costs, history, tol):
        solution = self._programs(loop.solution_of)(self.problem, state, costs, tol)
        return with_history(solution, history, costs, tol, np)

    def text(self, state, tol, options):
        advance = jax.jit(loop.advance, static_argnums=(4,))
        return advance.lower(self.problem, state, *_bounded(tol, options, 0)).as_text()

    def run(self, warm_start, tol, options):
        whole_run = self._programs(loop.whole_run, static_argnums=(4,))
        alike = rounds_alike(self.problem, options.rounds)
        run = whole_run(self.problem, warm_start, *_bounded(tol, options, alike))
        history = _first(run.history, int(run.solution.rounds))
        solution = replace(run.solution, stops=tol is not None)
        return with_history(solution, history, _on_host(run.costs), tol, np)


# Lengths of histories, each of which is a program.
LENGTHS = tuple(1024 * 16**power for power in range(5))


def _bounded(tol: Tolerance, options: Options, alike: int) -> tuple[Any, ...]:
    """Arguments of the loop that do not compile it again for other rounds or tolerances.

    Args:
        tol: the tolerance.
        options: of the rounds to run.
        alike: a number of rounds for which data are prepared in the same way.
    """
    if tol is None and jax.default_backend() != "cpu":
        # Accelerators would ask the host after every round whether to go on.
        return None, options, loop.forward, loop.Bound(options.rounds, alike)
    length = next((x for x in LENGTHS if x >= options.rounds), options.rounds)
    # No measure is below minus infinity, so that no tolerance is one as well.
    tol = -np.inf if tol is None else float(tol)
    more = replace(options, rounds=length, stops=True)
    return tol, more, loop.forward, loop.Bound(options.rounds, alike)


def _first(history: History, rounds: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(values)[:rounds] for name, values in history.items()}


def _on_host(costs: Costs) -> Costs:
    return jax.tree.map(np.asarray, costs)


@final
class Stepwise(Runner):
    """Round after round from the host, for clients that no single program can hold."""

    def __init__(self, problem: Problem, engine: Engine):
        """Run this problem, whose clients the engine reaches."""
        self.problem, self._engine = problem, engine

    def prepare(self, warm_start, rounds):
        self.problem = self._engine.prepared(self.problem, rounds)
        state, costs = begin(self.problem, warm_start, self._engine)
        return Start(state, _on_host(costs))

    def advance(self, state, tol, options):
        records: list[dict[str, np.ndarray]] = []
        while len(records) < options.rounds:
            # Always run one round, even if first messages are not finite: its record names the
            # entries of the history.
            met = tol is not None and bool(state.measure <= tol)
            if records and (met or int(state.failure.round)):
                break
            self.problem, state = self._engine.before_round(self.problem, state)
            state, record = one_round(self.problem, state, self._engine)
            if options.metrics is not None:
                record |= self._measured(state, record, options)
            records.append(jax.tree.map(np.asarray, record))
        return state, {name: np.stack([one[name] for one in records]) for name in records[0]}

    def finish(self, state, costs, history, tol):
        solution = loop.solution_of(self.problem, state, costs, tol, self._engine)
        return with_history(solution, history, costs, tol, np)

    def text(self, state, tol, options):
        del tol
        text = self._engine.text(self.problem, state)
        # Metrics run outside of a round's program; in NumPy they have none.
        with suppress(jax.errors.JAXTypeError):
            if options.metrics is not None:
                measure = jax.jit(partial(evaluated, options.metrics))
                text += measure.lower(self._result_shapes(state)).as_text()
        return text

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
            values = evaluated(metrics, result_of(self.problem, state, self._engine))
        else:
            shapes = jax.eval_shape(partial(evaluated, metrics), self._result_shapes(state))
            values = {name: blank((), x.dtype) for name, x in shapes.items()}
        check_metric_names(values, record)
        return values

    def _result_shapes(self, state: State) -> Personalized:
        problem, kind = self.problem, self._engine.kinds(self.problem)[0]
        shared, downlink = jax.eval_shape(shared_result, problem.for_server, state.for_server)
        local = jax.eval_shape(partial(jax.tree.map, lambda x: x[0]), state.local)
        model = partial(client.result, problem.for_client)
        one = jax.eval_shape(model, downlink, local, kind.data)
        local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype), one)
        return Personalized(shared, local)
