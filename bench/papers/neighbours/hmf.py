"""Heterogeneous matrix factorization: errors of both subspaces by rounds, without noise.

Matrices as in the synthetic example of Shi, Fattahi & Al Kontar (2023) and their `main.py`: 100
clients, 120 features and 100 samples, three shared and three local components, all twelve factors
orthonormal; the local components are axes of a random basis that move on by one from client to
client.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

import jaxfed as jf
from jaxfed.pca import HMF, PerPCA
from papers.drawing import curves
from papers.intervals import at_least, at_most
from papers.report import Found, Labels
from papers.runs import Seeds, runs

FEATURES, SAMPLES, RANK = 120, 100, 3
CLIENTS, EVERY = 100, 10
STEP_SIZE, PENALTY = 0.2, 0.1  # the authors', for a largest eigenvalue of one
ONE_STEP, OWN_STEPS, PERPCA = "HMF, the paper's one step", "HMF, clients' own steps", "PerPCA"
ALIKE, UNLIKE = "1", "0.1 to 10"  # clients' scales
SHARED, LOCAL = "shared", "local"
RATE = "per round below 0.001"
LEAST = -11.0  # log10 of errors that rounding leaves, with room for the sums over 100 clients


class Truth(NamedTuple):
    """Clients' samples, `(samples, features)` each, and the components behind them."""

    samples: list[np.ndarray]
    shared: np.ndarray
    locals_: np.ndarray


def recovery(seed: int, clients: int = CLIENTS) -> Truth:
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


def random_start(seed: int, clients: int = CLIENTS) -> jf.Personalized:
    """Random components, a client's own orthogonal to the shared ones."""
    rng = np.random.default_rng([seed, 1])
    first = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    draws = rng.normal(size=(clients, FEATURES, RANK))
    locals_ = [np.linalg.qr(np.hstack([first, own]))[0][:, RANK:] for own in draws]
    return jf.Personalized(jnp.asarray(first), jnp.asarray(np.stack(locals_)))


def scales(name: str) -> Float[np.ndarray, " clients"]:
    """What each client's matrix is multiplied by."""
    return np.ones(CLIENTS) if name == ALIKE else 10 ** np.linspace(-1, 1, CLIENTS)


def one_step(largest: float) -> HMF:
    """The authors' step size and penalty, for clients whose largest eigenvalue is this."""
    step_size, penalty = STEP_SIZE / largest, PENALTY * largest
    return HMF(RANK, RANK, solver="gradient", step_size=step_size, penalty=penalty)


def distance(found: Array, truth: Array) -> Float[Array, ""]:
    """‖P − P'‖_F, the mean over clients where there are some."""
    projectors = (x @ jnp.swapaxes(x, -1, -2) for x in (found, truth))
    return jnp.mean(jnp.linalg.norm(next(projectors) - next(projectors), axis=(-2, -1)))


def rate(curve: Float[np.ndarray, " places"] | Sequence[float]) -> float:
    """Slope of log10 errors of every `EVERY` rounds, where they are between 1e-3 and 1e-10."""
    values = np.asarray(curve)
    (places,) = np.nonzero((values < -3) & (values > -10))
    return float(np.polyfit(EVERY * places, values[places], 1)[0]) if len(places) > 1 else np.nan


def _distances(truth: jf.Personalized, result: jf.Personalized) -> dict[str, Array]:
    own = distance(result.local, truth.local)
    return {SHARED: distance(result.shared, truth.shared), LOCAL: own}


def run(seeds: Seeds, *, rounds: int = 500, at: Sequence[int] = (20, 50, 100, 200, 500)) -> Found:
    """All methods from the same random components."""
    found: dict[Labels, np.ndarray] = {}
    with jax.enable_x64(True):
        draws = [recovery(seed) for seed in seeds]
        truth = jf.Personalized(
            jnp.stack([draw.shared for draw in draws]), jnp.stack([draw.locals_ for draw in draws])
        )
        start = jax.tree.map(lambda *x: jnp.stack(x), *map(random_start, seeds))
        for name in (ALIKE, UNLIKE):
            sizes = scales(name)
            clients = jf.stack(
                [
                    jf.Clients.from_samples(sizes[:, None, None] * np.stack(draw.samples))
                    for draw in draws
                ]
            )
            methods = {
                ONE_STEP: one_step(float(sizes.max() ** 2)),
                OWN_STEPS: HMF(RANK, RANK, solver="gradient"),
                PERPCA: PerPCA(RANK, RANK, solver="gradient"),
            }
            for method, algorithm in methods.items():
                options: dict[str, Any] = {"measure": Partial(_distances), "every": EVERY}
                history = runs(
                    algorithm, clients, seeds.keys(), rounds, start, given=truth, **options
                ).history
                for part in (SHARED, LOCAL):
                    found[name, method, part] = np.log10(history[part])
    measured = {
        (name, method, k, part): values[:, k - 1]
        for (name, method, part), values in found.items()
        for k in at
    }
    for method in (ONE_STEP, OWN_STEPS):
        slopes = [rate(curve[EVERY - 1 :: EVERY]) for curve in found[ALIKE, method, SHARED]]
        measured[ALIKE, method, RATE, SHARED] = slopes
    late = max(at)
    claims = {
        f"{method} finds the truth, {part} components": (
            measured[ALIKE, method, late, part],
            at_most(LEAST),
        )
        for method in (ONE_STEP, OWN_STEPS, PERPCA)
        for part in (SHARED, LOCAL)
    }
    claims |= {
        f"scales {UNLIKE}, own steps ahead of the one step, {part} components": (
            measured[UNLIKE, ONE_STEP, late, part] - measured[UNLIKE, OWN_STEPS, late, part],
            at_least(1.0),
        )
        for part in (SHARED, LOCAL)
    }
    places = np.arange(EVERY, rounds + 1, EVERY)
    panels = {
        (f"{part} components, scales {name}", "round", "log10 error"): {
            method: (places, found[name, method, part].mean(0)[places - 1])
            for method in (ONE_STEP, OWN_STEPS, PERPCA)
        }
        for name in (ALIKE, UNLIKE)
        for part in (SHARED, LOCAL)
    }
    return Found(measured, claims=claims, figures={"hmf": curves(panels, ("linear", "linear"))})
