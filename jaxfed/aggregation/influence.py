"""How far each client has moved a result: the result without it, or a derivative by its weight."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_count, check_instance, checked_key, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.linalg.precision import data_matmul

Of = Callable[[Personalized], Float[Array, " numbers"]]
Weights = Float[Array, " clients"]
# In which a projector's change is estimated, where it is a derivative.
DIRECTIONS = 32


def client_influence(
    solution: Solution,
    clients: Clients,
    *,
    key: Key[Array, ""],
    of: Of | None = None,
    rounds: int | None = 10,
    adjoint: Adjoint | None = None,
) -> Float[Array, " clients"]:
    """How much the result changes without each client, whose weight the others take over.

    By default, further rounds are run from the solution without each client in turn, and compared
    with as many rounds of all clients. So the solution need not have converged, and may be one that
    a client has taken over. Clients whose influence is far above the others' are named after a few
    rounds already; the changes themselves want more. For m clients they take m² steps of a client
    for each round.

    With `rounds=None` it is the change to first order in the weights, by implicit derivatives: one
    adjoint solve for each number of `of`, however many clients there are. The solution must have
    converged. A derivative describes the neighbourhood of the result alone: it understates clients
    that have moved the result far, and it is zero for a client whose own components are orthogonal
    to the shared ones.

    Args:
        solution: of a run of the clients.
        clients: those of the run.
        key: of the rounds; by a derivative it draws directions too.
        of: what of the result matters, which may not depend on how bases are turned. By default
            the projector P onto the shared components; by a derivative, its change is estimated
            from random combinations of its entries.
        rounds: further rounds without each client; None for a derivative.
        adjoint: how the run is differentiated where `rounds` is None; by default
            `jaxfed.adjoint.implicit()`.

    Returns:
        The root of the mean square change of the numbers; by default ‖P - P_i‖ in the Frobenius
        norm, for the projectors P with all clients and P_i without one.

    Raises:
        ValueError: for arguments of another type, clients that are not as many as those of the run,
            a single client, an adjoint beside `rounds`, and, without `of`, a shared part that is
            not one matrix.

    Source: Cook & Weisberg (1982), Residuals and influence in regression, Section 5.2, for few
    steps from the solution without a case; Koh & Liang (2017), Understanding black-box predictions
    via influence functions, for the first-order effect.
    """
    check_instance("solution", solution, Solution, "the solution of a run")
    check_instance("clients", clients, Clients, "the clients of the run")
    number = len(solution.failure.clients)
    if len(clients) != number:
        raise ValueError(f"clients: wanted the run's {number}, got {len(clients)}")
    if number < 2:
        raise refuse("clients", "at least two, since a run without any has no result", number)
    key = checked_key("key", key)
    shared = solution.result.shared
    if of is None and (not isinstance(shared, jax.Array) or shared.ndim != 2):
        raise refuse("of", "a function, since the shared part is not one matrix", None)

    if rounds is not None:
        check_count("rounds", rounds)
        if adjoint is not None:
            raise refuse("adjoint", "None where rounds are run without each client", adjoint)
        return _without_each(solution.algorithm, solution.result, clients, key, of, rounds)

    by = _projected(key, shared) if of is None else of
    adjoint = implicit() if adjoint is None else adjoint

    def numbers(weights: Weights) -> Float[Array, " numbers"]:
        return by(
            _weighted(
                solution.algorithm, solution, clients, weights, key, rounds=1, adjoint=adjoint
            )
        )

    by_weight = jax.jacrev(numbers)(clients.weights)
    share = clients.weights
    change = (by_weight - by_weight @ share[:, None]) * (share / (1 - share))
    return jnp.sqrt(jnp.mean(change**2, axis=0))


def _weighted(
    algorithm: Algorithm,
    start: Personalized | Solution,
    clients: Clients,
    weights: Weights,
    key: Key[Array, ""],
    **options,
) -> Personalized:
    """The result of rounds with other weights."""
    weighted = eqx.tree_at(lambda c: c.weights, clients, weights)
    return rollout(algorithm, weighted, key=key, warm_start=start, **options).result


@eqx.filter_jit
def _without_each(
    algorithm: Algorithm,
    start: Personalized,
    clients: Clients,
    key: Key[Array, ""],
    of: Of | None,
    rounds: int,
) -> Weights:
    def result(weights: Weights) -> Personalized:
        return _weighted(algorithm, start, clients, weights, key, rounds=rounds)

    every = result(clients.weights)

    def change(client: Int[Array, ""]) -> Float[Array, ""]:
        left = clients.weights.at[client].set(0)
        without = result(left / left.sum())
        if of is None:
            return _distance(every.shared, without.shared)
        return jnp.sqrt(jnp.mean((of(without) - of(every)) ** 2))

    # One after the other, since each has the states of all clients.
    return jax.lax.map(change, jnp.arange(len(clients)))


def _distance(
    basis: Float[Array, "features rank"], other: Float[Array, "features rank"]
) -> Float[Array, ""]:
    """Of the projectors onto two subspaces of the same dimension, exact where it is small."""
    left = other - data_matmul(basis, data_matmul(basis.T, other))
    return jnp.sqrt(2 * jnp.sum(left**2))


def _projected(key: Key[Array, ""], shared: Float[Array, "features rank"]) -> Of:
    """Numbers of which the mean square change estimates that of the projector."""
    pairs = jax.random.normal(key, (2, DIRECTIONS, len(shared)), shared.dtype)

    def numbers(result: Personalized) -> Float[Array, " numbers"]:
        # For independent normal a and b, aᵀ X b has the variance ‖X‖².
        first, second = pairs @ result.shared
        return jnp.sum(first * second, axis=1)

    return numbers
