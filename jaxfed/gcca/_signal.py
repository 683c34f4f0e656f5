"""The signal of a view: its leading singular directions, up to its signal rank."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxfed.contract import ClientsLike, check_count
from jaxfed.core.common.printing import is_known
from jaxfed.gcca.views import View
from jaxfed.linalg.svd import leading_triples, not_rounding, rounding

Ranks = int | tuple[int, ...]  # one for all views, or one per view


class Signal(NamedTuple):
    """ONE view's singular value decomposition cut to its signal; zeros beyond the view's rank."""

    left: Float[Array, "entities width"]
    singular: Float[Array, " width"]
    right: Float[Array, "features width"]
    threshold: Float[Array, ""]  # between the singular values of signal and noise
    rounding: Float[Array, ""]  # singular values up to here are rounding errors


def signal_of(view: View, ranks: Ranks, client_id: Int[Array, ""]) -> Signal:
    """Return ONE view's singular triples up to its rank, and its threshold."""
    rank, width = rank_of(ranks, client_id), widest(ranks)
    left, singular, right = leading_triples(view.values, width)
    kept = (not_rounding(singular, view.shape) & (jnp.arange(len(singular)) < rank))[:width]
    least = rounding(singular, view.shape)
    ends = jnp.pad(singular, (0, 1))  # without noise, zero follows the last singular value
    threshold = jnp.maximum((ends[rank - 1] + ends[rank]) / 2, least)
    return Signal(left * kept, singular[:width] * kept, right.T * kept, threshold, least)


def concatenated(
    bases: Float[Array, "views entities width"],
) -> Float[Array, "entities columns"]:
    """Concatenate all views' bases to one matrix."""
    return jnp.moveaxis(bases, 0, 1).reshape(bases.shape[1], -1)


def widest(ranks: Ranks) -> int:
    """Return the largest rank."""
    return max(ranks) if isinstance(ranks, tuple) else ranks


def rank_of(ranks: Ranks, client_id: Int[Array, ""]) -> Int[Array, ""]:
    """Return ONE view's rank."""
    return jnp.asarray(ranks)[client_id] if isinstance(ranks, tuple) else jnp.asarray(ranks)


def checked_ranks(name: str, ranks: Ranks, *, least: int) -> Ranks:
    """Check ranks and return them in the form of a static field."""
    if not isinstance(ranks, tuple | list):
        check_count(name, ranks)
        return ranks
    for rank in ranks:
        check_count(name, rank, least=least)
    if not ranks or max(ranks) == 0:
        raise ValueError(f"{name}: wanted a positive one for some view, got {ranks}")
    return tuple(ranks)


def check_fit(name: str, ranks: Ranks, clients: ClientsLike) -> None:
    """Raise a `ValueError` if ranks do not match the views, or exceed entities or features."""
    most = min(clients.data.shape)
    if widest(ranks) > most:
        raise ValueError(f"{name}: wanted at most {most}, got {widest(ranks)}")
    if not isinstance(ranks, tuple):
        return
    ids = np.asarray(clients.ids) if is_known(clients.ids) else np.arange(len(clients.ids))
    if len(ranks) != len(ids) or ids.max() >= len(ranks):
        raise ValueError(
            f"{name}: wanted one for all views or one for each, of the ids 0 to {len(ids) - 1}, "
            f"got {len(ranks)} for the ids {ids.tolist()}"
        )
