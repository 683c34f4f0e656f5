"""Means and deviations that protect persons: how far one moves them, and what noise they have."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import kstest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.privacy import units

release = functools.partial(privacy.release_units, lower=-5.0, upper=5.0, epsilon=1.0, delta=1e-5)


def samples(counts=(400, 300, 500), features=4, scale=1.0):
    rng = np.random.default_rng(0)
    return [scale * (rng.normal(size=(n, features)) + np.arange(features)) for n in counts]


@pytest.mark.parametrize("neighbours", ["replace", "add_remove"])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_person_moves_the_sums_as_far_as_the_noise_is_for_and_no_further(neighbours, rows):
    """Neighbours found by an optimizer; the rows of a person count together as one."""
    features = 3
    most = (units.APART if neighbours == "replace" else units.AWAY) ** 0.5 * features**0.5

    def contribution(x):
        inside = np.clip(x.reshape(rows, features), -1, 1)
        return np.concatenate([inside / 3**0.5, inside**2 - 2 / 3], axis=1).mean(axis=0)

    def moved(x):
        first, second = np.split(x, 2)
        other = contribution(second) if neighbours == "replace" else 0
        return np.linalg.norm(contribution(first) - other)

    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        start = rng.uniform(-1, 1, 2 * rows * features)
        bounds = [(-1, 1)] * len(start)
        found.append(moved(minimize(lambda x: -moved(x), start, bounds=bounds).x))
    assert 0.95 * most < max(found) <= most * (1 + 1e-9)


@pytest.mark.parametrize("neighbours", ["replace", "add_remove"])
def test_noise_has_the_deviation_that_is_said(neighbours):
    clients = jf.Clients.from_samples(samples((10, 12)))
    drawn = [
        release(clients, neighbours=neighbours, epsilon=50.0, key=jax.random.key(i))
        for i in range(300)
    ]
    exact = np.concatenate(samples((10, 12))).clip(-5, 5).mean(axis=0)
    errors = np.stack([x.units.mean - exact for x in drawn]) / drawn[0].mean_error
    assert kstest(errors.ravel(), "norm").pvalue > 1e-3
    far = (units.APART if neighbours == "replace" else units.AWAY) ** 0.5 * 2
    multiplier = drawn[0].guarantee.noise_multiplier
    wanted = 5 * 3**0.5 * multiplier * far * 2**0.5 / 22
    np.testing.assert_allclose(drawn[0].mean_error, wanted, rtol=1e-5)


@pytest.mark.parametrize("noise", ["jax", "opendp"])
def test_means_and_deviations_are_those_of_all_rows(noise):
    if noise == "opendp":
        pytest.importorskip("opendp")
    pooled = np.concatenate(samples())
    clients = jf.Clients.from_samples(samples())
    found = release(clients, epsilon=1000.0, noise=noise, delta=1e-4)
    np.testing.assert_allclose(found.units.mean, pooled.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(found.units.scale, pooled.std(axis=0), rtol=0.1)
    scaled = found.units.transform(clients)
    values = np.concatenate(
        [x[:n] for x, n in zip(scaled.data.values, (400, 300, 500), strict=True)]
    )
    np.testing.assert_allclose(values.std(axis=0), 1, rtol=0.1)


def test_rows_of_one_person_count_as_one(key):
    """A person with a hundred rows far away moves a mean no further than another."""
    own = np.zeros((140, 1), np.float32)
    own[:100] = 5
    person = [np.concatenate([np.zeros(100), np.arange(1, 41)])]
    found = release(jf.Clients.from_samples([own]), epsilon=1e6, delta=1e-3, person=person, key=key)
    np.testing.assert_allclose(found.units.mean, 5 / 41, atol=0.01)
    assert found.guarantee.unit == "person"


def test_numbers_outside_of_a_range_are_at_its_ends(key):
    tables = [np.where(np.arange(100) < 50, 1e30, -1.0)[:, None].astype(np.float32)]
    found = release(jf.Clients.from_samples(tables), epsilon=1e6, delta=1e-3, key=key)
    np.testing.assert_allclose(found.units.mean, 2.0, atol=0.01)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_units_do_not_count(scale, key):
    one = release(jf.Clients.from_samples(samples()), key=key)
    tables = samples(scale=scale)
    options = {"lower": -5 * scale, "upper": 5 * scale, "key": key}
    other = release(jf.Clients.from_samples(tables), **options)
    np.testing.assert_allclose(other.units.mean, scale * one.units.mean, rtol=1e-4)
    np.testing.assert_allclose(other.units.scale, scale * one.units.scale, rtol=1e-4)
    np.testing.assert_allclose(other.mean_error, scale * one.mean_error, rtol=1e-5)


def test_clients_of_weight_zero_send_nothing(key):
    tables = [*samples(), 4 + np.zeros((1000, 4))]
    some = jf.Clients.from_samples(tables, weights=[1, 1, 1, 0])
    all_of_them = jf.Clients.from_samples(samples())
    found, wanted = (release(x, key=key) for x in (some, all_of_them))
    np.testing.assert_allclose(found.units.mean, wanted.units.mean, rtol=1e-6)


def test_deviations_that_noise_alone_explains_are_those_of_the_noise(key):
    clients = jf.Clients.from_samples([np.ones((50, 2), np.float32)] * 2)
    found = release(clients, key=key)
    assert (found.units.scale > found.mean_error / 3).all()
    assert np.isfinite(found.units.transform(clients).data.values).all()


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_deviations_that_ranges_spoil_are_said(unit, key, x64):
    values = unit * np.random.default_rng(0).normal(size=(2, 3000, 3))
    values[..., 2] = np.sign(values[..., 2]) * 30 * unit
    clients = jf.Clients.from_samples(values, features=["a", "b", "c"])

    def said(*halves):
        upper = unit * np.array(halves)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            release(clients, lower=-upper, upper=upper, epsilon=1.0, key=key)
        assert {x.category for x in caught} <= {jf.UnitsWarning}
        return [str(each.message) for each in caught]

    assert said(4.0, 4.0, 60.0) == []
    wide, ends = said(4.0, 400.0, 20.0)
    assert wide.startswith("lower, upper: the released deviations of b are hardly above their")
    assert ends.startswith("lower, upper: the released deviations of c are those of numbers at")


def test_a_ledger_pays_and_statements_add_up(tmp_path, key):
    clients = jf.Clients.from_samples(samples())
    ledger = privacy.Ledger(tmp_path / "persons.jsonl", epsilon=1.5, delta=1e-5)
    found = release(clients, ledger=ledger, key=key)
    scaled = found.units.transform(clients)
    options = {"rows": "directions", "epsilon": 1.0, "delta": 1e-5, "ledger": ledger}
    released = privacy.release_moments(scaled, key=key, **options)
    assert "means and deviations" in ledger.path.read_text()
    text = privacy.statement(found, released)
    assert f"Together: epsilon {ledger.spent():.4g}" in text
    assert privacy.statement(found, found) == privacy.statement(found)
    with pytest.raises(ValueError, match=r"^epsilon: wanted at most 1.5"):
        release(clients, ledger=ledger, key=key)


def test_equal_releases_count_twice():
    clients = jf.Clients.from_samples(samples())
    text = privacy.statement(release(clients), release(clients))
    assert "Together: epsilon 1.46" in text


def test_no_noise_is_drawn_twice(key):
    """Neither for another release with the same key, nor for another client."""
    clients = jf.Clients.from_samples([np.zeros((50, 2), np.float32)] * 2)
    exact = release(clients, epsilon=1e9, delta=1e-3, key=key).units.mean
    one, other = (release(clients, epsilon=x, key=key).units.mean - exact for x in (1.0, 1.001))
    assert not np.allclose(one, other, rtol=0.01)
    single = [clients.take([i]) for i in (0, 1)]
    first, second = (release(x, key=key).units.mean - exact for x in single)
    assert not np.allclose(first, second, rtol=0.01)
    np.testing.assert_allclose((first + second) / 2, one, atol=1e-4)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"upper": -5.0}, r"^upper: wanted more than lower, -5, of feature 0"),
        ({"lower": -1e39, "upper": 1e39}, r"^upper: wanted a range from lower, .* of feature 0"),
        ({"lower": [1.0, 2.0]}, r"^lower: wanted a number, or 4 of them"),
        ({"lower": float("nan")}, r"^lower: "),
        ({"epsilon": 0.0}, r"^epsilon: wanted"),
        ({"delta": 1.0}, r"^delta: wanted"),
        ({"noise": "numpy"}, r"^noise: "),
        ({"neighbours": "both"}, r"^neighbours: "),
        ({"person": [[1, 2]]}, r"^person: "),
        ({"clients": jf.Clients.from_moments(jnp.eye(4)[None])}, r"^clients: wanted samples"),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(change, said, tmp_path, key):
    ledger = privacy.Ledger(tmp_path / "persons.jsonl", epsilon=1.5, delta=1e-5)
    given = {"clients": jf.Clients.from_samples(samples()), "ledger": ledger, "key": key} | change
    with pytest.raises(ValueError, match=said):
        release(**given)
    assert ledger.spent() == 0


def test_tracers_are_refused():
    clients = jf.Clients.from_samples(samples())
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda key: release(clients, key=key).mean_error)(jax.random.key(0))
