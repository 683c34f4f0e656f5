"""The traced loop over rounds, its history and its end."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import TRAFFIC, Costs, Failure, Problem, State, blank
from jaxfed.core.round.rounds import begin, one_round, prepared, released, result_of
from jaxfed.core.run.solution import Solution, Status

Metrics = Callable[[Personalized], Mapping[str, Float[Array, ""]]]


class Options(eqx.Module):
    """What the program of a chunk of rounds depends on."""

    rounds: int = eqx.field(static=True)
    stops: bool = eqx.field(static=True)
    metrics: Metrics | None = eqx.field(static=True)
    metrics_every: int = eqx.field(static=True)
    remat: bool = eqx.field(static=True)
    # States kept at each level of recursive checkpointing; None: no such levels.
    width: int | None = eqx.field(static=True, default=None)


def solve(
    problem: Problem, start: Personalized | None, tol: Array | float | None, options: Options
) -> Solution:
    """A whole run."""
    problem, state, costs = prepare(problem, start, options.rounds)
    state, history = advance(problem, state, tol, options)
    return finish(problem, state, costs, with_bits(history, costs, problem.size, jnp), tol)


def prepare(
    problem: Problem, start: Personalized | None, rounds: int
) -> tuple[Problem, State, Costs]:
    """What there is before the first round."""
    problem = prepared(problem, rounds)
    return problem, *begin(problem, start)


def advance(
    problem: Problem, state: State, tol: Array | float | None, options: Options
) -> tuple[State, dict[str, Array]]:
    """So many more rounds, with their history."""

    def measured(state):
        state, record = one_round(problem, state)
        evaluate = partial(metrics_of, problem, options.metrics)
        shapes = jax.eval_shape(evaluate, state)
        if taken := shapes.keys() & {*record, "bits_up", "bits_down"}:
            raise ValueError(f"metrics: {sorted(taken)} are names of the run's own history")
        if options.metrics_every == 1:
            return state, record | evaluate(state)
        due = state.round % options.metrics_every == 0
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), shapes)
        return state, record | jax.lax.cond(due, evaluate, lambda _: none, state)

    first = state.round

    def unfinished(state):
        going_on = state.round - first < options.rounds
        if options.stops:
            assert tol is not None
            going_on &= (state.measure > tol) & (state.failure.round == 0)
        return going_on

    if options.width is not None:
        return _checkpointed(measured, unfinished, state, options.rounds, options.width)
    if not options.stops:
        step = jax.checkpoint(measured) if options.remat else measured
        return jax.lax.scan(lambda state, _: step(state), state, length=options.rounds)

    record = jax.eval_shape(measured, state)[1]
    history = jax.tree.map(lambda x: blank((options.rounds,), x.dtype), record)

    def body(carry):
        state, history = carry
        position = state.round - first
        state, record = measured(state)
        return state, jax.tree.map(lambda h, x: h.at[position].set(x), history, record)

    return jax.lax.while_loop(lambda carry: unfinished(carry[0]), body, (state, history))


def _checkpointed(
    step: Callable[[State], tuple[State, dict[str, Array]]],
    unfinished: Callable[[State], Bool[Array, ""]],
    state: State,
    rounds: int,
    width: int,
) -> tuple[State, dict[str, Array]]:
    """At most so many rounds, as scans within scans whose bodies are computed again.

    Each level keeps the states at which its parts begin, `width` of them, and the parts of only one
    of them are ever there. So levels cost a further evaluation of all rounds each, and width times
    their number in states.

    Source: Griewank (1992), Achieving logarithmic growth of temporal and spatial complexity in
    reverse automatic differentiation, in its simplest form, with equal parts.
    """
    length, levels = 1, 0
    while not levels or length < rounds:
        shapes = jax.eval_shape(step, state)[1]
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), shapes)
        # The branches are within what is computed again, or they would keep their inputs each time.
        part = jax.checkpoint(partial(_if, unfinished, step, none))
        count = min(width, -(-rounds // length))
        step = partial(_scan, part, count)
        length, levels = length * count, levels + 1
    state, history = step(state)
    if levels > 1:
        history = jax.tree.map(lambda x: x.reshape(-1, *x.shape[levels:])[:rounds], history)
    return state, history


def _if(unfinished, step, none, state):
    return jax.lax.cond(unfinished(state), step, lambda state: (state, none), state)


def _scan(step, length, state):
    return jax.lax.scan(lambda state, _: step(state), state, length=length)


def metrics_of(problem: Problem, metrics: Metrics | None, state: State) -> dict[str, Array]:
    """The requested metrics, in a type that can be NaN."""
    if metrics is None:
        return {}
    shared, local = result_of(problem, state)
    if problem.clients.blocks is not None:
        local = jax.tree.map(lambda x: x[problem.rows], local)
    return evaluated(metrics, Personalized(shared, local))


def evaluated(metrics: Metrics, result: Personalized) -> dict[str, Array]:
    """The requested metrics of these models, in a type that can be NaN."""
    values = {name: jnp.asarray(x) for name, x in metrics(result).items()}
    return {
        name: value.astype(jnp.promote_types(value.dtype, jnp.float32))
        for name, value in values.items()
    }


def finish(
    problem: Problem,
    state: State,
    costs: Costs,
    history: dict[str, Any],
    tol: Array | float | None,
    result: Personalized | None = None,
) -> Solution:
    """What a run returns, from its last state, whose result may be known."""
    local = problem.cut(state.local)
    status = Status.round_limit
    if tol is not None:
        status = Status.where(state.measure <= tol, Status.converged, status)
    status = Status.where(state.failure.round > 0, Status.diverged, status)
    failure = Failure(state.failure.round, state.failure.clients[problem.rows])
    return Solution(
        state.server, local, history, state.round, status, failure,
        result_of(problem, state) if result is None else result,
        state, released(problem, state, costs), problem.algorithm,
        problem.cut(problem.clients.ids),
    )  # fmt: skip


def with_bits(history: dict[str, Any], costs: Costs, clients: int, xp: Any) -> dict[str, Any]:
    """The history with cumulative bits per client in place of the rounds' traffic."""
    # On the host in whole numbers and double precision: counts pass 2^24 soon.
    dtype = np.float64 if xp is np else float
    sent, broadcast, messages, missed, whole = (history[name].astype(dtype) for name in TRAFFIC)
    participants = history["participants"].astype(dtype)
    first_up = costs.first_up + 8 * costs.first_bytes_up.astype(dtype) / clients
    first_down = costs.first_down + 8 * costs.first_bytes_down.astype(dtype)
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
