"""Measure what an autoencoder loses by noise in its gradients that protects persons.

    python -m bench.tables.gradient_noise

The mean squared error of held-out digits of scikit-learn (a fifth of each client's), whose pixels
are divided by 16, after training a linear autoencoder with a code of 10 numbers: `FedAvg` with one
step of plain descent a round on 72 samples, clipped to norm 1, and Adam at the server, for 200
rounds. One model for all, as the mean over three draws of everything. For comparison, the error of
the mean of the samples, and of their ten principal components, all in one place without noise.

Delta is 1e-5. The settings were chosen on these data.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxfed as jf
from bench.common import machine

EPSILONS, DRAWS, CLIENTS = (1.0, 3.0, 10.0), 3, (10, 2)
CODE, BATCH, ROUNDS, DELTA = 10, 72, 200, 1e-5
DESCENT, ADAM = optax.sgd(1.0), optax.adam(0.01)


def split(clients: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The clients' samples to learn from, and the held-out samples of all."""
    digits = load_digits().data.astype(np.float32) / 16
    parts = np.array_split(np.random.default_rng(seed).permutation(digits), clients)
    held_out = np.concatenate([part[: len(part) // 5] for part in parts])
    return [part[len(part) // 5 :] for part in parts], held_out


def error(samples: list[np.ndarray], held_out: np.ndarray, multiplier: float, seed: int) -> float:
    """The error of held-out samples after training with this noise multiplier."""
    start, run = jax.random.split(jax.random.key(seed))
    algorithm = jf.generative.FedAvg(
        jf.models.Autoencoder(held_out.shape[1], CODE, key=start),
        jf.models.reconstruction_loss,
        DESCENT,
        local_steps=1,
        batch_size=BATCH,
        server_optimizer=ADAM,
        gradient_noise=jf.generative.GradientNoise(1.0, multiplier),
    )
    solution = jf.fit(algorithm, jf.Clients.from_samples(samples), rounds=ROUNDS, key=run)
    found = jax.vmap(solution.result.shared)(held_out)
    return float(np.mean(np.sum((np.asarray(found) - held_out) ** 2, axis=1)))


def without_noise(samples: list[np.ndarray], held_out: np.ndarray) -> tuple[float, float]:
    """The errors of the mean and of principal components of all samples."""
    rows = np.concatenate(samples)
    away = held_out - rows.mean(axis=0)
    axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2][:CODE]
    rest = away - away @ axes.T @ axes
    return float(np.mean(np.sum(away**2, axis=1))), float(np.mean(np.sum(rest**2, axis=1)))


def main() -> None:
    """Print the table."""
    print(machine())
    titles = [*(f"ε = {epsilon:g}" for epsilon in EPSILONS), "no noise", "mean", "components"]
    print("| clients, samples of each | " + " | ".join(titles) + " |")
    print("| --- " * (1 + len(titles)) + "|")
    for clients in CLIENTS:
        least = min(map(len, split(clients, 0)[0]))
        known = jf.Clients.from_samples(split(clients, 0)[0])
        multipliers = [
            jf.privacy.training_noise(
                epsilon, known, rounds=ROUNDS, local_steps=1, batch_size=BATCH, delta=DELTA
            )
            for epsilon in EPSILONS
        ]
        cells = []
        for seed in range(DRAWS):
            data = split(clients, seed)
            errors = [error(*data, multiplier, seed) for multiplier in (*multipliers, 0.0)]
            cells.append([*errors, *without_noise(*data)])
        words = " | ".join(f"{value:.1f}" for value in np.mean(cells, axis=0))
        print(f"| {clients}, {least} | {words} |", flush=True)


if __name__ == "__main__":
    main()
