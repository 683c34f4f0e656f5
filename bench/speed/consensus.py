"""Rounds of the federated eigensolvers against their bare products, and whole solves against
scikit-learn on the pooled data.

    python -m bench.speed.consensus rounds
    python -m bench.speed.consensus solves     # needs scikit-learn

The time of a round is the difference between compiled calls with many rounds and with few. Its bare
products are only the batched products with the clients' matrices that it cannot avoid: one for
`BlockLanczos`, six for `FAPS` (five local steps, the captured energy). They use
the samples or the matrices, as the round does. In `rounds`, LAPACK has one thread: on a few busy
cores, its threads and those of the products wait for each other, which at least doubles the time of
a round.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

import jaxfed as jf
from bench.common import choose, machine, table, turns

ROUNDS = 10


def draw(clients, samples, features, decay=1.01, seed=0):
    """Centred clients whose standard deviations decay geometrically, in single precision."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.standard_normal((features, features)))[0].astype(np.float32)
    scores = rng.standard_normal((clients * samples, features), dtype=np.float32)
    scores *= decay ** -np.arange(features, dtype=np.float32)
    pooled = scores @ rotation
    return (pooled - pooled.mean(0)).reshape(clients, samples, features)


def rounds(algorithm, clients, count):
    """A function that runs so many rounds."""
    run = jax.jit(
        lambda clients: jf.rollout(algorithm, clients, rounds=count, key=jax.random.key(0)).result
    )
    return lambda: run(clients)


def bare_products(moments, features, rank, products):
    """The same number of products, one after the other, summed over clients once a round."""
    w = jax.random.normal(jax.random.key(2), (features, rank))

    @jax.jit
    def several(moments, w):
        def one_round(w, _):
            own = jnp.broadcast_to(w, (len(moments.trace), *w.shape))
            for _ in range(products):
                own = jax.vmap(lambda m, x: m.mv(x))(moments, own)
            return own.sum(0), None

        return jax.lax.scan(one_round, w, length=ROUNDS)[0]

    return lambda: several(moments, w)


def rounds_against_products():
    threadpool_limits(1, user_api="blas")
    rows = []
    for m, n, d, rank in ((8, 4500, 1000, 10), (16, 3750, 784, 5)):
        samples = draw(m, n, d)
        matrices = jnp.einsum("mnd,mne->mde", samples, samples) / n
        matrices = (matrices + matrices.mT) / 2
        given = {
            "samples": (
                jf.Clients.from_samples(samples),
                jax.vmap(jf.linalg.Moment.from_samples)(samples),
            ),
            "matrices": (
                jf.Clients.from_moments(matrices, counts=[n] * m),
                jax.vmap(jf.linalg.Moment.from_dense)(matrices, jnp.full(m, float(n))),
            ),
        }
        for algorithm, kind, products in (
            (jf.pca.BlockLanczos(rank), "samples", 1),
            (jf.pca.BlockLanczos(rank), "matrices", 1),
            (jf.pca.FAPS(rank, stop="objective"), "matrices", 6),
        ):
            clients, moments = given[kind]
            rivals = {
                str(count): rounds(algorithm, clients, count) for count in (ROUNDS, 2 * ROUNDS)
            }
            rivals["bare"] = bare_products(moments, d, rank, products)
            measured = turns(rivals, repeats=25)
            # The difference is rounds alone, without the start.
            ours = {
                c: measured[str(2 * ROUNDS)][c] - measured[str(ROUNDS)][c] for c in ("wall", "cpu")
            }
            rows.append(
                {
                    "clients, n, d, p": f"{(m, n, d, rank)}",
                    "round of": type(algorithm).__name__,
                    "from": kind,
                    "ms": 1e3 * ours["wall"] / ROUNDS,
                    "/ products, wall": ours["wall"] / measured["bare"]["wall"],
                    "/ products, cpu": ours["cpu"] / measured["bare"]["cpu"],
                }
            )
    print(table(rows))


def solves_against_scikit_learn(m=8, n=4500, d=1000, rank=10):
    from sklearn.decomposition import PCA, IncrementalPCA

    samples = draw(m, n, d)
    pooled = samples.reshape(-1, d)
    double = pooled.astype(np.float64)
    values, vectors = np.linalg.eigh(double.T @ double)
    truth, best = vectors[:, -rank:], values[-rank:].sum()
    clients = jf.Clients.from_samples(samples)

    def ours(algorithm, rounds, tol):
        solution = jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0), tol=tol)
        return np.asarray(solution.result.shared), f"{solution.rounds} rounds"

    def theirs(estimator):
        return estimator.fit(pooled).components_.T, "pooled"

    rivals = {
        "BlockLanczos, tol 1e-5": lambda: ours(jf.pca.BlockLanczos(rank), 100, 1e-5),
        "BlockLanczos, tol 1e-7": lambda: ours(jf.pca.BlockLanczos(rank), 100, 1e-7),
        "scikit-learn full": lambda: theirs(PCA(rank, svd_solver="full")),
        "scikit-learn covariance_eigh": lambda: theirs(PCA(rank, svd_solver="covariance_eigh")),
        "scikit-learn randomized": lambda: theirs(
            PCA(rank, svd_solver="randomized", random_state=0)
        ),
        "scikit-learn IncrementalPCA": lambda: theirs(IncrementalPCA(rank, batch_size=4500)),
    }
    rows = []
    for name, rival in rivals.items():
        rival() if "Lanczos" in name else None  # compilation does not count
        cpu, start = time.process_time(), time.perf_counter()
        z, how = rival()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        z = np.linalg.qr(z.astype(np.float64))[0]
        product = double.T @ (double @ z)
        rows.append(
            {
                "solver": name,
                "data": how,
                "wall s": wall,
                "cpu s": cpu,
                "projector error": float(np.linalg.norm(z @ z.T - truth @ truth.T)),
                "energy missed": float(1 - np.vdot(z, product) / best),
                "scaled KKT": float(np.linalg.norm(product - z @ (z.T @ product)) / values.sum()),
            }
        )
    print(table(rows))


if __name__ == "__main__":
    parts = {"rounds": rounds_against_products, "solves": solves_against_scikit_learn}
    chosen = choose(parts, __doc__)
    print(machine())
    chosen.part()
