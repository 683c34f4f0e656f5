"""A server that asks what it likes, in any order, never learns the message of one client."""

import itertools
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import jaxfed as jf

pytest.importorskip("flwr")

from jaxfed.deploy import masks
from jaxfed.deploy.masked import NodeMasks
from jaxfed.deploy.messages import NodeError, Packet

CLIENTS, ROUNDS, THRESHOLD, NUMBERS = range(3), (1, 2), 2, 3
TRANSCRIPTS = "ab"  # of what clients were sent before, as each of them sees it
SUBSETS = st.lists(st.sampled_from(CLIENTS), min_size=1, unique=True)
CHANNEL = jf.channel.secure_sum(3, bits=32, bound=1.0).unmasked()
REFUSALS = NodeError, ValueError, KeyError  # whatever a machine raises, the server gets a code


def payload_of(client, number, transcript):
    """What a client sends in a round before masks; the same whenever it is asked."""
    seed = 100 * TRANSCRIPTS.index(transcript) + 10 * client + number
    message = jax.random.uniform(jax.random.key(seed), NUMBERS)
    weight = jax.numpy.float32(1 / 3), jax.random.key(7), jax.numpy.int32(number)
    context = jf.channel.Context(jax.numpy.int32(client), *weight)
    return CHANNEL.bind(context).encode(jax.random.key(0), message, None)[0]


PLAIN = {which: payload_of(*which) for which in itertools.product(CLIENTS, ROUNDS, TRANSCRIPTS)}


class Sent(NamedTuple):
    """A message under masks."""

    number: int  # of the round
    transcript: str
    givers: tuple[int, ...]
    numbers: np.ndarray


class Attempt:
    """What the server has been told in one attempt."""

    def __init__(self):
        self.publics, self.shares, self.thresholds, self.sent = {}, {}, {}, {}
        self.revealed = defaultdict(set)  # shares by client and whether of its seed

    def secret(self, client, seed):
        """A client's secret, if enough shares of it were revealed."""
        shares, least = self.revealed[client, seed], self.thresholds.get(client, 99)
        return masks.join_shares(sorted(shares)[:least]) if len(shares) >= least else None

    def total(self, purpose, chosen):
        """The sum of the messages of these clients without masks; None if a mask is not known."""
        total = np.zeros(NUMBERS, np.uint32)
        for client in chosen:
            sent, seed = self.sent[client], self.secret(client, seed=True)
            if seed is None:
                return None
            name = f"{purpose} {sent.number} {sent.transcript}"
            total += sent.numbers - masks.own_mask(seed, name, NUMBERS)
            for other in set(sent.givers) - {client}:
                if other in chosen and client in self.sent[other].givers:
                    continue  # cancels, if both are of one round and were told the same
                own, others = (self.secret(c, seed=False) for c in (client, other))
                if own is not None:
                    public = {other: self.publics[other][1]}
                    total -= masks.pair_masks(client, own, public, name, NUMBERS)
                elif others is not None:
                    public = {client: self.publics[client][1]}
                    total += masks.pair_masks(other, others, public, name, NUMBERS)
                else:
                    return None
        return total


class LyingServer(RuleBasedStateMachine):
    """Three clients, whose public keys the server passes on as they are."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.attempts = [Attempt()]
        self.changed = set()  # attempts, since the last look
        self.sums = set()  # of which rounds of which clients

    def teardown(self):
        shutil.rmtree(self.folder)

    def at(self, client, attempt):
        return NodeMasks(self.folder / str(client), client, "run", f"a{attempt}", THRESHOLD)

    def ask(self, client, attempt, kind, parts=(), **words):
        question = Packet({"kind": kind, "attempt": f"a{attempt}", **words}, list(parts))
        try:
            return self.at(client, attempt).answer(question).parts
        except REFUSALS:
            return None

    def keys(self, client, attempt):
        if answer := self.ask(client, attempt, "keys"):
            self.attempts[attempt].publics[client] = answer

    def shares(self, client, attempt, members, threshold):
        known = self.attempts[attempt]
        members = [c for c in members if c in known.publics]
        parts = [key for c in members for key in known.publics[c]]
        words = {"members": members, "threshold": threshold}
        if answer := self.ask(client, attempt, "shares", parts, **words):
            known.shares[client] = dict(zip(members, answer, strict=True))
            known.thresholds[client] = threshold

    def message(self, client, attempt, number, transcript, givers, texts):
        words = {"kind": "round", "attempt": f"a{attempt}", "round": number, "givers": givers}
        question = Packet(words, texts)
        plain = PLAIN[client, number, transcript]
        try:
            masked = self.at(client, attempt).masked(CHANNEL, plain, question, transcript)
        except REFUSALS:
            return
        sent = Sent(number, transcript, tuple(givers), CHANNEL.numbers(masked))
        self.attempts[attempt].sent[client] = sent

    def unmask(self, client, attempt, survivors):
        known = self.attempts[attempt]
        if answer := self.ask(client, attempt, "unmask", survivors=list(survivors)):
            for giver, share in zip(known.sent[client].givers, answer, strict=True):
                known.revealed[giver, giver in survivors].add(share)
            self.changed.add(attempt)

    # --- questions -------------------------------------------------------------------------------

    @initialize(rounds=st.integers(0, 2))
    def begin(self, rounds):
        for number in range(1, rounds + 1):
            self.attempt_a_round(number, CLIENTS, THRESHOLD, "unmask", CLIENTS)

    @rule(
        number=st.sampled_from(ROUNDS),
        members=st.just(CLIENTS) | SUBSETS,
        threshold=st.just(THRESHOLD) | st.integers(1, 3),
        last=st.sampled_from(["round", "unmask", "unmask"]),
        survivors=SUBSETS,
        exception=st.sampled_from(CLIENTS) | st.none(),
        misled=st.sampled_from(CLIENTS) | st.none(),
    )
    def attempt_a_round(
        self, number, members, threshold, last, survivors, exception=None, misled=None
    ):
        """Ask all questions of a round in their order.

        One client, if named, is asked of another round, and one was told something else before.
        """
        attempt, known = len(self.attempts), Attempt()
        self.attempts.append(known)
        survivors = [client for client in survivors if client in members]
        for client in members:
            self.keys(client, attempt)
        for client in members:
            self.shares(client, attempt, members, threshold)
        givers = [client for client in members if client in known.shares]
        for client in survivors:
            texts = [known.shares[giver][client] for giver in givers]
            of = sum(ROUNDS) - number if client == exception else number
            transcript = TRANSCRIPTS[client == misled]
            self.message(client, attempt, of, transcript, givers, texts)
        for client in survivors if last == "unmask" else ():
            self.unmask(client, attempt, survivors)

    @rule(client=st.sampled_from(CLIENTS), back=st.integers(0, 2))
    def ask_for_keys(self, client, back):
        self.keys(client, max(len(self.attempts) - 1 - back, 0))

    @rule(
        client=st.sampled_from(CLIENTS),
        members=SUBSETS,
        threshold=st.integers(1, 3),
    )
    def ask_for_shares(self, client, members, threshold):
        self.shares(client, len(self.attempts) - 1, members, threshold)

    @rule(
        client=st.sampled_from(CLIENTS),
        number=st.sampled_from(ROUNDS),
        transcript=st.sampled_from(TRANSCRIPTS),
        givers=st.lists(st.sampled_from(CLIENTS), min_size=1, max_size=3),
        data=st.data(),
    )
    def ask_for_a_message(self, client, number, transcript, givers, data):
        known = self.attempts[-1]
        every = [
            text for each in self.attempts for to in each.shares.values() for text in to.values()
        ]
        texts = []
        for giver in givers:
            right = known.shares.get(giver, {}).get(client, b"")
            texts.append(
                right if data.draw(st.integers(0, 5)) else data.draw(st.sampled_from([*every, b""]))
            )
        self.message(client, len(self.attempts) - 1, number, transcript, givers, texts)

    @rule(clients=SUBSETS, survivors=SUBSETS | st.none())
    def ask_for_masks(self, clients, survivors):
        for client in clients:
            self.unmask(client, len(self.attempts) - 1, clients if survivors is None else survivors)

    # --- what it learns --------------------------------------------------------------------------

    @invariant()
    def knows_no_message(self):
        for number in self.changed:
            known = self.attempts[number]
            for size in CLIENTS:
                for chosen in itertools.combinations(known.sent, size + 1):
                    total = known.total(f"run a{number}", chosen)
                    terms = frozenset(
                        (c, known.sent[c].number, known.sent[c].transcript) for c in chosen
                    )
                    if total is not None and (total == self.true(terms)).all():
                        self.sums.add(terms)
        assert all(len({which[1:] for which in terms}) == 1 for terms in self.sums)
        if self.changed and self.sums:
            matrix = np.array([[term in terms for term in PLAIN] for terms in self.sums], float)
            known_alone = np.linalg.pinv(matrix) @ matrix  # projects onto what sums tell
            assert np.abs(np.eye(len(PLAIN)) - known_alone).max(axis=0).min() > 1e-9, self.sums
        self.changed.clear()

    def true(self, terms):
        return np.sum([CHANNEL.numbers(PLAIN[term]) for term in terms], axis=0, dtype=np.uint32)


TestLyingServer = pytest.mark.slow(LyingServer.TestCase)
# Secrets are drawn anew at every run, so what fails cannot be made smaller.
TestLyingServer.settings = settings(
    max_examples=50, stateful_step_count=40, phases=[Phase.generate], deadline=None
)


def test_a_round_that_is_over_is_not_summed_over_other_clients():
    server = LyingServer()
    for number, survivors in (1, CLIENTS), (2, CLIENTS), (1, [0, 1]):
        server.attempt_a_round(number, CLIENTS, THRESHOLD, "unmask", survivors)
        server.knows_no_message()
    assert len(server.sums) == 2
    server.teardown()
