"""How far each client has moved a result, by implicit derivatives with respect to weights."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxfed._checks import check_count, check_instance, checked_key, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution


def client_influence(
    solution: Solution,
    clients: Clients,
    *,
    key: Key[Array, ""],
    of: Callable[[Personalized], Float[Array, " numbers"]] | None = None,
    directions: int = 8,
    adjoint: Adjoint | None = None,
) -> Float[Array, " clients"]:
    """How much the result would change without each client, to first order in its weight.

    When a client leaves, the others take over its weight. Each number of `of` costs one adjoint
    solve, however many clients there are. A derivative describes only the neighbourhood of the
    result: it understates a client that has moved the result far, and it is zero for a client whose
    own components are orthogonal to the shared ones. `far_clients` of a robust run finds those.

    Args:
        solution: a converged run of an algorithm with implicit derivatives.
        clients: those of the run.
        key: draws the directions.
        of: what of the result matters, which may not depend on how bases are turned. By default
            `directions` random combinations of the entries of the shared components' projector,
            which estimate its change.
        directions: how many, where `of` is not given.
        adjoint: how the run is differentiated; by default `jaxfed.adjoint.implicit()`.

    Returns:
        The root of the mean square change of the numbers; by default an estimate of ‖P - P_i‖ in
        the Frobenius norm, for the projectors P with all clients and P_i without one.

    Raises:
        ValueError: for arguments of another type, clients that are not as many as those of the run,
            a single client, and, without `of`, a shared part that is not one matrix.

    Source: Koh & Liang (2017), Understanding black-box predictions via influence functions, for
    the first-order effect of leaving out.
    """
    check_instance("solution", solution, Solution, "the solution of a run")
    check_instance("clients", clients, Clients, "the clients of the run")
    number = len(solution.failure.clients)
    if len(clients) != number:
        raise ValueError(f"clients: wanted the run's {number}, got {len(clients)}")
    if number < 2:
        raise refuse("clients", "at least two, since a run without any has no result", number)
    check_count("directions", directions)
    key = checked_key("key", key)
    if of is None:
        shared = solution.result.shared
        if not isinstance(shared, jax.Array) or shared.ndim != 2:
            raise refuse("of", "a function, since the shared part is not one matrix", None)
        pairs = jax.random.normal(key, (2, directions, len(shared)), shared.dtype)

        def projected(result: Personalized) -> Float[Array, " numbers"]:
            # For independent normal a and b, aᵀ X b has the variance ‖X‖².
            first, second = pairs @ result.shared
            return jnp.sum(first * second, axis=1)

        of = projected

    adjoint = implicit() if adjoint is None else adjoint

    def numbers(weights):
        weighted = eqx.tree_at(lambda c: c.weights, clients, weights)
        run = rollout(
            solution.algorithm, weighted, rounds=1, key=key, warm_start=solution, adjoint=adjoint
        )
        return of(run.result)

    by_weight = jax.jacrev(numbers)(clients.weights)
    share = clients.weights
    change = (by_weight - by_weight @ share[:, None]) * (share / (1 - share))
    return jnp.sqrt(jnp.mean(change**2, axis=0))
