"""Default arguments find the answer: on planted problems, and as well as a run from the truth."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfed as jf
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
