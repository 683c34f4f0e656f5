"""Tables of rounds and errors of PCA algorithms, each made within minutes.

    python -m bench.tables.pca variants        # the two updates of PerPCA on noisy digits
    python -m bench.tables.pca eigensolvers    # rounds of BlockLanczos and subspace iteration
    python -m bench.tables.pca shrinkage       # which shared components are the true ones
    python -m bench.tables.pca optimum         # rounds of gradient descent, variable projection
    python -m bench.tables.pca scales          # rounds if one client's data have a larger scale

The last argument, if given, is the first of the seeds; the default is 0.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table
from jaxfed.cli import demo
from jaxfed.data import perpca_synthetic
from papers.synthetic import PERPCA_SETTINGS

Row = dict[str, object]


def variants(seed: int, rounds: int = 1000) -> list[Row]:
    """Per cent of the training energy that is left on the demo's digits, from one shot."""
    key = jax.random.key(seed)
    clients = jf.Clients.from_samples(demo.load_digits(key).train)
    ranks = demo.SHARED_RANK, demo.LOCAL_RANK
    start = jf.fit(jf.pca.OneShot(*ranks), clients, rounds=1, key=key)
    cases = {
        "tangent": (jf.pca.PerPCA(*ranks, solver="gradient"), rounds),
        "polar, step size 1": (
            jf.pca.PerPCA(*ranks, solver="gradient", variant="polar", step_size=1.0),
            rounds,
        ),
        "polar, step size 10": (
            jf.pca.PerPCA(*ranks, solver="gradient", variant="polar", step_size=10.0),
            rounds,
        ),
        "variable projection": (jf.pca.PerPCA(*ranks), 60),
    }
    return [
        {
            "update": name,
            "rounds": length,
            "residual, %": round(left(algorithm, clients, length, key, start), 1),
        }
        for name, (algorithm, length) in cases.items()
    ]


def left(algorithm, clients, rounds, key, start) -> float:
    """Per cent of the samples' energy that a run leaves."""
    result = jf.fit(algorithm, clients, rounds=rounds, key=key, warm_start=start).result
    values, count = clients.data.values, clients.data.count
    rest = values - values @ result.shared @ result.shared.T
    rest = rest - values @ result.local @ result.local.mT
    share = [jnp.sum(x**2, axis=(1, 2)) / count for x in (rest, values)]
    return 100 * float(share[0].mean() / share[1].mean())


def eigensolvers(seed: int, starts: int = 3) -> list[Row]:
    """Rounds by rule (27), as one client with the pooled matrix, which is exact for sums."""
    jax.config.update("jax_enable_x64", True)
    geometric = [(10, 500, 1 + 10**-x) for x in (1, 1.5, 2)] + [(20, 500, 1.01), (40, 500, 1.01)]
    rows: list[Row] = []
    for rank, features, ratio in geometric:
        pooled = jnp.diag(ratio ** (-2.0 * jnp.arange(features)))
        clients = jf.Clients.from_moments(pooled[None])
        row: Row = {"p": rank, "ratio": round(ratio, 4)}
        for name, algorithm in (
            ("BlockLanczos", jf.pca.BlockLanczos(rank)),
            ("SubspaceIteration", jf.pca.SubspaceIteration(rank, stop="objective")),
        ):
            keys = jax.random.split(jax.random.key(seed), starts)
            run = partial(jf.rollout, algorithm, clients, rounds=500, tol=1e-10)
            solution = jax.jit(jax.vmap(lambda key, run=run: run(key=key)))(keys)
            # A round reports the objective of the round before.
            counts = np.sort(np.asarray(solution.rounds) - 1)
            row[name] = f"{counts[0]} to {counts[-1]}"
            if name == "BlockLanczos":
                kkt = jax.vmap(
                    lambda z, pooled=pooled: jf.metrics.scaled_kkt_violation(
                        jf.Personalized(z, None), jnp.linalg.cholesky(pooled).T[None]
                    )
                )(solution.result.shared)
                row["its KKT"] = f"{float(kkt.max()):.0e}"
        rows.append(row)
    return rows


def shrinkage(seed: int, draws: int = 2) -> list[Row]:
    """Squared distance of the shared components from the true ones, at most 4."""
    settings = {
        "published Table 2, n = 500": dict(PERPCA_SETTINGS["table2_published"])
        | {"samples": (50,) * 50 + (500,) * 50},
        "published Table 2, n = 100": dict(PERPCA_SETTINGS["table2_published"])
        | {"samples": (10,) * 50 + (100,) * 50},
        "Table 2, well-posed": dict(PERPCA_SETTINGS["table2"]),
        "Figure 4, well-posed": dict(PERPCA_SETTINGS["figure4"]),
        "ten groups (Figure 9)": dict(PERPCA_SETTINGS["figure9"]),
        "Figure 4, shared 4, local 1": dict(PERPCA_SETTINGS["figure4"])
        | {"shared_scale": 2.0, "local_scale": 1.0},
        "as in the text, shared 1, local 100": dict(PERPCA_SETTINGS["table2_published"])
        | {"shared_scale": 1.0, "local_scale": 10.0},
    }
    rows: list[Row] = []
    for name, law in settings.items():
        ranks = law["shared_rank"], law["local_rank"]
        candidates = [
            jf.pca.PerPCA(*ranks),
            jf.pca.PerPCA(*ranks, solver="gradient", shrinkage=True),
        ]
        errors, apart, chosen = [], [], []
        for draw in range(draws):
            key = jax.random.key(seed + draw)
            data = perpca_synthetic(key=key, **law)
            clients = jf.Clients.from_samples(data.samples)
            errors.append(
                [
                    float(jf.metrics.projector_distance(found.result.shared, data.shared))
                    for found in (jf.fit(a, clients, rounds=300, key=key) for a in candidates)
                ]
            )
            best, disagreement = jf.pca.split_half(candidates, clients, rounds=300, key=key)
            apart.append([float(x) for x in disagreement])
            chosen.append(("plain", "shrinkage")[best])
        plain, shrunk = np.asarray(errors).T
        halves = np.asarray(apart).T
        rows.append(
            {
                "setting": name,
                "plain optimum": listed(plain),
                "shrinkage": listed(shrunk),
                "halves, plain / shrunk": f"{listed(halves[0])} / {listed(halves[1])}",
                "split_half chooses": ", ".join(dict.fromkeys(chosen)),
            }
        )
    return rows


def optimum(seed: int, draws: int = 2, relative: float = 1e-8) -> list[Row]:
    """Rounds to the least objective, of gradient descent by its best step size and without one."""
    jax.config.update("jax_enable_x64", True)
    rows: list[Row] = []
    for name in ("table2", "figure4"):
        law = PERPCA_SETTINGS[name]
        ranks = law["shared_rank"], law["local_rank"]
        for method in ("random", "spectrum"):
            found: dict[str, list[int]] = {"gradient descent": [], "variable projection": []}
            for draw in range(draws):
                key = jax.random.key(seed + draw)
                data = perpca_synthetic(key=key, **law, dtype=jnp.float64)
                clients = jf.Clients.from_samples(data.samples)
                moments = [y.T @ y / len(y) for y in data.samples]
                largest = max(float(jnp.linalg.eigvalsh(s)[-1]) for s in moments)
                if method == "spectrum":
                    once = jf.pca.OneShot(*ranks, method="spectrum")
                    start = jf.fit(once, clients, rounds=1, key=key).result
                else:
                    drawn = jax.random.normal(key, (len(moments), len(moments[0]), sum(ranks)))
                    frames = jnp.linalg.qr(drawn)[0]
                    start = jf.Personalized(frames[0, :, : ranks[0]], frames[:, :, ranks[0] :])

                def curve(algorithm, rounds, clients=clients, key=key, start=start):
                    run = jf.fit(algorithm, clients, rounds=rounds, key=key, warm_start=start)
                    return np.asarray(run.history["objective"])

                descents = [
                    curve(jf.pca.PerPCA(*ranks, solver="gradient", step_size=step / largest), 1500)
                    for step in (0.5, 1.0, 1.5, 1.9)
                ]
                fast = curve(jf.pca.PerPCA(*ranks, local_penalty=0.0), 60)
                least = min(fast.min(), *(slow.min() for slow in descents))
                enough = least + relative * abs(least)
                rounds = [np.flatnonzero(one <= enough) for one in (*descents, fast)]
                *slow, ours = (int(at[0]) + 1 if len(at) else 10**6 for at in rounds)
                found["gradient descent"].append(min(slow))
                found["variable projection"].append(ours)
            counts = {of: f"{min(n)} to {max(n)}" for of, n in found.items()}
            rows.append({"setting": name, "start": method, **counts})
    return rows


def scales(seed: int, rounds: int = 3000) -> list[Row]:
    """Rounds to within 1e-3 of the least objective where one client's data are multiplied."""
    key = jax.random.key(seed)
    law = {"clients": 100, "features": 30, "shared_rank": 3, "local_rank": 5, "samples": 60}
    data = perpca_synthetic(key=key, **law, noise_variance=0.09, local="random", rotate=True)
    digits = demo.load_digits(key).train
    rows: list[Row] = []
    for name, samples, ranks, truth, factors in (
        ("synthetic", data.samples, (3, 5), data.shared, (1, 10, 100)),
        ("digits", digits, (demo.SHARED_RANK, demo.LOCAL_RANK), None, (1, 10)),
    ):
        for factor in factors:
            arrays = [np.asarray(y) * (factor if i == 0 else 1) for i, y in enumerate(samples)]
            clients = jf.Clients.from_samples(arrays)
            runs = {
                "PerPCA, gradient": jf.pca.PerPCA(*ranks, solver="gradient"),
                "power": jf.pca.PerPCA(*ranks, solver="gradient", variant="power"),
                # The objective of the others, to whose least value all are compared.
                "PerPCA": jf.pca.PerPCA(*ranks, local_penalty=0.0),
            }
            found = {of: jf.fit(a, clients, rounds=rounds, key=key) for of, a in runs.items()}
            curves = {of: np.asarray(s.history["objective"], float) for of, s in found.items()}
            least = min(curve.min() for curve in curves.values())
            row: Row = {"clients": name, "times": factor}
            for of, curve in curves.items():
                near = np.flatnonzero(curve <= 1.001 * least)
                row[of] = int(near[0]) if len(near) else f"gap {curve[-1] / least - 1:.1g}"
                if truth is not None:
                    early = jf.fit(runs[of], clients, rounds=150, key=key).result
                    away = float(jf.metrics.projector_distance(early.shared, truth)) / 2
                    row[of] = f"{row[of]}; {away:.2g}"
            rows.append(row)
    return rows


def listed(values: np.ndarray) -> str:
    """Each in two digits."""
    return ", ".join(f"{value:.2g}" for value in values)


def main() -> None:
    """Print a table."""
    parts = (variants, eigensolvers, shrinkage, optimum, scales)
    chosen = choose({part.__name__: part for part in parts}, __doc__)
    print(machine(), f"seed {chosen.seed}", sep=", ")
    print(table(chosen.part(chosen.seed)))


if __name__ == "__main__":
    main()
