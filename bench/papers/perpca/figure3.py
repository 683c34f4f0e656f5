"""Convergence against the misalignment theta, noiseless, from random starts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed import pca, rollout
from jaxfed.plot.drawing import colour
from papers.drawing import graphs, legend
from papers.perpca._noiseless import Problem
from papers.report import Found, Labels
from papers.runs import Seeds
from papers.synthetic import misalignment_pair

# Half of the angle between the two local components, in degrees.
_ANGLES = (2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 33.0)
_THETA = np.sin(np.deg2rad(_ANGLES)) ** 2
_NAMES = [f"{value:.3f}" for value in _THETA]
SLOPE = "slope of log10 error per round"
FINAL = "log10 error at round 100"
LINEAR = "correlation of theta and log10 error at round 100"


def _pair_errors(
    theta: Array, data_key: Array, key: Array, *, step_size: float, rounds: int
) -> Float[Array, " rounds"]:
    problem = Problem.of(misalignment_pair(data_key, theta, samples=1000, dtype=jnp.float64))
    solution = rollout(
        pca.PerPCA(1, 1, solver="gradient", step_size=step_size, start="random"),
        problem.clients,
        rounds=rounds,
        key=key,
        metrics=lambda result: {"error": problem.reconstruction(result)},
    )
    return solution.history["error"]


def run(seeds: Seeds, *, starts: int = 100, rounds: int = 200) -> Found:
    """All angles, seeds and starts of a step size in one compiled call."""
    theta = _THETA
    curves = {}
    with jax.enable_x64(True):
        data_keys, start_keys = seeds.split(2)
        start_keys = jax.vmap(lambda key: jax.random.split(key, starts))(start_keys)
        for step_size in (0.1, 0.4):
            errors = partial(_pair_errors, step_size=step_size, rounds=rounds)
            over_starts = jax.vmap(errors, (None, None, 0))
            over_seeds = jax.vmap(over_starts, (None, 0, 0))
            over_theta = jax.jit(jax.vmap(over_seeds, (0, None, None)))
            # Axes: theta, seed, start, round.
            curves[step_size] = np.asarray(
                jnp.log10(over_theta(jnp.asarray(theta), data_keys, start_keys))
            )

    late = np.arange(rounds // 2, rounds)
    tail = np.moveaxis(curves[0.1][..., late], -1, 0)
    slopes = np.polyfit(late, tail.reshape(len(late), -1), 1)[0].reshape(tail.shape[1:])
    slopes = np.median(slopes, axis=-1)
    after = {step_size: curve[..., 99].mean(-1) for step_size, curve in curves.items()}

    measured: dict[Labels, Any] = {}
    for name, values in zip(_NAMES[2:], slopes[2:], strict=True):
        measured[SLOPE, 0.1, name] = values
    fitted = (slopes[4:] / theta[4:, None]).mean(0)
    measured[f"{SLOPE} / theta", 0.1, "above 0.1"] = fitted
    for step_size, values in after.items():
        for name, value in zip(_NAMES, values, strict=True):
            measured[FINAL, step_size, name] = value
    for step_size, values in after.items():
        correlations = [np.corrcoef(theta, column)[0, 1] for column in values.T]
        measured[LINEAR, step_size, "all"] = correlations

    def draw():
        titles = [
            ("step size 0.1, mean of log10 error", "round", "log10 reconstruction error"),
            ("after 100 rounds", "theta", "log10 reconstruction error"),
        ]
        left, right = graphs(titles)
        for position, name in enumerate(_NAMES):
            mean = curves[0.1][position].mean((0, 1))
            left.plot(np.arange(1, rounds + 1), mean, color=colour(position), label=name)
        for position, (step_size, values) in enumerate(after.items()):
            style = {"color": colour(position), "marker": "o", "markersize": 3}
            right.plot(theta, values.mean(1), label=f"step size {step_size}", **style)
            starts_sd = curves[step_size][..., 99].std((1, 2))
            low, high = values.mean(1) - starts_sd, values.mean(1) + starts_sd
            right.fill_between(theta, low, high, color=colour(position), alpha=0.15, linewidth=0)
        legend(left, title="theta", title_fontsize=8)
        legend(right)
        return left.figure

    return Found(
        measured,
        notes=[
            f"{starts} random starts per seed; slopes are medians over them, fitted to rounds "
            f"{rounds // 2} to {rounds}; theta = sin^2(half the angle of the local components)."
        ],
        figures={"figure3": draw},
        arrays={"theta": theta} | {f"log10_error_step_{s}": c for s, c in curves.items()},
    )
