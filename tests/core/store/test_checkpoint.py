"""Runs that are interrupted and resumed."""

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from jaxfed.core.common.files import locked, replacing
from jaxfed.core.run import host_loop
from jaxfed.core.store import arrays, checkpoint, identity
from tests.helpers import gaussian

ROUNDS = 12
sampled = functools.partial(gaussian, (8,) * 4, (3, 2.5, 2, 1, 0.5))


class Interruption(Exception):
    """What ends a run in these tests."""


def perpca():
    return jf.pca.PerPCA(1, 1, solver="gradient", decay=0.9, start="random")


def error(result):
    return {"error": sum((part**3).sum() for part in jax.tree.leaves(result))}


def fit(path, *, algorithm=None, callbacks=(), **changed):
    arguments = {
        "rounds": ROUNDS,
        "key": jax.random.key(0),
        "rounds_per_chunk": 3,
        "metrics": error,
        "participation": jf.participation.uniform(2),
        **changed,
    }
    checkpoint = None if path is None else jf.Checkpoint(path, every=5)
    clients = arguments.pop("clients", None) or sampled()
    return jf.fit(
        algorithm or perpca(), clients, checkpoint=checkpoint, callbacks=callbacks, **arguments
    )


def interrupted(path, at, **arguments):
    def stop(solution):
        if solution.rounds >= at:
            raise Interruption

    with pytest.raises(Interruption):
        fit(path, callbacks=[stop], **arguments)


def saved_rounds(path):
    return sorted(int(file.stem) for file in (path / "rounds").iterdir())


def identical(given, wanted):
    chex.assert_trees_all_equal(
        (given.result, given.server, given.local, given.history, given.state),
        (wanted.result, wanted.server, wanted.local, wanted.history, wanted.state),
    )
    assert given.rounds == wanted.rounds
    for name, values in given.history.items():
        assert values.dtype == wanted.history[name].dtype


def test_saving_changes_no_bit_and_keeps_its_interval(tmp_path):
    identical(fit(tmp_path / "run"), fit(None))
    # Every five rounds and at the end, whatever the chunks; the two newest are kept.
    assert saved_rounds(tmp_path / "run") == [10, 12]


@pytest.mark.parametrize("at", [6, 9, 10])
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, at):
    interrupted(tmp_path, at)
    seen = []
    resumed = fit(tmp_path, callbacks=[lambda s: seen.append(s.rounds)])
    identical(resumed, fit(None))
    assert min(seen) > 5


def test_a_run_interrupted_before_its_first_checkpoint_starts_anew(tmp_path):
    interrupted(tmp_path, 3)
    identical(fit(tmp_path), fit(None))


EARLY = {"callbacks": [jf.EarlyStopping("error", patience=0)], "rounds": 40}
ENDS = {
    "rounds": ({}, jf.Status.round_limit),
    "tolerance": (
        {"tol": 1e-2, "rounds": 200, "participation": None, "rounds_per_chunk": 7},
        jf.Status.converged,
    ),
    "callback": (EARLY, jf.Status.stopped),
    "function": ({"callbacks": [lambda solution: solution.rounds >= 6]}, jf.Status.stopped),
    "best": ({**EARLY, "best": "error"}, jf.Status.stopped),
    "programs of their own": ({**EARLY, "backend": jf.backend.separate()}, jf.Status.stopped),
    "source": (
        {**EARLY, "clients": jf.Clients.from_source(np.asarray(sampled().data.values))},
        jf.Status.stopped,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_finished_run_is_only_read_however_it_ended(tmp_path, how):
    arguments, status = ENDS[how]
    seen = []
    arguments = {**arguments, "callbacks": [*arguments.get("callbacks", ()), seen.append]}
    first = fit(tmp_path, **arguments)
    assert first.status == status
    assert seen[-1].rounds < arguments["rounds"] if "rounds" in arguments else seen
    seen.clear()
    for _ in range(2):
        again = fit(tmp_path, **arguments)
        assert seen == []  # no chunk ran
        identical(again, first)
        assert again.status == first.status
        assert again.releases[-1].times == first.releases[-1].times


def test_a_run_stopped_by_a_callback_resumes_without_callbacks(tmp_path):
    stopped = fit(tmp_path, callbacks=[lambda solution: solution.rounds >= 6])
    assert stopped.status == jf.Status.stopped and stopped.rounds < ROUNDS
    whole = fit(tmp_path)
    assert whole.status == jf.Status.round_limit
    identical(whole, fit(None))


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_are_kept(tmp_path, keep):
    checkpoint = jf.Checkpoint(tmp_path, every=3, keep=keep)
    jf.fit(perpca(), sampled(), rounds=ROUNDS, key=jax.random.key(0), checkpoint=checkpoint)
    assert saved_rounds(tmp_path) == [3, 6, 9, 12][-keep:]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_on_several_devices_resumes_bit_for_bit(tmp_path):
    arguments = {"backend": jf.backend.shard(2)}
    interrupted(tmp_path, 6, **arguments)
    identical(fit(tmp_path, **arguments), fit(None, **arguments))


OTHERS = {
    "algorithm": {"algorithm": jf.pca.PerPCA(1, 1, solver="gradient", decay=0.8, start="random")},
    "clients": {"clients": sampled(seed=1)},
    "key": {"key": jax.random.key(1)},
    "rounds": {"rounds": ROUNDS - 1},
    "warm_start": {"warm_start": jf.Personalized(np.eye(5, 1, dtype="f"), None)},
    "participation": {"participation": jf.participation.uniform(3)},
    "backend": {"backend": jf.backend.chunked(2)},
    "tol": {"tol": 1e-3},
    "rounds_per_chunk": {"rounds_per_chunk": 4},
    "metrics": {"metrics": lambda result: {"other": result.shared.sum()}},
    "metrics_every": {"metrics_every": 2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished")
    fit(path)
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_another_runs_checkpoint_is_refused(finished, name):
    said = "computation" if name == "metrics" else name
    with pytest.raises(ValueError, match=rf"another run: {said} (was|has|differs)[^;]*$"):
        fit(finished, **OTHERS[name])


@pytest.mark.parametrize("at", [3, 5, 6])
def test_a_finished_run_is_extended_bit_for_bit(tmp_path, at):
    fit(tmp_path, rounds=at)
    seen = []
    identical(fit(tmp_path, callbacks=[lambda s: seen.append(s.rounds)]), fit(None))
    assert min(seen) > at
    with pytest.raises(ValueError, match=rf"another run: rounds was {ROUNDS} and is {at}$"):
        fit(tmp_path, rounds=at)


def test_extending_a_run_whose_last_chunk_was_shorter_is_refused(tmp_path):
    fit(tmp_path, rounds=7)
    with pytest.raises(ValueError, match=rf"another run: rounds was 7 and is {ROUNDS}$"):
        fit(tmp_path)
    identical(fit(tmp_path, rounds=7), fit(None, rounds=7))


class ByRounds(jf.pca.SubspaceIteration):
    """Data whose values, but not shapes, depend on the number of rounds."""

    def prepare(self, data, client_id, rounds):
        prepared = super().prepare(data, client_id, rounds)
        return jax.tree.map(lambda x: x * (1 + 1 / rounds), prepared)


def test_extending_a_run_whose_data_were_prepared_for_its_rounds_is_refused(tmp_path):
    arguments = {"algorithm": ByRounds(1), "participation": None, "metrics": None}
    fit(tmp_path, rounds=6, **arguments)
    with pytest.raises(ValueError, match=rf"another run: rounds was 6 and is {ROUNDS}$"):
        fit(tmp_path, **arguments)


def test_every_difference_is_named(finished):
    with pytest.raises(ValueError) as caught:
        fit(finished, key=jax.random.key(1), tol=1e-3, clients=sampled(seed=1), rounds=ROUNDS + 1)
    assert str(caught.value).endswith(
        f" belongs to another run: rounds was {ROUNDS} and is {ROUNDS + 1}; tol was None "
        "and is 0.001; clients has other values; key has other values"
    )


def test_a_checkpoint_of_several_processes_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    named = identity.fingerprint
    with monkeypatch.context() as patched:
        two = {"processes": 2}
        patched.setattr(host_loop, "fingerprint", lambda *a, **b: named(*a, **{**b, **two}))
        fit(tmp_path)
    with pytest.raises(ValueError, match=r"another run: processes was 2 and is 1$"):
        fit(tmp_path)


def test_each_round_identifies_its_run(tmp_path):
    """A file beside the rounds used to do so: without it, the next run took them for its own."""
    fit(tmp_path)
    for path in tmp_path.iterdir():
        if path.name != "rounds":
            path.unlink()
    for name in ("key", "rounds"):
        with pytest.raises(ValueError, match=f"belongs to another run: {name} "):
            fit(tmp_path, **OTHERS[name])
    identical(fit(tmp_path), fit(None))


def test_values_that_functions_close_over_distinguish_runs():
    def described(optimizer, loss=jf.models.reconstruction_loss):
        model = jf.models.Autoencoder(6, 2, key=jax.random.key(0))
        return identity.text_and_digest(jf.generative.FedAvg(model, loss, optimizer, local_steps=1))

    assert described(optax.sgd(0.1)) == described(optax.sgd(0.1))
    assert described(optax.sgd(0.1)) != described(optax.sgd(0.2))
    assert described(optax.adam(0.1)) != described(optax.adam(0.1, b1=0.8))
    assert " at 0x" not in described(optax.adam(0.1), jax.jit(jf.models.reconstruction_loss))[0]


def test_another_algorithms_checkpoint_is_refused(finished):
    with pytest.raises(ValueError, match=r"algorithm was PerPCA\(.* and is OneShot\("):
        fit(finished, algorithm=jf.pca.OneShot(1, 2))


@pytest.mark.slow
def test_another_function_of_the_same_name_is_another_run(tmp_path):
    optimizer = optax.sgd(0.1)

    def run(loss):
        model = jf.models.Autoencoder(5, 2, key=jax.random.key(0))
        return fit(
            tmp_path,
            algorithm=jf.generative.FedAvg(model, loss, optimizer, local_steps=1),
            metrics=None,
        )

    def squared(model, batch, key):
        return jnp.mean((batch - jax.vmap(model)(batch)) ** 2)

    run(squared)
    run(squared)

    def squared(model, batch, key):
        return jnp.mean(jnp.abs(batch - jax.vmap(model)(batch)))

    with pytest.raises(ValueError, match="another run: computation differs, by a function"):
        run(squared)


@pytest.mark.slow
def test_another_metric_of_the_same_name_is_another_run(tmp_path):
    fit(tmp_path, metrics=lambda result: {"m": result.shared.sum()})
    with pytest.raises(ValueError, match="another run: computation differs, by a function"):
        fit(tmp_path, metrics=lambda result: {"m": -result.shared.sum()})


def test_a_damaged_checkpoint_is_skipped(tmp_path):
    whole = fit(tmp_path)
    (tmp_path / "rounds" / f"{ROUNDS:08d}.npz").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=rf"^checkpoint: .*{ROUNDS}\.npz is damaged .*passed over"):
        identical(fit(tmp_path), whole)
    identical(fit(tmp_path), whole)  # the damage is gone


def test_a_damaged_later_round_removes_no_earlier_one(tmp_path):
    run = jf.Checkpoint(tmp_path, keep=1)
    run.save({}, 5, {"x": np.ones(2)}, {})
    (tmp_path / "rounds" / "00000005.npz").write_bytes(b"damaged")
    run.save({}, 3, {"x": np.ones(2)}, {})
    assert saved_rounds(tmp_path) == [3, 5]


def test_a_folder_with_only_damaged_checkpoints_is_refused(tmp_path):
    fit(tmp_path)
    for path in (tmp_path / "rounds").iterdir():
        path.write_bytes(b"damaged")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"^checkpoint: wanted a round"):
        fit(tmp_path)


def test_a_round_counts_once_all_processes_have_saved_it(tmp_path):
    whole = fit(tmp_path)
    rounds, name = tmp_path / "rounds", f"{ROUNDS:08d}.npz"
    (rounds / "0-of-2").mkdir()
    (rounds / name).rename(rounds / "0-of-2" / name)
    seen = []
    identical(fit(tmp_path, callbacks=[lambda s: seen.append(s.rounds)]), whole)
    assert seen == [ROUNDS]


OTHER_PACKAGES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"]


@pytest.mark.parametrize("dtype", [*OTHER_PACKAGES, "float16", ">f4", "complex64", "bool", "u1"])
def test_arrays_of_every_type_and_shape_round_trip(tmp_path, dtype):
    values = np.arange(6).astype(dtype)
    tree = {"all": values[::2], "none": values[:0].reshape(2, 0), "one": values[1].reshape(())}
    path = tmp_path / "file.npz"
    arrays.write(path, "test", {"words": ["a"]}, arrays.named("tree", tree))
    header, found = arrays.read(path, "test")
    assert header["words"] == ["a"]
    for name, array in arrays.named("tree", tree).items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert (found[name].shape, found[name].dtype) == (native.shape, native.dtype)
        assert found[name].tobytes() == native.tobytes()
    if dtype != ">f4":
        chex.assert_trees_all_equal(arrays.rebuilt("tree", found, tree), tree)
    with pytest.raises(ValueError, match="wanted format"):
        arrays.read(path, "other")
    with pytest.raises(ValueError, match="x: wanted an array of numbers, got object"):
        arrays.write(path, "test", {}, {"x": np.asarray([None])})


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_round_trip(tmp_path, impl):
    tree = {"key": jax.random.key(1, impl=impl), "keys": jax.random.split(jax.random.key(2), 3)}
    run = jf.Checkpoint(tmp_path)
    run.save({}, 1, tree, {})
    found, _ = run.restore({}, jax.tree.map(jnp.zeros_like, tree))
    for name, wanted in tree.items():
        assert found[name].dtype == wanted.dtype
        draws = [jax.vmap(jax.random.bits)(jnp.atleast_1d(x)) for x in (found[name], wanted)]
        np.testing.assert_array_equal(*draws)


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond some kilobytes, which ends in the same errors."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_full_disk_keeps_the_last_good_round(tmp_path, keep):
    noise = np.random.default_rng(0).normal(size=10_000)
    checkpoint, identity = jf.Checkpoint(tmp_path, keep=keep), {"run": ["this", ""]}
    first = rf"^checkpoint: round 5 cannot be saved in {tmp_path} \(File too large\); nothing was"
    with full_disk(), pytest.raises(OSError, match=first):
        checkpoint.save(identity, 5, {"x": noise}, {"error": np.ones(5)})
    checkpoint.save(identity, 5, {"x": noise}, {"error": np.ones(5)})
    second = r"round 10 cannot be saved in .* \(File too large\); round 5 stays"
    with full_disk(), pytest.raises(OSError, match=second):
        checkpoint.save(identity, 10, {"x": -noise}, {"error": np.ones(10)})
    # An incomplete file takes up no space.
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["00000005.npz"]
    with jax.enable_x64(True):
        kept, history = checkpoint.restore(identity, {"x": noise})
    np.testing.assert_array_equal(kept["x"], noise)
    assert len(history["error"]) == 5
    checkpoint.save(identity, 10, {"x": -noise}, {"error": np.ones(10)})
    assert saved_rounds(tmp_path) == [5, 10][-keep:]


def test_a_full_disk_leaves_a_file_unchanged(tmp_path):
    path = tmp_path / "block.npz"
    np.savez(path, x=np.ones(3))
    told = pytest.raises(OSError, match=rf"^{path}: cannot be written \(File too large\)")
    with full_disk(), told, replacing(path) as part:
        np.savez(part, x=np.zeros(10_000))
    with np.load(path) as saved:
        assert (saved["x"] == 1).all()
    assert os.listdir(tmp_path) == ["block.npz"]


def test_a_lock_does_not_change_a_file_of_its_name(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with locked(tmp_path, "folder"):
        with pytest.raises(BlockingIOError, match="in use by another process"):
            locked(tmp_path, "folder").__enter__()
        assert (tmp_path / ".lock").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 9])
def test_early_stopping_and_the_best_survive_an_interruption(tmp_path, at):
    def measured(result):
        return {"gap": jnp.abs(jnp.abs(result.shared).sum() - 1.3)}

    def run(path, fail=None):
        def stop(solution):
            if fail is not None and solution.rounds >= fail:
                raise Interruption

        return jf.fit(
            perpca(),
            sampled(),
            rounds=40,
            key=jax.random.key(0),
            rounds_per_chunk=1,
            metrics=measured,
            checkpoint=None if path is None else jf.Checkpoint(path, every=2),
            callbacks=[jf.EarlyStopping("gap", patience=5), stop],
            best="gap",
        )

    with pytest.raises(Interruption):
        run(tmp_path, at)
    identical(run(tmp_path), run(None))


def test_the_saved_file_describes_the_run(finished):
    file = finished / "rounds" / f"{ROUNDS:08d}.npz"
    described = arrays.read(file, checkpoint.KIND).header["identity"]
    assert described["algorithm"][0].startswith("PerPCA(")
    assert described["rounds"][0] == str(ROUNDS)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": -5}, {"keep": 0}])
def test_bad_intervals_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"^(every|keep): wanted a whole number of at least 1"):
        jf.Checkpoint(tmp_path, **wrong)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_checkpoint

def die(solution):
    if solution.rounds >= 8:
        os.kill(os.getpid(), signal.SIGKILL)

test_checkpoint.fit(sys.argv[1], callbacks=[die])
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_process_is_resumed_bit_for_bit(tmp_path):
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ,
        capture_output=True,
        timeout=200,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert saved_rounds(tmp_path) == [5]
    identical(fit(tmp_path), fit(None))
