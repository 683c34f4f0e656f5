"""Errors over the rounds with more components than there are: Figures 7 and 8."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.linalg import orthonormalize
from papers.perpca import _noiseless as noiseless
from papers.perpca._synthetic import gaussian
from papers.report import Cell, Found, Labels
from papers.runs import Seeds

EVERY = 10  # rounds
MOST = 3  # local components too many with which the errors still fall


def local_components(seeds: Seeds, *, rounds: int = 1000, starts: int = 3) -> Found:
    """Figure 7: too many local ones; all starts of a rank in one compiled call."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    with jax.enable_x64(True):
        data_keys, keys = seeds.split(2)
        problem, keys = (
            noiseless.repeated(noiseless.noiseless(data_keys), starts),
            noiseless.split(keys, starts),
        )
        shared = noiseless.aligned(problem, keys, 0.35)
        for extra in noiseless.EXTRA:
            solution = noiseless.descend(
                problem, shared, keys, 1 + extra, rounds=rounds, every=EVERY
            )
            curves[noiseless.rank_name("r2", extra)] = noiseless.decades(solution, EVERY)
    measured: dict[Labels, Any] = {}
    for extra in noiseless.EXTRA:
        rank = noiseless.rank_name("r2", extra)
        for name, values in curves[rank].items():
            last = values[:, -1]
            if name == "reconstruction":
                measured[rank, f"log10 {name} error"] = noiseless.worst(
                    last, len(seeds), noiseless.FALLS, noiseless.LINEARLY
                )
            else:
                does = last < noiseless.FALLEN if extra <= MOST else last > noiseless.STAYED
                measured[rank, _quantity(name, extra)] = does.reshape(len(seeds), -1).mean(1)
    note = (
        f"Noiseless, step size 0.1, after {rounds} rounds, {starts} random starts per seed at "
        "cosine 0.35 with the true shared component (see perpca/table3). An error has fallen "
        f"if it is below 1e{noiseless.FALLEN} and stays if it is above 1e{noiseless.STAYED}."
    )
    return _reported("figure7", measured, curves, note)


def shared_components(seeds: Seeds, *, rounds: int = 1000, starts: int = 3) -> Found:
    """Figure 8: too many shared ones; both starts of a rank in one compiled call."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        data_keys, keys = seeds.split(2)
        keys = noiseless.split(keys, starts)
        window = noiseless.repeated(noiseless.noiseless(data_keys), starts)
        random = noiseless.repeated(
            noiseless.noiseless(data_keys, local="random", window=None), starts
        )
        both, run_keys = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), (window, keys), (random, keys)
        )
        places = {"random": slice(len(keys)), "spectrum": slice(len(keys), None)}
        for extra in range(4):
            # Not by the keys of the local components, whose first one would be the same.
            own = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            drawn = gaussian(own, *window.shared.shape[1:2], 1 + extra, dtype=jnp.float64)
            shared = [jax.vmap(orthonormalize)(drawn), noiseless.spectrum(random, keys, 1 + extra)]
            solution = noiseless.descend(
                both, jnp.concatenate(shared), run_keys, 1, rounds=rounds, every=EVERY
            )
            rank, errors = noiseless.rank_name("r1", extra), noiseless.decades(solution, EVERY)
            curves[rank] = {name: v[places["random"]] for name, v in errors.items()}
            for start, place in places.items():
                for name, values in errors.items():
                    last = values[place, -1]
                    if name == "reconstruction" or not extra:
                        cell = noiseless.worst(
                            last, len(seeds), noiseless.FALLS, noiseless.LINEARLY
                        )
                        measured[start, rank, f"log10 {name} error"] = cell
                    else:
                        measured[start, rank, f"{name} error"] = Cell(10**last, by="median")
    note = (
        f"Noiseless, step size 0.1, after {rounds} rounds, {starts} random starts per seed. "
        "The spectrum start is run on random local components. The picture is of the random "
        "start."
    )
    return _reported("figure8", measured, curves, note)


def _reported(
    figure: str,
    measured: Mapping[Labels, Any],
    curves: Mapping[str, Mapping[str, np.ndarray]],
    note: str,
) -> Found:
    """What was measured, and the curves by rank and error, drawn and kept."""
    return Found(
        measured,
        notes=[note],
        figures={figure: noiseless.decades_drawn(curves, EVERY)},
        arrays={f"{rank} {name}": v for rank, c in curves.items() for name, v in c.items()},
    )


def _quantity(name: str, extra: int) -> str:
    return f"{name} error {'falls' if extra <= MOST else 'stays'}: share of starts"
