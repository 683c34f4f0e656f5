"""Distance of personalized PCA from the true shared components, by its start and by shrinkage.

    python -m bench.tables.sharing start
    python -m bench.tables.sharing shrinkage

`start`: a hundred clients have a hundred samples of 15 features, with two shared components of
variance 1, ten local ones of variance 100, and noise of variance 0.5. A cell contains the smallest
and the largest distance ‖P_U − P‖² over the seeds, which is at most 4, or one number if both round
to it.

`shrinkage`: what `PerPCA(solver="gradient", shrinkage=True)` changes. The variance of the two
shared components is 2 times that of the noise, and 9 times in the last row, which starts from
`OneShot`. A cell contains
the sine of the largest angle to the true components, without / with shrinkage, as means of three
seeds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table

SHARED = 2


class Setting(NamedTuple):
    """Clients, and how they are solved."""

    clients: int
    features: int
    local_rank: int
    shared_scale: float
    local_scale: float
    noise_variance: float
    rounds: int
    from_one_shot: bool = False


def drawn(key: jax.Array, setting: Setting, samples: int) -> tuple[jf.Clients, jax.Array]:
    """Clients of a setting, and their true shared components."""
    data = jf.data.perpca_synthetic(
        key=key,
        clients=setting.clients,
        features=setting.features,
        shared_rank=SHARED,
        local_rank=setting.local_rank,
        samples=samples,
        shared_scale=setting.shared_scale,
        local_scale=setting.local_scale,
        noise_variance=setting.noise_variance,
    )
    return jf.Clients.from_samples(data.samples), data.shared


# --- by the start --------------------------------------------------------------------------------

SEEDS, ROUNDS = 5, (1, 100, 1000)
FAR = Setting(100, 15, 10, 1.0, 10.0, 0.5, max(ROUNDS))


def starts() -> dict[str, tuple[jf.pca.PerPCA, jf.pca.OneShot | None]]:
    """What is run, and the algorithm whose result it starts from."""
    ranks = SHARED, FAR.local_rank
    perpca = jf.pca.PerPCA(*ranks, solver="gradient")
    once = {method: jf.pca.OneShot(*ranks, method=method) for method in ("projector", "spectrum")}
    return {
        '`PerPCA(solver="gradient", start="common")`, the default': (perpca, None),
        '`PerPCA(solver="gradient", start="local_first")`': (
            jf.pca.PerPCA(*ranks, solver="gradient", start="local_first"),
            None,
        ),
        **{
            f'`warm_start=` of `OneShot(method="{method}")`': (perpca, algorithm)
            for method, algorithm in once.items()
        },
        '`PerPCA(solver="gradient", start="random")`': (
            jf.pca.PerPCA(*ranks, solver="gradient", start="random"),
            None,
        ),
    }


def distances(algorithm: jf.pca.PerPCA, before: jf.pca.OneShot | None) -> np.ndarray:
    """From the true shared components, `(seeds, rounds)`."""

    @jax.jit
    @jax.vmap
    def solve(key):
        draw, run = jax.random.split(key)
        clients, shared = drawn(draw, FAR, 100)
        start = None
        if before is not None:
            start = jf.rollout(before, clients, rounds=1, key=run).result
        found = [
            jf.rollout(algorithm, clients, rounds=rounds, key=run, warm_start=start).result.shared
            for rounds in ROUNDS
        ]
        truth = shared @ shared.T
        return jnp.stack([jnp.sum((u @ u.T - truth) ** 2) for u in found])

    return np.asarray(solve(jax.random.split(jax.random.key(0), SEEDS)))


def spread(values: np.ndarray) -> str:
    """The least and the largest, in two digits."""
    low, high = f"{values.min():.2g}", f"{values.max():.2g}"
    return low if low == high else f"{low} to {high}"


def start() -> list[dict[str, object]]:
    """One row a start, one column a number of rounds."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name, given in starts().items():
        cells = distances(*given)
        counts = {f"{n} round{'s' * (n > 1)}": spread(cells[:, i]) for i, n in enumerate(ROUNDS)}
        rows.append({"start": name, **counts})
    return rows


# --- with and without shrinkage ------------------------------------------------------------------

SETTINGS = (
    Setting(60, 15, 10, 1.0, 10.0, 0.5, 1000),
    Setting(60, 15, 2, 1.0, 3.0, 0.5, 1000),
    Setting(60, 15, 10, 1.0, 1.0, 0.5, 1000),
    Setting(20, 200, 2, 1.0, 3.0, 0.5, 300),
    Setting(20, 200, 2, 3.0, 2.0, 1.0, 300, from_one_shot=True),
)


def sine(setting: Setting, samples: int, seed: int, shrinkage: bool) -> float:
    """Of the largest angle to the true shared components."""
    key = jax.random.key(seed)
    clients, shared = drawn(key, setting, samples)
    ranks, first = (SHARED, setting.local_rank), None
    if setting.from_one_shot:
        first = jf.fit(jf.pca.OneShot(*ranks), clients, rounds=1, key=key)
    algorithm = jf.pca.PerPCA(*ranks, solver="gradient", shrinkage=shrinkage)
    found = jf.fit(algorithm, clients, rounds=setting.rounds, key=key, warm_start=first)
    basis = found.result.shared
    return float(jnp.linalg.norm(shared - basis @ (basis.T @ shared), 2))


def shrinkage() -> list[dict[str, object]]:
    """One row a setting, one column a number of samples."""
    rows = []
    for each in SETTINGS:
        ratio = each.local_scale**2 / each.noise_variance
        name = f"{each.features}, {each.local_rank}, {ratio:.0f}, {each.clients}, {each.rounds}"
        cells: dict[str, object] = {
            "features, local components, their variance, clients, rounds": name
        }
        for samples in (20, 80, 320):
            means = [
                np.mean([sine(each, samples, seed, shrunk) for seed in range(3)])
                for shrunk in (False, True)
            ]
            cells[f"{samples} samples"] = " / ".join(f"{mean:.2f}" for mean in means)
        rows.append(cells)
    return rows


if __name__ == "__main__":
    chosen = choose({"start": start, "shrinkage": shrinkage}, __doc__)
    print(machine())
    print(table(chosen.part()))
