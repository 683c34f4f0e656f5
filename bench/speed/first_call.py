"""Time to the first result, compared with plain JAX and scikit-learn.

    python -m bench.speed.first_call                      # everything, some ten minutes
    python -m bench.speed.first_call --parts rivals start
    python -m bench.speed.first_call --repeats 1

Every case runs in a process of its own, in turns, without a compilation cache unless it says so;
the least of the repeats counts, because a busy machine only adds. Processor time is that of all
threads. "First" is from the data in NumPy to the result on the host, imports excluded; "again" the
same call once more.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench.common import machine, table

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((100, 1000, 15, 2, 10), (100, 200, 100, 5, 5), (50, 120, 784, 10, 10))

# What a process measures: `imports`, then `once()` twice.
HARNESS = """
import time
import numpy as np
m, n, d, r1, r2 = {size}
x = np.random.default_rng(0).standard_normal((m, n, d)) / np.sqrt(1 + np.arange(d))
x = x.astype(np.float32)  # variances that fall, as those of real data
{imports}
def once():
{body}
spent = []
for _ in range(2):
    clocks = time.process_time(), time.perf_counter()
    once()
    spent += [time.process_time() - clocks[0], time.perf_counter() - clocks[1]]
print(*spent)
"""
JAX = "import jax, jax.numpy as jnp, jaxfed as jf\njf.fit; jf.pca.PerPCA; jf.gcca.MaxVar"
PLAIN = "import jax, jax.numpy as jnp\nfrom bench.speed import plain_jax"
FIT = """\
    solution = jf.fit({algorithm}, {clients}, rounds=20, key=jax.random.key(0){more})
    return jax.device_get(solution.result)"""
SAMPLES, VIEWS = "jf.Clients.from_samples(x)", "jf.gcca.Views.from_arrays(list(x[:3]))"
STEP = "0.5"

RIVALS = {
    "jaxfed": (
        JAX,
        FIT.format(algorithm=f"jf.pca.PerPCA(r1, r2, step_size={STEP})", clients=SAMPLES, more=""),
    ),
    "plain JAX, QR": (
        PLAIN,
        f"""\
    start = plain_jax.random_start(jax.random.key(0), m, d, r1, r2)
    return jax.device_get(plain_jax.perpca(jnp.asarray(x), *start, {STEP}, 20))""",
    ),
    "plain JAX, SVD": (
        PLAIN,
        f"""\
    start = plain_jax.random_start(jax.random.key(0), m, d, r1, r2)
    return jax.device_get(plain_jax.perpca(jnp.asarray(x), *start, {STEP}, 20, plain_jax.svd))""",
    ),
    "scikit-learn's PCA, pooled": (
        "from sklearn.decomposition import PCA",
        """\
    return PCA(r1 + r2, svd_solver="covariance_eigh").fit(x.reshape(m * n, d)).components_""",
    ),
}

ALGORITHMS = {
    "PerPCA": ("jf.pca.PerPCA(2, 3)", SAMPLES, ""),
    "PerPCA, 3 bits": (
        "jf.pca.PerPCA(2, 3)",
        SAMPLES,
        ", channel=jf.channel.difference(jf.channel.quantize(3))",
    ),
    "VarProPerPCA": ("jf.pca.VarProPerPCA(2, 3)", SAMPLES, ""),
    "HierarchicalPCA": (
        "jf.pca.HierarchicalPCA(3, noise_variance=0.1, prior_variance=0.1)",
        SAMPLES,
        "",
    ),
    "AdaptivePCA": ("jf.pca.AdaptivePCA(3, noise_variance=0.1)", SAMPLES, ""),
    "BlockLanczos": ("jf.pca.BlockLanczos(3)", SAMPLES, ""),
    "FAPS": ("jf.pca.FAPS(3)", SAMPLES, ""),
    "MaxVar": ("jf.gcca.MaxVar(3)", VIEWS, ""),
    "DeepMaxVar": (
        "jf.gcca.DeepMaxVar(lambda *a, **k: jf.models.Perceptron(*a, outputs=3, **k), "
        "__import__('optax').adam(1e-3), rank=3, inner_epochs=3)",
        VIEWS,
        "",
    ),
}

GRADIENT = """\
    def loss(step_size):
        clients = jf.Clients.from_samples(x)
        algorithm = jf.pca.PerPCA(r1, r2, step_size=step_size)
        return jf.rollout(
            algorithm, clients, rounds=10, key=jax.random.key(0)
        ).history["objective"][-1]
    return jax.device_get(jax.jit({transform})({STEP}))"""
SWEEP = f"""\
    clients = jf.Clients.from_samples(x)
    runs = jf.sweep(
        [jf.pca.PerPCA(r1, r2, step_size=0.01 * {STEP} * (1 + i)) for i in range({{points}})],
        clients, rounds=20, keys=jax.random.key(0),
    )
    return jax.device_get(runs.result)"""


def measured(
    cases: dict[str, tuple[str, str]], size: tuple[int, ...], repeats: int
) -> dict[str, list[float]]:
    """Least seconds of each case: processor and wall of the first call, then of the second."""
    found: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (imports, body) in cases.items():
            code = HARNESS.format(size=size, imports=imports, body=body)
            found[name].append([float(word) for word in _run([sys.executable, "-c", code])[0]])
    return {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }


def _run(command: list[str], **variables: str) -> tuple[list[str], float, float]:
    """Last line printed, in words, and the process's own seconds by processor and by the clock."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None) if not variables else None
    before, start = os.times(), os.times().elapsed
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:2000]}\n{done.stderr[-3000:]}")
    spent = sum(after[2:4]) - sum(before[2:4])
    return done.stdout.strip().rsplit("\n", 1)[-1].split(), spent, after.elapsed - start


def rivals(repeats: int) -> Iterable[dict[str, object]]:
    """PerPCA, 20 rounds from NumPy arrays, beside what is there without jaxfed."""
    for size in SIZES:
        found = measured(RIVALS, size, repeats)
        plain = found["plain JAX, QR"]
        for name, (cpu, wall, again, again_wall) in found.items():
            yield {
                "clients, n, d, r1, r2": str(size),
                "what": name,
                "first, cpu s": cpu,
                "to plain": cpu / plain[0],
                "first, wall s": wall,
                "to plain, wall": wall / plain[1],
                "again, cpu ms": 1e3 * again,
                "again, wall ms": 1e3 * again_wall,
            }


def algorithms(repeats: int) -> Iterable[dict[str, object]]:
    """First fit of 20 rounds at a small size."""
    cases = {
        name: (JAX, FIT.format(algorithm=algorithm, clients=clients, more=more))
        for name, (algorithm, clients, more) in ALGORITHMS.items()
    }
    for name, (cpu, wall, again, _) in measured(cases, (20, 100, 15, 2, 3), repeats).items():
        yield {
            "what": name,
            "first, cpu s": cpu,
            "first, wall s": wall,
            "again, cpu ms": 1e3 * again,
        }


def gradient(repeats: int) -> Iterable[dict[str, object]]:
    """The first call of ten rounds and of their derivative with respect to the step size."""
    forms = {"ten rounds": "loss", "their gradient": "jax.grad(loss)"}
    cases = {name: (JAX, GRADIENT.format(transform=f, STEP=STEP)) for name, f in forms.items()}
    yield from _compared(measured(cases, (20, 100, 15, 2, 3), repeats))


def sweep(repeats: int) -> Iterable[dict[str, object]]:
    """The first call of a sweep over 64 step sizes, and over one."""
    cases = {f"{k} points": (JAX, SWEEP.format(points=k)) for k in (1, 64)}
    yield from _compared(measured(cases, (20, 100, 15, 2, 3), repeats))


def prepare(repeats: int) -> Iterable[dict[str, object]]:
    """What comes before the first round of PerPCA, compiled already, in rounds."""
    fit = FIT.replace("rounds=20", "rounds={rounds}")
    for size in ((50, 120, 784, 10, 10), (20, 32, 2048, 4, 4), (20, 200, 2048, 4, 4)):
        cases = {
            str(rounds): (
                JAX,
                fit.format(
                    algorithm="jf.pca.PerPCA(r1, r2)", clients=SAMPLES, rounds=rounds, more=""
                ),
            )
            for rounds in (1, 21)
        }
        found = measured(cases, size, repeats)
        one, more = found["1"][2:], found["21"][2:]
        rounds = [(b - a) / 20 for a, b in zip(one, more, strict=True)]
        yield {
            "clients, n, d, r1, r2": str(size),
            "start, cpu ms": 1e3 * (one[0] - rounds[0]),
            "round, cpu ms": 1e3 * rounds[0],
            "start in rounds": one[0] / rounds[0] - 1,
            "the same, wall": one[1] / rounds[1] - 1,
        }


def _compared(found: dict[str, list[float]]) -> Iterable[dict[str, object]]:
    first = next(iter(found.values()))
    for name, (cpu, wall, again, _) in found.items():
        yield {
            "what": name,
            "first, cpu s": cpu,
            "to the first line": cpu / first[0],
            "first, wall s": wall,
            "again, cpu ms": 1e3 * again,
        }


def start(repeats: int) -> Iterable[dict[str, object]]:
    """Whole processes: imports, the command line's help, the README's first example."""
    readme = (ROOT / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        warm = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "MPLBACKEND": "Agg",
        }
        os.chdir(folder)  # where the example may leave its picture
        cases = {
            "import jax, equinox, optax": (["-c", "import jax, equinox, optax"], {}),
            "import jaxfed": (["-c", "import jaxfed"], {}),
            "import jaxfed, and use it": (["-c", "import jaxfed as jf; jf.fit; jf.pca.PerPCA"], {}),
            "jaxfed --help": (["-m", "jaxfed", "--help"], {}),
            "README's first example": (["-c", example], {"MPLBACKEND": "Agg"}),
            "the same, compiled before": (["-c", example], warm),
        }
        _run([sys.executable, "-c", example], **warm)
        for name, (arguments, variables) in cases.items():
            runs = [_run([sys.executable, *arguments], **variables)[1:] for _ in range(repeats)]
            cpu, wall = (min(column) for column in zip(*runs, strict=True))
            yield {"what": name, "process, cpu s": cpu, "process, wall s": wall}


PARTS = {part.__name__: part for part in (rivals, algorithms, gradient, sweep, prepare, start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.parts:
        print(f"\n{name}: {PARTS[name].__doc__}")
        print(table(list(PARTS[name](arguments.repeats))), flush=True)


if __name__ == "__main__":
    main()
