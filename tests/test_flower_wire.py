"""Messages that nobody of jaxfed would write: refused before anything is computed or written."""

import json

import jax
import numpy as np
import pytest
from scipy.sparse import csr_array
from test_contract import draw_samples

import jaxfed as jf

pytest.importorskip("flwr")
from test_flower import alone

from jaxfed.core.channel import ways
from jaxfed.deploy import node as nodes
from jaxfed.deploy.data import common, told
from jaxfed.deploy.node import Node
from jaxfed.deploy.run import Run
from jaxfed.deploy.wire import Packet

ALGORITHM = jf.pca.PerPCA(2, 2, step_size=0.05)


@pytest.fixture
def node(tmp_path):
    """The first of five clients, and its folder."""
    clients = alone(draw_samples(), 0)
    return Node(0, ALGORITHM, clients, ways(jf.channel.lossless()), None, tmp_path / "nodes")


def question(node, kind="first", **run):
    """Of a run in which some words are others."""
    words = Run("0123456789abcdef", 2, 5, told(node.data), jax.random.key(0)).words
    own = {"kind": kind, "position": 0, "weight": 0.2, "base": 0, "attempt": "ab"}
    return Packet(own | {"run": words | run})


def test_an_honest_question_is_answered(node):
    assert node.answer(question(node)).words["id"] == 0
    assert len(node.answer(question(node, "keys")).parts) == 2


@pytest.mark.parametrize("kind", ["first", "keys"])
@pytest.mark.parametrize("name", ["../x", "{}/x", "a/b", "..", "", "A", "a" * 300, 7, None, ["a"]])
def test_a_server_does_not_choose_where_a_node_writes(node, tmp_path, kind, name):
    name = name.format(tmp_path) if isinstance(name, str) else name
    with pytest.raises(ValueError, match=r"client 0: run: wanted .* hexadecimal"):
        node.answer(question(node, kind, name=name))
    assert not list(tmp_path.iterdir())


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
    monkeypatch.setattr(nodes, "MEMORY", 2 * 10**6)
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
        node.answer(question(node, like=told(node.data) | like))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "run",
    [
        {"rounds": -1}, {"rounds": True}, {"size": 0}, {"size": 2**40}, {"size": "5"},
        {"key": {"data": [1, 2]}}, {"key": {"data": [-1, 2], "impl": "threefry2x32"}},
        {"key": {"data": [[1, 2]], "impl": "threefry2x32"}}, {"key": None},
        {"key": {"data": [1, 2], "impl": ["x"]}}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_that_is_none_is_refused(node, tmp_path, run):
    with pytest.raises(ValueError, match=r"client 0: (run|rounds|size|key): wanted"):
        node.answer(question(node, **run))
    assert not list(tmp_path.iterdir())


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
    like = common({0: told(jax.tree.map(lambda x: x[0], clients.data))})
    run = Run.read(json.loads(json.dumps(Run("ab", 2, 2, like, jax.random.key(0)).words)))
    assert run.like == like == common({-1: run.like, 0: like})
