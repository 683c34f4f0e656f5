"""Starts a run, or resumes it from its checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np

from jaxfed.core.common.processes import exchanged
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.callbacks import Best, Callback
from jaxfed.core.run.host_loop import HostLoop, Progress, Requests, Saver, processes_of
from jaxfed.core.run.runner import LocalRunner
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.store.identity import Identity, digest_of, fingerprint
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire


@final
class _ToCheckpoint(Saver):
    def __init__(self, checkpoint: Checkpoint, identity: Identity):
        self.every = checkpoint.every
        self._checkpoint, self._identity = checkpoint, identity

    def save(self, progress: Progress, history: Mapping[str, np.ndarray]) -> None:
        done = int(progress.state.round)
        self._checkpoint.save(self._identity, done, progress, history)


def start_or_resume(
    runner_of: Callable[[Problem], LocalRunner],
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
    program = runner.lower(state, requests.tol, requests.options)
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
        chunk_rounds=requests.options.rounds,
        metrics_every=requests.options.metrics_every,
        best=requests.best,
        callbacks=[one for one in requests.callbacks if isinstance(one, Callback)],
    )
    return exchanged(identity)[0] if processes > 1 else identity
