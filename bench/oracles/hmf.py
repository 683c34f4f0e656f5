"""Heterogeneous matrix factorization by its authors' code, and how long both take.

    python -m bench.oracles.hmf numbers FOLDER
    python -m bench.oracles.hmf seconds FOLDER

FOLDER is a clone of github.com/UMDataScienceLab/hmf; the numbers kept are of commit 752801d. What
its `solver.py` imports is wanted too: PyTorch, scikit-learn, SciPy, Matplotlib and joblib.

`numbers` writes `tests/references/hmf.json`: of three draws, once complete and once with a quarter
of the entries missing, the components after some rounds and at the end, and the error there.

`seconds`: the matrices of `papers.neighbours.hmf`, as in the authors' synthetic example, from one
random start with the authors' step size, in double precision: seconds until the objective is within
1e-6 of the authors' after 500 rounds (or 1e-9, as there is no noise), without compilation. The
authors' code evaluates its loss each round, and so does jaxfed.
"""

import argparse
import contextlib
import functools
import io
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COMMIT = "752801dea7604fd016611be68fcb01d85abb5bdd"
NUMBERS = Path(__file__).parents[2] / "tests" / "references" / "hmf.json"
SHARED_RANK, LOCAL_RANK, FEATURES = 2, 1, 8
COUNTS, SCALES = (24, 30, 20, 26), (0.6, 1.0, 0.8, 0.5)
# The authors minimize twice the objective of the paper, so their step size is half as large.
STEP_SIZE, PENALTY = 0.2, 0.3
EARLY, LATE = 25, 4_000
ROUNDS, LEAST = 500, 1e-9  # of the seconds


class Factors(NamedTuple):
    """Components in columns, and the samples' scores."""

    shared: np.ndarray  # (features, shared_rank)
    locals_: list[np.ndarray]  # (features, local_rank) each
    shared_scores: list[np.ndarray]  # (samples, shared_rank) each
    scores: list[np.ndarray]  # (samples, local_rank) each


class Draw(NamedTuple):
    """Clients of unequal sizes and scales, and where to start."""

    samples: list[np.ndarray]  # (samples, features) each
    observed: list[np.ndarray]  # the same; of a quarter of the entries not
    start: Factors


def draw(seed: int) -> Draw:
    """The draws whose numbers are kept."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, SHARED_RANK)))[0]
    samples = []
    for count, scale in zip(COUNTS, SCALES, strict=True):
        joint = np.hstack([shared, rng.normal(size=(FEATURES, LOCAL_RANK))])
        joint = np.linalg.qr(joint)[0]
        values = rng.normal(size=(count, joint.shape[1])) @ joint.T
        values += 0.1 * rng.normal(size=values.shape)
        samples.append(scale * values / np.sqrt(count))
    observed = [rng.random(y.shape) > 1 / 4 for y in samples]
    observed = [seen | (np.arange(FEATURES) == i) for i, seen in enumerate(observed)]
    first, locals_ = np.linalg.qr(rng.normal(size=(FEATURES, SHARED_RANK)))[0], []
    for _ in samples:
        joint = np.hstack([first, rng.normal(size=(FEATURES, LOCAL_RANK))])
        locals_.append(np.linalg.qr(joint)[0][:, SHARED_RANK:])
    return Draw(samples, observed, started(samples, first, locals_))


def started(samples: list[np.ndarray], shared: np.ndarray, locals_: list[np.ndarray]) -> Factors:
    """Orthonormal components with the samples' products."""
    return Factors(
        shared,
        locals_,
        [y @ shared for y in samples],
        [y @ own for y, own in zip(samples, locals_, strict=True)],
    )


def errors(samples: list[np.ndarray], factors: Factors) -> list[np.ndarray]:
    """What the factors leave of each client's samples."""
    each = zip(samples, factors.shared_scores, factors.scores, factors.locals_, strict=True)
    return [y - v @ factors.shared.T - w @ own.T for y, v, w, own in each]


# --- the authors' code ---------------------------------------------------------------------------


def solver(folder: Path) -> Any:
    """Their module, in double precision."""
    import torch

    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(folder))
    return __import__("solver")


def theirs(
    code: Any,
    samples: list[np.ndarray],
    observed: list[np.ndarray] | None,
    start: Factors,
    rounds: int,
    step_size: float,
    penalty: float,
) -> Factors:
    """Factors after some of their rounds, of samples with missing entries if `observed` says so."""
    import torch

    matrices = [torch.tensor(y.T) for y in samples]
    own = range(len(samples))
    columns = (
        dict.fromkeys(own, start.shared),
        dict(enumerate(start.shared_scores)),
        dict(enumerate(start.locals_)),
        dict(enumerate(start.scores)),
    )
    ranks = start.shared.shape[1], start.locals_[0].shape[1]
    common = {"optim": "SGD", "lr": step_size / 2, "epochs": rounds}
    with contextlib.redirect_stdout(io.StringIO()):
        if observed is None:
            first = []
            for part in columns:
                first.append({i: code.Matrix(*part[i].shape) for i in own})
                for i in own:
                    first[-1][i].lin_mat.data = torch.tensor(np.array(part[i]))
            options = {"r1": ranks[0], "r2": ranks[1], "wd": 0, "beta": penalty}
            found = code.heterogeneous_matrix_factorization(
                matrices, common | options, first, verbose=0
            )
            found = [[part[i].lin_mat for i in own] for part in found]
        else:
            assert penalty == 0
            options = {"ngc": ranks[0], "nlc": ranks[1], "device": "cpu", "verbose": 0}
            found = code.heterogeneous_matrix_completion(
                matrices,
                [torch.tensor(seen.T.astype(float)) for seen in observed],
                common | options,
                [[torch.tensor(np.array(part[i])) for i in own] for part in columns],
            )
    shared, shared_scores, locals_, scores = ([x.detach().numpy() for x in part] for part in found)
    return Factors(shared[0], locals_, shared_scores, scores)


def numbers(folder: Path) -> dict[str, Any]:
    """What is kept of the draws."""
    code = solver(folder)
    kept: dict[str, Any] = {
        "source": "github.com/UMDataScienceLab/hmf, solver.py",
        "commit": COMMIT,
        "command": "python -m bench.oracles.hmf numbers FOLDER",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "numpy")},
        "draws": [],
    }
    for seed in range(3):
        case = draw(seed)
        found = {}
        for name, observed in (("complete", None), ("incomplete", case.observed)):
            samples, penalty = case.samples, PENALTY if observed is None else 0.0
            start = case.start
            if observed is not None:
                samples = [np.where(o, y, 0) for y, o in zip(samples, observed, strict=True)]
                start = started(samples, start.shared, start.locals_)
            early, late = (
                theirs(code, samples, observed, start, n, STEP_SIZE, penalty) for n in (EARLY, LATE)
            )
            masks = observed or [np.ones_like(y) for y in samples]
            rest = zip(masks, errors(samples, late), strict=True)
            found[name] = {
                "shared": early.shared.tolist(),
                "locals": [own.tolist() for own in early.locals_],
                "shared_at_the_end": np.linalg.qr(late.shared)[0].tolist(),
                "error_at_the_end": float(np.mean([np.sum((o * r) ** 2) for o, r in rest])),
            }
        kept["draws"].append(found)
    return kept


# --- seconds -------------------------------------------------------------------------------------


def seconds(folder: Path) -> None:
    """Print how long both take."""
    import jax

    import jaxfed as jf
    from bench.common import machine, table
    from papers.neighbours.hmf import random_start, recovery

    @functools.partial(jax.jit, static_argnames="rounds")
    def run(algorithm, clients, start, rounds):
        key = jax.random.key(0)
        found = jf.rollout(algorithm, clients, rounds=rounds, key=key, warm_start=start)
        return found.history["objective"]

    jax.config.update("jax_enable_x64", True)
    code = solver(folder)
    rows = []
    for seed in range(3):
        samples, warm = recovery(seed).samples, random_start(seed)
        start = started(samples, np.asarray(warm.shared), list(np.asarray(warm.local)))
        began = time.perf_counter()
        found = theirs(code, samples, None, start, ROUNDS, 0.2, 0.1)
        taken = time.perf_counter() - began
        wanted = max(np.mean([np.sum(r**2) for r in errors(samples, found)]) / 2, LEAST)
        clients = jf.Clients.from_samples(samples)
        paper = jf.pca.HMF(3, 3, solver="gradient", step_size=0.2, penalty=0.1)
        own_steps = jf.pca.HMF(3, 3, solver="gradient", start="local_first")
        rivals = {
            "HMF, the same steps": functools.partial(run, paper, clients, warm),
            "HMF, automatic steps": functools.partial(run, own_steps, clients, warm),
            "HMF, its own start": functools.partial(run, own_steps, clients, None),
        }
        row: dict[str, object] = {"draw": seed, f"the authors', {ROUNDS} rounds": f"{taken:.2f} s"}
        for name, rival in rivals.items():
            history = np.asarray(rival(rounds=ROUNDS))
            rounds = int(np.argmax(history <= wanted * (1 + 1e-6))) + 1
            assert history[rounds - 1] <= wanted * (1 + 1e-6), name
            jax.block_until_ready(rival(rounds=rounds))  # compile
            began = time.perf_counter()
            jax.block_until_ready(rival(rounds=rounds))
            row[name] = f"{time.perf_counter() - began:.2f} s, {rounds} rounds"
        rows.append(row)
    print(machine())
    print(table(rows))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["numbers", "seconds"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "seconds":
        seconds(arguments.folder)
    else:
        NUMBERS.write_text(json.dumps(numbers(arguments.folder)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
