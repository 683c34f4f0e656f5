"""A million clients in bounded memory: one round, and time per client against 10,000 clients.

python bench/many_clients.py [--clients 1000000] [--block 4096]
"""

import argparse
import resource

import jax
import jax.numpy as jnp
from timing import machine, table, turns

import jaxfed as jf


def measure(count: int, block: int) -> dict[str, object]:
    """Time of one round per client, and the process's peak memory so far."""
    samples = jax.random.normal(jax.random.key(1), (count, 16, 32), jnp.float32)
    clients = jf.Clients.from_samples(samples)
    algorithm = jf.pca.PerPCA(4, 4, start="random", step_size=0.05)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=4096)
    options = parser.parse_args()
    print(machine())
    rows = [measure(count, options.block) for count in (10_000, options.clients)]
    print(table(rows))
    ratio = rows[1]["cpu µs / client"] / rows[0]["cpu µs / client"]
    print(f"per client, {options.clients:,} against 10,000: {ratio:.2f} × processor time")


if __name__ == "__main__":
    main()
