"""Both ends of the four exchanges in which the server learns a sum and nothing else.

1. Clients create keys and publish the public ones.
2. Each client gives all others encrypted shares of its secrets, which the server passes on.
3. Each client sends its message under masks.
4. The survivors, whose messages arrived, reveal the shares needed to remove the masks that are
   left in the sum.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
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
from jaxfed.deploy.messages import Packet
from jaxfed.deploy.run import check_file_name

MaskedNumbers = UInt32[np.ndarray, " n"]


class NodeMasks:
    """One client's part in one attempt at a round; a file holds its secrets."""

    def __init__(self, folder: Path, client: int, run: str, attempt: str):
        """Continue from the file, if there is one.

        Raises:
            ValueError: if the attempt's name is invalid.
        """
        check_file_name("attempt", attempt)
        self.client, self.purpose = client, f"{run} {attempt}"
        self.path = folder / f"{attempt}.json"
        self.known = json.loads(self.path.read_text("utf8")) if self.path.exists() else {}

    def answer(self, question: Packet) -> Packet:
        """The reply to a question that does not concern the message itself."""
        kinds = {"keys": self._public, "shares": self._shares, "unmask": self._unmask}
        return kinds[question.words["kind"]](question)

    def _public(self, question: Packet) -> Packet:
        """Create keys, delete those of earlier rounds, and return the public ones."""
        del question
        if "keys" not in self.known:
            # Whoever gets at the keys of a past attempt can remove the masks of its messages.
            for old in self.path.parent.glob("*.json"):
                old.unlink()
            self._save(keys=[part.hex() for part in masks.Keys.draw()])
        return Packet({"kind": "keys", "id": self.client}, self._keys().public)

    def _shares(self, question: Packet) -> Packet:
        """Shares of the secrets, encrypted for each other client.

        Raises:
            ValueError: if the threshold is not more than half of the clients, or a client's key is
                missing.
        """
        members, threshold = list(question.words["members"]), question.words["threshold"]
        least = masks.least_threshold(len(members))
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
        self._save(
            threshold=threshold,
            publics={str(c): [key.hex() for key in pair] for c, pair in by_client.items()},
            own=(seeds[self.client] + keys[self.client]).hex(),
        )
        encrypted = [
            b"" if c == self.client else masks.encrypt(self._sealing(c), seeds[c] + keys[c])
            for c in members
        ]
        return Packet({"kind": "shares", "id": self.client}, encrypted)

    def masked(
        self,
        channel: MaskedChannel,
        payload: PyTree,
        givers: Sequence[int],
        encrypted: Sequence[bytes],
    ) -> PyTree:
        """The payload under the masks shared with the clients that have given shares.

        Raises:
            ValueError: if they are too few.
        """
        if len(set(givers)) < self.known["threshold"] or self.client not in givers:
            raise ValueError(
                f"masks: wanted shares of at least {self.known['threshold']} clients, "
                f"got {len(givers)}"
            )
        self._save(shares={str(c): text.hex() for c, text in zip(givers, encrypted, strict=True)})
        numbers, keys = channel.numbers(payload), self._keys()
        publics = {c: bytes.fromhex(self.known["publics"][str(c)][1]) for c in givers}
        own = masks.own_mask(keys.seed, self.purpose, len(numbers))
        pairs = masks.pair_masks(self.client, keys.masking, publics, self.purpose, len(numbers))
        return channel.with_numbers(payload, numbers + own + pairs)

    def _unmask(self, question: Packet) -> Packet:
        """One share of each client: of its own seed if it survived, or of its key if it did not.

        Raises:
            ValueError: if there are too few survivors, or a second question names others.
        """
        survivors = sorted(question.words["survivors"])
        shares = {int(c): bytes.fromhex(text) for c, text in self.known["shares"].items()}
        if len(set(survivors)) < self.known["threshold"] or set(survivors) - shares.keys():
            raise ValueError(
                f"masks: wanted messages of at least {self.known['threshold']} clients that have "
                f"given shares, got {survivors}"
            )
        # Both shares of one client would reveal its message, so a client answers for one set of
        # survivors only. That set is on disk before anything is revealed, for the case of a
        # restart.
        if self.known.setdefault("survivors", survivors) != survivors:
            raise ValueError("masks: of one client both shares would tell all; one was told")
        self._save(survivors=survivors)
        revealed = []
        for client, text in shares.items():
            if client == self.client:
                both = bytes.fromhex(self.known["own"])
            else:
                both = masks.decrypt(self._sealing(client), text)
            half = len(both) // 2
            revealed.append(both[:half] if client in survivors else both[half:])
        return Packet({"kind": "unmask", "id": self.client}, revealed)

    def _keys(self) -> masks.Keys:
        if "keys" not in self.known:
            raise ValueError(f"masks: the keys of this round are not in {self.path}")
        return masks.Keys(*map(bytes.fromhex, self.known["keys"]))

    def _sealing(self, other: int) -> bytes:
        low, high = sorted((self.client, other))
        public = bytes.fromhex(self.known["publics"][str(other)][0])
        return masks.agree(self._keys().sealing, public, f"seal {low} {high} {self.purpose}")

    def _save(self, **more: Any) -> None:
        self.known |= more
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with replacing(self.path, private=True) as part:
            part.write_text(json.dumps(self.known), "utf8")


# --- the server's end ----------------------------------------------------------------------------


class MaskedSum(NamedTuple):
    """The survivors, the sum of their messages modulo 2^32, and whose are not finite."""

    survivors: list[int]
    total: MaskedNumbers
    not_finite: dict[int, bool]  # by survivor; once masked, a message shows nothing of it


def masked_sum(
    ask: Callable[[Mapping[int, Packet], str, int], dict[int, Packet]],
    question: Callable[..., Packet],
    questions: Mapping[int, Packet],
    numbers_of: Callable[[bytes], MaskedNumbers],
    *,
    run: str,
    group: str,
    threshold: int,
    everybody: bool,
) -> MaskedSum:
    """Sum the messages of the clients that answer.

    Args:
        ask: asks questions by client, for a group, and waits for a number of answers.
        question: creates a question to a client, of some kind, with parts.
        questions: for the messages themselves, by client.
        numbers_of: extracts the numbers of a message.
        run: name of the run.
        group: what the messages belong to, such as the round.
        threshold: number of shares that recover a secret.
        everybody: whether no client may drop out.

    Raises:
        TimeoutError: if fewer clients than the threshold answer.
        RefusedError: if an answer cannot be read, or the shares do not fit.
    """

    def answers_to(questions: Mapping[int, Packet], name: str, least: int, parts: int):
        answers = ask(questions, name, least)
        for client, answer in answers.items():
            if len(answer.parts) != parts:
                raise RefusedError(
                    f"client {client}: wanted {parts} parts in {name}, got {len(answer.parts)}"
                )
        return answers

    # Use new keys whenever a round is repeated, since no stream may cover two messages.
    attempt = secrets.token_hex(8)
    least = len(questions) if everybody else threshold
    asked = {c: question(c, "keys", attempt=attempt) for c in questions}
    keys = answers_to(asked, f"keys of {group}", least, 2)
    for client, answer in keys.items():
        if any(len(key) != masks.KEY for key in answer.parts):
            raise RefusedError(f"client {client}: wanted keys of {masks.KEY} bytes")
    members = list(keys)
    publics = [part for c in members for part in keys[c].parts]
    words = {"attempt": attempt, "members": members, "threshold": threshold}
    asked = {c: question(c, "shares", publics, **words) for c in members}
    shares = answers_to(asked, f"shares of {group}", least, len(members))
    givers = list(shares)
    # With its question, each client that has given shares gets those that were encrypted for it.
    for place, client in enumerate(members):
        if client in shares:
            packet, encrypted = questions[client], [shares[c].parts[place] for c in givers]
            words = {**packet.words, "attempt": attempt, "givers": givers}
            asked[client] = Packet(words, [*packet.parts, *encrypted])
    answers = answers_to({c: asked[c] for c in givers}, group, least, 1)
    survivors, numbers, not_finite = list(answers), [], {}
    for client, answer in answers.items():
        with reading_from(f"client {client}"):
            numbers.append(numbers_of(answer.parts[0]))
            check_flag("broken", answer.words["broken"])
            not_finite[client] = answer.words["broken"]
    asked = {c: question(c, "unmask", attempt=attempt, survivors=survivors) for c in survivors}
    revealed = answers_to(asked, f"unmasking of {group}", threshold, len(givers))
    # Modulo 2^32, whatever the bits of a message: packing keeps the lowest ones, in which such a
    # sum is right.
    total = np.stack(numbers).sum(0, dtype=np.uint32)
    purpose, count = f"{run} {attempt}", len(total)
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
    return MaskedSum(survivors, total, not_finite)


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
