"""Time rounds of clients of Pareto-distributed sizes, relative to clients of equal sizes.

python -m bench.speed.heavy_tails [--clients 2000] [--features 256] [--bucket 1.5] [--turns 7]

Times are milliseconds of processor time, which are reliable on a busy machine too.
"""

import argparse

import jax
import numpy as np

import jaxfed as jf
from bench.common import every_turn, label, machine

LEAST, MOST, ROUNDS = 5, 20_000, 20


def sizes_of(clients: int) -> np.ndarray:
    """Numbers of samples with a tail of exponent one, the largest among them."""
    drawn = LEAST / np.random.default_rng(0).random(clients)
    sizes = np.clip(drawn, LEAST, MOST).astype(int)
    sizes[-1] = MOST
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--bucket", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    print(machine())
    rng = np.random.default_rng(1)
    sizes = sizes_of(options.clients)
    rows = rng.normal(size=(sizes.sum(), options.features)).astype(np.float32)
    scales = np.linspace(2, 0.1, options.features, dtype=np.float32)
    tables = np.split(rows * scales, np.cumsum(sizes)[:-1])
    even = np.array_split(rows * scales, options.clients)
    samples = sizes.sum() * options.features * 4
    uneven = jf.Clients.from_samples(tables, bucket=options.bucket)
    equal = jf.Clients.from_samples(even)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(uneven.data))
    padded = options.clients * sizes.max() * options.features * 4
    print(
        f"{options.clients:,} clients of {sizes.min()} to {sizes.max():,} samples, "
        f"{samples / 1e6:.0f} MB in {len(uneven.parts)} buckets: {held / samples:.2f} × the data "
        f"(goal 1.6; padded to the longest: {padded / samples:.0f} ×)"
    )
    columns: list[str] = []
    for algorithm in (
        jf.pca.PerPCA(4, 4, solver="gradient", start="random", step_size=0.05),
        jf.pca.BlockLanczos(8),
        jf.pca.HierarchicalPCA(4, 0.5, 0.1, step_size=0.05, global_step_size=0.05),
    ):
        runs, memory = {}, {}
        for name, clients in (("buckets", uneven), ("equal", equal)):
            for rounds in (1, 1 + ROUNDS):

                def run(clients, algorithm=algorithm, rounds=rounds):
                    # Prepared as for the longer run, so that rounds are the difference.
                    return jf.rollout(
                        algorithm, clients, rounds=rounds, key=jax.random.key(0)
                    ).history["objective"]

                program = jax.jit(run).lower(clients).compile()
                runs[name, rounds] = lambda program=program, clients=clients: program(clients)
                memory[name] = program.memory_analysis().temp_size_in_bytes + held_by(clients)
        taken = every_turn({str(key): run for key, run in runs.items()}, options.turns)
        rounds = {
            name: (taken[str((name, 1 + ROUNDS))]["cpu"] - taken[str((name, 1))]["cpu"]) / ROUNDS
            for name in ("buckets", "equal")
        }
        row = {
            "algorithm": f"`{label(algorithm)}`",
            "ms a round, buckets": float(np.median(rounds["buckets"]) * 1e3),
            "equal clients": float(np.median(rounds["equal"]) * 1e3),
            "ratio (goal 1.6)": float(np.median(rounds["buckets"]) / np.median(rounds["equal"])),
            "all memory / data": memory["buckets"] / samples,
            "equal clients' all memory / data": memory["equal"] / samples,
        }
        if not columns:
            columns = list(row)
            print(f"| {' | '.join(columns)} |\n| --- {'| ---: ' * (len(columns) - 1)}|")
        cells = [x if isinstance(x, str) else f"{x:.3g}" for x in row.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


def held_by(clients: jf.Clients) -> int:
    """Bytes of the clients' arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(clients))


if __name__ == "__main__":
    main()
