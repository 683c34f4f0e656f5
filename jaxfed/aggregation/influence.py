"""How far each client moved a result: by runs without it, or by a derivative with its weight."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_count, checked_key, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import without_names
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.result import check_run, clients_of_run
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.linalg.precision import data_matmul

Quantity = Callable[[Personalized], Float[Array, " numbers"]]
ClientWeights = Float[Array, " clients"]
# Random directions for estimating a projector's change with a derivative.
DIRECTIONS = 32


@in_enough_precision
def client_influence(
    solution: Solution,
    clients: Clients,
    *,
    key: Key[Array, ""],
    of: Quantity | None = None,
    rounds: int | None = 10,
    adjoint: Adjoint | None = None,
) -> Float[Array, " clients"]:
    """Compute how much the result changes without each client, whose weight the others take over.

    By default, further rounds are run from the solution without each client in turn, and compared
    with as many rounds of all clients. So the solution need not have converged, and may even be one
    that a client has taken over. A few rounds are enough to find clients whose influence is far
    above the others'; the changes themselves need more. For m clients, each round takes m² client
    steps.

    With `rounds=None`, the change is computed to first order in the weights, by implicit
    derivatives: one adjoint solve for each number of `of`, however many clients there are. The
    solution must have converged. A derivative describes only the neighbourhood of the result: it
    understates clients that have moved the result far, and it is zero for a client whose own
    components are orthogonal to the shared ones.

    Args:
        solution: solution of a run of the clients.
        clients: the clients of the run.
        key: random key for the rounds, or for the random directions of a derivative.
        of: function of the result to compare, which must not depend on the rotation of bases. By
            default the projector P onto the shared components; with a derivative, its change is
            estimated from random combinations of its entries.
        rounds: number of further rounds without each client; None for a derivative.
        adjoint: how to differentiate the run if `rounds` is None; by default
            `jaxfed.adjoint.implicit()`.

    Returns:
        The root mean square change of the numbers; by default ‖P - P_i‖ in the Frobenius norm, for
        the projectors P with all clients and P_i without one.

    Raises:
        ValueError: if an argument has another type, the number of clients differs from that of the
            run, there is only one client, an adjoint is given together with `rounds`, `of` is
            missing and the shared part is not one matrix, or weights do not change the result to
            first order.

    Source: Cook & Weisberg (1982), Residuals and influence in regression, Section 5.2, for a few
    steps from the solution without a case; Koh & Liang (2017), Understanding black-box predictions
    via influence functions, for the first-order effect.
    """
    check_run(solution)
    clients = clients_of_run(solution, clients)
    solution, clients = without_names((solution, clients))
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

    moved = _to_first_order(solution, clients, key, of, implicit() if adjoint is None else adjoint)
    if is_known(moved) and not np.any(moved):
        # Sums of second moments, for example, do not depend on the clients' weights.
        wanted = "a number of rounds, since weights do not change the result to first order"
        raise refuse("rounds", wanted, rounds)
    return moved


def _weighted(
    algorithm: Algorithm,
    warm_start: Personalized | Solution,
    clients: Clients,
    weights: ClientWeights,
    key: Key[Array, ""],
    **options,
) -> Personalized:
    """Return the result of rounds with other weights."""
    weighted = eqx.tree_at(lambda c: c.weights, clients, weights)
    return rollout(algorithm, weighted, key=key, warm_start=warm_start, **options).result


@eqx.filter_jit
def _to_first_order(
    solution: Solution,
    clients: Clients,
    key: Key[Array, ""],
    of: Quantity | None,
    adjoint: Adjoint,
) -> ClientWeights:
    by = _projected(key, solution.result.shared) if of is None else of

    def numbers(weights: ClientWeights) -> Float[Array, " numbers"]:
        return by(
            _weighted(
                solution.algorithm, solution, clients, weights, key, rounds=1, adjoint=adjoint
            )
        )

    # Without client i the others' weights grow by 1/(1 - w_i), a change of (w - e_i) w_i/(1 - w_i).
    # Its sign is lost in the squares.
    by_weight = jax.jacrev(numbers)(clients.weights)
    share = clients.weights
    change = (by_weight - by_weight @ share[:, None]) * (share / (1 - share))
    return jnp.sqrt(jnp.mean(change**2, axis=0))


@eqx.filter_jit
def _without_each(
    algorithm: Algorithm,
    warm_start: Personalized,
    clients: Clients,
    key: Key[Array, ""],
    of: Quantity | None,
    rounds: int,
) -> ClientWeights:
    def result(weights: ClientWeights) -> Personalized:
        return _weighted(algorithm, warm_start, clients, weights, key, rounds=rounds)

    every = result(clients.weights)

    def change(client: Int[Array, ""]) -> Float[Array, ""]:
        left = clients.weights.at[client].set(0)
        without = result(left / left.sum())
        if of is None:
            return _distance(every.shared, without.shared)
        return jnp.sqrt(jnp.mean((of(without) - of(every)) ** 2))

    # One after the other, since each needs the states of all clients.
    return jax.lax.map(change, jnp.arange(len(clients)))


def _distance(
    basis: Float[Array, "features rank"], other: Float[Array, "features rank"]
) -> Float[Array, ""]:
    """Return the distance of the projectors onto two subspaces, accurate if it is small."""
    left = other - data_matmul(basis, data_matmul(basis.T, other))
    return jnp.sqrt(2 * jnp.sum(left**2))


def _projected(key: Key[Array, ""], shared: Float[Array, "features rank"]) -> Quantity:
    """Return numbers whose mean square change estimates that of the projector."""
    pairs = jax.random.normal(key, (2, DIRECTIONS, len(shared)), shared.dtype)

    def numbers(result: Personalized) -> Float[Array, " numbers"]:
        # For independent normal a and b, aᵀ X b has variance ‖X‖².
        first, second = pairs @ result.shared
        return jnp.sum(first * second, axis=1)

    return numbers
