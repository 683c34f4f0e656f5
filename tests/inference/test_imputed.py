"""Imputed samples vary too little for tests and intervals; samples with gaps are drawn again."""

import logging
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.clients.samples import IncompleteSamples
from jaxfed.inference.weights import redrawn

KEY = jax.random.key(0)
OPTIONS = {"key": KEY, "resamples": 4}


def planted(rng, clients=4, samples=40, features=6, missing=0.3):
    """Samples with one shared component and a local one each, and the shared one."""
    shared = np.linalg.qr(rng.standard_normal((features, 1)))[0]
    tables = 0.3 * rng.standard_normal((clients, samples, features))
    for table in tables:
        beside = np.concatenate([shared, rng.standard_normal((features, 1))], axis=1)
        local = np.linalg.qr(beside)[0][:, 1:]
        table += 1.5 * rng.standard_normal((samples, 1)) @ shared.T
        table += rng.standard_normal((samples, 1)) @ local.T
    gaps = rng.random(tables.shape) < missing
    gaps[..., 0] &= ~gaps[..., 1:].all(axis=-1)
    return np.where(gaps, np.nan, tables), shared


def learned(clients):
    imputed = jf.fit(jf.preprocess.Impute(1, 1), clients, rounds=50, key=KEY)
    moments = imputed.result.local.moments(clients)
    return jf.fit(jf.pca.PerPCA(1, 1), moments, rounds=40, key=KEY), imputed


def sure(clients, fitted=None, **options):
    solution, imputed = fitted or learned(clients)
    options = {"key": KEY, "resamples": 20, "runs_at_once": 20} | options
    return jf.inference.confidence(solution, clients, impute=imputed, **options)


def masked(tables):
    return jf.Clients.from_samples(list(tables), missing="mask")


@pytest.fixture(scope="module")
def gappy():
    """Clients with gaps, the solution of their moments, and that of the imputation."""
    tables, _ = planted(np.random.default_rng(0))
    clients = masked(tables.astype(np.float32))
    return clients, *learned(clients)


def test_imputed_samples_are_refused(gappy):
    clients, solution, imputed = gappy
    full = imputed.result.local.transform(clients)
    assert full.imputed
    for call in (
        lambda: jf.inference.confidence(solution, full, **OPTIONS),
        lambda: jf.inference.membership(solution, full),
        lambda: jf.inference.bootstrap(solution, full, lambda x, _: x.shared, **OPTIONS),
    ):
        with pytest.raises(ValueError, match="clients: wanted observed samples"):
            call()
    units = jf.fit(jf.preprocess.Standardize("local"), full, rounds=1, key=KEY).result.local
    assert units.transform(full).imputed


def test_complete_samples_remain_observed(gappy):
    _, solution, imputed = gappy
    tables, _ = planted(np.random.default_rng(1), missing=0)
    clients = imputed.result.local.transform(masked(tables.astype(np.float32)))
    assert not clients.imputed
    assert jf.inference.membership(solution, clients).number_sharing.shape == (4, 1)


def angle(solution, shared):
    """Between the shared components and the true ones, of which there is one."""
    return np.arccos(min(1.0, np.abs(shared.T @ np.asarray(solution.result.shared)).item()))


def check_intervals(found, dtype):
    assert found.axes.dtype == found.replicates.dtype == dtype
    assert 0.02 < found.angle < 0.5 and found.replicates.shape == (20, 6, 1)
    assert found.variances.lower < found.variances.estimate < found.variances.upper
    assert found.remarks == ()


def test_samples_with_gaps_are_drawn_again(gappy):
    clients, *fitted = gappy
    check_intervals(sure(clients, fitted), np.float32)


@pytest.mark.slow
def test_samples_with_gaps_are_drawn_again_in_double_precision(x64):
    tables, _ = planted(np.random.default_rng(0))
    check_intervals(sure(masked(tables)), np.float64)


@pytest.mark.slow
def test_without_gaps_intervals_are_the_ordinary_ones(x64):
    tables, _ = planted(np.random.default_rng(1), samples=100, missing=0)
    ordinary = jf.Clients.from_samples(tables)
    solution = jf.fit(jf.pca.PerPCA(1, 1), ordinary, rounds=40, key=KEY)
    many = {"resamples": 400, "runs_at_once": 100}
    for of in ("samples", "clients"):
        wanted = jf.inference.confidence(solution, ordinary, key=KEY, of=of, **many)
        found = sure(masked(tables), of=of, **many)
        np.testing.assert_allclose(found.angle, wanted.angle, rtol=0.15)
        np.testing.assert_allclose(found.axes_std, wanted.axes_std, rtol=0.15)
        for name in ("variances", "shared_energy", "local_energy"):
            here, there = (getattr(x, name) for x in (found, wanted))
            np.testing.assert_allclose(here.estimate, there.estimate, rtol=1e-6)
            width = there.upper - there.lower
            np.testing.assert_allclose(here.upper - here.lower, width, rtol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.1, 0.4])
def test_bounds_contain_the_true_angle(missing, x64):
    """`python -m bench.tables.confidence gaps` draws more, larger samples."""
    rng = np.random.default_rng(2)
    inside, larger, draws = 0, 0, 15
    for _ in range(draws):
        tables, shared = planted(rng, clients=5, samples=60, features=8, missing=missing)
        clients = masked(tables)
        solution, imputed = learned(clients)
        options = {"key": KEY, "resamples": 50, "runs_at_once": 50}
        found = jf.inference.confidence(solution, clients, impute=imputed, **options)
        # As the moments without their uncertainty would have it.
        short = jf.Clients.from_samples(imputed.result.local.transform(clients).data.values)
        naive = jf.inference.confidence(solution, short, **options)
        inside += angle(solution, shared) <= found.angle
        larger += found.angle > naive.angle
    assert inside >= 12 and larger >= 12


@pytest.mark.slow
def test_intervals_do_not_depend_on_units_padding_or_the_order_of_clients(x64):
    tables, _ = planted(np.random.default_rng(3))
    clients = masked(tables)
    wanted = sure(clients)
    for factor in (1e-6, 1e6):
        found = sure(masked(factor * tables))
        np.testing.assert_allclose(found.angle, wanted.angle, rtol=1e-3)
        np.testing.assert_allclose(found.variances.upper, factor**2 * wanted.variances.upper, 1e-3)
    longer = eqx.tree_at(lambda x: x.data, clients, clients.data.filled((50,)))
    for other in (longer, clients.take([2, 0, 3, 1])):
        np.testing.assert_allclose(sure(other).angle, wanted.angle, rtol=1e-3)


def test_rows_are_drawn_so_that_means_vary_as_between_samples(x64):
    values = np.random.default_rng(4).normal(size=(6, 2))
    values[1, 1] = np.nan
    data = IncompleteSamples(jax.numpy.asarray(values), jax.numpy.asarray(6.0))
    drawn = jax.vmap(redrawn, (None, 0, None))(KEY, np.arange(20_000), data)
    assert set(np.asarray(drawn.values[:, :5, 0]).ravel()) == set(values[:, 0])
    assert np.all(drawn.count == 5) and np.all(drawn.values[:, 5] == 0)
    gaps = np.isnan(drawn.values[:, :5, 1])
    np.testing.assert_array_equal(gaps, drawn.values[:, :5, 0] == values[1, 0])
    spread = np.asarray(drawn.values[:, :5, 0]).mean(axis=1).var()
    assert spread == pytest.approx(values[:, 0].var(ddof=1) / 6, rel=0.05)
    longer = jax.vmap(redrawn, (None, 0, None))(KEY, np.arange(9), data.filled((8,)))
    np.testing.assert_array_equal(longer.values[:, :6], drawn.values[:9])


def test_what_is_no_imputation_of_these_samples_is_refused(gappy):
    clients, solution, imputed = gappy
    full = imputed.result.local.transform(clients)

    def confidence(clients=clients, solution=solution, **more):
        return jf.inference.confidence(solution, clients, **OPTIONS, **more)

    few = masked(np.asarray(clients.data.values)[:, :2])
    one = jf.fit(jf.pca.TCMF(1, 1, threshold=1.0), full, rounds=2, key=KEY)
    for said, call in {
        r"clients: wanted complete samples for confidence, got some with gaps; .* as impute": (
            lambda: confidence()
        ),
        r"clients: wanted observed samples for bootstrap, got imputed ones": (
            lambda: confidence(full, impute=imputed)
        ),
        r"impute: wanted the solution of jaxfed.preprocess.Impute .*, got 'PerPCA'": (
            lambda: confidence(impute=solution)
        ),
        r"impute: wanted a jaxfed.Solution": lambda: confidence(impute=imputed.result),
        r"method: wanted 'refit' with impute, got 'one_step'": (
            lambda: confidence(impute=imputed, method="one_step")
        ),
        r"clients: wanted at least 3 samples": lambda: confidence(few, impute=imputed),
        r"clients: wanted samples": (
            lambda: confidence(imputed.result.local.moments(clients), impute=imputed)
        ),
        r"algorithm: wanted one that sees samples through second moments": (
            lambda: confidence(solution=one, impute=imputed)
        ),
    }.items():
        with pytest.raises(ValueError, match=said):
            call()


def test_a_mark_compiles_no_other_program(caplog):
    tables, _ = planted(np.random.default_rng(1), missing=0)
    clients = jf.Clients.from_samples(tables.astype(np.float32))
    one = jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=KEY)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        other = jf.fit(jf.pca.Pooled(2), replace(clients, imputed=True), rounds=1, key=KEY)
    assert "Compiling" not in caplog.text
    np.testing.assert_array_equal(one.result.shared, other.result.shared)
