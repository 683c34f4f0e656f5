"""`personalize` computes models of new clients from what other clients learned."""

import re

import jax
from jaxtyping import Array, Key

from jaxfed._checks import LARGEST, is_whole, refuse
from jaxfed.core.backends import backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like, with_names, without_names
from jaxfed.core.clients.units import as_precise_as, in_enough_precision
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.arguments import LOSSLESS, VMAP, problem_of
from jaxfed.core.run.new_clients import ROUNDS, downlink_of, local_models
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved


def personalize(
    algorithm: Algorithm,
    solution: Solution | Saved,
    clients: Clients,
    *,
    rounds: int = ROUNDS,
    key: Key[Array, ""] | None = None,
    backend: backend.Backend = VMAP,
) -> Personalized:
    """Compute models of new clients from the shared part and their own few samples.

    Each client takes the algorithm's local steps with the shared part fixed, and sends nothing. The
    result is the best local components beside the shared ones for `PerPCA`, the posterior mode
    under the learned prior for `HierarchicalPCA`, networks fine-tuned under the
    learned prior for `generative.AdaptiveTraining`, and the least-squares map of a new view of the
    same entities for `gcca.MaxVar`.

    Works under `jit`, `vmap` and `grad`.

    Args:
        algorithm: the algorithm that made the solution; settings of local steps may differ.
        solution: solution of the run of the participating clients, or what `jaxfed.load` returned.
        clients: the new clients, in the units of those that the solution learned from: variances
            and priors that it learned have them. Features are put in the solution's order, by name.
        rounds: number of local steps of each client.
        key: random key, for random steps; each client's draws fold in its id.
        backend: how clients are mapped: `auto`, `vmap`, `chunked`, `pmap` or `shard`.

    Returns:
        The unchanged shared model, and the new clients' local models, leading axis = clients; None
        if the algorithm has no local models.

    Raises:
        ValueError: if the algorithm did not make the solution, or arguments do not fit it.
    """
    if not isinstance(solution, Solution | Saved):
        raise refuse("solution", "what fit, rollout or jaxfed.load returned", solution)
    if not (is_whole(rounds) and 0 <= rounds <= LARGEST):
        raise refuse("rounds", f"a whole number from 0 to {LARGEST}", rounds)
    names = [
        each if isinstance(each, str) else repr(each) for each in (solution.algorithm, algorithm)
    ]
    made, given = (name.partition("(")[0] for name in names)
    if made != given:
        raise ValueError(f"algorithm: wanted a {made}, which made the solution, got {given}")
    clients = like(clients, solution)
    return _personalized(
        algorithm, clients, solution=solution, rounds=rounds, key=key, backend=backend
    )


@in_enough_precision
def _personalized(
    algorithm: Algorithm,
    clients: Clients,
    *,
    solution: Solution | Saved,
    rounds: int,
    key: Key[Array, ""] | None,
    backend: backend.Backend,
) -> Personalized:
    solution = without_names(as_precise_as(clients, solution))
    start = Personalized(solution.result.shared, None)
    key = jax.random.key(0) if key is None else key
    try:
        # A run has at least one round; `local_models` may have none.
        problem, start = problem_of(
            algorithm, clients, max(rounds, 1), key, start, LOSSLESS, None, backend
        )
    except ValueError as error:
        # `problem_of` names its own argument; here it came from the solution.
        raise ValueError(re.sub("^warm_start: ", "solution: ", str(error))) from error
    assert start is not None
    downlink = downlink_of(solution, problem, "solution")
    local = local_models(problem, downlink, start, rounds=rounds)
    return with_names(Personalized(start.shared, local), clients.names)
