"""Run every PCA and GCCA algorithm on degenerate data and check its invariants.

    python -m bench.robustness.properties --cases 100000

Clients have data of any rank from zero to full, with equal variances, constant or repeated rows,
along the axes or rotated, of magnitudes from 1e-8 to 1e4, alike or different. No number may be NaN
or infinite, no sum of squares negative, and all components of a client must be orthonormal.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf

CLIENTS, SAMPLES, FEATURES, ROUNDS = 3, 6, 5, 4
BATCH = 256  # that many data sets are one compiled call
SCALES = (1e-8, 1e-3, 1.0, 1e4)
SLACK = 2e-5  # of orthonormality


class Setting(NamedTuple):
    """An algorithm and what must hold of it."""

    algorithm: jf.Algorithm
    views: bool = False  # whether it is for views
    squares: bool = True  # whether its objective is a sum of squares
    together: bool = True  # whether shared and local components are orthonormal together


def settings() -> dict[str, Setting]:
    """All algorithms, by name."""
    pca, gcca = jf.pca, jf.gcca
    bayes = partial(Setting, squares=False, together=False)
    return {
        "PerPCA, gradient": Setting(pca.PerPCA(2, 2, solver="gradient")),
        "PerPCA, gradient, qr": Setting(
            pca.PerPCA(2, 2, solver="gradient", retraction="qr", decay=0.5)
        ),
        "PerPCA, gradient, polar": Setting(pca.PerPCA(2, 2, solver="gradient", variant="polar")),
        "PerPCA, gradient, power": Setting(pca.PerPCA(2, 2, solver="gradient", variant="power")),
        "PerPCA, gradient, random": Setting(pca.PerPCA(2, 2, solver="gradient", start="random")),
        "PerPCA, gradient, ranks": Setting(pca.PerPCA(2, (2, 0, 1), solver="gradient")),
        "PerPCA, gradient, shrinkage": Setting(pca.PerPCA(2, 2, solver="gradient", shrinkage=True)),
        "PerPCA": Setting(pca.PerPCA(2, 2)),
        "OneShot, projector": Setting(pca.OneShot(2, 2)),
        "OneShot, spectrum": Setting(pca.OneShot(2, 1, method="spectrum")),
        "OneShot, local_first": Setting(pca.OneShot(2, 2, method="local_first")),
        "Pooled": Setting(pca.Pooled(2)),
        "Local": Setting(pca.Local(2)),
        "SubspaceIteration": Setting(pca.SubspaceIteration(2)),
        "LocalPower": Setting(pca.LocalPower(2, local_steps=2, alignment="procrustes")),
        "BlockLanczos": Setting(pca.BlockLanczos(2)),
        "FAPS": Setting(pca.FAPS(2)),
        "HierarchicalPCA, given prior": bayes(pca.HierarchicalPCA(2, 0.5, 0.1)),
        "HierarchicalPCA": bayes(pca.HierarchicalPCA(2, 0.5)),
        "EmpiricalBayesPCA": bayes(pca.EmpiricalBayesPCA(2, 0.5)),
        "MaxVar": Setting(gcca.MaxVar(2, solver="gradient"), views=True),
        "MaxVar, exact": Setting(gcca.MaxVar(2), views=True),
        "MVLSA": Setting(gcca.MVLSA(2), views=True),
        "AJIVE": Setting(gcca.AJIVE(2, 2), views=True),
    }


def draw(rng: np.random.Generator, number: int) -> np.ndarray:
    """Samples of so many federations, `(number, clients, samples, features)`."""
    shape = (number, CLIENTS)
    rows = rng.normal(size=(*shape, SAMPLES, FEATURES))
    left, _, right = np.linalg.svd(rows, full_matrices=False)
    axes = rng.random(shape) < 0.3
    left[axes], right[axes] = np.eye(SAMPLES, FEATURES), np.eye(FEATURES)
    decay = np.where(rng.random(number) < 0.4, 1.0, 3.0)[:, None, None]
    place = np.arange(FEATURES)
    rank = rng.integers(0, FEATURES + 1, shape)[..., None]
    rows = (left * ((place < rank) / decay**place)[..., None, :]) @ right
    kind = rng.integers(0, 5, shape)
    rows = np.where((kind == 0)[..., None, None], rows[..., :1, :], rows)
    rows = np.where((kind == 1)[..., None, None], np.repeat(rows[..., :3, :], 2, -2), rows)
    rows = rng.choice(SCALES, shape)[..., None, None] * rows
    rows = np.where((rng.random(number) < 0.3)[:, None, None, None], rows[:, :1], rows)
    return rows.astype(np.float32)


def runner(setting: Setting) -> Callable:
    """One compiled function of a batch of samples and keys: the objectives and the components."""

    def one(rows, key):
        if setting.views:
            given = jf.gcca.Views.from_arrays(list(rows))
        else:
            given = jf.Clients.from_samples(rows)
        solution = jf.rollout(setting.algorithm, given, rounds=ROUNDS, key=key)
        return solution.history["objective"], *solution.result

    return jax.jit(jax.vmap(one))


def faults(setting: Setting, objective, shared, local) -> dict[str, np.ndarray]:
    """Which cases of a batch break what must hold."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((objective, shared, local))]
    number = len(leaves[0])
    finite = np.all([np.isfinite(x).reshape(number, -1).all(1) for x in leaves], axis=0)
    found = {"NaN": ~finite}
    if setting.squares:
        found["negative"] = (leaves[0] < 0).any(1)
    shape = (number, CLIENTS)
    parts = []
    if shared is not None:
        frame = np.asarray(getattr(shared, "scores", shared), float)[:, None]
        parts.append(np.broadcast_to(frame, (*shape, *frame.shape[2:])))
    if local is not None and not setting.views:
        parts.append(np.asarray(local, float))
    if setting.together:
        parts = [np.concatenate(parts, axis=-1)]
    error = np.max([_error(frame) for frame in parts], axis=0)
    found["not orthonormal"] = finite & (error > SLACK)
    return found


def _error(frame: np.ndarray) -> np.ndarray:
    """How far each case's columns are from orthonormal; those of zeros do not count."""
    gram = frame.swapaxes(-1, -2) @ frame
    used = np.linalg.norm(frame, axis=-2) > 0.5
    return np.abs(gram - used[..., None] * np.eye(frame.shape[-1])).max((-3, -2, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="of all algorithms together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="algorithms whose name holds this")
    options = parser.parse_args()
    chosen = {name: x for name, x in settings().items() if options.only in name}
    batches = -(-options.cases // (BATCH * len(chosen)))
    print(f"{'algorithm':24}{'cases':>8}{'NaN':>8}{'negative':>10}{'not orthonormal':>17}{'s':>7}")
    broken = 0
    for name, setting in chosen.items():
        begin, run, rng = time.perf_counter(), runner(setting), np.random.default_rng(options.seed)
        counted = dict.fromkeys(("NaN", "negative", "not orthonormal"), 0)
        first: dict[str, np.ndarray] = {}
        for number in range(batches):
            rows = draw(rng, BATCH)
            keys = jax.random.split(jax.random.key(number), BATCH)
            for fault, cases in faults(setting, *run(rows, keys)).items():
                counted[fault] += int(cases.sum())
                if cases.any() and fault not in first:
                    first[fault] = rows[cases.argmax()]
        seconds = time.perf_counter() - begin
        jax.clear_caches()
        columns = "".join(f"{counted[k]:>{w}}" for k, w in zip(counted, (8, 10, 17), strict=True))
        print(f"{name:24}{batches * BATCH:>8}{columns}{seconds:>7.1f}", flush=True)
        for fault, rows in first.items():
            variances = np.linalg.svd(rows.astype(float), compute_uv=False)
            with np.printoptions(precision=2):
                print(f"  {fault}, for clients of the singular values\n{variances}")
        broken += sum(counted.values())
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
