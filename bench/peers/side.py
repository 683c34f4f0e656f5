"""Time one side of a pair in this process: `PYTHON -m bench.peers.side PAIR SIDE DRAW.npz ...`.

The interpreter needs NumPy and the side's library. The last line of what it prints is JSON.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LONG = 5.0  # seconds of a call after which only one more follows


def peak() -> float:
    """The most memory that this process has had, in megabytes.

    By Linux; `getrusage` would include what the process that started this one had.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measured(pair: Any, name: str, draws: list[Path]) -> dict[str, float]:
    """Processor seconds of the first call and of later ones, and the answer to the first draw."""
    solve = pair.SIDES[name]()
    spent, found = [], {}
    for path in draws:
        with np.load(path, allow_pickle=False) as stored:
            data = dict(stored)
        start = time.process_time()
        result = solve(data)
        spent.append(time.process_time() - start)
        found = found or {"answer": float(pair.answer(data, result))}
        if spent[-1] > LONG and len(spent) > 1:
            break
    return found | {"first": spent[0], "again": float(np.median(spent[1:])), "peak": peak()}


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    chosen = importlib.import_module(f"bench.peers.{sys.argv[1]}")
    print(json.dumps(measured(chosen, sys.argv[2], [Path(path) for path in sys.argv[3:]])))
