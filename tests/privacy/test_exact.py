"""Noise that is sampled exactly, on a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxfed as jf
from jaxfed import privacy

pytest.importorskip("opendp")
from jaxfed.privacy._exact import with_exact_noise

OPTIONS = {"epsilon": 1.0, "delta": 1e-5, "noise": "opendp"}
CLIENTS = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(2, 30, 5)))


def test_it_is_normal_with_equal_deviations_in_the_frobenius_norm():
    size, deviation = 450, 3e-4  # about 10⁵ entries
    found = with_exact_noise(np.zeros((size, size)), deviation, 3.7)
    np.testing.assert_array_equal(found, found.T)
    above = np.triu_indices(size, 1)
    for draws, unit in ((np.diagonal(found), 1.0), (found[above], 2**-0.5)):
        scaled = draws / (deviation * unit)
        assert scipy.stats.kstest(scaled, "norm").pvalue > 1e-4
        assert abs(scaled.mean()) < 4.5 / len(scaled) ** 0.5
        np.testing.assert_allclose(scaled.std(), 1, atol=4.5 / (2 * len(scaled)) ** 0.5)
    assert abs(np.corrcoef(found[above][:-1], found[above][1:])[0, 1]) < 0.02


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("people", [4, 1e6, 1e12])  # a moment has this many deviations
def test_the_moment_is_below_the_noise(unit, people):
    matrix = np.diag([3.0, 2.0, 1.0]) * unit
    deviation = unit / people
    draws = [with_exact_noise(matrix, deviation, 3.7) - matrix for _ in range(40)]
    errors = np.stack(draws)[:, *np.triu_indices(3)] / deviation
    assert 0.3 < np.abs(errors).mean() < 1.2
    assert np.abs(errors).max() < 8


def test_rounding_is_paid_for(monkeypatch):
    """The noise is as large as for moments that also moved by a step in every entry."""
    import opendp.prelude as dp

    scales = []
    make = dp.m.make_gaussian

    def recording(*space, scale):
        scales.append(scale)
        return make(*space, scale=scale)

    monkeypatch.setattr(dp.m, "make_gaussian", recording)
    with_exact_noise(np.eye(50), 0.1, 4.0)
    assert scales == [2.0**36 + 4 * np.sqrt(50 * 51 / 2)]


def test_a_release():
    found = privacy.release_moments(CLIENTS, **OPTIONS)
    again = privacy.release_moments(CLIENTS, **OPTIONS)
    assert found.guarantee.mechanism == "discrete Gaussian"
    assert found.data.dense.dtype == np.float32
    np.testing.assert_array_equal(found.data.dense, np.swapaxes(found.data.dense, 1, 2))
    assert (np.asarray(found.data.dense) != np.asarray(again.data.dense)).all()
    simulated = privacy.release_moments(CLIENTS, **(OPTIONS | {"noise": "jax"}))
    assert "for simulations" in privacy.statement(simulated)
    assert "for simulations" not in privacy.statement(found)
    assert simulated.guarantee.noise_multiplier == found.guarantee.noise_multiplier


@pytest.mark.parametrize("rows", ["directions", "clip"])
def test_little_noise_leaves_the_moment(rows):
    """In double precision, so that a person moves it no further by rounding."""
    options = {
        "epsilon": 1e8,
        "delta": 1e-5,
        "rows": rows,
        "bound": 2.0 if rows == "clip" else None,
    }
    found = privacy.release_moments(CLIENTS, noise="opendp", **options).data.dense
    wanted = privacy.release_moments(CLIENTS, key=jax.random.key(0), **options).data.dense
    np.testing.assert_allclose(found, wanted, atol=2e-4 * float(np.abs(wanted).max()))


def test_it_has_no_key_and_is_not_compiled():
    with pytest.raises(ValueError, match="key: wanted None with noise='opendp'"):
        privacy.release_moments(CLIENTS, key=jax.random.key(0), **OPTIONS)

    def traced(x):
        return privacy.release_moments(jf.Clients.from_samples(x), **OPTIONS).data.dense

    with pytest.raises(ValueError, match="noise='opendp', and no jit"):
        jax.jit(traced)(jnp.ones((2, 6, 3)))
    with pytest.raises(ValueError, match="noise: "):
        privacy.release_moments(CLIENTS, **(OPTIONS | {"noise": "laplace"}))
