"""Imputed samples vary too little for tests and intervals."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxfed as jf

KEY = jax.random.key(0)
OPTIONS = {"key": KEY, "resamples": 4}


@pytest.fixture(scope="module")
def tables():
    return np.random.default_rng(0).normal(size=(4, 20, 5)).astype(np.float32)


def imputed(tables):
    clients = jf.Clients.from_samples(list(tables), missing="mask")
    models = jf.fit(jf.preprocess.Impute(1, 1), clients, rounds=3, key=KEY).result.local
    return models.transform(clients)


def test_imputed_samples_are_refused(tables):
    gaps = np.where(np.random.default_rng(1).random(tables.shape) < 0.2, np.nan, tables)
    clients = imputed(gaps)
    assert clients.imputed
    solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=5, key=KEY)
    for call in (
        lambda: jf.inference.confidence(solution, clients, **OPTIONS),
        lambda: jf.inference.membership(solution, clients),
        lambda: jf.inference.bootstrap(solution, clients, lambda x, _: x.shared, **OPTIONS),
    ):
        with pytest.raises(ValueError, match="clients: wanted observed samples"):
            call()
    units = jf.fit(jf.preprocess.Standardize("local"), clients, rounds=1, key=KEY).result.local
    assert units.transform(clients).imputed


def test_complete_samples_remain_observed(tables):
    clients = imputed(tables)
    assert not clients.imputed
    solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=5, key=KEY)
    assert jf.inference.membership(solution, clients).number_sharing.shape == (4, 1)


def test_a_mark_compiles_no_other_program(tables, caplog):
    clients = jf.Clients.from_samples(tables)
    one = jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=KEY)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        other = jf.fit(jf.pca.Pooled(2), replace(clients, imputed=True), rounds=1, key=KEY)
    assert "Compiling" not in caplog.text
    np.testing.assert_array_equal(one.result.shared, other.result.shared)
