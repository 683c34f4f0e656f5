"""Federated averaging: results, random draws, refusals."""

import functools
import itertools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import jaxfed as jf
from jaxfed.generative import FedAvg
from jaxfed.models import Autoencoder, reconstruction_loss
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
from tests.references.fedavg import federated_averaging, loss

RATE = 0.02
SGD, MOMENTUM, STAY = optax.sgd(1.0), optax.sgd(0.5, momentum=0.8), optax.set_to_zero()


def fedavg(model=None, **options):
    options = {"local_steps": 3, "step_size": RATE} | options
    return FedAvg(model or autoencoder(), reconstruction_loss, SGD, **options)


def minibatch(**options):
    return fedavg(batch_size=2, fine_tuning_steps=2, server_optimizer=MOMENTUM, **options)


# --- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"proximal": 0.7}, {"proximal": 0.7}),
        ({"server_optimizer": MOMENTUM}, {"momentum": (0.5, 0.8)}),
    ],
    ids=["FedAvg", "FedProx", "FedOpt"],
)
def test_rounds_equal_the_reference(options, reference, key, x64):
    model, clients = autoencoder(), sampled()
    solution = solve(fedavg(model, **options), clients, key)
    wanted, objective = federated_averaging(
        [np.asarray(leaf) for leaf in jax.tree.leaves(model)],
        tables_of(clients),
        clients.weights,
        rounds=10,
        local_steps=3,
        step_size=RATE,
        **reference,
    )
    chex.assert_trees_all_close(jax.tree.leaves(solution.result.shared), wanted, atol=1e-8)
    np.testing.assert_allclose(solution.history["objective"], objective, atol=1e-8)
    assert solution.result.local is None
    numbers = 2 * FEATURES * LATENT + FEATURES + LATENT
    for bits in ("bits_up", "bits_down"):
        np.testing.assert_allclose(solution.history[bits], 64 * numbers * np.arange(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize(("centred", "unit"), [(True, 1), (False, 1), (False, 0.01), (False, 100)])
def test_defaults_come_close_to_pooled_training(centred, unit, key):
    """Of clients with two digits each; steps of plain descent suit one unit alone."""
    digits = load_digits()
    pixels = unit * (digits.data - centred * digits.data.mean(0)) / 16
    first, second = np.split(np.argsort(digits.target, kind="stable")[:1760], 2)
    rows = np.concatenate([first.reshape(40, -1), second.reshape(40, -1)], axis=1)
    samples = pixels[rows].astype(np.float32)
    model, pooled = (
        Autoencoder(64, 10, hidden="relu", key=key),
        jnp.asarray(samples).reshape(-1, 64),
    )

    def left(model):
        return reconstruction_loss(model, pooled, key) / jnp.mean(jnp.sum(pooled**2, 1))

    run = jf.fit(
        FedAvg(model, reconstruction_loss, batch_size=6),
        jf.Clients.from_samples(samples),
        rounds=100,
        key=key,
    )
    decaying = optax.adam(optax.cosine_decay_schedule(3e-3, 6000))
    alone = FedAvg(model, reconstruction_loss, decaying, local_steps=6000, batch_size=60)
    best = jf.fit(alone, jf.Clients.from_samples(pooled[None]), rounds=1, key=key)
    assert left(run.result.shared) <= (1.2 if centred else 1.1) * left(best.result.shared)


@pytest.mark.slow
def test_one_step_of_one_client_is_gradient_descent(key, x64):
    clients = sampled().take([2])
    model = autoencoder()
    for _ in range(4):
        gradient = jax.grad(reconstruction_loss)(model, tables_of(clients)[0], key)
        model = jax.tree.map(lambda p, g: p - RATE * g, model, gradient)
    solution = solve(fedavg(local_steps=1), clients, key, rounds=4)
    chex.assert_trees_all_close(solution.result.shared, model, atol=1e-12)


def test_fine_tuning_is_local_steps_from_the_shared_model(key, x64):
    clients = sampled()
    solution = solve(fedavg(fine_tuning_steps=4), clients, key)
    chex.assert_trees_all_equal(solution.result.shared, solve(fedavg(), clients, key).result.shared)
    shared = [np.asarray(leaf) for leaf in jax.tree.leaves(solution.result.shared)]
    for i, x in enumerate(tables_of(clients)):
        own = shared
        for _ in range(4):
            own = [p - RATE * g for p, g in zip(own, loss(own, x)[1], strict=True)]
        found = [leaf[i] for leaf in jax.tree.leaves(solution.result.local)]
        chex.assert_trees_all_close(found, own, atol=1e-12)


def test_a_warm_start_continues_the_run(key, x64):
    clients = sampled()
    first = solve(fedavg(), clients, key, rounds=4)
    second = solve(fedavg(autoencoder(7)), clients, key, rounds=6, warm_start=first.result)
    whole = solve(fedavg(), clients, key)
    chex.assert_trees_all_close(second.result.shared, whole.result.shared, atol=1e-12)


def test_a_linear_autoencoder_finds_the_principal_components(key, x64):
    clients = jf.Clients.from_samples([np.concatenate(tables_of(sampled()))])
    x = clients.data.values
    algorithm = FedAvg(autoencoder(), reconstruction_loss, optax.adam(0.03), local_steps=50)
    model = solve(algorithm, clients, key, rounds=20).result.shared
    rest = (x[0] - jax.vmap(model)(x[0])).T
    values = np.linalg.eigvalsh(np.cov(x[0].T, bias=True))
    np.testing.assert_allclose((rest**2).sum() / len(x[0]), values[:-LATENT].sum(), rtol=1e-3)


# --- what it draws -------------------------------------------------------------------------------


class Weights(eqx.Module):
    """One number per feature; the gradient of its mean product with one-hot rows counts them."""

    values: jax.Array


def counted(model, batch, key):
    del key
    return -jnp.mean(batch @ model.values)


@functools.cache
def drawn(steps, seed=0):
    """How often each client has drawn each of its samples, by local training."""
    clients = jf.Clients.from_samples([np.eye(max(COUNTS), dtype=np.float32)[:n] for n in COUNTS])
    algorithm = FedAvg(
        Weights(jnp.zeros(max(COUNTS))),
        counted,
        SGD,
        local_steps=1,
        batch_size=3,
        fine_tuning_steps=steps,
        server_optimizer=STAY,
    )
    result = solve(algorithm, clients, jax.random.key(seed), rounds=1).result
    assert (result.shared.values == 0).all()
    return np.round(3 * np.asarray(result.local.values), 4)


@pytest.mark.slow
def test_minibatches_are_of_real_samples_without_replacement():
    for steps, seed in itertools.product((1, 2), (0, 1)):
        times = drawn(steps, seed)
        # Each batch is of three samples, and padding, rows of zeros, would not count.
        assert (times.sum(axis=1) == 3 * steps).all()
        assert (times <= 1).all()
    # Three batches of three: all nine samples once, or, of six samples, half of them again.
    assert (drawn(3)[0] == 1).all()
    assert sorted(drawn(3)[1][: COUNTS[1]]) == [1, 1, 1, 2, 2, 2]
    # The third batch of the others is of a new order, which may happen to begin alike.
    new = [drawn(3, seed) - drawn(2, seed) != drawn(1, seed) for seed in range(3)]
    assert np.any(new, axis=0)[1:].any(axis=1).all()


def test_padding_never_reaches_the_loss(key, x64):
    def direction(model, batch, key):
        del key
        return jnp.mean(batch @ model.values / jnp.linalg.norm(batch, axis=1))

    clients = sampled()
    algorithm = FedAvg(Weights(jnp.zeros(FEATURES)), direction, SGD, local_steps=2)
    found = solve(algorithm, clients, key, rounds=1).result.shared.values
    means = [(x / np.linalg.norm(x, axis=1)[:, None]).mean(axis=0) for x in tables_of(clients)]
    np.testing.assert_allclose(found, -2 * clients.weights @ np.array(means), atol=1e-12)


@pytest.mark.slow
def test_draws_differ_between_clients_and_keys():
    keys = 40
    times = np.stack([drawn(1, seed) for seed in range(keys)])
    same = (times[..., None, :] == times[:, None]).all(axis=-1)
    # Two draws of three are the same once in 20 times, of six samples, or less often.
    between = same[:, ~np.eye(len(COUNTS), dtype=bool)].mean(axis=0)
    assert between.max() < 0.25
    same = (times[:, None] == times).all(axis=-1)[~np.eye(keys, dtype=bool)].mean(axis=0)
    assert same.max() < 0.1
    # Each sample has the same chance; padding has none.
    chance = 3 / np.array(COUNTS)[:, None] * (np.arange(max(COUNTS)) < np.array(COUNTS)[:, None])
    np.testing.assert_allclose(times.mean(axis=0), chance, atol=4 * 0.5 / keys**0.5)


@pytest.mark.slow
def test_the_loss_has_a_key_for_each_client_and_step(key, x64):
    def noisy(model, batch, key):
        return jax.random.normal(key) * model.values.sum() / len(batch)

    def moved(steps):
        algorithm = FedAvg(
            Weights(jnp.zeros(FEATURES)),
            noisy,
            SGD,
            local_steps=1,
            batch_size=1,
            fine_tuning_steps=steps,
            server_optimizer=STAY,
        )
        return solve(algorithm, sampled(), key, rounds=1).result.local.values[:, 0]

    assert len(np.unique(moved(1))) == len(COUNTS)
    assert (np.abs(moved(2) - 2 * moved(1)) > 1e-3).all()


# --- where and with whom it runs -----------------------------------------------------------------


@pytest.mark.slow
def test_compressed_messages_lead_to_the_same_place(key, x64):
    channel = jf.Wire(jf.channel.error_feedback(QUANTIZED), jf.channel.difference(QUANTIZED))
    exact, rough = (
        solve(fedavg(step_size=0.04), sampled(), key, channel=c).history
        for c in (LOSSLESS, channel)
    )
    first, last = exact["objective"][0], exact["objective"][-1]
    assert abs(rough["objective"][-1] - last) < 0.02 * (first - last)
    assert rough["bits_up"][-1] < 0.2 * exact["bits_up"][-1]


@pytest.mark.slow
def test_derivatives_are_finite_differences_over_a_sweep(key, x64):
    clients, validation = sampled(), sampled(seed=1).data.values[0]

    def validated(numbers):
        algorithm = minibatch(step_size=numbers[0], proximal=numbers[1])
        result = jf.rollout(algorithm, clients, rounds=5, key=key).result
        return reconstruction_loss(result.shared, validation, key)

    numbers, h = jnp.array([0.02, 0.5]), 1e-6 * jnp.eye(2)
    slope = jax.jit(jax.grad(validated))(numbers)
    above, below = jax.jit(jax.vmap(validated))(numbers + jnp.concatenate([h, -h])).reshape(2, 2)
    np.testing.assert_allclose(slope, (above - below) / 2e-6, rtol=1e-6)
    assert (jnp.abs(slope) > 1e-4).all()


# --- which models --------------------------------------------------------------------------------


class Flagged(eqx.Module):
    """A layer, a function, integers and a NumPy array."""

    layer: eqx.nn.Linear
    activation: object
    order: jax.Array
    scale: np.ndarray

    def __call__(self, x):
        return self.activation(self.layer(x))[self.order] * self.scale


@pytest.mark.slow
def test_any_module_is_a_model(key):
    layer = eqx.nn.Linear(FEATURES, FEATURES, key=key)
    order = jnp.arange(FEATURES)[::-1]
    model = Flagged(layer, jax.nn.tanh, order, np.ones(FEATURES, np.float32))
    algorithm = fedavg(model)
    clients = sampled(dtype=np.float32)
    solution = solve(algorithm, clients, key, rounds=3)
    trained = algorithm.model_of(solution.result.shared)
    assert trained.activation is jax.nn.tanh
    np.testing.assert_array_equal(trained.order, order)
    assert np.abs(trained.scale - 1).max() > 1e-3
    assert trained(clients.data.values[0, 0]).shape == (FEATURES,)
    before, after = (
        jnp.mean(jax.vmap(lambda x, m=m: reconstruction_loss(m, x, key))(clients.data.values))
        for m in (model, trained)
    )
    assert after < before


@pytest.mark.parametrize("wide", [False, True])
def test_parameters_keep_their_type(wide, key):
    model = autoencoder()
    with jax.enable_x64(wide):
        clients = sampled(dtype=np.float64 if wide else np.float32)
        run = functools.partial(jf.rollout, rounds=2)
        solution = jax.eval_shape(run, minibatch(), clients, key=key)
        start = jf.rollout(fedavg(model), clients, rounds=1, key=key).result
        mixed = jax.eval_shape(run, fedavg(model), clients, key=key, warm_start=start)
    wanted = jnp.float64 if wide else jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(solution.result)} == {jnp.dtype(wanted)}
    assert solution.history["objective"].dtype == wanted
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.result)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(("hidden", "output"), [("linear", "linear"), ("relu", "sigmoid")])
def test_the_autoencoder(hidden, output, key, x64):
    model = Autoencoder(784, 10, hidden=hidden, output=output, key=key)
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 2 * 784 * 10 + 784 + 10 == 16474
    x = jax.random.normal(key, (3, 784))
    code = x @ model.encoder.weight.T + model.encoder.bias
    code = code * (code > 0) if hidden == "relu" else code
    wanted = code @ model.decoder.weight.T + model.decoder.bias
    wanted = 1 / (1 + jnp.exp(-wanted)) if output == "sigmoid" else wanted
    np.testing.assert_allclose(jax.vmap(model.encode)(x), code, atol=1e-12)
    np.testing.assert_allclose(jax.vmap(model)(x), wanted, atol=1e-12)
    missed = ((x - wanted) ** 2).sum(axis=1)
    np.testing.assert_allclose(reconstruction_loss(model, x, key), missed.mean(), rtol=1e-12)


def test_reconstructed_energy():
    samples = np.array([[[3.0, 4], [0, 0], [9, 9]], [[1, 0], [0, 2], [2, 2]]])
    found = samples + np.array([[[0.0, 1], [0, 1], [9, 9]], [[0, 0], [0, -2], [2, 0]]])
    counts = np.array([2.0, 3])
    # Neither the sample without energy nor the row of padding matters.
    wanted = [1 - 1 / 25, (1 + 0 + 0.5) / 3]
    measured = functools.partial(jf.metrics.reconstructed_energy, samples, found)
    np.testing.assert_allclose(measured(counts, per_client=True), wanted, rtol=1e-6)
    np.testing.assert_allclose(measured(counts), np.mean(wanted), rtol=1e-6)
    with pytest.raises(ValueError, match=r"^counts"):
        measured(np.array([2.0, 4]))
    with pytest.raises(ValueError, match=r"^reconstructions: .* shape \(2, 2, 2\)"):
        jf.metrics.reconstructed_energy(samples, found[:, :2])


# --- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [eqx.nn.Identity(), Weights(jnp.array([1.0, jnp.nan])), Weights(jnp.array([1j]))],
    ids=["no numbers", "NaN", "complex"],
)
def test_bad_models_are_refused(model):
    with pytest.raises(ValueError, match=r"^model: .*(got|NaN)"):
        fedavg(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features: .* got 0"),
        ({"latent": 2.0}, "latent: .* got 2.0"),
        ({"hidden": "tanh"}, "hidden: .* got 'tanh'"),
        ({"output": "relu"}, "output: .* got 'relu'"),
    ],
)
def test_a_bad_autoencoder_is_refused(options, message, key):
    with pytest.raises(ValueError, match=f"^{message}"):
        Autoencoder(**{"features": 4, "latent": 2} | options, key=key)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedavg(batch_size=7), r"batch_size: .* smallest client's 6 samples, got 7"),
        (lambda: fedavg(Autoencoder(4, 2, key=jax.random.key(0))), r"loss: it fails .*\(1, 5\)"),
        (
            lambda: fedavg(eqx.nn.MLP(FEATURES, 1, 3, 1, key=jax.random.key(0)), batch_size=3),
            r"loss: .* model: wanted reconstructions .* \(3, 5\), got \(3, 1\)",
        ),
        (
            lambda: FedAvg(autoencoder(), lambda m, x, k: jax.vmap(m)(x), SGD, local_steps=1),
            r"loss: wanted one real number for a batch, got .*\(1, 5\)",
        ),
        (
            lambda: FedAvg(autoencoder(), lambda m, x, k: 3, SGD, local_steps=1),
            r"loss: wanted one real number for a batch, got",
        ),
    ],
    ids=["batch", "input", "output", "vector", "whole number"],
)
def test_settings_that_do_not_fit_the_clients_are_refused(make, message, key, x64):
    with pytest.raises(ValueError, match=f"^{message}"):
        jf.fit(make(), sampled(), rounds=1, key=key)


def test_other_data_and_warm_starts_are_refused(key, x64):
    moments = jf.Clients.from_moments(np.eye(FEATURES)[None])
    with pytest.raises(ValueError, match=r"^clients: .* Moment"):
        jf.fit(fedavg(), moments, rounds=1, key=key)
    shared = autoencoder()
    local = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), shared)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, local)
    fewer = jax.tree.map(lambda leaf: leaf[..., :-1], local)
    for start, message in (
        (jf.Personalized(Autoencoder(FEATURES, LATENT + 1, key=key), ()), "wanted as shared part"),
        (jf.Personalized(shared, fewer), "wanted as local part .* axis of the 4 clients"),
        (jf.Personalized(shared, broken), "NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=f"^warm_start: {message}"):
            jf.fit(fedavg(), sampled(), rounds=1, key=key, warm_start=start)


@pytest.mark.slow
def test_a_loss_that_diverges_stops_the_run(key):
    with pytest.raises(FloatingPointError, match=r"in round \d+, at clients 0, 1, 2, 3; a smaller"):
        jf.fit(fedavg(step_size=1e3), sampled(dtype=np.float32), rounds=10, key=key)
