"""Measure what components lose by noise that protects persons.

    python -m bench.tables.release expected
    python -m bench.tables.release synthetic
    python -m bench.tables.release real

`expected`: the error of shared components from moments of `jf.privacy.release_moments`, as
`jf.privacy.expected_error` predicts it and as measured, the root mean square over four draws.

`synthetic`: the same error by what a row contributes and by epsilon, over six draws, for normal
samples and for samples of a t distribution with three degrees of freedom. Clipping has the true
quantiles of the lengths.

`real`: the share of variance that five components from released moments explain, of what the best
five do, over ten draws: with noise once on the whole, with noise that twelve clients share under
masks, and with noise of its own at each of twelve clients. The data are scikit-learn's, divided by
their deviations, digits by 16. Pairs need no centre; the others have the true one, and clipping the
true quantile of 95 %. In a column, all numbers are of one epsilon.

Delta is 1e-5. The errors are √(r₁ - ‖UᵀÛ‖²).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from sklearn import datasets

import jaxfed as jf
from bench.common import choose, machine, table
from jaxfed.core.clients.guarantee import Neighbours, Rows

DELTA = 1e-5
EPSILONS = 0.1, 0.3, 1.0, 3.0, 10.0
CLIENTS, RANK, DRAWS = 12, 5, 10
REAL = {
    "digits": datasets.load_digits,
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
}


class Setting(NamedTuple):
    """Clients with common and own components in noise, and a release of their moments."""

    clients: int
    persons: int  # of each
    features: int
    shared: tuple[float, ...]  # variances
    local: tuple[float, ...]
    noise: float
    epsilon: float | None
    rows: Rows
    neighbours: Neighbours = "replace"
    bound: float | None = None
    degrees: int | None = None  # of the t distribution

    def __str__(self) -> str:
        shared, local = (" ".join(f"{x:g}" for x in part) for part in (self.shared, self.local))
        size = f"{self.clients} x {self.persons} x {self.features}"
        return f"{size}, {shared} + {local or 'none'} in {self.noise:g}"

    def expected(self) -> float:
        """The error to expect of normal samples."""
        return jf.privacy.expected_error(
            self.persons,
            self.features,
            self.clients,
            shared_variances=self.shared,
            local_variances=self.local,
            noise_variance=self.noise,
            epsilon=self.epsilon,
            delta=DELTA,
            rows=self.rows,
            neighbours=self.neighbours,
            bound=self.bound,
        )

    def measured(self, draws: int, seed: int) -> float:
        """The root mean square error over draws of samples and noise."""
        return float(np.sqrt(np.mean([self._error(seed + i) ** 2 for i in range(draws)])))

    def samples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The clients' samples, and the shared components."""
        rng = np.random.default_rng(seed)
        basis = np.linalg.qr(rng.normal(size=(self.features, len(self.shared))))[0]
        found = []
        for _ in range(self.clients):
            own = rng.normal(size=(self.features, len(self.local)))
            known = np.linalg.qr(np.concatenate([basis, own], axis=1))[0]
            known[:, : len(self.shared)] = basis
            deviations = np.sqrt([*self.shared, *self.local])
            along = rng.normal(size=(self.persons, len(deviations))) * deviations
            rest = rng.normal(size=(self.persons, self.features))
            rest -= rest @ known @ known.T
            x = along @ known.T + np.sqrt(self.noise) * rest
            if self.degrees:
                chi = rng.chisquare(self.degrees, size=(self.persons, 1))
                x /= np.sqrt(chi / self.degrees)
            found.append(x.astype(np.float32))
        return np.stack(found), basis

    def _error(self, seed: int) -> float:
        samples, basis = self.samples(seed)
        clients, key = jf.Clients.from_samples(samples), jax.random.key(seed)
        if self.epsilon is not None:
            clients = jf.privacy.release_moments(
                clients,
                epsilon=self.epsilon,
                delta=DELTA,
                rows=self.rows,
                bound=self.bound,
                neighbours=self.neighbours,
                key=key,
            )
        ranks = len(self.shared), len(self.local)
        algorithm = jf.pca.PerPCA(*ranks) if self.local else jf.pca.Pooled(ranks[0])
        shared = jf.fit(algorithm, clients, rounds=100, key=key).result.shared
        captured = np.sum((basis.T @ np.asarray(shared, np.float64)) ** 2)
        return float(np.sqrt(max(0.0, ranks[0] - captured)))


def lengths(setting: Setting, seed: int) -> np.ndarray:
    """The lengths of all samples."""
    return np.linalg.norm(setting.samples(seed)[0], axis=-1).ravel()


SETTINGS = [
    Setting(12, 500, 20, (4, 4), (2.25, 2.25), 0.09, 1.0, "pairs"),
    Setting(12, 500, 20, (4, 4), (2.25, 2.25), 0.09, 0.3, "pairs"),
    Setting(12, 500, 20, (4, 4), (2.25, 2.25), 0.09, 3.0, "clip", bound=4.0),
    Setting(40, 1000, 40, (4, 4), (2.25, 2.25), 0.09, 1.0, "pairs"),
    Setting(5, 2000, 10, (3, 2, 1), (1,), 0.2, 1.0, "pairs"),
    Setting(20, 300, 15, (2,), (1, 1), 0.1, 1.0, "pairs"),
    Setting(30, 1000, 50, (5, 3, 2), (4,), 0.05, 2.0, "pairs"),
    Setting(8, 5000, 30, (1, 1), (1, 1), 0.5, 1.0, "pairs"),
    Setting(8, 500, 12, (4, 4), (), 0.3, 1.0, "pairs"),
    Setting(1, 500, 12, (4, 4), (), 0.3, 1.0, "pairs"),
    Setting(2, 3000, 16, (4, 2), (2,), 0.3, 1.0, "directions"),
    Setting(50, 200, 25, (6,), (2, 2), 0.02, 3.0, "directions"),
    Setting(3, 20000, 60, (4, 3, 2, 1), (1, 0.5), 0.01, 0.5, "pairs"),
]


def expected(seed: int) -> Iterator[dict[str, object]]:
    """Settings with both errors."""
    for setting in SETTINGS:
        measured, predicted = setting.measured(4, seed), setting.expected()
        yield {
            "setting": setting,
            "rows": setting.rows,
            "epsilon": setting.epsilon,
            "expected": predicted,
            "measured": measured,
            "ratio": f"{measured / predicted:.2f}",
        }


def synthetic(seed: int) -> Iterator[dict[str, object]]:
    """Errors by what a row contributes, adding or removing a person."""
    first = Setting(
        12, 500, 20, (4, 4), (2.25, 2.25), 0.09, None, "directions", neighbours="add_remove"
    )
    larger = first._replace(clients=40, persons=1000, features=40)
    for setting in (first, first._replace(degrees=3), larger):
        long = lengths(setting, 1000 + seed)
        kinds: list[tuple[str, dict]] = [
            ("clip, 90 %", {"rows": "clip", "bound": float(np.quantile(long, 0.9))}),
            ("clip, median", {"rows": "clip", "bound": float(np.median(long))}),
            ("directions", {}),
            ("pairs", {"rows": "pairs"}),
        ]
        for name, options in kinds:
            size = f"{setting.clients} x {setting.persons} x {setting.features}"
            size += ", t with 3" if setting.degrees else ""
            row: dict[str, object] = {"samples, rows": f"{size}, {name}"}
            for epsilon in (1e6, *EPSILONS[1:4]):
                title = "hardly any noise" if epsilon > 1e3 else f"{epsilon:g}"
                row[title] = setting._replace(epsilon=epsilon, **options).measured(6, seed)
            yield row


@functools.cache
def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows divided by a scale, and their centre."""
    x = REAL[name]().data
    x = x / 16 if name == "digits" else x / x.std(axis=0)
    return x, x.mean(axis=0)


def share(
    name: str,
    rows: Rows,
    neighbours: Neighbours,
    clients: int,
    sharers: int,
    epsilon: float,
    seed: int,
) -> float:
    """The share of what the best components explain."""
    x, centre = _data(name)
    centred = x - centre
    given = x if rows == "pairs" else centred
    bound = float(np.quantile(np.linalg.norm(centred, axis=1), 0.95))
    rng = np.random.default_rng(seed)
    parts = np.array_split(given[rng.permutation(len(x))].astype(np.float32), clients)
    released = jf.privacy.release_moments(
        jf.Clients.from_samples(parts),
        epsilon=epsilon,
        delta=DELTA,
        rows=rows,
        bound=bound if rows == "clip" else None,
        neighbours=neighbours,
        sharers=sharers,
        key=jax.random.key(seed),
    )
    channel = jf.channel.lossless()
    if sharers > 1:  # longest: a row of length `bound`, counted by all persons
        most = 4.0 * len(x) * max(1.0, bound**2 if rows == "clip" else 1.0)
        channel = jf.Wire(jf.channel.secure_sum(clients, bits=32, bound=most), channel)
    solution = jf.fit(
        jf.pca.Pooled(RANK), released, rounds=1, channel=channel, key=jax.random.key(0)
    )
    shared = np.asarray(solution.result.shared, np.float64)
    best = np.linalg.svd(centred, compute_uv=False)[:RANK]
    return float(np.sum((centred @ shared) ** 2) / np.sum(best**2))


def real(seed: int) -> Iterator[dict[str, object]]:
    """Shares of real data: on the whole, at twelve clients that share noise, and that do not."""
    for name in REAL:
        for neighbours in ("replace", "add_remove"):
            for rows in ("pairs", "directions", "clip"):
                row: dict[str, object] = {"data, rows, neighbours": f"{name}, {rows}, {neighbours}"}
                for epsilon in EPSILONS:
                    means = [
                        np.mean(
                            [
                                share(name, rows, neighbours, *of, epsilon, seed + i)
                                for i in range(DRAWS)
                            ]
                        )
                        for of in ((1, 1), (CLIENTS, CLIENTS), (CLIENTS, 1))
                    ]
                    row[f"{epsilon:g}"] = " / ".join(f"{x:.2f}" for x in means)
                yield row


def main() -> None:
    """Print a table."""
    chosen = choose({"expected": expected, "synthetic": synthetic, "real": real}, __doc__)
    print(machine(), flush=True)
    print(table(list(chosen.part(chosen.seed))))


if __name__ == "__main__":
    main()
