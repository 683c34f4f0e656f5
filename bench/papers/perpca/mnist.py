"""Section 7.3 on MNIST: reconstruction of held-out digits; clustering of clients."""

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from sklearn.metrics import adjusted_rand_score

import papers
from jaxfed import Clients, metrics, plot
from jaxfed import data as datasets
from jaxfed.pca import Local, OneShot, PerPCA, Pooled
from jaxfed.pca.applications import cluster_clients, embed_clients
from papers._files import MNIST_FILES, data_file, data_folder
from papers.intervals import at_least
from papers.perpca._real import fitted
from papers.report import Cell, Found, Labels, ahead
from papers.runs import Seeds


class _Split(NamedTuple):
    """How images are dealt out and fitted."""

    clients: int
    train: int
    test: int
    shared_rank: int
    local_rank: int
    rounds: int


_SPLITS = (
    _Split(clients=100, train=40, test=40, shared_rank=30, local_rank=5, rounds=100),
    _Split(clients=50, train=120, test=58, shared_rank=10, local_rank=10, rounds=50),
)


def _deal(
    images: Float[np.ndarray, "n 784"], digits: Int[np.ndarray, " n"], split: _Split, seed: int
) -> tuple[Float[Array, "m n 784"], Float[Array, "m k 784"], Int[Array, " m"]]:
    """Clients with images of one digit each, no image twice: training, test images and digits."""
    rng = np.random.default_rng(seed)
    of_one_digit, size = split.clients // 10, split.train + split.test
    rows = np.concatenate(
        [
            rng.permutation(np.flatnonzero(digits == digit))[: of_one_digit * size]
            for digit in range(10)
        ]
    )
    dealt = jnp.asarray(images[rows].reshape(split.clients, size, -1))
    labels = jnp.repeat(jnp.arange(10), of_one_digit)
    return dealt[:, : split.train], dealt[:, split.train :], labels


def _step_size(samples: Float[Array, "m n d"], factor: float) -> float:
    """This many times one over the largest eigenvalue of any client's second moment."""
    return factor * samples.shape[1] / float(jnp.linalg.norm(samples, 2, axis=(1, 2)).max()) ** 2


def run(seeds: Seeds, *, data: Path | None = None) -> Found:
    """Deal and fit both splits for every seed."""
    folder = data_folder(data, "mnist", *MNIST_FILES)
    images, digits = (
        datasets.read_idx(data_file(folder, f"t10k-{name}.gz", f"t10k-{name}"))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255

    errors: dict[tuple[int, str, str], list[float]] = {}
    agreement: dict[str, list[float]] = {"accuracy": [], "adjusted Rand index": []}
    pictures: dict[str, np.ndarray] = {}
    for split, seed in product(_SPLITS, seeds):
        m, r1, r2 = split.clients, split.shared_rank, split.local_rank
        seen, unseen, labels = _deal(pixels, digits, split, seed)
        clients = Clients.from_samples(seen)
        one_shot = fitted(OneShot(r1, r2), clients, seed)
        algorithm = PerPCA(r1, r2, solver="gradient", step_size=_step_size(seen, 1.9))
        results = {
            "each client alone": fitted(Local(r1 + r2), clients, seed).result,
            "pooled": fitted(Pooled(r1 + r2), clients, seed).result,
            "one shot (distPCA)": one_shot.result,
            "PerPCA": fitted(algorithm, clients, seed, split.rounds, one_shot).result,
        }
        for name, result in results.items():
            for part, samples in (("train", seen), ("test", unseen)):
                error = float(metrics.reconstruction_error(result, samples))
                errors.setdefault((m, name, part), []).append(error)
        if split is _SPLITS[1]:
            # The clients of the second split are few and large enough to be told apart.
            shared, local = results["PerPCA"]
            found = jnp.asarray(cluster_clients(local, 10, seed=seed))
            agreement["accuracy"].append(metrics.clustering_accuracy(labels, found))
            agreement["adjusted Rand index"].append(adjusted_rand_score(labels, found))
            if not pictures:
                pictures = {
                    "points": np.asarray(embed_clients(local)),
                    "digits": np.asarray(labels),
                    "shared": np.asarray(shared),
                    "local": np.asarray(local),
                }

    measured: dict[Labels, Any] = {
        (m, method, f"{part} error"): values for (m, method, part), values in errors.items()
    }
    known = papers.known("perpca/mnist")
    for better, worse in (
        ("PerPCA", "one shot (distPCA)"),
        ("one shot (distPCA)", "pooled"),
        ("pooled", "each client alone"),
    ):
        measured[100, f"{better} below {worse}", "test error less by"] = ahead(
            errors[100, better, "test"],
            errors[100, worse, "test"],
            (known[100, worse, "test error"] - known[100, better, "test error"]) / 2,
        )
    for quantity, values in agreement.items():
        measured[50, "PerPCA, clusters", quantity] = Cell(values, at_least(1.0))

    def clusters():
        figure = plot.clusters(pictures["points"], pictures["digits"])
        figure.suptitle("Clients of one digit each, by their own components", fontsize=10)
        return figure

    def learned():
        own = {f"own, a client of {k}s": pictures["local"][5 * k] for k in (0, 3, 8)}
        return plot.components({"shared": pictures["shared"]} | own, (28, 28), columns=10)

    return Found(measured, figures={"clusters": clusters, "components": learned}, arrays=pictures)
