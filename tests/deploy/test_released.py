"""Deployed runs on data that each site releases once, with noise that protects each person."""

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from jaxfed.core.clients.energies import energies
from jaxfed.deploy import exchange, flower
from jaxfed.deploy.exchange import RefusedError
from jaxfed.deploy.node import Node
from tests.deploy.flower_grid import LocalGrid

X = np.random.default_rng(0).normal(size=(3, 40, 5)).astype(np.float32)
X[..., :2] *= 4
PERSON = np.arange(40) // 2
KEY = jax.random.key(5)
OPTIONS = {"epsilon": 3.0, "delta": 1e-5}
ALGORITHM = jf.pca.PerPCA(2, 1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


def run(
    folder,
    out="out",
    *,
    x=X,
    configs=({}, {}, {}),
    raw=(),
    channel=None,
    start=None,
    algorithm=ALGORITHM,
    kept=None,
    weights="equal",
    **more,
):
    """The saved solution; sites in `raw` release nothing, and those in `kept` have no rows."""

    def make_data(config):
        number = config["partition-id"]
        if kept and number in kept:
            return kept[number]
        clients = jf.Clients.from_samples(x[number][None])
        if number in raw:
            return jf.Clients.from_moments([x[number].T @ x[number] / 40], counts=[20])
        found = flower.released(config, clients, person=[PERSON], key=KEY, **OPTIONS, **more)
        if kept is not None:
            kept[number] = found
        return found

    channel = jf.channel.lossless() if channel is None else channel
    app = flower.client_app(
        lambda _: algorithm,
        make_data,
        channel=channel,
        folder=folder / "states",
        warm_start=start and (lambda _: start),
        weights=weights,
    )
    folders = {"folder": str(folder / "nodes")}
    configs = [{"partition-id": i} | folders | more for i, more in enumerate(configs)]
    grid = LocalGrid([app] * 3, {}, configs, None)
    server = flower.server_app(
        lambda _: algorithm,
        clients=3,
        rounds=4,
        key=3,
        channel=channel,
        out=folder / out,
        warm_start=start and (lambda _: start),
        weights=weights,
    )
    server(grid, Context(1, 1, {}, RecordDict(), {}))
    return jf.load(folder / out / "solution.npz", like=None)


def ledger(folder, number, epsilon=OPTIONS["epsilon"]):
    path = folder / "nodes" / f"client-{number}" / "persons.jsonl"
    return privacy.Ledger(path, epsilon=epsilon, delta=OPTIONS["delta"])


def test_it_is_a_fit_on_released_moments(tmp_path):
    saved = run(tmp_path)
    released = privacy.release_moments(
        jf.Clients.from_samples(X), person=[PERSON] * 3, key=KEY, **OPTIONS
    )
    wanted = jf.fit(
        ALGORITHM,
        released,
        rounds=4,
        key=jax.random.key(3),
        backend=jf.backend.separate(),
    )
    np.testing.assert_array_equal(saved.history["objective"], wanted.history["objective"])
    assert saved.guarantees == (released.guarantee,)
    assert "per person" in saved.summary()
    assert privacy.statement(saved) == privacy.statement(wanted)
    assert [ledger(tmp_path, i).spent() for i in range(3)] == pytest.approx([3.0] * 3)


def test_a_second_run_spends_nothing(tmp_path):
    first, second = run(tmp_path), run(tmp_path, "second")
    np.testing.assert_array_equal(first.history["objective"], second.history["objective"])
    assert ledger(tmp_path, 0).spent() == pytest.approx(3.0)


@pytest.mark.slow
def test_a_site_that_allows_no_more_releases_newer_data_no_more(tmp_path):
    # The first site allows two releases, and the others one.
    configs = ({"epsilon": 5.0, "delta": OPTIONS["delta"]}, {}, {})
    run(tmp_path, configs=configs)
    with pytest.raises(RefusedError, match="node 101 refuses: make_data failed"):
        run(tmp_path, "second", x=X + 1, configs=configs)
    assert ledger(tmp_path, 0, 5.0).spent() > 4
    assert ledger(tmp_path, 1).spent() == pytest.approx(3.0)


@pytest.mark.slow
def test_a_limit_on_messages_allows_those_of_a_release(tmp_path):
    limits = {"epsilon": 3.0, "delta": OPTIONS["delta"]}
    run(tmp_path, configs=[limits] * 3)
    assert not list(tmp_path.rglob("ledger.jsonl"))
    with pytest.raises(RefusedError, match="has no noise"):
        run(tmp_path / "raw", configs=[limits] * 3, raw=(2,))
    # A warm start may be of the raw data.
    start = jf.Personalized(np.eye(5, 2, dtype=np.float32), None)
    assert run(tmp_path / "start", start=start).guarantees == ()
    with pytest.raises(RefusedError, match="has no noise"):
        run(tmp_path / "limited", configs=[limits] * 3, start=start)


def test_nothing_is_guaranteed_unless_all_data_are_released(tmp_path):
    saved = run(tmp_path, raw=(1,))
    assert saved.guarantees == ()
    with pytest.raises(ValueError, match="released: wanted"):
        privacy.statement(saved)


def test_a_site_sends_nothing_that_is_not_public_or_of_the_release(tmp_path, monkeypatch):
    """The list of all that it sends."""
    sent = []
    real = Node.answer
    monkeypatch.setattr(Node, "answer", lambda *given: sent.append(real(*given)) or sent[-1])
    kept = {}
    run(tmp_path, kept=kept)
    by_kind = {}
    for packet in sent:
        by_kind.setdefault(packet.words["kind"], []).append(packet)
    assert set(by_kind) == {"hello", "first", "round", "finish"}
    # Public: shapes and types, whose data, settings, versions; a keyed digest, which tells nothing.
    public = {"kind", "question", "id", "data", "features", "weights", "run", "versions", "tag"}
    for packet in by_kind["hello"]:
        assert set(packet.words) == public | {"samples", "energy", "guarantee"}
        assert packet.words["samples"] is None and packet.words["guarantee"]["epsilon"] == 3.0
        own = float(energies(kept[packet.words["id"]])[0])
        assert packet.words["energy"] == pytest.approx(own, rel=1e-5)
        assert not packet.parts
    for kind in ("first", "round"):
        for packet in by_kind[kind]:
            assert set(packet.words) == {"kind", "question", "id", "broken"}
    for packet in by_kind["finish"]:
        assert set(packet.words) == {"kind", "question", "id"} and not packet.parts
    # Their messages are those of a run that never had the rows.
    other = tmp_path / "other"
    before = [packet.parts for packet in sent if packet.words["kind"] in ("first", "round")]
    sent.clear()
    run(other, kept=kept)
    after = [packet.parts for packet in sent if packet.words["kind"] in ("first", "round")]
    assert sorted(before) == sorted(after)


def shared(folder, out="out", bits=32, **more):
    masks = jf.channel.secure_sum(3, bits=bits, bound=500.0)
    options = {"algorithm": jf.pca.Pooled(2), "channel": jf.Wire(masks, jf.channel.lossless())}
    return run(folder, out, sharers=3, **options | more)


def test_sites_share_the_noise_of_a_masked_sum(tmp_path):
    saved = shared(tmp_path)
    released = privacy.release_moments(
        jf.Clients.from_samples(X), person=[PERSON] * 3, key=KEY, sharers=3, **OPTIONS
    )
    total = np.einsum("m,mij->ij", np.asarray(released.counts), np.asarray(released.data.dense))
    wanted, found = np.linalg.eigh(total)[1][:, -2:], np.asarray(saved.result.shared)
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-4)
    assert saved.guarantees == (released.guarantee,)
    assert "at least 3 clients" in privacy.statement(saved)
    # The same release in another run may be summed over others.
    with pytest.raises(RefusedError, match="or is not hidden in the one sum"):
        shared(tmp_path, "second")
    assert [ledger(tmp_path, i).spent() for i in range(3)] == pytest.approx([3.0] * 3)
    (tmp_path / "nodes" / "client-0" / "release.npz").unlink()
    with pytest.raises(RefusedError, match="node 100 refuses: make_data failed"):
        shared(tmp_path, "third")


@pytest.mark.parametrize(
    "more", [{"algorithm": ALGORITHM}, {"channel": jf.channel.lossless()}, {"bits": 8}]
)
def test_sites_refuse_to_show_more_than_a_sum(tmp_path, more):
    with pytest.raises(
        RefusedError, match="would exceed the epsilon that the site allows, has no noise"
    ):
        shared(tmp_path, **more)


def test_sites_refuse_a_client_of_weight_zero_in_a_shared_sum(tmp_path, caplog):
    """It would count in the sum, and add no noise to it."""
    with pytest.raises(RefusedError, match="or is not hidden in the one sum"):
        shared(tmp_path, weights=[1.0, 1.0, 0.0])
    assert "wanted at least 3 of positive weight" in caplog.text
    assert shared(tmp_path / "positive", weights=[1.0, 1.0, 0.5]).guarantees


def test_noise_for_real_data_is_exact(tmp_path):
    pytest.importorskip("opendp")
    config = {"partition-id": 2, "folder": str(tmp_path)}
    clients = jf.Clients.from_samples(X[2:])
    first, again = (flower.released(config, clients, **OPTIONS) for _ in range(2))
    assert first.guarantee == again.guarantee
    assert first.guarantee.mechanism == "discrete Gaussian"
    np.testing.assert_array_equal(first.data.dense, again.data.dense)
    np.testing.assert_array_equal(first.ids, [2])


def test_wrong_options(tmp_path):
    config = {"partition-id": 0, "folder": str(tmp_path)}
    clients = jf.Clients.from_samples(X[:1])
    with pytest.raises(ValueError, match="ledger: no such option"):
        flower.released(config, clients, ledger=None, **OPTIONS)
    with pytest.raises(ValueError, match="epsilon: wanted"):
        flower.released(config, clients, epsilon=0.0, delta=1e-5)
    assert not list(tmp_path.rglob("release.npz"))
