"""Errors over the rounds with more shared components than there are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.linalg import orthonormalize
from papers.perpca._noiseless import (
    FALLS,
    LINEARLY,
    decades,
    decades_drawn,
    descend,
    noiseless,
    rank_name,
    repeated,
    spectrum,
    split,
    worst,
)
from papers.perpca._synthetic import gaussian
from papers.report import Cell, Found, Interval, Labels, Target
from papers.runs import Seeds

EVERY = 10  # rounds


def run(seeds: Seeds, *, rounds: int = 1000, starts: int = 3) -> Found:
    """Both starts of a rank in one compiled call."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        data_keys, keys = seeds.split(2)
        keys = split(keys, starts)
        window = repeated(noiseless(data_keys), starts)
        random = repeated(noiseless(data_keys, local="random", window=None), starts)
        both, run_keys = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), (window, keys), (random, keys)
        )
        places = {"random": slice(len(keys)), "spectrum": slice(len(keys), None)}
        for extra in range(4):
            # Not by the keys of the local components, whose first one would be the same.
            own = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            drawn = gaussian(own, *window.shared.shape[1:2], 1 + extra, dtype=jnp.float64)
            shared = [jax.vmap(orthonormalize)(drawn), spectrum(random, keys, 1 + extra)]
            solution = descend(
                both, jnp.concatenate(shared), run_keys, 1, rounds=rounds, every=EVERY
            )
            rank, errors = rank_name("r1", extra), decades(solution, EVERY)
            curves[rank] = {name: v[places["random"]] for name, v in errors.items()}
            for start, place in places.items():
                for name, values in errors.items():
                    last = values[place, -1]
                    if name == "reconstruction" or not extra:
                        cell = worst(last, len(seeds), FALLS, LINEARLY)
                        measured[start, rank, f"log10 {name} error"] = cell
                    else:
                        measured[start, rank, f"{name} error"] = Cell(10**last, by="median")
    return Found(
        measured,
        notes=[
            f"Noiseless, step size 0.1, after {rounds} rounds, {starts} random starts per seed. "
            "The spectrum start is run on random local components. The picture is of the random "
            "start.",
        ],
        figures={"figure8": decades_drawn(curves, EVERY)},
        arrays={f"{rank} {name}": v for rank, c in curves.items() for name, v in c.items()},
    )


def _known(stalls: dict[str, Interval]) -> dict[Labels, Interval]:
    """What the errors that stall do from each start."""
    return {
        (start, rank_name("r1", extra), f"{name} error"): stall
        for start, stall in stalls.items()
        for extra in range(1, 4)
        for name in ("global", "local")
    }


_NOT_TO_ZERO = Interval(1e-3, np.inf, "does not fall to 0")
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 8: more shared components than there are",
    columns=("start of U", "rank of U", "quantity"),
    reference=_known(
        {
            "random": Interval(0.02, 0.17, "0.02 to 0.17"),
            "spectrum": Interval(0.14, 0.39, "0.14 to 0.39"),
        }
    ),
    paper=_known({"random": _NOT_TO_ZERO, "spectrum": _NOT_TO_ZERO}),
    notes=[
        "Of errors that fall the largest of a seed's starts is given, of those that stall median "
        "and quartiles over all starts: the median has to lie in the reference's range, which is "
        "one for all ranks.",
    ],
)
