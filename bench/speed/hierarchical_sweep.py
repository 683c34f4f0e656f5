"""The grid of Ozkara, Huang & Diggavi (2023), Figure 1(b), and two other ways to compute it.

The grid is data sets x 8 prior variances x 3 methods (local, global, personalized), with 200
clients, 20 samples of 30 features, and rank 10. The script computes it as one compiled grid in
blocks, and as the same runs one after another through one compiled function. A NumPy loop that is
vectorized over clients is timed on one setting per turn.

python -m bench.speed.hierarchical_sweep [DATA SETS]
"""

import itertools
import sys

import equinox as eqx
import jax

jax.config.update("jax_num_cpu_devices", 2)  # one each for two cores; a run uses but one

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from threadpoolctl import threadpool_limits

import jaxfed as jf
from bench.common import machine, table, turns
from jaxfed.core.sweeps.grid import _block
from papers.hierarchical.descent import GlobalProbabilisticPCA, LocalProbabilisticPCA

CLIENTS, SAMPLES, FEATURES, RANK, NOISE = 200, 20, 30, 10, 0.5
ROUNDS = {"local": 60, "global": 30, "personalized": 100}
DATA_SETS = int(sys.argv[1]) if sys.argv[1:] else 10
AXES = {"prior_variance": np.geomspace(1e-3, 1, 8).astype("float32"), "seed": np.arange(DATA_SETS)}
POINTS = [dict(zip(AXES, point, strict=True)) for point in itertools.product(*AXES.values())]


def drawn(prior_variance, seed):
    return jf.data.hierarchical_synthetic(
        key=jax.random.key(seed),
        clients=CLIENTS,
        features=FEATURES,
        rank=RANK,
        samples=SAMPLES,
        prior_variance=prior_variance,
        noise_variance=NOISE,
    )


def errors(prior_variance, seed, *, solver="gradient"):
    """Errors of the three methods over that of the truth."""
    data = drawn(prior_variance, seed)
    clients = jf.Clients.from_samples(data.samples)
    methods = {
        "local": LocalProbabilisticPCA(RANK, NOISE),
        "global": GlobalProbabilisticPCA(RANK, NOISE),
        "personalized": jf.pca.HierarchicalPCA(RANK, NOISE, prior_variance, solver=solver),
    }
    found = {}
    for name, algorithm in methods.items():
        rounds = 30 if (name, solver) == ("personalized", "eigenvectors") else ROUNDS[name]
        result = jf.rollout(algorithm, clients, rounds=rounds, key=jax.random.key(seed)).result
        frames = result.shared[None] if result.local is None else result.local
        frames = jnp.broadcast_to(frames, data.local.shape)
        found[name] = jf.metrics.expected_reconstruction_error(
            frames, data.local, NOISE, relative=True
        )
    return found


# --- NumPy, vectorised over clients --------------------------------------------------------------


def t(a):
    return np.swapaxes(a, -1, -2)


def polar_svd(w):
    left, _, right = np.linalg.svd(w, full_matrices=False)
    return left @ right


def polar_gram(w):
    """Twice as fast as a singular value decomposition, and half as accurate."""
    values, vectors = np.linalg.eigh(t(w) @ w)
    values = np.maximum(values, 1e-7 * values[..., -1:])  # rounding makes small ones negative
    return w @ (vectors / np.sqrt(values)[..., None, :] @ t(vectors))


def project(x, g):
    inner = t(x) @ g
    return g - x @ ((inner + t(inner)) / 2)


def numpy_errors(samples, truth, variance, polar, rng, eigenvectors=False):
    """The same rounds, the moments formed once."""
    m, n, d = samples.shape
    c = n / (NOISE * (1 + NOISE))
    moments = t(samples) @ samples / n
    largest = np.linalg.eigvalsh(moments)[:, -1]
    mean = moments.mean(0)
    pooled = np.linalg.eigh(mean)[1][:, ::-1][:, :RANK].copy()

    local = np.linalg.qr(rng.standard_normal((m, d, RANK)).astype("float32"))[0]
    steps = (1 / (c * largest)).astype("float32")[:, None, None]
    for _ in range(ROUNDS["local"]):
        local = polar(local + steps * project(local, c * (moments @ local)))

    common, step = pooled, 1 / (c * np.linalg.eigvalsh(mean)[-1])
    for _ in range(ROUNDS["global"]):
        common = polar(common + step * project(common, c * (moments @ common).mean(0)))

    shared, own = pooled, np.broadcast_to(pooled, (m, d, RANK))
    if eigenvectors:
        for _ in range(30):
            joint = c * moments + shared @ shared.T / variance
            own = np.linalg.eigh(joint)[1][:, :, : -RANK - 1 : -1]
            shared = np.linalg.eigh((own @ t(own)).mean(0))[1][:, ::-1][:, :RANK].copy()
    else:
        steps = (1 / (c * largest + 1 / variance)).astype("float32")[:, None, None]
        for _ in range(ROUNDS["personalized"]):
            own = own @ polar(t(own) @ shared)
            gradient = project(shared, own) / variance - c * (moments @ own)
            own = polar(own - steps * project(own, gradient))
            overlap = shared.T @ own
            along = -project(shared, own) @ ((overlap + t(overlap)) / 2)
            shared = polar((shared - project(shared, along)).mean(0))

    def error(frames):
        kept = np.sum((t(frames) @ truth) ** 2, axis=(1, 2)).mean()
        return (RANK - kept + NOISE * (d - RANK)) / (NOISE * (d - RANK))

    return {"local": error(local), "global": error(common[None]), "personalized": error(own)}


def numpy_rivals(solver: str):
    """One setting a call, in turn; by way of the polar factor and number of threads."""
    given = [(point, jax.device_get(drawn(**point))) for point in POINTS[::DATA_SETS]]
    for polar, threads in itertools.product((polar_svd, polar_gram), (1, None)):
        turn, rng = itertools.cycle(given), np.random.default_rng(0)

        def run(polar=polar, threads=threads, turn=turn, rng=rng):
            point, data = next(turn)
            with threadpool_limits(threads, user_api="blas"):
                return numpy_errors(
                    data.samples,
                    data.local,
                    point["prior_variance"],
                    polar,
                    rng,
                    solver == "eigenvectors",
                )

        yield f"NumPy, {polar.__name__[6:]}, {threads or 'all'} threads", run


def memory(solver: str, block: int) -> float:
    """MiB of temporary arrays of the compiled function."""
    point = {name: values[np.zeros(block, int)] for name, values in AXES.items()}
    compiled = _block.lower(Partial(errors, solver=solver), point, jf.backend.vmap()).compile()
    inner = getattr(compiled, "compiled", compiled)
    return inner.memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    print(machine())
    for solver in ("gradient", "eigenvectors"):
        function = Partial(errors, solver=solver)
        one = eqx.filter_jit(lambda function, point: function(**point))

        def sequential(one=one, function=function):
            return [one(function, point) for point in POINTS]

        def swept(block, devices, function=function):
            backend = jf.backend.shard(devices)
            return lambda: jf.grid(function, AXES, runs_at_once=block, backend=backend)

        kinds = {f"blocks of {b}": (b, 1) for b in (1, 4, len(POINTS))}
        kinds |= {f"blocks of {2 * b} on two cores": (2 * b, 2) for b in (1, 4)}
        blocks = {name: block for name, (block, _) in kinds.items()}
        rivals = {"one by one": sequential}
        rivals |= {name: swept(*kind) for name, kind in kinds.items()}
        measured = turns(rivals | dict(numpy_rivals(solver)), repeats=3)
        rows = []
        for kind in ("wall", "cpu"):
            loops = {name: x[kind] for name, x in measured.items() if name.startswith("NumPy")}
            best = {way: min(x for name, x in loops.items() if way in name) for way in WAYS}
            for name in rivals:
                spent = measured[name][kind]
                row = {solver: name, "time": kind, "s a setting": spent / len(POINTS)}
                row["/ one by one"] = spent / measured["one by one"][kind]
                for way in WAYS:
                    row[f"NumPy, {way} /"] = best[way] * len(POINTS) / spent
                row["temporary MiB"] = memory(solver, blocks.get(name, 1))
                rows.append(row)
        print(table(rows))


WAYS = ("svd", "gram")


if __name__ == "__main__":
    main()
