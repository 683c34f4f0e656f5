"""Workers of several JAX processes on this machine, and what they do in the tests.

`launch` starts them; as a program, this file is one of them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

COUNTS = (12, 9, 10, 12, 7)  # samples; five clients, which neither two nor four devices divide
SHARES = {1: (0, 5), 2: (0, 3, 5), 4: (0, 2, 3, 4, 5)}  # each process's clients
FIT = ["fit", "perpca", "--shared-rank", "1", "--local-rank", "1", "--rounds", "6"]
HEARTBEAT = 10  # seconds after which a process that says nothing is taken for dead


class Ended(NamedTuple):
    """How one of them ended."""

    code: int
    seconds: float  # after the first of them
    said: str


def launch(task, count, folder, environment, *more, devices=1, timeout=500):
    """Run a task in so many processes; none of them outlives the time-out.

    Args:
        task: the name of a function below.
        count: of processes.
        folder: for what they write, logs included.
        environment: of one process.
        more: the task's further arguments.
        devices: of each.
        timeout: in seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [Path(folder, f"log{place}") for place in range(count)]
    started, ended, first = [], {}, None
    try:
        for place, log in enumerate(logs):
            arguments = [task, place, count, port, folder, devices, *more]
            with log.open("w") as file:
                command = [sys.executable, __file__, *map(str, arguments)]
                started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        begun = time.monotonic()
        while len(ended) < count and time.monotonic() - begun < timeout:
            for place, process in enumerate(started):
                if place not in ended and process.poll() is not None:
                    first = first or time.monotonic()
                    ended[place] = time.monotonic() - first
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()  # JAX catches SIGTERM
            process.wait()
    return [
        Ended(process.returncode, ended.get(place, float("inf")), log.read_text())
        for place, (process, log) in enumerate(zip(started, logs, strict=True))
    ]


# --- tasks, each run by all processes -------------------------------------------------------------


def begin(place, count, port, devices):
    """Start JAX in a process, in double precision."""
    import jax

    from jaxfed.deploy import processes

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    processes.initialize(
        f"127.0.0.1:{port}", count, place, timeout=60, heartbeat=HEARTBEAT, shutdown=HEARTBEAT
    )


def samples():
    """Of clients of different lengths."""
    import numpy as np

    rng = np.random.default_rng(0)
    scales = np.array([3, 2.5, 2, 1.5, 0.4, 0.3])
    return [rng.normal(size=(n, 6)) * rng.permutation(scales) for n in COUNTS]


def own(arrays, place, count):
    """A process's share."""
    begin, end = SHARES[count][place : place + 2]
    return arrays[begin:end]


def both(make, arrays, place, count, **options):
    """The clients as they lie across processes, and all of them."""
    import jaxfed as jf

    mine = make(own(arrays, place, count))
    return jf.Clients.from_process_local(mine, **options), make(arrays)


def keep(folder, name, place, tree):
    """A tree's leaves, in a file of this process."""
    import jax
    import numpy as np

    leaves = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    np.savez(Path(folder, f"{name}-{place}.npz"), **leaves)


def algorithms(place, count, folder, names):
    """Runs of examples, and in the first process what one process has of them."""
    from functools import partial

    import jax
    import numpy as np

    import jaxfed as jf
    from tests import examples

    for name in names.split(","):
        algorithm = examples.GOOD[name].make(len(COUNTS))
        family = examples.family(algorithm)
        views = isinstance(family.draw(), jf.gcca.Views)
        whole = family.draw().data
        missing = "mask" if np.isnan(np.asarray(whole.values)).any() else "refuse"
        make = partial(jf.Clients.from_samples, missing=missing)
        make = jf.gcca.Views.from_arrays if views else make
        of_each = whole.count.astype(int)
        arrays = [x[:, :n] if views else x[:n] for x, n in zip(whole.values, of_each, strict=True)]
        clients, everybody = both(make, arrays, place, count)
        run = {"rounds": 4, "key": jax.random.key(1)}
        spread = jf.fit(algorithm, clients, backend=jf.backend.shard(), **run)
        shared, local = spread.result
        essence = family.essence(jf.Personalized(shared, clients.own(local)))
        # Parts alone: the essence of some depends on nothing but the part.
        keep(folder, f"{name}-shared", place, essence[0])
        keep(folder, f"{name}-local", place, essence[1])
        keep(folder, f"{name}-history", place, dict(spread.history))
        if place == 0:
            alone = jf.fit(algorithm, everybody, **run)
            essence = family.essence(alone.result)
            keep(folder, f"{name}-shared", "alone", essence[0])
            keep(folder, f"{name}-local", "alone", essence[1])
            keep(folder, f"{name}-history", "alone", dict(alone.history))


def composed(place, count, folder):
    """What is composed around a run: each compared with one process, here."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.tree_util import Partial

    import jaxfed as jf

    clients, everybody = both(
        jf.Clients.from_samples, samples(), place, count, weights=own(COUNTS, place, count)
    )
    everybody = jf.Clients(everybody.data, everybody.ids, jnp.asarray(COUNTS) / sum(COUNTS))
    spread, key, close = jf.backend.shard(), jax.random.key(3), {"rtol": 1e-8, "atol": 1e-9}
    assert len(clients) == len(COUNTS)
    np.testing.assert_array_equal(clients.own(clients.ids), own(range(len(COUNTS)), place, count))

    def outer(basis):
        return basis @ np.swapaxes(basis, -1, -2)

    def energy(result):
        return {"energy": jnp.mean(result.local[..., 0, :] ** 2)}

    ranks, said = (
        jf.pca.PerPCA(1, (1, 0, 1, 1, 0), solver="gradient", decay=0.7, start="random"),
        [],
    )
    plain = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.03, start="random")
    three_bits = jf.channel.difference(jf.channel.quantize(3))
    masks = jf.Wire(jf.channel.secure_sum(len(COUNTS), bits=24, bound=4.0), jf.channel.lossless())
    for algorithm, options in (
        (ranks, {"participation": jf.participation.uniform(2), "channel": three_bits}),
        (ranks, {"tol": 1e-2, "metrics": energy, "progress": True, "callbacks": [said.append]}),
        (plain, {"channel": masks}),
    ):
        options = {"rounds": 12, "key": key} | options
        found = jf.fit(algorithm, clients, backend=spread, **options)
        wanted = jf.fit(algorithm, everybody, **options | {"progress": False})
        np.testing.assert_allclose(
            outer(np.asarray(found.result.shared)), outer(np.asarray(wanted.result.shared)), **close
        )
        np.testing.assert_allclose(
            outer(clients.own(found.result.local)),
            outer(own(np.asarray(wanted.result.local), place, count)),
            **close,
        )
        assert found.history.keys() == wanted.history.keys()
        for name, values in wanted.history.items():
            np.testing.assert_allclose(found.history[name], values, err_msg=name, **close)
        # What clients keep stays where they are.
        there = found.result.local, found.state.local, found.state.uplink.sender
        for leaf in jax.tree.leaves(there):
            assert leaf.sharding.is_equivalent_to(spread.sharding, leaf.ndim), leaf.sharding
    again = jf.fit(plain, clients, rounds=2, key=key, warm_start=found, backend=spread)
    assert again.history["objective"][0] <= found.history["objective"][-1]
    assert said

    def point(clients, backend, step_size, seed):
        run = jf.rollout(
            jf.pca.PerPCA(1, 1, solver="gradient", step_size=step_size),
            clients,
            rounds=3,
            key=jax.random.key(seed.astype(int)),
            backend=backend,
        )
        return {"objective": run.history["objective"], "shared": run.result.shared[0, 0] ** 2}

    axes = {"step_size": [0.01, 0.02, 0.03], "seed": [0, 1]}
    wanted = jf.grid(Partial(point, everybody, jf.backend.vmap()), axes, runs_at_once=4)
    for _ in range(2):  # the second time from what was kept
        found = jf.grid(
            Partial(point, clients, spread), axes, runs_at_once=4, folder=Path(folder, "grid")
        )
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], err_msg=name, **close)


def derivative(place, count, folder):
    """The implicit derivative by data, weights and a hyperparameter."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import jaxfed as jf

    clients, everybody = both(jf.Clients.from_samples, samples(), place, count)

    def outer(basis):
        return basis @ jnp.swapaxes(basis, -1, -2)

    def differentiated(clients, backend):
        def loss(values, weights, prior):
            changed = eqx.tree_at(
                lambda c: (c.data.values, c.weights), clients, (values, weights / weights.sum())
            )
            algorithm = jf.pca.HierarchicalPCA(2, 0.5, prior, solver="eigenvectors")
            shared, local = jf.rollout(
                algorithm,
                changed,
                rounds=300,
                key=jax.random.key(3),
                backend=backend,
                adjoint=jf.adjoint.implicit(),
            ).result
            own = jnp.sum(outer(local) ** 3, (1, 2))
            return (outer(shared) ** 3).sum() + own @ changed.weights

        return jax.grad(loss, argnums=(0, 1, 2))(clients.data.values, clients.weights, 0.05)

    gradient = jax.jit(differentiated, static_argnums=1)
    *of_clients, of_prior = gradient(clients, jf.backend.shard())
    keep(folder, "derivative", place, (*map(clients.own, of_clients), of_prior))
    if place == 0:
        keep(folder, "derivative", "alone", gradient(everybody, jf.backend.vmap()))


def refused(place, count, folder):
    """What one process gets wrong is an error in all, and what does not go together."""
    import jax
    import numpy as np

    import jaxfed as jf

    del folder
    local, make = jf.Clients.from_process_local, jf.Clients.from_samples
    mine = make(own(samples(), place, count))
    wider = make([np.ones((3, 6 + place))])
    clients = local(mine)
    run = {"rounds": 1, "key": jax.random.key(0)}
    for call, words in (
        (lambda: local("mine" if place else mine), "own: wanted this process's jaxfed.Clients"),
        (lambda: local(wider), "own: wanted clients whose data are alike in every process"),
        (lambda: local(mine, ids=[*range(len(mine))]), "clients: wanted ids that differ"),
        (lambda: local(mine, ids=[0] if place else None), "ids: "),
        (lambda: local(mine, weights=[place - 1.0] * len(mine)), "weights: wanted"),
        (lambda: local(mine, backend=jf.backend.vmap()), "backend: wanted jaxfed.backend.shard"),
        (lambda: local(clients), "own: wanted clients of this process alone"),
        (lambda: jf.fit(jf.pca.Pooled(1), clients, **run), "backend: wanted the one that"),
        (lambda: clients.take([0]), "take: wanted clients of one process"),
        (lambda: clients.own(np.zeros(17)), "tree: wanted arrays with a leading axis of"),
    ):
        try:
            call()
        except ValueError as error:
            print("refused:", words in str(error), error)


def saving(place, count, folder, dies=None):
    """A run with checkpoints; one process may die in the middle of it."""
    import jax

    import jaxfed as jf

    make, shares = jf.Clients.from_samples, own(samples(), place, count)
    clients = jf.Clients.from_process_local(make(shares), weights="samples")

    def watch(solution):
        if str(place) == dies and solution.rounds == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    solution = jf.fit(
        jf.pca.PerPCA(1, 2, solver="gradient"),
        clients,
        rounds=20,
        key=jax.random.key(3),
        rounds_per_chunk=2,
        backend=jf.backend.shard(),
        callbacks=[watch],
        channel=jf.channel.difference(jf.channel.quantize(3)),
        checkpoint=jf.Checkpoint(Path(folder, "saved"), every=5),
    )
    shared, local = solution.result
    keep(folder, "saved", place, (shared, clients.own(local), dict(solution.history)))


def memory(place, count, folder):
    """How much a run of large clients takes, in units of one process's data."""
    import gc
    import json
    import resource

    import jax
    import numpy as np

    import jaxfed as jf

    def peak():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(samples):
        rng = np.random.default_rng(place)
        mine = jf.Clients.from_samples(rng.normal(size=(2, samples, 200)).astype("float32"))
        clients = jf.Clients.from_process_local(mine)
        size = mine.data.values.nbytes
        del mine
        spread = jf.backend.shard()
        algorithm = jf.pca.SubspaceIteration(2)
        jf.fit(algorithm, clients, rounds=2, key=jax.random.key(0), backend=spread)
        gc.collect()
        arrays = [shard.data.nbytes for x in jax.live_arrays() for shard in x.addressable_shards]
        return size, max(arrays), sum(arrays)

    run(150)  # what does not grow with the data
    before = peak()
    size, largest, total = run(150_000)
    found = {"peak": (peak() - before) / size, "largest": largest / size, "live": total / size}
    Path(folder, f"memory-{place}").write_text(json.dumps(found))


def command(place, count, folder, *options):
    """`jaxfed fit` on the files of this process's clients."""
    import jax

    from jaxfed.cli import main

    del count
    place_options = ["--processes", "--coordinator", os.environ["COORDINATOR"]]
    place_options += ["--process-count", os.environ["COUNT"], "--process", str(place)]
    paths = ["--data", f"{folder}/data/{{process}}", "--out", f"{folder}/out"]
    code = main(["--no-compilation-cache", *FIT, *paths, *place_options, *options])
    assert jax.process_count() == int(os.environ["COUNT"])
    sys.exit(code)


if __name__ == "__main__":
    _task, _place, _count, _port, _folder, _devices, *_more = sys.argv[1:]
    if _task == "command":  # which joins the others itself
        os.environ |= {"COORDINATOR": f"127.0.0.1:{_port}", "COUNT": _count}
    else:
        begin(int(_place), int(_count), int(_port), int(_devices))
    globals()[_task](int(_place), int(_count), _folder, *_more)
