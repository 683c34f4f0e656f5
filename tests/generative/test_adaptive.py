"""Personal models under a learned prior: results, backends, refusals."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from jaxfed.generative import AdaptiveTraining, FedAvg
from jaxfed.generative._adaptive import Adaptive
from jaxfed.generative._prior import scaled_to_largest, scaled_to_norm
from jaxfed.models import reconstruction_loss
from tests.generative.training import (
    COUNTS,
    FEATURES,
    LATENT,
    LOSSLESS,
    QUANTIZED,
    autoencoder,
    sampled,
    solve,
    tables_of,
)
from tests.references.adaptive import adept

NUMBERS = 2 * FEATURES * LATENT + FEATURES + LATENT
SGD, STAY = optax.sgd(1.0), optax.set_to_zero()
# Large enough steps for all of the rule to matter in ten rounds.
RATES = {"step_size": 0.05, "global_step_size": 0.03, "spread_step_size": 0.02}


PUBLISHED = functools.partial(AdaptiveTraining.autoencoder, preset="published")


def adaptive(model=None, make=AdaptiveTraining.autoencoder, **options):
    options = RATES | {"local_steps": 3, "hyper_prior": 0.02, "initial_spread": 0.5} | options
    return make(model or autoencoder(), **options)


def minibatch(**options):
    return adaptive(batch_size=2, lazy_rounds=1, **options)


# --- what it computes ----------------------------------------------------------------------------


PRESENT = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]], bool)


@pytest.mark.parametrize(
    ("make", "options", "reference"),
    [
        pytest.param(AdaptiveTraining.autoencoder, {}, {"clip": 1, "spread_clip": 10}, id="text"),
        pytest.param(
            AdaptiveTraining.autoencoder,
            {"clip": None, "spread_clip": None, "lazy_rounds": 0, "bounds": (0.3, 0.45)}
            | {"initial_spread": 0.4, "prior_weight": 0.3},
            {"lazy_rounds": 0, "bounds": (0.3, 0.45), "initial_spread": 0.4, "prior_weight": 0.3},
            id="neither clipped nor lazy, and bounded",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PUBLISHED,
            {"spread_clip": 1.5},
            {"clip": 1, "spread_clip": 1.5, "prior_weight": 0.1, "momentum": 0.9}
            | {"published": True},
            id="published",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            AdaptiveTraining.autoencoder,
            {"prior_step": "proximal", "prior_weight": 0.3, "bounds": (0.3, 0.52)},
            {"clip": 1, "prior_weight": 0.3, "bounds": (0.3, 0.52), "proximal": True},
            id="proximal",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rounds_equal_the_reference(make, options, reference, key, x64):
    model, clients = autoencoder(), sampled()
    # All clients take part three times, and some once more.
    present = np.concatenate([np.ones((3, 4), bool), PRESENT, PRESENT[::-1]])
    solution = solve(
        adaptive(model, make, **options),
        clients,
        key,
        rounds=9,
        participation=jf.participation.mask(present),
    )
    weights = np.asarray(clients.weights)
    personal, mean, spread, objective = adept(
        [np.asarray(leaf) for leaf in jax.tree.leaves(model)],
        tables_of(clients),
        weights,
        **RATES
        | {"rounds": 9, "local_steps": 3, "xi": 0.02, "initial_spread": 0.5}
        | {"present": present}
        | reference,
    )
    chex.assert_trees_all_close(jax.tree.leaves(solution.server.mean), mean, atol=1e-10)
    chex.assert_trees_all_close(jax.tree.leaves(solution.server.spread), spread, atol=1e-10)
    found = jax.tree.leaves(solution.result.local)
    for i, own in enumerate(personal):
        chex.assert_trees_all_close([leaf[i] for leaf in found], own, atol=1e-10)
    np.testing.assert_allclose(solution.history["objective"], objective, atol=1e-9)
    chex.assert_trees_all_equal(solution.result.shared, solution.server.mean)
    mean_spread = np.concatenate([s.ravel() for s in spread]).mean()
    np.testing.assert_allclose(solution.history["spread"][-1], mean_spread, rtol=1e-12)


@pytest.mark.slow
def test_messages_are_the_global_model_and_the_spread(key, x64):
    solution = solve(minibatch(), sampled(), key, rounds=3)
    for bits in ("bits_up", "bits_down"):
        np.testing.assert_allclose(solution.history[bits], 64 * 2 * NUMBERS * np.arange(1, 4))


@pytest.mark.slow
def test_without_a_prior_it_is_local_training(key, x64):
    clients = sampled()
    algorithm = adaptive(prior_weight=0.0, clip=None)
    local = FedAvg(
        autoencoder(),
        reconstruction_loss,
        SGD,
        local_steps=1,
        step_size=0.05,
        fine_tuning_steps=12,
        server_optimizer=STAY,
    )
    found = solve(algorithm, clients, key, rounds=4).result.local
    wanted = solve(local, clients, key, rounds=1).result.local
    chex.assert_trees_all_close(found, wanted, atol=1e-12)


@pytest.mark.slow
def test_spreads_tell_how_far_proximal_steps_let_models_go(key, x64):
    """From no deviation at all, without a limit on the step size, to local training."""
    clients = sampled(weights="equal")

    def found(spread):
        algorithm = adaptive(
            prior_step="proximal",
            prior_weight=1.0,
            initial_spread=spread,
            bounds=(1e-12, 1e12),
            clip=None,
            spread_step_size=0.0,
        )
        return solve(algorithm, clients, key, rounds=4).result

    local = FedAvg(
        autoencoder(),
        reconstruction_loss,
        SGD,
        local_steps=1,
        step_size=0.05,
        fine_tuning_steps=12,
        server_optimizer=STAY,
    )
    alone = solve(local, clients, key, rounds=1).result.local
    chex.assert_trees_all_close(found(1e10).local, alone, atol=1e-10)
    start = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(COUNTS)), autoencoder())
    chex.assert_trees_all_close(found(1e-10).local, start, atol=1e-10)
    first, last = (
        sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in ((found(0.2).local, start), (alone, start))
    )
    assert 0 < first < last


class Weights(eqx.Module):
    """A mean."""

    values: jax.Array


@pytest.mark.parametrize(("prior_step", "rate"), [("gradient", 0.005), ("proximal", 0.02)])
def test_gaussian_means_have_a_closed_form(prior_step, rate, key, x64):
    clients, variance, xi = sampled(weights="equal"), 0.5, 0.3

    def loss(model, batch, key):
        del key
        return jnp.mean(jnp.sum((batch - model.values) ** 2, axis=1)) / (2 * variance)

    algorithm = AdaptiveTraining(
        Weights(jnp.zeros(FEATURES)),
        loss,
        local_steps=1,
        step_size=0.2,
        global_step_size=0.1,
        spread_step_size=rate,
        hyper_prior=xi,
        clip=None,
        spread_clip=None,
        lazy_rounds=0,
        prior_step=prior_step,
    )
    solution = solve(algorithm, clients, key, rounds=2000)
    own = np.asarray(solution.result.local.values)
    mean, spread = solution.server.mean.values, solution.server.spread.values
    # Posterior means given the prior, and the prior that is best for them: Lemma 4.3 with a
    # spread for each weight.
    averages = np.array([x.mean(axis=0) for x in tables_of(clients)])
    of_average = variance / np.array(COUNTS)[:, None]
    share = spread**2 / (spread**2 + of_average)
    np.testing.assert_allclose(own, share * averages + (1 - share) * mean, atol=1e-3)
    np.testing.assert_allclose(mean, own.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(spread**2, 2 * xi + ((own - mean) ** 2).mean(axis=0), rtol=5e-3)
    # The spread is least where the clients' averages are most alike.
    assert (jnp.argsort(spread) == np.argsort(averages.var(axis=0))).all()


@pytest.mark.slow
def test_a_warm_start_keeps_personal_models(key, x64):
    clients = sampled()
    first = solve(adaptive(), clients, key, rounds=4).result
    resting = adaptive(autoencoder(7), step_size=0.0, global_step_size=0.0)
    found = solve(resting, clients, key, rounds=2, warm_start=first).result
    chex.assert_trees_all_equal(found, first)
    # Without models of their own, clients start at the shared one.
    bare = jf.Personalized(first.shared, ())
    found = solve(resting, clients, key, rounds=2, warm_start=bare).result
    alike = jax.tree.map(lambda leaf: np.stack([leaf] * len(COUNTS)), first.shared)
    chex.assert_trees_all_equal(found, jf.Personalized(first.shared, alike))


@pytest.mark.slow
def test_clipping():
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[-4.0]])}
    for limit, wanted in ((1.0, 0.2), (10.0, 1.0)):
        found = scaled_to_norm(gradient, jnp.asarray(limit))
        chex.assert_trees_all_close(found, jax.tree.map(lambda g, w=wanted: w * g, gradient))
    found = scaled_to_largest(gradient, jnp.asarray(2.0), each=False)
    chex.assert_trees_all_close(found, jax.tree.map(lambda g: g / 2, gradient))
    found = scaled_to_largest(gradient, jnp.asarray(3.5), each=True)
    chex.assert_trees_all_close(found, {"a": gradient["a"], "b": jnp.array([[-3.5]])})
    # A gradient of zeros stays, and has a derivative.
    for scaled in (scaled_to_norm, functools.partial(scaled_to_largest, each=True)):
        clipped = functools.partial(scaled, threshold=jnp.asarray(1.0))
        found = jax.jvp(clipped, (jnp.zeros(2),), (jnp.ones(2),))
        np.testing.assert_array_equal(found, [[0, 0], [1, 1]])


# --- where and with whom it runs -----------------------------------------------------------------


@pytest.mark.slow
def test_absent_clients_do_not_change(key, x64):
    clients = sampled(weights="equal")
    algorithm = minibatch(initial_spread=0.4)
    present = jf.participation.mask(np.array([[True, False, True, False]]))
    some = solve(algorithm, clients, key, rounds=4, participation=present)
    alone = solve(algorithm, clients.take([0, 2]), key, rounds=4)
    chex.assert_trees_all_close(some.server, alone.server, atol=1e-12)
    start = jax.tree.leaves(autoencoder())
    for leaf, first in zip(jax.tree.leaves(some.result.local), start, strict=True):
        np.testing.assert_array_equal(leaf[1], first)
    assert (some.local.rounds == jnp.array([4, 0, 4, 0])).all()


@pytest.mark.slow
def test_compressed_messages_lead_to_the_same_place(key, x64):
    channel = jf.Wire(jf.channel.error_feedback(QUANTIZED), jf.channel.difference(QUANTIZED))
    exact, rough = (
        solve(adaptive(), sampled(), key, rounds=30, channel=c) for c in (LOSSLESS, channel)
    )
    first, last = exact.history["loss"][0], exact.history["loss"][-1]
    assert abs(rough.history["loss"][-1] - last) < 0.05 * (first - last)
    np.testing.assert_allclose(rough.history["spread"][-1], exact.history["spread"][-1], rtol=0.05)
    assert rough.history["bits_up"][-1] < 0.2 * exact.history["bits_up"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [AdaptiveTraining.autoencoder, PUBLISHED])
def test_spreads_that_arrive_as_zero_are_bounded(make, key, x64):
    # A message of two bits without memory has some of them as zero.
    algorithm = adaptive(make=make, spread_step_size=0.2, bounds=(0.05, 2.0), initial_spread=1.0)
    solution = solve(algorithm, sampled(), key, rounds=40, channel=jf.channel.quantize(2))
    assert jnp.isfinite(solution.history["objective"]).all()
    spread = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(solution.server.spread)])
    assert spread.min() >= 0.05 and spread.max() <= 2.0


# --- what it is differentiable in ----------------------------------------------------------------


PROXIMAL = functools.partial(AdaptiveTraining.autoencoder, prior_step="proximal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "clipped"),
    [(PUBLISHED, True), (PROXIMAL, False)],
    ids=["published, clipped", "proximal"],
)
def test_derivatives_are_finite_differences_over_a_sweep(make, clipped, key, x64):
    clients, held_out = sampled(), sampled(seed=1).data.values
    thresholds = {} if clipped else {"clip": None, "spread_clip": None}
    names = ("hyper_prior", "prior_weight", "initial_spread", "step_size", "spread_step_size")

    def validated(numbers):
        algorithm = minibatch(make=make, **thresholds, **dict(zip(names, numbers, strict=True)))
        personal = jf.rollout(algorithm, clients, rounds=5, key=key).result.local
        return jax.vmap(reconstruction_loss, in_axes=(0, 0, None))(personal, held_out, key).mean()

    numbers = jnp.array([0.05, 0.2, 0.5, 0.01, 0.01])
    h = 1e-5 * jnp.diag(numbers)
    slope = jax.jit(jax.grad(validated))(numbers)
    above, below = jax.jit(jax.vmap(validated))(numbers + jnp.concatenate([h, -h])).reshape(2, -1)
    np.testing.assert_allclose(slope, (above - below) / (2e-5 * numbers), rtol=1e-4)
    assert (jnp.abs(slope * numbers) > 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_parameters_keep_their_type(wide, key):
    narrow = autoencoder()
    with jax.enable_x64(wide):
        run = functools.partial(jf.rollout, rounds=2, key=key)
        clients = sampled(dtype=np.float64 if wide else np.float32)
        for make in (AdaptiveTraining.autoencoder, PUBLISHED):
            solution = jax.eval_shape(run, adaptive(make=make), clients)
            mixed = jax.eval_shape(run, adaptive(narrow, make=make), clients)
            wanted = jnp.float64 if wide else jnp.float32
            found = jax.tree.leaves((solution.result, solution.server))
            assert {leaf.dtype for leaf in found} == {jnp.dtype(wanted)}
            assert solution.history["objective"].dtype == wanted
            found = jax.tree.leaves((mixed.result, mixed.server))
            assert {leaf.dtype for leaf in found} == {jnp.dtype(jnp.float32)}


# --- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("initial_spread", {"initial_spread": 0.0}),
        ("initial_spread", {"initial_spread": 0.5, "bounds": (0.6, 1.0)}),
        ("bounds", {"bounds": (0.0, 1.0)}),
        ("prior_step", {"prior_step": "newton"}),
        ("prior_step", {"prior_step": "proximal", "preset": "published"}),
        ("global_step_size", {"prior_step": "proximal", "global_step_size": 1.1}),
        ("spread_step_size", {"prior_step": "proximal", "spread_step_size": 1.1}),
        ("model", {"model": eqx.nn.Identity()}),
    ],
)
def test_bad_settings_are_refused(argument, options):
    with pytest.raises(ValueError, match=rf"^{argument}: .*got"):
        adaptive(**options)


def test_the_class_of_the_rounds_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Adaptive()
    assert isinstance(adaptive(), Adaptive)
