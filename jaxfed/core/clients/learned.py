"""Helpers for what was learned from samples, with one row per client or one for all clients."""

from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxfed._checks import is_whole, refuse
from jaxfed._numbers import host_floats
from jaxfed._refusals import closest
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.names import (
    NAMELESS,
    DataFrame,
    Names,
    in_columns,
    in_order,
    listing,
    order_of,
    replace_names,
)
from jaxfed.core.clients.samples import check_rows


@runtime_checkable
class Learned(Protocol):
    """A mean, and other arrays with the same leading axes, for each client or for all."""

    @property
    def mean(self) -> Float[Array, "*clients features"]:
        """Of each client, or of all."""
        ...

    @property
    def names(self) -> Names:
        """Of the clients and features behind it, as far as they are known."""
        ...


T = TypeVar("T", bound=Learned)


class Matched(NamedTuple):
    """What was learned, and clients in the same order."""

    learned: Any  # without names, so that it is compiled once
    clients: Any


def matched(learned: Learned, clients: Any) -> Matched:
    """Put what was learned in the order of clients, and their features in its order.

    Clients and features are known by their names where both sides have some, and otherwise by
    position.

    Args:
        learned: from clients, or from all together.
        clients: clients with samples.

    Raises:
        ValueError: if the clients hold no samples, or differ in number, features or names.
    """
    check_rows(clients)
    names, mean = learned.names, learned.mean
    clients = in_order(clients, names)
    wanted = (len(clients.ids), clients.features)
    own = clients.names.clients
    bare = replace_names(learned, NAMELESS)
    if mean.ndim > 1 and None not in (names.clients, own) and own != names.clients:
        assert names.clients is not None
        places = order_of(names.clients, own, "clients")
        if (len(places), clients.features) != mean.shape or len(own) != len(clients.ids):
            wanted = f"{listing(names.clients)} in this order, where processes share them"
            raise refuse("clients", wanted, listing(own))
        bare = jax.tree.map(lambda x: x[np.argsort(places)], bare)
    elif mean.shape not in (wanted, wanted[1:]):
        raise refuse("samples", f"clients and features as of means {mean.shape}", wanted)
    return Matched(bare, clients)


def in_learned_columns(learned: Learned, rows: Any) -> Any:
    """Rows with names as an array, with the features in the order in which they were learned.

    Args:
        learned: whose names count.
        rows: a data frame or an array of xarray; anything else stays as it is.

    Raises:
        ValueError: if there are other features, or something else than numbers.
    """
    if not isinstance(rows, DataFrame | LabelledArray):
        return rows
    table = in_columns(rows, learned.names.features, "samples, columns")
    return host_floats(table, "samples", "numbers", missing=True)


def of_client(learned: T, client: int | str | None) -> T:
    """What was learned from ONE client, or from all, without names.

    Args:
        learned: from clients, or from all together.
        client: name or position of the client; ignored if all clients share one mean.

    Raises:
        ValueError: if clients have their own means and `client` is missing or unknown.
    """
    bare, mean, names = replace_names(learned, NAMELESS), learned.mean, learned.names.clients
    if mean.ndim == 1:
        return bare
    if isinstance(client, str) and names is not None and len(names) == len(mean):
        if client not in names:
            raise refuse("client", f"one of {listing(names, 20)}{closest(client, names)}", client)
        client = names.index(client)
    if not is_whole(client) or not 0 <= client < len(mean):
        raise refuse("client", f"whose rows they are, from 0 to {len(mean) - 1}", client)
    return jax.tree.map(lambda x: x[client], bare)
