"""How often personalized PCA ends above the best optimum known, by its start.

    python -m bench.tables.starts [optima | alike]

`optima`: fifty draws each of three kinds of clients. A cell contains the share of draws whose
objective ends more than 1 % above the best of all rows and of twenty random starts, after 200
rounds in all; and, from one start, the median number of rounds to within 1e-3 of where the run
ends.

`alike`: clients with samples from one normal distribution of 12 features with standard deviations
of 6 to 0.3, ranks 3 + 2, three draws. A cell contains what the shared components capture, divided
by what the top eigenvectors of the pooled moment capture, and the least and the largest of the
draws if they differ. Its last column shows how far the objective on these lies above the best one.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table
from bench.speed import objectives

DRAWS, RANDOM, ROUNDS = 50, 20, 200
FEW_ROUNDS = 30  # of several starts at once
COUNTS = 2, 3, 4, 6  # of several starts
Run = Callable[[jf.Clients, jax.Array], jf.Solution]


def single(start: str, ranks: tuple[int, int]) -> Run:
    """A run from one start."""
    model = jf.pca.PerPCA(*ranks, start=start)

    def run(clients, key):
        return jf.rollout(model, clients, rounds=ROUNDS, key=key)

    return run


def several(starts: int | Sequence[str], ranks: tuple[int, int]) -> Run:
    """A run from the best of several starts, with as many rounds in all."""
    model = jf.pca.PerPCA(*ranks)
    if not isinstance(starts, int):
        starts = [jf.pca.PerPCA(*ranks, start=name) for name in starts]

    def run(clients, key):
        first = jf.rollout(jf.MultiStart(model, starts), clients, rounds=FEW_ROUNDS, key=key).result
        rest = ROUNDS - FEW_ROUNDS
        return jf.rollout(model, clients, rounds=rest, key=key, warm_start=first)

    return run


def rivals(ranks: tuple[int, int]) -> dict[str, Run]:
    """What is run, by what the table calls it."""
    return {
        '`"common"`, the default': single("common", ranks),
        '`"local_first"`': single("local_first", ranks),
        '`"random"`': single("random", ranks),
        **{f"`MultiStart` of {count}": several(count, ranks) for count in COUNTS},
        # The starts of the estimator `PersonalizedPCA`.
        '`"common"` and five random': several(["common"] + ["random"] * 5, ranks),
    }


def objectives_of(run: Run, clients: jf.Clients, keys: jax.Array) -> np.ndarray:
    """Objectives before each round, `(draws, rounds)`."""

    def one(clients, key):
        return run(clients, key).history["objective"]

    return np.asarray(jax.jit(jax.vmap(one))(clients, keys))


def best_of_random(ranks: tuple[int, int], clients: jf.Clients, keys: jax.Array) -> np.ndarray:
    """The lowest final objective of random starts, `(draws,)`."""
    run = single("random", ranks)

    def one(clients, key):
        def end(key):
            return run(clients, key).history["objective"][-1]

        return jax.lax.map(end, jax.random.split(key, RANDOM)).min()

    return np.asarray(jax.jit(jax.vmap(one))(clients, keys))


def optima() -> list[dict[str, object]]:
    """One row a start, one column a kind of clients."""
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    cells: dict[str, dict[str, object]] = {}
    for kind, make in objectives.SYNTHETIC.items():
        ranks = objectives.SYNTHETIC_RANKS[kind]
        clients = objectives.of_tables(make, DRAWS)
        found = {name: objectives_of(run, clients, keys) for name, run in rivals(ranks).items()}
        best = best_of_random(ranks, clients, jax.random.split(jax.random.key(1), DRAWS))
        best = np.minimum(best, np.min([x[:, -1] for x in found.values()], axis=0))
        for name, values in found.items():
            above = f"{np.mean(values[:, -1] > 1.01 * best):.0%}"
            rounds = np.median(np.argmax(values <= 1.001 * values[:, -1:], axis=1))
            whole = values.shape[1] == ROUNDS
            cells.setdefault(name, {})[kind] = f"{above}, {rounds:.0f}" if whole else above
    return [{"start": name, **row} for name, row in cells.items()]


# --- clients that are alike ----------------------------------------------------------------------

FEATURES, RANKS = 12, (3, 2)


def alike() -> list[dict[str, object]]:
    """One row a number of samples, one column a start."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for samples in (30, 100, 1_000, 10_000, None):
        draws = []
        for seed in range(3):
            rng = np.random.default_rng(seed)
            shape = (3, samples or 100, FEATURES)
            x = rng.standard_normal(shape) * np.linspace(6, 0.3, FEATURES)
            draws.append(x if samples else np.broadcast_to(x[:1], x.shape))
        clients = [jf.Clients.from_samples(x) for x in draws]
        row: dict[str, object] = {"samples of each": samples or "the same moment"}
        ends = []
        for name, run in rivals(RANKS).items():
            run = jax.jit(run)
            solutions = [run(c, jax.random.key(0)) for c in clients]
            shares = [captured(x, s.result.shared) for x, s in zip(draws, solutions, strict=True)]
            row[name] = spread(np.asarray(shares))
            ends.append([float(s.history["objective"][-1]) for s in solutions])
        gaps = [pooled(x) for x in draws] / np.min(ends, axis=0) - 1
        rows.append({**row, "gap": spread(np.maximum(gaps, 0))})
    return rows


def captured(x: np.ndarray, shared: jax.Array) -> float:
    """What shared components capture, relative to the top eigenvectors of the pooled moment."""
    moment = np.einsum("mnd,mne->de", x, x)
    most = np.linalg.eigvalsh(moment)[-RANKS[0] :].sum()
    return float(np.trace(shared.T @ moment @ shared) / most)


def pooled(x: np.ndarray) -> float:
    """The objective on the top eigenvectors of the pooled moment."""
    moments = np.einsum("mnd,mne->mde", x, x) / x.shape[1]
    top = np.linalg.eigh(moments.mean(0))[1][:, -RANKS[0] :]
    rest = np.eye(FEATURES) - top @ top.T
    left = np.linalg.eigvalsh(rest @ moments @ rest)[:, : FEATURES - RANKS[1]]
    return float(left.sum(1).mean())


def spread(values: np.ndarray) -> str:
    """The least and the largest, in three digits."""
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    chosen = choose({"optima": optima, "alike": alike}, __doc__)
    print(machine())
    print(table(chosen.part()))
