"""Clipped gradients of single samples with noise: arithmetic, bounds, draws, noise, refusals."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import chisquare, kstest

import jaxfed as jf
from jaxfed.core.clients.samples import Samples
from jaxfed.generative import AdaptiveTraining, FedAvg, GradientNoise
from jaxfed.models import reconstruction_loss
from tests.generative.training import COUNTS, FEATURES, autoencoder, sampled, solve, tables_of
from tests.references.fedavg import loss

SGD = optax.sgd(1.0)
CLIP = 0.7


def fedavg(clip=CLIP, noise_multiplier=0.0, model=None, batch_size=4, **options):
    options = {"local_steps": 3, "step_size": 0.02} | options
    return FedAvg(
        model or autoencoder(),
        options.pop("loss", reconstruction_loss),
        SGD,
        batch_size=batch_size,
        gradient_noise=GradientNoise(clip, noise_multiplier),
        **options,
    )


def data_of(rows):
    return Samples(jnp.asarray(rows), jnp.asarray(float(len(rows)), jnp.asarray(rows).dtype))


def gradient(algorithm, rows, key, drawn=None):
    drawn = jnp.arange(len(rows)) if drawn is None else jnp.asarray(drawn)
    return algorithm.gradient_of(algorithm.arrays, data_of(rows), drawn, key, noisy=True)


def clipped_mean(parameters, rows, clip):
    """The mean loss of rows, and the mean of their clipped gradients, one by one."""
    losses, total = [], [0.0] * len(parameters)
    for row in rows:
        value, own = loss(parameters, row[None])
        norm = np.sqrt(sum(np.sum(g**2) for g in own))
        losses.append(value)
        total = [t + g * min(1, clip / norm) for t, g in zip(total, own, strict=True)]
    return np.mean(losses), [t / len(rows) for t in total]


# --- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", [1e-3, 5.0, 1e3])
def test_gradients_of_single_rows_are_clipped(clip, wide, key):
    """All, some, and none of them are longer than the bound."""
    with jax.enable_x64(wide):
        model, rows = autoencoder(), tables_of(sampled())[0]
        rows = rows.astype(np.float64 if wide else np.float32)
        drawn = np.array([5, 0, 7])
        value, found = gradient(fedavg(clip, model=model), rows, key, drawn)
        parameters = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(model)]
        wanted, mean = clipped_mean(parameters, rows[drawn].astype(float), clip)
        tol = 1e-12 if wide else 2e-6
        np.testing.assert_allclose(value, wanted, rtol=tol)
        for g, m in zip(jax.tree.leaves(found), mean, strict=True):
            np.testing.assert_allclose(g, m, atol=tol * clip, rtol=tol)


@pytest.mark.slow
def test_rounds_equal_the_reference(key, x64):
    """With batches of all samples, which need no draw."""
    model, table = autoencoder(), tables_of(sampled())[0]
    algorithm = fedavg(2.0, model=model, batch_size=len(table))
    found = solve(algorithm, [table], key, rounds=3).result.shared
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    for _ in range(3 * 3):
        mean = clipped_mean(wanted, table, 2.0)[1]
        wanted = [w - 0.02 * g for w, g in zip(wanted, mean, strict=True)]
    chex.assert_trees_all_close(jax.tree.leaves(found), wanted, atol=1e-10)


def test_noise_is_normal_with_the_stated_deviation(key):
    shape, noise = (6, 40, 250), GradientNoise(0.3, 2.5)
    rows = {"a": jax.random.normal(jax.random.key(1), shape), "b": jnp.zeros((6, 9000))}
    found = noise.mean_of(rows, key)
    exact = GradientNoise(0.3, 0.0).mean_of(rows, key)
    drawn = jax.tree.map(lambda x, y: np.ravel(x - y) * 6 / (0.3 * 2.5), found, exact)
    for each in drawn.values():
        assert kstest(each, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(drawn["a"][:9000], drawn["b"])[0, 1]) < 0.05


def no_loss(model, batch, key):
    """A loss whose gradient is zero."""
    del key
    return 0 * jnp.sum(model.encoder.weight) * jnp.mean(batch)


@pytest.mark.slow
def test_noise_is_new_for_each_client_round_and_step(key):
    """Its variances then add up; noise used twice would have another variance."""
    model = jf.models.Autoencoder(FEATURES, 500, key=key)
    algorithm = fedavg(0.5, 2.0, model, loss=no_loss, step_size=1.0, local_steps=3)
    clients = jf.Clients.from_samples([np.float32(x) for x in tables_of(sampled())])
    found = solve(algorithm, clients, key, rounds=4).result.shared
    moved = jax.tree.map(jnp.subtract, found, model)
    deviation = 0.5 * 2.0 / 4 * (3 * 4 / len(COUNTS)) ** 0.5
    entries = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moved)]) / deviation
    assert kstest(entries, "norm").pvalue > 1e-3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_has_noise_of_single_precision(dtype, key):
    rows = jnp.ones((3, 4000), dtype)
    found = GradientNoise(1e-3, 1.0).mean_of(rows, key)
    wide = GradientNoise(1e-3, 1.0).mean_of(rows.astype(jnp.float32), key)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wide.astype(dtype))


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
def test_units_do_not_matter(scale, key):
    rows = jax.random.normal(key, (5, 30))
    found = GradientNoise(4.0 * scale, 0.5).mean_of(scale * rows, key)
    np.testing.assert_allclose(found / scale, GradientNoise(4.0, 0.5).mean_of(rows, key), atol=1e-5)


# --- how far one row moves it --------------------------------------------------------------------


def test_no_row_moves_the_sum_further_than_twice_the_clip(key, x64):
    """Two rows found by ascent, from several starts; the bound is nearly met."""
    algorithm = fedavg(CLIP, batch_size=3)
    others = jnp.asarray(tables_of(sampled())[0][:2])

    def distance(pair):
        sums = [
            jax.tree.map(lambda g: 3 * g, gradient(algorithm, jnp.vstack([others, x]), key)[1])
            for x in pair
        ]
        change = jax.tree.leaves(jax.tree.map(jnp.subtract, *sums))
        return jnp.sqrt(sum(jnp.sum(g**2) for g in change))

    ascend = jax.jit(jax.value_and_grad(distance))
    found = []
    for seed in range(3):
        pair = 3 * jax.random.normal(jax.random.key(seed), (2, FEATURES))
        for _ in range(60):
            value, slope = ascend(pair)
            found.append(float(value))
            pair = pair + 0.3 * slope / jnp.linalg.norm(slope)
    assert 1.9 * CLIP < max(found) <= 2 * CLIP * (1 + 1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_row_without_a_finite_gradient_counts_as_zero(bad, key):
    """The last is finite, but its square is not."""
    rows = np.ones((3, 7), np.float32)
    rows[1, 2] = bad
    found = GradientNoise(1.0, 0.0).mean_of({"a": jnp.asarray(rows), "b": jnp.zeros((3, 2))}, key)
    np.testing.assert_allclose(found["a"], 2 / 3 * np.ones(7) / 7**0.5, rtol=1e-6)
    np.testing.assert_array_equal(found["b"], 0)


def test_derivatives_pass_a_row_without_a_finite_gradient(key, x64):
    rows = jnp.asarray([[3.0, 4.0], [jnp.nan, 1.0], [0.0, 0.0]])

    def total(clip):
        return GradientNoise(clip, 0.0).mean_of(rows, key).sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(2.0)), 7 / 5 / 3, rtol=1e-12)


# --- which rows a step draws ---------------------------------------------------------------------


def test_every_step_draws_a_new_subset_uniformly():
    algorithm, data = fedavg(batch_size=2), data_of(np.zeros((5, FEATURES), np.float32))

    @jax.jit
    @jax.vmap
    def draws(key):
        return algorithm.batches(key, data, 3, noisy=True)[1]

    found = np.sort(draws(jax.random.split(jax.random.key(0), 3000)), axis=-1)
    assert (found[..., 0] < found[..., 1]).all() and found.max() == 4  # without replacement
    codes = 5 * found[..., 0] + found[..., 1]
    for step in range(3):
        assert chisquare(np.unique(codes[:, step], return_counts=True)[1]).pvalue > 1e-3
    # Ten subsets at two steps: independent draws repeat once in ten times, epochs never do.
    for first, second in ((0, 1), (1, 2), (0, 2)):
        pairs = np.unique(25 * codes[:, first] + codes[:, second], return_counts=True)[1]
        assert len(pairs) == 100 and chisquare(pairs).pvalue > 1e-3


def test_the_loss_has_a_key_for_each_row(key, x64):
    def noisy(model, batch, key):
        return jax.random.normal(key) * jnp.sum(model["w"]) * len(batch)

    algorithm = fedavg(1e9, model={"w": jnp.zeros(1)}, loss=noisy)
    one = [gradient(algorithm, np.zeros((n, 1)), key)[1]["w"][0] for n in (1, 2)]
    assert abs(2 * one[1] - one[0]) > 1e-3  # the second row's own draw
    assert abs(one[1] - one[0]) > 1e-3


# --- where it runs -------------------------------------------------------------------------------

MAKES = {
    "FedAvg": functools.partial(fedavg, 1.0, 0.5),
    "AdaptiveTraining": lambda: AdaptiveTraining.autoencoder(
        autoencoder(), batch_size=4, local_steps=3, gradient_noise=GradientNoise(1.0, 0.5)
    ),
    "published": lambda: AdaptiveTraining.autoencoder(
        autoencoder(),
        preset="published",
        batch_size=4,
        local_steps=3,
        gradient_noise=GradientNoise(1.0, 0.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_padding_and_backends_change_nothing(make, key, x64):
    tables, algorithm = tables_of(sampled()), make()
    clients = jf.Clients.from_samples(tables)
    # A client whose weight is nearly nothing, and whose samples are many more.
    longer = jf.Clients.from_samples(
        [*tables, np.zeros((31, FEATURES))], weights=np.array([1.0] * len(tables) + [1e-14])
    )
    run = functools.partial(jf.fit, algorithm, rounds=3, key=key)
    wanted = run(clients).result
    chex.assert_trees_all_close(run(longer).result.shared, wanted.shared, atol=1e-10)
    found = run(clients, backend=jf.backend.chunked(1)).result
    for each, other in ((found.shared, wanted.shared), (found.local, wanted.local)):
        chex.assert_trees_all_close(each, other, atol=1e-12)


@pytest.mark.slow
def test_noise_is_a_leaf_to_sweep_over(key, x64):
    clients = sampled()

    def end(numbers):
        solution = jf.rollout(fedavg(numbers[0], numbers[1]), clients, rounds=2, key=key)
        return solution.history["objective"][-1]

    numbers = jnp.array([[0.5, 0.0], [0.5, 1.0], [2.0, 1.0]])
    found = jax.jit(jax.vmap(end))(numbers)
    for each, wanted in zip(numbers, found, strict=True):
        np.testing.assert_allclose(jax.jit(end)(each), wanted, rtol=1e-10)
    assert len(np.unique(found)) == 3
    slope = jax.jit(jax.grad(end))(numbers[1])
    for i, h in enumerate(1e-5 * np.eye(2)):
        two = [jax.jit(end)(numbers[1] + sign * h) for sign in (1, -1)]
        np.testing.assert_allclose(slope[i], (two[0] - two[1]) / 2e-5, rtol=1e-4)


@pytest.mark.slow
def test_fine_tuning_has_no_noise(key, x64):
    """Its models are of raw samples, and stay at home."""
    noisy = fedavg(1.0, 50.0, fine_tuning_steps=2, server_optimizer=optax.set_to_zero())
    plain = FedAvg(
        autoencoder(),
        reconstruction_loss,
        SGD,
        batch_size=4,
        local_steps=3,
        step_size=0.02,
        fine_tuning_steps=2,
        server_optimizer=optax.set_to_zero(),
    )
    found, wanted = (solve(each, sampled(), key, rounds=1).result.local for each in (noisy, plain))
    chex.assert_trees_all_equal(found, wanted)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientNoise(0.0, 1.0), r"clip: wanted a positive"),
        (lambda: GradientNoise(1.0, -1.0), r"noise_multiplier: wanted .* at least 0"),
        (lambda: GradientNoise(float("inf"), 1.0), r"clip: wanted"),
        (lambda: GradientNoise(1.0, float("nan")), r"noise_multiplier: wanted"),
        (lambda: fedavg(batch_size=None), r"batch_size: wanted a number .* gradient_noise"),
        (
            lambda: FedAvg(autoencoder(), reconstruction_loss, batch_size=2, gradient_noise=1.0),
            r"gradient_noise: wanted a jaxfed.generative.GradientNoise",
        ),
        (
            lambda: AdaptiveTraining.diffusion(
                autoencoder(), gradient_noise=GradientNoise(1.0, 1.0)
            ),
            r"batch_size: wanted a number",
        ),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
