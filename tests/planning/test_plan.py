"""Plans by this processor's compiler; those of accelerators are in tests/accelerators."""

import importlib
import importlib.util

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import main
from jaxfed.core.backends.one_device import _block
from jaxfed.core.round.problem import Costs
from jaxfed.planning.targets import Target

plan_module = importlib.import_module("jaxfed.planning.plan")
COSTS = Costs(*[0] * 5, *[np.zeros((), np.uint32)] * 2, False)


def test_a_plan_counts_messages_and_memory():
    plan = jf.plan(jf.pca.Pooled(2), jf.shapes_of(12, 8, 6), topology="cpu", rounds=1)
    assert (plan.devices, plan.clients, plan.fits, plan.clients_per_block) == (1, 12, None, None)
    assert plan.first_bytes_up == 4 * 6 * 7 // 2 and plan.bytes_up == 0 and not plan.varies
    assert plan.memory is not None and plan.needed == plan.memory.total
    # The samples are among them; what a run does not need is left out.
    assert plan.memory.arguments >= 4 * 12 * 8 * 6
    assert "nothing ran" in str(plan)


def test_shapes_are_those_of_samples():
    like = jax.eval_shape(jf.Clients.from_samples, jax.ShapeDtypeStruct((3, 4, 5), "float32"))
    assert jax.tree.structure(jf.shapes_of(3, 4, 5)) == jax.tree.structure(like)
    with pytest.raises(ValueError, match=r"^samples: "):
        jf.shapes_of(3, 0, 5)


@pytest.mark.parametrize("topology", ["gpu", "v5e4x4", "h100:0"])
def test_unknown_places_are_refused(topology):
    with pytest.raises(ValueError, match=r"^topology: wanted .*, got"):
        jf.plan(jf.pca.Pooled(2), jf.shapes_of(2, 3, 4), topology=topology)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="it is installed")
def test_a_missing_compiler_is_told():
    with pytest.raises(ImportError, match=r"libtpu .*jaxfed\[aot\]"):
        jf.plan(jf.pca.Pooled(2), jf.shapes_of(2, 3, 4), topology="v5e:2x2")


def test_the_command_plans(capsys):
    given = "plan pooled --clients 6 --samples 4 --features 5 --rank 2 --topology cpu"
    assert main(given.split()) == 0
    assert "memory of a device" in capsys.readouterr().out


def test_blocks_share_few_clients():
    assert [_block(m, 4096) for m in (8192, 10**6, 8 * 10**6)] == [4096, 4096, 3200]
    assert [_block(m, 100) for m in (150, 10007, 130)] == [75, 100, 65]
    for clients in (1030, 10007, 10**6):
        for most in (1, 3, 100, 1024):
            size = _block(clients, most)
            assert most / 2 < size <= most and -clients % size <= clients / 100


def planned(monkeypatch, fixed, each):
    """A plan for a device of 100 bytes by a compiler of known needs, and what it was asked for."""
    asked = []

    def attempt(place, run, mapped, size):
        asked.append(size)
        needed = fixed + each * (size or 4096)
        return plan_module._Attempt(size, needed <= 100, needed, 1.0, None, COSTS, fixed)

    place = Target("one", "tpu", (jax.devices("cpu")[0],), 100)
    monkeypatch.setattr(plan_module, "target", lambda name: place)
    monkeypatch.setattr(plan_module, "_attempt", attempt)
    plan = jf.plan(jf.pca.Pooled(2), jf.shapes_of(4096, 3, 4), topology="one")
    return plan, asked


def test_blocks_are_sought_where_they_should_fit(monkeypatch):
    """Two attempts and not a dozen, each of which may take a minute."""
    plan, asked = planned(monkeypatch, fixed=10, each=0.5)
    assert asked == [None, 128] and plan.fits and plan.clients_per_block == 128
    assert planned(monkeypatch, fixed=10, each=0.01)[1] == [None]
    plan, asked = planned(monkeypatch, fixed=200, each=0.5)
    assert (
        asked == [None] and plan.fits is False and plan.advice.startswith("about 23 such devices")
    )
    # Of what is refused by its arguments nothing more is known.
    plan, _ = planned(monkeypatch, fixed=250, each=0)
    assert plan.advice.startswith("more than 3 such devices")
    plan, asked = planned(monkeypatch, fixed=10, each=90)
    assert asked == [None] and plan.fits is False


def test_what_is_more_than_a_device_holds_is_not_compiled(monkeypatch):
    place = Target("one", "tpu", (jax.devices("cpu")[0],), 1000)
    monkeypatch.setattr(plan_module, "target", lambda name: place)
    plan = jf.plan(jf.pca.Pooled(2), jf.shapes_of(12, 8, 6), topology="one")
    assert plan.fits is False and plan.memory is None and plan.seconds == 0
    assert plan.needed == 4 * 12 * (8 * 6 + 3)  # samples, counts, ids and weights
