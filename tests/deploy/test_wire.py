"""Messages that nobody of jaxfed would write: refused before anything is computed or written."""

import json
import os
import stat

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from jaxfed.core.common.files import locked, replacing
from jaxfed.core.wire.wire import checked_wire
from jaxfed.deploy import data, exchange
from jaxfed.deploy.data import common, describe
from jaxfed.deploy.exchange import RefusedError
from jaxfed.deploy.messages import HEAD, WORDS, Packet, packet_of, reply_of
from jaxfed.deploy.node import Node
from jaxfed.deploy.run import Run
from tests.deploy.federation import Federation, alone

ALGORITHM = jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05)


@pytest.fixture
def node(tmp_path):
    """The first of five clients, and its folder."""
    clients = alone(draw_samples(), 0)
    return Node(
        0, ALGORITHM, clients, checked_wire(jf.channel.lossless()), None, tmp_path / "nodes"
    )


def question(node, kind="first", **run):
    """Of a run in which some words are others."""
    words = Run("0123456789abcdef", 2, 5, describe(node.data), jax.random.key(0)).words
    own = {"kind": kind, "position": 0, "weight": 0.2, "base": 0, "attempt": "ab"}
    return Packet(own | {"run": words | run})


def written(folder):
    """All files below it."""
    return [str(x.relative_to(folder)) for x in folder.rglob("*") if not x.is_dir()]


def test_an_honest_question_is_answered(node):
    assert node.answer(question(node)).words["id"] == 0
    assert len(node.answer(question(node, "keys")).parts) == 2


@pytest.mark.parametrize("kind", ["first", "keys"])
@pytest.mark.parametrize("name", ["../x", "{}/x", "a/b", "..", "", "A", "a" * 300, 7, None, ["a"]])
def test_a_server_does_not_choose_where_a_node_writes(node, tmp_path, kind, name):
    name = name.format(tmp_path) if isinstance(name, str) else name
    with pytest.raises(ValueError, match=r"client 0: run: wanted .* hexadecimal"):
        node.answer(question(node, kind, name=name))
    assert written(tmp_path) == ["nodes/client-0/.lock"]


def test_a_link_out_of_the_folder_is_not_followed(node, tmp_path):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "abcd").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match=r"client 0: run: wanted a folder in .*nodes"):
        node.answer(question(node, name="abcd"))
    assert not list((tmp_path / "elsewhere").iterdir())


LONG = {"values": [[10**5, 6], "float32"], "count": [[], "float32"]}


@pytest.mark.parametrize(
    "run",
    [{"like": {"kind": "Samples", "fields": {}, "arrays": LONG}}, {"size": 10**6}],
    ids=("like", "size"),
)
def test_what_does_not_fit_into_memory_is_refused(node, tmp_path, monkeypatch, run):
    monkeypatch.setattr(data, "MEMORY", 2 * 10**6)
    node.answer(question(node))
    with pytest.raises(ValueError, match=r"client 0: run: wanted .* at most 2 MB.*, got .* MB"):
        node.answer(question(node, **run))


def arrays(**others):
    return {"arrays": {"values": [[12, 6], "float32"], "count": [[], "float32"]} | others}


@pytest.mark.parametrize(
    "like",
    [
        arrays(values=[[4, 6], "float32"]),  # fewer than there are
        arrays(values=[[12, 7], "float32"]),
        arrays(values=[[12, 6], "float64"]),
        arrays(values=[[-12, 6], "float32"]),
        arrays(values=[[2**40, 6], "float32"]),
        arrays(values=[[12.0, 6], "float32"]),
        arrays(values=[[6], "float32"]),
        arrays(values=[[], "float32"]),
        arrays(values=[[12, 6], "object"]),
        arrays(values=[[12, 6], "nonsense"]),
        arrays(values=[[12, 6]]),
        arrays(values=None),
        arrays(values=7),
        arrays(more=None),
        {"arrays": {}},
        {"arrays": []},
        {"arrays": None},
        {"fields": {"shape": [1, 2]}},
        {"fields": None},
        {"kind": "View"},
        {"kind": ["Samples"]},
        {"kind": None},
    ],
    ids=str,
)
def test_shapes_that_are_not_those_of_the_data_are_refused(node, tmp_path, like):
    with pytest.raises(ValueError, match=r"client 0: (run|data|length): wanted"):
        node.answer(question(node, like=describe(node.data) | like))
    assert written(tmp_path) == ["nodes/client-0/.lock"]


@pytest.mark.parametrize(
    "run",
    [
        {"rounds": -1},
        {"rounds": True},
        {"size": 0},
        {"size": 2**40},
        {"size": "5"},
        {"key": {"data": [1, 2]}},
        {"key": {"data": [-1, 2], "impl": "threefry2x32"}},
        {"key": {"data": [[1, 2]], "impl": "threefry2x32"}},
        {"key": None},
        {"key": {"data": [1, 2], "impl": ["x"]}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_run_that_is_none_is_refused(node, tmp_path, run):
    with pytest.raises(ValueError, match=r"client 0: (run|rounds|size|key): wanted"):
        node.answer(question(node, **run))
    assert written(tmp_path) == ["nodes/client-0/.lock"]


@pytest.mark.parametrize("words", [None, 7, [], {}, {"name": "ab"}], ids=str)
def test_words_that_are_no_run_are_refused(words):
    with pytest.raises(ValueError, match="run: wanted"):
        Run.read(words)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_run_survives_its_words(sparse):
    """As JSON writes them, shapes of sparse views among them."""
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(5, 3 + j)).astype(np.float32) for j in range(2)]
    if sparse:
        clients = jf.gcca.Views.from_sparse([csr_array(view) for view in views])
    else:
        clients = jf.gcca.Views.from_arrays(views)
    like = common({0: describe(jax.tree.map(lambda x: x[0], clients.data))})
    run = Run.read(json.loads(json.dumps(Run("ab", 2, 2, like, jax.random.key(0)).words)))
    assert run.like == like == common({-1: run.like, 0: like})


# --- packets -------------------------------------------------------------------------------------

HEADS = {
    "negative": '{"version": 1, "lengths": [5, -2]}',
    "boolean": '{"version": 1, "lengths": [true, 2]}',
    "fraction": '{"version": 1, "lengths": [1.0, 2]}',
    "huge": '{"version": 1, "lengths": [9223372036854775807, 9223372036854775807, 5]}',
    "number": '{"version": 1, "lengths": 3}',
    "object": '{"version": 1, "lengths": {"3": 3}}',
    "text": '{"version": 1, "lengths": "\\u0003"}',
    "nothing": '{"version": 1, "lengths": null}',
    "lists": '{"version": 1, "lengths": [[3]]}',
    "too few": '{"version": 1, "lengths": [2]}',
    "version 1.0": '{"version": 1.0, "lengths": [3]}',
    "version true": '{"version": true, "lengths": [3]}',
    "version 2": '{"version": 2, "lengths": [3]}',
    "no version": '{"lengths": [3]}',
    "list": "[]",
    "whole number": "7",
    "null": "null",
    "deep list": "[" * 10**5,
    "deep object": '{"a":' * 10**5,
    "digits": '{"version": ' + "1" * 10**4 + ', "lengths": [3]}',
    "none": None,
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="message: wanted") as caught:
        Packet.read(HEADS[name], b"abc")
    assert len(str(caught.value)) < 400


def check_total(head, body):
    """What reads at all is a packet, which is written as it was read."""
    try:
        packet = Packet.read(head, body)
    except ValueError:
        return None
    assert packet.body == body
    assert all(type(part) is bytes for part in packet.parts)
    again = Packet.read(packet.head, packet.body)
    assert again.head == packet.head and again.parts == packet.parts
    return packet


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
LENGTHS = JSON | st.lists(st.integers(-9, 9) | st.booleans() | st.integers())


@given(
    st.binary() | st.binary().map(lambda text: b'{"version": 1, "lengths": ' + text), st.binary()
)
def test_any_text_is_a_packet_or_refused(head, body):
    check_total(head.decode("utf8", "surrogateescape"), body)


@given(JSON, st.sampled_from([1, 1.0, True, 2]) | JSON, LENGTHS, st.binary(max_size=20))
def test_any_object_is_a_packet_or_refused(words, version, lengths, body):
    own = {"version": version, "lengths": lengths}
    head = json.dumps(words | own if isinstance(words, dict) else own)
    packet = check_total(head, body)
    fits = (
        type(version) is int
        and version == 1
        and isinstance(lengths, list)
        and all(type(n) is int and n >= 0 for n in lengths)
        and sum(lengths) == len(body)
    )
    assert (packet is not None) == fits


@given(st.dictionaries(st.text(), JSON), st.lists(st.binary()), st.data())
def test_what_is_written_is_read_and_what_was_changed_is_none_or_another(words, parts, data):
    packet = Packet({k: v for k, v in words.items() if k not in ("version", "lengths")}, parts)
    read = check_total(packet.head, packet.body)
    assert read is not None and read.head == packet.head and read.parts == parts
    head, body = bytearray(packet.head.encode()), packet.body
    place = data.draw(st.integers(0, len(head) - 1))
    head[place] = data.draw(st.integers(0, 127))
    check_total(head.decode(), body)
    check_total(packet.head[:place], body)
    with pytest.raises(ValueError, match="message: wanted lengths of"):
        Packet.read(packet.head, body + b"x")


# --- replies -------------------------------------------------------------------------------------

PARTS = [b"abc"]
BAD = {
    "hello": {
        "text": "nonsense",
        "deep": "[" * 10**5,
        "no id": {"id": None},
        "true": {"id": True},
        "negative": {"id": -1},
        "shapes": {"data": None},
        "axes": {"data": {"kind": "Samples"}},
        "samples": {"samples": "x"},
        "weights": {"weights": "nonsense"},
        "weight": {"weights": 7},
        "run": {"run": None},
        "other run": {"run": {}},
        "versions": {"versions": []},
    },
    "first": {"short": PARTS, "broken": {"broken": None}},
    "round": {
        "deep": "[" * 10**5,
        "no id": {"id": None},
        "question": {"question": "1"},
        "no parts": [],
        "short": PARTS,
    },
    "finish": {"text": "nonsense"},
    "keys": {"no parts": [], "short": [b"a", b"b"]},
    "shares": {"one": PARTS},
    "masked": {"short": PARTS},
    "unmask": {"no parts": [], "others": [b"abc"] * 5},
}


FIRST = [(kind, next(iter(BAD[kind]))) for kind in BAD]
OTHERS = [(kind, name) for kind in BAD for name in BAD[kind] if (kind, name) not in FIRST]


@pytest.mark.parametrize(
    ("kind", "name"), [*FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_bad_reply_is_refused_with_its_sender(tmp_path, monkeypatch, caplog, kind, name):
    monkeypatch.setattr(exchange, "PAUSE", 0.0)
    bad, hidden = BAD[kind][name], kind in ("keys", "shares", "masked", "unmask")
    wanted = "round" if kind == "masked" else kind

    def trouble(node, message, answer):
        if node != 103 or packet_of(message).words["kind"] != wanted:
            return [answer]
        if isinstance(bad, str):
            answer.content[WORDS][HEAD] = bad
            return [answer]
        said = packet_of(answer)
        if isinstance(bad, dict):
            return [reply_of(said._replace(words={**said.words, **bad}), message)]
        return [reply_of(said._replace(parts=bad), message)]

    ways = jf.Wire(jf.channel.secure_sum(5, bits=24, bound=100.0), jf.channel.lossless())
    algorithm = jf.pca.SubspaceIteration(2) if hidden else ALGORITHM
    channel = ways if hidden else None
    federation = Federation(tmp_path, algorithm, draw_samples(), channel=channel, trouble=trouble)
    if kind == "finish" or (kind, name) == ("unmask", "no parts"):  # it works without
        federation.run(1, patience=5.0)
        assert "client 3: wanted" in caplog.text
        return
    # Which one of all shares is wrong is not seen before they are put together.
    sender = "node 103|client 3" if kind != "unmask" else "round 1"
    with pytest.raises(RefusedError, match=sender) as caught:
        federation.run(1, patience=5.0)
    assert len(str(caught.value)) < 600


# --- files ---------------------------------------------------------------------------------------


def modes(folder):
    """Of all that is in a folder, and of the folder."""
    found = [folder, *folder.rglob("*")]
    return {(stat.S_ISDIR(x.stat().st_mode), stat.S_IMODE(x.stat().st_mode)) for x in found}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="elsewhere files have no such modes")
@pytest.mark.parametrize("there", [False, True])
def test_what_a_node_keeps_is_its_owners_alone(node, tmp_path, monkeypatch, there):
    before = os.umask(0o022)
    monkeypatch.setattr(exchange, "PAUSE", 0.0)
    noise = jf.Wire(jf.channel.gaussian(1e3, 1e-3), jf.channel.lossless())
    try:
        if there:
            (tmp_path / "nodes").mkdir(0o755)
        federation = Federation(tmp_path, ALGORITHM, draw_samples(), channel=noise)
        federation.run(2)
        assert node.answer(question(node, "keys"))
    finally:
        os.umask(before)
    kept = {path.name for path in (tmp_path / "nodes").rglob("*")}
    assert {"00000002.npz", "00000000.npz", "secret", "result.npz", "ab.json"} <= kept
    found = [modes(each) for each in (tmp_path / "nodes").iterdir()]
    found.append(modes(tmp_path / "out"))
    assert set().union(*found) == {(True, 0o700), (False, 0o600)}
    # A folder that somebody made stays as it is.
    assert stat.S_IMODE((tmp_path / "nodes").stat().st_mode) == (0o755 if there else 0o700)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere files have no such modes")
def test_what_lies_in_a_folder_does_not_open_a_file(tmp_path):
    """Neither what a crash left, nor a link under the name of a temporary file."""
    path, elsewhere = tmp_path / "secret", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / ".part-secret").symlink_to(elsewhere)
    parts = set()
    for private in (True, True, False):
        with replacing(path, private=private) as part:
            assert part.name.startswith(".part-") and part.name.endswith("-secret")
            parts.add(part)
            part.write_text("x")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o666 & ~umask())
    assert len(parts) == 3 and elsewhere.read_text() == "mine"
    (tmp_path / ".lock").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError), locked(tmp_path, "out"):
        pass
    assert not (tmp_path / "nothing").exists()


def umask():
    """This process's own."""
    found = os.umask(0)
    os.umask(found)
    return found
