"""What travels between machines: a few words about a message, and its bytes."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxfed.core.common.checks import refuse, shown

VERSION = 1  # of all that is said here


class Packet(NamedTuple):
    """One message: words that JSON knows, and parts of bytes, one after the other on the wire."""

    words: Mapping[str, Any]
    parts: Sequence[bytes] = ()

    @property
    def head(self) -> str:
        """The words as text, with the lengths of the parts."""
        lengths = [len(part) for part in self.parts]
        return json.dumps({"version": VERSION, "lengths": lengths, **self.words})

    @property
    def body(self) -> bytes:
        """The parts, one after the other."""
        return b"".join(self.parts)

    @classmethod
    def read(cls, head: str, body: bytes) -> "Packet":
        """Inverse of `head` and `body`.

        Raises:
            ValueError: for what is none, is cut off, or comes from another version; nothing else,
                whatever the text and the bytes are.
        """
        try:
            words = json.loads(head)
            version, lengths = words.pop("version"), words.pop("lengths")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise refuse("message", "one of jaxfed.deploy", head) from error
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


def check_name(argument: str, given: object) -> None:
    """Check a name from another machine that becomes the name of a file.

    Raises:
        ValueError: if it is not 1 to 64 hexadecimal digits.
    """
    if not isinstance(given, str) or not re.fullmatch("[0-9a-f]{1,64}", given):
        raise refuse(argument, "1 to 64 hexadecimal digits", given)


def key_to_words(key: Key[Array, ""]) -> dict[str, Any]:
    """A random key."""
    data = np.asarray(jax.random.key_data(key))
    return {"data": data.tolist(), "impl": str(jax.random.key_impl(key))}


def key_from_words(words: Mapping[str, Any]) -> Key[Array, ""]:
    """Inverse of `key_to_words`."""
    return jax.random.wrap_key_data(jnp.asarray(words["data"], jnp.uint32), impl=words["impl"])
