"""What default arguments find elsewhere: eigensolvers, tensors, parts, views and networks.

`python -m bench.tables.answers others` prints the table. A cell is how far what an algorithm
minimizes lies above the least value known, in percent, and the largest of three draws. Beside it
stand the same of each client alone and of all data in one place, where these solve the problem.
Hierarchical models, which minimize no common quantity, have `python -m bench.tables.priors`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxfed as jf
from bench.tables import inmf, view_problems
from jaxfed.models import Autoencoder, reconstruction_loss

RANDOM = 20


class Answer(NamedTuple):
    """What one algorithm found in one draw."""

    algorithm: str
    problem: str
    found: float
    best: float  # the least value known
    alone: float | None = None
    pooled: float | None = None


def eigensolvers(seed: int) -> Iterator[Answer]:
    """Variance that the components leave of all samples, after 30 rounds."""
    rng = np.random.default_rng(seed)
    rank, axes = 3, np.linalg.qr(rng.normal(size=(30, 30)))[0] * 0.8 ** np.arange(30)
    draws = {
        "decaying spectrum": rng.normal(size=(20, 60, 30)),
        "heavy tails": rng.standard_t(3, size=(20, 60, 30)),
        "fewer samples than features": rng.normal(size=(20, 8, 30)),
    }
    methods = {
        "Pooled": (jf.pca.Pooled(rank), 1),
        "SubspaceIteration": (jf.pca.SubspaceIteration(rank), 30),
        "BlockLanczos": (jf.pca.BlockLanczos(rank), 30),
        "LocalPower": (jf.pca.LocalPower(rank), 30),
        "FAPS": (jf.pca.FAPS(rank), 30),
    }
    for problem, scores in draws.items():
        samples = (scores @ axes.T).astype(np.float32)
        rows = samples.reshape(-1, 30).astype(float)

        def left(basis, rows=rows):
            basis = np.linalg.qr(np.asarray(basis, float))[0]
            return float(np.sum(rows**2) - np.sum((rows @ basis) ** 2))

        best = left(np.linalg.svd(rows)[2][:rank].T)
        own = [np.linalg.svd(x)[2][:rank].T for x in samples]
        alone = float(np.mean([left(x) for x in own]))
        clients = jf.Clients.from_samples(samples)
        for name, (algorithm, rounds) in methods.items():
            run = jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(seed))
            yield Answer(name, problem, left(run.result.shared), best, alone, best)


def tensors(seed: int) -> Iterator[Answer]:
    """Variance that Tucker components leave, after 100 rounds."""
    rng = np.random.default_rng(seed)
    shape, ranks, own = (6, 5), (2, 2), (1, 1)
    shared = [np.linalg.qr(rng.normal(size=(d, 2)))[0] for d in shape]
    for problem, strength in {"shared strong": 0.3, "local strong": 3.0}.items():
        samples = []
        for _ in range(8):
            joint = [np.linalg.qr(np.c_[x, rng.normal(size=len(x))])[0] for x in shared]
            local = np.kron(*(x[:, 2:] for x in joint))
            signal = rng.normal(size=(20, 4)) @ np.kron(*shared).T
            noise = 0.2 * rng.normal(size=(20, 30))
            samples.append(signal + strength * rng.normal(size=(20, 1)) @ local.T + noise)
        clients = jf.Clients.from_samples(np.stack(samples).astype(np.float32))
        algorithm = jf.pca.PerTucker(shape, ranks, own)

        def end(warm_start, rounds, clients=clients, algorithm=algorithm):
            run = jf.fit(
                algorithm, clients, rounds=rounds, key=jax.random.key(0), warm_start=warm_start
            )
            return float(run.history["objective"][-1])

        starts = []
        for _ in range(RANDOM):
            bases = [np.linalg.qr(rng.normal(size=(d, 3)))[0] for d in shape]
            one, other = (np.kron(*(x[:, s] for x in bases)) for s in (slice(2), slice(2, 3)))
            local = np.broadcast_to(other, (8, *other.shape))
            starts.append(jf.Personalized(one.astype(np.float32), local.astype(np.float32)))
        found = end(None, 100)
        yield Answer("PerTucker", problem, found, min(found, *(end(x, 300) for x in starts)))


def parts(seed: int) -> Iterator[Answer]:
    """The objective of integrative factors of non-negative samples, after 100 rounds."""
    for problem in ("dense", "sparse counts", "single cells", "alike clients", "two clients"):
        rank, drawn = inmf.KINDS[problem]
        ends = inmf.of_draw(rank, drawn(np.random.default_rng(seed)))
        yield Answer("INMF", problem, float(ends[0, 0]), float(ends[:, 1].min()))


def views(seed: int) -> Iterator[Answer]:
    """Costs of representations with the best linear maps to them."""
    rank = view_problems.RANK
    methods = {
        "MaxVar": (jf.gcca.MaxVar(rank), 30),
        "MVLSA": (jf.gcca.MVLSA(rank), 1),
        "AJIVE": (jf.gcca.AJIVE(rank, rank), 1),
        "DeepMaxVar": (jf.gcca.DeepMaxVar(network, optax.adam(3e-3), rank=rank), 30),
    }
    for problem, make in view_problems.PROBLEMS.items():
        drawn = make(seed)
        best = view_problems.least_cost(drawn.views)
        for name, (algorithm, rounds) in methods.items():
            if problem in ("gaps", "tall") and name in ("AJIVE", "DeepMaxVar"):
                continue  # of complete views; and networks learn from fewer entities in a minute
            run = jf.fit(algorithm, drawn.views, rounds=rounds, key=jax.random.key(seed))
            found = run.result.shared
            if name == "DeepMaxVar":  # of networks, whose cost may lie below that of linear maps
                cost = float(run.history["objective"][-1]) * len(drawn.views)
            else:
                shared = found.scores if name == "AJIVE" else found
                cost = view_problems.cost_of(drawn.views, shared)
            yield Answer(name, problem, cost, best)


def network(features, *, mask, key):
    """A small network for one view."""
    return jf.models.Perceptron(features, view_problems.RANK, hidden=(32,), mask=mask, key=key)


def networks(seed: int) -> Iterator[Answer]:
    """Reconstruction errors of digits, after 100 rounds; alone and pooled by Adam."""
    images = load_digits()
    samples = np.stack([images.data[images.target == k][:60] for k in range(10)]) / 16
    key = jax.random.key(seed)
    model = Autoencoder(64, 10, hidden="relu", key=key)
    for problem, mean in {"centred digits": samples.mean((0, 1)), "raw digits": 0.0}.items():
        values = jnp.asarray(samples - mean, jnp.float32)
        clients = jf.Clients.from_samples(values)

        def left(models, values=values):
            return float(
                jnp.mean(jax.vmap(lambda m, x: reconstruction_loss(m, x, key))(models, values))
            )

        def everywhere(model):
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (10, *x.shape)), model)

        decaying = optax.adam(optax.cosine_decay_schedule(3e-3, 6000))
        long = jf.generative.FedAvg(
            model, reconstruction_loss, decaying, local_steps=6000, batch_size=60
        )
        at_once = jf.Clients.from_samples(values.reshape(1, -1, 64))
        pooled = left(everywhere(jf.fit(long, at_once, rounds=1, key=key).result.shared))
        algorithms = {
            "FedAvg": jf.generative.FedAvg(model, reconstruction_loss, batch_size=6),
            "AdaptiveTraining.autoencoder": jf.generative.AdaptiveTraining.autoencoder(model),
            "AdaptiveTraining": jf.generative.AdaptiveTraining(model, reconstruction_loss),
        }
        for name, algorithm in algorithms.items():
            result = jf.fit(algorithm, clients, rounds=100, key=key).result
            models = everywhere(result.shared) if result.local is None else result.local
            yield Answer(name, problem, left(models), pooled, None, pooled)


GROUPS: tuple[Callable[[int], Iterator[Answer]], ...] = (
    eigensolvers,
    tensors,
    parts,
    views,
    networks,
)


def rows(seeds: int) -> list[dict[str, object]]:
    """One row an algorithm and problem."""
    found: dict[tuple[str, str], list[Answer]] = {}
    for group in GROUPS:
        for seed in range(seeds):
            for answer in group(seed):
                found.setdefault(answer[:2], []).append(answer)

    def above(answers: list[Answer], name: str) -> str:
        values = [getattr(answer, name) for answer in answers]
        if None in values:
            return ""
        gaps = [value / answer.best - 1 for value, answer in zip(values, answers, strict=True)]
        return f"{100 * max(gaps):.2g} %"

    return [
        {
            "algorithm": f"`{algorithm}`",
            "problem": problem,
            "default arguments": above(answers, "found"),
            "each client alone": above(answers, "alone"),
            "all data in one place": above(answers, "pooled"),
        }
        for (algorithm, problem), answers in found.items()
    ]
