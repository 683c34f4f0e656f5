"""The predicted error is the measured one, and persons needed are its inverse."""

import numpy as np
import pytest

from bench.tables import release as table
from jaxfed import privacy


# Of other sizes and variances than those that the formula was looked at with.
@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        table.Setting(6, 800, 14, (5, 3), (2,), 0.2, 1.0, "pairs"),
        table.Setting(25, 600, 32, (3, 3, 2), (1.5, 1.0), 0.05, 2.0, "directions"),
        table.Setting(15, 1500, 24, (2, 2), (2, 2), 0.1, 0.5, "pairs"),
        table.Setting(4, 4000, 18, (6, 4), (), 0.5, 0.5, "directions"),
        table.Setting(10, 1000, 16, (4,), (1,), 0.1, 1.0, "clip", bound=2.5),
        table.Setting(12, 500, 20, (4, 4), (2, 2), 0.3, None, "pairs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("neighbours", ["replace", "add_remove"])
def test_the_expected_error_is_that_measured(setting, neighbours):
    setting = setting._replace(neighbours=neighbours)
    if setting.epsilon is None:
        setting = setting._replace(epsilon=1e6)  # hardly any noise
        assert np.isclose(setting.expected(), setting._replace(epsilon=None).expected(), rtol=0.01)
    measured = setting.measured(draws=4, seed=70)
    assert 1 / 1.5 < measured / setting.expected() < 1.5, (measured, setting.expected())


OPTIONS = {
    "shared_variances": (4, 4),
    "local_variances": (2.25, 2.25),
    "noise_variance": 0.09,
    "epsilon": 1.0,
    "delta": 1e-5,
}


def test_persons_needed_are_the_fewest():
    for error in (0.3, 0.05, 0.01):
        needed = privacy.persons_needed(error, 20, 12, **OPTIONS)
        assert privacy.expected_error(needed, 20, 12, **OPTIONS) <= error
        # A pair more or less changes something; a person may not.
        assert privacy.expected_error(needed - 2, 20, 12, **OPTIONS) > error
    assert privacy.persons_needed(10.0, 20, 12, **OPTIONS) == 4


def test_errors_fall_with_persons_clients_and_epsilon():
    base = privacy.expected_error(500, 20, 12, **OPTIONS)
    assert privacy.expected_error(1000, 20, 12, **OPTIONS) < base
    assert privacy.expected_error(500, 20, 24, **OPTIONS) < base
    assert privacy.expected_error(500, 20, 12, **OPTIONS | {"epsilon": 2.0}) < base
    assert privacy.expected_error(500, 20, 12, **OPTIONS | {"neighbours": "add_remove"}) < base
    without = privacy.expected_error(500, 20, 12, **OPTIONS | {"epsilon": None})
    assert 0.01 < without < base / 2
    # Of nothing but noise, as of random components.
    lost = privacy.expected_error(4, 20, 12, **OPTIONS | {"epsilon": 0.01})
    np.testing.assert_allclose(lost, np.sqrt(2 * (1 - 2 / 20)))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"persons": 3}, "persons"),
        ({"features": 4}, "features"),
        ({"clients": 0}, "clients"),
        ({"clients": 1}, "clients"),
        ({"shared_variances": ()}, "shared_variances"),
        ({"shared_variances": 3}, "shared_variances"),
        ({"local_variances": (-1.0,)}, "local_variances"),
        ({"noise_variance": 0.0}, "noise_variance"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"rows": "x"}, "rows"),
        ({"rows": "clip"}, "bound"),
        ({"bound": 1.0}, "bound"),
        ({"neighbours": "x"}, "neighbours"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, name):
    arguments = {"persons": 500, "features": 20, "clients": 12} | OPTIONS | options
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        privacy.expected_error(**arguments)
    if "persons" not in options:
        del arguments["persons"]
        with pytest.raises(ValueError, match=f"^{name}: wanted"):
            privacy.persons_needed(0.05, **arguments)


# --- what the guide's tables hold -------------------------------------------------------------


@pytest.mark.slow
def test_real_data_keep_their_components_at_one():
    """The best five components of breast cancer data, by shares of the best variance."""
    shares = {
        (neighbours, *of): np.mean(
            [
                table.share("breast cancer", "pairs", neighbours, *of, 1.0, seed)
                for seed in range(50, 60)
            ]
        )
        for neighbours in ("add_remove", "replace")
        for of in ((1, 1), (12, 12), (12, 1))  # clients, and those that share noise
    }
    assert shares["add_remove", 1, 1] >= 0.85 and shares["add_remove", 12, 1] >= 0.54
    assert shares["replace", 1, 1] >= 0.80 and shares["replace", 12, 1] >= 0.42
    assert shares["add_remove", 12, 12] >= 0.85 and shares["replace", 12, 12] >= 0.80


@pytest.mark.slow
def test_synthetic_components_are_found_as_accurately_as_the_table_says():
    setting = table.Setting(
        12, 500, 20, (4, 4), (2.25, 2.25), 0.09, 1.0, "directions", neighbours="add_remove"
    )
    assert 0.035 < setting.measured(draws=6, seed=90) < 0.06
    median = float(np.median(table.lengths(setting, seed=1)))
    clipped = setting._replace(rows="clip", bound=median)
    assert 0.035 < clipped.measured(draws=6, seed=90) < 0.065


def test_a_component_below_the_noise_is_not_found():
    """Its distance to the noise was taken for a gap above it: an error of .44."""
    given = {"noise_variance": 5.0, "epsilon": None, "delta": 1e-5}
    below = privacy.expected_error(10**6, 20, 10, shared_variances=[3.0, 2.0], **given)
    assert below == pytest.approx(np.sqrt(2 * (1 - 2 / 20)), rel=1e-12)
    above = privacy.expected_error(10**6, 20, 10, shared_variances=[50.0, 2.0], **given)
    assert above == pytest.approx(np.sqrt(1 - 2 / 20), rel=1e-3)


def test_more_persons_than_a_whole_number_of_jax():
    """2**31 persons were an OverflowError."""
    given = {"shared_variances": [3.0, 2.0], "noise_variance": 0.1, "epsilon": 1.0, "delta": 1e-5}
    few, many = (privacy.expected_error(n, 20, 10, **given) for n in (10**9, 10**11))
    assert many == pytest.approx(few / 10, rel=1e-3)
    needed = privacy.persons_needed(2 * many, 20, 10, **given)
    assert needed == pytest.approx(10**11 / 4, rel=1e-3)
