"""Triple component matrix factorization: errors of the three parts by rounds and share of errors.

Matrices as in the theorem of Shi, Fattahi & Al Kontar (2024): shared and local low-rank parts
without noise, and errors in a share of the entries, at random and of up to ten times the entries'
deviation. 10 clients, 80 features and 60 samples, two shared and two local components with normal
scores.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from jaxfed.pca import HMF, TCMF, robust_pca
from papers.intervals import at_least, at_most
from papers.report import Found, Labels
from papers.runs import Seeds

CLIENTS, FEATURES, SAMPLES, RANK = 10, 80, 60, 2
SIZE = 10.0  # of the largest errors, in deviations of the low-rank parts
ROUNDS, SHARES, FEW, DECAY = (10, 20, 40, 60, 240), (0.05, 0.1, 0.2, 0.3), 0.1, 0.9
PARTS = "shared", "local", "sparse"
LEAST = -12.0  # log10 of errors that rounding leaves of entries up to ten
ALONE = "robust PCA of one client"


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


def mistakes(
    shared: np.ndarray, own: np.ndarray, cleaned: np.ndarray, truth: Truth
) -> dict[str, float]:
    """Log10 of the largest errors of an entry of each part."""
    found = (
        cleaned @ shared @ shared.T,
        cleaned @ own @ np.swapaxes(own, 1, 2),
        truth.samples - cleaned,
    )
    each = zip(PARTS, found, truth, strict=True)
    return {name: float(np.log10(np.max(np.abs(a - b)))) for name, a, b in each}


def by_tcmf(truth: Truth, rounds: int) -> dict[str, float]:
    """What `TCMF` mistakes."""
    clients = jf.Clients.from_samples(truth.samples)
    algorithm = TCMF(RANK, RANK, 0.0, decay=DECAY, start="local_first")
    run = jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0))
    return mistakes(*map(np.asarray, (*run.result, run.local.cleaned)), truth)


def by_hmf(truth: Truth) -> dict[str, float]:
    """What `HMF` mistakes, which has no sparse part."""
    clients = jf.Clients.from_samples(truth.samples)
    algorithm = HMF(RANK, RANK, solver="gradient", start="local_first")
    run = jf.fit(algorithm, clients, rounds=max(ROUNDS), key=jax.random.key(0))
    found = mistakes(*map(np.asarray, run.result), truth.samples, truth)
    return {name: found[name] for name in PARTS[:2]}


def by_robust_pca(truth: Truth) -> dict[str, float]:
    """What `robust_pca` of the first client mistakes, which does not split the low-rank part."""
    sparse = np.asarray(robust_pca(jnp.asarray(truth.samples[0]))[1])
    return {PARTS[2]: float(np.log10(np.max(np.abs(sparse - truth.errors[0]))))}


def run(seeds: Seeds, *, shares: Sequence[float] = SHARES) -> Found:
    """Errors in a tenth of the entries by rounds, and of other shares after all of them."""
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        for seed in seeds:
            for share in shares:
                truth = draw(seed, share)
                found = {
                    ("HMF", ROUNDS[-1]): by_hmf(truth),
                    (ALONE, ""): by_robust_pca(truth),
                }
                for rounds in ROUNDS if share == FEW else ROUNDS[-1:]:
                    found["TCMF", rounds] = by_tcmf(truth, rounds)
                for (method, rounds), errors in found.items():
                    for part, error in errors.items():
                        labels = f"{share:.0%}", method, rounds, part
                        measured.setdefault(labels, []).append(error)
    few = f"{FEW:.0%}", "TCMF"
    claims = {}
    for part in PARTS:
        first, last = (np.asarray(measured[*few, k, part]) for k in (10, 60))
        claims[f"{part} part, log10 error per round, against the threshold's"] = (
            (last - first) / 50 / np.log10(DECAY),
            at_least(1.0),
        )
    for share in (x for x in shares if x <= 0.2):
        ours = [measured[f"{share:.0%}", "TCMF", ROUNDS[-1], part] for part in PARTS]
        claims[f"{share:.0%} of errors: exact recovery, the largest log10 error"] = (
            np.max(ours, axis=0),
            at_most(LEAST),
        )
        # A part that is missed altogether has entries of about one.
        theirs = [measured[f"{share:.0%}", "HMF", ROUNDS[-1], part] for part in PARTS[:2]]
        claims[f"{share:.0%} of errors: without a sparse part the least log10 error"] = (
            np.min(theirs, axis=0),
            at_least(0.0),
        )
    return Found(measured, claims=claims)
