"""Compare jaxfed with neighbouring libraries on the same data: times, memory and answers.

    python -m bench.peers --env FOLDER              # all pairs, four minutes after the installation
    python -m bench.peers --env FOLDER pca ajive    # some of them

Each library is installed with pip into a virtual environment in FOLDER, unless it is there, and
runs in processes of its own. Each process has one core of the processor (on Linux) and one thread.
The first call follows the imports and uses no compilation cache; later ones have other data of the
same shape, and their median counts. Times are processor time, which on one core is the time by the
clock of an idle machine. Memory is the most that the process had, imports included.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import machine
from bench.speed.solvers import markdown

ROOT = Path(__file__).resolve().parents[2]
LISTED = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
PAIRS = ("pca", "grassmann", "inmf", "gcca", "ajive", "impute", "confidence", "fedavg")
HERE = ("jaxfed", "plain JAX")  # run by this interpreter
DRAWS = 6
TIME_LIMIT = 600  # seconds of a process
ONE_THREAD = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    ),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_ENABLE_X64": "1",  # so that doubles stay doubles; some draws are in single precision
    "JAX_PLATFORMS": "cpu",
}


class Absent(Exception):
    """A library that could not be installed or did not run, and why."""


def python_of(peer: str, folder: Path) -> Path:
    """The interpreter that has a library, installed now if it is not there."""
    if peer in HERE:
        return Path(sys.executable)
    here = folder / "venvs" / peer
    python, done = here / "bin" / "python", here / "installed"
    if not done.exists():
        print(f"installs {peer}", file=sys.stderr)
        shutil.rmtree(here, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", here], check=True)
        listed, pip = LISTED[peer], [python, "-m", "pip", "install", "--quiet"]
        run([*pip, *listed["packages"]], {})
        if "alone" in listed:
            run([*pip, "--no-deps", *listed["alone"]], {})
        done.touch()
    return python


def rows_of(name: str, folder: Path, data: Path) -> Iterator[dict[str, str]]:
    """What each side of a pair took and found, case by case."""
    pair: Any = importlib.import_module(f"bench.peers.{name}")
    for case, draw in pair.CASES.items():
        paths = []
        for seed in range(DRAWS):
            paths.append(data / f"{name}-{seed}.npz")
            np.savez(paths[-1], **draw(seed))
        for side in pair.SIDES:
            row = {"work": f"{pair.WORK}, {case}" if side == "jaxfed" else "", "by": side}
            try:
                found = _measured(name, side, paths, folder)
            except Absent as reason:
                print(f"{name}, {side}: did not run: {reason}", file=sys.stderr)
                yield row | dict.fromkeys(("first, s", "again, s", "MB", "answer"), "–")
            else:
                times = {f"{key}, s": f"{found[key]:.2g}" for key in ("first", "again")}
                answer = f"{found['answer']:.{pair.DIGITS}g} {pair.ANSWER}"
                yield row | times | {"MB": f"{found['peak']:.0f}", "answer": answer}


def _measured(name: str, side: str, paths: list[Path], folder: Path) -> dict[str, float]:
    peer = side.partition(",")[0]
    path = [str(ROOT), *sys.path] if peer in HERE else [str(ROOT)]
    command = [python_of(peer, folder), "-m", "bench.peers.side", name, side, *paths]
    printed = run(command, ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path)})
    return json.loads(printed.splitlines()[-1])


def run(command: list[Any], variables: dict[str, str]) -> str:
    """What a command prints; `Absent` with its last line of errors if it fails."""
    environment = os.environ | variables
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise Absent(f"more than {TIME_LIMIT} s") from error
    except subprocess.CalledProcessError as error:
        raise Absent(error.stderr.strip().rpartition("\n")[2]) from error
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--env", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args()
    if unknown := set(given.pairs) - set(PAIRS):
        parser.error(f"PAIR: wanted some of {', '.join(PAIRS)}, got {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory() as data:
        for name in given.pairs or PAIRS:
            for row in rows_of(name, given.env.resolve(), Path(data)):
                print(*row.values(), sep=" | ", file=sys.stderr, flush=True)
                rows.append(row)
    print(machine())
    print(markdown(rows))


if __name__ == "__main__":
    main()
