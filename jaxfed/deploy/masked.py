"""Rounds in which the server learns a sum and nothing else: both ends of the four exchanges.

1. Clients make keys, and tell the public ones.
2. Each gives all others shares of its secrets, which the server passes on unread.
3. Each sends its message under masks.
4. Those whose messages arrived tell the shares that take off what masks are left in the sum.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt32

from jaxfed.core.common.files import replacing
from jaxfed.core.contract.reduction import is_part
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy import masks
from jaxfed.deploy.exchange import RefusedError, reading
from jaxfed.deploy.wire import Packet, check_name

Numbers = UInt32[np.ndarray, " n"]
SHARES = ("seed", "masking")  # of what a client gives shares, in this order


class NodeMasks:
    """One client's part, in one attempt at one round; its secrets are in a file of its own."""

    def __init__(self, folder: Path, client: int, run: str, attempt: str):
        """Take up what the file knows.

        Raises:
            ValueError: for an attempt whose name is none.
        """
        check_name("attempt", attempt)
        self.client, self.purpose = client, f"{run} {attempt}"
        self.path = folder / f"{attempt}.json"
        self.known = json.loads(self.path.read_text("utf8")) if self.path.exists() else {}

    def keys(self) -> Packet:
        """Make keys, and forget those of earlier rounds; the public ones."""
        if "keys" not in self.known:
            for old in self.path.parent.glob("*.json"):
                old.unlink()
            self._keep(keys=[part.hex() for part in masks.Keys.drawn()])
        return Packet({"kind": "keys", "id": self.client}, self._keys().public)

    def shares(self, asked: Packet) -> Packet:
        """Shares of the secrets, sealed for each other client.

        Raises:
            ValueError: for a threshold of no more than half of the clients, or keys that are not
                everybody's.
        """
        members, threshold = list(asked.words["members"]), asked.words["threshold"]
        least = masks.least_threshold(len(members))
        if not least <= threshold <= len(members):
            raise ValueError(
                f"masks: wanted a threshold from {least} to {len(members)}, got {threshold}"
            )
        publics = list(zip(asked.parts[::2], asked.parts[1::2], strict=True))
        own, by_client = self._keys(), dict(zip(members, publics, strict=True))
        different = len({key for pair in publics for key in pair}) == 2 * len(members)
        if by_client.get(self.client) != own.public or not different:
            raise ValueError("masks: wanted a public key of each client, its own among them")
        parts = {name: masks.split(getattr(own, name), threshold, members) for name in SHARES}
        texts = {c: b"".join(parts[name][c] for name in SHARES) for c in members}
        self._keep(
            threshold=threshold,
            publics={str(c): [key.hex() for key in pair] for c, pair in by_client.items()},
            own=texts[self.client].hex(),
        )
        sealed = [
            b"" if c == self.client else masks.sealed(self._sealing(c), texts[c]) for c in members
        ]
        return Packet({"kind": "shares", "id": self.client}, sealed)

    def masked(
        self,
        channel: MaskedChannel,
        payload: PyTree,
        givers: Sequence[int],
        sealed: Sequence[bytes],
    ) -> PyTree:
        """The payload under masks, with those who have given shares.

        Raises:
            ValueError: if they are too few.
        """
        if len(givers) < self.known["threshold"] or self.client not in givers:
            raise ValueError(
                f"masks: wanted shares of at least {self.known['threshold']} clients, "
                f"got {len(givers)}"
            )
        self._keep(received={str(c): text.hex() for c, text in zip(givers, sealed, strict=True)})
        numbers = channel.numbers(payload)
        publics = {c: bytes.fromhex(self.known["publics"][str(c)][1]) for c in givers}
        keys, count = self._keys(), len(numbers)
        numbers = numbers + masks.own_mask(keys.seed, self.purpose, count)
        numbers = numbers + masks.pair_masks(
            self.client, keys.masking, publics, self.purpose, count
        )
        return channel.with_numbers(payload, numbers)

    def unmask(self, asked: Packet) -> Packet:
        """Of each client one of its shares: of its own seed, or, of who dropped out, of its key.

        Raises:
            ValueError: for too few whose messages arrived, or a second question with others.
        """
        heard = sorted(asked.words["heard"])
        received = {int(c): bytes.fromhex(text) for c, text in self.known["received"].items()}
        if len(heard) < self.known["threshold"] or set(heard) - received.keys():
            raise ValueError(
                f"masks: wanted messages of at least {self.known['threshold']} clients that have "
                f"given shares, got {heard}"
            )
        if self.known.setdefault("heard", heard) != heard:
            raise ValueError("masks: of one client both shares would tell all; one was told")
        self._keep(heard=heard)
        told = []
        for client, text in received.items():
            if client == self.client:
                both = bytes.fromhex(self.known["own"])
            else:
                both = masks.opened(self._sealing(client), text)
            half = len(both) // 2
            told.append(both[:half] if client in heard else both[half:])
        return Packet({"kind": "unmask", "id": self.client}, told)

    def _keys(self) -> masks.Keys:
        if "keys" not in self.known:
            raise ValueError(f"masks: the keys of this round are not in {self.path}")
        return masks.Keys(*map(bytes.fromhex, self.known["keys"]))

    def _sealing(self, other: int) -> bytes:
        low, high = sorted((self.client, other))
        public = bytes.fromhex(self.known["publics"][str(other)][0])
        return masks.agreed(self._keys().sealing, public, f"seal {low} {high} {self.purpose}")

    def _keep(self, **more: Any) -> None:
        self.known |= more
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with replacing(self.path, private=True) as part:
            part.write_text(json.dumps(self.known), "utf8")


def secret_key(folder: Path, history: str) -> jax.Array:
    """A random key that only this machine has, another one for each history of questions."""
    path = folder / "secret"
    if not path.exists():
        with replacing(path, private=True) as part:
            part.write_bytes(os.urandom(masks.KEY))
    seed = hashlib.blake2b(history.encode(), key=path.read_bytes(), digest_size=8).digest()
    return jax.random.wrap_key_data(jnp.frombuffer(seed, jnp.uint32), impl="threefry2x32")


# ---------------------------------------------------------------------------------------------
# The server's end.

Ask = Callable[[Mapping[int, Packet], str, int], dict[int, Packet]]


def masked_sum(
    ask: Ask,
    question: Callable[..., Packet],
    questions: Mapping[int, Packet],
    number_of: Callable[[bytes], Numbers],
    *,
    run: str,
    group: str,
    threshold: int,
    everybody: bool,
) -> tuple[list[int], Numbers]:
    """The sum of the messages of those who answer.

    Args:
        ask: puts questions by client, for a group, and waits for at least so many answers.
        question: makes one to a client, of some kind, with parts.
        questions: for the messages themselves, by client.
        number_of: the numbers in a message.
        run: its name.
        group: what the messages belong to, such as the round.
        threshold: how many shares give a secret back.
        everybody: whether nobody may drop out.

    Returns:
        Whose messages are in the sum, and the sum modulo 2^32.

    Raises:
        TimeoutError: if fewer than the threshold answer.
        RefusedError: if what somebody sends cannot be read, or the shares do not fit.
    """

    def heard_of(questions: Mapping[int, Packet], name: str, least: int, parts: int):
        answers = ask(questions, name, least)
        for client, answer in answers.items():
            if len(answer.parts) != parts:
                raise RefusedError(
                    f"client {client}: wanted {parts} parts in {name}, got {len(answer.parts)}"
                )
        return answers

    attempt = secrets.token_hex(8)  # keys are never used for two messages
    least = len(questions) if everybody else threshold
    keys = heard_of(
        {c: question(c, "keys", attempt=attempt) for c in questions}, f"keys of {group}", least, 2
    )
    for client, answer in keys.items():
        if any(len(key) != masks.KEY for key in answer.parts):
            raise RefusedError(f"client {client}: wanted keys of {masks.KEY} bytes")
    members = list(keys)
    publics = [part for c in members for part in keys[c].parts]
    words = {"attempt": attempt, "members": members, "threshold": threshold}
    shares = heard_of(
        {c: question(c, "shares", publics, **words) for c in members},
        f"shares of {group}", least, len(members),
    )  # fmt: skip
    givers = list(shares)

    def whole(client: int) -> Packet:
        place = members.index(client)
        sealed = [shares[giver].parts[place] for giver in givers]
        asked = questions[client]
        more = {"attempt": attempt, "givers": givers}
        return Packet({**asked.words, **more}, [*asked.parts, *sealed])

    answers = heard_of({c: whole(c) for c in givers}, group, least, 1)
    heard, numbers = list(answers), []
    for client, answer in answers.items():
        with reading(f"client {client}"):
            numbers.append(number_of(answer.parts[0]))
    told = heard_of(
        {c: question(c, "unmask", attempt=attempt, heard=heard) for c in heard},
        f"unmasking of {group}", threshold, len(givers),
    )  # fmt: skip
    total = np.stack(numbers).sum(0, dtype=np.uint32)
    purpose, count = f"{run} {attempt}", len(total)
    with reading(f"{group}: shares"):
        for place, client in enumerate(givers):
            secret = masks.joined(each.parts[place] for each in list(told.values())[:threshold])
            if client in heard:
                total = total - masks.own_mask(secret, purpose, count)
            else:
                others = {c: keys[c].parts[1] for c in heard}
                # What those who were heard have added for this one, it would have taken off.
                total = total + masks.pair_masks(client, secret, others, purpose, count)
    return heard, total


class _OverSurvivors(Channel):
    inner: Channel
    factor: Float[Array, ""]  # one over the weights of those
    means: tuple[bool, ...] = eqx.field(static=True)  # for each array, whether it is a mean

    private = True

    def memory(self, message):
        return self.inner.memory(message)

    def encode(self, key, message, memory):
        return self.inner.encode(key, message, memory)

    def decode(self, payload):
        return self.inner.decode(payload)

    def differentiable(self, decoded, message, memory):
        return self.inner.differentiable(decoded, message, memory)

    def receive(self, decoded, last):
        leaves, structure = jax.tree.flatten(self.inner.receive(decoded, last))
        scaled = [
            leaf * self.factor.astype(leaf.dtype) if mean else leaf
            for leaf, mean in zip(leaves, self.means, strict=True)
        ]
        return jax.tree.unflatten(structure, scaled)


def over_survivors(channel: Channel, factor: Float[Array, ""], means: tuple[bool, ...]) -> Channel:
    """A masked channel where some have dropped out: means are over those who are left.

    Args:
        channel: the masked one.
        factor: one over the weights of those who are left.
        means: for each array of a message, whether it is a mean.
    """
    return _OverSurvivors(channel, factor, means)


def means_of(message: PyTree) -> tuple[bool, ...]:
    """For each array of a message whether it becomes a mean."""
    parts = jax.tree.leaves(message, is_leaf=is_part)
    return tuple(part.is_mean for part in parts for _ in jax.tree.leaves(part))
