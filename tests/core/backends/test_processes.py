"""Runs across processes, each with its own clients: the same numbers, and clear errors."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import main
from jaxfed.deploy import processes
from tests import examples
from tests.core.backends.processes import COUNTS, FIT, launch
from tests.helpers import ROOT, gaussian

pytestmark = pytest.mark.timeout(600)
QUICK = "PerPCA-ranks,MVLSA"


@pytest.fixture
def workers(environment, tmp_path):
    """Processes that end well, and find the test modules."""
    paths = [str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    # Programs compiled for one of two processes serve the next test too.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = environment | cache | {"PYTHONPATH": ":".join(paths)}

    def run(task, count, *more, fails=False, **options):
        ended = launch(task, count, tmp_path, environment, *more, **options)
        if not fails:
            for place, one in enumerate(ended):
                assert one.code == 0, f"process {place} ended with {one.code}:\n{one.said[-4000:]}"
        return ended

    return run


def kept(folder, name, place):
    """What a worker kept under a name."""
    with np.load(Path(folder, f"{name}-{place}.npz")) as file:
        return list(file.values())


def check_algorithms(folder, count, names):
    for name in names.split(","):
        for part in ("shared", "history"):
            wanted = kept(folder, f"{name}-{part}", "alone")
            for place in range(count):
                for x, y in zip(kept(folder, f"{name}-{part}", place), wanted, strict=True):
                    np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8, err_msg=f"{name} {part}")
        parts = [kept(folder, f"{name}-local", place) for place in range(count)]
        wanted = kept(folder, f"{name}-local", "alone")
        for leaves, y in zip(zip(*parts, strict=True), wanted, strict=True):
            assert len(y) == len(COUNTS)
            np.testing.assert_allclose(
                np.concatenate(leaves), y, rtol=1e-7, atol=1e-8, err_msg=f"{name} local"
            )


@pytest.mark.slow
def test_two_processes_equal_one(workers, tmp_path):
    workers("algorithms", 2, QUICK)
    check_algorithms(tmp_path, 2, QUICK)


# The first example of each exported algorithm.
FIRST = [
    next(n for n in examples.GOOD if n.startswith(kind.__name__)) for kind in examples.EXAMPLES
]


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_every_algorithm_equals_one_process(workers, tmp_path, part, count, devices):
    names = ",".join(FIRST[part::3])
    workers("algorithms", count, names, devices=devices, timeout=1800)
    check_algorithms(tmp_path, count, names)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_what_is_composed_around_a_run(workers, count):
    ended = workers("composed", count, timeout=500)
    assert "12/12" in ended[0].said or "round/s" in ended[0].said
    assert all("round/s" not in one.said for one in ended[1:])


@pytest.mark.slow
def test_the_implicit_derivative_equals_that_of_one_process(workers, tmp_path):
    workers("derivative", 2, timeout=500)
    one, other, alone = (kept(tmp_path, "derivative", place) for place in (0, 1, "alone"))
    assert np.abs(alone[2]) > 1e-3
    np.testing.assert_allclose([one[2], other[2]], [alone[2]] * 2, rtol=1e-7)
    for *parts, whole in zip(one[:2], other[:2], alone[:2], strict=True):
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_in_all(workers):
    ended = workers("refused", 2)
    assert [one.said.count("refused: True") for one in ended] == [10, 10], ended


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_process_dies_and_the_run_goes_on(workers, tmp_path, dies):
    ended = workers("saving", 2, dies, fails=True)
    other = ended[1 - int(dies)]
    assert other.code != 0 and other.seconds < 60
    assert "start all of them again" in other.said or "another task died" in other.said
    workers("saving", 2)
    resumed = [kept(tmp_path, "saved", place) for place in range(2)]
    (alone,) = workers("saving", 1, fails=True)
    assert "belongs to another run: processes was 2 and is 1" in alone.said
    Path(tmp_path, "saved").rename(tmp_path / "of another run")
    workers("saving", 2)
    for place, arrays in enumerate(resumed):
        for x, y in zip(arrays, kept(tmp_path, "saved", place), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_no_process_holds_all_data(workers, tmp_path):
    """In units of one process's data; all processes' are four."""
    workers("memory", 4, timeout=500)
    for place in range(4):
        found = json.loads(Path(tmp_path, f"memory-{place}").read_text())
        assert found["largest"] <= 1.01, found
        assert found["peak"] < 4, found


@pytest.mark.slow
def test_the_command_line_fits_files_of_several_processes(workers, tmp_path):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(5, 20, 4)) * [3, 2, 1, 0.5]
    whole = Path(tmp_path, "whole")
    for i, (place, array) in enumerate(zip((0, 0, 0, 1, 1), arrays, strict=True)):
        for folder in (Path(tmp_path, "data", str(place)), whole):
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"client{i}.npy", array)
    first, second = workers("command", 2, "--held-out", "0")
    assert "5 clients, 3 in this process" in first.said
    assert "5 clients, 2 in this process" in second.said
    alone = ["--held-out", "0", "--data", str(whole), "--out", str(tmp_path / "alone")]
    assert main([*FIT, *alone]) == 0
    wanted = jf.load(tmp_path / "alone" / "result.npz")
    found = [jf.load(tmp_path / "out" / f"process{place}" / "result.npz") for place in range(2)]
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found[0].history["objective"], wanted.history["objective"], **close)
    np.testing.assert_allclose(
        np.abs(found[1].result.shared), np.abs(wanted.result.shared), **close
    )
    local = np.concatenate([one.result.local for one in found])
    np.testing.assert_allclose(np.abs(local), np.abs(wanted.result.local), **close)
    assert [one.clients for one in found] == [5, 5]
    assert (
        main(
            [
                "transform",
                str(tmp_path / "out" / "process1" / "result.npz"),
                "--data",
                str(tmp_path / "data" / "1"),
                "--out",
                str(tmp_path / "scores"),
            ]
        )
        == 0
    )
    # Both with the same folder would have every client twice.
    np.save(tmp_path / "data" / "1" / "client0.npy", arrays[0])
    for one in workers("command", 2, "--force", fails=True):
        assert one.code == 2 and "--data: wanted other clients in each process" in one.said


def test_bad_cluster_settings_are_refused(monkeypatch):
    for arguments, words in (
        (("127.0.0.1", 2, 0), r"coordinator: wanted an address and a port"),
        (("127.0.0.1:1", 2, 2), r"process: wanted one from 0 to 1, got 2"),
        (("127.0.0.1:1", 2), r"process: wanted a whole number"),
        (("127.0.0.1:1", 0, 0), r"processes: wanted a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            processes.initialize(*arguments)
    monkeypatch.setenv("JAXFED_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"processes: wanted a whole number"):
        processes.initialize()


def test_weights_by_samples_need_their_numbers():
    """Second moments without numbers of samples had equal weights, without a word."""
    matrices, spread = np.stack([np.eye(3)] * 4), jf.Clients.from_process_local
    counted = jf.Clients.from_moments(matrices, counts=[1, 2, 3, 2])
    found = spread(counted, backend=jf.backend.shard(1), weights="samples")
    np.testing.assert_allclose(found.weights, [1 / 8, 2 / 8, 3 / 8, 2 / 8])
    with pytest.raises(ValueError, match=r"^weights: wanted 'equal' or numbers, got 'samples'"):
        moments = jf.Clients.from_moments(matrices)
        spread(moments, backend=jf.backend.shard(1), weights="samples")


@pytest.mark.slow
def test_one_process_has_all_of_its_clients(key):
    """The same program runs in one process, on its own devices."""
    own = gaussian(COUNTS, (1,) * 4)
    backend = jf.backend.shard(4)
    clients = jf.Clients.from_process_local(own, backend=backend)
    assert (len(clients), clients.blocks, len(clients.ids)) == (5, (2, 2, 1, 0), 8)
    found = jf.fit(
        jf.pca.PerPCA(1, 1, solver="gradient"), clients, rounds=2, key=key, backend=backend
    )
    wanted = jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), own, rounds=2, key=key)
    np.testing.assert_allclose(
        np.abs(clients.own(found.result.local)), np.abs(wanted.result.local), atol=1e-4
    )
    assert found.history["participants"].tolist() == [5, 5]
