"""Federated averaging of a small network, beside forty lines of plain JAX."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS = "federated averaging", "relative error", 3
ROUNDS, STEPS, BATCH, CODE, RATE = 20, 10, 20, 4, 3e-3


def clients(seed, count, samples, features):
    """Clients' samples in single precision, and the network's initial weights."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(count, samples, CODE)) @ rng.normal(size=(CODE, features))
    x = mixed + 0.3 * rng.normal(size=mixed.shape)
    weights = rng.normal(size=(2, features, 2 * CODE)) / np.sqrt(features)
    return {"x": x.astype(np.float32), "weights": weights.astype(np.float32)}


def jaxfed():
    import jax
    import jax.numpy as jnp
    import optax

    import jaxfed as jf

    fit, from_samples, FedAvg = jf.fit, jf.Clients.from_samples, jf.generative.FedAvg
    optimizer, options = optax.adam(RATE), {"local_steps": STEPS, "batch_size": BATCH}

    def loss(weights, batch, key):
        return jnp.mean(jnp.square(jnp.tanh(batch @ weights[0]) @ weights[1].T - batch))

    def solve(data):
        algorithm = FedAvg(jnp.asarray(data["weights"]), loss, optimizer, **options)
        key = jax.random.key(0)
        return np.asarray(fit(algorithm, from_samples(data["x"]), rounds=ROUNDS, key=key).result[0])

    return solve


def plain_jax():
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(RATE)

    def loss(weights, batch):
        return jnp.mean(jnp.square(jnp.tanh(batch @ weights[0]) @ weights[1].T - batch))

    def client(weights, x, key):
        order = jax.random.permutation(key, len(x))
        rows = order[: STEPS * BATCH].reshape(STEPS, BATCH)

        def step(carry, rows):
            weights, state = carry
            change, state = optimizer.update(jax.grad(loss)(weights, x[rows]), state)
            return (weights + change, state), None

        return jax.lax.scan(step, (weights, optimizer.init(weights)), rows)[0][0]

    @jax.jit
    def train(weights, x, key):
        def round_(weights, key):
            keys = jax.random.split(key, len(x))
            return jax.vmap(client, (None, 0, 0))(weights, x, keys).mean(0), None

        return jax.lax.scan(round_, weights, jax.random.split(key, ROUNDS))[0]

    return lambda data: np.asarray(train(data["weights"], data["x"], jax.random.key(0)))


def answer(data, weights):
    """Root mean square error of the network, relative to the samples."""
    x = data["x"].astype(float)
    off = np.tanh(x @ weights[0]) @ weights[1].T - x
    return np.sqrt(np.sum(off * off) / np.sum(x * x))


CASES = {"100 clients, 200 x 30": partial(clients, count=100, samples=200, features=30)}
SIDES = {"jaxfed": jaxfed, "plain JAX": plain_jax}
