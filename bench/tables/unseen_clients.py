"""Reconstruct held-out digits of clients that took no part in training.

    python -m bench.tables.unseen_clients

Each of forty clients has one of scikit-learn's digits. Thirty clients train. The other ten come
afterwards, with their first 2, 4, 8 or 16 pictures. The table in bench/RESULTS.md, which the script
prints, contains the percentage of energy that components leave out of half of the new clients'
pictures, different ones from these; it is the mean over ten draws.
"""

import argparse

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxfed as jf

SAMPLES = (2, 4, 8, 16)
TRAINED, SHARED, LOCAL = 30, 10, 2


def left_over(bases: list[np.ndarray], held: list[np.ndarray]) -> float:
    """Percent of the energy outside the clients' bases."""
    rest = sum(np.sum((x - x @ w @ w.T) ** 2) for w, x in zip(bases, held, strict=True))
    return 100 * rest / sum(np.sum(x**2) for x in held)


def alone(few: list[np.ndarray], rank: int) -> list[np.ndarray]:
    """The PCA of each new client by itself."""
    return [np.linalg.svd(x.T, full_matrices=False)[0][:, :rank] for x in few]


def once(seed: int) -> dict[str, list[float]]:
    """One draw: rows of the table."""
    digits, key = load_digits(), jax.random.key(seed)
    pixels = (digits.data / 16 - digits.data.mean(0) / 16).astype("float32")
    parts = jf.data.partition_by_class(pixels, digits.target, 40, 1, key=key).samples
    train, held = jf.data.train_test_split(parts, 0.5, key=key)
    clients, held = (
        jf.Clients.from_samples(parts[:TRAINED]),
        [np.asarray(x) for x in held[TRAINED:]],
    )

    side_by_side = jf.pca.PerPCA(SHARED, LOCAL, solver="gradient")
    around = jf.pca.HierarchicalPCA(SHARED + LOCAL, solver="eigenvectors")
    early, adaptive = (jf.fit(a, clients, rounds=100, key=key) for a in (side_by_side, around))
    late = jf.fit(side_by_side, clients, rounds=900, key=key, warm_start=early.result)

    def personal(solution, few):
        few = jf.Clients.from_samples(few)
        return jf.personalize(solution.algorithm, solution, few, rounds=20)

    def both(shared, local):
        return [np.concatenate([shared, own], axis=1) for own in np.asarray(local)]

    centre = np.asarray(adaptive.result.shared)
    rows: dict[str, list[float]] = {}
    for n in SAMPLES:
        few = [np.asarray(x[:n]) for x in train[TRAINED:]]
        for name, bases in (
            (
                f"`PerPCA({SHARED}, {LOCAL}, solver='gradient')`, 100 rounds",
                both(*personal(early, few)),
            ),
            (
                f"`PerPCA({SHARED}, {LOCAL}, solver='gradient')`, 1,000 rounds",
                both(*personal(late, few)),
            ),
            (
                f"`HierarchicalPCA({SHARED + LOCAL})`",
                list(np.asarray(personal(adaptive, few).local)),
            ),
            ("its shared components alone", [centre] * len(few)),
            ("PCA of the new client alone", alone(few, SHARED + LOCAL)),
        ):
            rows.setdefault(name, []).append(left_over(bases, held))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    draws = [once(seed) for seed in range(parser.parse_args().draws)]
    print("| components | " + " | ".join(f"{n} samples" for n in SAMPLES) + " |")
    print("| --- " + "| ---: " * len(SAMPLES) + "|")
    for name in draws[0]:
        values = np.asarray([draw[name] for draw in draws])
        error = values.std(axis=0, ddof=1) / len(draws) ** 0.5 if len(draws) > 1 else 0 * values[0]
        cells = [f"{m:.1f} ± {e:.1f}" for m, e in zip(values.mean(axis=0), error, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
