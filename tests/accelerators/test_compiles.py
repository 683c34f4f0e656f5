"""Runs compile for TPUs and GPUs by those machines' own compilers; nothing runs there.

A part of `bench/tables/accelerator_matrix.py`, which has every algorithm with every channel.
"""

import importlib.util
import re
import time

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxfed as jf
from bench.tables import accelerator_matrix as matrix
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.loop import Options, whole_run
from jaxfed.core.run.runner import programs
from jaxfed.planning.targets import compiled, target

COMPILERS = {"v5e": "libtpu", "h100": "jax_cuda12_plugin"}


def place(name):
    """A target, or a skipped test where its compiler is not installed."""
    package = COMPILERS[name.partition(":")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[aot]'")
    return target(name)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
both = pytest.mark.parametrize("name", ["v5e:2x2", "h100"])
# One of each sort of program: steps with polar factors, with QR and Cholesky's, with eigenvectors;
# views; networks that are trained.
KINDS = [
    "PerPCA, gradient",
    "HierarchicalPCA",
    "MaxVar",
    "DeepMaxVar",
    "AdaptiveTraining.autoencoder",
    "AdaptiveTraining.diffusion",
]


def check_compiled(name, given):
    """Compile a program, which one device runs by itself and which returns what it should."""
    found = matrix.compile_for(place(name), given)
    memory = found.program.memory_analysis()
    assert memory.argument_size_in_bytes > 0 and found.all_reduces == 0
    returned = jax.eval_shape(given.function, *given.arguments)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(returned))
    assert memory.output_size_in_bytes >= size > 0
    return found, returned


@both
@pytest.mark.parametrize("kind", KINDS)
def test_runs(name, kind):
    check_compiled(name, matrix.program(kind, "lossless", "forward"))


@both
def test_eigenvectors_of_hierarchical_pca(name):
    clients, _ = matrix.problem("HierarchicalPCA")
    algorithm = jf.pca.HierarchicalPCA(3, 0.5, 0.1, solver="eigenvectors")

    def run(algorithm, clients):
        return jf.rollout(algorithm, clients, rounds=10, key=jax.random.key(0)).result

    check_compiled(name, matrix.Program(jax.jit(run), (algorithm, clients)))


@both
@pytest.mark.parametrize("way", [way for way in matrix.WAYS if way != "lossless"])
def test_channels(name, way):
    ways = [matrix.program("SubspaceIteration", each, "forward") for each in ("lossless", way)]
    plain, found = (check_compiled(name, given)[0].program.as_text() for given in ways)
    # What becomes of messages is in the program too.
    assert found.count(" = ") > plain.count(" = ")


@both
@pytest.mark.parametrize("way", ["lossless", "difference of 3 bits"])
def test_gradients(name, way):
    given = matrix.program("SubspaceIteration", way, "gradient")
    _, gradient = check_compiled(name, given)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, given.arguments[0])


@pytest.mark.parametrize(("name", "devices"), [("v5e:2x2", 4), ("v5e:4x4", 16), ("h100:8", 8)])
def test_shards(name, devices):
    spread = place(name)
    assert len(spread.devices) == devices
    backend = jf.backend.shard(spread.mesh())
    found = matrix.compile_for(
        spread, matrix.program("SubspaceIteration", "lossless", "forward", backend)
    )
    # One in the rounds' loop, and those before it.
    assert 1 <= found.all_reduces <= 3


@both
def test_sweeps(name):
    _, objective = check_compiled(name, matrix.sweep())
    assert objective.shape == (64, matrix.ROUNDS)


def test_no_interpreter_and_no_library_within_a_program_for_a_tpu():
    found = matrix.compile_for(place("v5e:2x2"), matrix.program("PerPCA", "lossless", "forward"))
    called = set(re.findall(r'custom_call_target="([^"]+)"', found.program.as_text()))
    assert not called & {"Eigh", "Qr", "ProductOfElementaryHouseholderReflectors"}
    assert not [name for name in called if "callback" in name]


@pytest.mark.parametrize(
    ("algorithm", "clients_per_block"),
    [
        (jf.pca.SubspaceIteration(2), None),
        (jf.pca.PerPCA(2, 1, solver="gradient"), 128),
        (jf.pca.HierarchicalPCA(2, noise_variance=0.1), None),
        (jf.pca.BlockLanczos(2), 100),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_plan_is_what_the_program_takes(algorithm, clients_per_block):
    where = place("v5e")
    shapes = jf.shapes_of(256, 8, 32)
    plan = jf.plan(algorithm, shapes, topology="v5e", rounds=5, clients_per_block=clients_per_block)
    assert plan.fits and plan.devices == 1 and plan.available == 16 * 2**30
    # The user's own program: `fit`'s, lowered for one chip with arrays.
    clients = jf.Clients.from_samples(jnp.ones((256, 8, 32)))
    problem, start = problem_of(
        algorithm,
        clients,
        5,
        jax.random.key(0),
        None,
        jf.channel.lossless(),
        None,
        jf.backend.vmap() if clients_per_block is None else jf.backend.chunked(clients_per_block),
    )
    options = Options(5, stops=False)
    found = compiled(programs()(whole_run), problem, start, None, options, target=where)
    memory = found.program.memory_analysis()
    assert plan.memory is not None
    assert plan.memory.temporaries == memory.temp_size_in_bytes
    assert plan.memory.arguments == memory.argument_size_in_bytes
    assert plan.memory.code == memory.generated_code_size_in_bytes


def test_a_plan_finds_blocks_that_fit():
    place("v5e")
    plan = jf.plan(
        jf.pca.SubspaceIteration(2),
        jf.shapes_of(10**8, 8, 32),
        topology="v5e",
        rounds=2,
        clients_per_block=4096,
    )
    assert plan.fits is False and plan.memory is None
    assert plan.needed > plan.available and "devices" in plan.advice


@pytest.mark.parametrize("clients", [10**6, 8 * 10**6])
def test_millions_of_small_clients_fit_one_chip(clients):
    place("v5e")
    begun = time.process_time()
    plan = jf.plan(
        jf.pca.PerPCA(3, 2, solver="gradient"),
        jf.shapes_of(clients, 8, 32),
        topology="v5e",
        rounds=10,
        clients_per_block=1024,
    )
    assert plan.fits and plan.memory is not None
    assert plan.memory.temporaries < 3e9 and plan.memory.code < 20e6
    assert time.process_time() - begun < 60  # some 13; minutes where something goes wrong
