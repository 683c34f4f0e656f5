"""Time of a round per client as the number of clients grows to a million, in bounded memory.

    python -m bench.speed.many_clients                     # a million, against 10,000
    python -m bench.speed.many_clients growth              # 1,000 to 100,000, by backend

Times are processor times, which a busy machine does not change.
"""

import argparse
import resource
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import every_turn, machine, table, turns

COUNTS, ROUNDS = (1_000, 10_000, 100_000), 10


def measure(count: int, block: int) -> dict[str, object]:
    """Time of one round per client, and the process's peak memory so far."""
    samples = jax.random.normal(jax.random.key(1), (count, 16, 32), jnp.float32)
    clients = jf.Clients.from_samples(samples)
    algorithm = jf.pca.PerPCA(4, 4, solver="gradient", start="random", step_size=0.05)
    backend = jf.backend.chunked(block)

    @jax.jit
    def run(clients, start, rounds):
        del rounds
        return jf.rollout(
            algorithm, clients, rounds=1, key=jax.random.key(0), warm_start=start, backend=backend
        ).result

    local = jnp.broadcast_to(jnp.eye(32, 8)[:, 4:], (count, 32, 4))
    start = jf.Personalized(jnp.eye(32, 4), local)
    measured = turns({"round": lambda: run(clients, start, 1)}, repeats=3)["round"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "clients": count,
        "wall µs / client": 1e6 * measured["wall"] / count,
        "cpu µs / client": 1e6 * measured["cpu"] / count,
        "peak GiB": peak,
    }


def growth(start: str) -> None:
    """Print the time per client and round by `vmap` and `auto`, and its ratio to 1,000 clients'."""
    print(f"\n{ROUNDS} rounds, and the start {start!r}")
    cases = {}
    for count in COUNTS:
        samples = np.random.default_rng(0).standard_normal((count, 16, 32), np.float32)
        clients = jf.Clients.from_samples(samples)
        for name in ("vmap", "auto"):
            algorithm = jf.pca.PerPCA(4, 4, solver="gradient", start=start, step_size=0.05)
            cases[name, count] = partial(
                jf.fit,
                algorithm,
                clients,
                rounds=ROUNDS,
                key=jax.random.key(0),
                backend=getattr(jf.backend, name)(),
            )
    taken = every_turn({case: lambda f=f: f().result for case, f in cases.items()}, repeats=3)
    each = {case: 1e6 * clocks["cpu"].min() / (ROUNDS * case[1]) for case, clocks in taken.items()}
    print(
        table(
            [
                {
                    "clients": count,
                    **{f"{name}, cpu µs": each[name, count] for name in ("vmap", "auto")},
                    **{
                        f"{name} to 1,000": each[name, count] / each["vmap", COUNTS[0]]
                        for name in ("vmap", "auto")
                    },
                }
                for count in COUNTS
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("million", "growth"), default="million")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=4096)
    options = parser.parse_args()
    print(machine())
    if options.part == "growth":
        for start in ("random", "local_first"):
            growth(start)
        return
    rows = [measure(count, options.block) for count in (10_000, options.clients)]
    print(table(rows))
    ratio = rows[1]["cpu µs / client"] / rows[0]["cpu µs / client"]
    print(f"per client, {options.clients:,} against 10,000: {ratio:.2f} × processor time")


if __name__ == "__main__":
    main()
