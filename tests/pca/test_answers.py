"""Default arguments find the answer: on planted problems, and as well as a run from the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfed as jf
from bench.common import label
from bench.tables.answers import FAMILIES, METHODS, ROUNDS, draw, error, ranks, residual

FEW = "three clients", "three clients, local strong"
ORDINARY = ("balanced", "shared strong", "local strong", "exact moments", *FEW)


def check(name, method, seed):
    family, (_, rank) = FAMILIES[name], ranks(FAMILIES[name])
    drawn = draw(family, seed)
    clients, key = jf.Clients.from_samples(drawn.samples), jax.random.key(seed)
    found = jf.fit(METHODS[method](family), clients, rounds=ROUNDS, key=key).result.shared
    paper = jf.pca.PerPCA(*ranks(family), local_penalty=0.0)
    truth = jf.Personalized(jnp.asarray(drawn.shared, jnp.float32), None)
    best = jf.fit(paper, clients, rounds=ROUNDS, key=key, warm_start=truth).result.shared
    assert residual(drawn.samples, found, rank) < 1.005 * residual(drawn.samples, best, rank)
    assert error(found, drawn.shared) < 0.02 + 1.5 * error(best, drawn.shared)
    if name not in FEW:
        assert error(found, drawn.shared) < 0.1


def test_strong_shared_components_are_found():
    check("shared strong", "PerPCA", 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=6)
@given(name=st.sampled_from(ORDINARY), seed=st.integers(0, 2**31 - 1))
def test_default_arguments_find_the_answer(method, name, seed):
    check(name, method, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [jf.pca.EmpiricalBayesPCA(2), jf.pca.HMF(2, 2), jf.pca.PerPCA(2, 2)],
    ids=label,
)
def test_uncorrelated_features_hold_no_run_at_a_saddle_point(algorithm):
    for seed in 0, 12:  # where components computed from the moments are such a point
        drawn = np.random.default_rng(seed)
        axes = np.sqrt(8 * np.exp(drawn.normal(0, 1.2, (6, 8))))[:, None, :] * np.eye(8)
        samples = np.concatenate([axes, -axes], axis=1)
        clients = jf.Clients.from_samples(samples.astype(np.float32))
        run = jf.fit(algorithm, clients, rounds=100, key=jax.random.key(seed), throw=False)
        moved = run.result.shared + 0.02 * drawn.normal(size=(8, 2))
        near = jf.Personalized(jnp.linalg.qr(moved)[0].astype(jnp.float32), None)
        again = jf.fit(
            algorithm, clients, rounds=100, key=jax.random.key(seed), warm_start=near, throw=False
        )
        ends = [float(each.history["objective"][-1]) for each in (run, again)]
        assert ends[0] - ends[1] < 1e-3 * abs(ends[0]), (seed, ends)
