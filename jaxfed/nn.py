"""Federated runs as layers of a model: the forward pass is a run, the backward pass implicit.

`personalized_projection` and `common_projection` are functions for models of any kind. The Equinox
modules around them store the solution in `equinox.nn.State`, so that each solve continues from the
last one. Outputs depend only on subspaces, not on their bases, so any loss may follow.

Calls compute in the precision of their samples. Only samples outside of `jax.jit` and `jax.grad`
are looked at, and warned of, where single precision loses features: subtract means from samples,
and bring features in unlike units to one size, before a traced call.

    >>> import equinox as eqx, jax, jaxfed as jf
    >>> samples = jax.random.normal(jax.random.key(0), (3, 20, 4)) * jax.numpy.array([5, 4, 2, 1.0])
    >>> layer, state = eqx.nn.make_with_state(jf.nn.PersonalizedProjection)(
    ...     jf.pca.PerPCA(1, 1), samples, rounds=60, key=jax.random.key(1)
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

import abc
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed import _names
from jaxfed._checks import check_count, check_instance, refuse
from jaxfed.core.clients.checks import checked_floats
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import Adjoint, implicit
from jaxfed.core.run.fit import fit
from jaxfed.core.run.rollout import rollout

SampleArray = Float[ArrayLike, "clients samples features"]
Projected = Float[Array, "clients samples features"]
_MOST = 100  # times a call's rounds, for a layer's first solve


def personalized_projection(
    algorithm: Algorithm,
    samples: SampleArray,
    *,
    rounds: int,
    key: Key[Array, ""],
    warm_start: Personalized | None = None,
    tol: float | None = None,
    adjoint: Adjoint | None = None,
) -> tuple[Projected, Personalized]:
    """Project samples onto the components learned from them, `x (UUᵀ + V_iV_iᵀ)`.

    Args:
        algorithm: learns shared or local components, or both, orthonormal together, like `PerPCA`.
        samples: `(clients, samples, features)`, equally many of every client.
        rounds: rounds of the solve; an upper limit with `tol`.
        key: random key.
        warm_start: an earlier result to start from, in any precision.
        tol: tolerance that ends the solve, as in `rollout`.
        adjoint: how the solve is differentiated; `jaxfed.adjoint.implicit()` by default.

    Returns:
        The projected samples, differentiable in the samples and the algorithm's numbers, and the
        result, from which the next call can start.

    Raises:
        ValueError: as in `rollout`.
    """
    clients = _clients(samples)
    samples = clients.data.values
    result = _result(algorithm, clients, warm_start, adjoint, rounds=rounds, key=key, tol=tol)
    # Shared and local components are orthogonal, so their projections add up.
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
    warm_start: Personalized | None = None,
    tol: float | None = None,
    adjoint: Adjoint | None = None,
) -> tuple[Float[Array, "views entities features"], Personalized]:
    """Project views onto their common representation, `GGᵀ X_j`.

    Args:
        algorithm: learns an orthonormal representation `G (entities, rank)`, like `MaxVar`.
        views: dense views, `jaxfed.gcca.Views.from_arrays`, whose features may be traced.
        rounds: as in `personalized_projection`, like the other arguments.
        key: random key.
        warm_start: an earlier result to start from.
        tol: tolerance that ends the solve.
        adjoint: how the solve is differentiated.

    Returns:
        The projected views, and the result, from which the next call can start.

    Raises:
        ValueError: as in `rollout`.
    """
    _check_views(views)
    result = _result(algorithm, views, warm_start, adjoint, rounds=rounds, key=key, tol=tol)
    return result.shared @ (result.shared.T @ views.data.values), result


class _Solver(eqx.nn.StatefulLayer):
    """A layer whose state is its last solution, from which the next solve starts."""

    algorithm: Algorithm
    adjoint: Adjoint
    key: Key[Array, ""]
    last: eqx.nn.StateIndex
    rounds: int = eqx.field(static=True)
    tol: float | None = eqx.field(static=True)

    @abc.abstractmethod
    def __call__(self, data: Any, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        """The projected data, and the state for the next call."""

    @final
    def _set_up(
        self,
        algorithm: Algorithm,
        clients: Clients,
        rounds: int,
        key: Key[Array, ""],
        tol: float | None,
        adjoint: Adjoint | None,
    ) -> None:
        self.algorithm, self.rounds, self.tol, self.key = algorithm, rounds, tol, key
        self.adjoint = implicit() if adjoint is None else adjoint
        self.last = eqx.nn.StateIndex(_first_solution(algorithm, clients, rounds, key, tol))

    @final
    def _solve(
        self, project: Callable[..., Any], data: Any, state: eqx.nn.State
    ) -> tuple[Array, eqx.nn.State]:
        last = state.get(self.last)
        options = {"rounds": self.rounds, "key": self.key, "tol": self.tol, "adjoint": self.adjoint}
        projected, result = project(self.algorithm, data, warm_start=last, **options)
        # The state keeps its precision and takes no part in derivatives.
        result = jax.lax.stop_gradient(result)
        result = jax.tree.map(lambda x, y: x.astype(y.dtype), result, last)
        return projected, state.set(self.last, result)


@final
class PersonalizedProjection(_Solver):
    """`personalized_projection` as an Equinox layer that starts each solve from the last solution.

    `layer, state = eqx.nn.make_with_state(PersonalizedProjection)(algorithm, samples, ...)`, then
    `projected, state = layer(samples, state)`. The algorithm's numbers are parameters of the layer.
    A call computes in the precision of its samples; the state keeps its own precision.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        samples: SampleArray,
        *,
        rounds: int,
        key: Key[Array, ""],
        tol: float | None = None,
        adjoint: Adjoint | None = None,
    ):
        """Create the layer and solve once, until convergence.

        Args:
            algorithm: as in `personalized_projection`.
            samples: the samples of the first solve, `(clients, samples, features)`.
            rounds: rounds of each later solve; an upper limit with `tol`. The first solve takes up
                to a hundred times as many.
            key: random key.
            tol: tolerance that ends a solve, as in `rollout`.
            adjoint: how solves are differentiated; `jaxfed.adjoint.implicit()` by default.

        Raises:
            ValueError: as in `rollout`.
        """
        self._set_up(algorithm, _clients(samples), rounds, key, tol, adjoint)

    def __call__(self, samples: SampleArray, state: eqx.nn.State) -> tuple[Projected, eqx.nn.State]:
        """The projected samples, and the state for the next call."""
        return self._solve(personalized_projection, samples, state)


@final
class CommonRepresentation(_Solver):
    """`common_projection` as an Equinox layer that starts each solve from the last solution.

    Use it like `PersonalizedProjection`, with dense views in place of samples.
    """

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
        """Create the layer and solve once, until convergence.

        Args:
            algorithm: as in `common_projection`.
            views: the dense views of the first solve.
            rounds: as in `PersonalizedProjection`, like the other arguments.
            key: random key.
            tol: tolerance that ends a solve.
            adjoint: how solves are differentiated.

        Raises:
            ValueError: as in `rollout`.
        """
        _check_views(views)
        self._set_up(algorithm, views, rounds, key, tol, adjoint)

    def __call__(
        self, views: Clients, state: eqx.nn.State
    ) -> tuple[Float[Array, "views entities features"], eqx.nn.State]:
        """The projected views, and the state for the next call."""
        return self._solve(common_projection, views, state)


def _clients(samples: SampleArray) -> Clients:
    values = checked_floats(samples, "samples")
    if values.ndim != 3 or not values.size:
        raise refuse("samples", "an array (clients, samples, features)", samples)
    return Clients.from_samples(values)


def _check_views(views: Clients) -> None:
    # Only views have `rmv`; the values of sparse ones are a list, with one axis less.
    check_instance("views", views, Clients, "jaxfed.gcca.Views")
    data = views.data
    if not hasattr(data, "rmv") or data.values.ndim != 3:
        raise refuse("views", "dense views, jaxfed.gcca.Views.from_arrays", views)
    if data.observed is not None:
        raise refuse("views", "views of all entities", views)


def _result(
    algorithm: Algorithm,
    clients: Clients,
    warm_start: Personalized | None,
    adjoint: Adjoint | None,
    **options: Any,
) -> Personalized:
    """The result of a solve, whose warm start may be in any precision."""
    if warm_start is not None:
        # Runs compute in at least single precision, even for samples in half precision.
        dtype = jnp.promote_types(clients.data.values.dtype, jnp.float32)
        warm_start = jax.tree.map(
            lambda x: jnp.asarray(x, dtype) if eqx.is_inexact_array(x) else x, warm_start
        )
    adjoint = implicit() if adjoint is None else adjoint
    return rollout(algorithm, clients, warm_start=warm_start, adjoint=adjoint, **options).result


def _first_solution(
    algorithm: Algorithm, clients: Clients, rounds: int, key: Key[Array, ""], tol: float | None
) -> Personalized:
    """The first call's starting point: runs until a call's rounds hardly move the solution."""
    check_count("rounds", rounds)
    before = None

    def settled(solution):
        nonlocal before
        shared, local = solution.result
        basis, last = local if shared is None else shared, before
        before = basis
        if last is None:
            return False
        # The part outside of the last span, which ignores rotations of the basis.
        moved = basis - last @ (jnp.swapaxes(last, -1, -2) @ basis)
        return float(jnp.abs(moved).max()) < (1e-6 if basis.dtype == jnp.float64 else 1e-4)

    # Run chunks of one call's rounds, and let `settled` decide after each.
    chunks: dict[str, Any] = {"rounds": _MOST * rounds, "rounds_per_chunk": rounds}
    solution = fit(algorithm, clients, **chunks, key=key, tol=tol, callbacks=[settled])
    return jax.lax.stop_gradient(solution.result)


__dir__ = _names.public_names(__name__)
