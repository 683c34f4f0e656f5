"""Everything at once: few bits, few participants, several devices, a sweep and a derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.helpers import gaussian

CLIENTS, FEATURES, SAMPLES = 40, 8, 12
SCALES = (3, 2.5, 2, 1.2, 0.5, 0.4, 0.3, 0.2)
CHANNEL = jf.channel.difference(jf.channel.quantize(3))
FEW = jf.participation.uniform(CLIENTS // 10)


def averaging(step):
    model = jf.models.Autoencoder(FEATURES, 2, key=jax.random.key(1))
    return jf.generative.FedAvg(
        model, jf.models.reconstruction_loss, SGD, local_steps=2, step_size=step
    )


SGD = optax.sgd(1.0)
# The algorithm as a function of its step size, and a suitable step size.
CASES = {
    "PerPCA": (lambda step: jf.pca.PerPCA(2, 1, solver="gradient", step_size=step), 0.02),
    "HierarchicalPCA learned": (
        lambda step: jf.pca.HierarchicalPCA(2, 0.5, initial_variance=0.1, step_size=step),
        0.01,
    ),
    "FedAvg": (averaging, 0.02),
}


@functools.partial(jax.jit, static_argnames=("make", "rounds", "channel", "few", "devices"))
def objective(make, step, clients, key, rounds, channel=None, few=True, devices=4):
    """The final objective averaged over all clients, whoever took part in the last round."""
    algorithm = make(step)
    arguments = {
        "channel": CHANNEL if channel is None else channel,
        "participation": FEW if few else None,
        "backend": jf.backend.shard(devices) if devices else jf.backend.vmap(),
    }
    end = jf.rollout(algorithm, clients, rounds=rounds, key=key, **arguments)
    after = jf.rollout(algorithm, clients, rounds=1, key=key, warm_start=end.result)
    return after.history["objective"][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_run_of_few_bits_and_few_participants_converges(name, key):
    """To within two per cent of the run without loss in which all take part."""
    make, step = CASES[name]
    clients = gaussian((SAMPLES,) * CLIENTS, SCALES)
    wanted = objective(make, step, clients, key, 150, jf.channel.lossless(), False, 0)
    given = objective(make, step, clients, key, 1500)
    np.testing.assert_allclose(given, wanted, rtol=0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_sweep_of_such_runs_and_its_derivative(name, key):
    """The derivative agrees with differences of the mean over draws, within the standard error."""
    make, step = CASES[name]
    clients, rounds = gaussian((SAMPLES,) * CLIENTS, SCALES), 10
    steps = step * jnp.linspace(0.5, 1.0, 8)
    keys = jax.random.split(key, 24)

    @jax.jit
    @jax.vmap
    def sweep(step, key):
        def last(step):
            return objective(make, step, clients, key, rounds, devices=4)

        return last(step), jax.grad(last)(step)

    every = jnp.repeat(steps, len(keys)), jnp.tile(keys, len(steps))
    values, slopes = (x.reshape(len(steps), len(keys)) for x in sweep(*every))
    assert jnp.isfinite(slopes).all()
    width = steps[2] - steps[0]
    for middle in (1, 4, 6):
        quotients = (values[middle + 1] - values[middle - 1]) / width
        error = np.hypot(quotients.std(), slopes[middle].std()) / len(keys) ** 0.5
        assert abs(quotients.mean() - slopes[middle].mean()) <= 3 * error
