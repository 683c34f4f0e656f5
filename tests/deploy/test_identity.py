"""What a folder holds belongs to one run: with anything changed, it is refused and says what."""

import jax
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.core.common.files import locked
from jaxfed.deploy import exchange, server
from jaxfed.deploy.messages import packet_of
from tests.deploy.federation import Federation, check_equal
from tests.deploy.test_troubles import HURRIED, PERPCA, number_of

OTHERS = {
    "rounds": {},
    "tol": {"tol": 1e-3},
    "key": {"key": 4},
    "weights": {"weights": "samples"},
    "weights ": {"weights": [1.0, 1.0, 1.0, 1.0, 2.0]},
    "clients": {"clients": 4},
    "participation": {"participation": jf.participation.uniform(5)},
    "deadline": {"deadline": 60.0},
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


@pytest.fixture
def clients():
    return draw_samples()


def dying(federation, number):
    """The server dies in this round."""

    def trouble(node, message, answer):
        if number_of(message) == number and node == 100:
            raise KeyboardInterrupt
        return [answer]

    federation.grid.trouble = trouble
    with pytest.raises(KeyboardInterrupt):
        federation.run(3)
    federation.grid.trouble = None


def refused(federation, what, rounds=3, **options):
    """In one sentence."""
    with pytest.raises(ValueError, match=rf"{what}.*(folder)$") as caught:
        federation.run(rounds, **options)
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)


@pytest.fixture(params=["finished", "interrupted"])
def federation(request, tmp_path, clients):
    """One that has run three rounds, or two of them."""
    made = Federation(tmp_path, PERPCA, clients)
    if request.param == "finished":
        made.run(3)
    else:
        dying(made, 3)
    return made


def test_a_run_with_other_settings_is_refused(federation, monkeypatch):
    for name, options in OTHERS.items():
        refused(federation, f" {name.strip()} ", 4 if name == "rounds" else 3, **options)
    for algorithm in (
        jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.06),
        jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05),
    ):
        federation.algorithm = algorithm
        refused(federation, " algorithm was ")
    federation.algorithm = PERPCA
    refused(federation, " channel was ", channel=jf.channel.quantize(8))
    start = jf.Personalized(np.eye(6, 2, dtype=np.float32), None)
    refused(federation, " warm_start was ", warm_start=lambda config: start)
    with monkeypatch.context() as patched:
        numbers = {"version of jax": ["another", ""]}
        patched.setattr(server, "numbers_of_versions", lambda: numbers)
        refused(federation, " version of jax was ")
    # Nothing was harmed.
    check_equal(federation, federation.run(3), federation.fit(3))


def test_a_run_with_other_data_is_refused(federation, clients):
    changed = np.asarray(clients.data.values).copy()
    changed[2, 0, 0] += 1e-3
    samples = [x[: int(n)] for x, n in zip(changed, clients.data.count, strict=True)]
    federation.clients = jf.Clients.from_samples(samples)
    federation.grid.run_id = 2  # a run of Flower's has its own data
    refused(federation, "^data: client 2 has other data")
    federation.clients, federation.grid.run_id = clients, 3
    check_equal(federation, federation.run(3), federation.fit(3))


def network(loss, rate=0.1):
    model = jf.models.Autoencoder(6, 2, key=jax.random.key(0))
    return jf.generative.FedAvg(model, loss, optax.sgd(rate), local_steps=1, batch_size=4)


def test_other_code_and_captured_values_are_other_runs(tmp_path, clients):
    def loss(model, batch, key):
        return jf.models.reconstruction_loss(model, batch, key)

    federation = Federation(tmp_path, network(loss), clients)
    federation.run(1)

    def loss(model, batch, key):
        return 2 * jf.models.reconstruction_loss(model, batch, key)

    federation.algorithm = network(loss)
    refused(federation, " program has other values", 1)
    federation.algorithm = network(jf.models.reconstruction_loss, 0.2)
    refused(federation, " algorithm ", 1)


def test_a_result_of_something_else_is_not_replaced(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients)
    (tmp_path / "out").mkdir()
    federation.fit(1).save(tmp_path / "out" / "solution.npz")
    before = (tmp_path / "out" / "solution.npz").read_bytes()
    with pytest.raises(ValueError, match="out: wanted a folder without a result"):
        federation.run(1)
    assert (tmp_path / "out" / "solution.npz").read_bytes() == before


def test_two_servers_do_not_share_a_folder(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients)
    (tmp_path / "out" / "server").mkdir(parents=True)
    with (
        locked(tmp_path / "out" / "server", "out"),
        pytest.raises(BlockingIOError, match=r"^out: .* is in use by process .*another folder"),
    ):
        federation.run(1)
    federation.run(1)  # the file alone, left by a server that was killed, locks nothing


def test_a_tag_tells_nothing_of_the_data(tmp_path, clients):
    """Of the same data, machines with other secrets have other tags."""
    tags = []

    def trouble(node, message, answer):
        tags.append(packet_of(answer).words.get("tag"))
        return [answer]

    for name in ("one", "other"):
        made = Federation(tmp_path / name, PERPCA, clients.take(np.zeros(1, int)), trouble=trouble)
        made.run(1)
    first, second = filter(None, tags)
    assert first != second


def test_a_node_refuses_what_differs_from_its_beginning(tmp_path, clients, caplog):
    """Even if the server would take it: with other data it says so, and computes nothing."""
    federation = Federation(tmp_path, PERPCA, clients)
    asked = {}

    def trouble(node, message, answer):
        asked[packet_of(message).words["kind"], node] = message
        return [answer]

    federation.grid.trouble = trouble
    federation.run(2, **HURRIED)
    message = asked["round", 102]
    app, config = federation.grid.nodes[102]
    federation.clients = jf.Clients.from_samples(
        [np.asarray(x) + 1 for x in clients.data.values[:, :9]]
    )
    from flwr.app import Context, RecordDict

    answer = packet_of(app(message, Context(7, 0, dict(config), RecordDict(), {})))
    assert answer.words == {"kind": "refusal", "code": "changed"}
    assert "data has other values" in caplog.text


def test_an_empty_secret_is_none(tmp_path, clients, caplog):
    federation = Federation(tmp_path, PERPCA, clients)
    folder = tmp_path / "nodes" / "client-1"
    folder.mkdir(parents=True)
    (folder / "secret").touch()
    with pytest.raises(ValueError, match="node 101 refuses: it failed to answer"):
        federation.run(1)
    assert "secret: wanted 32 bytes in" in caplog.text
