"""`rollout`: a run as one traced computation."""

from jaxtyping import Array, Float, Key, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.participation import Participation
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.arguments import LOSSLESS, UNROLLED, VMAP, check_loop, problem_of
from jaxfed.core.run.loop import Metrics, Options
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
    warm_start: Solution | Personalized | None = None,
    channel: Channel | Wire = LOSSLESS,
    participation: Participation | None = None,
    backend: Backend = VMAP,
    tol: float | Float[Array, ""] | None = None,
    metrics: Metrics | None = None,
    metrics_every: int = 1,
    adjoint: Adjoint = UNROLLED,
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
    clients.layout.check_in_memory("rollout")
    adjoint.check(problem)
    options = Options(rounds, tol is not None, metrics, metrics_every)
    return with_earlier(warm_start, adjoint.solve(problem, start, tol, options))
