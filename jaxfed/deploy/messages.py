"""Flower's messages: one text, and one array."""

from typing import Any

import numpy as np

from jaxfed._optional import require
from jaxfed.core.common.checks import refuse
from jaxfed.deploy.wire import Packet

ARRAY, WORDS, HEAD = "payload", "jaxfed", "head"


def _content(packet: Packet) -> Any:
    app = require("flwr.app", extra="flower")
    body = np.frombuffer(packet.body, np.uint8)
    array = app.Array(dtype="uint8", shape=body.shape, stype="jaxfed", data=packet.body)
    return app.RecordDict(
        {
            ARRAY: app.ArrayRecord({ARRAY: array}),
            WORDS: app.ConfigRecord({HEAD: packet.head}),
        }
    )


def message_of(packet: Packet, node: int, group: str) -> Any:
    """A message to a node.

    Args:
        packet: what it says.
        node: Flower's number of the node.
        group: what the message belongs to, such as the round.
    """
    app = require("flwr.app", extra="flower")
    return app.Message(
        content=_content(packet), message_type="train", dst_node_id=node, group_id=group
    )


def reply_of(packet: Packet, message: Any) -> Any:
    """The reply to a message."""
    app = require("flwr.app", extra="flower")
    return app.Message(content=_content(packet), reply_to=message)


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
