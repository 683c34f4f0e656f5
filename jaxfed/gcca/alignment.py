"""Match entities between clients by their ids: one common order, and positions in it."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import ArrayLike, Int, Shaped
from scipy.sparse.csgraph import connected_components

from jaxfed._checks import check_list, is_list, refuse
from jaxfed._names import caller

Ids = Sequence[int] | Sequence[str] | ArrayLike

FEW = 0.1  # of the ids that two sides could share
KINDS = {"i": "whole numbers", "u": "unsigned whole numbers", "U": "strings"}


class Alignment(NamedTuple):
    """A common order of entities, and the positions of each client's rows in it.

    Attributes:
        ids: ids of the entities, in the order of the representation's rows.
        places: positions of each client's rows.
        complete: whether every client is known to have seen every entity.
    """

    ids: Shaped[np.ndarray, " entities"]
    places: tuple[Int[np.ndarray, " rows"], ...]
    complete: bool

    def positions(self, ids: Ids) -> Int[np.ndarray, " ids"]:
        """Return the positions of entities: `result.shared[alignment.positions(ids)]`.

        Args:
            ids: ids of any of the entities, in any order.

        Raises:
            ValueError: if an id is unknown.
        """
        return _positions(self.ids, checked_ids(ids, "ids", self.ids), "ids")


def align(
    ids: Sequence[Ids],
    *,
    order: Ids | None = None,
) -> Alignment:
    """Order the entities that any client has seen, given the ids of each client's rows.

    Pass the result to `jf.gcca.Views.from_arrays` or `from_sparse`.

    Args:
        ids: one list of whole numbers or strings per client, with an id for each row of its table,
            in any order and for any subset of the entities.
        order: all entities, in the order of the representation's rows; sorted ids by default. On
            separate machines, each client aligns its own list, `[ids]`, with a common order.

    Returns:
        The alignment, which does not depend on the order of clients and rows.

    It warns if a client shares less than a tenth of the entities that it could share with others,
    and if ids differ only in case or blanks, such as `p1` and `P1`, which are two entities.

    Raises:
        ValueError: if ids are not all whole numbers or all strings, a list repeats an id, an id is
            not in the order, a client shares no entity with others, or, without an order, clients
            fall into groups that share none.
    """
    check_list("ids", ids, "lists of ids, one per client")
    lists: list[np.ndarray] = []
    for j, own in enumerate(ids):
        lists.append(checked_ids(own, f"ids[{j}]", *lists[:1]))
        _check_once(lists[j], f"ids[{j}]")
    if order is None:
        everybody = np.unique(np.concatenate(lists))
    else:
        everybody = checked_ids(order, "order", lists[0])
        _check_once(everybody, "order")
    places = tuple(_positions(everybody, own, f"ids[{j}]") for j, own in enumerate(lists))
    _check_overlap(lists, places, everybody, order is None)
    # With a given order, there may be other clients.
    complete = order is None and all(len(own) == len(everybody) for own in places)
    return Alignment(everybody, places, complete)


def _check_overlap(
    lists: list[np.ndarray], places: tuple[np.ndarray, ...], everybody: np.ndarray, known: bool
) -> None:
    """Refuse clients whose entities nobody else has seen: their views then agree with any others.

    Args:
        lists: each client's ids.
        places: their positions among those of everybody.
        everybody: all ids.
        known: whether there may be no other clients.
    """
    if len(lists) < 2:
        return
    _warn_of_spellings(lists)
    seen = np.bincount(np.concatenate(places), minlength=len(everybody))
    for j, own in enumerate(places):
        found = int((seen[own] > 1).sum())
        others = int((seen > 0).sum() - (seen[own] == 1).sum())
        if found == 0:
            raise _apart(lists, j, 0 if j else 1)
        if found < FEW * min(len(own), others):
            _warn(
                f"ids[{j}]: wanted at least a tenth of the entities in common with others, got "
                f"{found} of {len(own)} ids here and {others} of others: are ids such as "
                f"{lists[j][0].item()!r} written in one way by all?"
            )
    if known:
        seats = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
        ones = np.ones(len(seats), np.int8)
        shape = (len(lists), len(everybody))
        table = scipy.sparse.csr_array((ones, (seats, np.concatenate(places))), shape)
        groups = connected_components(table @ table.T, directed=False)[1]
        if (groups != groups[0]).any():
            raise _apart(lists, int(np.argmax(groups != groups[0])), 0, "a group with ")


def _apart(lists: list[np.ndarray], one: int, other: int, kind: str = "") -> ValueError:
    """The error about clients that share nothing; the caller raises it."""
    return ValueError(
        f"ids[{one}]: wanted some entity that another client has seen, got {kind}"
        f"{lists[one][0].item()!r} and others, where another client has {lists[other][0].item()!r}"
    )


def _warn_of_spellings(lists: list[np.ndarray]) -> None:
    """Warn of ids of two clients that differ only in case or blanks, of which each has one."""
    if lists[0].dtype.kind != "U":
        return
    first: dict[str, tuple[int, str]] = {}
    known = [set(own.tolist()) for own in lists]
    for j, own in enumerate(lists):
        for name in own.tolist():
            i, other = first.setdefault(name.strip().casefold(), (j, name))
            if other not in known[j] and name not in known[i]:
                _warn(
                    f"ids[{j}]: wanted one way to write an entity, got {name!r}, where ids[{i}] "
                    f"has {other!r}: they count as two entities"
                )
                return


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=caller())


def checked_ids(ids: object, name: str, like: np.ndarray | None = None) -> np.ndarray:
    """Convert ids to an array, and check that they are of one kind, that of `like`."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError):  # ragged, or traced
        array = np.empty(0)
    # Data frames hold strings as objects; NumPy converts numbers among strings to strings.
    texts = ids if is_list(ids) else array.flat
    if array.dtype.kind in "OU" and all(isinstance(own, str) for own in texts):
        array = array.astype(str)
    elif array.dtype.kind == "U":
        array = np.empty(0)
    kinds = KINDS if like is None else {like.dtype.kind: KINDS[like.dtype.kind]}
    if array.dtype.kind not in kinds or array.ndim != 1 or not array.size:
        raise refuse(name, f"a list of ids, {' or '.join(kinds.values())}", ids)
    return array


def _check_once(ids: np.ndarray, name: str) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        twice = values[counts.argmax()].item()
        raise ValueError(f"{name}: wanted every id once, got {twice!r} {counts.max()} times")


def _positions(order: np.ndarray, ids: np.ndarray, name: str) -> np.ndarray:
    """Return the positions of ids in an order that need not be sorted."""
    sorter = np.argsort(order)
    # An unknown id has some place in the order, perhaps after its end; the comparison finds it.
    found = sorter[np.searchsorted(order, ids, sorter=sorter).clip(max=len(order) - 1)]
    unknown = order[found] != ids
    if unknown.any():
        first = ids[unknown.argmax()].item()
        raise ValueError(f"{name}: wanted ids of the {len(order)} entities, got {first!r}")
    return found
