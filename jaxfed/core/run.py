"""The loop: `rollout` is one traced computation, `fit` drives it from the host."""

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
from jaxfed.core import aggregation, backend, channel, participation
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.checkpoint import Checkpoint, fingerprint
from jaxfed.core.clients import Clients
from jaxfed.core.rounds import (
    EVERYBODY,
    LOSSLESS,
    VARYING,
    Problem,
    State,
    begin,
    bits,
    first_message,
    objectives,
    one_round,
    prepared,
    result_of,
)

Metrics = Callable[[Personalized], Mapping[str, Float[Array, ""]]]
Callback = Callable[["Solution"], bool | None]


_VMAP = backend.vmap()


class Solution(eqx.Module):
    """What a run returns.

    Attributes:
        server: the algorithm's final server state.
        local: the clients' final states, leading axis = clients.
        history: `(rounds,)` arrays: the weighted means of the clients' diagnostics
            (`"objective"` is evaluated at the iterate that enters the round), the server's
            diagnostics, the requested metrics, `"participants"`, and `"bits_up"` and
            `"bits_down"`, cumulative per client, the first uplink included. Entries that were
            not computed (metrics between their rounds, rounds after the tolerance was met) are
            NaN.
        rounds: number of rounds that ran.
        result: the learned models, `result.shared` and `result.local`.
        state: what the next round would start from.
    """

    server: PyTree
    local: PyTree
    history: dict[str, Any]
    rounds: int | Int[Array, ""]
    result: Personalized
    state: State


class Diverged(FloatingPointError):
    """An objective that is no longer finite.

    Attributes:
        round: the round in which it is not, counted from 1.
        clients: the positions of the clients whose own objectives are not; empty if all are.
        solution: what there was before that round.
    """

    def __init__(self, message: str, number: int, clients: tuple[int, ...], solution: Solution):
        """Keep what is known."""
        super().__init__(message)
        self.round, self.clients, self.solution = number, clients, solution


def rollout(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | tuple[channel.Channel, channel.Channel] = LOSSLESS,
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
        channel: what messages go through: one channel for both ways, or `(uplink, downlink)`.
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
    problem = prepared(problem, rounds)
    state = begin(problem, start)
    options = _Options(rounds, tol is not None, metrics, metrics_every, remat)
    state, history = _advance(problem, state, tol, options)
    history = _with_bits(history, bits(problem, start), problem.size, jnp)
    return _finish(problem, state, history, state.round)


def fit(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | tuple[channel.Channel, channel.Channel] = LOSSLESS,
    participation: participation.Participation | None = None,
    backend: backend.Backend = _VMAP,
    tol: float | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    every: int | None = None,
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
        channel: one channel for both ways, or `(uplink, downlink)`.
        participation: who takes part in each round; everybody by default.
        backend: `vmap`, `chunked`, `pmap` or `shard`.
        tol: stop once the algorithm's stopping measure is at most this.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: evaluate `metrics` every so many rounds.
        progress: show a progress bar with the objective.
        checkpoint: where and how often to save; a run with the same arguments resumes from it,
            bit for bit.
        callbacks: called after each chunk with the solution so far; True stops the run. One
            with an attribute `best` (see `EarlyStopping`) has that solution returned.
        every: rounds per chunk. By default all of them where nothing happens in between.

    Returns:
        The solution, with `history` as NumPy arrays of the rounds that ran.

    Raises:
        ValueError: for arguments that do not fit together, before anything is computed, and for
            a checkpoint that belongs to another run.
        Diverged: if the objective becomes NaN or infinite, with the round, the clients and the
            solution of the round before; a `FloatingPointError`.
        ImportError: if a progress bar or checkpoints are asked for and their packages are
            missing.
    """
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    _check_loop(tol, metrics, metrics_every)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ValueError(f"checkpoint: wanted jaxfed.Checkpoint(path), got {checkpoint!r}")
    if every is not None and (not isinstance(every, int) or every <= 0):
        raise ValueError(f"every: wanted a positive whole number of rounds, got {every!r}")
    if every is None:
        watched = progress or checkpoint is not None or callbacks
        every = max(1, rounds // 50) if watched else rounds
        if checkpoint is not None:
            every = min(every, checkpoint.every)
    bar = _bar(rounds) if progress else None

    compiled = _compiled(_is_small(clients))
    problem = compiled.prepare(problem, rounds)
    state = compiled.begin(problem, start)
    cost = bits(problem, start)
    pieces: list[dict[str, np.ndarray]] = []
    identity = None
    if checkpoint is not None:
        measured = sorted(jax.eval_shape(partial(_measure, problem, metrics), state))
        identity = fingerprint(
            algorithm, clients, rounds=rounds, key=key, start=start, channel=channel,
            participation=participation, backend=backend, tol=tol, every=every,
            metrics=measured, metrics_every=metrics_every,
        )  # fmt: skip
        if (saved := checkpoint.restore(identity, state)) is not None:
            state, history = saved
            pieces.append(history)

    def snapshot() -> Solution:
        history = {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}
        history = _with_bits(history, cost, problem.size, np)
        return compiled.finish(problem, state, history, int(state.round))

    def finished() -> bool:
        return done >= rounds or (tol is not None and float(state.measure) <= tol)

    done = int(state.round)
    if bar is not None:
        bar.update(done)
    while not finished():
        length = min(every - done % every, rounds - done)
        if checkpoint is not None:
            length = min(length, checkpoint.every - done % checkpoint.every)
        options = _Options(length, tol is not None, metrics, metrics_every, remat=False)
        before = state
        state, piece = compiled.advance(problem, state, tol, options)
        ran = int(state.round) - done
        piece = {name: np.asarray(values)[:ran] for name, values in piece.items()}
        good = int(np.argmin(np.append(np.isfinite(piece["objective"]), False)))
        if good < ran:
            # Once more up to there, with less kept on the way than states of every round.
            state = before
            if good:
                options = replace(options, rounds=good)
                state, _ = compiled.advance(problem, state, tol, options)
            pieces.append({name: values[:good] for name, values in piece.items()})
            raise _divergence(
                piece["objective"][good], compiled.objectives(problem, state), snapshot()
            )
        done += ran
        pieces.append(piece)
        if bar is not None:
            bar.update(ran)
            bar.set_postfix(objective=f"{piece['objective'][-1]:.6g}")
        if checkpoint is not None and (done % checkpoint.every == 0 or finished()):
            checkpoint.save(identity, state, pieces)
        if callbacks:
            so_far = snapshot()
            if sum(bool(callback(so_far)) for callback in callbacks):
                break
    if bar is not None:
        bar.close()
    for callback in callbacks:
        if (best := getattr(callback, "best", None)) is not None:
            return best
    return snapshot()


class EarlyStopping:
    """Callback that stops when a metric has not improved for a while, and keeps the best models.

    Use it with a metric of held-out samples: on few, noisy samples the optimum of the training
    objective can lie far from the truth, and stopping early is what keeps close to it.
    """

    def __init__(self, monitor: str, *, patience: int = 5, min_delta: float = 0.0):
        """Watch `history[monitor]`, smaller is better.

        Args:
            monitor: name of a metric or diagnostic in the history.
            patience: how many measurements, one a chunk, without an improvement are waited for.
            min_delta: what counts as an improvement.

        Raises:
            ValueError: if `patience` or `min_delta` is negative.
        """
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta must not be negative, got {patience} and {min_delta}"
            )
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.best: Solution | None = None
        self._lowest, self._waited, self._seen = np.inf, 0, 0

    def __call__(self, solution: Solution) -> bool:
        """True when it is time to stop."""
        if self.monitor not in solution.history:
            raise ValueError(
                f"monitor: the history has {sorted(solution.history)}, not {self.monitor!r}"
            )
        values = solution.history[self.monitor]
        values = values[~np.isnan(values)]
        if len(values) == self._seen:
            return False  # nothing new was measured
        self._seen = len(values)
        if values[-1] < self._lowest - self.min_delta:
            self._lowest, self._waited, self.best = values[-1], 0, solution
        else:
            self._waited += 1
        return self._waited > self.patience


# ---------------------------------------------------------------------------------------------
# One round, and the loop over rounds.


class _Options(eqx.Module):
    rounds: int = eqx.field(static=True)
    stops: bool = eqx.field(static=True)
    metrics: Metrics | None = eqx.field(static=True)
    metrics_every: int = eqx.field(static=True)
    remat: bool = eqx.field(static=True)


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
        return (state.round - first < options.rounds) & (state.measure > tol)

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


def _finish(problem: Problem, state: State, history: dict[str, Any], rounds) -> Solution:
    local = jax.tree.map(lambda x: x[: problem.size], state.local)
    return Solution(state.server, local, history, rounds, result_of(problem, state), state)


# ---------------------------------------------------------------------------------------------
# What messages cost.


def _with_bits(
    history: dict[str, Any], cost: tuple[int, int, int, int], clients: int, xp
) -> dict[str, Any]:
    """The history with cumulative bits per client."""
    first_up, first_down, up, down = cost
    # On the host in whole numbers and double precision: counts pass 2^24 soon.
    dtype = np.float64 if xp is np else float
    written, broadcast = (history[name].astype(dtype) for name in VARYING)
    participants = history["participants"]
    messages = xp.cumsum(participants).astype(dtype) / clients
    # The first downlink is that of round 1, and everybody has it.
    later = messages - messages[:1]
    received = xp.cumsum((broadcast * participants)[1:]) / clients
    return {name: values for name, values in history.items() if name not in VARYING} | {
        "bits_up": first_up + up * messages + 8 * xp.cumsum(written) / clients,
        "bits_down": first_down
        + down * later
        + 8 * xp.concatenate([xp.zeros(1), received])[: len(messages)],
    }


# ---------------------------------------------------------------------------------------------
# The host's side.


class _Compiled(eqx.Module):
    objectives: Callable = eqx.field(static=True)
    prepare: Callable = eqx.field(static=True)
    begin: Callable = eqx.field(static=True)
    advance: Callable = eqx.field(static=True)
    finish: Callable = eqx.field(static=True)


def _compile(**options) -> _Compiled:
    jit = partial(jax.jit, **options)
    finish = jit(lambda problem, state: result_of(problem, state))

    def finished(problem, state, history, rounds):
        result = finish(problem, state)
        local = jax.tree.map(lambda x: x[: problem.size], state.local)
        return Solution(state.server, local, history, rounds, result, state)

    return _Compiled(
        objectives=jit(objectives),
        prepare=jit(prepared, static_argnums=1),
        begin=jit(begin),
        advance=jit(_advance),
        finish=finished,
    )


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
    up, down = channel.pair(channels)
    participants = EVERYBODY if participants is None else participants
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
    _check_together(algorithm, clients, up, down, participants)
    key = _one_key(key)
    problem = Problem(algorithm, clients, up, down, participants, mapped, key, len(clients))
    if up.private:
        _refuse_first_message(problem, start, int(rounds))
    return problem, start


def _refuse_first_message(problem: Problem, start: Personalized | None, rounds: int) -> None:
    ready = jax.eval_shape(lambda problem: prepared(problem, rounds), problem)
    if sent := channel.fixed_bits(first_message(ready, start)):
        raise ValueError(
            f"channel: it hides what clients send in the rounds, and "
            f"{type(problem.algorithm).__name__} sends {sent} bits in the clear before them; give "
            "it a warm start and, instead of automatic ones, the settings that this tells"
        )


def _check_together(algorithm, clients, up, down, participants) -> None:
    size = len(clients) if isinstance(participants, type(EVERYBODY)) else participants.size
    up.check(clients, size, algorithm.aggregation)
    if down.private:
        raise ValueError(
            "channel: one that hides what clients send is for the uplink alone; wanted a pair "
            "(uplink, downlink), such as (channel, lossless())"
        )
    if not isinstance(participants, type(EVERYBODY)):
        if algorithm.needs_everybody:
            raise ValueError(
                f"participation: {type(algorithm).__name__} needs every client in each round; "
                "use everybody()"
            )
        if up.cumulative or down.cumulative:
            raise ValueError(
                "participation: a channel that sends differences needs every client in each round; "
                "use everybody(), or a channel without memory at both ends"
            )
    rules = jax.tree.leaves(algorithm.aggregation, is_leaf=aggregation.is_aggregation)
    if up.cumulative and any(rule.reduction != "sum" for rule in rules):
        raise ValueError(
            f"channel: differences add up to a mean or a sum, and {type(algorithm).__name__} "
            "aggregates its messages in another way"
        )


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


def _divergence(value, objectives: Float[Array, " clients"], solution: Solution) -> Diverged:
    clients = np.flatnonzero(~np.isfinite(np.asarray(objectives)))
    shown = ", ".join(map(str, clients[:5])) + ", ..." * (len(clients) > 5)
    which = f", at {'client' if len(clients) == 1 else 'clients'} {shown}" if len(clients) else ""
    number = int(solution.rounds) + 1
    message = f"the objective is {value} in round {number}{which}; a smaller step size may help"
    return Diverged(message, number, tuple(clients.tolist()), solution)


def _bar(rounds: int):
    return require("tqdm.auto", extra="cli").tqdm(total=rounds, unit="round", leave=True)
