"""The host's loop over chunks: history, tolerance, callbacks, best state, checkpoints."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed._optional import require
from jaxfed.core.common.processes import exchanged, on_host
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Costs, Problem, State
from jaxfed.core.run.callbacks import Best, Callback, better, initial, updated
from jaxfed.core.run.loop import Options
from jaxfed.core.run.runner import Runner, Tolerance
from jaxfed.core.run.solution import DivergenceError, Solution, name_of
from jaxfed.core.run.status import Status
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.store.identity import Identity, digest_of, fingerprint
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire


class Requests(NamedTuple):
    """Settings of the host loop."""

    rounds: int
    tol: Tolerance
    options: Options  # of a chunk
    callbacks: tuple[Callback | Callable[[Solution], bool | None], ...] = ()
    best: str | None = None
    progress: bool = False
    throw: bool = True


class Progress(eqx.Module):
    """The host loop's state between chunks, except the history. Checkpoints save it."""

    state: State
    callbacks: tuple[PyTree, ...]  # their states
    best: Best | None
    stopped: np.ndarray  # whether a callback has stopped the run

    @classmethod
    def first(cls, state: State, requests: Requests) -> "Progress":
        """The progress before the first round."""
        states = tuple(initial(callback) for callback in requests.callbacks)
        return cls(state, states, None, np.zeros((), bool))


class Saver(abc.ABC):
    """Saves a run between chunks."""

    every: int  # rounds

    @abc.abstractmethod
    def save(self, progress: Progress, history: Mapping[str, np.ndarray]) -> None:
        """Save the run at this progress."""


class HostLoop:
    """Drives one run from its present progress to its end."""

    def __init__(
        self,
        runner: Runner,
        costs: Costs,
        requests: Requests,
        progress: Progress,
        history: Mapping[str, np.ndarray],
        saver: Saver | None = None,
    ):
        """Create a loop that continues from this progress.

        Args:
            runner: of the prepared problem.
            costs: costs of messages, on the host.
            requests: settings.
            progress: the present state.
            history: of the rounds that have run; empty before the first.
            saver: saves the run; None to save nothing.
        """
        self.requests, self.runner, self.progress = requests, runner, progress
        self._costs, self._history, self._saver = costs, dict(history), saver
        # If a callback stops one of several processes, all must stop.
        self._processes = processes_of(runner.problem)

    @property
    def done(self) -> int:
        """The number of rounds that have run."""
        return int(self.progress.state.round)

    @property
    def ended(self) -> bool:
        """Whether the run is over, for whatever reason."""
        tol = self.requests.tol
        met = tol is not None and bool(self.progress.state.measure <= tol)
        return self.done >= self.requests.rounds or bool(self.progress.stopped) or met

    def run(self) -> Solution:
        """Run the remaining chunks.

        Raises:
            DivergenceError: if the run diverges and `throw` is set.
        """
        with _Bar(self.requests, self.done, self._processes) as bar:
            while not self.ended:
                before = self.done
                diverged = self._chunk()
                if diverged is not None:
                    return diverged
                # In this order: what is saved includes what callbacks have concluded from this
                # chunk, so that a resumed run does not show it to them again.
                self._look()
                self._save()
                bar.update(self.done - before, self._history["objective"][-1])
        best = self.progress.best
        solution = self._solution_at(self.progress.state if best is None else best.state)
        if best is None or best.measured:
            return solution
        return replace(solution, status=Status.unmeasured)

    def _chunk(self) -> Solution | None:
        """Run a chunk. If it diverges, return the solution of the round before."""
        asked, done, before = self.requests, self.done, self.progress.state
        each = asked.options.rounds
        # End chunks at multiples of their length, so that a resumed run has the same chunks.
        length = min(each - done % each, asked.rounds - done)
        if self._saver is not None:
            # Saves happen at the ends of chunks.
            length = min(length, self._saver.every - done % self._saver.every)
        options = replace(asked.options, rounds=length)
        state, piece = self.runner.advance(before, asked.tol, options)
        failed = int(state.failure.round)
        # The history excludes the round that failed.
        ran = (failed - 1 if failed else int(state.round)) - done
        self._append({name: values[:ran] for name, values in piece.items()})
        if not failed:
            self.progress = replace(self.progress, state=state)
            return None
        good = before
        if ran:
            # Rerun up to the last good round, which is cheaper than keeping every round's state.
            options = replace(options, rounds=ran)
            good, _ = self.runner.advance(before, asked.tol, options)
        # The good state precedes the failure, which the solution must report.
        good = replace(good, failure=state.failure)
        self.progress = replace(self.progress, state=good)
        solution = self._solution_at(good)
        if asked.throw:
            # The round had no objective if a message before the first one was not finite.
            raise _divergence(solution, *piece["objective"][ran : ran + 1].tolist())
        return solution

    def _look(self) -> None:
        """Update the best state and the callbacks, which may stop the run."""
        asked, progress = self.requests, self.progress
        if not asked.callbacks and asked.best is None:
            return
        solution = self._solution_at(progress.state)
        pairs = zip(asked.callbacks, progress.callbacks, strict=True)
        updates = [updated(callback, state, solution) for callback, state in pairs]
        stopped = any(stop for _, stop in updates)
        # The other processes would wait forever for one that stops alone.
        if self._processes > 1:
            stopped = any(exchanged(stopped))
        self.progress = replace(
            progress,
            best=better(asked.best, progress.best, solution),
            callbacks=tuple(state for state, _ in updates),
            stopped=np.asarray(stopped),
        )

    def _save(self) -> None:
        if self._saver is not None and (self.ended or self.done % self._saver.every == 0):
            self._saver.save(self.progress, self._history)

    def _solution_at(self, state: State) -> Solution:
        history = {name: values[: int(state.round)] for name, values in self._history.items()}
        solution = self.runner.finish(state, self._costs, history, self.requests.tol)
        return on_host_solution(solution, self.done, bool(self.progress.stopped))

    def _append(self, piece: Mapping[str, np.ndarray]) -> None:
        before = self._history
        self._history = {
            name: np.concatenate([before[name], values]) if before else values
            for name, values in piece.items()
        }


# --- a run from its checkpoint ------------------------------------------------------------------


@final
class _ToCheckpoint(Saver):
    def __init__(self, checkpoint: Checkpoint, identity: Identity):
        self.every = checkpoint.every
        self._checkpoint, self._identity = checkpoint, identity

    def save(self, progress: Progress, history: Mapping[str, np.ndarray]) -> None:
        done = int(progress.state.round)
        self._checkpoint.save(self._identity, done, progress, history)


def start_or_resume(
    runner_of: Callable[[Problem], Runner],
    given: Problem,
    warm_start: Personalized | None,
    requests: Requests,
    channel: Channel | Wire,
    checkpoint: Checkpoint | None,
) -> HostLoop:
    """The loop of a run, at its first round or at the end of its checkpoint.

    Args:
        runner_of: returns the runner of a problem.
        given: the problem, unprepared.
        warm_start: a warm start.
        requests: settings of the host loop.
        channel: the caller's `channel` argument.
        checkpoint: where to save the run, if anywhere.

    Raises:
        ValueError: if the checkpoint belongs to another run.
    """
    runner = runner_of(given)
    state, costs = runner.prepare(warm_start, requests.rounds)
    progress = Progress.first(state, requests)
    if checkpoint is None:
        return HostLoop(runner, costs, requests, progress, {})
    initial: Any = runner.problem, state
    program = runner.text(state, requests.tol, requests.options)
    identity = _identity(program, given, warm_start, requests, channel)

    def extends(fewer: int, done: int) -> bool:
        """Whether a run of fewer rounds is, bit for bit, the beginning of this one."""
        each, every = requests.options.rounds, checkpoint.every
        shorter = (
            done == fewer and done % each and done % every
        )  # its last chunk was shorter than this run's
        if fewer > requests.rounds or shorter:
            return False
        # Some algorithms prepare data differently for another number of rounds.
        other = runner_of(given)
        state, _ = other.prepare(warm_start, fewer)
        return digest_of((other.problem, state)) == digest_of(initial)

    # One is chosen after every chunk, so every checkpoint of such a run has a best state: what is
    # loaded is compared with a progress of that structure.
    best = None if requests.best is None else Best(np.full((), np.inf), state)
    saved = checkpoint.restore(identity, replace(progress, best=best), extends)
    progress, history = (progress, {}) if saved is None else saved
    if not requests.callbacks:  # nothing can stop the run any more
        progress = replace(progress, stopped=np.zeros((), bool))
    saver = _ToCheckpoint(checkpoint, identity)
    return HostLoop(runner, costs, requests, progress, history, saver)


def _identity(
    program: str,
    given: Problem,
    warm_start: Personalized | None,
    requests: Requests,
    channel: Channel | Wire,
) -> Identity:
    """The identity by which a checkpoint recognises this run."""
    processes = processes_of(given)
    identity = fingerprint(
        given.clients,
        program,
        given.key,
        warm_start,
        processes=processes,
        rounds=requests.rounds,
        algorithm=given.algorithm,
        channel=channel,
        participation=given.participation,
        backend=given.backend,
        tol=requests.tol,
        rounds_per_chunk=requests.options.rounds,
        metrics_every=requests.options.metrics_every,
        best=requests.best,
        callbacks=[one for one in requests.callbacks if isinstance(one, Callback)],
    )
    return exchanged(identity)[0] if processes > 1 else identity


def processes_of(problem: Problem) -> int:
    """The number of processes that a run is spread over."""
    return jax.process_count() if problem.backend.processes > 1 else 1


def _divergence(solution: Solution, objective: float = 0.0) -> DivergenceError:
    clients = np.flatnonzero(solution.failure.clients)
    shown = ", ".join(map(str, clients[:5])) + ", ..." * (len(clients) > 5)
    which = f", at {'client' if len(clients) == 1 else 'clients'} {shown}" if len(clients) else ""
    what = "a message is not finite" if np.isfinite(objective) else f"the objective is {objective}"
    return DivergenceError(
        f"{what} in round {int(solution.failure.round)}{which}; "
        "a smaller step size or smaller data may help",
        solution,
    )


def on_host_solution(solution: Solution, done: int, stopped: bool = False) -> Solution:
    """The solution with numbers on the host; releases also count rounds after the best one."""
    ends = ("converged", "diverged") if solution.stops else ("diverged",)
    if stopped and name_of(solution.status) not in ends:
        solution = replace(solution, status=Status.stopped)
    failure = jax.tree.map(on_host, solution.failure)
    # Messages sent after the best round still count for privacy.
    last = replace(solution.releases[-1], times=max(done, int(failure.round)))
    releases = (*solution.releases[:-1], last)
    return replace(solution, rounds=int(solution.rounds), failure=failure, releases=releases)


class _Bar:
    """A progress bar in the first process, or nothing if not requested."""

    def __init__(self, requests: Requests, done: int, processes: int):
        self._bar: Any = None
        if requests.progress and not (processes > 1 and jax.process_index()):
            tqdm = require("tqdm.auto", extra="cli").tqdm
            self._bar = tqdm(total=requests.rounds, unit="round", leave=True)
            self._bar.update(done)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, ran: int, objective: float | np.floating) -> None:
        """Advance by the rounds that ran."""
        if self._bar is not None:
            self._bar.update(ran)
            self._bar.set_postfix(objective=f"{objective:.6g}")
