"""Whole grids in one compiled call."""

import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf

ROUNDS, STEPS = 6, (0.02, 0.05, 0.1)
pytestmark = pytest.mark.usefixtures("x64")


def draw(seed=0, samples=8):
    rng = np.random.default_rng(seed)
    return jf.Clients.from_samples(rng.normal(size=(3, samples, 4)) * [3, 2, 1, 0.5])


def perpca(step):
    return jf.pca.PerPCA(1, 1, step_size=step, start="random")


@functools.cache
def loop():
    """Three algorithms on two data sets with two keys, one run after the other."""
    keys = jax.random.split(jax.random.key(0))
    run = jax.jit(lambda a, c, k: jf.rollout(a, c, rounds=ROUNDS, key=k))
    with jax.enable_x64(True):
        runs = [[[run(perpca(s), draw(d), k) for k in keys] for d in range(2)] for s in STEPS]
        return jf.stack([jf.stack([jf.stack(row) for row in rows]) for rows in runs])


def same(given, wanted):
    chex.assert_trees_all_close(
        (given.result, given.history, given.rounds),
        (wanted.result, wanted.history, wanted.rounds),
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("block", [None, 5])
def test_a_grid_equals_the_loop(block):
    keys = jax.random.split(jax.random.key(0))
    grid = jf.sweep(
        [perpca(s) for s in STEPS], [draw(0), draw(1)], keys=keys, rounds=ROUNDS, block=block
    )
    assert grid.result.shared.shape == (3, 2, 2, 4, 1)
    assert grid.result.local.shape == (3, 2, 2, 3, 4, 1)
    assert grid.history["objective"].shape == (3, 2, 2, ROUNDS)
    same(grid, loop())


def test_only_what_is_several_has_an_axis():
    key = jax.random.split(jax.random.key(0))[0]
    only = functools.partial(jax.tree.map)
    stacked = jax.vmap(perpca)(jnp.asarray(STEPS))
    same(jf.sweep(stacked, draw(), keys=key, rounds=ROUNDS), only(lambda x: x[:, 0, 0], loop()))
    same(
        jf.sweep(perpca(STEPS[1]), jf.stack([draw(0), draw(1)]), keys=key, rounds=ROUNDS),
        only(lambda x: x[1, :, 0], loop()),
    )
    same(
        jf.sweep(perpca(STEPS[0]), draw(), keys=key, rounds=ROUNDS),
        only(lambda x: x[0, 0, 0], loop()),
    )


def test_several_floats_move_together_or_stand_still():
    """One hyperparameter of a stacked algorithm may be left common to all."""
    key = jax.random.key(1)
    algorithms = [jf.pca.PerPCA(1, 1, step_size=s, decay=0.5) for s in STEPS]
    wanted = jf.sweep(algorithms, draw(), keys=key, rounds=ROUNDS)
    partly = jf.pca.PerPCA(1, 1, step_size=jnp.asarray(STEPS), decay=0.5)
    same(jf.sweep(partly, draw(), keys=key, rounds=ROUNDS), wanted)


def test_arguments_reach_every_run():
    key = jax.random.key(2)
    participation, backend = jf.participation.uniform(2), jf.backend.chunked(2)
    start = jf.fit(jf.pca.OneShot(1, 1), draw(), rounds=1, key=key)
    metrics = captured
    arguments = {
        "participation": participation, "backend": backend, "warm_start": start,
        "metrics": metrics, "metrics_every": 2,
    }  # fmt: skip
    grid = jf.sweep([perpca(s) for s in STEPS[:2]], draw(), keys=key, rounds=4, **arguments)
    for i, step in enumerate(STEPS[:2]):
        one = jf.fit(perpca(step), draw(), rounds=4, key=key, **arguments)
        for name, values in one.history.items():
            np.testing.assert_allclose(grid.history[name][i], values, rtol=1e-10, err_msg=name)


def captured(result):
    return {"corner": result.shared[0, 0] ** 2}


def test_a_tolerance_ends_each_run_on_its_own():
    key = jax.random.key(0)
    grid = jf.sweep([perpca(s) for s in STEPS], draw(), keys=key, rounds=400, tol=1e-4)
    for i, step in enumerate(STEPS):
        one = jf.fit(perpca(step), draw(), rounds=400, key=key, tol=1e-4)
        assert grid.rounds[i] == one.rounds < 400
        np.testing.assert_allclose(
            grid.history["objective"][i][: one.rounds], one.history["objective"], rtol=1e-10
        )
    assert len(set(np.asarray(grid.rounds))) > 1


def test_a_second_grid_compiles_nothing(caplog):
    def grid(factor, seed):
        return jf.sweep(
            [perpca(factor * s) for s in STEPS], [draw(seed), draw(seed + 1)],
            keys=jax.random.split(jax.random.key(seed)), rounds=ROUNDS, block=5,
        )  # fmt: skip

    grid(1.0, 0)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        grid(0.5, 4)
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not compiled, compiled


def test_grids_that_do_not_fit_are_refused():
    keys = jax.random.key(0)
    with pytest.raises(ValueError, match=r"^stack: nothing to stack"):
        jf.sweep([], draw(), keys=keys, rounds=2)
    with pytest.raises(ValueError, match=r"^stack: ranks and other static fields must agree"):
        jf.sweep([jf.pca.PerPCA(1, 1), jf.pca.PerPCA(1, 2)], draw(), keys=keys, rounds=2)
    with pytest.raises(ValueError, match=r"^stack: shapes must agree"):
        jf.sweep(perpca(0.1), [draw(), draw(samples=9)], keys=keys, rounds=2)
    with pytest.raises(ValueError, match=r"^algorithms: their floats need one common"):
        lengths = jf.pca.PerPCA(1, 1, step_size=jnp.ones(2), decay=jnp.ones(3))
        jf.sweep(lengths, draw(), keys=keys, rounds=2)
    for block in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"^block: wanted a positive whole number"):
            jf.sweep(perpca(0.1), draw(), keys=keys, rounds=2, block=block)
    with pytest.raises(ValueError, match=r"^rounds: "):
        jf.sweep(perpca(0.1), draw(), keys=keys, rounds=0)


@pytest.mark.parametrize("block", [None, 2])
def test_a_method_without_own_components(block):
    keys = jax.random.split(jax.random.key(0), 3)
    grid = jf.sweep(jf.pca.Pooled(2), draw(), keys=keys, rounds=1, block=block)
    assert grid.result.local.shape == (3, 3, 4, 0)
    wanted = jf.fit(jf.pca.Pooled(2), draw(), rounds=1, key=keys[0]).result.shared
    for shared in grid.result.shared:
        chex.assert_trees_all_close(shared, wanted, atol=1e-10)
