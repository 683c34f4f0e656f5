"""Rank suggestion: the truth is found, collapse is seen and never suggested, splits are fair."""

import doctest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.data import perpca_synthetic
from jaxfed.pca import ranks
from jaxfed.pca.ranks import suggest_ranks

# One set of shapes for all tests: a pair of ranks is compiled once.
GRID = {"shared_ranks": (1, 2), "local_ranks": (1, 2), "rounds": 50, "key": jax.random.key(7)}


def _clients(key, shared_rank=1, local_rank=1, samples=50, **law):
    defaults = {"shared_scale": 2.0, "local_scale": 2.0, "noise_variance": 0.1}
    data = perpca_synthetic(
        key,
        clients=12,
        features=9,
        shared_rank=shared_rank,
        local_rank=local_rank,
        samples=samples,
        **(defaults | law),
    )
    return jf.Clients.from_samples(data.samples)


@pytest.mark.slow
@pytest.mark.parametrize("truth", [(1, 1), (1, 2), (2, 2)])
def test_suggests_the_truth(key, truth):
    table = suggest_ranks(_clients(key, *truth), **GRID)
    assert table.suggested == truth
    assert table.held_out
    np.testing.assert_array_equal(table.shared_rank, [1, 1, 2, 2])
    np.testing.assert_array_equal(table.local_rank, [1, 2, 1, 2])
    assert ((table.error > 0) & (table.error < 1)).all()
    assert str(table).count("<- suggested") == 1


def test_errors_are_of_samples_that_no_fit_has_seen():
    """Three local components hold the three samples that are fitted, but not the fourth."""
    clients = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(12, 4, 30)))
    arguments = {"shared_ranks": (1,), "local_ranks": (3,), "rounds": 1, "key": jax.random.key(7)}
    arguments |= {"algorithm": jf.pca.OneShot, "starts": ("local_first",)}
    table = suggest_ranks(clients, held_out=0.25, **arguments)
    assert table.held_out
    assert table.error.item() == pytest.approx(1 - 4 / 30, abs=0.05)
    seen = suggest_ranks(clients, held_out=0.0, **arguments)
    assert not seen.held_out
    assert seen.error.item() < 0.3


def test_shared_direction_among_the_own_ones_shows_in_the_misalignment(key):
    table = suggest_ranks(_clients(key, 2, 1), **GRID)
    one_too_few = (table.shared_rank == 1) & (table.local_rank == 2)
    right = (table.shared_rank == 2) & (table.local_rank == 1)
    # Three components each: the error can hardly tell them apart.
    assert abs(table.error[one_too_few] - table.error[right]).item() < 0.01
    assert table.misalignment[one_too_few].item() < 0.05
    assert table.misalignment[right].item() > 0.5
    assert table.suggested == (2, 1)


def test_suggests_nothing_where_all_clients_are_alike(key):
    table = suggest_ranks(_clients(key, 2, 2, local="random", groups=1), **GRID)
    assert table.suggested is None
    # Four shared components and nothing else: the pair that explains them has aligned own ones,
    # the pairs that explain less have not.
    assert table.misalignment[-1] < 0.1
    assert (table.misalignment[:-1] > 0.1).all()
    assert "suggested" not in str(table)


def test_several_starts_avoid_a_collapse(key):
    # Large shared variance: own components first take what is shared.
    clients = _clients(key, shared_scale=4.0, local_scale=1.0)
    grid = GRID | {"shared_ranks": (1,), "local_ranks": (1,)}
    collapsed = suggest_ranks(clients, **grid, starts=("local_first",))
    assert collapsed.misalignment.item() < 0.1
    assert collapsed.suggested is None
    table = suggest_ranks(clients, **grid)
    assert table.misalignment.item() > 0.5
    assert table.suggested == (1, 1)


@pytest.mark.slow
def test_errors_of_moments_are_of_the_fitted_data(key):
    samples = _clients(key).data.values
    clients = jf.Clients.from_moments(samples.mT @ samples / samples.shape[1])
    arguments = GRID | {"shared_ranks": (1,), "local_ranks": (1,)}
    table = suggest_ranks(clients, **arguments)
    assert not table.held_out
    same = suggest_ranks(jf.Clients.from_samples(samples), **arguments, held_out=0)
    assert not same.held_out
    chex.assert_trees_all_close(table.error, same.error, rtol=1e-3)
    start = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=arguments["key"])
    fitted = jf.fit(
        jf.pca.PerPCA(1, 1), clients, rounds=50, key=arguments["key"], warm_start=start
    ).result
    expected = jf.metrics.reconstruction_error(samples, *fitted) / jnp.mean(
        jnp.sum(samples**2, axis=(1, 2)) / samples.shape[1]
    )
    chex.assert_trees_all_close(table.error.item(), float(expected), rtol=1e-2)


def test_split_takes_rows_apart(key):
    rng = np.random.default_rng(0)
    sizes = [10, 3, 25]
    arrays = [rng.normal(size=(n, 4)).astype(np.float32) for n in sizes]
    clients = jf.Clients.from_samples(arrays, weights=[1, 2, 3])
    fitted, probe = ranks._split(clients, 0.2, key)
    chex.assert_trees_all_equal(fitted.data.count, jnp.asarray([8.0, 3.0, 20.0]))
    chex.assert_trees_all_equal(probe.data.count, jnp.asarray([2.0, 0.0, 5.0]))
    chex.assert_trees_all_equal(fitted.ids, clients.ids)
    chex.assert_trees_all_equal(fitted.weights, clients.weights)
    for i, array in enumerate(arrays):
        parts = [part.data.values[i][: int(part.data.count[i])] for part in (fitted, probe)]
        together = np.concatenate(parts)
        np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(array, axis=0))
        for part in (fitted, probe):
            assert not part.data.values[i][int(part.data.count[i]) :].any()
    other, _ = ranks._split(clients, 0.2, jax.random.key(1))
    assert (other.data.values != fitted.data.values).any()


def test_too_few_samples_to_hold_out(key):
    clients = jf.Clients.from_samples(np.ones((2, 4, 3), np.float32))
    fitted, probe = ranks._split(clients, 0.2, key)
    assert probe is None
    assert fitted is clients


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_ranks": ()}, "shared_ranks: wanted a list of ranks"),
        ({"local_ranks": (1, 0)}, "local_ranks: wanted a whole number of at least 1, got 0"),
        ({"local_ranks": (1, 8)}, r"shared_ranks \+ local_ranks: 10 orthonormal components"),
        ({"held_out": 1.0}, "held_out: wanted a share from 0 to below 1"),
        ({"min_gain": -0.1}, "min_gain: wanted a share from 0 to 1"),
        ({"min_misalignment": 2.0}, "min_misalignment: wanted a share from 0 to 1"),
        ({"starts": ()}, "starts: wanted a list of methods"),
    ],
)
def test_refuses_bad_input(key, change, message):
    with pytest.raises(ValueError, match=message):
        suggest_ranks(_clients(key), **(GRID | change))


@pytest.mark.slow
def test_example():
    failed, attempted = doctest.testmod(ranks)
    assert attempted > 0
    assert failed == 0
