"""Updates a solution with rounds on newer data, and measures the drift of its subspace."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, UInt32

from jaxfed._checks import check_options, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.processes import on_host
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.participation import Participation
from jaxfed.core.run.arguments import EVERYBODY, LOSSLESS
from jaxfed.core.run.fit import fit
from jaxfed.core.run.result import check_run
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.manifolds import grassmann

# The largest deviation of XᵀX from the identity for which X counts as orthonormal.
ORTHONORMAL = 1e-3


def update(
    solution: Solution | Saved,
    clients: Clients,
    *,
    algorithm: Algorithm | None = None,
    rounds: int,
    key: Key[Array, ""] | UInt32[Array, " 2"],
    channel: Channel | Wire | None = None,
    participation: Participation | None = None,
    **options: Any,
) -> Solution:
    """Continue a run for a few rounds on newer data with `jaxfed.fit`.

    Clients are matched by name, without names by id: those of the run continue from their local
    models, new ones start as in `jaxfed.personalize`, and models of missing ones are dropped. Of
    the server's state only the shared model is kept; channel memories start afresh.

    Args:
        solution: the solution of the run, or what `jaxfed.load` returned.
        clients: clients with their newest data, such as `jaxfed.stream.Forgetting` keeps.
        algorithm: the run's by default; of a file, which has only its name, the one that made it.
        rounds: number of rounds.
        key: random key; use a new one for each update.
        channel: the run's channels by default. A file has only their names: without this argument,
            a file of a run with other channels than `lossless()` is refused.
        participation: as `channel`, with `everybody()`.
        options: other arguments of `jaxfed.fit`, except the warm start.

    Returns:
        The solution. The first entry of `history["objective"]` is the objective of the run's models
        on the newer data. If the shared model is an orthonormal basis, the last entry of
        `history["drift"]` is the sine of the largest principal angle between its old and new span,
        from 0 to 1; the other entries are NaN.

    Raises:
        ValueError: if this is no solution of one run and no file, or lacks an argument that a file
            needs; or as `jaxfed.fit`.
        DivergenceError: as `jaxfed.fit`.
    """
    check_options(options, fit, without=("clients", "warm_start"))
    if isinstance(solution, Saved):
        if algorithm is None:
            raise refuse("algorithm", f"that of the file, {solution.algorithm}", algorithm)
        usual: tuple[Any, Any] = Wire(LOSSLESS, LOSSLESS), EVERYBODY
        for name, given, run, default in (
            ("channel", channel, solution.channel, usual[0]),
            ("participation", participation, solution.participation, usual[1]),
        ):
            if given is None and run not in ("", repr(default)):
                raise refuse(name, f"that of the run, {run}", given)
    else:
        check_run(solution)
        algorithm = solution.algorithm if algorithm is None else algorithm
        usual = solution.wire, solution.releases[-1].participation
    after = fit(
        algorithm,
        clients,
        rounds=rounds,
        key=key,
        channel=usual[0] if channel is None else channel,
        participation=usual[1] if participation is None else participation,
        warm_start=solution,
        **options,
    )
    both = [_basis(each.result.shared) for each in (solution, after)]
    if both[0] is None or both[1] is None or len(both[0]) != len(both[1]):
        return after
    drift = np.full(len(after.history["objective"]), np.nan)
    drift[-1:] = _largest_sine(*both)
    return replace(after, history=after.history | {"drift": drift})


def _basis(shared: PyTree) -> Float[np.ndarray, "features rank"] | None:
    """The shared model if it is a single orthonormal basis, or None."""
    if jax.tree.structure(shared) != jax.tree.structure(0) or np.ndim(shared) != 2:
        return None
    basis = on_host(shared)
    gram = basis.T @ basis
    return basis if np.abs(gram - np.eye(len(gram))).max() < ORTHONORMAL else None


@jax.jit
def _largest_sine(
    x: Float[Array, "features rank"], y: Float[Array, "features rank"]
) -> Float[Array, ""]:
    return jnp.sin(jnp.max(grassmann.principal_angles(x, y)))
