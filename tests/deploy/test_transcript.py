"""A masked sum is over clients that were told the same, and that weigh by a rule of their own."""

import re

import jax
import numpy as np
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")

from jaxfed.deploy import exchange, flower, remote
from jaxfed.deploy.transcript import check_roster, digests_after
from tests.deploy.federation import Federation
from tests.deploy.test_masks import ALGORITHM, BITS, HIDDEN, OPEN, Overheard, unmasked  # noqa: F401

CODED = jf.channel.difference(jf.channel.quantize(8))
SAMPLES = [30, 10, 20, 5, 35]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


@pytest.fixture
def sums(monkeypatch):
    """What the server learns in each round."""
    found, real = [], remote.masked_sum

    def noted(*arguments, **options):
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(remote, "masked_sum", noted)
    return found


def lying(monkeypatch, lie):
    """The server changes what it asks; `lie` maps a client's id and words to other words."""
    real = remote.Remote._question

    def question(self, place, kind, parts=(), **words):
        packet = real(self, place, kind, parts, **words)
        if kind != "round":
            return packet
        return packet._replace(words={**packet.words, **lie(place, packet.words)})

    monkeypatch.setattr(remote.Remote, "_question", question)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda i, asked: {"weight": float(i == 1)}, "weight: wanted 0.2, by this client's rule"),
        (
            lambda i, asked: {"roster": {**asked["roster"], "total": 50.0}},
            "weight: wanted 0.02, by this client's rule, got 0.2",
        ),
        (
            lambda i, asked: {"roster": {**asked["roster"], "ids": [1] * 5}},
            r"roster: wanted client \d in place \d, got",
        ),
    ],
    ids=("weights", "total", "ids"),
)
def test_a_client_has_the_weight_of_its_own_rule(tmp_path, monkeypatch, caplog, lie, words):
    """With weights of zero for all others, a sum would be one client's message."""
    lying(monkeypatch, lie)
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN)
    with pytest.raises(
        ValueError, match=r"round 1: client \d refuses: the question makes no sense"
    ):
        federation.run(1)
    assert re.search(words, caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["weights", "broadcasts"])
def test_masks_of_clients_that_were_told_different_things_do_not_cancel(
    tmp_path,
    monkeypatch,
    unmasked,  # noqa: F811
    sums,
    told,
):
    if told == "weights":  # of all others, a thousandth of what they are
        lying(
            monkeypatch,
            lambda i, asked: (
                {} if i == 1 else {"weight": 2e-4, "roster": {**asked["roster"], "total": 5000.0}}
            ),
        )
    else:  # in the first round, a start from which the others learn nothing
        real = remote.Remote._broadcasts

        def broadcasts(self, state, member, **options):
            found = real(self, state, member, **options)
            if member.id == 1 or int(state.round):
                return found
            return found._replace(parts=[bytes(len(part)) for part in found.parts])

        monkeypatch.setattr(remote.Remote, "_broadcasts", broadcasts)
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=HIDDEN)
    federation.run(2)
    # Every number is hidden by the pairs of which one was told something else, also later.
    for number, found in enumerate(sums):
        sent = [numbers for numbers, _ in unmasked[5 * number : 5 * number + 5]]
        exact = np.sum(sent, axis=0, dtype=np.uint32)
        assert ((exact - found.total) % 2**BITS != 0).all()
    assert len(unmasked) == 10


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["samples", [3.0, 1.0, 2.0, 0.5, 3.5]])
def test_clients_know_the_rule_for_weights(tmp_path, weights):
    rows = np.asarray(jax.random.normal(jax.random.key(5), (5, max(SAMPLES), 6)))
    clients = jf.Clients.from_samples(
        [x[:n] for x, n in zip(rows, SAMPLES, strict=True)], weights=weights
    )
    federation = Federation(tmp_path, ALGORITHM, clients, channel=HIDDEN)
    with pytest.raises(ValueError, match=r"weights: wanted at client \d the server's"):
        federation.run(2, weights=weights)
    channel = {"channel": HIDDEN, "weights": weights}
    federation = Federation(tmp_path / "agreed", ALGORITHM, clients, **channel)
    saved = federation.run(2, weights=weights)
    np.testing.assert_array_equal(saved.result.shared, federation.fit(2).result.shared)


def test_where_nothing_is_masked_the_server_alone_weighs(tmp_path):
    weights = [3.0, 1.0, 2.0, 0.5, 3.5]
    federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=OPEN)
    assert federation.run(1, weights=weights).rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("down", [OPEN.down, CODED], ids=["lossless", "differences"])
def test_a_client_that_was_away_catches_up_with_broadcasts_that_all_got(tmp_path, down):
    """And a restarted server goes on with the digests of those that it has sent."""
    lost = {("round", number, 3) for number in (1, 2, 4)}
    channel = jf.Wire(HIDDEN.up, down)
    federation = Overheard(tmp_path, ALGORITHM, draw_samples(), channel=channel, lost=lost)
    hurried = {"deadline": 0.01, "patience": 5.0}
    saved = federation.run(6, **hurried)
    np.testing.assert_array_equal(saved.history["participants"], [4, 4, 5, 4, 5, 5])
    (tmp_path / "out" / "solution.npz").unlink()
    (tmp_path / "out" / "server" / "00000006.npz").unlink()
    again = federation.run(6, **hurried)
    np.testing.assert_array_equal(again.result.shared, saved.result.shared)
    bare = jf.Wire(jf.channel.lossless(), down)
    table = np.ones((6, 5), bool)
    table[[0, 1, 3], 3] = False
    near = jf.fit(
        ALGORITHM,
        draw_samples(),
        rounds=6,
        key=jax.random.key(3),
        channel=bare,
        participation=jf.participation.mask(table),
    )
    projectors = [np.asarray(x @ x.T) for x in (saved.result.shared, near.result.shared)]
    np.testing.assert_allclose(*projectors, atol=1e-2)


def test_digests_are_of_all_broadcasts():
    parts = [b"first", b"one", b"two"]
    everything = digests_after([], ["first", "next", "next"], parts, [])
    assert len(set(everything)) == 3
    begun = digests_after([], ["first"], parts[:1], [])
    assert digests_after(begun, ["next"], parts[2:], everything[1:2]) == everything
    late = digests_after([], ["first", "next"], [parts[0], parts[2]], everything[1:2])
    assert late == everything
    assert digests_after(begun, ["next"], [b"other"], everything[1:2]) != everything
    with pytest.raises(ValueError, match="broadcasts: wanted under masks those that all get"):
        digests_after(everything, ["whole"], [b""], [])


@pytest.mark.parametrize("given", [0.0, -0.2, 0.19, np.nan, np.inf])
def test_other_weights_are_refused(given):
    roster = {"ids": [4, 7], "total": 10.0}
    check_roster(roster, 7, 1, 0.2, lambda position, size: 2.0)
    with pytest.raises(ValueError, match=r"weight: wanted 0\.2, by this client's rule"):
        check_roster(roster, 7, 1, given, lambda position, size: 2.0)
    for place in (0, -1, 2):
        with pytest.raises(ValueError, match=f"roster: wanted client 7 in place {place}"):
            check_roster(roster, 7, place, 0.2, lambda position, size: 2.0)


def test_weights_of_a_client_app_are_checked():
    for weights in ("size", [-1.0], [0.0, 0.0], None):
        with pytest.raises(ValueError, match="weights: wanted"):
            flower.client_app(lambda config: ALGORITHM, lambda config: None, weights=weights)
