"""Integrative NMF by pyliger, the authors' package, and how long both take.

    PYTHON -m bench.oracles.inmf numbers
    python -m bench.oracles.inmf seconds PYTHON

PYTHON is the interpreter of an environment with pyliger (`pip install pyliger`) and need not have
jaxfed; the numbers kept are of pyliger 0.2.4.

`numbers` writes `tests/references/inmf.json`: of three draws, components and loadings after some
rounds of online iNMF, and the least objective of alternating non-negative least squares.

`seconds`: samples like scaled counts of cells, in double precision; seconds until the objective is
that of pyliger's `iNMF_HALS` after 30 iterations from its own start, without compilation, and the
same for its `online_iNMF` after five passes over the samples.
"""

import argparse
import contextlib
import io
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

NUMBERS = Path(__file__).parents[2] / "tests" / "references" / "inmf.json"
RANK, PENALTY, BATCHES, PASSES, LATE = 3, 1.5, 4, 5, 3000
COUNTS, FEATURES = (24, 16, 20), 12


class Draw(NamedTuple):
    """Clients' samples, and components to start from."""

    samples: list[np.ndarray]  # (samples, features) each
    shared: np.ndarray  # (features, rank)
    locals_: list[np.ndarray]  # (features, rank) each


def draw(seed: int) -> Draw:
    """The draws whose numbers are kept."""
    rng = np.random.default_rng(seed)
    shared, samples, locals_ = rng.gamma(0.5, size=(FEATURES, RANK)), [], []
    for count in COUNTS:
        own = 0.4 * rng.gamma(0.5, size=(FEATURES, RANK))
        values = rng.gamma(0.7, size=(count, RANK)) @ (shared + own).T
        samples.append(values + 0.1 * rng.random(values.shape))
        locals_.append(rng.random((FEATURES, RANK)))
    return Draw(samples, rng.random((FEATURES, RANK)), locals_)


def objective(
    samples: list[np.ndarray],
    shared: np.ndarray,
    locals_: list[np.ndarray],
    loadings: list[np.ndarray],
    penalty: float,
) -> float:
    """The paper's: a sum over clients."""
    total = 0.0
    for x, v, h in zip(samples, locals_, loadings, strict=True):
        total += np.sum((x - h @ (shared + v).T) ** 2) + penalty * np.sum((h @ v.T) ** 2)
    return float(total)


# --- pyliger -------------------------------------------------------------------------------------


def in_batches(values: np.ndarray, batches: int) -> np.ndarray:
    """Samples such that consecutive batches are every `batches`-th of the given ones."""
    return np.concatenate([values[i::batches] for i in range(batches)])


def online(case: Draw, penalty: float, batches: int, passes: int, **start: Any) -> Any:
    """W, the V_i, and the loadings of all samples, after passes of online iNMF."""
    from pyliger.factorization import _online_iNMF as code

    counts = [len(x) for x in case.samples]
    layers = [{"scale_data": scipy.sparse.csr_matrix(in_batches(x, batches))} for x in case.samples]
    common = (layers, case.samples[0].shape[1], counts, False)
    shared, locals_, _, _ = code._online_iNMF_cal_W_V(
        *common,
        None,
        **(dict.fromkeys(f"{name}_init" for name in "WVHAB") | start),
        k=case.shared.shape[1],
        value_lambda=penalty,
        max_epochs=passes,
        miniBatch_max_iters=1,
        miniBatch_size=sum(counts) // batches,
        h5_chunk_size=1000,
        rand_seed=1,
    )
    layers = [{"scale_data": scipy.sparse.csr_matrix(x)} for x in case.samples]
    loadings = code._online_iNMF_cal_H(
        layers, shared, locals_, *common[1:], penalty, sum(counts) // batches
    )
    return shared, locals_, [h.T for h in loadings]


def liger_object(samples: list[np.ndarray]) -> Any:
    """What pyliger's functions read and write."""
    data = [
        SimpleNamespace(
            shape=x.shape, layers={"scale_data": scipy.sparse.csr_matrix(x)}, obsm={}, varm={}
        )
        for x in samples
    ]
    genes = range(samples[0].shape[1])
    return SimpleNamespace(adata_list=data, num_samples=len(samples), var_genes=genes)


def least(case: Draw, penalty: float, rounds: int) -> float:
    """The objective after many rounds of alternating non-negative least squares."""
    from pyliger.factorization._iNMF_ANLS import optimize_ALS

    found = liger_object(case.samples)
    optimize_ALS(
        found,
        case.shared.shape[1],
        penalty,
        thresh=0,
        max_iters=rounds,
        W_init=case.shared.T.copy(),
        V_init=[v.T.copy() for v in case.locals_],
    )
    data = found.adata_list
    parts = [x.varm["V"] for x in data], [x.obsm["H"] for x in data]
    return objective(case.samples, data[0].varm["W"], *parts, penalty)


def numbers() -> dict[str, Any]:
    """What is kept of the draws."""
    kept: dict[str, Any] = {
        "source": "pyliger",
        "command": "PYTHON -m bench.oracles.inmf numbers",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("pyliger", "numpy", "scipy")},
        "draws": [],
    }
    for seed in range(3):
        case = draw(seed)
        start = {"W_init": case.shared.copy(), "V_init": [v.copy() for v in case.locals_]}
        shared, locals_, loadings = online(case, PENALTY, BATCHES, PASSES, **start)
        kept["draws"].append(
            {
                "shared": shared.tolist(),
                "locals": [v.tolist() for v in locals_],
                "loadings": [h.tolist() for h in loadings],
                "least_objective": least(case, PENALTY, LATE),
            }
        )
    return kept


# --- seconds -------------------------------------------------------------------------------------

CELLS, GENES, K, LAMBDA, ITERATIONS = (3000, 2000, 1000), 1000, 20, 5.0, 30
ONLINE = 10  # batches


def counts(seed: int) -> list[np.ndarray]:
    """Counts of cells that express programs of genes, normalized and scaled as by LIGER."""
    rng = np.random.default_rng(seed)
    programs, samples = rng.gamma(0.2, size=(K, GENES)), []
    for cells in CELLS:
        own = programs * rng.gamma(4, 1 / 4, size=programs.shape)
        usage = rng.dirichlet(np.full(K, 0.2), size=cells)
        rates = usage @ (own / own.sum(1, keepdims=True))
        found = rng.poisson(rates * rng.lognormal(7, 0.4, size=(cells, 1))).astype(float)
        found /= np.maximum(found.sum(1, keepdims=True), 1)
        samples.append(found / np.maximum(np.sqrt(np.mean(found**2, axis=0)), 1e-12))
    return samples


def theirs(seed: int) -> dict[str, float]:
    """Seconds and objectives of pyliger, a sum over clients."""
    from pyliger.factorization._iNMF_HALS import iNMF_HALS

    samples = counts(seed)
    found = liger_object(samples)
    began = time.perf_counter()
    iNMF_HALS(found, K, LAMBDA, thresh=0, max_iters=ITERATIONS, rand_seed=seed + 1)
    taken = {"hals_seconds": time.perf_counter() - began}
    data = found.adata_list
    parts = [x.varm["V"] for x in data], [x.obsm["H"] for x in data]
    taken["hals"] = objective(samples, found.W, *parts, LAMBDA)
    case = Draw(samples, np.zeros((GENES, K)), [])
    began = time.perf_counter()
    parts = online(case, LAMBDA, ONLINE, PASSES)
    taken["online_seconds"] = time.perf_counter() - began
    taken["online"] = objective(samples, *parts, LAMBDA)
    return taken


def seconds(python: str) -> None:
    """Print how long both take."""
    import jax

    import jaxfed as jf
    from bench.common import machine, table

    jax.config.update("jax_enable_x64", True)

    def run(rounds: int, clients: jf.Clients, **options: Any) -> jf.Solution:
        algorithm = jf.nmf.INMF(K, LAMBDA, start="random", **options)
        return jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0))

    rows = []
    for seed in range(3):
        command = [python, "-m", "bench.oracles.inmf", "theirs", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        taken = json.loads(done.stdout.splitlines()[-1])
        samples = counts(seed)
        clients = jf.Clients.from_samples(samples)
        for name in ("hals", "online"):
            wanted = taken[name] / len(samples)
            history = np.asarray(run(200, clients).history["objective"])
            rounds = int(np.argmax(history <= wanted)) + 1
            assert history[rounds - 1] <= wanted, name
            run(rounds, clients)  # compile
            began = time.perf_counter()
            jax.block_until_ready(run(rounds, clients).result)
            own = time.perf_counter() - began
            rows.append(
                {
                    "draw": seed,
                    "pyliger": name,
                    "objective": f"{taken[name]:.6g}",
                    "seconds": f"{taken[f'{name}_seconds']:.1f}",
                    "seconds of INMF": f"{own:.2f}",
                    "rounds": rounds,
                }
            )
    print(machine())
    print(table(rows))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["numbers", "seconds", "theirs"])
    parser.add_argument("more", nargs="?")
    arguments = parser.parse_args()
    if arguments.what == "seconds":
        seconds(arguments.more)
    elif arguments.what == "theirs":
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = theirs(int(arguments.more))
        print(json.dumps(found))
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            found = numbers()
        NUMBERS.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
