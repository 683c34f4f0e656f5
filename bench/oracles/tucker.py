"""Personalized Tucker decomposition by its authors' code, and how long both take.

    python -m bench.oracles.tucker numbers FOLDER
    python -m bench.oracles.tucker seconds FOLDER

FOLDER is the folder `code` of a clone of github.com/hyan46/perTucker; the numbers kept are of
commit 3dc6136. What its `perTucker.py` imports is wanted too: TensorLy and SciPy.

`numbers` writes `tests/references/tucker.json`: of three draws of tensors with three modes, the
factors after some passes over the modes, the squared error there, and at the end the components and
the squared error; with all modes orthogonal, with one, and with a proximal term, where only the end
is comparable: their local factors are then not orthogonal to the shared ones on the way.

`seconds`: images of `papers.neighbours.pertucker`, 50 of each of three clients, as in the authors'
Figure 5, in double precision: seconds of the authors' 30 passes, and until jaxfed's objective is at
most theirs, without compilation, from the same random start and from its own.
"""

import argparse
import functools
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COMMIT = "3dc61368eb920ab54b7c36cd7f193dbe347e7427"
NUMBERS = Path(__file__).parents[2] / "tests" / "references" / "tucker.json"
SHAPE, SHARED_RANKS, LOCAL_RANKS = (6, 5, 4), (2, 2, 1), (1, 2, 2)
COUNTS = (12, 20, 16)
# The orthogonal modes and the weight of the proximal term.
KINDS = {"all": ((0, 1, 2), 0.0), "one": ((0,), 0.0), "proximal": ((0, 1, 2), 2.0)}
EARLY, LATE = 2, 300  # passes over all modes

Factors = list[np.ndarray]  # one for each mode, (size, rank)


class Start(NamedTuple):
    """Orthonormal factors of all modes."""

    shared: Factors
    locals_: list[Factors]  # one for each client


class Draw(NamedTuple):
    """Clients of unequal sizes, and where to start."""

    samples: list[np.ndarray]  # (samples, *SHAPE) each
    start: Start


def kron(factors: Factors) -> np.ndarray:
    """The Kronecker product of all factors."""
    return functools.reduce(np.kron, factors)


def multiplied(values: np.ndarray, factors: Factors, but: int | None = None) -> np.ndarray:
    """Tensors, (samples, *sizes), with all modes but one multiplied by factors."""
    for k, factor in enumerate(factors):
        if k != but:
            values = np.moveaxis(np.tensordot(values, factor, (k + 1, 0)), -1, k + 1)
    return values


def second(values: np.ndarray, mode: int) -> np.ndarray:
    """The second moment in a mode, summed over samples."""
    unfolded = np.moveaxis(values, mode + 1, 0).reshape(values.shape[mode + 1], -1)
    return unfolded @ unfolded.T


def top(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Its top eigenvectors."""
    return np.linalg.eigh(matrix)[1][:, ::-1][:, :rank]


def random_start(
    rng: np.random.Generator,
    samples: list[np.ndarray],
    shared_ranks: tuple[int, ...],
    local_ranks: tuple[int, ...],
    orthogonal: tuple[int, ...],
) -> Start:
    """Random factors, except local ones of the last mode, which are the best beside the others.

    jaxfed updates these at the beginning of its first round; they are the same after that.
    """
    shape = samples[0].shape[1:]
    shared = [
        np.linalg.qr(rng.normal(size=(d, r)))[0] for d, r in zip(shape, shared_ranks, strict=True)
    ]
    locals_ = []
    for y in samples:
        own = []
        for k, rank in enumerate(local_ranks):
            factor = rng.normal(size=(shape[k], rank))
            if k in orthogonal:
                factor -= shared[k] @ shared[k].T @ factor
            own.append(np.linalg.qr(factor)[0])
        last = len(shape) - 1
        moment = second(multiplied(y, own, last), last)
        if last in orthogonal:
            outside = np.eye(shape[last]) - shared[last] @ shared[last].T
            moment = outside @ moment @ outside
        own[last] = top(moment, local_ranks[last])
        locals_.append(own)
    return Start(shared, locals_)


def draw(seed: int, orthogonal: tuple[int, ...]) -> Draw:
    """The draws whose numbers are kept."""
    rng = np.random.default_rng(seed)
    sizes = list(zip(SHAPE, SHARED_RANKS, LOCAL_RANKS, strict=True))
    shared = [np.linalg.qr(rng.normal(size=(d, r)))[0] for d, r, _ in sizes]
    samples = []
    for count in COUNTS:
        own = []
        for (d, _, s), factor in zip(sizes, shared, strict=True):
            joint = np.linalg.qr(np.hstack([factor, rng.normal(size=(d, s))]))[0]
            own.append(joint[:, factor.shape[1] :])
        values = 3 * rng.normal(size=(count, kron(shared).shape[1])) @ kron(shared).T
        values += 2 * rng.normal(size=(count, kron(own).shape[1])) @ kron(own).T
        values += rng.normal(size=values.shape)
        samples.append(values.reshape(count, *SHAPE))
    return Draw(samples, random_start(rng, samples, SHARED_RANKS, LOCAL_RANKS, orthogonal))


# --- the authors' code ---------------------------------------------------------------------------


def theirs(
    folder: Path,
    samples: list[np.ndarray],
    start: Start,
    orthogonal: tuple[int, ...],
    passes: int,
    proximal: float,
) -> Any:
    """Their solver after some passes from a start; `passes` holds losses after each."""
    sys.path.insert(0, str(folder))
    kind = __import__("perTucker").perTucker

    class FromStart(kind):
        """Their solver from given factors."""

        def initialize_global(self, data, method="random"):
            """The cores and factors of the start."""
            del method
            return [_core(y, start.shared) for y in data], [u.copy() for u in start.shared]

        def initialize_local(self, data, C_global, U_global, method="random"):
            """The cores and factors of the start."""
            del C_global, U_global, method
            each = list(zip(data, start.locals_, strict=True))
            return [_core(y, own) for y, own in each], [[v.copy() for v in own] for _, own in each]

    shared_ranks = [u.shape[1] for u in start.shared]
    local_ranks = [[v.shape[1] for v in own] for own in start.locals_]
    solver = FromStart(shared_ranks, local_ranks, dims_orthogonal=orthogonal, max_itr=passes)
    last = [np.moveaxis(y, 0, -1) for y in samples]
    _, solver.shared, _, solver.locals_ = solver.fit(last, rho=proximal)
    return solver


def _core(values: np.ndarray, factors: Factors) -> np.ndarray:
    return np.moveaxis(multiplied(np.moveaxis(values, -1, 0), factors), 0, -1)


def numbers(folder: Path) -> dict[str, Any]:
    """What is kept of the draws."""
    kept: dict[str, Any] = {
        "source": "github.com/hyan46/perTucker, code/perTucker.py",
        "commit": COMMIT,
        "command": "python -m bench.oracles.tucker numbers FOLDER",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("tensorly", "numpy")},
        "draws": [],
    }
    for seed in range(3):
        found = {}
        for kind, (orthogonal, proximal) in KINDS.items():
            case = draw(seed, orthogonal)
            run = functools.partial(theirs, folder, *case, orthogonal)
            early, late = run(EARLY, proximal), run(LATE, proximal)
            found[kind] = {
                "shared": [u.tolist() for u in early.shared],
                "locals": [[v.tolist() for v in own] for own in early.locals_],
                "loss": early.loss[-1],
                "shared_at_the_end": kron(late.shared).tolist(),
                "loss_at_the_end": late.loss[-1],
            }
            if proximal:
                del found[kind]["shared"], found[kind]["locals"], found[kind]["loss"]
        kept["draws"].append(found)
    return kept


# --- seconds -------------------------------------------------------------------------------------


def seconds(folder: Path) -> None:
    """Print how long both take."""
    import jax
    import jax.numpy as jnp

    import jaxfed as jf
    from bench.common import machine, table
    from papers.neighbours.pertucker import MODES, RANKS, SIZE, images

    @functools.partial(jax.jit, static_argnames="rounds")
    def run(algorithm, clients, start, rounds):
        key = jax.random.key(0)
        found = jf.rollout(algorithm, clients, rounds=rounds, key=key, warm_start=start)
        return found.history["objective"]

    jax.config.update("jax_enable_x64", True)
    rows = []
    for seed in range(3):
        samples = images(seed, 50).train
        start = random_start(np.random.default_rng([seed, 1]), list(samples), RANKS, RANKS, MODES)
        began = time.perf_counter()
        found = theirs(folder, list(samples), start, MODES, 30, 10.0)
        taken = time.perf_counter() - began
        wanted = found.loss[-1] / (samples.shape[0] * samples.shape[1])
        clients = jf.Clients.from_samples(samples.reshape(*samples.shape[:2], -1))
        warm = jf.Personalized(
            jnp.asarray(kron(start.shared)), jnp.asarray(np.stack([kron(x) for x in start.locals_]))
        )
        algorithm = jf.pca.PerTucker((SIZE, SIZE), RANKS, RANKS)
        row: dict[str, object] = {"draw": seed, "the authors', 30 passes": f"{taken:.1f} s"}
        for name, first in (("the same start", warm), ("its own start", None)):
            history = np.asarray(run(algorithm, clients, first, rounds=120))
            below = history <= wanted * (1 + 1e-6)
            rounds = int(np.argmax(below)) + 1
            if not below.any():
                row[name] = f"never: {history[-1] / wanted - 1:.1e} above"
                continue
            jax.block_until_ready(run(algorithm, clients, first, rounds=rounds))  # compile
            began = time.perf_counter()
            jax.block_until_ready(run(algorithm, clients, first, rounds=rounds))
            row[name] = f"{time.perf_counter() - began:.2f} s, {rounds} rounds"
            row[f"{name}, after 120 rounds"] = f"{history[-1] / wanted - 1:.1e}"
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
