"""`MaxVar` as it is called without options: it reaches the least cost of ordinary views."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.tables import view_problems
from tests.helpers import solve

RANK = view_problems.RANK
SEEDS = 1, 2, 3


def cost_over_least(algorithm, views, key, rounds=30, **options):
    found = jf.fit(algorithm, views, rounds=rounds, key=key, **options)
    return float(jf.gcca.cost(views, *found.result)) / view_problems.least_cost(views)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if (name, seed) == ("gaps", 1) else pytest.mark.slow)
        for name in view_problems.PROBLEMS
        for seed in SEEDS
    ],
)
def test_thirty_rounds_reach_the_least_cost(name, seed):
    views = view_problems.PROBLEMS[name](seed).views
    assert cost_over_least(jf.gcca.MaxVar(RANK), views, jax.random.key(seed)) <= 1.001


@pytest.mark.slow
@pytest.mark.parametrize("name", ["easy", "gaps"])
def test_the_closed_form_is_that_of_the_library(name):
    views = view_problems.PROBLEMS[name](0).views
    best, least = jf.gcca.optimum(views, RANK), view_problems.least_cost(views)
    np.testing.assert_allclose(best.cost, least, rtol=1e-5)
    np.testing.assert_allclose(view_problems.cost_of(views, best.shared), least, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [2, 8, 12])
def test_rounding_errors_do_not_grow_in_a_memory(memory):
    """Old products that were orthogonalized again and again ended up to 64 % above the least."""
    views = view_problems.gaps(1).views
    for seed in (1, 2):
        algorithm = jf.gcca.MaxVar(RANK, memory=memory)
        assert cost_over_least(algorithm, views, jax.random.key(seed), rounds=60) <= 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"channel": jf.channel.difference(jf.channel.quantize(8))},
        {"channel": jf.channel.difference(jf.channel.quantize(3))},
        {"channel": jf.channel.cast(jnp.bfloat16)},
        {
            "channel": jf.channel.difference(jf.channel.quantize(4)),
            "participation": jf.participation.uniform(3),
        },
    ],
    ids=["8 bits", "3 bits", "bfloat16", "absent clients"],
)
def test_a_memory_forgets_what_disagrees(options):
    """Products through lossy channels, or of some clients, are not those of one operator."""
    views = view_problems.gaps(1).views
    end = cost_over_least(jf.gcca.MaxVar(RANK), views, jax.random.key(1), rounds=80, **options)
    assert end <= 1.001


@pytest.mark.slow
def test_units_of_views_do_not_matter_to_gradient_steps():
    views = view_problems.easy(1).views

    def costs(units):
        given = view_problems.in_units(views, units)
        return solve(jf.gcca.MaxVar(RANK, solver="gradient"), given, rounds=30).history["objective"]

    plain = costs([1, 1, 1, 1])
    for units in ([1e-3] * 4, [1e3] * 4, [1e-3, 1e3, 1, 30]):
        np.testing.assert_allclose(costs(units), plain, rtol=1e-3)
    # The first scores have about the size of a representation, whose columns have norm one.
    assert plain[0] < 2 * RANK
    assert plain[-1] < 1.1 * view_problems.least_cost(views) / 4


def test_options_belong_to_a_solver():
    assert jf.gcca.MaxVar(2, batch_size=3).solver == jf.gcca.MaxVar(2, inner_steps=3).solver
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"solver": "exact", "inner_steps": 3}, "inner_steps: wanted None with solver='exact'"),
        ({"solver": "exact", "batch_size": 3}, "batch_size: wanted None with solver='exact'"),
        ({"memory": 2, "inner_steps": 3}, "memory: wanted 0 with solver='gradient'"),
        ({"memory": 2, "solver": "gradient"}, "memory: wanted 0 with solver='gradient'"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            jf.gcca.MaxVar(2, **options)
