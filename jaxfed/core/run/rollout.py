"""`rollout` runs an algorithm as one traced computation."""

from jaxtyping import Array, Float, Key, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like
from jaxfed.core.clients.units import warn_of_units
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.participation import Participation
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.arguments import LOSSLESS, UNROLLED, VMAP, check_loop, problem_of
from jaxfed.core.run.loop import Metrics, Options
from jaxfed.core.run.result import Fitted
from jaxfed.core.run.solution import Solution, with_earlier
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg.precision import precise


@precise()
def rollout(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""] | UInt32[Array, " 2"],
    warm_start: Fitted | None = None,
    channel: Channel | Wire = LOSSLESS,
    participation: Participation | None = None,
    backend: Backend = VMAP,
    tol: float | Float[Array, ""] | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    adjoint: Adjoint = UNROLLED,
) -> Solution:
    """Run an algorithm as one traced computation, for use under `jit`, `vmap` and `grad`.

    Args:
        algorithm: the algorithm to run; its float hyperparameters may be traced.
        clients: the clients to run it on.
        rounds: number of rounds; an upper limit with `tol`.
        key: random key; each client's draws fold in its id and the round.
        warm_start: what to start from: the solution of an algorithm, a fitted estimator, what
            `jaxfed.load` returned, or just the `result` of a solution. Clients are matched by name,
            without names by id (by position if ids are traced), and features are put in their
            order; those of a result are matched by position. A client without a model starts as in
            `jaxfed.personalize`.
        channel: one channel for both directions, or a `jaxfed.Wire`.
        participation: which clients take part in each round; all by default.
        backend: how clients are mapped: `auto`, `vmap`, `chunked`, `pmap` or `shard`.
        tol: stop once the algorithm's stopping measure (by default the relative change of the
            objective) is at most this. With `unrolled()`, the loop is then a `while_loop`, which
            has no reverse derivative.
        metrics: `f(result) -> {name: scalar}`, evaluated on the models after a round.
        metrics_every: number of rounds between evaluations of `metrics`.
        adjoint: how the run is differentiated: `jaxfed.adjoint.unrolled()`, `checkpointed()` or,
            for a converged run, `implicit()`.

    Returns:
        The solution, all of it traced, with `rounds` entries in `history`.

    Raises:
        ValueError: if arguments do not fit together (before anything is computed), or the clients'
            data are read block by block.

    Warns:
        jaxfed.UnitsWarning: if single precision loses components of the result, since features
            are in unlike units.
    """
    clients = like(clients, warm_start)
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, participation, backend
    )
    warn_of_units(algorithm, clients)
    check_loop(tol, metrics, metrics_every, adjoint)
    clients.layout.check_in_memory("rollout")
    adjoint.check(problem)
    options = Options(rounds, tol is not None, metrics, metrics_every)
    return with_earlier(warm_start, clients, adjoint.solve(problem, start, tol, options))
