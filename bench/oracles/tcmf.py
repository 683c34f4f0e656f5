"""Triple component matrix factorization from the parts that its authors have published.

    python -m bench.oracles.tcmf FOLDER

No code of the paper was found. FOLDER is a clone of github.com/UMDataScienceLab/hmf by the same
authors; the numbers kept are of commit 752801d. What its `solver.py` imports is wanted too:
PyTorch, scikit-learn, SciPy, Matplotlib and joblib. Of it, this takes the two steps of the paper's
Algorithm 1, hard thresholds (`soft`) and a joint factorization
(`heterogeneous_matrix_factorization`, to convergence in every epoch). For one client the whole is
their `robustpca`.

It writes `tests/references/tcmf.json`: of three draws, the components and the sparse parts after
some epochs.
"""

import argparse
import contextlib
import io
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.oracles.hmf import COMMIT, solver, started, theirs

NUMBERS = Path(__file__).parents[2] / "tests" / "references" / "tcmf.json"
SHARED_RANK, LOCAL_RANK, FEATURES, CLIENTS, SAMPLES = 2, 1, 12, 3, 16
FIRST, DECAY, EPOCHS = 0.5, 0.7, 4  # the thresholds
STEP_SIZE, PENALTY, INNER = 0.2, 0.3, 1_000  # of the joint factorization


class Draw(NamedTuple):
    """Clients with gross errors, and where to start."""

    samples: list[np.ndarray]  # (samples, features) each
    shared: np.ndarray  # (features, shared_rank), of the start
    locals_: list[np.ndarray]


def draw(seed: int) -> Draw:
    """The draws whose numbers are kept."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, SHARED_RANK)))[0]
    samples, locals_ = [], []
    for _ in range(CLIENTS):
        joint = np.hstack([shared, rng.normal(size=(FEATURES, LOCAL_RANK))])
        joint = np.linalg.qr(joint)[0]
        scores = rng.normal(size=(SAMPLES, SHARED_RANK + LOCAL_RANK))
        values = scores @ joint.T / np.sqrt(SAMPLES)
        values += 0.002 * rng.normal(size=values.shape)
        signs = rng.choice([-1, 1], size=values.shape)
        samples.append(values + np.where(rng.random(values.shape) < 0.04, signs, 0))
        locals_.append(joint[:, SHARED_RANK:])
    # Near the end, so that all solvers go to the same minimum of every epoch.
    return Draw(samples, shared, locals_)


def epochs(code: Any, case: Draw) -> dict[str, Any]:
    """Algorithm 1 with their two steps."""
    import torch

    low_rank = [np.zeros_like(y) for y in case.samples]
    shared, locals_, threshold = case.shared, case.locals_, FIRST
    sparse: list[np.ndarray] = []
    for _ in range(EPOCHS):
        rest = zip(case.samples, low_rank, strict=True)
        sparse = [code.soft(torch.tensor(y - low), threshold).numpy() for y, low in rest]
        cleaned = [y - s for y, s in zip(case.samples, sparse, strict=True)]
        start = started(cleaned, shared, locals_)
        found = theirs(code, cleaned, None, start, INNER, STEP_SIZE, PENALTY)
        shared = np.linalg.qr(found.shared)[0]
        locals_ = [np.linalg.qr(own)[0] for own in found.locals_]
        parts = zip(found.shared_scores, found.scores, found.locals_, strict=True)
        low_rank = [v @ found.shared.T + w @ own.T for v, w, own in parts]
        threshold *= DECAY
    return {
        "shared": shared.tolist(),
        "locals": [own.tolist() for own in locals_],
        "sparse": [s.tolist() for s in sparse],
    }


def alone(code: Any, samples: np.ndarray) -> list[list[float]]:
    """The sparse part of one client by `robustpca`, whose tables are rows there."""
    import torch

    options = {
        "lbd_s_outer": FIRST,
        "outer_epochs": EPOCHS,
        "rho": DECAY,
        "ngc": SHARED_RANK,
        "nlc": LOCAL_RANK,
        "verbose": 0,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        found = code.robustpca([torch.tensor(row[None]) for row in samples], options)[1]
    return [row.numpy()[0].tolist() for row in found]


def numbers(folder: Path) -> dict[str, Any]:
    """What is kept of the draws."""
    code = solver(folder)
    cases = [draw(seed) for seed in range(3)]
    return {
        "source": "github.com/UMDataScienceLab/hmf, solver.py",
        "commit": COMMIT,
        "command": "python -m bench.oracles.tcmf FOLDER",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "numpy")},
        "draws": [
            {"together": epochs(code, case), "alone": alone(code, case.samples[0])}
            for case in cases
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    NUMBERS.write_text(json.dumps(numbers(arguments.folder)) + "\n", encoding="utf-8")
