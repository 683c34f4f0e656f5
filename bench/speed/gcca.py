"""Time a round of quantized MAX-VAR GCCA against its bare products, sparse views and a rival.

python -m bench.speed.gcca [--data DIR]
taskset -c 0 python -m bench.speed.gcca      # on one core: no threads to wake

With `--data DIR`, a folder that contains mfeat/mfeat.npz, and the package cca-zoo installed, the
script also computes the same solution with cca-zoo and compares the times.
"""

import argparse
import resource
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

import jaxfed as jf
from bench.common import machine, table, turns

STEPS = 10
THREE_BITS = jf.channel.difference(jf.channel.quantize(3))


def rounds_of(views: jf.gcca.Views, rank: int, channel, count: int):
    """So many rounds as one compiled function of the views and a start."""
    algorithm = jf.gcca.MaxVar(rank, inner_steps=STEPS)

    @jax.jit
    def run(views, start):
        return jf.rollout(
            algorithm, views, rounds=count, key=jax.random.key(0), warm_start=start, channel=channel
        ).result

    start = jf.Personalized(
        jnp.eye(views.data.shape[0], rank), jnp.ones((len(views), views.features, rank))
    )
    return lambda: run(views, start)


def products_of(views: jf.gcca.Views, rank: int, count: int):
    """What any implementation must multiply in these rounds, and nothing else."""
    x = views.data.values
    moments = x.mT @ x / x.shape[1]

    @jax.jit
    def run(x, moments, shared):
        def round_(shared, _):
            weights = jax.vmap(lambda view: view.T @ shared)(x)
            weights, _ = jax.lax.scan(lambda w, _: (moments @ w, None), weights, length=STEPS)
            return (x @ weights)[0], None

        return jax.lax.scan(round_, shared, length=count)[0]

    return lambda: run(x, moments, 1e-3 * jnp.eye(x.shape[1], rank))


def dense(views: int, entities: int, features: int, rank: int) -> list[dict[str, object]]:
    """Time of one round, by the difference of many rounds and few."""
    keys = jax.random.split(jax.random.key(0), views)
    arrays = [jax.random.normal(key, (entities, features)) for key in keys]
    clients = jf.gcca.Views.from_arrays(arrays)
    few, many = 30, 90
    rivals = {
        f"{name} {count}": make(count)
        for count in (few, many)
        for name, make in {
            "3 bits": lambda n: rounds_of(clients, rank, THREE_BITS, n),
            "lossless": lambda n: rounds_of(clients, rank, jf.channel.lossless(), n),
            "products": lambda n: products_of(clients, rank, n),
        }.items()
    }
    measured = turns(rivals, repeats=9)

    def one(name: str, kind: str) -> float:
        spent = measured[f"{name} {many}"][kind] - measured[f"{name} {few}"][kind]
        return 1e3 * spent / (many - few)

    return [
        {
            "views": f"{views} of {entities} x {features}, rank {rank}",
            "time": kind,
            "products, ms": one("products", kind),
            "lossless round / products": one("lossless", kind) / one("products", kind),
            "3-bit round / products": one("3 bits", kind) / one("products", kind),
        }
        for kind in ("wall", "cpu")
    ]


def sparse(rank: int = 10, rounds: int = 10) -> dict[str, object]:
    """Three sparse views that filled would take 12 GB: memory and time."""
    entities, features, density = 10**5, 10**4, 1e-3
    rng = np.random.default_rng(0)
    shape = (entities, features)
    matrices = [
        scipy.sparse.random_array(shape, density=density, dtype=np.float32, rng=rng)
        for _ in range(3)
    ]
    views = jf.gcca.Views.from_sparse(matrices, center=True)
    start = jf.fit(jf.gcca.MVLSA(rank), views, rounds=1, key=jax.random.key(0))
    algorithm = jf.gcca.MaxVar(rank, inner_steps=STEPS)

    def run():
        return jf.fit(
            algorithm,
            views,
            rounds=rounds,
            key=jax.random.key(0),
            warm_start=start,
            channel=THREE_BITS,
        )

    objective = run().history["objective"]
    measured = turns({"run": run}, repeats=3)["run"]
    return {
        "views": f"3 of {entities} x {features}, {matrices[0].nnz:,} values each",
        "objective, first and last round": f"{objective[0]:.4f} {objective[-1]:.4f}",
        "s a round": measured["wall"] / rounds,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def rival(folder: Path) -> list[dict[str, object]]:
    """The pooled solution of six real views, by this library and by cca-zoo."""
    from cca_zoo.linear import GCCA

    jax.config.update("jax_enable_x64", True)
    arrays, names = jf.data.read_views(folder / "mfeat" / "mfeat.npz")
    arrays = [np.asarray(x, np.float64) for x in arrays]
    arrays = [(x - x.mean(0)) / x.std(0) for x in arrays]
    # It refuses more components than the narrowest view has features: six, of `mor`.
    others = [x for x, name in zip(arrays, names, strict=True) if name != "mor"]
    rows = []
    for rank, chosen in ((5, arrays), (10, others)):
        views = jf.gcca.Views.from_arrays(chosen)
        optimum = jax.jit(jf.gcca.optimum, static_argnums=1)
        exact = jf.gcca.MaxVar(rank)
        found = optimum(views, rank).shared
        theirs = {}
        for floor in (1e-6, 1e-12):
            model = GCCA(rank)
            model._EPS = floor
            model.fit(chosen)
            scores = sum(x @ w for x, w in zip(chosen, model.weights_, strict=True))
            theirs[floor] = jf.gcca.subspace_distance(np.linalg.qr(scores)[0], found)
        key = jax.random.key(0)
        start = jf.fit(jf.gcca.MVLSA(rank), views, rounds=1, key=key)
        start_time = time.perf_counter()
        solution = jf.fit(exact, views, rounds=500, key=key, warm_start=start, tol=1e-14)
        seconds = time.perf_counter() - start_time
        measured = turns(
            {"optimum": partial(optimum, views, rank), "zoo": partial(GCCA(rank).fit, chosen)},
            repeats=3,
        )
        rows.append(
            {
                "views": f"{len(chosen)} of mfeat, rank {rank}",
                "distance to cca-zoo": float(theirs[1e-12]),
                "at its own floor": float(theirs[1e-6]),
                "federated's to the optimum": float(
                    jf.gcca.subspace_distance(solution.result.shared, found)
                ),
                "rounds": solution.rounds,
                "s optimum": measured["optimum"]["wall"],
                "s cca-zoo": measured["zoo"]["wall"],
                "s federated, compilation too": seconds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR")
    options = parser.parse_args()
    print(machine())
    print(table(dense(3, 500, 25, 5) + dense(3, 10_000, 200, 10)))
    print(table([sparse()]))
    if options.data is not None:
        print(table(rival(options.data)))


if __name__ == "__main__":
    main()
