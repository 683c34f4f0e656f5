"""`fit` runs an algorithm from the host, in compiled chunks of rounds."""

from collections.abc import Callable, Sequence

from jaxtyping import Array, Key, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.energies import energies, warn_of_large
from jaxfed.core.clients.names import like
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.common.processes import watched
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.participation import Participation
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.arguments import (
    LOSSLESS,
    VMAP,
    check_host_alone,
    check_host_arguments,
    check_loop,
    problem_of,
)
from jaxfed.core.run.callbacks import Callback
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.host_loop import Requests, on_host_solution, start_or_resume
from jaxfed.core.run.loop import Metrics, Options
from jaxfed.core.run.result import Fitted
from jaxfed.core.run.runner import Compiled, Runner, Stepwise, programs
from jaxfed.core.run.separate import Separate
from jaxfed.core.run.solution import Solution, with_earlier
from jaxfed.core.run.streamed import Streamed
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg.precision import precise


@watched
@in_enough_precision
@precise()
def fit(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""] | UInt32[Array, " 2"],
    warm_start: Fitted | None = None,
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
    rounds_per_chunk: int | None = None,
    throw: bool = True,
) -> Solution:
    """Run an algorithm from the host, in compiled chunks of rounds.

    The numbers equal those of `rollout`, except that `fit` computes in double precision if features
    are in such unlike units that single precision would lose components. Between chunks, `fit` can
    update a progress bar, save checkpoints and call callbacks. It has no derivatives; to
    differentiate a solution, pass it to `rollout` as `warm_start` with
    `adjoint=jaxfed.adjoint.implicit()`.

    Args:
        algorithm: the algorithm to run.
        clients: the clients to run it on.
        rounds: number of rounds; an upper limit with `tol` or a callback that stops.
        key: random key.
        warm_start: what to start from: the solution of an algorithm, a fitted estimator, what
            `jaxfed.load` returned, or just the `result` of a solution. Clients are matched by name,
            without names by id (by position if ids are traced), and features are put in their
            order; those of a result are matched by position. A client without a model starts as in
            `jaxfed.personalize`.
        channel: one channel for both directions, or a `jaxfed.Wire`.
        participation: which clients take part in each round; all by default.
        backend: `auto`, `vmap`, `chunked`, `pmap`, `shard` or `separate`.
        tol: stop once the algorithm's stopping measure is at most this.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: number of rounds between evaluations of `metrics`.
        progress: show a progress bar with the objective.
        checkpoint: where and how often to save. A run with the same arguments resumes from it, bit
            for bit; a finished run computes nothing more. With more `rounds`, the run continues if
            its rounds so far equal those of the longer run. To continue a run that a callback
            function stopped, pass no callbacks.
        callbacks: called after each chunk; each is a `Callback`, or a stateless function of the
            solution so far that may return True to stop the run.
        best: name of a history entry, where smaller is better. Return the solution at the end of
            the chunk with the lowest value instead of the last one. If no value is a number, the
            last one is returned, with `jaxfed.Status.unmeasured`.
        rounds_per_chunk: rounds per chunk. By default all rounds if nothing happens in between.
        throw: raise an error if the run diverges. If False, return the solution of the round
            before, with the failure in its `status` and `failure`.

    Returns:
        The solution, with `history` as NumPy arrays of the rounds that ran.

    Raises:
        ValueError: if arguments do not fit together (before anything is computed), a checkpoint
            belongs to another run, or arguments are traced.
        DivergenceError: if the objective or a message becomes NaN or infinite, with the round, the
            clients and the solution of the round before; a `FloatingPointError`.
        ImportError: if `progress` is set and tqdm is missing.
        jaxfed.ProcessError: if another process of the run has ended.

    Warns:
        jaxfed.EnergyWarning: if the algorithm weights clients by the energy of their samples, and
            some clients have more than ten times the median energy.
    """
    check_host_alone(algorithm, clients, key, warm_start, channel, participation, tol)
    clients = like(clients, warm_start)
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    check_loop(tol, metrics, metrics_every)
    check_host_arguments(checkpoint, callbacks, best, rounds_per_chunk, progress, throw)
    if algorithm.energy_weighted and clients.layout.in_memory:
        warn_of_large(energies(clients), clients)

    interrupted = progress or checkpoint is not None or callbacks or best is not None
    if rounds_per_chunk is None:
        # About fifty updates are enough for a progress bar, and cost little.
        rounds_per_chunk = max(1, rounds // 50) if interrupted else rounds
        if checkpoint is not None:
            rounds_per_chunk = min(rounds_per_chunk, checkpoint.every)
    rounds_per_chunk = min(rounds_per_chunk, rounds)
    options = Options(rounds_per_chunk, tol is not None, metrics, metrics_every)
    if not interrupted and rounds_per_chunk == rounds:
        solution = runner_of(problem).run(start, tol, options)
        # If it diverged, the loop below runs it again to find the round before.
        if not int(solution.failure.round):
            return with_earlier(
                warm_start, clients, on_host_solution(solution, int(solution.rounds))
            )
    requests = Requests(rounds, tol, options, tuple(callbacks), best, progress, throw)
    loop = start_or_resume(runner_of, problem, start, requests, channel, checkpoint)
    return with_earlier(warm_start, clients, loop.run())


def runner_of(problem: Problem) -> Runner:
    """The runner of a problem, by the layout of its clients and its backend."""
    compiled = programs(**compiler_options(problem.algorithm, problem.clients))
    if not problem.clients.layout.in_memory:
        return Stepwise(problem, Streamed(compiled))
    if problem.backend.apart:
        return Stepwise(problem, Separate(compiled))
    return Compiled(problem, compiled)
