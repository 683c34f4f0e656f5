"""Two claims of Shi & Kontar (2024) with the bootstrap's error bars.

    python -m bench.tables.claims [misalignment | clusters]

`misalignment`: the estimated misalignment θ of the local components against their rank, on clients
as for their Table 3 (20 clients, 30 features, one shared and one local component, ten distinct
local ones, so that the true θ is .9), but with noise and in single precision; and on clients with
three local components of their own. Intervals are of 95 % over resamples of samples. All runs are
100 rounds of `PerPCA` with the paper's objective, from three random starts beside
"local_first"; from "common" it is at the optimum then. The last column is θ of the true local
components, without the last ones or with random ones beside them.

`clusters`: the groups of clients that spectral clustering finds, as in their Figure 9 (100 clients,
10 groups, noise of variance .5), in the solution and in resamples of its samples. The confidence of
a client's cluster is the mean share of resamples in which it is together with the others of it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table
from jaxfed.inference import bootstrap
from jaxfed.linalg import orthonormalize
from papers.perpca.figure9 import cluster
from papers.synthetic import PERPCA_SETTINGS

ROUNDS, RESAMPLES, BLOCK, STARTS = 100, 100, 20, 3
MODEL = partial(jf.pca.PerPCA, local_penalty=0.0)
# Changes of the paper's setting, and the ranks that are tried.
SETTINGS = {
    "0.1, 1000, 1": ({"samples": 1000, "noise_variance": 0.1}, range(1, 6)),
    "0.5, 100, 1": ({"samples": 100, "noise_variance": 0.5}, range(1, 6)),
    "0.1, 1000, 3": (
        {"noise_variance": 0.1, "local_rank": 3, "local_scale": (3.0, 2.0, 1.0), "local": "random"}
        | {"window": None, "shared_scale": 3.0},
        range(1, 6),
    ),
}


def theta(result: jf.Personalized, clients: jf.Clients) -> jax.Array:
    """The statistic of the first claim."""
    del clients
    return jf.metrics.misalignment(result.local)


def misalignment() -> list[dict[str, object]]:
    """One row a setting and a rank."""
    rows = []
    for name, (changes, ranks) in SETTINGS.items():
        data = jf.data.perpca_synthetic(
            key=jax.random.key(0), **PERPCA_SETTINGS["figure7"] | changes
        )
        clients = jf.Clients.from_samples(data.samples)
        for rank in ranks:
            model = MODEL(1, rank, start="local_first")
            found = []
            for seed in range(1 + STARTS):
                key = jax.random.key(seed)
                start = None if seed == 0 else drawn(key, rank)
                solution = jf.fit(model, clients, rounds=ROUNDS, key=key, warm_start=start)
                each = bootstrap(
                    solution, clients, theta, key=key, resamples=RESAMPLES, runs_at_once=BLOCK
                )
                found.append(each.interval())
            ends = np.asarray([(x.estimate, x.lower, x.upper) for x in found])
            texts = [f"{a:.3f} ({b:.3f} to {c:.3f})" for a, b, c in ends]
            row: dict[str, object] = {"noise, samples, true rank": name, "rank": rank}
            row |= {"start local_first": texts[0], "random starts": "; ".join(texts[1:])}
            common = MODEL(1, rank, start="common")
            best = jf.fit(common, clients, rounds=ROUNDS, key=jax.random.key(0))
            row["start common"] = f"{float(theta(best.result, clients)):.3f}"
            row["true and random"] = f"{float(with_noise(data.local, rank)):.3f}"
            rows.append(row)
            print(row, flush=True)
    return rows


def drawn(key: jax.Array, local_rank: int) -> jf.Personalized:
    """Random orthonormal components."""
    both = jax.random.normal(key, (20, 30, 1 + local_rank))
    shared = orthonormalize(both[0, :, :1])
    left = both[:, :, 1:] - shared @ (shared.T @ both[:, :, 1:])
    return jf.Personalized(shared, jax.vmap(orthonormalize)(left))


def with_noise(local: jax.Array, rank: int) -> jax.Array:
    """θ of the first true local components, with random ones beside them where they are too few."""
    noise = jax.random.normal(jax.random.key(7), (*local.shape[:2], rank)).at[:, 0].set(0)
    both = jnp.concatenate([local, noise], axis=2)[:, :, :rank]
    return jf.metrics.misalignment(jax.vmap(orthonormalize)(both))


def own(result: jf.Personalized, clients: jf.Clients) -> jax.Array:
    """The statistic of the second claim: clustering follows on the host."""
    del clients
    return result.local


def clusters() -> list[dict[str, object]]:
    """One row a number of samples."""
    rows = []
    for samples in (50, 100, 200, 1000):
        changes = {"samples": samples}
        data = jf.data.perpca_synthetic(
            key=jax.random.key(0), **PERPCA_SETTINGS["figure9"] | changes
        )
        clients = jf.Clients.from_samples(data.samples)
        key = jax.random.key(1)
        model = MODEL(2, 3, start="local_first")
        solution = jf.fit(model, clients, rounds=ROUNDS, key=key)
        found = bootstrap(solution, clients, own, key=key, resamples=RESAMPLES, runs_at_once=BLOCK)
        labels = np.asarray(data.labels)
        once = np.asarray(cluster(jnp.asarray(found.estimate), 10, 0))
        again = [np.asarray(cluster(jnp.asarray(x), 10, 0)) for x in found.replicates]
        together = np.mean([x[:, None] == x for x in again], axis=0)
        peers = (once[:, None] == once) & ~np.eye(len(once), dtype=bool)
        confidence = np.sum(together * peers, axis=1) / np.maximum(peers.sum(axis=1), 1)
        wrong = misplaced(labels, once)
        same = (labels[:, None] == labels) & ~np.eye(len(once), dtype=bool)
        accuracies = [jf.metrics.clustering_accuracy(labels, x) for x in again]
        row: dict[str, object] = {"samples": samples}
        row["accuracy"] = f"{jf.metrics.clustering_accuracy(labels, once):.2f}"
        row["of resamples"] = "{:.2f} to {:.2f}".format(*np.quantile(accuracies, [0.025, 0.975]))
        row["together: same group"] = f"{together[same].mean():.2f}"
        row["together: other groups"] = f"{together[labels[:, None] != labels].mean():.2f}"
        row["confidence: right"] = spread(confidence[~wrong])
        row["confidence: wrong"] = spread(confidence[wrong])
        rows.append(row)
        print(row, flush=True)
    return rows


def misplaced(labels: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Which clients are in a cluster most of whose clients are of another group."""
    most = [np.bincount(labels[found == x]).argmax() for x in range(found.max() + 1)]
    return np.asarray(most)[found] != labels


def spread(values: np.ndarray) -> str:
    """The median and the range, and how many there are."""
    if len(values) == 0:
        return "none"
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f}) of {len(values)}"


if __name__ == "__main__":
    chosen = choose({"misalignment": misalignment, "clusters": clusters}, __doc__)
    print(machine())
    print(table(chosen.part()))
