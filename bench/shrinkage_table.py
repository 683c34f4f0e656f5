"""Where `PerPCA(shrinkage=True)` helps: distance from the true shared components, with and without.

    python bench/shrinkage_table.py

Two shared components, whose variance over the noise's is 2, but 9 in the last row, which starts
from `OneShot`. A cell holds the sine of the largest angle to the true ones, plain / shrunk, means
of three seeds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import machine, table

import jaxfed as jf

SEEDS, SAMPLES, SHARED = 3, (20, 80, 320), 2


class Setting(NamedTuple):
    """Clients, and how they are solved."""

    clients: int
    features: int
    local_rank: int
    shared_scale: float
    local_scale: float
    noise_variance: float
    rounds: int
    from_one_shot: bool = False


SETTINGS = (
    Setting(60, 15, 10, 1.0, 10.0, 0.5, 1000),
    Setting(60, 15, 2, 1.0, 3.0, 0.5, 1000),
    Setting(60, 15, 10, 1.0, 1.0, 0.5, 1000),
    Setting(20, 200, 2, 1.0, 3.0, 0.5, 300),
    Setting(20, 200, 2, 3.0, 2.0, 1.0, 300, from_one_shot=True),
)


def sine(setting: Setting, samples: int, seed: int, shrinkage: bool) -> float:
    """Of the largest angle to the true shared components."""
    key = jax.random.key(seed)
    data = jf.data.perpca_synthetic(
        key, clients=setting.clients, features=setting.features, shared_rank=SHARED,
        local_rank=setting.local_rank, samples=samples, shared_scale=setting.shared_scale,
        local_scale=setting.local_scale, noise_variance=setting.noise_variance,
    )  # fmt: skip
    clients, start = jf.Clients.from_samples(data.samples), None
    ranks = SHARED, setting.local_rank
    if setting.from_one_shot:
        start = jf.fit(jf.pca.OneShot(*ranks), clients, rounds=1, key=key)
    algorithm = jf.pca.PerPCA(*ranks, shrinkage=shrinkage)
    found = jf.fit(algorithm, clients, rounds=setting.rounds, key=key, warm_start=start)
    basis = found.result.shared
    return float(jnp.linalg.norm(data.shared - basis @ (basis.T @ data.shared), 2))


def main() -> None:
    """Print the table."""
    print(machine())
    rows = []
    for each in SETTINGS:
        ratio = each.local_scale**2 / each.noise_variance
        name = f"{each.features}, {each.local_rank}, {ratio:.0f}, {each.clients}, {each.rounds}"
        cells = {"features, local components, their variance, clients, rounds": name}
        for samples in SAMPLES:
            means = [
                np.mean([sine(each, samples, seed, shrinkage) for seed in range(SEEDS)])
                for shrinkage in (False, True)
            ]
            cells[f"{samples} samples"] = " / ".join(f"{mean:.2f}" for mean in means)
        rows.append(cells)
    print(table(rows))


if __name__ == "__main__":
    main()
