"""Orders at random whose places are computed one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.core.common.shuffle import shuffled


@jax.jit
def orders(keys, places, count):
    return shuffled(keys, jnp.broadcast_to(places, (len(keys), len(places))), count)


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_every_thing_once(count, seed):
    places = jnp.arange(300) % count  # one program for all numbers
    order = np.asarray(orders(jax.random.key(seed)[None], places, jnp.asarray(count)))[0]
    assert sorted(order[:count]) == list(range(count))


@pytest.mark.parametrize("count", [70_000, 2**30])
def test_many_things(count):
    places = jnp.concatenate([jnp.arange(2000), count - 1 - jnp.arange(2000)])
    order = np.asarray(orders(jax.random.key(0)[None], places, jnp.asarray(count)))[0]
    assert len(set(order)) == 4000 and order.min() >= 0 and order.max() < count


def test_all_orders_are_equally_frequent():
    keys = jax.random.split(jax.random.key(0), 60_000)
    found = np.asarray(orders(keys, jnp.arange(4), jnp.asarray(4)))
    counts = np.unique(found @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    # χ² with 23 degrees of freedom is below 50 in all but 1 of 1,000 draws.
    assert np.sum((counts - 2500) ** 2 / 2500) < 50


def test_places_and_pairs_of_a_long_order_are_uniform():
    count, keys = 500, jax.random.split(jax.random.key(1), 20_000)
    found = np.asarray(orders(keys, jnp.arange(3), jnp.asarray(count)))
    for values in (*found.T, (found[:, 1] - found[:, 0]) % count, found.sum(axis=1) % count):
        counts = np.bincount(values, minlength=count)
        counts = counts[1:] if counts[0] == 0 else counts
        expected = counts.mean()
        assert np.sum((counts - expected) ** 2 / expected) < count + 4 * (2 * count) ** 0.5
