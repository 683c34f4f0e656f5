"""`fit`: a run that the host drives, in compiled chunks of rounds."""

from collections.abc import Callable, Sequence

from jaxtyping import Array, Key, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.energies import energies, warn_of_large
from jaxfed.core.common.processes import watched
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.participation import Participation
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.arguments import (
    LOSSLESS,
    VMAP,
    check_host,
    check_host_alone,
    check_loop,
    problem_of,
)
from jaxfed.core.run.callbacks import Callback
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.host_loop import Requests, on_host_solution
from jaxfed.core.run.loop import Metrics, Options
from jaxfed.core.run.resume import start_or_resume
from jaxfed.core.run.runner import LocalRunner, OneProgram, programs
from jaxfed.core.run.separate import Separate
from jaxfed.core.run.solution import Solution, with_earlier
from jaxfed.core.run.streamed import Streamed
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg.precision import precise


@watched
@precise()
def fit(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""] | UInt32[Array, " 2"],
    warm_start: Solution | Personalized | None = None,
    channel: Channel | Wire = LOSSLESS,
    participation: Participation | None = None,
    backend: Backend = VMAP,
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
        ImportError: if a progress bar is asked for and tqdm is missing.
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
    if algorithm.energy_weighted and clients.layout.in_memory:
        warn_of_large(energies(clients), clients)

    interrupted = progress or checkpoint is not None or callbacks or best is not None
    if chunk_rounds is None:
        chunk_rounds = max(1, rounds // 50) if interrupted else rounds
        if checkpoint is not None:
            chunk_rounds = min(chunk_rounds, checkpoint.every)
    chunk_rounds = min(chunk_rounds, rounds)
    options = Options(chunk_rounds, tol is not None, metrics, metrics_every)
    if not interrupted and chunk_rounds == rounds:
        solution = runner_of(problem).run(start, tol, options)
        if not int(solution.failure.round):
            return with_earlier(warm_start, on_host_solution(solution, int(solution.rounds)))
    requests = Requests(rounds, tol, options, tuple(callbacks), best, progress, throw)
    loop = start_or_resume(runner_of, problem, start, requests, channel, checkpoint)
    return with_earlier(warm_start, loop.run())


def runner_of(problem: Problem) -> LocalRunner:
    """What runs the clients of a problem, by where they are and how the backend wants them."""
    compiled = programs(**compiler_options(problem.algorithm, problem.clients))
    if not problem.clients.layout.in_memory:
        return Streamed(problem, compiled)
    return Separate(problem, compiled) if problem.backend.apart else OneProgram(problem, compiled)
