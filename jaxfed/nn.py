"""Solves as layers of a model: forward is a federated run, backward its implicit derivative.

`personalized_projection` and `common_projection` are functions, for models of any kind; the Equinox
modules around them remember the solution from call to call, through `equinox.nn.State`, so that
each solve goes on from the last one. What comes out depends on subspaces and not on their bases, so
that any loss may follow.

    >>> import equinox as eqx, jax, jaxfed as jf
    >>> samples = jax.random.normal(jax.random.key(0), (3, 20, 4)) * jax.numpy.array([5, 4, 2, 1.0])
    >>> layer, state = eqx.nn.make_with_state(jf.nn.PersonalizedProjection)(
    ...     jf.pca.PerPCA(1, 1), samples, rounds=500, key=jax.random.key(1)
    ... )
    >>> @jax.jit
    ... def loss(scale, state):
    ...     projected, state = layer(scale * samples, state)
    ...     return ((samples - projected) ** 2).mean(), state
    >>> (value, state), slope = jax.value_and_grad(loss, has_aux=True)(
    ...     jax.numpy.ones(4), state
    ... )
    >>> slope.shape
    (4,)
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxfed import _names
from jaxfed.core.clients.checks import checked_array
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import check_count, check_instance, refuse
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.fit import fit
from jaxfed.core.run.rollout import rollout

Samples = Float[Array, "clients samples features"]
MOST = 100  # times a call's rounds, that a layer's first solve may take


def personalized_projection(
    algorithm: Algorithm,
    samples: Samples,
    *,
    rounds: int,
    key: Key[Array, ""],
    start: Personalized | None = None,
    tol: float | None = None,
    adjoint: Adjoint | None = None,
) -> tuple[Samples, Personalized]:
    """Samples on the components that are learned from them, `x (UUᵀ + V_iV_iᵀ)`.

    Args:
        algorithm: learns shared or local components or both, orthonormal together: `PerPCA`.
        samples: as many of every client, `(clients, samples, features)`.
        rounds: of the solve; at most so many with `tol`.
        key: random key.
        start: an earlier result to start from, in any precision.
        tol: ends the solve, as in `rollout`.
        adjoint: how the solve is differentiated; `jaxfed.adjoint.implicit()` by default.

    Returns:
        The projected samples, with derivatives by the samples and the algorithm's numbers, and the
        result, to start the next call from.

    Raises:
        ValueError: as `rollout` does.
    """
    clients = _clients(samples)
    samples = clients.data.values
    start = _start(start, samples)
    result = rollout(
        algorithm, clients, rounds=rounds, key=key, warm_start=start, tol=tol,
        adjoint=implicit() if adjoint is None else adjoint,
    ).result  # fmt: skip
    projected = jnp.zeros_like(samples)
    if result.shared is not None:
        projected += samples @ result.shared @ result.shared.T
    if result.local is not None:
        projected += samples @ result.local @ jnp.swapaxes(result.local, 1, 2)
    return projected, result


def common_projection(
    algorithm: Algorithm,
    views: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    start: Personalized | None = None,
    tol: float | None = None,
    adjoint: Adjoint | None = None,
) -> tuple[Float[Array, "views entities features"], Personalized]:
    """Views on the representation that they have in common, `GGᵀ X_j`.

    Args:
        algorithm: learns an orthonormal representation `G (entities, rank)`: `MaxVar`.
        views: dense views, `jaxfed.gcca.Views.from_arrays`, whose features may be traced.
        rounds: of the solve; at most so many with `tol`.
        key: random key.
        start: an earlier result to start from, in any precision.
        tol: ends the solve, as in `rollout`.
        adjoint: how the solve is differentiated; `jaxfed.adjoint.implicit()` by default.

    Returns:
        The projected views, and the result, to start the next call from.

    Raises:
        ValueError: as `rollout` does.
    """
    _check_views(views)
    start = _start(start, views.data.values)
    result = rollout(
        algorithm, views, rounds=rounds, key=key, warm_start=start, tol=tol,
        adjoint=implicit() if adjoint is None else adjoint,
    ).result  # fmt: skip
    return result.shared @ (result.shared.T @ views.data.values), result


class PersonalizedProjection(eqx.nn.StatefulLayer):
    """`personalized_projection` as an Equinox layer that starts each solve from the last solution.

    `layer, state = eqx.nn.make_with_state(PersonalizedProjection)(algorithm, samples, ...)`, then
    `projected, state = layer(samples, state)`. The algorithm's numbers are parameters of the layer.
    A call computes in the precision of its samples; the state keeps its own.
    """

    algorithm: Algorithm
    adjoint: Adjoint
    key: Key[Array, ""]
    last: eqx.nn.StateIndex
    rounds: int = eqx.field(static=True)
    tol: float | None = eqx.field(static=True)

    def __init__(
        self,
        algorithm: Algorithm,
        samples: Samples,
        *,
        rounds: int,
        key: Key[Array, ""],
        tol: float | None = None,
        adjoint: Adjoint | None = None,
    ):
        """Set up the layer, by a first solve that goes on until it has converged.

        Args:
            algorithm: as in `personalized_projection`.
            samples: of all clients, to start from, `(clients, samples, features)`.
            rounds: of each later solve, from the last solution; at most so many with `tol`. The
                first one takes up to a hundred times as many.
            key: random key.
            tol: ends a solve, as in `rollout`.
            adjoint: how solves are differentiated; `jaxfed.adjoint.implicit()` by default.

        Raises:
            ValueError: as `rollout` does.
        """
        self.adjoint = _adjoint(adjoint)
        self.algorithm, self.rounds, self.tol, self.key = algorithm, rounds, tol, key
        self.last = eqx.nn.StateIndex(_first(algorithm, _clients(samples), rounds, key, tol))

    def __call__(self, samples: Samples, state: eqx.nn.State) -> tuple[Samples, eqx.nn.State]:
        """The projected samples, and the state for the next call."""
        projected, result = personalized_projection(
            self.algorithm, samples, rounds=self.rounds, key=self.key, tol=self.tol,
            start=state.get(self.last), adjoint=self.adjoint,
        )  # fmt: skip
        return projected, state.set(self.last, _remembered(result, state.get(self.last)))


class CommonRepresentation(eqx.nn.StatefulLayer):
    """`common_projection` as an Equinox layer that starts each solve from the last solution.

    `layer, state = eqx.nn.make_with_state(CommonRepresentation)(algorithm, views, ...)`, then
    `projected, state = layer(views, state)`. The algorithm's numbers are parameters of the layer.
    A call computes in the precision of its views; the state keeps its own.
    """

    algorithm: Algorithm
    adjoint: Adjoint
    key: Key[Array, ""]
    last: eqx.nn.StateIndex
    rounds: int = eqx.field(static=True)
    tol: float | None = eqx.field(static=True)

    def __init__(
        self,
        algorithm: Algorithm,
        views: Clients,
        *,
        rounds: int,
        key: Key[Array, ""],
        tol: float | None = None,
        adjoint: Adjoint | None = None,
    ):
        """Set up the layer, by a first solve that goes on until it has converged.

        Args:
            algorithm: as in `common_projection`.
            views: dense views to start from.
            rounds: of each later solve, from the last solution; at most so many with `tol`. The
                first one takes up to a hundred times as many.
            key: random key.
            tol: ends a solve, as in `rollout`.
            adjoint: how solves are differentiated; `jaxfed.adjoint.implicit()` by default.

        Raises:
            ValueError: as `rollout` does.
        """
        _check_views(views)
        self.adjoint = _adjoint(adjoint)
        self.algorithm, self.rounds, self.tol, self.key = algorithm, rounds, tol, key
        self.last = eqx.nn.StateIndex(_first(algorithm, views, rounds, key, tol))

    def __call__(
        self, views: Clients, state: eqx.nn.State
    ) -> tuple[Float[Array, "views entities features"], eqx.nn.State]:
        """The projected views, and the state for the next call."""
        projected, result = common_projection(
            self.algorithm, views, rounds=self.rounds, key=self.key, tol=self.tol,
            start=state.get(self.last), adjoint=self.adjoint,
        )  # fmt: skip
        return projected, state.set(self.last, _remembered(result, state.get(self.last)))


def _clients(samples: Samples) -> Clients:
    values = checked_array(samples, "samples")
    if values.ndim != 3 or not values.size:
        raise refuse("samples", "an array (clients, samples, features)", samples)
    return Clients.from_samples(values)


def _check_views(views: Clients) -> None:
    # What algorithms on views use; the list of a sparse view's values has an axis less.
    data = views.data if isinstance(views, Clients) else None
    if data is None or not hasattr(data, "rmv") or data.values.ndim != 3:
        raise refuse("views", "dense views, jaxfed.gcca.Views.from_arrays", views)


def _start(start: Personalized | None, data: Array) -> Personalized | None:
    """The start in the precision of the data."""
    if start is None:
        return None
    check_instance("start", start, Personalized, "an earlier result or None")
    dtype = jnp.promote_types(data.dtype, jnp.float32)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if eqx.is_inexact_array(x) else x, start)


def _remembered(result: Personalized, before: Personalized) -> Personalized:
    """The result for the next call, in the precision that the state has."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), jax.lax.stop_gradient(result), before)


def _adjoint(adjoint: Adjoint | None) -> Adjoint:
    if adjoint is None:
        return implicit()
    check_instance("adjoint", adjoint, Adjoint, "one of jaxfed.adjoint")
    return adjoint


def _first(
    algorithm: Algorithm, clients: Clients, rounds: int, key: Key[Array, ""], tol: float | None
) -> Personalized:
    """The solution that the first call starts from, until as many rounds no longer move it."""
    check_count("rounds", rounds)
    last = []

    def settled(solution):
        shared, local = solution.result
        basis = local if shared is None else shared
        last.append(basis)
        if len(last) == 1:
            return False
        before = last.pop(0)
        moved = basis - before @ (jnp.swapaxes(before, -1, -2) @ basis)
        return float(jnp.abs(moved).max()) < (1e-6 if basis.dtype == jnp.float64 else 1e-4)

    solution = fit(
        algorithm, clients, rounds=MOST * rounds, chunk_rounds=rounds, key=key, tol=tol,
        callbacks=[settled],
    )  # fmt: skip
    return jax.lax.stop_gradient(solution.result)


__dir__ = _names.public_names(__name__)
