"""Messages between machines: JSON and binary parts, and how Flower carries them."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from jaxfed._optional import require
from jaxfed._refusals import refuse, shown

VERSION = 1  # of all messages; machines with different versions do not understand each other
ARRAY, WORDS, HEAD = "payload", "jaxfed", "head"


class Packet(NamedTuple):
    """One message: words that JSON can write, and binary parts.

    Readers must not trust its content: it may come from another version, or from an attacker.
    """

    words: Mapping[str, Any]
    parts: Sequence[bytes] = ()

    @property
    def head(self) -> str:
        """The words as text, with the lengths of the parts."""
        lengths = [len(part) for part in self.parts]
        return json.dumps({"version": VERSION, "lengths": lengths, **self.words})

    @property
    def body(self) -> bytes:
        """The parts, concatenated."""
        return b"".join(self.parts)

    @classmethod
    def read(cls, head: str, body: bytes) -> "Packet":
        """Inverse of `head` and `body`.

        Raises:
            ValueError: if the text and the bytes are anything else.
        """
        try:
            words = json.loads(head)
            version, lengths = words.pop("version"), words.pop("lengths")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise refuse("message", "one of jaxfed.deploy", head) from error
        # Compare types exactly, since JSON's `true` is an `int` in Python.
        if type(version) is not int or version != VERSION:
            raise ValueError(
                f"message: wanted version {VERSION}, got {shown(version)}; install the same jaxfed "
                "on all machines"
            )
        if type(lengths) is not list or not all(type(n) is int and n >= 0 for n in lengths):
            raise refuse("message", "a list of lengths", lengths)
        if sum(lengths) != len(body):
            raise refuse("message", f"lengths of {len(body)} bytes together", lengths)
        parts = [body[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
        return cls(words, parts)


def message_of(packet: Packet, node: int, group: str) -> Any:
    """Flower's message to a node.

    Args:
        packet: its content.
        node: Flower's number of the node.
        group: what the message belongs to, such as the round.
    """
    app = require("flwr.app", extra="flower")
    return app.Message(_content(packet), message_type="train", dst_node_id=node, group_id=group)


def reply_of(packet: Packet, message: Any) -> Any:
    """Flower's reply to a message."""
    return require("flwr.app", extra="flower").Message(_content(packet), reply_to=message)


def packet_of(message: Any) -> Packet:
    """The packet in one of Flower's messages.

    Raises:
        ValueError: if there is none.
    """
    try:
        head = message.content[WORDS][HEAD]
        body = message.content[ARRAY][ARRAY].data
    except (AttributeError, KeyError, TypeError) as error:
        raise refuse("message", "one of jaxfed.deploy", message.content) from error
    return Packet.read(head, body)


def _content(packet: Packet) -> Any:
    app = require("flwr.app", extra="flower")
    body = packet.body
    array = app.Array(dtype="uint8", shape=(len(body),), stype="jaxfed", data=body)
    words = app.ConfigRecord({HEAD: packet.head})
    return app.RecordDict({ARRAY: app.ArrayRecord({ARRAY: array}), WORDS: words})
