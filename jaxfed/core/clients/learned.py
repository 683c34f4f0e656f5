"""Helpers for what was learned from samples, with one row per client or one for all clients."""

from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxfed._checks import is_whole, refuse
from jaxfed.core.clients.samples import check_rows

T = TypeVar("T")


def check_learned_from(mean: Float[Array | np.ndarray, "*clients features"], clients: Any) -> None:
    """Refuse clients other than those that something was learned from.

    Args:
        mean: of each client, or of all.
        clients: clients with samples.

    Raises:
        ValueError: if the clients hold no samples, or differ in number or features.
    """
    check_rows(clients)
    wanted = (len(clients.ids), clients.features)
    if mean.shape not in (wanted, wanted[1:]):
        raise refuse("samples", f"clients and features as of means {mean.shape}", wanted)


def of_client(
    learned: T, mean: Float[Array | np.ndarray, "*clients features"], client: int | None
) -> T:
    """What was learned from ONE client, or from all.

    Args:
        learned: arrays with the leading axes of the mean.
        mean: of each client, or of all.
        client: position of the client; ignored if all clients share one mean.

    Raises:
        ValueError: if clients have their own means and `client` is missing or out of range.
    """
    if mean.ndim == 1:
        return learned
    if not is_whole(client) or not 0 <= client < len(mean):
        raise refuse("client", f"whose rows they are, from 0 to {len(mean) - 1}", client)
    return jax.tree.map(lambda x: x[client], learned)
