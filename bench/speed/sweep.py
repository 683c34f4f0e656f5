"""A sweep over 64 step sizes in one call, compared with 64 compiled runs one after another.

python -m bench.speed.sweep
"""

import jax
import jax.numpy as jnp

import jaxfed as jf
from bench.common import machine, table, turns


def main() -> None:
    print(machine())
    rows = []
    steps = jnp.geomspace(1e-3, 5e-2, 64)
    many = jax.vmap(lambda step: jf.pca.PerPCA(2, 10, solver="gradient", step_size=step))(steps)
    each = [jf.pca.PerPCA(2, 10, solver="gradient", step_size=step) for step in steps]
    key = jax.random.key(0)
    for clients_count, samples, features in ((100, 1000, 15), (20, 100, 30)):
        clients = jf.Clients.from_samples(
            jax.random.normal(jax.random.key(1), (clients_count, samples, features))
        )
        one = jax.jit(lambda algorithm, clients: jf.rollout(algorithm, clients, rounds=50, key=key))

        def sequential(one=one, clients=clients):
            return [one(algorithm, clients) for algorithm in each]

        def swept(block, clients=clients):
            return lambda: jf.sweep(many, clients, keys=key, rounds=50, runs_at_once=block)

        measured = turns(
            {"sequential": sequential, "all 64": swept(None), "blocks of 8": swept(8)}, repeats=5
        )
        for name in ("all 64", "blocks of 8"):
            rows.append(
                {
                    "clients, n, d": f"{(clients_count, samples, features)}",
                    "sweep": name,
                    "sweep / sequential, cpu": measured[name]["cpu"]
                    / measured["sequential"]["cpu"],
                    "wall": measured[name]["wall"] / measured["sequential"]["wall"],
                }
            )
    print(table(rows))


if __name__ == "__main__":
    main()
