"""A steady-state round of PerPCA, compared with the authors' implementation and with bare products.

    python -m bench.speed.perpca_round

`authors_perpca.py` re-creates the authors' implementation: NumPy on one thread, a Python loop over
clients, the second moment recomputed in each round, the polar factor from a full SVD. Plain JAX is
`plain_jax.py`, with QR. The bare products are only the round's own `S_i W`, batched over clients.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

import jaxfed as jf
from bench.common import machine, table, turns
from bench.speed import authors_perpca, plain_jax
from jaxfed.linalg.moments import should_densify

ROUNDS = 20  # per compiled call, so that the call itself does not count


def stepper(algorithm, clients, start):
    """A function that runs `ROUNDS` more rounds, from where the last call ended."""
    run = jax.jit(
        lambda clients, start: jf.rollout(
            algorithm, clients, rounds=ROUNDS, key=jax.random.key(0), warm_start=start
        ),
        compiler_options={"xla_cpu_multi_thread_eigen": clients.features > 64},
    )
    return lambda: run(clients, start)


def bare_products(clients, rank, dense):
    """`ROUNDS` times the products that a round cannot do without."""
    samples = clients.data.values
    count = samples.shape[1]
    w = jax.random.normal(jax.random.key(2), (samples.shape[0], clients.features, rank))
    moments = jnp.einsum("mnd,mne->mde", samples, samples) / count if dense else None

    @jax.jit
    def run(samples, moments, w):
        def product(w, _):
            if dense:
                return jnp.matmul(moments, w), None
            return jnp.matmul(samples.mT, jnp.matmul(samples, w)) / count, None

        return jax.lax.scan(product, w, length=ROUNDS)[0]

    return lambda: run(samples, moments, w)


def main() -> None:
    threadpool_limits(1, user_api="blas")
    print(machine())
    rows = []
    for m, n, d, r1, r2 in ((100, 1000, 15, 2, 10), (100, 200, 100, 5, 5), (50, 120, 784, 10, 10)):
        samples = np.random.default_rng(0).standard_normal((m, n, d)).astype(np.float32)
        clients = jf.Clients.from_samples(samples)
        step = 0.5 / float(n / d)
        start = jf.fit(
            jf.pca.PerPCA(r1, r2, solver="gradient", step_size=step, start="random"),
            clients,
            rounds=2,
            key=jax.random.key(0),
        ).result
        # Long runs form the d × d moments once; the choice is the library's own rule.
        prepared = jf.Clients.from_samples(samples)
        dense = should_densify(n, d, r1 + r2, 1000)
        if dense:
            moments = jnp.einsum("mnd,mne->mde", samples, samples) / n
            prepared = jf.Clients.from_moments(np.asarray((moments + moments.mT) / 2))
        ours = stepper(jf.pca.PerPCA(r1, r2, solver="gradient", step_size=step), prepared, start)
        bare = bare_products(clients, r1 + r2, dense)
        double = [y.astype(np.float64) for y in samples]
        shared = np.asarray(start.shared, np.float64)
        local = list(np.asarray(start.local, np.float64))

        def authors(with_loss, double=double, shared=shared, local=local, step=step):
            return lambda: authors_perpca.authors_round(double, shared, local, step, with_loss)

        plain = partial(plain_jax.perpca, jnp.asarray(samples), *start, step, ROUNDS)

        fast = turns({"ours": ours, "plain": plain, "bare": bare})
        slow = turns({"plain": authors(False), "loss": authors(True)}, repeats=3)
        for clock in ("cpu", "wall"):
            mine = fast["ours"][clock] / ROUNDS
            rows.append(
                {
                    "clients, n, d, r1, r2": f"{(m, n, d, r1, r2)}",
                    "clock": clock,
                    "ours ms": 1e3 * mine,
                    "authors / ours": slow["plain"][clock] / mine,
                    "plain JAX / ours": fast["plain"][clock] / fast["ours"][clock],
                    "with loss": slow["loss"][clock] / mine,
                    "ours / bare products": mine / (fast["bare"][clock] / ROUNDS),
                    "moment": "matrix" if dense else "samples",
                }
            )
    print(table(rows))


if __name__ == "__main__":
    main()
