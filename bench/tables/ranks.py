"""How often ranks are right, by the strength of the components: `suggest_ranks` and simpler rules.

    python -m bench.tables.ranks [rules | unequal | digits] [SEED]

Clients of the model of personalized PCA, with directions drawn at random. All components have the
same variance, a multiple of the detection threshold `sqrt(d / n)` of a client in units of the
noise's variance (Baik, Ben Arous & Péché, 2005). Below 1, a client's own eigenvalues do not tell a
component from noise, however many features and samples there are.

`rules`: what `suggest_ranks` suggests, as percentages right / too weak to tell / wrong, and how
often the numbers that it found are right, suggested or not. The others always answer: parallel
analysis of each client (Horn, 1965: the 95 % quantile of the eigenvalues of permuted columns, the
median over clients) for both ranks together, and the random bound of AJIVE (Feng, Jiang, Hannig &
Marron, 2018) on that many directions for the shared one; and the largest ratios of successive
eigenvalues (Ahn & Horenstein, 2013) of the clients and of the mean projection.

`unequal`: components of other variances than each other, and clients of other sizes.

`digits`: what it says of the bundled digits, one client for each digit.
"""

from typing import NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxfed as jf
from bench.common import choose, machine, table

DRAWS = 100
MOST = 7  # of either rank
PERMUTATIONS, QUANTILE = 40, 0.95


class Setting(NamedTuple):
    """Clients, all of the same kind."""

    clients: int
    samples: int
    features: int
    shared: int
    local: int

    def __str__(self) -> str:
        return f"{self.clients}, {self.samples}, {self.features}; {self.shared} + {self.local}"


SETTINGS = (
    Setting(10, 20, 40, 2, 2),
    Setting(30, 20, 12, 2, 3),
    Setting(10, 50, 20, 3, 3),
    Setting(15, 200, 12, 3, 2),
    Setting(10, 50, 40, 5, 3),
    Setting(10, 200, 40, 5, 5),
)
STRENGTHS = (0.5, 1.5, 3.0, 5.0)
Ranks = tuple[int, int]


def drawn(
    rng: np.random.Generator,
    setting: Setting,
    strengths: tuple[float, float],
    tails: bool,
    sizes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Samples of all clients, whose noise has variance 1 and t5 tails or none."""
    m, n, d, r1, r2 = setting
    sizes = np.full(m, n) if sizes is None else sizes
    deviations = np.sqrt(np.asarray(strengths) * np.sqrt(d / n))
    frame = np.linalg.qr(rng.normal(size=(d, d)))[0]
    samples = []
    for size in sizes:
        local = frame[:, r1:] @ np.linalg.qr(rng.normal(size=(d - r1, r2)))[0]
        noise = (
            rng.standard_t(5, (size, d)) / np.sqrt(5 / 3) if tails else rng.normal(size=(size, d))
        )
        scores = rng.normal(size=(size, r1 + r2)) * np.repeat(deviations, [r1, r2])
        samples.append(scores @ np.hstack([frame[:, :r1], local]).T + noise)
    return [each.astype(np.float32) for each in samples]


def suggested(samples: list[np.ndarray], seed: int) -> jf.pca.SuggestedRanks:
    """The result of `suggest_ranks`."""
    clients = jf.Clients.from_samples(samples)
    return jf.pca.suggest_ranks(
        clients, key=jax.random.key(seed), most_shared=MOST, most_local=MOST
    )


def parallel_analysis(samples: list[np.ndarray], rng: np.random.Generator) -> Ranks:
    """Ranks by permuted columns, and by random bases."""
    counts = []
    for rows in samples:
        null = np.array(
            [
                np.linalg.svd(rng.permuted(rows, axis=0), compute_uv=False)[: 2 * MOST]
                for _ in range(PERMUTATIONS)
            ]
        )
        own = np.linalg.svd(rows, compute_uv=False)[: 2 * MOST]
        below = np.append(own <= np.quantile(null, QUANTILE, axis=0), True)
        counts.append(int(np.argmax(below)))
    total, d = int(np.median(counts)), samples[0].shape[1]
    if total == 0:
        return 0, 0
    bases = [np.linalg.svd(rows)[2][:total].T for rows in samples]
    values = np.linalg.svd(np.hstack(bases), compute_uv=False) ** 2
    random = np.linalg.qr(rng.normal(size=(PERMUTATIONS, len(samples), d, total)))[0]
    side_by_side = np.moveaxis(random, 1, 2).reshape(PERMUTATIONS, d, -1)
    bound = np.quantile(np.linalg.svd(side_by_side, compute_uv=False)[:, 0] ** 2, QUANTILE)
    shared = min(int(np.sum(values > bound)), total)
    return shared, total - shared


def largest_ratios(samples: list[np.ndarray]) -> Ranks:
    """Ranks by the largest ratios of successive eigenvalues."""
    squares = np.array(
        [np.linalg.svd(rows, compute_uv=False)[: 2 * MOST + 1] ** 2 for rows in samples]
    )
    spectrum = np.mean(squares / squares.sum(axis=1, keepdims=True), axis=0)
    total = int(np.argmax(spectrum[:-1] / spectrum[1:])) + 1
    bases = np.hstack([np.linalg.svd(rows)[2][:total].T for rows in samples])
    values = np.linalg.svd(bases, compute_uv=False)[: total + 1] ** 2
    shared = int(np.argmax(values[:-1] / values[1:])) + 1
    return shared, total - shared


def cell(outcomes: list[Ranks | None], truth: Ranks) -> str:
    """The percentages right, too weak to tell and wrong."""
    right, weak = (np.mean([each == wanted for each in outcomes]) for wanted in (truth, None))
    return f"{100 * right:.0f} / {100 * weak:.0f} / {abs(100 * (1 - right - weak)):.0f}"


def percentage(found: list[Ranks], truth: Ranks) -> int:
    """The percentage right."""
    return round(100 * float(np.mean([each == truth for each in found])))


def rules() -> list[dict[str, object]]:
    """One row a setting, a kind of noise and a strength."""
    rows = []
    for i, setting in enumerate(SETTINGS):
        truth = setting.shared, setting.local
        for tails in (False, True):
            for strength in STRENGTHS:
                ours, parallel, ratios = [], [], []
                for draw in range(DRAWS):
                    rng = np.random.default_rng([chosen.seed, i, tails, int(10 * strength), draw])
                    samples = drawn(rng, setting, (strength, strength), tails)
                    ours.append(suggested(samples, draw))
                    parallel.append(parallel_analysis(samples, rng))
                    ratios.append(largest_ratios(samples))
                rows.append(
                    {
                        "clients, samples, features; ranks": str(setting),
                        "noise": "t5" if tails else "normal",
                        "strength": strength,
                        "suggested": cell([found.suggested for found in ours], truth),
                        "found": percentage([(x.shared, x.local) for x in ours], truth),
                        "parallel analysis": percentage(parallel, truth),
                        "ratios": percentage(ratios, truth),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def unequal() -> list[dict[str, object]]:
    """One row a kind of clients."""
    setting = Setting(20, 50, 20, 3, 3)
    sizes = np.repeat([20, 35, 50, 95], 5)
    kinds = {
        "20 to 95 samples, strengths 6": ((6.0, 6.0), sizes),
        "shared 4, local 20": ((4.0, 20.0), None),
        "shared 20, local 4": ((20.0, 4.0), None),
        "shared 1, local 20": ((1.0, 20.0), None),
        "shared 20, local 1": ((20.0, 1.0), None),
    }
    rows = []
    for i, (name, (strengths, counts)) in enumerate(kinds.items()):
        row: dict[str, object] = {"20 clients, 20 features, ranks 3 + 3": name}
        for tails in (False, True):
            outcomes = []
            for draw in range(DRAWS):
                rng = np.random.default_rng([chosen.seed, 100 + i, tails, draw])
                samples = drawn(rng, setting, strengths, tails, counts)
                outcomes.append(suggested(samples, draw).suggested)
            row["t5" if tails else "normal"] = cell(outcomes, (3, 3))
        rows.append(row)
        print(row, flush=True)
    return rows


def digits() -> list[dict[str, object]]:
    """What it says of the digits, the first samples of each."""
    pixels, labels = load_digits(return_X_y=True)
    rows = []
    for samples in (20, 50, None):
        clients = [pixels[labels == digit][:samples] for digit in range(10)]
        clients = [(each - each.mean(axis=0)).astype(np.float32) for each in clients]
        found = jf.pca.suggest_ranks(
            jf.Clients.from_samples(clients), key=jax.random.key(0), most_shared=20, most_local=20
        )
        rows.append(
            {
                "images of each": samples or "all",
                "shared": f"{found.shared}, {found.shared_interval}",
                "local": f"{found.local}, {found.local_interval}",
                "support": f"{found.support:.0%}",
                "suggested": found.suggested,
                "of each digit": " ".join(map(str, found.client_local)),
            }
        )
        print(found, rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    chosen = choose({"rules": rules, "unequal": unequal, "digits": digits}, __doc__)
    print(machine())
    print(table(chosen.part()))
