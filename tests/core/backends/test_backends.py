"""Clients one after the other, at once, or spread over devices: the same numbers."""

import functools
import socket
import subprocess
import sys
from collections.abc import Callable

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxfed as jf

FEATURES, ROUNDS = 6, 12
COUNTS = (12, 9, 10, 12, 7, 5, 11)  # seven clients: no number of devices divides them
CLIENTS = len(COUNTS)

pytestmark = pytest.mark.usefixtures("x64")
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def mesh(*shape):
    devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("silos", "spare")[: len(shape)])


# By name, because devices must not be requested before a test runs.
ONE_DEVICE = {
    "chunks of 3": lambda: jf.backend.chunked(3),
    "chunks larger than needed": lambda: jf.backend.chunked(100),
}
SEVERAL_DEVICES = {
    "pmap 1": lambda: jf.backend.pmap(1),
    "pmap 2": lambda: jf.backend.pmap(2),
    "pmap 4": lambda: jf.backend.pmap(4),
    "shard 1": lambda: jf.backend.shard(1),
    "shard 2": lambda: jf.backend.shard(2),
    "shard 4": lambda: jf.backend.shard(4),
    "more devices than clients": lambda: jf.backend.shard(),
    "a named axis": lambda: jf.backend.shard(mesh(2, 2), axis="silos"),
    "chunks on devices": lambda: jf.backend.shard(mesh(2), inner=jf.backend.chunked(3)),
}
# A collective whose devices wait for each other on a busy machine must not hang the whole suite.
spread = functools.partial(pytest.param, marks=pytest.mark.timeout(120))
# Numbers of devices that agree with another case.
FEWER = ("pmap 1", "pmap 2", "shard 1", "shard 2", "shard 4")
EVERY = [
    *map(pytest.param, ONE_DEVICE),
    *(spread(name) for name in SEVERAL_DEVICES if name not in FEWER),
]


def backend(name):
    return (ONE_DEVICE | SEVERAL_DEVICES)[name]()


def draw_unalike():
    rng = np.random.default_rng(0)
    scales = np.array([3, 2.5, 2, 1.5, 0.4, 0.3])
    arrays = [rng.normal(size=(n, FEATURES)) * rng.permutation(scales) for n in COUNTS]
    return jf.Clients.from_samples(arrays, weights="samples")


def perpca(clients=CLIENTS):
    """With every kind of message: an automatic step, its decay, unequal ranks, a random start."""
    ranks = tuple((i + 1) % 2 for i in range(clients))
    return jf.pca.PerPCA(1, ranks, solver="gradient", decay=0.7, start="random")


@functools.partial(jax.jit, static_argnames="half")
def solve_on(algorithm, clients, backend, half=False):
    participation = jf.participation.uniform(CLIENTS // 2) if half else None
    return jf.rollout(
        algorithm,
        clients,
        rounds=ROUNDS,
        key=jax.random.key(3),
        backend=backend,
        participation=participation,
    )


def essence(solution):
    spans = jax.tree.map(lambda w: w @ jnp.swapaxes(w, -1, -2), solution.result)
    return spans, solution.local, solution.history


@pytest.mark.parametrize("name", EVERY)
def test_equals_vmap(name):
    clients = draw_unalike()
    wanted = solve_on(perpca(), clients, jf.backend.vmap())
    given = solve_on(perpca(), clients, backend(name))
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks of 3", spread("pmap 2"), spread("shard 4")])
def test_half_of_the_clients_take_part(name):
    clients = draw_unalike()
    wanted = solve_on(perpca(), clients, jf.backend.vmap(), half=True)
    given = solve_on(perpca(), clients, backend(name), half=True)
    assert (wanted.history["participants"] == CLIENTS // 2).all()
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)
    everybody = solve_on(perpca(), clients, jf.backend.vmap())
    assert jnp.abs(given.result.shared - everybody.result.shared).max() > 1e-3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["pmap 2", pytest.param("shard 2", marks=pytest.mark.slow)])
def test_host_driven_runs_agree_with_compiled_ones(name):
    clients = draw_unalike()
    given = jf.fit(perpca(), clients, rounds=ROUNDS, key=jax.random.key(3), backend=backend(name))
    wanted = solve_on(perpca(), clients, jf.backend.vmap())
    chex.assert_trees_all_close(essence(given)[:2], essence(wanted)[:2], **TIGHT)
    assert jax.tree.leaves(given.local)[0].shape[0] == CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks of 3", spread("shard 2")])
def test_gradients_equal_those_of_vmap(name):
    clients = draw_unalike()

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(differentiated, backend):
        def loss(differentiated):
            algorithm, values, weights = differentiated
            changed = eqx.tree_at(
                lambda c: (c.data.values, c.weights), clients, (values, weights / weights.sum())
            )
            shared, local = jf.rollout(
                algorithm, changed, rounds=4, key=jax.random.key(3), backend=backend
            ).result
            return (shared**3).sum() + (local**4).sum()

        return jax.grad(loss)(differentiated)

    at = (
        jf.pca.PerPCA(1, 1, solver="gradient", start="random"),
        clients.data.values,
        clients.weights,
    )
    wanted = gradients(at, jf.backend.vmap())
    chex.assert_trees_all_close(gradients(at, backend(name)), wanted, rtol=1e-7, atol=1e-9)
    _, by_values, by_weights = wanted
    assert jnp.abs(by_values).max() > 1e-3
    assert jnp.abs(by_weights).max() > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_client_without_weight_and_the_order_change_nothing():
    clients = draw_unalike()
    wanted = solve_on(perpca(), clients, jf.backend.vmap())
    order = np.array([6, 2, 0, 5, 1, 3, 4])
    data = jax.tree.map(lambda x: np.concatenate([x[order], 2 * x[:1]]), clients.data)
    ids = np.append(order, CLIENTS).astype(np.int32)
    others = jf.Clients(data, jnp.asarray(ids), jnp.asarray(np.append(clients.weights[order], 0)))
    found = solve_on(perpca(CLIENTS + 1), others, backend("shard 2"))
    spans, local, _ = essence(wanted)
    chex.assert_trees_all_close(essence(found)[0].shared, spans.shared, **TIGHT)
    chex.assert_trees_all_close(found.local[:CLIENTS], local[order], **TIGHT)
    chex.assert_trees_all_close(found.history["objective"], wanted.history["objective"], **TIGHT)


@pytest.mark.slow
def test_auto_takes_blocks_of_many_small_clients_alone(monkeypatch):
    algorithm = jf.pca.Pooled(2)

    def blocks(clients, features=60, samples=31):
        values = np.random.default_rng(0).normal(size=(clients, samples, features))
        values = values.astype(np.float32)
        clients = jf.Clients.from_samples(values)
        program = solve_on.lower(algorithm, clients, jf.backend.auto()).as_text()
        wanted = solve_on.lower(algorithm, clients, jf.backend.vmap()).as_text()
        if program != wanted:
            one, other = (
                solve_on(algorithm, clients, mapped).result.shared
                for mapped in (jf.backend.auto(), jf.backend.vmap())
            )
            chex.assert_trees_all_close(one @ one.T, other @ other.T, atol=1e-5)
        return program != wanted

    assert blocks(600)  # of 140
    assert not blocks(500)
    assert not blocks(600, samples=150)  # 64 of which do not fit
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not blocks(700)  # another number, because traces are cached


class OneByOne(jf.backend.OneDevice):
    """A custom backend, which may change its result before returning it."""

    changed: Callable = eqx.field(static=True, default=lambda reduced, kept: (reduced, kept))

    def map_clients(self, work, shared, own):
        sent, kept = jax.lax.map(lambda one: work(shared, one), own)
        return self.changed(jf.reduction.over_clients(sent), kept)


class Blind(OneByOne):
    """A backend that does not reduce what clients send."""

    def map_clients(self, work, shared, own):
        return jax.vmap(work, in_axes=(None, 0))(shared, own)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_custom_backend_can_do_what_ours_do(inner):
    mine = jf.backend.shard(2, inner=OneByOne()) if inner else OneByOne()
    clients = draw_unalike()
    wanted = solve_on(perpca(), clients, jf.backend.vmap(), half=True)
    given = solve_on(perpca(), clients, mine, half=True)
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)


def first_half(tree):
    return jax.tree.map(lambda x: x[: len(x) // 2], tree)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (OneByOne(lambda reduced, kept: kept), r"map_clients \(reduced, kept\), got"),
        (
            OneByOne(lambda reduced, kept: (reduced, first_half(kept))),
            r"over_parts what is kept with a leading axis of 7 clients, got",
        ),
        (
            OneByOne(lambda reduced, kept: (reduced, (kept,))),
            "over_parts what the work returned as what is kept, got",
        ),
        (
            OneByOne(lambda reduced, kept: (None, kept)),
            "over_parts what the work sent, reduced over clients, got None",
        ),
        (Blind(), r"over_parts parts without an axis of clients, got \w+\(value=f64\[[47]"),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_a_backend_that_breaks_its_contract_is_named(mine, message, spread):
    backend = jf.backend.shard(1, inner=mine) if spread else mine
    with pytest.raises(ValueError, match=f"^backend: wanted of {type(mine).__name__}.{message}"):
        solve_on(jf.pca.PerPCA(1, 1, solver="gradient"), draw_unalike(), backend)


def test_a_large_chunk_adds_no_work():
    def flops(backend):
        return solve_on.lower(perpca(), draw_unalike(), backend).cost_analysis()["flops"]

    assert flops(jf.backend.chunked(10_000)) < 1.1 * flops(jf.backend.vmap())


@pytest.mark.slow
def test_chunks_need_less_memory():
    rng = np.random.default_rng(0)
    clients = jf.Clients.from_samples(rng.normal(size=(256, 31, 60)))
    algorithm = jf.pca.Pooled(2)

    def temporary(backend):
        compiled = solve_on.lower(algorithm, clients, backend).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(jf.backend.chunked(16)) < 0.5 * temporary(jf.backend.vmap())


def test_meshes_and_devices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"devices: 9 were asked for, there are 8"):
        jf.backend.pmap(9)
    with pytest.raises(ValueError, match=r"100 were asked for, there are 8"):
        jf.backend.shard(100)
    with pytest.raises(ValueError, match=r"0 were asked for"):
        jf.backend.shard(0)
    with pytest.raises(ValueError, match=r"devices: wanted how many of"):
        jf.backend.pmap([])
    with pytest.raises(ValueError, match=r"axis: the mesh has the axes .*name the one"):
        jf.backend.shard(mesh(2, 2))
    with pytest.raises(ValueError, match=r"axis: wanted one of silos, spare, got 'clients'"):
        jf.backend.shard(mesh(2, 2), axis="clients")
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match=r"^clients_per_block: wanted a whole number"):
            jf.backend.chunked(size)


TWO_PROCESSES = """
import sys
import jax, numpy as np

place, port = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, place, initialization_timeout=60)
import jaxfed as jf

rows = np.random.default_rng(0).normal(size=(4, 3, 2)).astype("float32")
own = jf.Clients.from_samples(rows[2 * place : 2 * place + 2])
everybody = jf.Clients.from_samples(rows)

def objective(clients, seed, backend):
    power, key = jf.pca.SubspaceIteration(1), jax.random.key(seed)
    return jf.fit(power, clients, rounds=1, key=key, backend=backend).history["objective"][0]

for argument, wrong in (("clients", (own, 0)), ("key", (everybody, place))):
    try:
        objective(*wrong, jf.backend.shard())
    except ValueError as error:
        assert str(error).startswith(f"{argument}: wanted the same in every process"), error
    else:
        raise AssertionError(f"another {argument} was taken")
alone = objective(everybody, 0, jf.backend.vmap())
assert abs(objective(everybody, 0, jf.backend.shard()) - alone) < 1e-5 * alone
local = jax.sharding.Mesh(np.array(jax.local_devices()), ("c",))
assert objective(own, place, jf.backend.shard(local)) != alone
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_inputs_that_differ_between_processes_are_refused(environment):
    """Processes with clients of their own used to mix halves of both silently."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", TWO_PROCESSES]
    both = [subprocess.Popen([*command, str(i), port], env=environment) for i in range(2)]
    try:
        assert [process.wait(timeout=150) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()


TWO_CORES = """
import jax, jaxfed as jf, numpy as np

jax.config.update("jax_num_cpu_devices", 2)
samples = jax.random.normal(jax.random.key(0), (200, 40, 30))
clients = jf.Clients.from_samples(samples)
algorithm, two = jf.pca.HierarchicalPCA(10, 0.5, 0.1), jf.backend.shard(2)
run = jax.jit(lambda c: jf.rollout(algorithm, c, rounds=2, key=jax.random.key(0), backend=two))
for _ in range(20):
    local = jax.block_until_ready(run(clients).result.local)
alone = jf.fit(algorithm, clients, rounds=2, key=jax.random.key(0)).result.local
projectors = [np.asarray(x) @ np.asarray(x).mT for x in (local, alone)]
print(len(local.sharding.device_set), np.allclose(*projectors, atol=1e-4))
"""


@pytest.mark.slow
def test_decompositions_on_several_devices_do_not_wait_for_each_other(environment):
    """Two devices of a processor that each decompose a batch used to hang in almost every run."""
    settings = environment | {"NPROC": "2"}  # as many threads as devices, on every machine
    ended = subprocess.run(
        [sys.executable, "-c", TWO_CORES],
        env=settings,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "2 True\n", ended.stderr


def explicit(array, *spec):
    """An array on four devices, whose mesh has an axis that JAX follows through every operation."""
    named = jax.make_mesh((4,), ("silos",), axis_types=(AxisType.Explicit,))
    return jax.device_put(array, NamedSharding(named, PartitionSpec(*spec)))


ALONG_CLIENTS, ALONG_SAMPLES = ("silos",), (None, "silos")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "spec"),
    [
        *((how, ALONG_CLIENTS) for how in ("fit", "rollout", "shard", "take")),
        ("fit", ALONG_SAMPLES),  # which the others handle in the same way
    ],
)
def test_samples_on_a_mesh_with_explicit_axes_are_accepted(how, spec):
    values = np.random.default_rng(0).normal(size=(4, 8, FEATURES))
    algorithm, options = (
        jf.pca.PerPCA(1, 1, solver="gradient", decay=0.9),
        {"rounds": 2, "key": jax.random.key(0)},
    )

    def run(values):
        clients = jf.Clients.from_samples(values)
        if how == "rollout":
            return jax.jit(lambda clients: jf.rollout(algorithm, clients, **options))(clients)
        if how == "take":
            return jf.fit(algorithm, clients.take([2, 0]), **options)
        backend = jf.backend.vmap()
        if how == "shard":
            named = jax.make_mesh((4,), ("silos",), axis_types=(AxisType.Explicit,))
            backend = jf.backend.shard(named)
        return jf.fit(algorithm, clients, backend=backend, **options)

    found = run(explicit(values, *spec))
    plain = jf.Clients.from_samples(values)
    wanted = run(values) if how == "take" else jf.fit(algorithm, plain, **options)
    chex.assert_trees_all_close(
        jax.device_get(found.result), jax.device_get(wanted.result), **TIGHT
    )


@pytest.mark.slow
def test_clients_moved_to_explicit_axes_are_refused():
    clients = jf.Clients.from_samples(np.ones((4, 8, FEATURES)))
    clients = eqx.tree_at(lambda c: c.data.values, clients, explicit(np.ones((4, 8, 6)), "silos"))
    algorithm, options = (
        jf.pca.PerPCA(1, 1, solver="gradient", decay=0.9),
        {"rounds": 2, "key": jax.random.key(0)},
    )
    told = r"clients: wanted arrays on meshes of automatic axes, got float64\[4@silos,8,6\]; "
    with pytest.raises(ValueError, match=told):
        jf.fit(algorithm, clients, **options)
    with pytest.raises(ValueError, match=told):
        jax.jit(lambda clients: jf.rollout(algorithm, clients, **options))(clients)
