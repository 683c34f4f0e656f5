"""One site's trouble stays that site's, and so do its words."""

import jax
import numpy as np
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.core.clients.names import like
from jaxfed.deploy import exchange, flower
from jaxfed.deploy import node as nodes
from jaxfed.deploy.exchange import HELLO, RefusedError
from jaxfed.deploy.messages import packet_of, reply_of
from tests.deploy.federation import Federation, alone, check_equal
from tests.deploy.test_troubles import HURRIED, PERPCA, absent, number_of

SECRET = "diagnosis-of-patient-7"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)


@pytest.fixture
def clients():
    return draw_samples()


def app(folder, data, algorithm=PERPCA):
    """Of another site, with a folder of its own."""
    return flower.client_app(lambda config: algorithm, data, folder=folder)


def unreadable(config):
    float(SECRET)


class Errors:
    """What of Flower's own errors reaches the server."""

    def __init__(self, federation):
        self.grid, self.found = federation.grid, []
        federation.grid.trouble = self

    def __call__(self, node, message, answer):
        self.found.append(str(answer.error) if answer.has_error() else "")
        return [answer]

    @property
    def text(self):
        return b"".join(self.grid.seen).decode("latin1") + "".join(self.found)


def test_the_words_of_an_exception_stay_where_they_are(tmp_path, clients, caplog):
    federation = Federation(tmp_path, PERPCA, clients)
    heard = Errors(federation)
    federation.grid.nodes[103] = (app(tmp_path / "3", unreadable), {"partition-id": 3})
    with pytest.raises(ValueError, match="node 103 refuses: make_data failed there") as caught:
        federation.run(1)
    assert SECRET not in heard.text and SECRET not in str(caught.value)
    assert f"no answer: could not convert string to float: '{SECRET}'" in caplog.text

    def failing(config):
        raise OSError(SECRET)

    for make in (failing, lambda config: None):
        broken = flower.client_app(make, lambda config: alone(clients, 3), folder=tmp_path / "3")
        federation.grid.nodes[103] = (broken, {"partition-id": 3})
        with pytest.raises(ValueError, match="node 103 refuses: make_algorithm or warm_start"):
            federation.run(1)
    assert SECRET not in heard.text


def test_other_machines_words_are_escaped(tmp_path, clients, caplog):
    lie = "x\n\x1b[31mINFO: round 9 of 9"

    def trouble(node, message, answer):
        said = packet_of(answer)
        if said.words["kind"] != "hello" or node != 103:
            return [answer]
        words = said.words | lies
        return [reply_of(said._replace(words=words), message)]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    for lies in (
        {"run": {"algorithm": [lie, ""]}},
        {"versions": {"jax": lie}},
        {"tag": lie},
        {"id": lie},
        {"kind": "refusal", "code": lie},
        {"kind": lie, "id": [lie]},
    ):
        if "versions" in lies:
            federation.run(1, out="versions")
        else:
            with pytest.raises(RefusedError, match=r"103|client 3") as caught:
                federation.run(1)
            assert str(caught.value).isprintable()
    assert all(line.isprintable() for line in caplog.messages) and "round 9" in caplog.text


def test_a_site_that_cannot_take_part_stays_out(tmp_path, clients, caplog):
    others = {
        "a missing file": (app(tmp_path / "a", lambda c: np.load("nowhere")), {"partition-id": 6}),
        "another algorithm": (
            app(tmp_path / "b", lambda c: alone(clients, 0), jf.pca.PerPCA(1, 1)),
            {"partition-id": 7},
        ),
        "no id": (app(tmp_path / "c", lambda c: alone(clients, 0)), {}),
        "a bad id": (app(tmp_path / "d", lambda c: alone(clients, 0)), {"partition-id": -1}),
        "a large id": (app(tmp_path / "e", lambda c: alone(clients, 0)), {"partition-id": 2**40}),
        "a word": (app(tmp_path / "f", lambda c: alone(clients, 0)), {"partition-id": "seven"}),
        "one that is taken": (
            app(tmp_path / "g", lambda c: alone(clients, 0)),
            {"partition-id": 2},
        ),
    }
    federation = Federation(tmp_path, PERPCA, clients)

    def trouble(node, message, answer):
        if number_of(message) == 2:
            for number, site in enumerate(others.values()):
                federation.grid.nodes[300 + number] = site
        return [answer]

    federation.grid.trouble = trouble
    check_equal(federation, federation.run(4), federation.fit(4))
    for number in range(len(others)):
        assert f"node {300 + number} stays out: " in caplog.text
    assert "node 306: wanted a partition-id of its own, got 2, which is that of node 102" in (
        caplog.text
    )


def test_sites_agree_on_features(tmp_path, clients, caplog):
    names = [f"gene{i}" for i in range(clients.features)]
    of_sites = {2: None} | dict.fromkeys((0, 1, 3, 4), names)

    def data(config):
        rows = np.asarray(alone(clients, config["partition-id"]).data.values[0])
        return jf.Clients.from_samples([rows], features=of_sites[config["partition-id"]])

    federation = Federation(tmp_path, PERPCA, clients)
    site = app(tmp_path / "nodes", data)
    nodes = {100 + i: (site, {"partition-id": i}) for i in range(len(clients))}
    federation.grid.nodes = nodes
    saved = federation.run(2)
    check_equal(federation, saved, federation.fit(2))  # site 2 goes by position
    wanted = {i: known and tuple(known) for i, known in of_sites.items()}
    assert saved.names.features == wanted[0]
    for i, known in wanted.items():
        assert jf.load(federation.local(i)).names.features == known
    turned = jf.Clients.from_samples([clients.data.values[0][:, ::-1]], features=names[::-1])
    in_order = like(turned, saved)
    assert in_order.names.features == wanted[0]
    np.testing.assert_array_equal(in_order.data.values[0], clients.data.values[0])

    federation.grid.nodes = {}  # the server itself remembers them
    again = federation.run(2, clients=len(nodes), patience=0.01)
    assert again.names.features == wanted[0]
    for own, words in (
        (names[::-1], f"wanted the order gene0, .*, got {names[-1]}, "),
        (["age", *names[1:]], r"wanted gene0, .*, got age, .*\(without gene0, with age besides\)"),
    ):
        # The grid brings answers last first: site 4 is the first.
        of_sites[3] = own
        federation.grid.nodes = nodes
        federation.grid.run_id += 1  # nodes read their data once a run
        with pytest.raises(RefusedError, match=f"features of client 3: {words}"):
            federation.run(2, out=own[0])
    # Names of another number of features are none of a site of ours.
    of_sites[3] = names
    federation.grid.run_id += 1

    def trouble(node, message, answer):
        said = packet_of(answer)
        if said.words["kind"] != "hello" or node != 103:
            return [answer]
        return [reply_of(said._replace(words=said.words | {"features": names[1:]}), message)]

    federation.grid.trouble = trouble
    with pytest.raises(RefusedError, match=r"node 103: .* \(ValueError: 'features: wanted"):
        federation.run(2, out="lies")


def test_two_sites_with_one_id_are_named(tmp_path, clients):
    federation = Federation(tmp_path, PERPCA, clients)
    federation.grid.nodes[104] = (
        app(tmp_path / "other", lambda config: alone(clients, 4)),
        {"partition-id": 2},
    )
    # The grid brings answers last first.
    words = "node 102: wanted a partition-id of its own, got 2, which is that of node 104"
    with pytest.raises(RefusedError, match=words):
        federation.run(1)


@pytest.mark.slow
def test_two_nodes_with_one_folder_are_one_client(tmp_path, clients):
    """As when a machine is started twice, or returns while its old connection lives."""
    federation = Federation(tmp_path, PERPCA, clients, order=[0, 1, 2, 2, 3, 4, 1])
    check_equal(federation, federation.run(2, clients=5), federation.fit(2))


@pytest.mark.parametrize(
    "error",
    [OSError(28, SECRET), pytest.param(MemoryError(SECRET), marks=pytest.mark.slow)],
    ids=["disk", "memory"],
)
def test_a_client_that_fails_in_a_round_is_absent(tmp_path, clients, monkeypatch, caplog, error):
    federation = Federation(tmp_path, PERPCA, clients)
    heard, real = Errors(federation), nodes._NodeRun.round

    def failing(self, asked):
        if self.node.id == 3 and asked.words["round"] == 2:
            raise error
        return real(self, asked)

    monkeypatch.setattr(nodes._NodeRun, "round", failing)
    saved = federation.run(3, **HURRIED)
    check_equal(federation, saved, federation.fit(3, participation=absent(3, [(2, 3)])))
    assert "round 2: client 3 refuses" in caplog.text and SECRET not in heard.text
    with pytest.raises(RefusedError, match="round 2: client 3 refuses"):
        federation.run(3, out="without")


def liar(numbers):
    """Sends these in place of its own in round 2."""

    def trouble(node, message, answer):
        said = packet_of(answer)
        if number_of(message) != 2 or node != 103:
            return [answer]
        payload = np.frombuffer(said.parts[0], np.float32).copy()
        payload[-1] = numbers
        parts = [payload.tobytes(), *said.parts[1:]]
        return [reply_of(said._replace(parts=parts), message)]

    return trouble


ROBUST = jf.aggregation.Robust(PERPCA, groups=5)


@pytest.mark.parametrize(
    "algorithm", [PERPCA, pytest.param(ROBUST, marks=pytest.mark.slow)], ids=["plain", "robust"]
)
@pytest.mark.parametrize(
    "numbers", [np.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, 1e30))]
)
def test_numbers_that_are_none_spoil_nothing(tmp_path, clients, caplog, algorithm, numbers):
    federation = Federation(tmp_path, algorithm, clients, trouble=liar(numbers))
    with pytest.raises(RefusedError, match="round 2: client 3: wanted finite numbers"):
        federation.run(3)
    federation.grid.trouble = None
    check_equal(federation, federation.run(3), federation.fit(3))  # it can go on
    if numbers == 1e30:
        return
    other = Federation(tmp_path / "late", algorithm, clients, trouble=liar(numbers))
    saved = other.run(3, **HURRIED)
    assert "round 2: client 3: wanted finite numbers" in caplog.text
    check_equal(other, saved, other.fit(3, participation=absent(3, [(2, 3)])))


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, clients, monkeypatch):
    """Whatever makes it of finite messages."""

    class Overflowing(jf.pca.SubspaceIteration):
        def server_step(self, key, server, message):
            server, found = super().server_step(key, server, message)
            return jax.tree.map(lambda x: x / 0, server), found

    federation = Federation(tmp_path, Overflowing(2), clients)
    with pytest.raises(FloatingPointError, match="round 1: the messages are finite"):
        federation.run(2)
    assert [path.name for path in (tmp_path / "out" / "server").glob("*.npz")] == ["00000000.npz"]


def test_an_answer_to_another_question_is_none(tmp_path, clients):
    """Of an earlier round, or for another weight or place."""
    kept = {}

    def trouble(node, message, answer):
        kept[number_of(message), node] = answer
        if number_of(message) == 2 and node == 103:
            return [reply_of(packet_of(kept[1, 103]), message)]
        return [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    with pytest.raises(RefusedError, match="client 3: wanted an answer to its question"):
        federation.run(3)


def test_a_site_that_is_gone_at_the_end_loses_its_own_model_only(tmp_path, clients, caplog):
    """The shared one is made by then."""

    def trouble(node, message, answer):
        ends = packet_of(message).words["kind"] == "finish"
        return [] if ends and node == 103 else [answer]

    federation = Federation(tmp_path, PERPCA, clients, trouble=trouble)
    saved = federation.run(2, patience=0.2)
    np.testing.assert_array_equal(saved.result.shared, federation.fit(2).result.shared)
    assert "clients [3] were not there to make their own models" in caplog.text


def test_a_run_begins_in_spite_of_a_site_that_does_not_fit(tmp_path, clients, caplog):
    """As soon as enough others are there, which may come later."""
    federation = Federation(tmp_path, PERPCA, clients)
    grid = federation.grid
    late = {node: grid.nodes.pop(node) for node in (103, 104)}
    grid.nodes[300] = (app(tmp_path / "3", unreadable), {"partition-id": 9})

    def trouble(node, message, answer):
        grid.nodes.update(late if node == 300 else {})
        return [answer]

    grid.trouble = trouble
    check_equal(federation, federation.run(2, clients=5), federation.fit(2))
    assert "node 300 stays out: " in caplog.text
    for node in late:
        del grid.nodes[node]
    grid.trouble = None
    with pytest.raises(
        TimeoutError, match=r"wanted 5, .* there are 3: .*node 300 refuses: make_data"
    ):
        federation.run(2, clients=5, out="other", patience=0.1)


def test_unlike_units_are_in_the_logs(tmp_path, caplog):
    samples = np.asarray(draw_samples().data.values).copy()
    samples[2, :, 0] *= 1e4
    federation = Federation(tmp_path, PERPCA, jf.Clients.from_samples(samples))
    federation.run(1)
    [feature, client] = [line for line in caplog.messages if line.startswith("clients: wanted")]
    assert "similar and moderate magnitude" in feature and 'precision="double"' in feature
    # The server compares clients.
    assert "mean squared norms, by client id, 2 (" in client
    caplog.clear()


@pytest.mark.parametrize(
    "channel", [jf.channel.gaussian(1e-3, 1e3), jf.channel.secure_sum(5, bits=24, bound=10.0)]
)
def test_energies_do_not_tell_what_is_hidden(tmp_path, clients, channel):
    def energy(wire):
        node = nodes.Node(0, PERPCA, alone(clients, 0), wire, None, tmp_path)
        return node.answer(HELLO).words["energy"]

    lossless = jf.channel.lossless()
    assert energy(jf.Wire(channel, *[lossless] * 3)) is None
    values = np.asarray(clients.data.values[0], np.float64)
    shown = energy(jf.Wire(*[lossless] * 4))
    np.testing.assert_allclose(shown, np.sum(values**2) / int(clients.data.count[0]), rtol=1e-6)
