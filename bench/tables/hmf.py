"""What heterogeneous matrix factorization recovers, against rounds, scales and missing entries.

    python -m bench.tables.hmf recovery
    python -m bench.tables.hmf missing

Matrices as in the synthetic example of Shi, Fattahi & Al Kontar (2023) and their `main.py`: 100
clients, 120 features and 100 samples, three shared and three local components, all twelve factors
orthonormal, no noise; the local components are axes of a random basis that move on by one from
client to client. Means of three draws.

`recovery`: errors of the shared subspace and, the mean over clients, of the local ones,
‖P − P'‖_F, after some rounds; for clients of one scale, as in the paper, and for clients that are
multiplied by 0.1 to 10. `one step` has the step size of the authors' example in units of the
largest eigenvalue, with their penalty, from random components.

`missing`: ten clients whose entries are missing at random; the root mean square error on these,
relative to that of zeros, after 500 rounds of `HMF` and of `Impute`.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table

FEATURES, SAMPLES, RANK, SEEDS = 120, 100, 3, 3
ROUNDS = (20, 50, 100, 200, 500)
RATES = (0.1, 0.3, 0.5, 0.7)


class Truth(NamedTuple):
    """Clients' samples, `(samples, features)` each, and the components behind them."""

    samples: list[np.ndarray]
    shared: np.ndarray
    locals_: np.ndarray


def recovery(seed: int, clients: int = 100) -> Truth:
    """A draw of the example."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    shared, samples, locals_ = basis[:, :RANK], [], []
    for i in range(clients):
        own = basis[:, (np.arange(RANK) + i) % (FEATURES - 5) + 5]
        scores = np.linalg.qr(rng.normal(size=(SAMPLES, 2 * RANK)))[0]
        samples.append(scores @ np.hstack([shared, own]).T)
        locals_.append(own)
    return Truth(samples, shared, np.stack(locals_))


def random_start(seed: int, clients: int = 100) -> jf.Personalized:
    """Random components, a client's own orthogonal to the shared ones."""
    rng = np.random.default_rng([seed, 1])
    first = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    draws = rng.normal(size=(clients, FEATURES, RANK))
    locals_ = [np.linalg.qr(np.hstack([first, own]))[0][:, RANK:] for own in draws]
    return jf.Personalized(jnp.asarray(first), jnp.asarray(np.stack(locals_)))


def distance(found: jax.Array, truth: np.ndarray) -> float:
    """‖P − P'‖_F, the mean over clients where there are some."""
    own = np.asarray(found)
    difference = own @ np.swapaxes(own, -1, -2) - truth @ np.swapaxes(truth, -1, -2)
    return float(np.linalg.norm(difference, axis=(-2, -1)).mean())


def by_rounds() -> list[dict[str, object]]:
    """One row for scales and an algorithm, one column a number of rounds."""
    rows = []
    for name, scales in {"1": np.ones(100), "0.1 to 10": 10 ** np.linspace(-1, 1, 100)}.items():
        largest = float(scales.max() ** 2)
        algorithms = {
            "HMF, one step": jf.pca.HMF(RANK, RANK, step_size=0.2 / largest, penalty=0.1 * largest),
            "HMF": jf.pca.HMF(RANK, RANK),
            "PerPCA": jf.pca.PerPCA(RANK, RANK),
        }
        for algorithm in algorithms:
            errors = np.zeros((len(ROUNDS), 2))
            for seed in range(SEEDS):
                truth = recovery(seed)
                samples = [s * y for s, y in zip(scales, truth.samples, strict=True)]
                clients = jf.Clients.from_samples(samples)
                solution, done = random_start(seed) if "one" in algorithm else None, 0
                for k, rounds in enumerate(ROUNDS):
                    solution = jf.fit(
                        algorithms[algorithm],
                        clients,
                        rounds=rounds - done,
                        key=jax.random.key(seed),
                        warm_start=solution,
                    )
                    done = rounds
                    shared, local = solution.result
                    found = distance(shared, truth.shared), distance(local, truth.locals_)
                    errors[k] += np.array(found) / SEEDS
            cells = {
                f"{rounds} rounds": " / ".join(f"{x:.1e}" for x in both)
                for rounds, both in zip(ROUNDS, errors, strict=True)
            }
            rows.append({"scales": name, "algorithm": algorithm} | cells)
    return rows


def by_missing_entries() -> list[dict[str, object]]:
    """One row a share of missing entries."""
    rows = []
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
        rows.append({"missing": rate, "HMF": f"{errors[0]:.2g}", "Impute": f"{errors[1]:.2g}"})
    return rows


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parts: dict[str, Callable[..., object]] = {"recovery": by_rounds, "missing": by_missing_entries}
    print(machine())
    # Clients of other scales are meant.
    warnings.simplefilter("ignore", jf.EnergyWarning)
    print(table(choose(parts, __doc__).part()))
