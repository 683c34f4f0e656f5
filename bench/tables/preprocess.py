"""Which units and means to choose: the error of the shared subspace, by what is wrong with data.

    python -m bench.tables.preprocess

Fifty clients have a hundred samples of 15 features, with two shared and two local components and
noise of variance 0.09. `PerPCA(2, 2)` fits them in 60 rounds. A cell contains ‖P_U − P‖²/2,
which is at most 2, as the median of three draws. The true subspace is in the units of the samples
that are fitted.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import machine, table
from jaxfed.preprocess import Standardize

CLIENTS, FEATURES, SEEDS, ROUNDS = 50, 15, 3, 60
CHOICES = {
    "as they come": Standardize("none", "none"),
    "common mean": Standardize("shared", "none"),
    "own means": Standardize("local", "none"),
    "own means, common deviations": Standardize("local", "shared"),
    "own means, energy": Standardize("local", "energy"),
    "own means, own deviations": Standardize("local", "local"),
}
TROUBLES = (
    "none",
    "a common mean of norm 10",
    "means of their own of norm 10",
    "one client times 1,000",
    "clients in units of their own, 0.1 to 10",
    "features in other units, 0.1 to 10",
)


def spoiled(trouble: str, samples: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples with a trouble, and what each feature of all clients was multiplied by."""
    rng = np.random.default_rng(seed)
    units, unit = np.ones((CLIENTS, 1, 1)), np.ones(FEATURES)
    means = rng.normal(size=(CLIENTS, 1, FEATURES))
    means *= 10 / np.linalg.norm(means, axis=-1, keepdims=True)
    if trouble == TROUBLES[1]:
        return samples + means[0], unit
    if trouble == TROUBLES[2]:
        return samples + means, unit
    if trouble == TROUBLES[3]:
        units[0] = 1000
    elif trouble == TROUBLES[4]:
        units = 10 ** rng.uniform(-1, 1, size=units.shape)
    elif trouble == TROUBLES[5]:
        unit = 10 ** rng.uniform(-1, 1, size=FEATURES)
    return samples * units * unit, unit


def error(choice: Standardize, trouble: str, seed: int) -> float:
    """Of the shared subspace."""
    key = jax.random.key(seed)
    data = jf.data.perpca_synthetic(
        key=key,
        clients=CLIENTS,
        features=FEATURES,
        shared_rank=2,
        local_rank=2,
        samples=100,
        noise_variance=0.09,
    )
    samples, unit = spoiled(trouble, np.stack([np.asarray(y) for y in data.samples]), seed)
    clients = jf.Clients.from_samples(samples.astype("float32"))
    units = jf.fit(choice, clients, rounds=1, key=key).result.local
    algorithm = jf.pca.PerPCA(2, 2)
    found = jf.fit(algorithm, units.transform(clients), rounds=ROUNDS, key=key).result.shared
    # Scales that differ between clients move the truth of each elsewhere.
    common = units.scale[0] if choice.scale == "shared" else jnp.ones(FEATURES)
    truth = jnp.linalg.qr(data.shared * (unit / common)[:, None])[0]
    return float(jf.metrics.projector_distance(found, truth)) / 2


def rows() -> list[dict[str, object]]:
    """One row a trouble, one column a choice."""
    return [
        {"what is wrong": trouble}
        | {
            name: f"{np.median([error(choice, trouble, seed) for seed in range(SEEDS)]):.2g}"
            for name, choice in CHOICES.items()
        }
        for trouble in TROUBLES
    ]


if __name__ == "__main__":
    print(machine())
    print(table(rows()))
