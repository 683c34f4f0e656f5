"""Federated averaging of models that are not Equinox modules."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from jaxfed.generative import FedAvg
from tests.helpers import gaussian

SGD = optax.sgd(0.1)
clients = functools.partial(gaussian, (6, 8, 7), (1,) * 5, dtype=float)
OPTIONS = {"local_steps": 2, "batch_size": 4, "fine_tuning_steps": 1}


def parameters():
    rng = np.random.default_rng(1)
    return {"down": rng.normal(size=(5, 2)), "layers": [{"up": rng.normal(size=(2, 5))}]}


def apply(parameters, batch):
    return jnp.tanh(batch @ parameters["down"]) @ parameters["layers"][0]["up"]


def loss(parameters, batch, key):
    return jnp.mean((apply(parameters, batch) - batch) ** 2)


class Module(eqx.Module):
    down: jax.Array
    up: jax.Array

    def __call__(self, batch):
        return jnp.tanh(batch @ self.down) @ self.up


def fitted(model, loss, key):
    algorithm = FedAvg(model, loss, SGD, **OPTIONS)
    return algorithm, jf.fit(algorithm, clients(), rounds=4, key=key)


@pytest.mark.slow
def test_a_dictionary_of_parameters_is_a_model(key, x64):
    algorithm, found = fitted(parameters(), loss, key)
    given = parameters()
    module = Module(jnp.asarray(given["down"]), jnp.asarray(given["layers"][0]["up"]))
    _, wanted = fitted(module, lambda model, batch, key: jnp.mean((model(batch) - batch) ** 2), key)
    np.testing.assert_allclose(found.history["objective"], wanted.history["objective"], rtol=1e-12)
    for result, other in (
        (found.result.shared, wanted.result.shared),
        (found.result.local, wanted.result.local),
    ):
        np.testing.assert_allclose(result["down"], other.down, rtol=1e-12)
        np.testing.assert_allclose(result["layers"][0]["up"], other.up, rtol=1e-12)
    model = algorithm.model_of(found.result.shared)
    assert apply(model, jnp.ones((3, 5))).shape == (3, 5)
    # Another run continues from there.
    jf.fit(algorithm, clients(), rounds=1, key=key, warm_start=found)


def test_the_state_of_a_flax_model_is_a_model(key, x64):
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    given = parameters()

    class Flax(nnx.Module):
        def __init__(self):
            self.down = nnx.Param(jnp.asarray(given["down"]))
            self.up = nnx.Param(jnp.asarray(given["layers"][0]["up"]))

        def __call__(self, batch):
            return jnp.tanh(batch @ self.down[...]) @ self.up[...]

    graph, state = nnx.split(Flax())
    algorithm, found = fitted(
        state,
        lambda state, batch, key: jnp.mean((nnx.merge(graph, state)(batch) - batch) ** 2),
        key,
    )
    _, wanted = fitted(parameters(), loss, key)
    np.testing.assert_allclose(found.history["objective"], wanted.history["objective"], rtol=1e-12)
    model = nnx.merge(graph, algorithm.model_of(found.result.shared))
    np.testing.assert_allclose(model.down[...], wanted.result.shared["down"], rtol=1e-12)


def test_bad_models_are_refused():
    for model, message in [
        ({}, "model: wanted parameters"),
        (apply, "model: wanted parameters"),
        ({"count": jnp.arange(3)}, "model: wanted parameters"),
        ({"w": np.array([np.nan])}, r"model: NaN or infinite parameters at \['w'\]"),
        ({"w": np.ones(2), "tag": {1, 2}}, "model: wanted a pytree of arrays of numbers and of"),
        ({"w": np.ones(2), "tag": np.array(["x"])}, "model: wanted a pytree of arrays of numbers"),
        ({"w": np.ones(2), "tag": np.array([None])}, "model: wanted a pytree of arrays of numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            FedAvg(model, loss, SGD, local_steps=1)
