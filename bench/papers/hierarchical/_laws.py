"""Helpers shared by the figures of Ozkara, Huang & Diggavi (2023): hierarchical-Bayes PCA.

What is called the reference is an independent implementation of the same experiments in NumPy, in
double precision; the papers have pictures only. Errors are expected ones of fresh samples, in
closed form, over that of the true components.

The captions give a number for the variance of the prior; the text and the curves fit only if it is
the standard deviation. Every figure is run at both readings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float
from xarray import Dataset

import papers
from jaxfed import Algorithm, Clients, Personalized, grid, plot, rollout
from jaxfed.cli import _report
from jaxfed.data import HierarchicalData, hierarchical_synthetic
from jaxfed.metrics import expected_reconstruction_error
from jaxfed.pca import HierarchicalPCA
from jaxfed.plot.drawing import canvas
from papers.hierarchical.descent import GlobalProbabilisticPCA, LocalProbabilisticPCA
from papers.intervals import Interval, at_least
from papers.report import Labels

NOISE = 0.5
LOCAL, GLOBAL, OURS, PRINTED = "local", "global", "personalized", "personalized, Fact 1"
TOLERANCE = 0.008  # two standard deviations over the reference's data sets, at most 0.004
RESOLUTION = 0.00025  # half of the smallest difference that the reference's digits tell
BOTH = "Both readings of the caption's number: as the standard deviation, and as the variance."

READINGS = {"standard deviation": 0.01, "variance": 0.1}


def frames_of(result: Personalized, clients: Clients) -> Float[Array, "m d r"]:
    """The components each client reconstructs with; after global training, the shared ones."""
    if result.local is not None:
        return result.local
    return jnp.broadcast_to(result.shared, (len(clients), *result.shared.shape))


def error_of(result: Personalized, data: HierarchicalData, clients: Clients) -> Float[Array, ""]:
    """Expected error of fresh samples over that of the truth; clients count by their weight."""
    errors = expected_reconstruction_error(
        frames_of(result, clients), data.local, NOISE, relative=True, per_client=True
    )
    return jnp.vdot(clients.weights, errors)


def _methods(
    rank: int, variance: Float[Array, ""], solver: Any, rounds: int
) -> dict[str, tuple[Algorithm, int]]:
    """The four methods and their rounds."""
    make = partial(HierarchicalPCA, rank, NOISE, variance)
    return {
        LOCAL: (LocalProbabilisticPCA(rank, NOISE), 60),
        GLOBAL: (GlobalProbabilisticPCA(rank, NOISE), 2),  # starts at its optimum
        OURS: (make(solver=solver), rounds),
        PRINTED: (make(solver=solver, likelihood="half"), rounds),
    }


def drawn(key, variance, *, size=None, count=None, **law) -> tuple[HierarchicalData, Clients]:
    """Clients of one law, or only the first of them with only their first samples."""
    data = hierarchical_synthetic(key=key, prior_variance=variance, noise_variance=NOISE, **law)
    return data, Clients.from_samples(data.samples).restrict(clients=size, samples=count)


def errors(
    *,
    prior_variance,
    seed,
    samples=None,
    clients=None,
    law,
    names,
    solver="eigenvectors",
    rounds=30,
):
    """Errors of every method in `names`, at one point of a grid."""
    key = jax.random.key(seed)
    data, given = drawn(key, prior_variance, size=clients, count=samples, **law)
    found = {}
    for name, (algorithm, length) in _methods(law["rank"], prior_variance, solver, rounds).items():
        if name in names:
            solution = rollout(algorithm, given, rounds=length, key=key)
            found[name] = error_of(solution.result, data, given)
    return found


def swept(
    function: Callable, axes: Mapping[str, Any], *, runs_at_once: int = 1, **options: Any
) -> Dataset:
    """Evaluate a function on a grid; `options` are its arguments that are not axes."""
    progress = _report.on_terminal()
    return grid(Partial(function, **options), axes, runs_at_once=runs_at_once, progress=progress)


def by_method(found: Dataset, *labels: Any) -> dict[Labels, Any]:
    """Values over seeds by the labels, the place along the other axis, and the method."""
    (axis,) = set(found.dims) - {"seed"}
    return {
        (*labels, place, name): values.isel({axis: i}).values
        for i, place in enumerate(found[axis].values.tolist())
        for name, values in found.items()
    }


def means_of(found: Dataset) -> dict[str, np.ndarray]:
    """Means over seeds by the method."""
    mean = found.mean("seed", skipna=False)
    return {str(name): values.values for name, values in mean.items()}


def values_of(found: Dataset) -> dict[str, np.ndarray]:
    """Values by the method, `(places, seeds)`."""
    (axis,) = set(found.dims) - {"seed"}
    return {str(name): values.transpose(axis, "seed").values for name, values in found.items()}


def margins(values: Mapping[str, Any]) -> Float[np.ndarray, "places seeds"]:
    """By how much the personalized error is below the better of the two others.

    Which one that is, is a matter of the means over seeds, place by place.
    """
    rivals = np.stack([np.asarray(values[name], float) for name in (LOCAL, GLOBAL)])
    better = rivals.mean(-1).argmin(0)
    return np.take_along_axis(rivals, better[None, :, None], 0)[0] - np.asarray(values[OURS])


def least(differences: Float[np.ndarray, "places seeds"]) -> Float[np.ndarray, " seeds"]:
    """The differences of all seeds at the place where their mean is smallest."""
    return differences[differences.mean(-1).argmin()]


def reference_of(
    target: str, places: Sequence[Any], names: Sequence[str], *before: Any
) -> dict[str, np.ndarray]:
    """The reference's values by method, along the places of an axis."""
    known = papers.known(target)
    return {name: np.asarray([known[*before, place, name] for place in places]) for name in names}


def at_least_half(*differences: float) -> Interval:
    """The bound of a claim: half of the reference's smallest difference.

    Where the claim fails in the reference, half of what its digits resolve.
    """
    return at_least(max(min(differences) / 2, RESOLUTION))


def picture(panels: Mapping[str, Dataset], x: str, scale: Any = "log") -> Callable[[], Any]:
    """A figure with one graph a panel and one line a method, with the spread over seeds."""

    def draw():
        figure = canvas(None, 4.2 * len(panels), 3.4)
        parts = np.atleast_1d(figure.subfigures(1, len(panels)))
        for part, (title, found) in zip(parts, panels.items(), strict=True):
            label = "error over true error"
            plot.grid(found, x, over="seed", scale=scale, label=label, figure=part)
            part.suptitle(title, fontsize=9)
        return figure

    return draw


def curves_of(panels: Mapping[str, Dataset]) -> dict[str, np.ndarray]:
    """Axes and means over seeds, for the file."""
    arrays = {}
    for title, found in panels.items():
        arrays |= {axis: found[axis].values for axis in found.dims if axis != "seed"}
        arrays |= {f"{title}, {name}": values for name, values in means_of(found).items()}
    return arrays
