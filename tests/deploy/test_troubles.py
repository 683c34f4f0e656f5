"""Clients that are killed, late, doubled, or do not fit; a server that is killed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.deploy import exchange, flower
from jaxfed.deploy.messages import packet_of
from tests.deploy.federation import Federation, alone, check_equal

PERPCA = jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05)
LANCZOS = jf.pca.BlockLanczos(2)
CODED = jf.channel.difference(jf.channel.quantize(3))
HURRIED = {"deadline": 0.01, "patience": 5.0}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


@pytest.fixture
def clients():
    return draw_samples()


def number_of(message):
    """The round that a message belongs to; None for others."""
    return packet_of(message).words.get("round")


def absent(rounds, who):
    """The table of a participation: everybody but one in these rounds."""
    present = np.ones((rounds, 5), bool)
    for number, client in who:
        present[number - 1, client] = False
    return jf.participation.mask(present)


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [
        pytest.param(None, id="lossless"),
        pytest.param(CODED, id="difference"),
    ],
)
def test_a_node_dies_and_comes_back(tmp_path, clients, channel):
    federation = Federation(tmp_path, PERPCA, clients, channel=channel)
    grid = federation.grid
    gone = grid.nodes[102]

    def trouble(node, message, answer):
        if number_of(message) == 3 and node == 102:
            del grid.nodes[102]  # it has computed, and nobody has heard it
            return []
        if number_of(message) == 5 and node == 104:
            grid.nodes[202] = gone  # a machine that starts again is another node
        return [answer]

    grid.trouble = trouble
    saved = federation.run(8, **HURRIED)
    who = [(3, 2), (4, 2), (5, 2)]
    # It is there again before the deadline of round 5 has passed, or in round 6.
    back = 5 if saved.history["present"][4, 2] else 6
    table = absent(8, [pair for pair in who if pair[0] < back])
    check_equal(federation, saved, federation.fit(8, participation=table))


@pytest.mark.slow
def test_a_late_answer_has_never_been(tmp_path, clients):
    def trouble(node, message, answer):
        late = (number_of(message), node) in {(1, 101), (2, 103)}
        return [] if late else [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    saved = federation.run(3, **HURRIED)
    table = absent(3, [(1, 1), (2, 3)])
    check_equal(federation, saved, federation.fit(3, participation=table))


def test_answers_that_come_twice_count_once(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients, trouble=lambda n, m, answer: [answer] * 2)
    check_equal(federation, federation.run(2), federation.fit(2))


@pytest.mark.slow
def test_a_killed_server_goes_on(tmp_path, clients):
    def trouble(node, message, answer):
        if number_of(message) == 5 and node == 100:
            raise KeyboardInterrupt
        return [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    with pytest.raises(KeyboardInterrupt):
        federation.run(6)
    federation.grid.trouble = None
    check_equal(federation, federation.run(6), federation.fit(6))
    asked = set()

    def listen(node, message, answer):
        asked.add(packet_of(message).words["kind"])
        return [answer]

    federation.grid.trouble = listen
    check_equal(federation, federation.run(6), federation.fit(6))
    assert asked == {"hello", "finish"}  # of rounds nothing
    with pytest.raises(ValueError, match=r"out: .* run: rounds was 6 and is 7; run it as"):
        federation.run(7)


def test_an_answer_that_is_lost_for_good_is_refused(tmp_path, clients):
    def trouble(node, message, answer):
        if number_of(message) == 2 and node == 103:
            shutil.rmtree(tmp_path / "nodes")  # after the others, this one is asked in vain
        return [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    with pytest.raises(ValueError, match=r"client .* state from which it has to go on is lost"):
        federation.run(3)


@pytest.mark.slow
def test_too_few_answers_are_an_error(tmp_path, clients):
    def trouble(node, message, answer):
        return [] if number_of(message) == 2 and node > 101 else [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    options = {"deadline": 0.01, "patience": 0.1}
    with pytest.raises(TimeoutError, match=r"round 2: wanted answers of at least 3 .* \[2, 3, 4\]"):
        federation.run(3, at_least=3, **options)
    # An algorithm that needs everybody has no rounds without.
    federation = Federation(tmp_path, LANCZOS, clients, trouble=trouble)
    with pytest.raises(TimeoutError, match="at least 5 clients, got 2"):
        federation.run(3, out="lanczos", **options)


def test_data_that_do_not_fit_are_refused(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients)
    narrow = jf.Clients.from_samples([np.ones((9, 4), np.float32)])
    other = flower.client_app(lambda config: PERPCA, lambda config: narrow, folder=tmp_path)
    federation.grid.nodes[103] = (other, {"partition-id": 3})
    with pytest.raises(ValueError, match=r"data: wanted at client 3 .*\[12, 6\].*\[9, 4\]"):
        federation.run(2)


def network(batch_size):
    return jf.generative.FedAvg(
        jf.models.Autoencoder(6, 2, key=jax.random.key(0)),
        jf.models.reconstruction_loss,
        optax.sgd(0.1),
        local_steps=1,
        batch_size=batch_size,
    )


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            jf.pca.PerPCA(4, 4, solver="gradient"),
            "8 orthonormal components do not fit into 6 features",
        ),
        (jf.pca.PerPCA(1, (1, 2), solver="gradient"), "local_rank: 2 ranks for 5 clients"),
        (jf.gcca.MaxVar(2), "clients: .* got data of type Samples"),
        (network(8), "batch_size: wanted at most the smallest client's 7 samples, got 8"),
    ],
    ids=("features", "number", "kind", "samples"),
)
def test_what_fit_refuses_is_refused_before_anything_is_computed(
    tmp_path, clients, algorithm, words
):
    with pytest.raises(ValueError, match=words):
        Federation(tmp_path, algorithm, clients).fit(2)
    federation = Federation(tmp_path, algorithm, clients)
    asked = []
    federation.grid.trouble = lambda n, m, answer: asked.append(packet_of(m).words) or [answer]
    with pytest.raises(ValueError, match=words):
        federation.run(2)
    assert {words["kind"] for words in asked} == {"hello"}
    assert not list(tmp_path.rglob("*.npz"))


@pytest.mark.slow
def test_a_client_that_the_algorithm_cannot_use_does_not_join(tmp_path, clients, caplog):
    few = jf.Clients.from_samples([np.ones((3, 6), np.float32)])
    late = flower.client_app(lambda config: network(4), lambda config: few, folder=tmp_path)
    federation = Federation(tmp_path, network(4), clients, order=(0, 1, 2, 3))

    def trouble(node, message, answer):
        if number_of(message) == 1:
            federation.grid.nodes[104] = (late, {"partition-id": 4})
        return [answer]

    federation.grid.trouble = trouble
    saved = federation.run(3, **HURRIED)
    assert saved.history["present"].shape == (3, 4)
    assert (
        "client 4 cannot join this run: batch_size: wanted at most the smallest client's 3"
        in caplog.text
    )


def test_a_client_looks_at_its_own_warm_start(tmp_path, clients, caplog):
    start = jf.Personalized(np.eye(6, 2, dtype=np.float32), np.eye(6, 2, dtype=np.float32)[:, ::-1])

    def app(local):
        return flower.client_app(
            lambda config: PERPCA,
            lambda config: alone(clients, config["partition-id"]),
            warm_start=lambda config: start._replace(local=local),
            folder=tmp_path / "nodes",
        )

    federation = Federation(tmp_path, PERPCA, clients)
    for node, (_, config) in federation.grid.nodes.items():
        wrong = start.local[:, :1] if node == 103 else start.local
        federation.grid.nodes[node] = (app(wrong), config)
    with pytest.raises(ValueError, match="client 3 refuses: the algorithm cannot use its data or"):
        federation.run(2, warm_start=lambda config: start)
    assert "client 3: warm_start: wanted local" in caplog.text


def test_another_algorithm_or_channel_is_refused(tmp_path, clients, caplog):
    federation = Federation(tmp_path, PERPCA, clients)
    other = flower.client_app(
        lambda config: jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.1),
        lambda config: clients,
        folder=tmp_path,
    )
    federation.grid.nodes[103] = (other, {"partition-id": 3})
    with pytest.raises(ValueError, match="node 103 refuses: make_data failed there, or did not"):
        federation.run(2)
    assert "make_data: wanted Clients with one client, got 5" in caplog.text
    other = flower.client_app(
        lambda config: jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.1),
        lambda config: clients.take(jnp.arange(1)),
        folder=tmp_path,
    )
    federation.grid.nodes[103] = (other, {"partition-id": 3})
    with pytest.raises(ValueError, match=r"algorithm: wanted at client 3 the server's"):
        federation.run(2)


@pytest.mark.slow
def test_a_node_that_joins_late(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients)
    grid = federation.grid
    late = grid.nodes.pop(104)

    def trouble(node, message, answer):
        if number_of(message) == 2:
            grid.nodes[104] = late
        return [answer]

    grid.trouble = trouble
    saved = federation.run(5, clients=4, **HURRIED)
    np.testing.assert_array_equal(saved.history["present"][:2, 4], False)
    assert saved.history["present"][3:, 4].all()
    assert np.isfinite(saved.history["objective"]).all()
    assert np.isfinite(np.asarray(jf.load(federation.local(4)).result.local)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["difference", "entropy"])
def test_what_is_counted_is_what_travels(tmp_path, clients, name):
    channel = {"difference": CODED, "entropy": jf.channel.quantize(3, coding="entropy")}[name]
    up = []

    def trouble(node, message, answer):
        packet = packet_of(answer)
        if packet.words["kind"] in ("first", "round"):
            up.append(len(packet.parts[0]))
        return [answer]

    federation = Federation(tmp_path, PERPCA, clients, channel=channel, trouble=trouble)
    down = []
    push = federation.grid.push_messages

    def counted(messages):
        packets = [packet_of(message) for message in messages]
        down.extend(sum(map(len, p.parts)) for p in packets if p.words["kind"] == "round")
        return push(messages)

    federation.grid.push_messages = counted
    uniform = jf.participation.uniform(3)
    saved = federation.run(4, participation=uniform)
    check_equal(federation, saved, federation.fit(4, participation=uniform))
    assert saved.history["bits_up"][-1] * 5 == 8 * sum(up)
    # The first downlink is counted for everybody, and sent to those who take part.
    first = saved.history["bits_down"][0]
    missing = 5 - len({i for row in saved.history["present"] for i in np.flatnonzero(row)})
    assert saved.history["bits_down"][-1] * 5 - missing * first == pytest.approx(8 * sum(down))
