"""Noiseless clients of Shi & Kontar (2024), sections 7.1.4 to 7.1.6, in double precision."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxfed import Clients, Personalized, Solution, metrics, pca, stack
from jaxfed.data import PerPCAData, perpca_synthetic
from jaxfed.linalg import Moment, orthonormalize
from papers.drawing import curves
from papers.intervals import Interval
from papers.perpca._synthetic import Keys, gaussian
from papers.report import Cell
from papers.runs import learned, runs
from papers.synthetic import PERPCA_SETTINGS

EXTRA = (0, 1, 2, 3, 4, 6)  # components more than there are
# What errors do, on a logarithmic scale, in the reference and in the paper's words.
FALLEN, STAYED = -6, -4
FALLS = Interval(-np.inf, FALLEN, "falls to -30")
LINEARLY = Interval(-np.inf, FALLEN, "falls linearly")


class Problem(NamedTuple):
    """Noiseless clients: square roots R_i of S_i = R_i'R_i, and the truth.

    Residuals of a square root keep their digits down to the square of the rounding error, where
    differences of traces would have lost all of them.
    """

    root: Float[Array, "m d d"]
    shared: Float[Array, "d r1"]
    local: Float[Array, "m d r2"]

    @classmethod
    def of(cls, data: PerPCAData) -> "Problem":
        samples = jnp.asarray(data.samples)
        root = jnp.linalg.qr(samples, mode="r") / jnp.sqrt(samples.shape[1])
        return cls(root, data.shared, data.local)

    @property
    def clients(self) -> Clients:
        return Clients.from_moments(self.root.mT @ self.root)

    def reconstruction(self, result: Personalized) -> Float[Array, ""]:
        moment = jax.vmap(Moment.from_samples)(self.root, jnp.ones(len(self.root)))
        error = metrics.reconstruction_error(result, moment)
        assert isinstance(error, jax.Array)
        return error

    def errors(self, result: Personalized) -> dict[str, Float[Array, ""]]:
        """The three errors of section 7.1.6."""

        def distance(basis, truth):
            return jnp.sum((self.root @ (basis @ basis.mT - truth @ truth.mT)) ** 2, (1, 2)).mean()

        return {
            "reconstruction": self.reconstruction(result),
            "global": distance(result.shared, self.shared),
            "local": distance(result.local, self.local),
        }


def noiseless(keys: Keys, **changes: Any) -> Problem:
    arguments: dict[str, Any] = dict(PERPCA_SETTINGS["figure7"]) | changes
    draws = [perpca_synthetic(key=key, **arguments, dtype=jnp.float64) for key in keys]
    return stack([Problem.of(draw) for draw in draws])


def aligned(problem: Problem, keys: Keys, cosine: float | None) -> Float[Array, "runs d 1"]:
    """Random shared components at a given cosine to the true one, or at any."""

    def one(truth, key):
        draw = jax.random.normal(key, truth.shape, truth.dtype)
        if cosine is None:
            return orthonormalize(draw)
        rest = orthonormalize(draw - truth @ (truth.T @ draw))
        return cosine * truth + np.sqrt(1 - cosine**2) * rest

    return jax.vmap(one)(problem.shared, keys)


def descend(
    problem: Problem,
    shared: Float[Array, "runs d r1"],
    keys: Keys,
    local_rank: int,
    *,
    rounds: int,
    every: int | None = None,
) -> Solution:
    """PerPCA at step size 0.1 from these shared and random local components."""
    local = gaussian(keys, *problem.local.shape[1:3], local_rank, dtype=jnp.float64)
    algorithm = pca.PerPCA(shared.shape[-1], local_rank, solver="gradient", step_size=0.1)
    clients = jax.vmap(lambda p: p.clients)(problem)
    return runs(
        algorithm,
        clients,
        keys,
        rounds,
        Personalized(shared, local),
        given=problem,
        measure=None if every is None else Partial(Problem.errors),
        every=every or 1,
    )


def repeated(tree: Any, times: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), tree)


def split(keys: Keys, times: int) -> Keys:
    return jax.vmap(lambda key: jax.random.split(key, times))(keys).reshape(-1)


def spectrum(problem: Problem, keys: Keys, shared_rank: int) -> Float[Array, "runs d r1"]:
    clients = jax.vmap(lambda p: p.clients)(problem)
    return learned(pca.OneShot(shared_rank, 1, method="spectrum"), clients, keys).shared


def rank_name(symbol: str, extra: int) -> str:
    return f"{symbol} + {extra}" if extra else symbol


def decades(solution: Solution, every: int) -> dict[str, np.ndarray]:
    """log10 of the three errors, (runs, evaluations), cut off below double precision."""
    return {
        name: np.log10(np.maximum(np.asarray(solution.history[name])[:, every - 1 :: every], 1e-32))
        for name in ("reconstruction", "global", "local")
    }


def worst(
    last: Float[np.ndarray, " runs"], seeds: int, reference: Interval, paper: Interval
) -> Cell:
    """The largest of each seed's runs, which all have to do what is said."""
    return Cell(last.reshape(seeds, -1).max(1), reference, paper, by="claim")


def decades_drawn(found: Mapping[str, Mapping[str, np.ndarray]], every: int) -> Callable[[], Any]:
    """A graph for each of the errors: medians over runs, a line for each rank."""
    panels = {}
    for name in ("global", "local", "reconstruction"):
        lines = {rank: np.median(errors[name], axis=0) for rank, errors in found.items()}
        panels[f"{name} error", "round", "log10 error"] = {
            rank: (every * np.arange(1, len(values) + 1), values) for rank, values in lines.items()
        }
    return curves(panels, ("linear", "linear"))
