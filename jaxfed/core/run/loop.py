"""The traced loop over rounds, its history, and the solution it ends with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.participation import everybody
from jaxfed.core.contract.remarks import ENERGIES
from jaxfed.core.round.problem import TRAFFIC, Costs, Failure, Problem, State, blank
from jaxfed.core.round.protocol import Protocol, protocol
from jaxfed.core.round.rounds import Engine, begin, one_round, result_of
from jaxfed.core.round.whole import WHOLE, prepared
from jaxfed.core.run.solution import Solution
from jaxfed.core.run.status import Status, is_lost, status_of, verdict
from jaxfed.core.wire.release import Release

History = dict[str, Any]
Metrics = Callable[[Personalized], Mapping[str, Float[Array, ""]]]
Step = Callable[[State], tuple[State, History]]


class Options(eqx.Module):
    """Static settings of the program that runs a chunk of rounds."""

    rounds: int = eqx.field(static=True)
    stops: bool = eqx.field(static=True)  # at a tolerance
    metrics: Metrics | None = eqx.field(static=True, default=None)
    metrics_every: int = eqx.field(static=True, default=1)


class Bound(eqx.Module):
    """The number of rounds of a program that serves for many, of which `Options` has the most."""

    rounds: Int[Array, ""] | int
    prepared_for: int = eqx.field(static=True)  # rounds


# (step, unfinished, state, options) -> (the state after the rounds, the history). The run's adjoint
# chooses the loop, since loops differ in how they can be differentiated.
Loop = Callable[[Step, Callable[[State], Bool[Array, ""]], State, Options], tuple[State, History]]


class Prepared(NamedTuple):
    """A run before its first round."""

    problem: Problem  # with prepared data
    state: State
    costs: Costs


def forward(
    step: Step,
    unfinished: Callable[[State], Bool[Array, ""]],
    state: State,
    options: Options,
) -> tuple[State, History]:
    """A scan over all rounds, or with a tolerance a while loop (without reverse derivative)."""
    if not options.stops:
        return jax.lax.scan(lambda state, _: step(state), state, length=options.rounds)
    first, record = state.round, jax.eval_shape(step, state)[1]
    # A loop that may stop early cannot stack records; entries of rounds that do not run stay NaN.
    history = jax.tree.map(lambda x: blank((options.rounds,), x.dtype), record)

    def body(carry):
        state, history = carry
        position = state.round - first
        state, record = step(state)
        return state, jax.tree.map(lambda h, x: h.at[position].set(x), history, record)

    return jax.lax.while_loop(lambda carry: unfinished(carry[0]), body, (state, history))


class WholeRun(NamedTuple):
    """The result of a whole run. The host counts the bits, in double precision."""

    solution: Solution  # without its history and status
    history: History  # without bits
    costs: Costs


def whole_run(
    problem: Problem,
    warm_start: Personalized | None,
    tol: Array | float | None,
    options: Options,
    loop: Loop = forward,
    bound: Bound | None = None,
) -> WholeRun:
    """Run all rounds, for clients in memory; as one program, it compiles faster than its parts."""
    prepared_for = options.rounds if bound is None else bound.prepared_for
    problem, state, costs = prepare_run(problem, warm_start, prepared_for)
    state, history = advance(problem, state, tol, options, loop, bound)
    return WholeRun(solution_of(problem, state, costs, tol), history, costs)


def prepare_run(problem: Problem, warm_start: Personalized | None, rounds: int) -> Prepared:
    """Prepare clients in memory and begin their run."""
    problem = prepared(problem, rounds)
    return Prepared(problem, *begin(problem, warm_start, WHOLE))


def protocol_of(problem: Problem, warm_start: Personalized | None, rounds: int) -> Protocol:
    """The shapes of everything that travels in a run of clients in memory, or of their shapes."""
    run = jax.eval_shape(partial(prepare_run, rounds=rounds), problem, warm_start)
    downlink = run.state.downlink.receiver
    return protocol(run.problem, WHOLE.kinds(run.problem), warm_start, downlink)


def advance(
    problem: Problem,
    state: State,
    tol: Array | float | None,
    options: Options,
    loop: Loop = forward,
    bound: Bound | None = None,
) -> tuple[State, History]:
    """Run a chunk of rounds, for clients in memory."""

    def step(state):
        state, record = one_round(problem, state, WHOLE)
        evaluate = partial(metrics_of, problem, options.metrics)
        shapes = jax.eval_shape(evaluate, state)
        check_metric_names(shapes, record)
        if options.metrics_every == 1:
            return state, record | evaluate(state)
        due = state.round % options.metrics_every == 0
        # Both branches need arrays of the same shapes.
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), shapes)
        return state, record | jax.lax.cond(due, evaluate, lambda _: none, state)

    first = state.round

    def unfinished(state):
        going_on = state.round - first < (options.rounds if bound is None else bound.rounds)
        if options.stops:
            assert tol is not None
            going_on &= ~(state.measure <= tol) & (state.failure.round == 0)
        return going_on

    return loop(step, unfinished, state, options)


def check_metric_names(metrics: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Refuse metrics with names that the run's own history uses.

    Raises:
        ValueError: lists them.
    """
    if taken := metrics.keys() & {*record, "bits_up", "bits_down"}:
        raise ValueError(f"metrics: {sorted(taken)} are names of the run's own history")


def metrics_of(problem: Problem, metrics: Metrics | None, state: State) -> dict[str, Array]:
    """The requested metrics, in a type that can be NaN."""
    if metrics is None:
        return {}
    shared, local = result_of(problem, state, WHOLE)
    local = jax.tree.map(lambda x: x[problem.rows], local)
    return evaluated(metrics, Personalized(shared, local))


def evaluated(metrics: Metrics, result: Personalized) -> dict[str, Array]:
    """The requested metrics of these models, in a type that can be NaN."""
    values = {name: jnp.asarray(x) for name, x in metrics(result).items()}
    return {
        name: value.astype(jnp.promote_types(value.dtype, jnp.float32))
        for name, value in values.items()
    }


def solution_of(
    problem: Problem,
    state: State,
    costs: Costs,
    tol: Array | float | None,
    engine: Engine = WHOLE,
) -> Solution:
    """The solution of a run at a state, without its history."""
    return Solution(
        server=state.server,
        local=problem.cut(state.local),
        history={},
        rounds=state.round,
        status=Status.round_limit,
        failure=Failure(state.failure.round, state.failure.clients[problem.rows]),
        result=result_of(problem, state, engine),
        state=state,
        releases=_releases(problem, state, costs),
        algorithm=problem.algorithm,
        ids=problem.cut(problem.clients.ids),
        wire=problem.wire,
        stops=tol is not None,
    )


def with_history(
    solution: Solution, history: History, costs: Costs, tol: Array | float | None, xp: Any
) -> Solution:
    """The solution with its history, and the status that follows from it.

    Args:
        solution: of `solution_of`.
        history: of the rounds that ran.
        costs: of messages.
        tol: the run's tolerance.
        xp: `numpy` on the host, `jax.numpy` in traced computations.
    """
    history = _with_bits(history, costs, len(solution.failure.clients), xp)
    local = None
    if set(ENERGIES) <= history.keys():
        local = solution.result.local
        if xp is np:
            local = np.asarray(local) if is_known(local) else None
    code = verdict(history, tol, solution.algorithm.stochastic, xp, local)
    failed = xp.asarray(solution.failure.round) > 0
    if history["objective"].shape[0]:
        failed = failed | is_lost(history, solution.result.shared, xp)
    return replace(solution, history=history, status=status_of(code, failed, xp))


def _releases(problem: Problem, state: State, costs: Costs) -> tuple[Release, ...]:
    """What the clients have released so far: first messages, then the rounds' messages."""
    weights = problem.clients.weights[problem.rows]
    # In a failed round, clients had already sent their messages.
    times = jnp.maximum(state.round, state.failure.round)
    stateless = not jax.tree.leaves(state.clients)
    return (
        Release(problem.wire.first_up, everybody(), costs.first_up, 1, weights, stateless=True),
        Release(
            problem.wire.up, problem.participation, costs.up, times, weights, stateless=stateless
        ),
    )


def _with_bits(history: dict[str, Any], costs: Costs, clients: int, xp: Any) -> dict[str, Any]:
    """The history with cumulative bits per client instead of the rounds' traffic."""
    # Use double precision on the host; single precision counts exactly only up to 2^24.
    dtype = np.float64 if xp is np else float
    sent, broadcast, messages, missed, whole = (history[name].astype(dtype) for name in TRAFFIC)
    participants = history["participants"].astype(dtype)
    first_up = costs.first_up + 8 * costs.first_bytes_up.astype(dtype) / clients
    first_down = costs.first_down + 8 * costs.first_bytes_down.astype(dtype)
    # What these count is decided in `server._send_down`: all participants but `whole` get the last
    # broadcast, and `missed` are the bytes of those before it.
    up = costs.up * participants + 8 * sent
    down = (
        costs.down * messages
        + 8 * (broadcast * (participants - whole) + missed)
        + costs.whole_down * whole
    )
    return {name: values for name, values in history.items() if name not in TRAFFIC} | {
        "bits_up": first_up + xp.cumsum(up) / clients,
        "bits_down": first_down + xp.cumsum(down) / clients,
    }
