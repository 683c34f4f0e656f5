"""A round of federated averaging in minibatches, compared with plain JAX.

    python -m bench.speed.minibatches

A round is twenty local steps of an autoencoder, 32 -> 8 -> 32, on batches of 16. The plain version
is a vmap over clients and a scan over steps. Its batches come from one `jax.random.permutation` of
each client's samples per round or, for `indices`, from `jax.random.randint`, which draws some
samples twice. `rollout` is the compiled run, `fit` the whole call. Times are the minimum processor
time over several repeats, and ratios of it. The script prints the table in bench/RESULTS.md.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfed as jf
from bench.common import every_turn, machine, table

SIZES = ((20, 2000), (100, 60))
FEATURES, LATENT, BATCH, STEPS, ROUNDS, RATE = 32, 8, 16, 20, 50, 0.01


def drawn(key, samples):
    """The rows of all steps, once a round."""
    whole = STEPS * BATCH
    orders = [
        jax.random.permutation(jax.random.fold_in(key, i), samples)
        for i in range(-(-whole // (samples // BATCH * BATCH)))
    ]
    order = jnp.concatenate([order[: samples // BATCH * BATCH] for order in orders])
    return order[:whole].reshape(STEPS, BATCH)


def indices(key, samples):
    """The same, without care for what comes twice."""
    return jax.random.randint(key, (STEPS, BATCH), 0, samples)


def plain(model, values, draw):
    """Federated averaging as a good user of JAX writes it."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters, x):
        return jf.models.reconstruction_loss(eqx.combine(parameters, static), x, None)

    def client(parameters, key, x):
        def step(parameters, rows):
            gradient = jax.grad(loss)(parameters, x[rows])
            return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradient), None

        return jax.lax.scan(step, parameters, draw(key, len(x)))[0]

    def round_(parameters, key):
        keys = jax.random.split(key, len(values))
        trained = jax.vmap(client, (None, 0, 0))(parameters, keys, values)
        return jax.tree.map(lambda x: x.mean(axis=0), trained), None

    @jax.jit
    def run(key):
        return jax.lax.scan(round_, parameters, jax.random.split(key, ROUNDS))[0]

    return lambda: run(jax.random.key(0))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print(machine(), "\n")
    print(table([measured(*size, repeats) for size in SIZES]))


def measured(clients: int, samples: int, repeats: int) -> dict[str, object]:
    """A row of the table."""
    key = jax.random.key(0)
    values = np.random.default_rng(0).standard_normal((clients, samples, FEATURES))
    data = jf.Clients.from_samples(values.astype(np.float32))
    model = jf.models.Autoencoder(FEATURES, LATENT, key=key)
    algorithm = jf.generative.FedAvg(
        model,
        jf.models.reconstruction_loss,
        optax.sgd(1.0),
        local_steps=STEPS,
        step_size=RATE,
        batch_size=BATCH,
    )
    run = jax.jit(lambda data, key: jf.rollout(algorithm, data, rounds=ROUNDS, key=key).result)
    cases = {
        "rollout": lambda: run(data, key),
        "fit": lambda: jf.fit(algorithm, data, rounds=ROUNDS, key=key).result,
        "permutation": plain(model, data.data.values, drawn),
        "indices": plain(model, data.data.values, indices),
    }
    taken = {name: clocks["cpu"].min() for name, clocks in every_turn(cases, repeats).items()}
    return {
        "clients x samples": f"{clients} x {samples}",
        "ms a round": 1e3 * taken["rollout"] / ROUNDS,
        "rollout / permutations": taken["rollout"] / taken["permutation"],
        "rollout / randint": taken["rollout"] / taken["indices"],
        "fit / permutations": taken["fit"] / taken["permutation"],
    }


if __name__ == "__main__":
    main()
