"""What was learned, in whatever form a caller has it."""

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from jaxfed._checks import check_instance, is_list, is_whole, refuse
from jaxfed._numbers import host_floats
from jaxfed._refusals import closest
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.names import (
    NAMELESS,
    DataFrame,
    Names,
    in_columns,
    learned_by,
    like,
    listing,
)
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.remarks import PYTHON, Words
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
    found = learned_by(fitted)
    result = found if isinstance(found, Personalized) else getattr(found, "result", None)
    if not isinstance(result, Personalized):
        raise not_learned(fitted, learned, argument)
    return result


def ids_of(fitted: Fitted) -> Int[np.ndarray, " clients"] | None:
    """The ids of the clients behind `result.local`, in its order; None if they are not known."""
    ids: Any = getattr(learned_by(fitted), "ids", None)
    return np.asarray(ids) if is_known(ids) and ids.ndim == 1 else None


def names_of(fitted: Fitted) -> Names:
    """The names of the clients and features behind what was learned, as far as they are known."""
    return getattr(learned_by(fitted), "names", NAMELESS)


def in_learned_order(fitted: Fitted, tables: Any, argument: str) -> Any:
    """Tables with names as arrays, with the features in the order in which they were learned.

    Args:
        fitted: as for `result_of`.
        tables: a table or a list of tables; those that are neither data frames nor arrays of
            xarray stay as they are.
        argument: the caller's name for them.

    Raises:
        ValueError: if a table has other features, or holds something else than numbers.
    """
    if is_list(tables):
        return [in_learned_order(fitted, x, f"{argument}[{i}]") for i, x in enumerate(tables)]
    if not isinstance(tables, DataFrame | LabelledArray):
        return tables
    table = in_columns(tables, names_of(fitted).features, f"{argument}, columns")
    return host_floats(table, argument, "numbers", missing=True)


def place_of(fitted: Fitted, client: object, clients: int) -> int:
    """The position of a client, given its name, or its id, or its position if ids are not known.

    Args:
        fitted: as for `result_of`.
        client: the caller's argument of that name.
        clients: number of clients.

    Raises:
        ValueError: if there is no such client.
    """
    names = names_of(fitted).clients
    if isinstance(client, str) and names is not None and len(names) == clients:
        if client not in names:
            wanted = f"one of {listing(names, 20)}{closest(client, names)}"
            raise refuse("client", wanted, client)
        return names.index(client)
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


def saved_of(fitted: Fitted, argument: str = "fitted", words: Words = PYTHON) -> Saved:
    """Return the learned models with what is known of their run; empty texts for what is not.

    Args:
        fitted: as for `result_of`.
        argument: the name of the caller's argument.
        words: of the remarks of a solution, as for `Solution.remarks`.

    Raises:
        ValueError: if it is something else, or the solution of several runs, or traced.
    """
    if isinstance(fitted, Solution):
        check_run(fitted, argument)
        return fitted._record(argument, words)
    found = learned_by(fitted)
    if isinstance(found, Saved):
        return found
    result = result_of(found, argument=argument)
    clients = {len(leaf) for leaf in jax.tree.leaves(result.local) if np.ndim(leaf)}
    return Saved(result, {}, 0, "", "", clients.pop() if len(clients) == 1 else 0, {})


def clients_of_run(fitted: Fitted, clients: Clients) -> Clients:
    """The clients behind what was learned, with the features in its order.

    Args:
        fitted: as for `result_of`.
        clients: the caller's argument of that name.

    Raises:
        ValueError: if they are something else than clients, or others than those of the run, or in
            another order.
    """
    check_instance("clients", clients, Clients, "the jaxfed.Clients of the run")
    clients, ids = like(clients, fitted), ids_of(fitted)
    if ids is not None and is_known(clients.ids) and not np.array_equal(ids, clients.ids):
        wanted = f"those of the run, in its order, with ids {ids.tolist()[:20]}"
        raise refuse("clients", wanted, np.asarray(clients.ids).tolist()[:20])
    return clients


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
