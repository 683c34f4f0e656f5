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

from jaxfed._checks import refuse
from jaxfed.core.clients.names import learned_by
from jaxfed.core.common.processes import is_here
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem
from jaxfed.core.round.rounds import begin
from jaxfed.core.round.whole import WHOLE, prepared
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.arrays import rebuilt
from jaxfed.core.store.saved import DOWNLINK, Saved

# Default number of local steps.
ROUNDS = 100


@partial(jax.jit, static_argnames="rounds")
def local_models(
    problem: Problem, downlink: PyTree, warm_start: Personalized, *, rounds: int = ROUNDS
) -> PyTree:
    """The clients' local models, leading axis = clients.

    Args:
        problem: an algorithm and its new clients.
        downlink: what the server sends after a run of that algorithm.
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
    shared = problem.key, downlink, warm_start
    models = problem.backend.map(model, shared, (clients.data, clients.ids))
    return problem.cut(models)


def by_id(earlier: Any, problem: Problem) -> Personalized:
    """The result of a solution or a file, with local models in the order of a problem's clients.

    Clients of the earlier run keep their models, matched by id. Other clients get one as new
    clients of the solution's algorithm; for a file, which has no algorithm, as those of the
    problem's. If ids are traced or not known, models are matched by position.

    Raises:
        ValueError: if the clients span several processes and differ from the earlier ones, or a
            file does not have what new clients of the problem's algorithm need.
    """
    result, known, wanted = earlier.result, earlier.ids, problem.clients.ids
    if not jax.tree.leaves(result.local) or known is None or same_ids(known, wanted):
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
        algorithm = problem.algorithm if isinstance(earlier, Saved) else earlier.algorithm
        algorithm.check(clients, start)
        new = replace(problem, algorithm=algorithm, clients=clients, size=len(fresh))
        parts.append(local_models(new, downlink_of(earlier, new, "warm_start"), start))
    # Kept clients come first in `parts`, then new ones; put all in the order of `ids`.
    order = np.argsort(np.asarray([*np.flatnonzero([i in place for i in ids]), *fresh], int))
    local = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *parts)
    return Personalized(result.shared, local)


def in_order_of(ids: Int[Array, " n"], earlier: Any) -> Any:
    """A warm start with local models in the order of these ids, for runs that will trace them.

    Args:
        ids: of the clients of a run.
        earlier: a solution, a file, or anything else, which stays as it is.

    Raises:
        ValueError: if some clients are new to it.
    """
    earlier = learned_by(earlier)
    if not isinstance(earlier, Solution | Saved):
        return earlier
    known = earlier.ids
    if known is None or not jax.tree.leaves(earlier.result.local) or same_ids(known, ids):
        return earlier
    place = {int(number): position for position, number in enumerate(np.asarray(known))}
    wanted = np.asarray(ids).tolist()
    if not set(wanted) <= set(place):
        raise refuse("warm_start", f"one of the clients {wanted}", list(place))
    order = np.asarray([place[number] for number in wanted])
    local = jax.tree.map(lambda x: x[order], earlier.result.local)
    moved = {"result": earlier.result._replace(local=local), "ids": known[order]}
    return earlier._replace(**moved) if isinstance(earlier, Saved) else replace(earlier, **moved)


def downlink_of(earlier: Any, problem: Problem, argument: str) -> PyTree:
    """What the server of a solution or a file sends to the new clients of a problem.

    Raises:
        ValueError: if it is a file of another algorithm, or without what its server sent.
    """
    if not isinstance(earlier, Saved):
        return earlier.algorithm.downlink(earlier.server)
    shape = jax.eval_shape(_downlink, problem, Personalized(earlier.result.shared, None))
    try:
        return rebuilt(DOWNLINK, earlier.downlink or {}, shape)
    except ValueError as error:
        ids, name = np.asarray(problem.clients.ids).tolist(), type(problem.algorithm).__name__
        raise ValueError(
            f"{argument}: wanted a file of {name}, since clients {ids} are new to it, got one of "
            f"{earlier.algorithm or 'an unknown algorithm'}; Personalized({argument}.result.shared,"
            " None) starts all clients from the shared part"
        ) from error


def _downlink(problem: Problem, warm_start: Personalized) -> PyTree:
    problem = prepared(problem, 1)
    return problem.algorithm.downlink(begin(problem, warm_start, WHOLE)[0].server)


def same_ids(known: Int[Array, "*runs m"] | np.ndarray, wanted: Int[Array, " n"]) -> bool:
    """Whether both are in the same order, or their order is unknown."""
    traced = isinstance(known, Tracer) or isinstance(wanted, Tracer)
    if traced or known.ndim > 1 or wanted.ndim > 1:
        return True
    both = [x for x in (known, wanted) if isinstance(x, jax.Array)]
    if not all(is_here(x) for x in both):
        return True
    return np.array_equal(np.asarray(known), np.asarray(wanted))
