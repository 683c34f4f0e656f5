"""Computes models of new clients, with the shared part unchanged.

A new client does what the others did, from the same initial state, but sends nothing, so the
server's state does not change. No algorithm needs code for this.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree

from jaxfed.core.common.processes import is_here
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem
from jaxfed.core.round.whole import prepared

# Default number of local steps.
ROUNDS = 100


@partial(jax.jit, static_argnames="rounds")
def local_models(
    problem: Problem, server: PyTree, warm_start: Personalized, *, rounds: int = ROUNDS
) -> PyTree:
    """The clients' local models, leading axis = clients.

    Args:
        problem: an algorithm and its new clients.
        server: the server's state from a run of that algorithm.
        warm_start: the shared model of that run, without local ones.
        rounds: number of steps of each client.
    """
    algorithm, problem = problem.algorithm, prepared(problem, rounds)

    def model(shared, own):
        key, downlink, warm_start = shared
        data, client_id = own
        first_key, step_key = jax.random.split(jax.random.fold_in(key, client_id))
        local = contract.client_init(algorithm, first_key, downlink, data, warm_start)

        def step(local, number):
            key = jax.random.fold_in(step_key, number)
            this_round = algorithm.at_round(number + 1)
            return contract.client_step(this_round, key, downlink, local, data)[1], None

        local, _ = jax.lax.scan(step, local, jnp.arange(rounds))
        return contract.client_result(algorithm, downlink, local, data)

    clients = problem.clients
    shared = problem.key, algorithm.downlink(server), warm_start
    models = problem.backend.map(model, shared, (clients.data, clients.ids))
    return problem.cut(models)


def by_id(solution: Any, problem: Problem) -> Personalized:
    """A solution's result, with local models in the order of a problem's clients.

    Clients of the solution keep their models, matched by id. Other clients get one as new clients
    of the algorithm that made the solution. If ids are traced, models are matched by position.

    Raises:
        ValueError: if the clients span several processes and differ from the solution's.
    """
    result, known, wanted = solution.result, solution.ids, problem.clients.ids
    if not jax.tree.leaves(result.local) or _alike(known, wanted):
        return result
    if not problem.clients.layout.in_one_process:
        raise ValueError(
            "warm_start: wanted a solution of the same clients, since they span several "
            "processes, got one of others; pass only its shared part, "
            "Personalized(solution.result.shared, None)"
        )
    place = {int(number): position for position, number in enumerate(np.asarray(known))}
    ids = np.asarray(wanted).tolist()
    kept = np.asarray([place[number] for number in ids if number in place], int)
    fresh = [position for position, number in enumerate(ids) if number not in place]
    parts = [jax.tree.map(lambda x: x[kept], result.local)]
    if fresh:
        clients = problem.clients.take(np.asarray(fresh))
        start = Personalized(result.shared, None)
        solution.algorithm.check(clients, start)
        new = replace(problem, algorithm=solution.algorithm, clients=clients, size=len(fresh))
        parts.append(local_models(new, solution.server, start))
    # Kept clients come first in `parts`, then new ones; put all in the order of `ids`.
    order = np.argsort(np.asarray([*np.flatnonzero([i in place for i in ids]), *fresh], int))
    local = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *parts)
    return Personalized(result.shared, local)


def _alike(known: Int[Array, "*runs m"], wanted: Int[Array, " n"]) -> bool:
    """Whether both are in the same order, or their order is unknown."""
    if isinstance(known, Tracer) or isinstance(wanted, Tracer) or known.ndim > 1:
        return True
    both = [x for x in (known, wanted) if isinstance(x, jax.Array)]
    if not all(is_here(x) for x in both):
        return True
    return np.array_equal(np.asarray(known), np.asarray(wanted))
