"""Time of `Clients.from_samples` beside NumPy's cast of the same tables to single precision.

    python -m bench.speed.samples

Tables in double precision. Besides casting, `from_samples` looks at each number for NaN and at each
feature for digits that single precision loses. Medians of the ratios within each turn.
"""

import numpy as np

import jaxfed as jf
from bench.common import every_turn, machine, table

SIZES = (40, 1_000, 784), (1_000, 100, 32)


def row(clients: int, rows: int, features: int) -> dict[str, object]:
    """The cast's time, and how many times as long `from_samples` takes."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(rows, features)) for _ in range(clients)]

    def cast() -> np.ndarray:
        block = np.empty((clients, rows, features), np.float32)
        for place, samples in zip(block, tables, strict=True):
            place[:] = samples
        return block

    taken = every_turn(
        {
            "one": cast,
            "each": lambda: [samples.astype(np.float32) for samples in tables],
            "from_samples": lambda: jf.Clients.from_samples(tables).data,
        }
    )

    def ratio(name: str, clock: str) -> float:
        return float(np.median(taken["from_samples"][clock] / taken[name][clock]))

    return {
        "clients": clients,
        "samples": rows,
        "features": features,
        "cast into one array, ms": 1e3 * float(np.median(taken["one"]["wall"])),
        "by the clock": ratio("one", "wall"),
        "processor time": ratio("one", "cpu"),
        "beside a cast of each table, by the clock": ratio("each", "wall"),
    }


if __name__ == "__main__":
    print(machine())
    print(table([row(*size) for size in SIZES]))
