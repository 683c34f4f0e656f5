"""Messages between machines: JSON and binary parts, refusals, and how Flower carries them."""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from jaxfed._optional import require
from jaxfed._refusals import refuse, shown

VERSION = 1  # of all messages; machines with different versions do not understand each other
ARRAY, WORDS, HEAD = "payload", "jaxfed", "head"
LOG = logging.getLogger("jaxfed.deploy")
# Why a node does not answer. The code alone travels: an error's own words may quote the data.
REFUSALS = {
    "configuration": "wanted partition-id=NUMBER in its node configuration, a whole number from 0",
    "algorithm": "make_algorithm or warm_start failed there",
    "data": "make_data failed there, or did not return one client",
    "check": "the algorithm cannot use its data or its warm start",
    "question": "the question makes no sense there",
    "changed": "its data, code, settings or versions are not those with which it began this run; "
    "give it those, or start a new run in another folder",
    "asked": "it has answered this round in another conversation, and a second answer would reveal "
    "more; start a new run in another folder",
    "lost": "the state from which it has to go on is lost; give it the folder that it had, or "
    "start a new run in another folder",
    "bound": "more than a tenth of the numbers in its message exceed the bound of the masks; give "
    "its data the other clients' units, or start a new run with a larger bound in another folder",
    "limit": "its message would exceed the epsilon that the site allows, has no noise, or is not "
    "hidden in the one sum that the noise of its release protects",
    "failed": "it failed to answer",
}


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

    @property
    def digest(self) -> str:
        """A digest of everything in it."""
        found = hashlib.sha256(self.head.encode())
        for part in self.parts:  # whose lengths are in the head
            found.update(part)
        return found.hexdigest()

    @property
    def core(self) -> "Packet":
        """What an answer depends on in a question: without the masks of this attempt."""
        words = {k: v for k, v in self.words.items() if k not in ("attempt", "givers")}
        return Packet(words, self.parts[: len(words.get("broadcasts", ()))])

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


class NodeError(ValueError):
    """Why a node does not answer: a code of `REFUSALS`, and words for its own log."""

    def __init__(self, code: str, words: object):
        """An error with these words."""
        super().__init__(str(words))
        self.code = code


@contextmanager
def logging_warnings() -> Iterator[None]:
    """Write Python's warnings into the log, which the people who run the machine read."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        LOG.warning("%s", message)

    with warnings.catch_warnings():
        warnings.showwarning = show  # at once: a server's run may take days
        yield


@contextmanager
def failing_as(code: str) -> Iterator[None]:
    """Give any exception this code, unless it has one.

    Raises:
        NodeError: for any exception.
    """
    try:
        yield
    except NodeError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise NodeError(code, f"{kind}{error}") from error


def refusal(error: Exception) -> Packet:
    """What a node answers in place of an error, whose words it writes to its own log."""
    # A warning, so that a worker's is in the log of its SuperNode too.
    LOG.warning("no answer: %s", error, exc_info=error)
    return Packet({"kind": "refusal", "code": getattr(error, "code", "failed")})


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
