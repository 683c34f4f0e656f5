"""What triple component matrix factorization recovers, against rounds and the share of errors.

    python -m bench.tables.tcmf rounds
    python -m bench.tables.tcmf share

Matrices as in the theorem of Shi, Fattahi & Al Kontar (2024): shared and local low-rank parts
without noise, and errors in a share of the entries, at random and of up to ten times the entries'
deviation. 10 clients, 80 features and 60 samples, two shared and two local components with normal
scores; means of three draws.

`rounds`: the largest error of an entry of the shared part, the local ones and the sparse ones,
relative to the deviation of the low-rank parts, after some rounds, with errors in a tenth of the
entries.

`share`: the same after 240 rounds for other shares; beside it the sparse part of `robust_pca` of
each client alone, the sum of whose other parts it does not split, and the parts of `HMF`, which has
no sparse one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table

CLIENTS, FEATURES, SAMPLES, RANK, SEEDS = 10, 80, 60, 2, 3
SIZE = 10.0  # of the largest errors, in deviations of the low-rank parts
ROUNDS = (10, 20, 40, 80, 160, 240)
SHARES = (0.05, 0.1, 0.2, 0.3)


class Truth(NamedTuple):
    """The parts of the clients' samples, `(clients, samples, features)` each."""

    shared: np.ndarray
    locals_: np.ndarray
    errors: np.ndarray

    @property
    def samples(self) -> np.ndarray:
        """Their sum."""
        return self.shared + self.locals_ + self.errors


def draw(seed: int, share: float) -> Truth:
    """Parts with errors in a share of the entries."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    joint = [np.hstack([shared, rng.normal(size=(FEATURES, RANK))]) for _ in range(CLIENTS)]
    locals_ = np.stack([np.linalg.qr(w)[0][:, RANK:] for w in joint])
    # So that the entries of the sum have unit deviation.
    unit = np.sqrt(FEATURES / (2 * RANK))
    scores = unit * rng.normal(size=(2, CLIENTS, SAMPLES, RANK))
    parts = scores[0] @ shared.T, scores[1] @ np.swapaxes(locals_, 1, 2)
    errors = rng.uniform(-SIZE, SIZE, size=parts[0].shape)
    return Truth(*parts, np.where(rng.random(errors.shape) < share, errors, 0))


def mistakes(result: jf.Personalized, cleaned: np.ndarray, truth: Truth) -> list[float]:
    """The largest errors of the shared, the local and the sparse part."""
    shared, own = np.asarray(result.shared), np.asarray(result.local)
    found = (
        cleaned @ shared @ shared.T,
        cleaned @ own @ np.swapaxes(own, 1, 2),
        truth.samples - cleaned,
    )
    return [float(np.max(np.abs(a - b))) for a, b in zip(found, truth, strict=True)]


def ours(truth: Truth, rounds: int) -> list[float]:
    """What `TCMF` mistakes."""
    run = jf.fit(
        jf.pca.TCMF(RANK, RANK, 0.0),
        jf.Clients.from_samples(truth.samples),
        rounds=rounds,
        key=jax.random.key(0),
    )
    return mistakes(run.result, np.asarray(run.local.cleaned), truth)


def of_factors_alone(truth: Truth) -> list[float]:
    """What `HMF` mistakes."""
    clients = jf.Clients.from_samples(truth.samples)
    run = jf.fit(jf.pca.HMF(RANK, RANK), clients, rounds=ROUNDS[-1], key=jax.random.key(0))
    return mistakes(run.result, truth.samples, truth)


def of_each_alone(truth: Truth) -> float:
    """The largest error of the sparse parts by `robust_pca`."""
    sparse = [jf.pca.robust_pca(jnp.asarray(y))[1] for y in truth.samples]
    return float(np.max(np.abs(np.stack(sparse) - truth.errors)))


def by_rounds() -> list[dict[str, object]]:
    """One row a number of rounds."""
    rows = []
    for rounds in ROUNDS:
        found = np.mean([ours(draw(seed, 0.1), rounds) for seed in range(SEEDS)], axis=0)
        names = "shared", "local", "sparse"
        cells = {name: f"{x:.1e}" for name, x in zip(names, found, strict=True)}
        rows.append({"rounds": rounds} | cells)
    return rows


def by_share() -> list[dict[str, object]]:
    """One row a share of errors."""
    rows = []
    for share in SHARES:
        truths = [draw(seed, share) for seed in range(SEEDS)]
        found = np.mean([ours(truth, ROUNDS[-1]) for truth in truths], axis=0)
        alone = np.mean([of_each_alone(truth) for truth in truths])
        factors = np.mean([of_factors_alone(truth) for truth in truths], axis=0)
        rows.append(
            {
                "share of errors": f"{share:.0%}",
                "`TCMF`": " / ".join(f"{x:.1e}" for x in found),
                "`robust_pca`": f"{alone:.1e}",
                "`HMF`": " / ".join(f"{x:.1e}" for x in factors[:2]),
            }
        )
    return rows


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parts: dict[str, Callable[..., object]] = {"rounds": by_rounds, "share": by_share}
    print(machine())
    print(table(choose(parts, __doc__).part()))
