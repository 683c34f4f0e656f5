"""`rollout` runs an algorithm as one traced computation, `fit` drives it from the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxfed._optional import require
from jaxfed.core.backends import backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.energies import energies, warn_of_large
from jaxfed.core.clients.source import check_in_memory, is_source
from jaxfed.core.common.processes import exchanged, on_host, watched
from jaxfed.core.contract import participation
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round.problem import State
from jaxfed.core.run import adjoint, apart
from jaxfed.core.run.apart import Compiled
from jaxfed.core.run.arguments import (
    LOSSLESS,
    UNROLLED,
    VMAP,
    check_host,
    check_host_alone,
    check_loop,
    problem_of,
)
from jaxfed.core.run.callbacks import Best, Callback, better, initial, updated
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.loop import Metrics, Options, advance, finish, prepare, with_bits
from jaxfed.core.run.solution import DivergenceError, Solution, Status
from jaxfed.core.run.streaming import Streamed, streamed
from jaxfed.core.store.checkpoint import Checkpoint, digest_of, fingerprint
from jaxfed.core.wire import channel
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg._precision import precise


@precise()
def rollout(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
    participation: participation.Participation | None = None,
    backend: backend.Backend = VMAP,
    tol: float | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    adjoint: adjoint.Adjoint = UNROLLED,
) -> Solution:
    """Run an algorithm as one traced computation, to be put under `jit`, `vmap` and `grad`.

    Args:
        algorithm: what to run; its float hyperparameters may be traced.
        clients: whom to run it on.
        rounds: how many rounds; at most that many with `tol`.
        key: random key; each client's draws fold in its id and the round.
        warm_start: another algorithm's solution, whose clients are found by their ids (by position
            where these are traced), or just its `result`, by position, to start from.
        channel: what messages go through: one channel for both ways, or a `jaxfed.Wire`.
        participation: who takes part in each round; everybody by default.
        backend: how clients are mapped: `auto`, `vmap`, `chunked`, `pmap` or `shard`.
        tol: stop once the algorithm's stopping measure (by default the relative change of the
            objective) is at most this. Unrolled, the loop is then a `while_loop`, which has no
            reverse derivative.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: evaluate `metrics` every so many rounds.
        adjoint: how the run is differentiated: `jaxfed.adjoint.unrolled()`, `checkpointed()` or,
            where it has converged, `implicit()`.

    Returns:
        The solution; all of it traced, `history` with `rounds` entries.

    Raises:
        ValueError: for arguments that do not fit together, before anything is computed, and for
            clients whose data are read block by block.
    """
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    check_loop(tol, metrics, metrics_every, adjoint)
    check_in_memory("rollout", clients)
    adjoint.check(problem)
    options = Options(rounds, tol is not None, metrics, metrics_every, remat=False)
    return _with_earlier(warm_start, adjoint.solve(problem, start, tol, options))


@watched
@precise()
def fit(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
    participation: participation.Participation | None = None,
    backend: backend.Backend = VMAP,
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
    checkpoints and callbacks. What runs on the host has no derivatives: those of a solution are
    `rollout`'s, with it as the `warm_start` and `adjoint=jaxfed.adjoint.implicit()`.

    Args:
        algorithm: what to run.
        clients: whom to run it on.
        rounds: how many rounds; at most that many with `tol` or a callback that stops.
        key: random key.
        warm_start: another algorithm's solution, whose clients are found by their ids (by position
            where these are traced), or just its `result`, by position, to start from.
        channel: one channel for both ways, or a `jaxfed.Wire`.
        participation: who takes part in each round; everybody by default.
        backend: `auto`, `vmap`, `chunked`, `pmap`, `shard` or `separate`.
        tol: stop once the algorithm's stopping measure is at most this.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: evaluate `metrics` every so many rounds.
        progress: show a progress bar with the objective.
        checkpoint: where and how often to save; a run with the same arguments resumes from it,
            bit for bit. One that has ended computes nothing more. With more `rounds` it goes on,
            where its rounds were those of a run that is given as many at once; one that a function
            has stopped goes on without callbacks.
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
            a checkpoint that belongs to another run, or for traced arguments.
        DivergenceError: if the objective or a message becomes NaN or infinite, with the round, the
            clients and the solution of the round before; a `FloatingPointError`.
        ImportError: if a progress bar or checkpoints are asked for and their packages are
            missing.
        jaxfed.ProcessError: if another process of the run has ended.

    Warns:
        jaxfed.EnergyWarning: if the algorithm weights clients by the energy of their samples, and
            some clients' energy is more than ten times the median client's.
    """
    check_host_alone(algorithm, clients, key, warm_start, channel, participation, tol)
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    check_loop(tol, metrics, metrics_every)
    check_host(checkpoint, callbacks, best, chunk_rounds, progress, throw)
    if algorithm.energy_weighted and not is_source(clients.data):
        warn_of_large(energies(clients), clients)
    made = apart.programs if backend.apart else programs
    if is_source(clients.data):
        made = streamed
    compiled = made(**compiler_options(algorithm, clients))
    watched = progress or checkpoint is not None or callbacks or best is not None
    if chunk_rounds is None:
        chunk_rounds = max(1, rounds // 50) if watched else rounds
        if checkpoint is not None:
            chunk_rounds = min(chunk_rounds, checkpoint.every)
    chunk_rounds = min(chunk_rounds, rounds)
    options = Options(chunk_rounds, tol is not None, metrics, metrics_every, remat=False)
    if not watched and chunk_rounds == rounds:
        solution = compiled.run(problem, start, tol, options)
        if not int(solution.failure.round):
            return _with_earlier(warm_start, _on_host(solution, int(solution.rounds)))

    # Of a run that is spread over processes, one speaks for all.
    several = problem.backend.processes > 1 and jax.process_count() > 1
    quiet = several and jax.process_index() != 0
    given = problem
    problem, state, costs = compiled.prepare(given, start, rounds)
    costs = jax.tree.map(np.asarray, costs)
    first = tuple(initial(callback) for callback in callbacks)
    run = _Run(state, first, None, np.zeros((), bool))
    pieces: list[dict[str, np.ndarray]] = []
    identity = None
    if checkpoint is not None:
        step = compiled if isinstance(compiled, Streamed) else jax.jit(advance)
        lowered = step.lower(problem, state, tol, options)
        identity = fingerprint(
            algorithm, clients, lowered, key=key, start=start, rounds=rounds,
            processes=jax.process_count() if several else 1, channel=channel,
            participation=participation, backend=backend, tol=tol, chunk_rounds=chunk_rounds,
            metrics_every=metrics_every, best=best,
            callbacks=[callback for callback in callbacks if isinstance(callback, Callback)],
        )  # fmt: skip
        if several:
            identity = exchanged(identity)[0]
        like = replace(run, best=None if best is None else Best(np.full((), np.inf), state))
        begun = problem, state

        def extends(fewer: int, done: int) -> bool:
            """Whether a run of so many rounds went like this one up to there, bit for bit."""
            shorter = done == fewer and done % chunk_rounds and done % checkpoint.every
            if fewer > rounds or shorter:  # than here, its last chunk
                return False
            # Some algorithms prepare their data by how many rounds there are.
            same = compiled.prepare(given, start, fewer)[:2]
            return digest_of(same) == digest_of(begun)

        if (saved := checkpoint.restore(identity, like, extends)) is not None:
            run, history = saved
            pieces.append(history)
            if not callbacks:  # nobody is left who stops it
                run = replace(run, stopped=np.zeros((), bool))

    def solution_at(state: State) -> Solution:
        number = int(state.round)
        history = {k: np.concatenate([piece[k] for piece in pieces])[:number] for k in pieces[0]}
        history = with_bits(history, costs, problem.size, np)
        solution = compiled.finish(problem, state, costs, history, tol)
        return _with_earlier(warm_start, _on_host(solution, done, bool(run.stopped)))

    def ended() -> bool:
        met = tol is not None and bool(run.state.measure <= tol)
        return done >= rounds or bool(run.stopped) or met

    done = int(run.state.round)
    bar = _bar(rounds) if progress and not quiet else None
    if bar is not None:
        bar.update(done)
    while not ended():
        length = min(chunk_rounds - done % chunk_rounds, rounds - done)
        if checkpoint is not None:
            length = min(length, checkpoint.every - done % checkpoint.every)
        before = run.state
        state, piece = compiled.advance(problem, before, tol, replace(options, rounds=length))
        failed = int(state.failure.round)
        ran = (failed - 1 if failed else int(state.round)) - done
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
            run = replace(run, best=better(best, run.best, solution))
            updates = [
                updated(*pair, solution) for pair in zip(callbacks, run.callbacks, strict=True)
            ]
            stopped = any(stop for _, stop in updates)
            if several:
                stopped = any(exchanged(stopped))
            kept = tuple(state for state, _ in updates)
            run = replace(run, callbacks=kept, stopped=np.asarray(stopped))
        if checkpoint is None or identity is None:
            continue
        if ended() or done % checkpoint.every == 0:
            history = {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}
            checkpoint.save(identity, done, run, history)
    if bar is not None:
        bar.close()
    return solution_at(run.state if run.best is None else run.best.state)


class _Run(eqx.Module):
    """What a checkpoint holds beside the history."""

    state: State
    callbacks: tuple[PyTree, ...]
    best: Best | None
    stopped: np.ndarray  # whether a callback has stopped it


def _diverged(piece: Mapping[str, Any], place: int, solution: Solution, throw: bool) -> Solution:
    if not throw:
        return solution
    clients = np.flatnonzero(solution.failure.clients)
    shown = ", ".join(map(str, clients[:5])) + ", ..." * (len(clients) > 5)
    which = f", at {'client' if len(clients) == 1 else 'clients'} {shown}" if len(clients) else ""
    objective = np.asarray(piece["objective"])[place]
    what = "a message is not finite" if np.isfinite(objective) else f"the objective is {objective}"
    raise DivergenceError(
        f"{what} in round {int(solution.failure.round)}{which}; "
        "a smaller step size or smaller data may help",
        solution,
    )


@cache
def programs(**options: bool | int) -> Compiled:
    """The programs of `fit`, by what they are compiled with."""
    jit = partial(jax.jit, compiler_options=options)

    def run(problem, start, tol, options):
        """All of it as one program, which takes less time to compile than its parts."""
        problem, state, costs = prepare(problem, start, options.rounds)
        state, history = advance(problem, state, tol, options)
        return finish(problem, state, costs, {}, tol), history, costs

    whole = jit(run)

    def with_history(problem, start, tol, options):
        solution, history, costs = whole(problem, start, tol, options)
        history = {name: np.asarray(values) for name, values in history.items()}
        history = {name: values[: int(solution.rounds)] for name, values in history.items()}
        history = with_bits(history, jax.tree.map(np.asarray, costs), problem.size, np)
        return replace(solution, history=history)

    end = jit(lambda problem, state, costs, tol: finish(problem, state, costs, {}, tol))

    def finished(problem, state, costs, history, tol):
        solution = end(problem, state, costs, tol)
        return replace(solution, history=history)

    return Compiled(
        program=whole,
        run=with_history,
        prepare=jit(prepare, static_argnums=2),
        advance=jit(advance),
        finish=finished,
    )


def _on_host(solution: Solution, done: int, stopped: bool = False) -> Solution:
    """With plain numbers where the host has them, and all rounds that ran, the best or not."""
    if stopped and solution.status == Status.round_limit:
        solution = replace(solution, status=Status.stopped)
    failure = jax.tree.map(on_host, solution.failure)
    last = replace(solution.releases[-1], times=max(done, int(failure.round)))
    releases = (*solution.releases[:-1], last)
    return replace(solution, rounds=int(solution.rounds), failure=failure, releases=releases)


def _with_earlier(warm_start: Solution | Personalized | None, solution: Solution) -> Solution:
    """With the releases of the warm start: the same objects, by which an account knows them."""
    earlier = warm_start.releases if isinstance(warm_start, Solution) else ()
    return replace(solution, releases=(*earlier, *solution.releases))


def _bar(rounds: int):
    return require("tqdm.auto", extra="cli").tqdm(total=rounds, unit="round", leave=True)
