"""Diffusion: corruption, loss and sampler against closed forms; ADEPT-DGM and what it refuses."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from jaxfed.generative import AdaptiveTraining, FedAvg, sample
from jaxfed.generative.adaptive import decaying_adam
from jaxfed.models import (
    Autoencoder,
    DenoisingLoss,
    UNet,
    denoiser,
    generate,
    interpolation,
    reconstruction_loss,
    variance_preserving,
)
from tests.helpers import solve

FEATURES = 4
PRESERVING, LINEAR = variance_preserving(), interpolation()
BOTH = pytest.mark.parametrize("corruption", [PRESERVING, LINEAR], ids=["normal", "uniform"])
MEAN = np.array([1.0, -2, 0, 0.5])
ROOT = np.array([[1.0, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0, 0.5, 0], [0, 0, 0.3, 0.2]])
COVARIANCE = ROOT @ ROOT.T


class Linear(eqx.Module):
    """A net without bias."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight @ x


def draw_correlated(clients=3, samples=6, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return jf.Clients.from_samples(
        [(rng.normal(size=(samples + i, FEATURES)) @ ROOT.T).astype(dtype) for i in range(clients)]
    )


def shares(corruption, amount):
    if corruption.linear:
        return 1 - amount, amount
    return np.sqrt(1 - amount), np.sqrt(amount)


# --- corruption and loss -------------------------------------------------------------------------


@BOTH
def test_corruption_mixes_samples_with_noise(corruption, key, x64):
    batch = jax.random.normal(key, (5, FEATURES))
    corrupted, amounts = corruption(key, batch)
    assert len(np.unique(amounts)) == 5
    signal, noise = shares(corruption, np.asarray(amounts)[:, None])
    # The same noise for other samples, and none of it twice.
    found = (np.asarray(corrupted) - signal * np.asarray(batch)) / noise
    other, _ = corruption(key, 3 - batch)
    np.testing.assert_allclose(found, (other - signal * (3 - batch)) / noise, atol=1e-12)
    assert len(np.unique(found)) == found.size


@BOTH
def test_the_distributions_of_noise_and_amounts(corruption, key):
    low, high = 0.25, 0.75
    within = type(corruption)((low, high), corruption.uniform, corruption.linear)
    _, amounts = within(key, jnp.zeros((4000, 1)))
    assert low <= amounts.min() < low + 0.01
    assert high - 0.01 < amounts.max() <= high
    assert abs(amounts.mean() - 0.5) < 0.01
    noise = np.asarray(corruption.noise(key, (20000,), jnp.float32))
    if corruption.uniform:
        assert 0 <= noise.min() < 0.001 < 0.999 < noise.max() <= 1
        assert abs(noise.mean() - 1 / 2) < 0.01
        assert abs(noise.var() - 1 / 12) < 0.002
    else:
        assert abs(noise.mean()) < 0.03
        assert abs(noise.var() - 1) < 0.04
        assert abs((noise**4).mean() - 3) < 0.3


def test_normal_noise_keeps_the_variance(key):
    batch = jax.random.normal(key, (20000, 1))
    corrupted, _ = PRESERVING(jax.random.key(1), batch)
    assert abs(corrupted.var() - batch.var()) < 0.03


@BOTH
def test_the_loss_and_its_derivative(corruption, key, x64):
    batch = jax.random.normal(key, (5, FEATURES))
    model = Linear(jax.random.normal(key, (FEATURES, FEATURES)))
    corrupted = np.asarray(corruption(key, batch)[0])
    missed = corrupted @ np.asarray(model.weight).T - np.asarray(batch)
    value, slope = jax.value_and_grad(DenoisingLoss(corruption))(model, batch, key)
    np.testing.assert_allclose(value, (missed**2).sum(axis=1).mean(), rtol=1e-12)
    np.testing.assert_allclose(slope.weight, 2 * missed.T @ corrupted / 5, rtol=1e-10)


def test_a_conditional_net_is_given_the_amount(key, x64):
    batch = jax.random.normal(key, (5, FEATURES))
    corrupted, amounts = PRESERVING(key, batch)
    scaled = np.asarray(corrupted) * np.asarray(amounts)[:, None]
    value = DenoisingLoss(PRESERVING, conditional=True)(lambda x, a: a * x, batch, key)
    np.testing.assert_allclose(value, ((scaled - batch) ** 2).sum(axis=1).mean(), rtol=1e-12)
    net = denoiser(Linear(jnp.eye(FEATURES)))
    np.testing.assert_array_equal(net(batch[0], 0.3), batch[0])


@pytest.mark.slow
@pytest.mark.parametrize("amount", [0.2, 0.6])
def test_a_linear_net_learns_the_best_linear_denoiser(amount, key):
    """W = s C (s² C + n² I)⁻¹ for the second moment C; local training is prior weight 0."""
    clients = draw_correlated(2, 40, dtype=np.float32)
    algorithm = AdaptiveTraining.diffusion(
        Linear(jnp.zeros((FEATURES, FEATURES))),
        variance_preserving(amount, amount),
        prior_weight=0.0,
        step_size=0.01,
        local_steps=25,
        decay_after=50,
        clip=None,
    )
    found = jf.rollout(algorithm, clients, rounds=150, key=key).result.local.weight
    signal, noise = 1 - amount, amount  # squares
    for i, weight in enumerate(found):
        x = np.asarray(clients.data.values[i, : 40 + i])
        moment = x.T @ x / len(x)
        best = signal**0.5 * moment @ np.linalg.inv(signal * moment + noise * np.eye(FEATURES))
        assert np.linalg.norm(weight - best) < 0.06 * np.linalg.norm(best)


def test_an_amount_that_is_rounded_up_leaves_no_signal():
    one = jnp.nextafter(jnp.float32(1), jnp.float32(2))
    np.testing.assert_allclose(PRESERVING.shares(one), (0, 1), atol=1e-6)


# --- sampler -------------------------------------------------------------------------------------


def test_the_sampler_equals_the_published_one(key, x64):
    weight = jax.random.normal(key, (FEATURES, FEATURES)) / 4
    found = generate(denoiser(Linear(weight)), LINEAR, (3, FEATURES), key=key, steps=7, dtype=float)
    x = np.asarray(jax.random.uniform(key, (3, FEATURES)))
    for j in range(7):
        x = x + (x @ np.asarray(weight).T - x) / (7 - j)
    np.testing.assert_allclose(found, x, atol=1e-12)


def exact(sample, amount):
    """The mean of x given its corruption, for a normal distribution with MEAN and COVARIANCE."""
    signal, noise = PRESERVING.shares(amount)
    joint = signal**2 * COVARIANCE + noise**2 * jnp.eye(FEATURES)
    gain = signal * jnp.linalg.solve(joint, jnp.asarray(COVARIANCE)).T
    return MEAN + gain @ (sample - signal * MEAN)


def test_exact_denoising_samples_the_distribution(key, x64):
    samples = np.asarray(
        generate(exact, PRESERVING, (4000, FEATURES), key=key, steps=400, dtype=float)
    )
    error = 4 / len(samples) ** 0.5
    np.testing.assert_allclose(samples.mean(axis=0), MEAN, atol=error)
    np.testing.assert_allclose(np.cov(samples.T), COVARIANCE, atol=2 * error)


def test_more_steps_come_closer_to_the_distribution(key, x64):
    """Samples are linear in the noise, so their covariance is known up to discretization."""

    def covariance(steps):
        noise = jax.random.normal(key, (FEATURES + 1, FEATURES), float)
        made = generate(exact, PRESERVING, noise.shape, key=key, steps=steps, dtype=float)
        spread = np.linalg.solve(np.asarray(noise[1:] - noise[0]), np.asarray(made[1:] - made[0]))
        return spread.T @ spread

    errors = [np.abs(covariance(steps) - COVARIANCE).max() for steps in (25, 100, 400)]
    assert errors[2] < 0.02
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


# --- ADEPT-DGM -----------------------------------------------------------------------------------


def net(seed=0):
    return Autoencoder(FEATURES, 2, key=jax.random.key(seed))


OPTIONS = {"local_steps": 3, "batch_size": 2, "initial_spread": 0.3, "decay_after": 3}


def adept(model=None, **options):
    return AdaptiveTraining.diffusion(net() if model is None else model, **OPTIONS | options)


def test_it_is_adaptive_training_of_the_denoising_loss():
    adam = decaying_adam(9)
    for algorithm, options in (
        (adept(), {"loss": DenoisingLoss(PRESERVING), "global_step_size": 1e-3}),
        (
            AdaptiveTraining.diffusion(net(), preset="published", **OPTIONS),
            {"loss": DenoisingLoss(LINEAR), "global_step_size": 0.1, "preset": "published"},
        ),
    ):
        same = AdaptiveTraining(
            net(),
            local_steps=3,
            batch_size=2,
            step_size=1e-3,
            spread_step_size=1e-3,
            hyper_prior=1e-5,
            initial_spread=0.3,
            optimizer=adam,
            global_optimizer=adam,
            **options,
        )
        found, wanted = vars(algorithm), vars(same)
        assert found.keys() == wanted.keys()
        for name in found:
            assert eqx.tree_equal(found[name], wanted[name]), name
    assert float(AdaptiveTraining.diffusion(net()).initial_spread) == pytest.approx(0.8)


@pytest.mark.slow
def test_step_sizes_drop_to_a_tenth(key):
    """Adam moves by its step size where the gradient stays the same."""

    class Shift(eqx.Module):
        value: jax.Array

        def __call__(self, x):
            return x + self.value - 1e3

    clients = jf.Clients.from_samples(np.zeros((1, 2, FEATURES), np.float32))
    algorithm = AdaptiveTraining.diffusion(
        Shift(jnp.zeros(FEATURES)),
        variance_preserving(0.5, 0.5),
        prior_weight=0.0,
        step_size=0.5,
        local_steps=2,
        decay_after=3,
    )
    where = [solve(algorithm, clients, key, rounds=n).result.local.value[0, 0] for n in (3, 4, 6)]
    np.testing.assert_allclose(where, [3.0, 3.1, 3.3], rtol=1e-3)


def test_optimizers_are_made_once():
    assert adept().optimizer is adept().global_optimizer is adept().optimizer
    assert jax.tree.structure(adept()) == jax.tree.structure(adept())


@pytest.mark.slow
def test_compressed_messages_lead_to_nearly_the_same(key, x64):
    channel = jf.Wire(jf.channel.error_feedback(jf.channel.quantize(6)), jf.channel.lossless())
    run = functools.partial(solve, adept(), draw_correlated(), key, rounds=8)
    exactly, roughly = run(), run(channel=channel)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), exactly.result.shared, net())
    off = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max(), exactly.result.shared, roughly.result.shared
    )
    assert 0 < max(jax.tree.leaves(off)) < 0.5 * max(jax.tree.leaves(moved))
    assert roughly.history["bits_up"][-1] < 0.4 * exactly.history["bits_up"][-1]


@pytest.mark.slow
def test_the_hyper_parameters_derivatives_are_finite_differences(key, x64):
    clients, held_out = draw_correlated(), draw_correlated(seed=1).data.values[0]

    def validated(numbers):
        algorithm = adept(
            step_size=numbers[0], initial_spread=numbers[1], prior_weight=numbers[2], lazy_rounds=1
        )
        models = jf.rollout(algorithm, clients, rounds=5, key=key).result.local
        return jax.vmap(lambda m: algorithm.loss(m, held_out, key))(models).sum()

    numbers, h = jnp.array([0.02, 0.3, 0.5]), 1e-6 * jnp.eye(3)
    slope = jax.jit(jax.grad(validated))(numbers)
    above, below = jax.jit(jax.vmap(validated))(numbers + jnp.concatenate([h, -h])).reshape(2, 3)
    np.testing.assert_allclose(slope, (above - below) / 2e-6, rtol=1e-5)
    assert (jnp.abs(slope) > 1e-5).all()


@pytest.mark.parametrize("wide", [False, True])
def test_types_are_kept(wide, key):
    dtype = jnp.float64 if wide else jnp.float32
    with jax.enable_x64(wide):
        clients = draw_correlated(dtype=dtype)
        algorithm = AdaptiveTraining.diffusion(net(), preset="published", **OPTIONS)
        solution = jax.eval_shape(
            functools.partial(jf.rollout, rounds=2), algorithm, clients, key=key
        )
        made = jax.eval_shape(
            lambda arrays: sample(algorithm, arrays, 2, key=key, features=FEATURES, steps=2),
            solution.result.local,
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(solution.result)} == {jnp.dtype(dtype)}
    assert made.shape == (3, 2, FEATURES)
    assert made.dtype == dtype


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["array", "tables"])
@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (DenoisingLoss(PRESERVING), "a corruption's noise"),
        (reconstruction_loss, "the output of a new network"),
    ],
)
def test_samples_far_from_the_size_of_what_they_are_compared_with_warn(unit, kind, loss, what):
    rows = [np.float32(unit) * x for x in np.random.default_rng(0).normal(size=(2, 6, FEATURES))]
    rows = (
        np.float32(rows)
        if kind == "array"
        else [np.float32(x)[: 6 - i] for i, x in enumerate(rows)]
    )
    clients, model = jf.Clients.from_samples(rows), Linear(jnp.zeros((FEATURES, FEATURES)))
    algorithm = FedAvg(model, loss, optax.sgd(0.1), local_steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        algorithm.check(clients, None)
        jax.jit(lambda clients: algorithm.check(clients, None))(clients)  # which sees no numbers
    assert [x.category for x in said] == [jf.UnitsWarning] * (unit != 1)
    assert all(f"size one, like {what}" in str(x.message) for x in said)


# --- samples of the models -----------------------------------------------------------------------


@pytest.mark.slow
def test_every_clients_model_makes_its_own_samples(key, x64):
    weights = jax.random.normal(key, (3, FEATURES, FEATURES)) / 4
    models = Linear(weights)
    first = Linear(weights[0])
    averaging = FedAvg(first, DenoisingLoss(PRESERVING), optax.sgd(1.0), local_steps=1)
    for algorithm, corruption in (
        (adept(first, corruption=LINEAR), LINEAR),
        (averaging, PRESERVING),
    ):
        make = functools.partial(sample, algorithm, key=key, count=5, features=FEATURES, steps=3)
        found = make(arrays=models)
        for i in range(3):
            own = generate(
                denoiser(Linear(weights[i])),
                corruption,
                (5, FEATURES),
                key=jax.random.fold_in(key, i),
                steps=3,
                dtype=float,
            )
            np.testing.assert_allclose(found[i], own, atol=1e-12)
        np.testing.assert_allclose(make(arrays=models, clients_per_block=2), found, atol=1e-12)
        assert make(arrays=Linear(weights[1])).shape == (5, FEATURES)


def test_an_image_network_determines_the_size_of_a_sample(key):
    algorithm = AdaptiveTraining.diffusion(UNet((4, 4, 1), widths=(2, 2, 2), key=key))
    made = jax.eval_shape(lambda a: sample(algorithm, a, 3, key=key, steps=2), algorithm.arrays)
    assert made.shape == (3, 16)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [variance_preserving, interpolation])
@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0.5, 0.4, "low, high: .* got 0.5, 0.4"),
        (-0.1, 0.4, "low: wanted a number from 0 to 1, got -0.1"),
        (0.0, 0.0, "low, high: .* got 0.0, 0.0"),
        (0.0, 1.1, "high: wanted a number from 0 to 1, got 1.1"),
        ("0", 1.0, "low: .* got '0'"),
        (0.0, [1.0], r"high: .* got \[1.0\]"),
        (float("nan"), 1.0, "low: wanted a number from 0 to 1, got nan"),
    ],
)
def test_bad_amounts_are_refused(make, low, high, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make(low, high)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("decay_after", {"decay_after": 0}),
        ("initial_spread", {"initial_spread": 0.0}),
    ],
)
def test_bad_settings_are_refused(argument, options):
    for preset in ("text", "published"):
        with pytest.raises(ValueError, match=rf"^{argument}: .*got"):
            AdaptiveTraining.diffusion(net(), preset=preset, **options)


def test_models_that_do_not_fit_the_clients_are_refused(key):
    clients = draw_correlated(dtype=np.float32)
    for model, message in (
        (Autoencoder(3, 2, key=key), r"loss: it fails .*\(2, 4\)"),
        (Linear(jnp.zeros((1, FEATURES))), r"loss: .* model: wanted samples .* got \(2, 1\)"),
        (adept(Linear(jnp.eye(FEATURES)), conditional=True), "loss: it fails"),
    ):
        algorithm = model if isinstance(model, AdaptiveTraining) else adept(model)
        with pytest.raises(ValueError, match=f"^{message}"):
            jf.fit(algorithm, clients, rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^batch_size: .* 6 samples, got 7"):
        jf.fit(adept(batch_size=7), clients, rounds=1, key=key)


def test_bad_arguments_of_sampling_are_refused(key):
    algorithm = adept()
    other = FedAvg(net(), reconstruction_loss, optax.sgd(1.0), local_steps=1)
    good = {"arrays": algorithm.arrays, "count": 2, "features": FEATURES, "steps": 2}
    for options, message in (
        ({"count": 0}, "count: .* got 0"),
        ({"steps": 0}, "steps: .* got 0"),
        ({"features": None}, "features: wanted a number"),
        ({"arrays": net().encoder}, r"arrays: .* got \[\(2, 4\), \(2,\)\]"),
        ({"arrays": ()}, r"arrays: .* got \[\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            sample(algorithm, key=key, **good | options)
    with pytest.raises(ValueError, match=r"^algorithm: wanted one with a DenoisingLoss"):
        sample(other, key=key, **good)
    for shape, steps, message in (((0, 2), 2, "shape"), ((2, 2), 0, "steps")):
        with pytest.raises(ValueError, match=f"^{message}: "):
            generate(exact, PRESERVING, shape, key=key, steps=steps)
