"""What a site's limits allow of its messages, before they are computed."""

import json
from pathlib import Path

from jaxfed.core.common.files import replacing
from jaxfed.core.wire import calls
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy.messages import NodeError, failing_as
from jaxfed.privacy.ledger import Ledger


def spend(ledger: Ledger, way: Channel) -> None:
    """Count a message through a channel.

    Raises:
        NodeError: if the ledger does not allow it.
    """
    if (noise := way.noise()) is None:
        raise NodeError("limit", f"channel: wanted noise for a limited epsilon, got {way}")
    # Of noise that clients share, a single message has a part; under masks it is never seen.
    share = 1.0 if isinstance(way, MaskedChannel) else calls.sharers(way) ** 0.5
    with failing_as("limit"):
        ledger.spend_message(noise / share / 2, repr(way))


def claim(home: Path, release: str, run: str) -> None:
    """Use a release, whose noise clients share, in a run and in no other.

    The difference of two sums, over sets of clients that differ by one, is that client's moment.

    Args:
        home: the client's folder.
        release: a digest of the released data.
        run: name of the run.

    Raises:
        NodeError: if another run has used it.
    """
    path = home / "summed.json"
    known = json.loads(path.read_text("utf8")) if path.exists() else {}
    if known.setdefault(release, run) != run:
        words = (
            f"its release was summed in run {known[release]}, and other sums could tell what it "
            "is; remove release.npz in the client's folder for a new one, which counts once more"
        )
        raise NodeError("limit", words)
    with replacing(path, private=True) as part:
        part.write_text(json.dumps(known), "utf8")
