"""Binds masks to what the server sent: they cancel only if all clients received the same."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.core.wire.wire import Wire


def is_masked(wire: Wire) -> bool:
    """Whether some messages of clients are hidden under masks."""
    return any(isinstance(way, MaskedChannel) for way in (wire.up, wire.first_up))


def digests_after(
    before: Sequence[str], forms: Sequence[str], parts: Sequence[bytes], missed: Sequence[str]
) -> list[str]:
    """Return digests of all broadcasts of a run, after further ones, as they were sent.

    They are of the bytes: decoded numbers may differ between processors in their last bits.

    Args:
        before: digests of the broadcasts that a client has received.
        forms: for each new broadcast, `"first"` if it precedes the rounds, else `"next"`.
        parts: the bytes of each new broadcast.
        missed: digests of the broadcasts between, which the client does not need.

    Raises:
        ValueError: for other forms, of which a client cannot tell whether others got the same.
    """
    if set(forms) - {"first", "next"}:
        raise ValueError(f"broadcasts: wanted under masks those that all get, got {forms}")
    now = [hashlib.sha256(part).hexdigest() for part in parts]
    count = list(forms).count("first")
    return [*before, *now[:count], *missed, *now[count:]]


def transcript_of(
    run: Mapping[str, Any], roster: Mapping[str, Any], broadcasts: Sequence[str]
) -> str:
    """Return a digest of what must be the same for all clients whose messages are summed.

    Masks depend on it, so those of clients that were told different things do not cancel.

    Args:
        run: the words of the run.
        roster: `"ids"`, the clients by position, and `"total"`, the sum of their weights before
            normalization.
        broadcasts: digests of all of them so far.
    """
    text = json.dumps([run, roster, broadcasts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_roster(
    roster: Mapping[str, Any],
    client: int,
    position: int,
    weight: float,
    own: Callable[[int, int], float],
) -> None:
    """Check the position and the weight that the server gives a client.

    Args:
        roster: as in `transcript_of`.
        client: its id.
        position: the client's place in the list, from the server.
        weight: its share of all weights, from the server.
        own: the client's weight before normalization, given its position and how many there are.

    Raises:
        ValueError: if the client's own rule gives another position or weight.
    """
    ids, total = list(roster["ids"]), roster["total"]
    if len(set(ids)) != len(ids) or not 0 <= position < len(ids) or ids[position] != client:
        raise ValueError(f"roster: wanted client {client} in place {position}, got {ids}")
    # The server rounds the share to the precision of weights.
    wanted = own(position, len(ids)) / total
    if not abs(weight - wanted) <= 1e-2 * wanted:
        raise ValueError(f"weight: wanted {wanted:.6g}, by this client's rule, got {weight:.6g}")
