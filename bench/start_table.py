"""How far from the true shared components personalized PCA is, by its start.

    python bench/start_table.py

A hundred clients of a hundred samples, 15 features; two shared components of variance 1 and ten
local ones of variance 100, noise of variance 0.5. A cell holds the least and the largest distance
‖P_U − P‖² over the seeds, at most 4, or one number where both round to it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from timing import machine, table

import jaxfed as jf

SEEDS, ROUNDS = 5, (1, 100, 1000)
SHARED, LOCAL = 2, 10


def starts() -> dict[str, tuple[jf.pca.PerPCA, jf.pca.OneShot | None]]:
    """What is run, and the algorithm whose result it starts from."""
    perpca = jf.pca.PerPCA(SHARED, LOCAL)
    return {
        '`PerPCA(start="local_first")`, the default': (perpca, None),
        '`warm_start=` of `OneShot(method="projector")`': (
            perpca, jf.pca.OneShot(SHARED, LOCAL, method="projector"),
        ),
        '`warm_start=` of `OneShot(method="spectrum")`': (
            perpca, jf.pca.OneShot(SHARED, LOCAL, method="spectrum"),
        ),
        '`PerPCA(start="random")`': (jf.pca.PerPCA(SHARED, LOCAL, start="random"), None),
    }  # fmt: skip


def distances(algorithm: jf.pca.PerPCA, before: jf.pca.OneShot | None) -> np.ndarray:
    """From the true shared components, `(seeds, rounds)`."""

    @jax.jit
    @jax.vmap
    def solve(key):
        draw, run = jax.random.split(key)
        data = jf.data.perpca_synthetic(
            draw, clients=100, features=15, shared_rank=SHARED, local_rank=LOCAL, samples=100,
            shared_scale=1.0, local_scale=10.0, noise_variance=0.5,
        )  # fmt: skip
        clients = jf.Clients.from_samples(data.samples)
        start = None
        if before is not None:
            start = jf.rollout(before, clients, rounds=1, key=run).result
        found = [
            jf.rollout(algorithm, clients, rounds=rounds, key=run, warm_start=start).result.shared
            for rounds in ROUNDS
        ]
        truth = data.shared @ data.shared.T
        return jnp.stack([jnp.sum((u @ u.T - truth) ** 2) for u in found])

    return np.asarray(solve(jax.random.split(jax.random.key(0), SEEDS)))


def spread(values: np.ndarray) -> str:
    """The least and the largest, in two digits."""
    low, high = f"{values.min():.2g}", f"{values.max():.2g}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Print the table."""
    print(machine())
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name, given in starts().items():
        cells = distances(*given)
        counts = {f"{n} round{'s' * (n > 1)}": spread(cells[:, i]) for i, n in enumerate(ROUNDS)}
        rows.append({"start": name, **counts})
    print(table(rows))


if __name__ == "__main__":
    main()
