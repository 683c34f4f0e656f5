"""Match entities between clients by their ids: one common order, and positions in it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Int, Shaped

from jaxfed._checks import check_list, is_list, refuse

Ids = Sequence[int] | Sequence[str] | ArrayLike

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
        return _positions(self.ids, _checked(ids, "ids", self.ids), "ids")


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

    Raises:
        ValueError: if ids are not all whole numbers or all strings, a list repeats an id, an id is
            not in the order, or a client shares no entity with others.
    """
    check_list("ids", ids, "lists of ids, one per client")
    lists: list[np.ndarray] = []
    for j, own in enumerate(ids):
        lists.append(_checked(own, f"ids[{j}]", *lists[:1]))
        _check_once(lists[j], f"ids[{j}]")
    if order is None:
        everybody = np.unique(np.concatenate(lists))
    else:
        everybody = _checked(order, "order", lists[0])
        _check_once(everybody, "order")
    places = tuple(_positions(everybody, own, f"ids[{j}]") for j, own in enumerate(lists))
    _check_overlap(lists, places, len(everybody))
    # With a given order, there may be other clients.
    complete = order is None and all(len(own) == len(everybody) for own in places)
    return Alignment(everybody, places, complete)


def _check_overlap(lists: list[np.ndarray], places: tuple[np.ndarray, ...], number: int) -> None:
    """Refuse a client whose entities nobody else has seen: its view then agrees with any other."""
    if len(lists) < 2:
        return
    seen = np.bincount(np.concatenate(places), minlength=number)
    for j, own in enumerate(places):
        if seen[own].max() < 2:
            other = lists[0 if j else 1]
            raise ValueError(
                f"ids[{j}]: wanted some entity that another client has seen, got "
                f"{lists[j][0].item()!r} and others, where another client has "
                f"{other[0].item()!r}"
            )


def _checked(ids: object, name: str, like: np.ndarray | None = None) -> np.ndarray:
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
