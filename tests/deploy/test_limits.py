"""A site counts what its messages reveal, and gives none beyond its own limit."""

import pytest

import jaxfed as jf
from jaxfed import privacy
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.deploy import exchange
from jaxfed.deploy.exchange import RefusedError
from tests.deploy.federation import Federation
from tests.deploy.test_masks import ALGORITHM, noisy_sum

DELTA, NOISE = 1e-5, 3.0
LOSSLESS = jf.channel.lossless()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


def limited(folder, channel, epsilon, **more):
    """A federation in which the last of five clients has a limit."""
    federation = Federation(folder, ALGORITHM, draw_samples(), channel=channel)
    app, config = federation.grid.nodes[104]
    federation.grid.nodes[104] = app, config | {"epsilon": epsilon, "delta": DELTA} | more
    return federation


def counted(folder, epsilon):
    path = folder / "nodes" / "client-4" / "ledger.jsonl"
    return privacy.Ledger(path, epsilon=epsilon, delta=DELTA).spent()


@pytest.mark.slow
def test_a_site_refuses_messages_beyond_its_limit(tmp_path):
    wire = jf.Wire(jf.channel.gaussian(1.0, NOISE), LOSSLESS)
    allowed = privacy.epsilon(NOISE, 2, delta=DELTA)
    limit = 1.0001 * allowed
    federation = limited(tmp_path, wire, limit)
    federation.run(2)
    assert counted(tmp_path, limit) == pytest.approx(allowed, rel=1e-5)
    # Messages of another run count, too; the same question again does not.
    with pytest.raises(
        RefusedError, match="client 4 refuses: its message would exceed the epsilon"
    ):
        federation.run(2, out="other")
    assert counted(tmp_path, limit) == pytest.approx(allowed, rel=1e-5)


@pytest.mark.slow
def test_only_under_masks_does_the_noise_of_a_sum_count(tmp_path):
    hidden = noisy_sum(5)
    noise = hidden.up.noise()
    limit = 1.0001 * privacy.epsilon(noise, 1, delta=DELTA)
    limited(tmp_path / "hidden", hidden, limit).run(1)
    open_ = jf.Wire(hidden.up.inner, LOSSLESS)
    with pytest.raises(RefusedError, match="would exceed the epsilon that the site allows"):
        limited(tmp_path / "open", open_, limit).run(1)
    own = 1.0001 * privacy.epsilon(noise / 5**0.5, 1, delta=DELTA)
    limited(tmp_path / "own", open_, own).run(1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "would exceed the epsilon that the site allows, has no noise"),
        ({"delta": 2.0}, "conf"),
    ],
)
def test_exact_messages_and_wrong_limits_are_refused(tmp_path, more, words):
    with pytest.raises(RefusedError, match=words):
        limited(tmp_path, jf.Wire(LOSSLESS, LOSSLESS), 1.0, **more).run(1)
