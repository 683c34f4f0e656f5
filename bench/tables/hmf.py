"""What heterogeneous matrix factorization completes, by the share of missing entries.

    python -m bench.tables.hmf

Matrices of `papers.neighbours.hmf`, as in the synthetic example of Shi, Fattahi & Al Kontar (2023),
of ten clients whose entries are missing at random; the root mean square error on these, relative to
that of zeros, after 500 rounds of `HMF` and of `Impute`. Means of three draws.
"""

import jax
import numpy as np

import jaxfed as jf
from bench.common import machine, table
from papers.neighbours.hmf import RANK, recovery

SEEDS, RATES = 3, (0.1, 0.3, 0.5, 0.7)


def rows() -> list[dict[str, object]]:
    """One row a share of missing entries."""
    made = []
    for rate in RATES:
        errors = np.zeros(2)
        for seed in range(SEEDS):
            full = np.stack(recovery(seed, 10).samples)
            rng = np.random.default_rng([seed, 2])
            gaps = np.where(rng.random(full.shape) < rate, np.nan, full)
            clients = jf.Clients.from_samples(gaps, missing="mask")
            factors, model = (
                jf.fit(algorithm, clients, rounds=500, key=jax.random.key(seed))
                for algorithm in (jf.pca.HMF(RANK, RANK), jf.preprocess.Impute(RANK, RANK))
            )
            completed = (
                jf.pca.complete(factors, gaps),
                model.result.local.transform(clients).data.values,
            )
            missing = np.isnan(gaps)
            for k, values in enumerate(completed):
                left = np.linalg.norm((np.asarray(values) - full)[missing])
                errors[k] += left / np.linalg.norm(full[missing]) / SEEDS
        made.append({"missing": rate, "HMF": f"{errors[0]:.2g}", "Impute": f"{errors[1]:.2g}"})
    return made


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(machine())
    print(table(rows()))
