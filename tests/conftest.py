"""Settings of every test: eight devices on the processor, keys, double precision on request."""

import functools
import gc
import os
import time
from importlib.metadata import version
from pathlib import Path

# Before JAX starts. Eight devices, so that the device backends are tested without any accelerator;
# and compilation by the shortest way, because the tests compile much and compute little. What the
# caller has set comes last and wins.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        # Later versions have no other emitters, and refuse the flag.
        *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import pytest
from hypothesis import settings

from tests.drawing import drawn_cases, listed_as_slow

LISTED_AS_SLOW = listed_as_slow()

# Compilation makes the first example slow, whatever the code under test does.
settings.register_profile("jaxfed", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("jaxfed")


def pytest_configure(config):
    """Compile every program once, whichever test, process or run of the suite needs it.

    JAX keeps programs apart by the whole of XLA_FLAGS, so those for other processors too.
    """
    config.addinivalue_line("markers", "float16: computes in half precision")
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("user"))  # of the command line
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser):
    """Options by which a run takes some cases of each test."""
    about = "of each folder's cases, run one in so many, but at least one"
    parser.addoption("--one-in", type=int, default=1, help=about)
    parser.addoption("--draw", default="", help="any text; another one draws other cases")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests and cases that are listed as slow, and of those selected, keep those drawn."""
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & LISTED_AS_SLOW:
            item.add_marker(pytest.mark.slow)
    result = yield  # -m deselects
    names = [item.nodeid for item in items]
    kept = drawn_cases(names, config.getoption("one_in"), config.getoption("draw"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
    return result


def pytest_collection_finish():
    """Tracing makes many objects and little garbage, and what is imported by now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@functools.cache
def has_float16():
    """Whether XLA's programs for this processor convert half precision: some lack the symbols."""
    try:
        jax.jit(lambda x: x.astype("float16").astype("float32"))(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pytest_runtest_setup(item):
    """Skip half precision where it is not to be had."""
    if item.get_closest_marker("float16") and not has_float16():
        pytest.skip("XLA has no float16 conversions for this processor")


def forget_compiled_functions(over):
    """Each compiled function holds memory maps, and a process may hold only so many.

    65,530 on Linux by default: the process crashes beyond. Before that come 3 GB of memory.
    """
    maps = Path("/proc/self/maps")
    held = maps.read_bytes().count(b"\n") if maps.exists() else 10_000  # not known elsewhere
    if held > over:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def few_compiled_functions():
    """What a module leaves fits the next."""
    yield
    forget_compiled_functions(8_000)


@pytest.fixture(autouse=True)
def not_too_many_compiled_functions():
    """A module alone may compile too much; a test that is done at once does not."""
    start = time.monotonic()
    yield
    if time.monotonic() - start > 0.5:
        forget_compiled_functions(30_000)


@pytest.fixture
def key():
    """A fixed random key."""
    return jax.random.key(0)


@pytest.fixture
def environment():
    """That of a process with one device, which compiles as the tests do."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
