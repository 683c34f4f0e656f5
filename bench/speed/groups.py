"""Cost of a round with groups of clients and a robust aggregate instead of a mean.

    python -m bench.speed.groups

One round of `PerPCA(4, 4, solver="gradient")` with a hundred thousand clients, each with 16 samples
of 32 features. Processor time; medians of the ratios within each turn.
"""

import jax
import numpy as np

import jaxfed as jf
from bench.common import every_turn, machine, table

CLIENTS, FEATURES, GROUPS, ROUNDS = 100_000, 32, (10, 50, 200), 5


def row(samples: int, backend: jf.backend.Backend, name: str) -> dict[str, object]:
    """The mean's time, and how many times as much each number of groups takes."""
    values = np.random.default_rng(0).standard_normal((CLIENTS, samples, FEATURES), np.float32)
    clients = jf.Clients.from_samples(values)
    algorithm = jf.pca.PerPCA(4, 4, solver="gradient", start="random", step_size=0.05)
    rivals = {"mean": algorithm}
    rivals |= {f"{k} groups": jf.aggregation.Robust(algorithm, groups=k) for k in GROUPS}

    @jax.jit
    def run(algorithm, clients):
        return jf.rollout(
            algorithm, clients, rounds=ROUNDS, key=jax.random.key(0), backend=backend
        ).result.shared

    taken = every_turn(
        {k: lambda algorithm=a: run(algorithm, clients) for k, a in rivals.items()}, 7
    )
    mean = taken.pop("mean")["cpu"]
    ratios = {k: float(np.median(times["cpu"] / mean)) for k, times in taken.items()}
    return {
        "samples": samples,
        "backend": name,
        "mean, µs a client and round": 1e6 * float(np.median(mean)) / CLIENTS / ROUNDS,
        **ratios,
    }


if __name__ == "__main__":
    print(machine())

    backends = {"chunks of 1,024": jf.backend.chunked(1024), "vmap": jf.backend.vmap()}
    print(table([row(16, backend, name) for name, backend in backends.items()]))
