"""The loop: `rollout` is one traced computation, `fit` drives it from the host."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed._optional import require
from jaxfed.core import backend, channel, participation
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.checkpoint import Checkpoint, fingerprint
from jaxfed.core.checks import check_count, check_factor
from jaxfed.core.clients import Clients
from jaxfed.core.reduction import is_linear, wrapped
from jaxfed.core.rounds import (
    TRAFFIC,
    Costs,
    Failure,
    Problem,
    State,
    begin,
    one_round,
    prepared,
    result_of,
)

Metrics = Callable[[Personalized], Mapping[str, Float[Array, ""]]]

_LOSSLESS, _VMAP, _EVERYBODY = channel.lossless(), backend.vmap(), participation.everybody()


class Status(eqx.Enumeration):
    """How a run ended."""

    round_limit = "All rounds ran."
    converged = "The stopping measure met the tolerance."
    diverged = "An objective is no longer finite."
    stopped = "A callback stopped the run."


class Solution(eqx.Module):
    """What a run returns.

    Attributes:
        server: the algorithm's final server state.
        local: the clients' final states, leading axis = clients.
        history: `(rounds,)` arrays: the weighted means of the clients' diagnostics
            (`"objective"` is evaluated at the iterate that enters the round), the server's
            diagnostics, the requested metrics, `"participants"`, and `"bits_up"` and
            `"bits_down"`, cumulative per client, the exchange before the rounds included. Entries
            that were not computed (metrics between their rounds, rounds after the tolerance was
            met) are NaN.
        rounds: number of rounds that ran.
        status: how the run ended, one of `jaxfed.Status`.
        failure: where it diverged: the round, counted from 1 (0: it did not), and a truth value
            for each client.
        result: the learned models, `result.shared` and `result.local`.
        state: what the next round would start from.
    """

    server: PyTree
    local: PyTree
    history: dict[str, Any]
    rounds: int | Int[Array, ""]
    status: Status
    failure: Failure
    result: Personalized
    state: State


class DivergenceError(FloatingPointError):
    """An objective that is no longer finite.

    Attributes:
        round: the round in which it is not, counted from 1.
        clients: the positions of the clients whose own objectives are not; empty if all are.
        solution: what there was before that round.
    """

    def __init__(self, message: str, solution: Solution):
        """Keep what is known."""
        super().__init__(message)
        self.round, self.solution = int(solution.failure.round), solution
        self.clients = tuple(np.flatnonzero(solution.failure.clients).tolist())


class Callback(eqx.Module):
    """What is called between chunks of rounds, and may stop a run.

    It keeps nothing itself: its state goes in and comes out, and is saved with the checkpoint, so
    that a resumed run and a second run behave like the first.
    """

    @abc.abstractmethod
    def init(self) -> PyTree[np.ndarray]:
        """The state before the run: NumPy arrays."""

    @abc.abstractmethod
    def update(
        self, state: PyTree[np.ndarray], solution: Solution
    ) -> tuple[PyTree[np.ndarray], bool]:
        """The next state, and whether to stop."""


def rollout(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channels = _LOSSLESS,
    participation: participation.Participation | None = None,
    backend: backend.Backend = _VMAP,
    tol: float | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    remat: bool = False,
) -> Solution:
    """Run an algorithm as one traced computation, to be put under `jit`, `vmap` and `grad`.

    Args:
        algorithm: what to run; its float hyperparameters may be traced.
        clients: whom to run it on.
        rounds: how many rounds; at most that many with `tol`.
        key: random key; each client's draws fold in its id and the round.
        warm_start: another algorithm's solution (or just its `result`) to start from.
        channel: what messages go through: one channel for both ways, `(uplink, downlink)`, or
            `(uplink, downlink, start)` with one for the exchange before the rounds; see
            `jaxfed.channel.triple` for the start's default.
        participation: who takes part in each round; everybody by default.
        backend: how clients are mapped: `vmap`, `chunked`, `pmap` or `shard`.
        tol: stop once the algorithm's stopping measure (by default the relative change of the
            objective) is at most this. The loop is then a `while_loop`, which has no reverse
            derivative.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: evaluate `metrics` every so many rounds.
        remat: recompute each round in the backward pass instead of storing it.

    Returns:
        The solution; all of it traced, `history` with `rounds` entries.

    Raises:
        ValueError: for arguments that do not fit together, before anything is computed.
    """
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    _check_loop(tol, metrics, metrics_every)
    options = _Options(rounds, tol is not None, metrics, metrics_every, remat)
    problem, state, costs = _prepare(problem, start, rounds)
    state, history = _advance(problem, state, tol, options)
    return _finish(problem, state, _with_bits(history, costs, problem.size, jnp), tol)


def fit(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channels = _LOSSLESS,
    participation: participation.Participation | None = None,
    backend: backend.Backend = _VMAP,
    tol: float | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    callbacks: Sequence[Callback | Callable[[Solution], bool | None]] = (),
    best: str | None = None,
    chunk_rounds: int | None = None,
    throw: bool = True,
) -> Solution:
    """Run an algorithm from the host, in compiled chunks of rounds.

    The numbers are those of `rollout`; between chunks there is room for a progress bar,
    checkpoints and callbacks.

    Args:
        algorithm: what to run.
        clients: whom to run it on.
        rounds: how many rounds; at most that many with `tol` or a callback that stops.
        key: random key.
        warm_start: another algorithm's solution (or just its `result`) to start from.
        channel: one channel for both ways, `(uplink, downlink)` or `(uplink, downlink, start)`.
        participation: who takes part in each round; everybody by default.
        backend: `vmap`, `chunked`, `pmap` or `shard`.
        tol: stop once the algorithm's stopping measure is at most this.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: evaluate `metrics` every so many rounds.
        progress: show a progress bar with the objective.
        checkpoint: where and how often to save; a run with the same arguments resumes from it,
            bit for bit.
        callbacks: called after each chunk: a `Callback`, or a function of the solution so far
            that keeps nothing. True stops the run.
        best: name of an entry of the history, smaller is better: return the solution at the end
            of the chunk with the lowest one, and not the last.
        chunk_rounds: rounds per chunk. By default all of them where nothing happens in between.
        throw: raise an error where the run diverges. Without, the solution of the round before
            is returned, and its `status` and `failure` say so.

    Returns:
        The solution, with `history` as NumPy arrays of the rounds that ran.

    Raises:
        ValueError: for arguments that do not fit together, before anything is computed, and for
            a checkpoint that belongs to another run.
        DivergenceError: if the objective becomes NaN or infinite, with the round, the clients and
            the solution of the round before; a `FloatingPointError`.
        ImportError: if a progress bar or checkpoints are asked for and their packages are
            missing.
    """
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    _check_loop(tol, metrics, metrics_every)
    _check_host(checkpoint, callbacks, best, chunk_rounds)
    compiled = _compiled(_is_small(clients))
    watched = progress or checkpoint is not None or callbacks or best is not None
    if chunk_rounds is None:
        chunk_rounds = max(1, rounds // 50) if watched else rounds
        if checkpoint is not None:
            chunk_rounds = min(chunk_rounds, checkpoint.every)
    options = _Options(chunk_rounds, tol is not None, metrics, metrics_every, remat=False)
    if not watched and chunk_rounds >= rounds:
        solution = compiled.run(problem, start, tol, options)
        if not int(solution.failure.round):
            return _on_host(solution)

    problem, state, costs = compiled.prepare(problem, start, rounds)
    run = _Run(state, tuple(_init(callback) for callback in callbacks), None)
    pieces: list[dict[str, np.ndarray]] = []
    identity = None
    if checkpoint is not None:
        lowered = compiled.advance.lower(problem, state, tol, options)
        identity = fingerprint(
            algorithm, clients, lowered, rounds=rounds, key=key, start=start, channel=channel,
            participation=participation, backend=backend, tol=tol, chunk_rounds=chunk_rounds,
            metrics_every=metrics_every, best=best, callbacks=tuple(callbacks),
        )  # fmt: skip
        like = replace(run, best=None if best is None else _Best(np.full((), np.inf), state))
        if (saved := checkpoint.restore(identity, like)) is not None:
            run, history = saved
            pieces.append(history)

    def solution_at(state: State, stopped: bool = False) -> Solution:
        number = int(state.round)
        history = {k: np.concatenate([piece[k] for piece in pieces])[:number] for k in pieces[0]}
        history = _with_bits(history, costs, problem.size, np)
        return _on_host(compiled.finish(problem, state, history, tol), stopped)

    stopped, done, bar = False, int(run.state.round), _bar(rounds) if progress else None
    if bar is not None:
        bar.update(done)
    while done < rounds and not stopped and not (tol is not None and run.state.measure <= tol):
        length = min(chunk_rounds - done % chunk_rounds, rounds - done)
        if checkpoint is not None:
            length = min(length, checkpoint.every - done % checkpoint.every)
        before = run.state
        state, piece = compiled.advance(problem, before, tol, replace(options, rounds=length))
        failed = int(state.failure.round)
        ran = (failed - 1 if failed else int(state.round)) - done
        if ran:
            pieces.append({name: np.asarray(values)[:ran] for name, values in piece.items()})
        if failed:
            if bar is not None:
                bar.close()
            good = before
            if ran:
                # Once more up to there, with less kept on the way than states of every round.
                good, _ = compiled.advance(problem, before, tol, replace(options, rounds=ran))
            good = eqx.tree_at(lambda state: state.failure, good, state.failure)
            return _diverged(piece, ran, solution_at(good), throw)
        done += ran
        run = replace(run, state=state)
        if bar is not None:
            bar.update(ran)
            bar.set_postfix(objective=f"{pieces[-1]['objective'][-1]:.6g}")
        if callbacks or best is not None:
            solution = solution_at(state)
            run = replace(run, best=_better(best, run.best, solution))
            updates = [
                _update(*pair, solution) for pair in zip(callbacks, run.callbacks, strict=True)
            ]
            run = replace(run, callbacks=tuple(state for state, _ in updates))
            stopped = any(stop for _, stop in updates)
        if checkpoint is not None:
            ended = done >= rounds or stopped or (tol is not None and state.measure <= tol)
            if ended or done % checkpoint.every == 0:
                history = {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}
                checkpoint.save(identity, done, run, history)
    if bar is not None:
        bar.close()
    return solution_at(run.state if run.best is None else run.best.state, stopped)


class _Best(eqx.Module):
    """The lowest value of a metric so far, and the state that had it."""

    value: np.ndarray
    state: State


class _Run(eqx.Module):
    """What a checkpoint holds beside the history."""

    state: State
    callbacks: tuple[PyTree, ...]
    best: _Best | None


def _init(callback: Callback | Callable) -> PyTree:
    return callback.init() if isinstance(callback, Callback) else None


def _update(
    callback: Callback | Callable, state: PyTree, solution: Solution
) -> tuple[PyTree, bool]:
    if isinstance(callback, Callback):
        return callback.update(state, solution)
    return None, bool(callback(solution))


def _better(name: str | None, best: _Best | None, solution: Solution) -> _Best | None:
    if name is None:
        return None
    value = newest(solution, "best", name)
    if best is None or value < best.value:
        return _Best(np.asarray(value, float), solution.state)
    return best


def newest(solution: Solution, argument: str, name: str) -> float:
    """The last value of an entry of the history that was measured; infinite before the first.

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


def _diverged(piece: dict[str, Array], place: int, solution: Solution, throw: bool) -> Solution:
    if not throw:
        return solution
    clients = np.flatnonzero(solution.failure.clients)
    shown = ", ".join(map(str, clients[:5])) + ", ..." * (len(clients) > 5)
    which = f", at {'client' if len(clients) == 1 else 'clients'} {shown}" if len(clients) else ""
    raise DivergenceError(
        f"the objective is {np.asarray(piece['objective'])[place]} in round "
        f"{int(solution.failure.round)}{which}; a smaller step size may help",
        solution,
    )


class EarlyStopping(Callback):
    """Stops a run when a metric has not improved for a while.

    Use it with a metric of held-out samples, and with `fit(..., best=monitor)`: on few, noisy
    samples the optimum of the training objective can lie far from the truth, and stopping early is
    what keeps close to it.
    """

    monitor: str = eqx.field(static=True)
    patience: int = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)

    def __init__(self, monitor: str, *, patience: int = 5, min_delta: float = 0.0):
        """Watch `history[monitor]`, smaller is better.

        Args:
            monitor: name of a metric or diagnostic in the history.
            patience: how many measurements, one a chunk, without an improvement are waited for.
            min_delta: what counts as an improvement.

        Raises:
            ValueError: if `patience` is not a whole number of at least 0, or `min_delta` is
                negative or not finite.
        """
        check_count("patience", patience, least=0)
        check_factor("min_delta", min_delta)
        self.monitor, self.patience, self.min_delta = monitor, patience, float(min_delta)

    def init(self) -> dict[str, np.ndarray]:
        """Nothing was measured."""
        return {
            "lowest": np.full((), np.inf),
            "waited": np.zeros((), int),
            "seen": np.zeros((), int),
        }

    def update(
        self, state: dict[str, np.ndarray], solution: Solution
    ) -> tuple[dict[str, np.ndarray], bool]:
        """Stop once the last improvement is too long ago."""
        value = newest(solution, "monitor", self.monitor)
        seen = np.count_nonzero(~np.isnan(solution.history[self.monitor]))
        if seen == state["seen"]:
            return state, False  # nothing new was measured
        better = value < state["lowest"] - self.min_delta
        waited = np.where(better, 0, state["waited"] + 1)
        lowest = np.where(better, value, state["lowest"])
        kept = {"lowest": lowest, "waited": waited, "seen": np.asarray(seen)}
        return kept, bool(waited > self.patience)


# ---------------------------------------------------------------------------------------------
# One round, and the loop over rounds.


class _Options(eqx.Module):
    rounds: int = eqx.field(static=True)
    stops: bool = eqx.field(static=True)
    metrics: Metrics | None = eqx.field(static=True)
    metrics_every: int = eqx.field(static=True)
    remat: bool = eqx.field(static=True)


def _prepare(
    problem: Problem, start: Personalized | None, rounds: int
) -> tuple[Problem, State, Costs]:
    """What there is before the first round."""
    problem = prepared(problem, rounds)
    return problem, *begin(problem, start)


def _advance(
    problem: Problem, state: State, tol: Array | float | None, options: _Options
) -> tuple[State, dict[str, Array]]:
    """So many more rounds, with their history."""

    def measured(state):
        state, record = one_round(problem, state)
        evaluate = partial(_measure, problem, options.metrics)
        shapes = jax.eval_shape(evaluate, state)
        if taken := shapes.keys() & {*record, "bits_up", "bits_down"}:
            raise ValueError(f"metrics: {sorted(taken)} are names of the run's own history")
        if options.metrics_every == 1:
            return state, record | evaluate(state)
        blank = {name: jnp.full(x.shape, jnp.nan, x.dtype) for name, x in shapes.items()}
        due = state.round % options.metrics_every == 0
        return state, record | jax.lax.cond(due, evaluate, lambda _: blank, state)

    if not options.stops:
        step = jax.checkpoint(measured) if options.remat else measured
        return jax.lax.scan(lambda state, _: step(state), state, length=options.rounds)

    assert tol is not None
    first = state.round
    blank = jax.tree.map(
        lambda x: jnp.full(
            (options.rounds,), jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype
        ),
        jax.eval_shape(measured, state)[1],
    )

    def unfinished(carry):
        state, _ = carry
        going_on = (state.measure > tol) & (state.failure.round == 0)
        return (state.round - first < options.rounds) & going_on

    def body(carry):
        state, history = carry
        position = state.round - first
        state, record = measured(state)
        return state, jax.tree.map(lambda h, x: h.at[position].set(x), history, record)

    return jax.lax.while_loop(unfinished, body, (state, blank))


def _measure(problem: Problem, metrics: Metrics | None, state: State) -> dict[str, Array]:
    """The requested metrics, in a type that can be NaN."""
    if metrics is None:
        return {}
    values = {name: jnp.asarray(x) for name, x in metrics(result_of(problem, state)).items()}
    return {
        name: value.astype(jnp.promote_types(value.dtype, jnp.float32))
        for name, value in values.items()
    }


def _finish(
    problem: Problem, state: State, history: dict[str, Any], tol: Array | float | None
) -> Solution:
    local = jax.tree.map(lambda x: x[: problem.size], state.local)
    status = Status.round_limit
    if tol is not None:
        status = Status.where(state.measure <= tol, Status.converged, status)
    status = Status.where(state.failure.round > 0, Status.diverged, status)
    return Solution(
        state.server, local, history, state.round, status, state.failure,
        result_of(problem, state), state,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# What messages cost.


def _with_bits(history: dict[str, Any], costs: Costs, clients: int, xp: Any) -> dict[str, Any]:
    """The history with cumulative bits per client in place of the rounds' traffic."""
    # On the host in whole numbers and double precision: counts pass 2^24 soon.
    dtype = np.float64 if xp is np else float
    sent, broadcast, messages, missed, whole = (history[name].astype(dtype) for name in TRAFFIC)
    participants = history["participants"].astype(dtype)
    first_up = costs.first_up + 8 * costs.first_bytes_up / clients
    first_down = costs.first_down + 8 * costs.first_bytes_down
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


# ---------------------------------------------------------------------------------------------
# The host's side.


class _Compiled(eqx.Module):
    run: Callable = eqx.field(static=True)
    prepare: Callable = eqx.field(static=True)
    advance: Any = eqx.field(static=True)
    finish: Callable = eqx.field(static=True)


def _compile(**compiler: Any) -> _Compiled:
    jit = partial(jax.jit, **compiler)

    def run(problem, start, tol, options):
        """All of it as one program, which takes less time to compile than its parts."""
        problem, state, costs = _prepare(problem, start, options.rounds)
        state, history = _advance(problem, state, tol, options)
        return _finish(problem, state, {}, tol), history, costs

    whole = jit(run)

    def with_history(problem, start, tol, options):
        solution, history, costs = whole(problem, start, tol, options)
        history = {name: np.asarray(values) for name, values in history.items()}
        history = {name: values[: int(solution.rounds)] for name, values in history.items()}
        history = _with_bits(history, jax.tree.map(np.asarray, costs), problem.size, np)
        return replace(solution, history=history)

    finish = jit(lambda problem, state, tol: _finish(problem, state, {}, tol))

    def finished(problem, state, history, tol):
        solution = finish(problem, state, tol)
        return replace(solution, history=history)

    return _Compiled(
        run=with_history,
        prepare=jit(_prepare, static_argnums=2),
        advance=jit(_advance),
        finish=finished,
    )


def _on_host(solution: Solution, stopped: bool = False) -> Solution:
    """With plain numbers where the host has them."""
    if stopped and solution.status == Status.round_limit:
        solution = replace(solution, status=Status.stopped)
    failure = jax.tree.map(np.asarray, solution.failure)
    return replace(solution, rounds=int(solution.rounds), failure=failure)


_DEFAULT = _compile()
# On a processor, threads cost more than they bring for products this small (and the option is
# one of the compiled function, not of the process).
_SINGLE_THREAD = _compile(compiler_options={"xla_cpu_multi_thread_eigen": False})


def _compiled(small: bool) -> _Compiled:
    return _SINGLE_THREAD if small and jax.default_backend() == "cpu" else _DEFAULT


def _is_small(clients: Clients) -> bool:
    leaves = jax.tree.leaves(clients.data)
    return max(int(np.prod(leaf.shape[1:])) for leaf in leaves) <= 2**15 and clients.features <= 64


def problem_of(
    algorithm, clients, rounds, key, warm_start, channels, participants, mapped
) -> tuple[Problem, Personalized | None]:
    """The checked arguments."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm: wanted a jaxfed algorithm, got {type(algorithm).__name__}")
    if not isinstance(clients, Clients):
        raise ValueError(
            f"clients: wanted jaxfed.Clients, got {type(clients).__name__}; "
            "build them with Clients.from_samples(arrays)"
        )
    if not isinstance(rounds, int | np.integer) or isinstance(rounds, bool) or rounds <= 0:
        raise ValueError(f"rounds: wanted a positive whole number, got {rounds!r}")
    if not isinstance(mapped, backend.Backend):
        raise ValueError(f"backend: wanted one of jaxfed.backend, got {mapped!r}")
    ways = channel.triple(channels)
    participants = _EVERYBODY if participants is None else participants
    if not isinstance(participants, participation.Participation):
        raise ValueError(f"participation: wanted one of jaxfed.participation, got {participants!r}")
    participants.check(len(clients))
    start = warm_start.result if isinstance(warm_start, Solution) else warm_start
    if start is not None:
        if not isinstance(start, Personalized):
            raise ValueError(
                f"warm_start: wanted a solution or its result, got {type(start).__name__}"
            )
        for leaf in jax.tree.leaves(start.local):
            if leaf.shape[0] != len(clients):
                raise ValueError(
                    f"warm_start: its local part is for {leaf.shape[0]} clients, "
                    f"there are {len(clients)}"
                )
    algorithm.check(clients, start)
    key = _one_key(key)
    problem = Problem(algorithm, clients, *ways, participants, mapped, key, len(clients))
    _check_together(problem, start, int(rounds))
    return problem, start


def _check_together(problem: Problem, start: Personalized | None, rounds: int) -> None:
    algorithm, clients, up = problem.algorithm, problem.clients, problem.uplink
    number = problem.participation.number(len(clients))
    if problem.downlink.private:
        raise ValueError(
            "channel: one that hides what clients send is for the uplink alone; wanted a pair "
            "(uplink, downlink), such as (channel, lossless())"
        )
    if problem.start.cumulative:
        raise ValueError(
            "channel: wanted for the start one without memory at both ends, such as quantize(8), "
            f"got {problem.start!r}"
        )
    if number != len(clients) and algorithm.needs_everybody:
        raise ValueError(
            f"participation: {type(algorithm).__name__} needs every client in each round; "
            "use everybody()"
        )
    if not (up.private or up.cumulative or problem.start.private):
        return
    first, uplink = jax.eval_shape(partial(_messages, rounds=rounds), problem, start)
    if up.cumulative and not is_linear(uplink):
        raise ValueError(
            f"channel: differences add up to a mean or a sum, and {type(algorithm).__name__} "
            "reduces its messages in another way"
        )
    up.check(clients, number, uplink)
    if channel.fixed_bits(first):
        if up.private and not problem.start.private:
            raise ValueError(
                "channel: it hides what clients send in the rounds, and "
                f"{type(algorithm).__name__} sends {channel.fixed_bits(first)} bits in the clear "
                "before them; wanted a start channel that hides them too, or a warm start and, "
                "instead of automatic ones, the settings that these tell"
            )
        problem.start.check(clients, len(clients), first)


def _messages(
    problem: Problem, start: Personalized | None, *, rounds: int
) -> tuple[PyTree, PyTree]:
    """One client's first message and uplink, for their shapes."""
    open_problem = replace(problem, uplink=_LOSSLESS, downlink=_LOSSLESS, start=_LOSSLESS)
    ready, state, _ = _prepare(open_problem, start, rounds)
    algorithm, key = problem.algorithm, problem.key
    data, local, own = jax.tree.map(
        lambda x: x[0], (ready.clients.data, state.local, None if start is None else start.local)
    )
    begun = None if start is None else Personalized(start.shared, own)
    uplink = algorithm.client_step(key, state.downlink.receiver, local, data)[0]
    return wrapped(algorithm.first_message(key, data, begun)), wrapped(uplink)


def _one_key(key) -> Key[Array, ""]:
    """A key of the old style becomes one of the new."""
    if isinstance(key, jax.Array | np.ndarray):
        if key.dtype == np.uint32 and key.ndim > 0:
            key = jax.random.wrap_key_data(jnp.asarray(key))
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return jnp.asarray(key)
    raise ValueError(f"key: wanted one random key, such as jax.random.key(0), got {key!r}")


def _check_loop(tol, metrics, metrics_every) -> None:
    if tol is not None and not isinstance(tol, Tracer):
        number = np.asarray(tol)
        if number.ndim > 0 or number.dtype.kind not in "fiu" or not number >= 0:
            raise ValueError(f"tol: wanted a non-negative number or None, got {tol!r}")
    if metrics is not None and not callable(metrics):
        raise ValueError(f"metrics: wanted a function of the result or None, got {metrics!r}")
    if not isinstance(metrics_every, int) or metrics_every <= 0:
        raise ValueError(f"metrics_every: wanted a positive whole number, got {metrics_every!r}")


def _check_host(checkpoint: Any, callbacks: Any, best: Any, chunk_rounds: Any) -> None:
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ValueError(f"checkpoint: wanted jaxfed.Checkpoint(path), got {checkpoint!r}")
    if not isinstance(callbacks, Sequence) or not all(
        isinstance(callback, Callback) or callable(callback) for callback in callbacks
    ):
        raise ValueError(f"callbacks: wanted a list of callbacks, got {callbacks!r}")
    if best is not None and not isinstance(best, str):
        raise ValueError(f"best: wanted the name of an entry of the history, got {best!r}")
    if chunk_rounds is not None:
        check_count("chunk_rounds", chunk_rounds)


def _bar(rounds: int):
    return require("tqdm.auto", extra="cli").tqdm(total=rounds, unit="round", leave=True)
