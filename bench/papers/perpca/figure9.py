"""Clustering of clients by their local components."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from sklearn.metrics import adjusted_rand_score

import papers
from jaxfed import Personalized, metrics, pca, plot
from jaxfed._optional import require
from jaxfed.linalg import orthonormalize
from jaxfed.pca.applications import embed_clients
from jaxfed.plot.drawing import canvas
from papers.perpca._synthetic import draw, gaussian
from papers.report import Found, Labels
from papers.runs import Seeds, learned

# Noise variance, samples, algorithm, rounds after which clients are clustered.
_TANGENT = partial(pca.PerPCA, 2, 3, solver="gradient")
_POLAR = partial(_TANGENT, variant="polar")
_RUNS = [
    (0.5, 1000, "tangent, step 0.2", _TANGENT(step_size=0.2), (30,)),
    (0.5, 1000, "tangent, step 1", _TANGENT(step_size=1.0), (0, 1, 30)),
    (0.5, 1000, "polar, step 1", _POLAR(step_size=1.0), (30,)),
    (0.5, 1000, "local-first start, default step", _TANGENT(start="local_first"), (30, 300)),
    (0.5, 100, "tangent, step 1", _TANGENT(step_size=1.0), (30,)),
    (0.05, 1000, "polar, step 10", _POLAR(step_size=10.0), (1, 2, 5, 10)),
    (0.05, 1000, "polar, step 1000", _POLAR(step_size=1000.0), (1, 2)),
    (0.05, 1000, "local-first start, default step", _TANGENT(start="local_first"), (30,)),
]


def cluster(local: Float[Array, "m d r"], groups: int, seed: int) -> Int[Array, " m"]:
    """Spectral clustering on the affinity exp(-rho); the paper does not name one.

    While clients are still far from their groups this separates better than the mean squared
    cosines 1 - rho / 2 of `cluster_clients`, and its accuracies are those of the reference.
    """
    spectral = require("sklearn.cluster", extra="data").SpectralClustering
    clustering = spectral(groups, affinity="precomputed", random_state=seed)
    affinity = np.exp(-np.asarray(metrics.client_distances(local), np.float64))
    return jnp.asarray(clustering.fit_predict(affinity))


def run(seeds: Seeds) -> Found:
    """Cluster the clients of every seed after every number of rounds."""
    data_keys, keys = seeds.split(2)
    known = papers.known("perpca/figure9")
    measured: dict[Labels, Any] = {}
    pictures = {}
    for noise, n, name, algorithm, stops in _RUNS:
        draws, clients, _ = draw("figure9", data_keys, noise_variance=noise, samples=n)
        labels = draws[0].labels
        shared = learned(pca.OneShot(2, 3, method="spectrum"), clients, keys).shared
        local = gaussian(keys, 100, 15, 3)
        start = None if name.startswith("local-first") else Personalized(shared, local)
        for rounds in stops:
            if rounds == 0:
                deflated = local - shared[:, None] @ (shared.mT[:, None] @ local)
                own = jax.vmap(jax.vmap(orthonormalize))(deflated)
            else:
                own = learned(algorithm, clients, keys, rounds, start).local
            found = [cluster(one, 10, seed) for seed, one in zip(seeds, own, strict=True)]
            setting = noise, n, name, rounds
            agreement = {
                "accuracy": metrics.clustering_accuracy,
                "adjusted Rand index": adjusted_rand_score,
            }
            for quantity, measure in agreement.items():
                if quantity == "accuracy" or (*setting, quantity) in known:
                    values = [measure(labels, groups) for groups in found]
                    measured[*setting, quantity] = values
            if (noise, n, name) == (0.5, 1000, "tangent, step 1"):
                pictures[rounds] = embed_clients(own[0]), found[0]

    def picture():
        figure = canvas(None, 12.6, 4.0)
        parts = figure.subfigures(1, len(pictures))
        for part, (rounds, (points, found)) in zip(parts, pictures.items(), strict=True):
            plot.clusters(
                points, found, names=[str(label) for label in labels.tolist()], figure=part
            )
            part.suptitle(f"round {rounds}", fontsize=10)
        return figure

    return Found(
        measured,
        figures={"figure9": picture},
        arrays={
            f"round_{rounds}_{name}": value
            for rounds, pair in pictures.items()
            for name, value in zip(("points", "found"), pair, strict=True)
        }
        | {"groups": labels},
    )
