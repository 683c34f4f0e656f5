"""What Tucker components miss of images that they were not learned from.

    python -m bench.tables.tucker

The 8 x 8 digits of scikit-learn, one client for each digit: the percentage of energy of all other
images that the components miss; means of five draws.
"""

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxfed as jf
from bench.common import machine, table
from papers.neighbours.pertucker import solved

DIGITS = (5, 10, 20, 50)


def rows() -> list[dict[str, object]]:
    """One row an algorithm, one column a number of images."""
    data = load_digits()
    algorithms = {
        "`PerTucker`, 4 x 4 shared, 2 x 2 local": jf.pca.PerTucker((8, 8), (4, 4), (2, 2)),
        "`PerPCA`, 16 shared, 4 local": jf.pca.PerPCA(16, 4),
        "`PerPCA`, 4 shared, 4 local": jf.pca.PerPCA(4, 4),
    }
    made: list[dict[str, object]] = []
    for name, algorithm in algorithms.items():
        row: dict[str, object] = {"": name}
        for count in DIGITS:
            missed = []
            for seed in range(5):
                rng = np.random.default_rng(seed)
                own = [rng.permutation(data.data[data.target == k]) for k in range(10)]
                clients = jf.Clients.from_samples(np.stack([x[:count] for x in own]))
                found = solved(algorithm, clients)
                rest = energy = 0.0
                for x, local in zip(own, np.asarray(found.local), strict=True):
                    for w in (np.asarray(found.shared), local):
                        rest -= np.sum((x[count:] @ w) ** 2)
                    energy += np.sum(x[count:] ** 2)
                missed.append(1 + rest / energy)
            row[f"{count} images each"] = f"{100 * np.mean(missed):.1f}"
        made.append(row)
    return made


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(machine())
    print(table(rows()))
