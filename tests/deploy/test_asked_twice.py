"""A server that asks twice learns nothing more: a client answers one conversation."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from jaxfed.core.store.series import Series
from jaxfed.deploy import exchange
from jaxfed.deploy.exchange import RefusedError
from jaxfed.deploy.masked import NodeMasks
from jaxfed.deploy.messages import NodeError, Packet, message_of, packet_of
from tests.deploy.federation import Federation
from tests.deploy.test_masks import ALGORITHM, HIDDEN, noisy_sum, unmasked  # noqa: F401

NOISY = jf.Wire(jf.channel.gaussian(1e-3, 1e3), jf.channel.lossless())
ASKED = {"kind": "refusal", "code": "asked"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


def stopping(federation, stage, number):
    """The server dies when the last client has answered this stage of a round."""
    seen = []

    def trouble(node, message, answer):
        words = packet_of(message).words
        rounds = [found for found in seen if found == "keys"]
        seen.append(words["kind"])
        if words["kind"] == stage and node == 100 and len(rounds) == 5 * number:
            raise KeyboardInterrupt
        return [answer]

    federation.grid.trouble = trouble
    with pytest.raises(KeyboardInterrupt):
        federation.run(3)
    federation.grid.trouble = None


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["shares", "round", "unmask"])
def test_a_masked_round_that_is_repeated_has_the_same_messages(tmp_path, unmasked, stage):  # noqa: F811
    """And so the same noise, of which privacy counts one."""
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=noisy_sum(5))
    stopping(federation, stage, 2)
    before = {plain for _, plain in unmasked}
    assert len(before) == (5 if stage == "shares" else 10)
    saved = federation.run(3)
    assert saved.rounds == 3 and len({plain for _, plain in unmasked}) == 15
    # Under other masks.
    sent = [packet for packet in map(bytes, federation.grid.seen) if b"round" in packet]
    assert len(set(sent)) == len(sent)


@pytest.mark.slow
def test_a_round_is_summed_over_one_set_of_clients(tmp_path):
    """The difference of two sums would be a message."""

    def trouble(node, message, answer):
        kind = packet_of(message).words["kind"]
        return [] if node == 103 and kind == "round" else [answer]

    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN)
    hurried = {"deadline": 0.01, "patience": 1.0}
    federation.run(2, **hurried)
    # As if the server had died before it saved the round.
    (tmp_path / "out" / "server" / "00000002.npz").unlink()
    federation.grid.trouble = trouble
    with pytest.raises(RefusedError, match=r"unmasking of round 2: .* in another conversation"):
        federation.run(2, **hurried)


@pytest.mark.slow
def test_a_round_has_one_question(tmp_path, caplog):
    """A server that falls back a round asks with an equal head, and another body."""
    told, lost, stops = [], [], True

    def trouble(node, message, answer):
        asked = packet_of(message)
        number = asked.words.get("round")
        if node in lost:
            return []
        if number and node == 101:
            told.append((asked, packet_of(answer)))
        if stops and number == 3 and node == 100:  # the last that is asked
            raise KeyboardInterrupt
        return [answer]

    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=NOISY, trouble=trouble)
    hurried = {"deadline": 0.01, "patience": 5.0}
    with pytest.raises(KeyboardInterrupt):
        federation.run(3, **hurried)
    (tmp_path / "out" / "server" / "00000002.npz").write_bytes(b"damaged")
    stops, lost = False, [104]
    with pytest.raises(TimeoutError, match=r"round 3: .*client 3 refuses: it has answered this"):
        federation.run(3, **hurried)
    by_round = {n: [x for x in told if x[0].words["round"] == n] for n in (1, 2, 3)}
    assert [len(found) for found in by_round.values()] == [1, 2, 2]
    # What was asked before is answered as before, and what was not, not at all.
    (asked, answer), (again, same) = by_round[2]
    assert asked == again and answer == same
    (asked, answer), (other, another) = by_round[3]
    assert asked.head == other.head and asked.body != other.body
    assert another.words == ASKED
    # Rounds have noise of their own.
    noises = [np.frombuffer(by_round[n][0][1].parts[0], np.float32) for n in (1, 2, 3)]
    assert all(np.abs(noises[i] - noises[i - 1]).max() > 0.1 for i in range(3))


@pytest.mark.slow
def test_no_round_is_asked_again_from_another_state(tmp_path):
    told = {}

    def trouble(node, message, answer):
        if node == 101:
            told[packet_of(message).words.get("round")] = message, packet_of(answer)
        return [answer]

    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=NOISY, trouble=trouble)
    federation.run(2)
    app, config = federation.grid.nodes[101]

    def ask(number, changed):
        packet = packet_of(told[number][0])
        parts = [bytes(part) for part in packet.parts]
        if changed:
            parts[-1] = np.flip(np.frombuffer(parts[-1], np.float32)).tobytes()
        message = message_of(packet._replace(parts=parts), 0, "round")
        return packet_of(app(message, Context(1, 0, dict(config), RecordDict(), {})))

    for number in (2, 1, 2):
        assert ask(number, changed=True).words == ASKED
        assert ask(number, changed=False) == told[number][1]


@pytest.mark.slow
def test_two_questions_at_once_have_one_answer(tmp_path, monkeypatch):
    told = []

    def trouble(node, message, answer):
        if node == 101 and packet_of(message).words.get("round") == 2:
            told.append(message)
        return [answer]

    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=NOISY, trouble=trouble)
    federation.run(2)
    app, config = federation.grid.nodes[101]
    [state] = tmp_path.glob("**/client-1/00000002.npz")
    state.unlink()  # as if nobody had asked yet
    packet, save = packet_of(told[0]), Series.save
    first, last = packet.parts[:-1], np.frombuffer(packet.parts[-1], np.float32)
    other = packet._replace(parts=[*first, np.flip(last).tobytes()])

    def slowly(*arguments):
        time.sleep(0.5)
        return save(*arguments)

    def ask(asked):
        message = message_of(asked, 0, "round")
        return packet_of(app(message, Context(1, 0, dict(config), RecordDict(), {})))

    monkeypatch.setattr(Series, "save", slowly)
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, [packet, other, packet]))
    kinds = [answer.words["kind"] for answer in answers]
    assert kinds in (["round", "refusal", "round"], ["refusal", "round", "refusal"])
    assert answers[0] == answers[2]


# --- one attempt at a masked round ---------------------------------------------------------------


class Attempt:
    """Three clients at an attempt, as far as they have each other's shares."""

    def __init__(self, folder):
        self.agreed = {"members": [0, 1, 2], "threshold": 2}
        self.folders, self.words = [folder / str(i) for i in range(3)], {"attempt": "ab"}
        keys = [self.ask(i, "keys").parts for i in range(3)]
        self.publics = [part for pair in keys for part in pair]
        self.shares = [self.ask(i, "shares", self.publics, **self.agreed).parts for i in range(3)]

    def at(self, client, sharers=1):
        return NodeMasks(self.folders[client], client, "abcd", "ab", sharers)

    def ask(self, client, kind, parts=(), **words):
        return self.at(client).answer(Packet({"kind": kind, **self.words, **words}, parts))

    def send(self, client, number=1, givers=(0, 1, 2), encrypted=None, transcript="t"):
        """A message under masks."""
        channel = jf.channel.secure_sum(3, bits=32, bound=1.0).unmasked()
        context = jf.channel.Context(
            jax.numpy.int32(client), jax.numpy.float32(1 / 3), jax.random.key(7), jax.numpy.int32(1)
        )
        payload, _ = channel.bind(context).encode(jax.random.key(0), jax.numpy.ones(4), None)
        encrypted = encrypted or [self.shares[c][client] for c in givers]
        words = {"kind": "round", "round": number, "givers": list(givers), **self.words}
        masked = self.at(client).masked(channel, payload, Packet(words, encrypted), transcript)
        return channel.numbers(masked)


def test_each_stage_has_one_question(tmp_path):
    attempt = Attempt(tmp_path)
    # The same question has the same answer, though shares are drawn at random.
    again = attempt.ask(1, "shares", attempt.publics, **attempt.agreed)
    assert list(again.parts) == list(attempt.shares[1])
    refused = pytest.raises(NodeError, match="another question of")
    with refused:
        attempt.ask(1, "shares", attempt.publics, members=[0, 1, 2], threshold=3)
    sent = attempt.send(1)
    np.testing.assert_array_equal(attempt.send(1), sent)
    for other in ({"number": 2}, {"givers": (0, 1)}, {"givers": (1, 2)}):
        with refused:  # masks of one message on another
            attempt.send(1, **other)
    told = attempt.ask(1, "unmask", survivors=[0, 1])
    assert attempt.ask(1, "unmask", survivors=[0, 1]) == told
    for kind, more in (("unmask", {"survivors": [1, 2]}), ("keys", {})):
        with refused:
            attempt.ask(1, kind, **more)
    with refused:
        attempt.ask(1, "shares", attempt.publics, **attempt.agreed)


def test_a_share_that_comes_back_is_not_taken_for_anothers(tmp_path):
    attempt = Attempt(tmp_path)
    own = attempt.shares[1][2]  # its own for client 2, in the place of client 2's for it
    attempt.send(1, encrypted=[attempt.shares[0][1], b"", own])
    with pytest.raises(ValueError, match="masks: wanted a share of client 2, got another"):
        attempt.ask(1, "unmask", survivors=[0, 1, 2])
