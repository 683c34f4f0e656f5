"""`Wire` assigns a channel to each kind of message."""

import equinox as eqx

from jaxfed._checks import check_instance, refuse
from jaxfed.core.wire import calls
from jaxfed.core.wire.channel import Channel


class Wire(eqx.Module):
    """The channel of each kind of message.

    Attributes:
        up: from the clients to the server in the rounds.
        down: from the server to the clients in the rounds.
        first_up: for the clients' first messages, before the rounds.
        first_down: for the first broadcast, before the rounds.
    """

    up: Channel
    down: Channel
    first_up: Channel
    first_down: Channel

    def __init__(
        self,
        up: Channel,
        down: Channel,
        first: Channel | None = None,
        first_down: Channel | None = None,
    ):
        """Assign the channels.

        Args:
            up: for uplinks.
            down: for downlinks.
            first: for both directions before the rounds; a private channel applies only to the
                first messages, since broadcasts are not hidden. The default depends on `up` and
                `down`: compressors become eight bits per entry, other channels stay as they are.
            first_down: for the first broadcast alone, if it differs from `first`.

        Raises:
            ValueError: if one of them is not a channel, or its `for_start` returns none.
        """
        given = {"up": up, "down": down, "first": first, "first_down": first_down}
        for name, each in given.items():
            if each is not None or name in ("up", "down"):
                check_instance(name, each, Channel, "one of jaxfed.channel")
        self.up, self.down = up, down
        self.first_up = calls.for_start(up) if first is None else first
        if first_down is None:
            first_down = calls.for_start(down) if first is None or first.private else first
        self.first_down = first_down

    def __repr__(self) -> str:
        up, down, first, first_down = map(repr, self.channels)
        return f"Wire({up}, {down}, first={first}, first_down={first_down})"

    @property
    def channels(self) -> tuple[Channel, Channel, Channel, Channel]:
        """All four channels, in the order of the attributes."""
        return self.up, self.down, self.first_up, self.first_down


def checked_wire(channel: Channel | Wire) -> Wire:
    """The wire for a `channel` argument: one channel serves both directions.

    Raises:
        ValueError: if it is neither a channel nor a wire, or hides messages of the server.
    """
    wire = Wire(channel, channel) if isinstance(channel, Channel) else channel
    if not isinstance(wire, Wire):
        raise refuse("channel", "a channel, or jf.Wire(up, down) of two", channel)
    if wire.down.private:
        raise ValueError(
            "channel: one that hides what clients send is for the uplink alone; wanted another for "
            "the downlink, such as jf.Wire(channel, lossless())"
        )
    return wire
