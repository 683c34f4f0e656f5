"""Clients that are read block by block give the results of those in memory, using less of it."""

import os
import re
import threading
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.clients.source import read_ahead
from jaxfed.core.contract.reduction import Mean
from jaxfed.core.run import streamed
from jaxfed.core.store.identity import fingerprint
from tests.core.clients.test_buckets import COUNTS, FEATURES, TIGHT, Probe, essence, samples
from tests.helpers import fit, gaussian_samples

STATUS = Path("/proc/self/status")
LARGE = 8 * FEATURES * max(COUNTS)  # bytes of the largest client


class Watched:
    """A sequence of clients that records what is read, and by which threads."""

    def __init__(self, arrays):
        self.arrays, self.read, self.threads = arrays, [], set()

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, place):
        self.read.append(place)
        self.threads.add(threading.current_thread())
        return self.arrays[place]


def from_source(**options):
    """The test's clients in several blocks."""
    return jf.Clients.from_source(samples(), weights="samples", block_bytes=2 * LARGE, **options)


def in_memory():
    return jf.Clients.from_samples(samples(), weights="samples")


def fit_probe(clients, rounds=3, **options):
    return jf.fit(Probe(jnp.asarray(0.1)), clients, rounds=rounds, key=jax.random.key(0), **options)


def test_a_source_describes_its_clients(x64):
    clients = from_source()
    reader = clients.data.reader
    assert len(clients) == len(COUNTS) and clients.features == FEATURES
    assert len(reader.blocks) > 2
    assert repr(clients).startswith("Clients(10 clients: 3 to 60 samples of 4 features, float64, r")
    np.testing.assert_array_equal(clients.counts, COUNTS)
    np.testing.assert_allclose(clients.weights, in_memory().weights)
    seen = np.concatenate([block.places for block in reader.blocks])
    assert sorted(seen) == list(range(len(COUNTS)))
    for number, (places, rows) in enumerate(reader.blocks):
        values, counts = reader.read(number, number % 2)
        assert values.nbytes <= 2 * LARGE and values.ctypes.data % 64 == 0
        np.testing.assert_array_equal(counts, np.take(COUNTS, places))
        for own, place in zip(values, places, strict=True):
            np.testing.assert_array_equal(own[: COUNTS[place]], samples()[place])
            assert len(own) == rows and (own[COUNTS[place] :] == 0).all()


def test_two_blocks_at_a_time(x64):
    """The third block is not read before the first is released."""
    watched = Watched(samples())
    clients = jf.Clients.from_source(watched, counts=COUNTS, bucket=None, block_bytes=LARGE)
    watched.read.clear()
    taken = read_ahead(clients.data.reader, range(len(COUNTS)))
    for number in range(3):
        next(taken)
        time.sleep(0.05)
        assert watched.read == list(range(number + 2))
    taken.close()
    assert len(watched.threads - {threading.main_thread()}) == 1


def test_a_memory_map_is_used_in_place(tmp_path):
    """An aligned array of the right type is not copied; others are."""
    data = np.random.default_rng(0).normal(size=(6, 8, 16)).astype(np.float32)
    np.save(tmp_path / "all.npy", data)
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    for source in (mapped, data.copy()):
        reader = jf.Clients.from_source(source, block_bytes=2 * data[0].nbytes).data.reader
        for number, (block, (values, _)) in enumerate(read_ahead(reader, range(3))):
            assert np.shares_memory(values, source) == (source.ctypes.data % 64 == 0)
            assert list(block.places) == [2 * number, 2 * number + 1]
            np.testing.assert_array_equal(values, data[block.places])
    np.save(tmp_path / "double.npy", data.astype(np.float64))
    double = np.load(tmp_path / "double.npy", mmap_mode="r")
    odd = np.frombuffer(b"...." + data.tobytes(), np.uint8)[4:].view(np.float32)
    for source in (double, mapped[:, ::2], odd.reshape(data.shape)):
        reader = jf.Clients.from_source(source).data.reader
        values, _ = reader.read(0, 0)
        assert values.ctypes.data % 64 == 0 and values.dtype == np.float32
        assert values.flags.c_contiguous
        assert not np.shares_memory(values, source) or source.ctypes.data % 64 == 0
        np.testing.assert_array_equal(values, source.astype(np.float32))


def held() -> float:
    """How much of mapped files this process has in memory, in MiB."""
    return int(re.search(r"RssFile:\s+(\d+) kB", STATUS.read_text())[1]) / 2**10


def test_private_pages_are_kept(tmp_path):
    """Pages of a private map that was written to would be lost if their memory were released."""
    np.save(tmp_path / "all.npy", np.zeros((4, 64, 64), np.float32))
    own = np.load(tmp_path / "all.npy", mmap_mode="c")
    own += 1
    reader = jf.Clients.from_source(own, block_bytes=2 * own[0].nbytes).data.reader
    for _ in range(2):
        for _, (values, _) in read_ahead(reader, range(2)):
            np.testing.assert_array_equal(values, 1)


@pytest.mark.skipif(not STATUS.exists(), reason="the system says in another way what is held")
@pytest.mark.parametrize("at_once", [True, False])
def test_pages_are_resident_once_read(tmp_path, monkeypatch, at_once):
    """The thread that reads ahead waits for the disk, not the program that uses the pages."""
    if not at_once:
        monkeypatch.setattr("jaxfed.core.clients.mapped._POPULATE_READ", -1)  # as on an older Linux
    np.save(tmp_path / "all.npy", np.ones((64, 1024, 256), np.float32))
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    clients = jf.Clients.from_source(mapped, block_bytes=32 * mapped[0].nbytes)
    before = held()
    values, _ = clients.data.reader.read(1, 0)
    assert held() - before > 24  # MiB, of 32, some of which lay beside what was looked at
    assert values.sum() == values.size


@pytest.mark.skipif(not STATUS.exists(), reason="the system says in another way what is held")
def test_pages_are_released(tmp_path):
    """Otherwise reading the memory map of a federation would fill the memory."""
    np.save(tmp_path / "all.npy", np.ones((64, 1024, 256), np.float32))  # 64 MiB
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    reader = jf.Clients.from_source(mapped, block_bytes=4 * mapped[0].nbytes).data.reader
    before, most = held(), 0
    for _, (values, _) in read_ahead(reader, range(len(reader.blocks))):
        assert values.sum() == values.size
        most = max(most, held() - before)
    assert 3 < most < 16  # MiB: two blocks of 4, and what the system maps around them


@pytest.mark.slow
def test_the_last_block_read_is_read_first_next(x64):
    """Rounds read forwards and backwards in turn, so that the system's cache is useful."""
    watched = Watched(samples())
    clients = jf.Clients.from_source(watched, counts=COUNTS, bucket=None, block_bytes=LARGE)
    watched.read.clear()
    jf.fit(Lazy(), clients, rounds=3, key=jax.random.key(0))
    there, back = list(range(10)), list(range(10))[::-1]
    assert watched.read == back + there + back


def test_unread_data_take_no_memory():
    """For a large federation, allocating zeros in its place took longer than the rounds."""
    reader = jf.Clients.from_source(np.ones((4, 1000, 100), np.float32)).data.reader
    values, counts = streamed._zeros(reader, reader.blocks[0])
    assert values.shape == (4, 1000, 100) and values.strides == (0, 0, 0)
    np.testing.assert_array_equal(counts, 1000)


@pytest.mark.timeout(300)
def test_results_equal_those_in_memory(x64, tmp_path):
    wanted = fit_probe(in_memory())
    given = fit_probe(from_source(states=tmp_path))
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)
    assert given.history.keys() == wanted.history.keys()
    assert given.status == wanted.status and given.rounds == 3
    assert isinstance(given.local, np.ndarray)
    assert not list(tmp_path.iterdir())  # the files have no names


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"participation": jf.participation.uniform(2)},
        {"participation": jf.participation.mask(np.arange(10) % 3 > 0)},
        {"channel": jf.channel.quantize(6)},
        {"backend": jf.backend.chunked(1)},
        {"tol": 0.5, "rounds_per_chunk": 2},
        {"metrics": lambda result: {"norm": jnp.sum(result.local["own"] ** 2)}, "metrics_every": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_runs_agree_with_those_in_memory(options, x64):
    wanted, given = (fit_probe(clients, **options) for clients in (in_memory(), from_source()))
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)
    assert given.status == wanted.status


@pytest.mark.slow
def test_difference_coding_and_a_warm_start(x64):
    way = jf.channel.difference(jf.channel.quantize(4))
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1)
    for start in (
        None,
        jf.Personalized(np.eye(FEATURES, 1), np.tile(np.eye(FEATURES, 2)[:, 1:], (10, 1, 1))),
    ):
        wanted, given = (
            jf.fit(
                algorithm, clients, rounds=3, key=jax.random.key(0), channel=way, warm_start=start
            )
            for clients in (in_memory(), from_source())
        )
        chex.assert_trees_all_close(given.result, wanted.result, **TIGHT)
        chex.assert_trees_all_close(given.state.uplink.sender, wanted.state.uplink.sender, **TIGHT)


@pytest.mark.slow
def test_runs_resume_and_callbacks_see_them(tmp_path, x64):
    options = {"rounds_per_chunk": 2, "best": "objective"}
    whole = fit_probe(from_source(), rounds=4, **options)
    checkpoint = jf.Checkpoint(tmp_path, every=2)
    stopped = fit_probe(
        from_source(),
        rounds=4,
        checkpoint=checkpoint,
        callbacks=[lambda s: s.rounds == 2],
        **options,
    )
    assert stopped.rounds == 2
    resumed = fit_probe(from_source(), rounds=4, checkpoint=checkpoint, **options)
    chex.assert_trees_all_equal(essence(resumed), essence(whole))
    other = samples()
    other[4] = 2 * other[4]
    with pytest.raises(ValueError, match=r"belongs to another run: clients has other values"):
        fit_probe(
            jf.Clients.from_source(other, weights="samples", block_bytes=2 * LARGE),
            rounds=4,
            checkpoint=checkpoint,
            **options,
        )


@pytest.mark.slow
def test_a_run_does_not_resume_with_other_metrics(tmp_path):
    def resumed(rounds, factor):
        return fit_probe(
            from_source(),
            rounds=rounds,
            checkpoint=jf.Checkpoint(tmp_path),
            metrics=lambda result: {"size": factor * jnp.abs(result.shared).sum()},
            rounds_per_chunk=1,
        )

    resumed(2, 1.0)
    with pytest.raises(ValueError, match="belongs to another run"):
        resumed(3, 2.0)
    assert resumed(3, 1.0).rounds == 3


class Lazy(jf.Algorithm):
    """Needs the data only in its rounds."""

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(FEATURES)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return data.count

    def client_step(self, key, downlink, local, data):
        return Mean(data.values.sum(0)), local, {"objective": data.values.sum()}

    def server_step(self, key, server, uplink):
        return server + uplink, {}


@pytest.mark.slow
def test_nothing_is_read_needlessly(x64):
    watched = Watched(samples())
    clients = jf.Clients.from_source(watched, counts=COUNTS, block_bytes=2 * LARGE)
    watched.read.clear()
    solution = jf.fit(Lazy(), clients, rounds=2, key=jax.random.key(0))
    assert sorted(watched.read) == sorted(2 * list(range(len(COUNTS))))
    np.testing.assert_array_equal(solution.result.local, COUNTS)
    # Blocks without participants are left out.
    watched.read.clear()
    few = jf.fit(
        Lazy(), clients, rounds=1, key=jax.random.key(0), participation=jf.participation.uniform(1)
    )
    assert len(watched.read) < len(COUNTS)
    np.testing.assert_array_equal(few.result.local, COUNTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_keeps_the_round_before(x64):
    arrays = samples()
    arrays[3] = arrays[3] + np.nan
    clients = jf.Clients.from_source(arrays, block_bytes=2 * LARGE)
    with pytest.raises(jf.DivergenceError, match="in round 1, at client 3") as error:
        jf.fit(Lazy(), clients, rounds=2, key=jax.random.key(0))
    np.testing.assert_array_equal(error.value.solution.result.shared, np.zeros(FEATURES))


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("tol", [None, 1e-9])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_first_message_that_is_not_finite_ends_the_run(value, tol):
    """This happens before the first round, as for clients in memory."""
    arrays = samples()
    arrays[3][1, 1] = value
    clients = jf.Clients.from_source(arrays, block_bytes=LARGE)
    algorithm = jf.pca.BlockLanczos(1)
    with pytest.raises(jf.DivergenceError, match="in round 1, at client 3;") as error:
        jf.fit(algorithm, clients, rounds=2, key=jax.random.key(0), tol=tol)
    solution = error.value.solution
    assert solution.rounds == 0 and solution.status == jf.Status.diverged
    assert {x.shape for x in solution.history.values()} == {(0,)}
    assert {"objective", "bits_up", "bits_down"} <= solution.history.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.PerPCA(1, 1, solver="gradient"),
        jf.pca.PerPCA(1, 1),
        jf.pca.HierarchicalPCA(1, 0.5, 0.5),
        jf.pca.Pooled(1),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_first_message_of_any_start_that_is_not_finite_ends_the_run(algorithm):
    arrays = samples()
    arrays[3][1, 1] = np.nan
    with pytest.raises(jf.DivergenceError, match="in round 1, at client 3;"):
        jf.fit(algorithm, jf.Clients.from_source(arrays), rounds=2, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("whole", [False, True])
def test_either_byte_order_is_read(order, whole):
    arrays = [array[:3].astype(f"{order}f4") for array in samples()]
    clients = jf.Clients.from_source(np.stack(arrays) if whole else arrays)
    reader = clients.data.reader
    assert reader.dtype == jnp.float32 and reader.dtype.isnative
    np.testing.assert_array_equal(reader.read(0, 0)[0], np.stack(arrays))
    key = jax.random.key(0)
    given = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=key)
    wanted = jf.fit(jf.pca.OneShot(1, 1), jf.Clients.from_samples(arrays), rounds=1, key=key)
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-5)


def test_files(tmp_path, x64):
    arrays = samples()
    folder = tmp_path / "clients"
    folder.mkdir()
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = list("abcd")
    table = [pyarrow.table(dict(zip(names, array.T, strict=True))) for array in arrays]
    with parquet.ParquetWriter(tmp_path / "all.parquet", table[0].schema) as writer:
        for own in table:
            writer.write_table(own)
    np.save(tmp_path / "whole.npy", np.stack([array[:3] for array in arrays]))
    mapped = np.load(tmp_path / "whole.npy", mmap_mode="r")
    folder, groups = jf.data.NpyFolder(folder), jf.data.ParquetGroups(tmp_path / "all.parquet")
    all_of_it = (folder, arrays), (groups, arrays), (mapped, mapped), ([*mapped], mapped)
    for source, wanted in all_of_it:
        reader = jf.Clients.from_source(source, block_bytes=2 * LARGE).data.reader
        for number, (places, _) in enumerate(reader.blocks):
            for own, count, place in zip(*reader.read(number, 0), places, strict=True):
                np.testing.assert_array_equal(own[: int(count)], wanted[place])
    taken = jf.Clients.from_source(folder).take([4, 1])
    np.testing.assert_array_equal(taken.counts, [COUNTS[4], COUNTS[1]])
    np.testing.assert_array_equal(taken.data.reader.read(0, 0)[0][0, :17], arrays[4])


def even():
    """Clients of the same size, in the same order each time."""
    return np.random.default_rng(0).normal(size=(5, 4, FEATURES))


def array(folder):
    return even()


def arrays(folder):
    return list(even())


def whole_map(folder):
    np.save(folder / "all.npy", even())
    return np.load(folder / "all.npy", mmap_mode="r")


def part_of_a_map(folder):
    return whole_map(folder)[:, :3]


def maps(folder):
    return list(whole_map(folder))


def npy_folder(folder):
    for place, table in enumerate(even()):
        np.save(folder / f"{place}.npy", table)
    return jf.data.NpyFolder(folder)


def parquet_groups(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = [pyarrow.table(dict(zip("abcd", table.T, strict=True))) for table in even()]
    with parquet.ParquetWriter(folder / "all.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return jf.data.ParquetGroups(folder / "all.parquet")


def others(folder):
    return Watched(even())


IN_FILES = [whole_map, part_of_a_map, maps, npy_folder, parquet_groups]


def changed(source, folder, later=1):
    """The same source with other samples of client 2, which is neither the first nor the last.

    Its file says so many microseconds later, since the clocks of files are coarse.
    """
    if files := sorted(folder.iterdir()):
        file = files[2] if len(files) > 1 else files[0]
        content, time = bytearray(file.read_bytes()), file.stat().st_mtime_ns
        content[len(content) // 2] ^= 1
        with file.open("r+b") as opened:  # in place, like a write to a memory map
            opened.write(content)
        os.utime(file, ns=(time, time + 1000 * later))
    else:
        getattr(source, "arrays", source)[2][0, 0] += 1
    return source


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("make", [array, arrays, others, *IN_FILES])
def test_any_client_distinguishes_sources(make, later, tmp_path):
    def identity(source):
        clients = jf.Clients.from_source(source, counts=[len(table) for table in source])
        known = fingerprint(clients, "", key=0, warm_start=None)
        return known["clients"]

    source = make(tmp_path)
    before = identity(source)
    assert identity(source) == before
    unseen = make is parquet_groups and not later  # its samples would have to be read
    assert (identity(changed(source, tmp_path, later)) == before) == unseen


@pytest.mark.parametrize("make", IN_FILES)
def test_files_that_change_end_the_run(make, tmp_path):
    clients = jf.Clients.from_source(make(tmp_path), block_bytes=LARGE)
    options = {"rounds": 3, "key": jax.random.key(0), "rounds_per_chunk": 1}
    jf.fit(Lazy(), clients, **options)
    with pytest.raises(ValueError, match=r"^source\[\d\]: wanted .* as it was for Clients.from_s"):
        jf.fit(Lazy(), clients, callbacks=[lambda _: bool(changed(None, tmp_path))], **options)


@pytest.mark.parametrize("named", [True, False])
def test_the_lost_end_of_a_truncated_file_is_not_accessed(named, tmp_path):
    """Accessing it would kill the Python process."""
    np.save(tmp_path / "all.npy", np.ones((8, 64, 64), np.float32))
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    sources, message = [mapped, [*mapped]], "as it was for Clients.from_source"
    if not named:  # as of a file that is known by its map alone
        mapped.filename, message = None, "of 131,200 bytes, which is mapped, got 4,096"
        sources = [mapped, [*mapped], Watched(mapped)]
    readers = [jf.Clients.from_source(source).data.reader for source in sources]
    os.truncate(tmp_path / "all.npy", 4096)
    for reader in readers:
        with pytest.raises(ValueError, match=rf"^source\[.*\]: wanted .*{message}"):
            reader.read(0, 0)
        with pytest.raises(ValueError, match=rf"^source\[.*\]: wanted .*{message}"):
            reader.digest()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (3, {}, r"source: wanted a sequence of"),
        ([], {}, r"source: at least one client"),
        (np.ones((3, 4)), {}, r"source: wanted a sequence of"),
        ([np.ones(3)], {}, r"source\[0\]: wanted samples"),
        ([np.ones((3, 2)), np.ones((3, 1))], {}, r"source\[1\]: wanted samples of as many"),
        ([np.ones((3, 2), bool)], {}, r"source\[0\]: wanted an array .* of float32 or float64"),
        ([np.ones((3, 2))], {"counts": [0]}, r"counts: wanted 1 positive whole numbers"),
        ([np.ones((3, 2))], {"bucket": 1.0}, r"bucket: wanted a number of at least 1.1"),
        ([np.ones((3, 2))], {"block_bytes": 0}, r"block_bytes: wanted"),
        ([np.ones((3, 2))], {"states": "/not/there"}, r"states: wanted a folder"),
        ([np.ones((3, 2))], {"weights": [1, 2]}, r"weights: wanted 1 numbers"),
    ],
)
def test_bad_sources_are_refused(source, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        jf.Clients.from_source(source, **options)


def test_counts_must_be_correct(x64):
    clients = jf.Clients.from_source([np.ones((3, 2)), np.ones((4, 2))], counts=[3, 5])
    with pytest.raises(ValueError, match=r"^source\[1\]: wanted shape \(5, 2\), got"):
        jf.fit(Lazy(), clients, rounds=1, key=jax.random.key(0))


def test_algorithms_that_need_data_in_memory_say_so(x64):
    clients, key = from_source(), jax.random.key(0)
    lanczos = jf.pca.BlockLanczos(1)
    for needs in (
        lambda: jf.rollout(Lazy(), clients, rounds=1, key=key),
        lambda: jax.jit(lambda c: jf.rollout(Lazy(), c, rounds=1, key=key))(clients),
        lambda: jf.sweep(lanczos, clients, rounds=1, keys=key),
        lambda: clients.restrict(samples=2),
        lambda: clients.unbucketed(),
        lambda: jf.pca.split_half([lanczos], clients, rounds=1, key=key),
        lambda: jf.pca.suggest_ranks(clients, key=key),
    ):
        with pytest.raises(ValueError, match=r"^clients: wanted data in memory for "):
            needs()
    for backend in (jf.backend.shard(2), jf.backend.pmap(2)):
        with pytest.raises(ValueError, match=r"^backend: wanted vmap\(\) or chunked\(size\) for"):
            jf.fit(lanczos, clients, rounds=1, key=key, backend=backend)
    with pytest.raises(ValueError, match=r"^clients: wanted views in memory, as of Views.from_arr"):
        jf.fit(jf.gcca.MaxVar(1), clients, rounds=1, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [None, 1.5])
def test_thin_factors_of_several_blocks_add_up(x64, bucket):
    """Of one block they stay factors (features, samples); those of several are multiplied out."""
    arrays = gaussian_samples((3, 5, 4, 2, 8), 0.8 ** np.arange(60), dtype=float)
    clients = [
        jf.Clients.from_source(arrays, bucket=bucket, block_bytes=60 * 8 * 11),
        jf.Clients.from_samples(arrays, bucket=bucket),
        jf.Clients.from_samples(arrays),
    ]
    assert len(clients[0].data.reader.blocks) > 1
    found = [fit(jf.pca.Pooled(2), one, rounds=1).result.shared for one in clients]
    products = [np.asarray(shared @ shared.T) for shared in found]
    np.testing.assert_allclose(products[0], products[2], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(products[1], products[2], rtol=1e-8, atol=1e-10)
