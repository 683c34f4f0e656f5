"""Time to the first result, compared with plain JAX and scikit-learn.

    python -m bench.speed.first_call                      # everything, about ten minutes
    python -m bench.speed.first_call --parts rivals start
    python -m bench.speed.first_call --repeats 1

Each case runs in its own process; the cases take turns. They use no compilation cache unless they
say so. The result is the minimum over the repeats, because a busy machine only adds time. Processor
time includes all threads. "First" is the time from data in NumPy to the result on the host, without
imports; "again" is the time of a second, identical call.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
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
CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SMALL = 20, 100, 15, 2, 3
DIGITS = 10, 180, 64, 2, 3  # about the size of scikit-learn's digits, a client a digit


def cases_of(part: str) -> dict[str, tuple[str, str]]:
    """The imports and the body of each case of a part."""
    filled = {name: CASES["defaults"] | case for name, case in CASES[part].items()}
    return {
        name: (CASES["imports"][case["imports"]], CASES["bodies"][case["body"]].format(**case))
        for name, case in filled.items()
    }


def measured(part: str, size: tuple[int, ...], repeats: int) -> dict[str, list[float]]:
    """Least seconds of each case: processor and wall of the first call, then of the second."""
    cases = cases_of(part)
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
        found = measured("rivals", size, repeats)
        plain = found["plain JAX, QR"]
        leanest = min(row[0] for name, row in found.items() if name.startswith("plain"))
        for name, (cpu, wall, again, again_wall) in found.items():
            yield {
                "clients, n, d, r1, r2": str(size),
                "what": name,
                "first, cpu s": cpu,
                "to plain": cpu / plain[0],
                "to the leanest": cpu / leanest,
                "first, wall s": wall,
                "to plain, wall": wall / plain[1],
                "again, cpu ms": 1e3 * again,
                "again, wall ms": 1e3 * again_wall,
            }


def algorithms(repeats: int) -> Iterable[dict[str, object]]:
    """First fit of 20 rounds at a small size."""
    for name, (cpu, wall, again, _) in measured("algorithms", SMALL, repeats).items():
        yield {
            "what": name,
            "first, cpu s": cpu,
            "first, wall s": wall,
            "again, cpu ms": 1e3 * again,
        }


def choices(repeats: int) -> Iterable[dict[str, object]]:
    """The first call of `suggest_ranks`, with nine features, and of an estimator, with 64."""
    for name, (cpu, wall, again, _) in measured("choices", DIGITS, repeats).items():
        yield {
            "what": name,
            "first, cpu s": cpu,
            "first, wall s": wall,
            "again, cpu ms": 1e3 * again,
        }


def gradient(repeats: int) -> Iterable[dict[str, object]]:
    """The first call of ten rounds and of their derivative with respect to the step size."""
    yield from _compared(measured("gradient", SMALL, repeats))


def sweep(repeats: int) -> Iterable[dict[str, object]]:
    """The first call of a sweep over 64 step sizes, and over one."""
    yield from _compared(measured("sweep", SMALL, repeats))


def prepare(repeats: int) -> Iterable[dict[str, object]]:
    """What comes before the first round of PerPCA, compiled already, in rounds."""
    for size in (*SIZES[1:], (20, 32, 2048, 4, 4), (20, 200, 2048, 4, 4)):
        found = measured("prepare", size, repeats)
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


PARTS = {
    part.__name__: part for part in (rivals, algorithms, choices, gradient, sweep, prepare, start)
}


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
