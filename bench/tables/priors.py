"""Hierarchical models at their default arguments, between each client alone and all together.

    python -m bench.tables.priors

Clients' components scatter around common ones: not at all, with variance 0.01 in each entry, or so
much that they have nothing in common. The table shows the mean squared distance between the
projectors of true and learned components, at most twice the rank, as the mean over draws.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf

FEATURES, RANK, ROUNDS = 20, 3, 100
SPREADS = {"alike": 0.0, "similar": 0.01, "unrelated": 1.0}
NOISES, CLIENTS, SAMPLES = (0.01, 0.25), (5, 40), 20
METHODS = {
    "`Local`": (jf.pca.Local(RANK), 1),
    "`Pooled`": (jf.pca.Pooled(RANK), 1),
    "`HierarchicalPCA`": (jf.pca.HierarchicalPCA(RANK), ROUNDS),
    "`EmpiricalBayesPCA`": (jf.pca.EmpiricalBayesPCA(RANK), ROUNDS),
}


def drawn(seed: int, clients: int, noise: float, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Samples of all clients, and their components."""
    rng = np.random.default_rng(seed)
    centre = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    around = np.sqrt(spread) * rng.normal(size=(clients, FEATURES, RANK))
    frames = np.linalg.qr(centre + around)[0]
    values = rng.normal(size=(clients, SAMPLES, RANK)) @ np.swapaxes(frames, 1, 2)
    values = values + np.sqrt(noise) * rng.normal(size=values.shape)
    return values.astype(np.float32), frames.astype(np.float32)


def errors(name: str) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """A compiled function of draws of samples and components, which gives each draw's error."""
    algorithm, rounds = METHODS[name]

    def one(pair):
        values, frames = pair
        clients = jf.Clients.from_samples(values)
        result = jf.rollout(algorithm, clients, rounds=rounds, key=jax.random.key(0)).result
        found = result.local
        if found is None:
            found = jnp.broadcast_to(result.shared, frames.shape)
        return 2 * (RANK - jnp.sum((found.mT @ frames) ** 2) / len(frames))

    return jax.jit(lambda *pairs: jax.lax.map(one, pairs))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=8)
    draws = range(parser.parse_args().draws)
    errors_of = {name: errors(name) for name in METHODS}
    print("| clients, noise | " + " | ".join(METHODS) + " |")
    print("| --- " + "| ---: " * len(METHODS) + "|")
    for clients in CLIENTS:
        for kind, spread in SPREADS.items():
            for noise in NOISES:
                each = [drawn(seed, clients, noise, spread) for seed in draws]
                pairs = [np.stack(x) for x in zip(*each, strict=True)]
                cells = [f"{errors_of[name](*pairs).mean():.2g}" for name in METHODS]
                print(f"| {clients} {kind}, {noise} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
