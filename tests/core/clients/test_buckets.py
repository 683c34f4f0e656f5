"""Clients of very different sizes in a few rectangular arrays: the same results in less memory."""

import functools
import itertools
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed.core.common.buckets import Buckets, grouped
from jaxfed.core.contract.reduction import Gather, Gram, Max, Mean, Sum, Symmetric
from tests.helpers import gaussian_samples

COUNTS = (3, 40, 5, 4, 17, 60, 6, 3, 9, 25)
FEATURES, ROUNDS = 4, 3
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


class Probe(jf.Algorithm):
    """Every kind of message, states, draws; the smaller of two first messages by the size."""

    step: jax.Array

    def first_message(self, key, data, warm_start):
        """Second moments as their triangle or as a factor."""
        rows = data.values * jnp.sqrt(1 / data.count)
        if len(rows) > FEATURES:
            moment = Symmetric((rows.T @ rows)[jnp.triu_indices(FEATURES)])
        else:
            moment = Gram(rows.T)
        return {"moment": moment, "noise": jax.random.normal(key, (2,))}

    def server_init(self, key, first, like, warm_start):
        """What was said, and the smallest vector of all."""
        return {"moment": first["moment"], "direction": first["moment"][0], "seen": first["noise"]}

    def downlink(self, server):
        """A direction."""
        return server["direction"]

    def client_init(self, key, downlink, data, warm_start):
        """The client's own vector."""
        return jax.random.normal(key, (FEATURES,)) + downlink

    def client_step(self, key, downlink, local, data):
        """A step towards the product with the client's moment."""
        product = data.values.T @ (data.values @ (downlink + local)) / data.count
        local = local + self.step * product + 0.01 * jax.random.normal(key, (FEATURES,))
        message = {
            "mean": Mean(product),
            "sum": Sum(local),
            "max": Max(local),
            "gram": Gram(local[:, None]),
            "gather": Gather(local),
        }
        return message, local, {"objective": jnp.sum(local**2)}

    def server_step(self, key, server, uplink):
        """Every part of the message matters."""
        places = jnp.arange(1.0, 1 + len(uplink["gather"]))
        every = (
            uplink["mean"] + uplink["max"] + uplink["gram"][0] + places @ uplink["gather"]
        ) / 100 + uplink["sum"] / 200
        return server | {"direction": every / jnp.linalg.norm(every)}, {}

    def client_result(self, downlink, local, data):
        """The local state, and a number that depends on the client's data."""
        return {"own": local, "scale": data.values.sum() * downlink}


def samples(counts=COUNTS):
    return gaussian_samples(counts, (1,) * FEATURES, dtype=float)


def both(**options):
    """The same clients with and without buckets."""
    make = functools.partial(jf.Clients.from_samples, samples(), weights="samples", **options)
    return make(), make(bucket=1.5)


@functools.partial(jax.jit, static_argnames=("rounds",))
def solve_probe(clients, step=0.1, rounds=ROUNDS, **options):
    return jf.rollout(
        Probe(jnp.asarray(step)), clients, rounds=rounds, key=jax.random.key(0), **options
    )


def essence(solution):
    history = {name: x for name, x in solution.history.items() if not name.startswith("bits")}
    return solution.result, solution.local, solution.server, history


def test_arrays_hold_every_sample_once():
    clients = both()[1]
    assert isinstance(clients.data, Buckets) and len(clients.parts) > 2
    rows = [part.values.shape[1] for part in clients.parts]
    assert rows == sorted(rows, reverse=True)
    held = sum(part.values.shape[0] * part.values.shape[1] for part in clients.parts)
    assert sum(COUNTS) <= held <= 1.5 * sum(COUNTS)
    assert len(clients) == len(COUNTS) and clients.features == FEATURES
    np.testing.assert_array_equal(clients.counts, COUNTS)
    for part, places in zip(clients.parts, clients.data.places, strict=True):
        for values, place in zip(part.values, places, strict=True):
            np.testing.assert_array_equal(values[: COUNTS[place]], np.float32(samples()[place]))
            assert (values[COUNTS[place] :] == 0).all()
    chex.assert_trees_all_equal(clients.unbucketed(), both()[0])
    assert f"{clients.data.sizes[-1]} of 3 to" in repr(clients)


def test_equal_sizes_need_no_buckets():
    for arrays in (samples((5, 5)), np.ones((3, 4, 2))):
        chex.assert_trees_all_equal(
            jf.Clients.from_samples(arrays, bucket=1.5), jf.Clients.from_samples(arrays)
        )


@pytest.mark.parametrize("bucket", [1, 0.5, "1.5", float("nan"), [2]])
def test_unfit_factors_are_refused(bucket):
    with pytest.raises(ValueError, match=r"^bucket: wanted a number of at least 1.1 or None, got"):
        jf.Clients.from_samples(samples(), bucket=bucket)


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=7),
    factor=st.sampled_from([1.1, 1.5, 3.0]),
)
def test_no_fewer_buckets_would_do(sizes, factor):
    sizes = np.asarray(sizes)
    groups = grouped(sizes, factor)
    assert sorted(np.concatenate(groups)) == list(range(len(sizes)))
    rows = sum(len(own) * sizes[own].max() for own in groups)
    assert rows <= factor * sizes.sum()
    fewer = len(groups) - 1
    ordered = np.sort(sizes)
    for cuts in itertools.combinations(range(1, len(sizes)), max(fewer - 1, 0)) if fewer else ():
        parts = np.split(ordered, cuts)
        # Sizes that differ by less than a tenth of the waste count as equal.
        least = sum(len(part) * part.max() for part in parts) * (1 + (factor - 1) / 10)
        assert least > factor * sizes.sum()


def test_heavy_tails_take_few_buckets():
    sizes = np.clip(5 / np.random.default_rng(0).random(2000), 5, 20_000).astype(int)
    groups = grouped(sizes, 1.5)
    assert 5 <= len(groups) <= 10
    assert [sizes[own].max() for own in groups] == sorted(
        (sizes[own].max() for own in groups), reverse=True
    )


long = functools.partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.timeout(300)])
OPTIONS = {
    "nothing else": dict,
    "chunks": lambda: {"backend": jf.backend.chunked(2)},
    "some": lambda: {"participation": jf.participation.uniform(4)},
    "a mask": lambda: {"participation": jf.participation.mask(np.arange(10) % 3 > 0)},
    "devices": lambda: {"backend": jf.backend.shard(4)},
    "pmap": lambda: {"backend": jf.backend.pmap(2, inner=jf.backend.chunked(2))},
    "some, on devices": lambda: {
        "participation": jf.participation.uniform(3),
        "backend": jf.backend.shard(2),
    },
    "fewer bits": lambda: {"channel": jf.channel.quantize(6)},
}


@pytest.mark.parametrize("name", ["chunks", *map(long, sorted(OPTIONS.keys() - {"chunks"}))])
def test_results_equal_those_without_buckets(name, x64):
    wanted, given = (solve_probe(clients, **OPTIONS[name]()) for clients in both())
    chex.assert_trees_all_close(essence(given), essence(wanted), **TIGHT)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_there_is_still_one_all_reduce_per_round():
    def shared(clients):
        algorithm = jf.pca.SubspaceIteration(2)
        run = jf.rollout(
            algorithm, clients, rounds=5, key=jax.random.key(0), backend=jf.backend.shard(4)
        )
        return run.result.shared

    program = jax.jit(shared).lower(both()[1]).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 1


@pytest.mark.slow
def test_each_client_sends_the_smaller_message(x64):
    wide, bucketed = (solve_probe(clients) for clients in both())
    numbers = FEATURES * (FEATURES + 1) // 2 + 2
    sent = (bucketed.history["bits_up"] - wide.history["bits_up"]) / 64
    # Clients with at most four samples send factors.
    small = sum(len(p.values) for p in both()[1].parts if p.values.shape[1] <= FEATURES)
    assert small == 0 or (sent < 0).all()
    first = wide.history["bits_up"][0] - (wide.history["bits_up"][1] - wide.history["bits_up"][0])
    assert first == 64 * numbers


@pytest.mark.slow
def test_difference_coding_and_derivatives(x64):
    """Memories at both ends work with buckets, too."""
    channel = jf.channel.difference(jf.channel.quantize(4))

    def objective(scale, clients):
        data = jax.tree.map(lambda x: scale * x if x.ndim == 3 else x, clients.data)
        run = jf.rollout(
            jf.pca.SubspaceIteration(2),
            eqx.tree_at(lambda c: c.data, clients, data),
            rounds=ROUNDS,
            key=jax.random.key(0),
            channel=channel,
        )
        return run.history["objective"][-1]

    wanted, found = (jax.jit(jax.value_and_grad(objective))(1.0, clients) for clients in both())
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.slow
def test_host_driven_runs_resume(tmp_path, x64):
    wide, clients = both()
    run = functools.partial(
        jf.fit, Probe(jnp.asarray(0.1)), rounds=4, key=jax.random.key(0), rounds_per_chunk=2
    )
    whole = run(clients)
    chex.assert_trees_all_close(essence(whole), essence(run(wide)), **TIGHT)

    def stop(solution):
        return solution.rounds == 2

    checkpoint = jf.Checkpoint(tmp_path, every=2)
    assert run(clients, checkpoint=checkpoint, callbacks=[stop]).rounds == 2
    resumed = run(clients, checkpoint=checkpoint)
    chex.assert_trees_all_equal(essence(resumed), essence(whole))


@pytest.mark.slow
def test_take_and_restrict(x64):
    wide, clients = both()
    for places in ([9, 1, 0, 4], [5], np.arange(10)[::-1]):
        wanted, given = wide.take(places), clients.take(places).unbucketed()
        rows = given.data.values.shape[1]  # those of the longest that was taken
        chex.assert_trees_all_equal((given.ids, given.counts), (wanted.ids, wanted.counts))
        chex.assert_trees_all_equal(given.weights, wanted.weights)
        np.testing.assert_array_equal(given.data.values, wanted.data.values[:, :rows])
    few = {"clients": 6, "samples": 8}
    chex.assert_trees_all_equal(clients.restrict(**few).unbucketed(), wide.restrict(**few))
    with pytest.raises(ValueError, match=r"^indices: wanted positions that are known .* buckets"):
        jax.jit(lambda c, places: c.take(places))(clients, jnp.arange(3))


@pytest.mark.slow
def test_sweeps(x64):
    clients = both()

    def final(clients, step):
        return {"objective": solve_probe(clients, step).history["objective"]}

    wanted, given = (
        jf.grid(jax.tree_util.Partial(final, c), {"step": [0.1, 0.2]})["objective"] for c in clients
    )
    np.testing.assert_allclose(given, wanted, rtol=1e-9)


class Unlike(Probe):
    """A state that depends on the number of samples."""

    def client_init(self, key, downlink, data, warm_start):
        """As many numbers as samples."""
        return jnp.zeros(len(data.values))


def test_states_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"^clients: wanted all of one size, .* what is kept has"):
        jf.fit(Unlike(jnp.asarray(0.1)), both()[1], rounds=1, key=jax.random.key(0))
