"""The TPU's own compiler, on a machine that has no TPU."""

import os
from functools import cache

import jax
import jax.numpy as jnp
import pytest

# No question to a cloud's metadata server; and several processes of tests may load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@cache
def chip(topology="v5e:2x2"):
    """One chip of a kind."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install libtpu")
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]


def array(*shape, dtype=jnp.float32):
    """What stands for an array on the chip."""
    place = jax.sharding.SingleDeviceSharding(chip())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def compiled(f, *arrays):
    """A program for the chip."""
    return jax.jit(f).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
