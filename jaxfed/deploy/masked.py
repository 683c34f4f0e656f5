"""Both ends of the four exchanges in which the server learns a sum and nothing else.

1. Clients create keys and publish the public ones.
2. Each client gives all others encrypted shares of its secrets, which the server passes on.
3. Each client sends its message under masks.
4. The survivors, whose messages arrived, reveal the shares needed to remove the masks that are
   left in the sum.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt32

from jaxfed._checks import check_flag
from jaxfed.core.common.files import replacing
from jaxfed.core.contract.reduction import is_part
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy import masks
from jaxfed.deploy.exchange import RefusedError, reading_from
from jaxfed.deploy.messages import NodeError, Packet
from jaxfed.deploy.run import check_file_name

MaskedNumbers = UInt32[np.ndarray, " n"]


class NodeMasks:
    """One client's part in one attempt at a round; a file holds its secrets."""

    def __init__(self, folder: Path, client: int, run: str, attempt: str, least: int):
        """Continue from the file, if there is one.

        Args:
            folder: where the client keeps secrets of this run.
            client: its id.
            run: name of the run.
            attempt: name of the attempt.
            least: fewest clients over whose messages a sum may be.

        Raises:
            ValueError: if the attempt's name is invalid.
        """
        check_file_name("attempt", attempt)
        self.client, self.purpose, self.least = client, f"{run} {attempt}", least
        self.path = folder / f"{attempt}.json"
        self.known = json.loads(self.path.read_text("utf8")) if self.path.exists() else {}

    def answer(self, question: Packet) -> Packet:
        """The reply to a question that does not concern the message itself.

        Raises:
            NodeError: if this attempt had another question of this kind.
        """
        kind = question.words["kind"]
        if not self._was_asked(kind, question):
            kinds = {"keys": self._public, "shares": self._shares, "unmask": self._unmask}
            parts = [part.hex() for part in kinds[kind](question)]
            self._save(kind, question, parts=parts)
        parts = [bytes.fromhex(part) for part in self.known[kind]["parts"]]
        return Packet({"kind": kind, "id": self.client}, parts)

    def _was_asked(self, kind: str, question: Packet) -> bool:
        """Whether this attempt had this question, whose answer then stays the same.

        Raises:
            NodeError: if it had another of this kind, or its sum is known.
        """
        if kind not in self.known and "unmask" not in self.known:
            return False
        if kind not in self.known or self.known[kind]["question"] != question.digest:
            raise NodeError("asked", f"masks: in this attempt there was another question of {kind}")
        return True

    def _public(self, question: Packet) -> tuple[bytes, bytes]:
        """Create keys, delete those of earlier rounds, and return the public ones."""
        del question
        discard(self.path.parent)
        self.known["secrets"] = [part.hex() for part in masks.Keys.draw()]
        return self._keys().public

    def _shares(self, question: Packet) -> list[bytes]:
        """Shares of the secrets, encrypted for each other client.

        Raises:
            ValueError: if the threshold is not more than half of the clients, or the sum would be
                over too few, or a client's key is missing.
        """
        members, threshold = list(question.words["members"]), question.words["threshold"]
        least = max(masks.least_threshold(len(members)), self.least)
        if not least <= threshold <= len(members):
            raise ValueError(
                f"masks: wanted a threshold from {least} to {len(members)}, got {threshold}"
            )
        publics = list(zip(question.parts[::2], question.parts[1::2], strict=True))
        own, by_client = self._keys(), dict(zip(members, publics, strict=True))
        # A client with two places would hold two shares of every secret, so the threshold would
        # count it twice.
        different = len({key for pair in publics for key in pair}) == 2 * len(members)
        if by_client.get(self.client) != own.public or not different:
            raise ValueError("masks: wanted a public key of each client, its own among them")
        seeds = masks.split_secret(own.seed, threshold, members)
        keys = masks.split_secret(own.masking, threshold, members)
        self.known |= {
            "threshold": threshold,
            "publics": {str(c): [key.hex() for key in pair] for c, pair in by_client.items()},
            "own": (seeds[self.client] + keys[self.client]).hex(),
        }
        return [
            b""
            if c == self.client
            else masks.encrypt(self._sealing(c), self._label(self.client, c) + seeds[c] + keys[c])
            for c in members
        ]

    def masked(
        self, channel: MaskedChannel, payload: PyTree, question: Packet, transcript: str
    ) -> PyTree:
        """The payload under the masks shared with the clients that have given shares.

        Args:
            channel: of the messages.
            payload: before masks.
            question: names these clients, and ends in their shares for this one.
            transcript: see `transcript_of`.

        Raises:
            ValueError: if they are too few.
            NodeError: if this attempt had another question for a message.
        """
        givers = question.words["givers"]
        encrypted = question.parts[-len(givers) :]
        if len(set(givers)) < self.known["threshold"] or self.client not in givers:
            raise ValueError(
                f"masks: wanted shares of at least {self.known['threshold']} clients, "
                f"got {len(givers)}"
            )
        number = question.words.get("round", 0)
        # Masks are for one message, and their sum with others is for one set of clients.
        if not self._was_asked("message", question):
            shares = {str(c): text.hex() for c, text in zip(givers, encrypted, strict=True)}
            self.known |= {"shares": shares, "round": number}
            self._save("message", question)
        numbers, keys = channel.numbers(payload), self._keys()
        publics = {c: bytes.fromhex(self.known["publics"][str(c)][1]) for c in givers}
        # Masks of messages of different rounds, or after different broadcasts, do not cancel.
        purpose = f"{self.purpose} {number} {transcript}"
        own = masks.own_mask(keys.seed, purpose, len(numbers))
        pairs = masks.pair_masks(self.client, keys.masking, publics, purpose, len(numbers))
        return channel.with_numbers(payload, numbers + own + pairs)

    def _unmask(self, question: Packet) -> list[bytes]:
        """One share of each client: of its own seed if it survived, or of its key if it did not.

        Raises:
            ValueError: if there are too few survivors.
            NodeError: if this round was summed over other clients.
        """
        self._keys()
        survivors = sorted(question.words["survivors"])
        shares = {int(c): bytes.fromhex(text) for c, text in self.known["shares"].items()}
        if len(set(survivors)) < self.known["threshold"] or set(survivors) - shares.keys():
            raise ValueError(
                f"masks: wanted messages of at least {self.known['threshold']} clients that have "
                f"given shares, got {survivors}"
            )
        revealed = []
        for client, text in shares.items():
            if client == self.client:
                both = bytes.fromhex(self.known["own"])
            else:
                both = masks.decrypt(self._sealing(client), text)
                label = self._label(client, self.client)
                if not both.startswith(label):
                    raise ValueError(f"masks: wanted a share of client {client}, got another")
                both = both.removeprefix(label)
            half = len(both) // 2
            revealed.append(both[:half] if client in survivors else both[half:])
        # A round that is repeated has the same messages, and its sums over two sets of clients
        # would tell what is in one and not in the other.
        summed = self.path.with_name("summed")  # the last round that was summed, and over whom
        now = {"round": self.known["round"], "survivors": survivors}
        before = json.loads(summed.read_text("utf8")) if summed.exists() else now
        if before["round"] > now["round"] or (before["round"] == now["round"] and before != now):
            raise NodeError("asked", "masks: this round was summed before, or a later one was")
        with replacing(summed, private=True) as part:
            part.write_text(json.dumps(now), "utf8")
        # Both shares of one client would reveal its message, so there is one answer, which is on
        # disk before anything is revealed. Nothing else is kept: whoever gets at the secrets can
        # remove the masks.
        self.known = {}
        return revealed

    def _keys(self) -> masks.Keys:
        if "secrets" not in self.known:
            raise ValueError(f"masks: the keys of this round are not in {self.path}")
        return masks.Keys(*map(bytes.fromhex, self.known["secrets"]))

    def _sealing(self, other: int) -> bytes:
        low, high = sorted((self.client, other))
        public = bytes.fromhex(self.known["publics"][str(other)][0])
        return masks.agree(self._keys().sealing, public, f"seal {low} {high} {self.purpose}")

    def _label(self, sender: int, receiver: int) -> bytes:
        """Before a share: both directions have one key, and a server could send one back."""
        return f"share {sender} {receiver} {self.purpose} ".encode()

    def _save(self, kind: str, question: Packet, **answer: Any) -> None:
        """Save what is known, and that this question was asked."""
        self.known[kind] = {"question": question.digest, **answer}
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with replacing(self.path, private=True) as part:
            part.write_text(json.dumps(self.known), "utf8")


def discard(folder: Path) -> None:
    """Remove what is left of earlier attempts in a folder, such as those that came to no sum."""
    for old in folder.glob("*.json"):
        old.unlink()


# --- the server's end ----------------------------------------------------------------------------


class MaskedSum(NamedTuple):
    """The survivors, the sum of their messages modulo 2^32, and whose are not finite."""

    survivors: list[int]
    total: MaskedNumbers
    not_finite: dict[int, bool]  # by survivor; once masked, a message shows nothing of it


def group_of(number: int) -> str:
    """What the messages of a round belong to, in words."""
    return f"round {number}" if number else "first messages"


def masked_sum(
    ask: Callable[..., dict[int, Any]],
    question: Callable[..., Packet],
    questions: Mapping[int, Packet],
    numbers_of: Callable[[bytes], MaskedNumbers],
    *,
    run: str,
    transcript: str,
    number: int,
    threshold: int,
    everybody: bool,
) -> MaskedSum:
    """Sum the messages of the clients that answer.

    Args:
        ask: asks questions by client, for a group, waits for a number of answers, and reads each
            with a function.
        question: creates a question to a client, of some kind, with parts.
        questions: for the messages themselves, by client.
        numbers_of: extracts the numbers of a message.
        run: name of the run.
        transcript: see `transcript_of`.
        number: of the round; zero for the messages before the rounds.
        threshold: number of shares that recover a secret.
        everybody: whether no client may drop out.

    Raises:
        TimeoutError: if fewer clients than the threshold answer.
        RefusedError: if an answer cannot be read, or the shares do not fit.
    """

    def parts_of(number: int, length: int | None = None) -> Callable[[int, Packet], Packet]:
        def read(client: int, answer: Packet) -> Packet:
            lengths = [len(part) for part in answer.parts]
            if len(lengths) != number or (length and lengths != [length] * number):
                of = f" of {length} bytes" if length else ""
                raise RefusedError(f"client {client}: wanted {number} parts{of}, got {lengths}")
            return answer

        return read

    def message_of(client: int, answer: Packet) -> tuple[MaskedNumbers, bool]:
        check_flag("broken", answer.words["broken"])
        (payload,) = answer.parts
        return numbers_of(payload), answer.words["broken"]

    # Use new keys whenever a round is repeated, since no stream may cover two messages.
    group, attempt = group_of(number), secrets.token_hex(8)
    least = len(questions) if everybody else threshold
    asked = {c: question(c, "keys", attempt=attempt) for c in questions}
    keys = ask(asked, f"keys of {group}", least, parts_of(2, masks.KEY))
    members = list(keys)
    publics = [part for c in members for part in keys[c].parts]
    words = {"attempt": attempt, "members": members, "threshold": threshold}
    asked = {c: question(c, "shares", publics, **words) for c in members}
    shares = ask(asked, f"shares of {group}", least, parts_of(len(members)))
    givers = list(shares)
    # With its question, each client that has given shares gets those that were encrypted for it.
    for place, client in enumerate(members):
        if client in shares:
            packet, encrypted = questions[client], [shares[c].parts[place] for c in givers]
            words = {**packet.words, "attempt": attempt, "givers": givers}
            asked[client] = Packet(words, [*packet.parts, *encrypted])
    answers = ask({c: asked[c] for c in givers}, group, least, message_of)
    survivors = list(answers)
    numbers, broken = zip(*answers.values(), strict=True)
    asked = {c: question(c, "unmask", attempt=attempt, survivors=survivors) for c in survivors}
    revealed = ask(asked, f"unmasking of {group}", threshold, parts_of(len(givers)))
    # Modulo 2^32, whatever the bits of a message: packing keeps the lowest ones, in which such a
    # sum is right.
    total = np.stack(numbers).sum(0, dtype=np.uint32)
    purpose, count = f"{run} {attempt} {number} {transcript}", len(total)
    with reading_from(f"{group}: shares"):
        for place, client in enumerate(givers):
            # Each survivor reveals in the order of `givers`, in which it has stored the shares.
            parts = [each.parts[place] for each in revealed.values()]
            secret = masks.join_shares(parts[:threshold])
            if client in survivors:
                total = total - masks.own_mask(secret, purpose, count)
            else:
                others = {c: keys[c].parts[1] for c in survivors}
                # The survivors have added what this client would have subtracted.
                total = total + masks.pair_masks(client, secret, others, purpose, count)
    return MaskedSum(survivors, total, dict(zip(survivors, broken, strict=True)))


@final
class OverSurvivors(Channel):
    """A masked channel after clients have dropped out: means are over the remaining ones."""

    inner: Channel
    factor: Float[Array, ""]  # one over the total weight of the remaining clients
    means: tuple[bool, ...] = eqx.field(static=True)  # for each array, whether it is a mean

    private = True

    def memory(self, message):
        """The memory of the masked channel."""
        return self.inner.memory(message)

    def encode(self, key, message, memory):
        """Encode like the masked channel."""
        return self.inner.encode(key, message, memory)

    def decode(self, payload):
        """Decode like the masked channel."""
        return self.inner.decode(payload)

    def differentiable(self, decoded, message, memory):
        """Differentiate like the masked channel."""
        return self.inner.differentiable(decoded, message, memory)

    def receive(self, decoded, last):
        """The message, with means over the remaining clients."""
        leaves, structure = jax.tree.flatten(self.inner.receive(decoded, last))
        scaled = [
            leaf * self.factor.astype(leaf.dtype) if mean else leaf
            for leaf, mean in zip(leaves, self.means, strict=True)
        ]
        return jax.tree.unflatten(structure, scaled)


def means_of(message: PyTree) -> tuple[bool, ...]:
    """For each array of a message, whether it becomes a mean."""
    parts = jax.tree.leaves(message, is_leaf=is_part)
    return tuple(part.is_mean for part in parts for _ in jax.tree.leaves(part))
