"""What was learned, in whatever form a caller has it."""

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from jaxfed._checks import check_instance, is_whole, refuse
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved

# A solution, its result, what `jaxfed.load` returned, or an estimator with scikit-learn's
# interface, which has what it learned as `saved_`.
Fitted: TypeAlias = Solution | Saved | Personalized | Any


def result_of(
    fitted: Fitted, learned: str = "an algorithm", argument: str = "fitted"
) -> Personalized:
    """Return the learned models.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        learned: what can have learned them, for the message.
        argument: the name of the caller's argument.

    Raises:
        ValueError: if it is something else.
    """
    found = getattr(fitted, "saved_", fitted)
    result = found if isinstance(found, Personalized) else getattr(found, "result", None)
    if not isinstance(result, Personalized):
        raise not_learned(fitted, learned, argument)
    return result


def ids_of(fitted: Fitted) -> Int[np.ndarray, " clients"] | None:
    """The ids of the clients behind `result.local`, in its order; None if they are not known."""
    ids: Any = getattr(getattr(fitted, "saved_", fitted), "ids", None)
    return np.asarray(ids) if is_known(ids) and ids.ndim == 1 else None


def place_of(fitted: Fitted, client: object, clients: int) -> int:
    """The position of a client, given its id or, where ids are not known, its position.

    Args:
        fitted: as for `result_of`.
        client: the caller's argument of that name.
        clients: number of clients.

    Raises:
        ValueError: if there is no such client.
    """
    ids = ids_of(fitted)
    ids = np.arange(clients) if ids is None else ids
    if not is_whole(client) or client not in ids:
        wanted = f"a position from 0 to {clients - 1}"
        if ids_of(fitted) is not None:
            wanted = f"one of the clients' ids, {ids.tolist()[:20]}"
        raise refuse("client", wanted, client)
    return int(np.flatnonzero(ids == client)[0])


def not_learned(fitted: object, learned: str, argument: str = "fitted") -> ValueError:
    """Return the error for what is not a result of these algorithms; the caller raises it."""
    wanted = "a jaxfed.Solution, its result, a fitted estimator, or what jaxfed.load returned"
    return refuse(argument, f"what {learned} learned: {wanted}", fitted)


def saved_of(fitted: Fitted, argument: str = "fitted") -> Saved:
    """Return the learned models with what is known of their run; empty texts for what is not.

    Args:
        fitted: as for `result_of`.
        argument: the name of the caller's argument.

    Raises:
        ValueError: if it is something else, or the solution of several runs, or traced.
    """
    if isinstance(fitted, Solution):
        check_run(fitted, argument)
        return fitted._saved(argument)._replace(remarks=fitted.remarks())
    found = getattr(fitted, "saved_", fitted)
    if isinstance(found, Saved):
        return found
    result = result_of(found, argument=argument)
    clients = {len(leaf) for leaf in jax.tree.leaves(result.local) if np.ndim(leaf)}
    return Saved(result, {}, 0, "", "", clients.pop() if len(clients) == 1 else 0, {})


def check_run(solution: object, argument: str = "solution") -> None:
    """Accept the solution of one run, not traced, for what needs more than a result.

    Raises:
        ValueError: if it is something else; a saved result lacks the algorithm and the server.
    """
    wanted = "a jaxfed.Solution, as fit or rollout returns it"
    check_instance(argument, solution, Solution, wanted)
    assert isinstance(solution, Solution)
    if not solution._is_one:
        raise refuse(argument, "the solution of one run, not traced", solution.rounds)
