"""Samples in bfloat16: kept and read so; all that is computed is in single precision."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfed as jf
from bench.tables import accelerator_matrix as matrix
from jaxfed.linalg import Moment

# Its hard threshold keeps or drops whole entries, which a sample's rounding can push across it.
DISCONTINUOUS = {"TCMF"}
VIEWS = {"MaxVar", "DeepMaxVar", "MVLSA", "AJIVE"}
CASES = [case for case in matrix.CASES if case not in VIEWS]


def clients_of(case, samples=None, dtype=None):
    """The common problem's clients, of their first samples alone and in another type."""
    clients, warm = matrix.problem(case)
    values = clients.data.values[:, :samples]
    return jf.Clients.from_samples(values if dtype is None else values.astype(dtype)), warm


@partial(jax.jit, static_argnames="name")
def ended(name, clients, warm):
    case = matrix.CASES[name]
    solution = jf.rollout(
        case.make(),
        clients,
        rounds=case.rounds or 3,
        key=jax.random.key(0),
        warm_start=warm if case.warm else None,
    )
    return solution.result, solution.history["objective"], solution.state


@pytest.mark.slow
@pytest.mark.parametrize("samples", [60, 20], ids=["many samples", "few samples"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_same_samples_in_single_precision(case, samples):
    clients, warm = clients_of(case, samples, jnp.bfloat16)
    rounded = jf.Clients.from_samples(clients.data.values.astype(jnp.float32))
    found, expected = ended(case, clients, warm), ended(case, rounded, warm)
    chex.assert_trees_all_equal_dtypes(found, expected)
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-4)
    full = ended(case, clients_of(case, samples)[0], warm)[1]
    np.testing.assert_allclose(found[1], full, rtol=0.03 if case in DISCONTINUOUS else 0.01)


def test_clients_keep_them_and_count_in_single_precision():
    x = np.arange(24.0).reshape(2, 3, 4).astype(ml_dtypes.bfloat16)
    several = [jnp.asarray(x[0]), x[1, :2]]
    for given, counts in ((x, [3, 3]), (jnp.asarray(x), [3, 3]), (several, [3, 2])):
        clients = jf.Clients.from_samples(given, weights="samples")
        assert clients.data.values.dtype == jnp.bfloat16
        assert clients.data.count.dtype == clients.weights.dtype == jnp.float32
        np.testing.assert_array_equal(clients.data.count, counts)
    buckets = jf.Clients.from_samples([x[0], x[1, :1]], bucket=1.1)
    assert [part.values.dtype for part in buckets.parts] == [jnp.bfloat16] * 2
    assert [part.count.dtype for part in buckets.parts] == [jnp.float32] * 2
    assert clients.restrict(samples=1).data.values.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(40, 12), (6, 30), (20, 80)])
def test_moments_compute_in_single_precision(shape):
    """As well as those of the same numbers, and far better than bfloat16's three digits."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    w = jnp.asarray(np.linalg.qr(rng.normal(size=(shape[1], 3)))[0], jnp.float32)
    half, single = Moment.from_samples(x), Moment.from_samples(x.astype(jnp.float32))
    assert half.samples.dtype == jnp.bfloat16
    for ask in (
        lambda m: m.mv(w),
        lambda m: m.row_products(w.T),
        lambda m: m.quadratic(w),
        lambda m: m.matrix(),
        lambda m: m.deflate(w).matrix(),
        lambda m: m.top(3)[0],
        lambda m: m.top(2, beside=w)[0],
        lambda m: m.trace,
    ):
        found, expected = ask(half), ask(single)
        chex.assert_trees_all_equal_dtypes(found, expected)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_derivatives_by_them(key):
    clients = jf.Clients.from_samples(jax.random.normal(key, (3, 20, 8)).astype(jnp.bfloat16))

    def loss(values):
        data = jf.Samples(values, clients.data.count)
        given = jf.Clients(data, clients.ids, clients.weights)
        found = jf.rollout(jf.pca.SubspaceIteration(2), given, rounds=3, key=key)
        return found.history["objective"][-1]

    values = clients.data.values
    slope = jax.jit(jax.grad(loss))(values)
    assert slope.dtype == jnp.bfloat16
    expected = jax.jit(jax.grad(loss))(values.astype(jnp.float32))
    error = jnp.linalg.norm(slope.astype(jnp.float32) - expected)
    assert error <= 1e-2 * jnp.linalg.norm(expected)


@pytest.mark.slow
def test_metrics_and_new_clients_take_them(key):
    x = jax.random.normal(key, (3, 20, 6)).astype(jnp.bfloat16)
    precise = x.astype(jnp.float32)
    solution = jf.fit(
        jf.pca.PerPCA(1, 1, solver="gradient"), jf.Clients.from_samples(x), rounds=2, key=key
    )
    shared, local = solution.result
    for samples in (x, list(x)):
        found = jf.metrics.reconstruction_error(jf.Personalized(shared, local), samples)
        expected = jf.metrics.reconstruction_error(jf.Personalized(shared, local), precise)
        assert found.dtype == jnp.float32
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
    found = jf.pca.fit_local(solution, x, rank=1).local
    chex.assert_trees_all_close(found, jf.pca.fit_local(solution, precise, rank=1).local, atol=1e-4)
