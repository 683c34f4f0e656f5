"""Errors on missing entries, with `jf.preprocess.Impute` and with other methods.

    python -m bench.tables.missing entries [--data DIR] [--draws 3]
    python -m bench.tables.missing defaults
    python -m bench.tables.missing subspace

`entries`: the script hides some entries of the clients' samples, at random or in blocks (half of a
client's samples lose a third of the features). A cell contains the root mean square error on these
entries, relative to that of the common means: the mean over the draws and its standard error. The
rivals are each client's means; probabilistic PCA by expectation maximization, of each client alone
and of all samples pooled; scikit-learn's `IterativeImputer` on the pooled samples; and MOFA2 with
clients as groups (package mofapy2; left out if it is not installed). `problems` contains the ranks.
Digits are scikit-learn's: 40 clients with 40 images of one digit each. With `--data DIR`, the
script also reads nine speakers from DIR/japanese_vowels/JapaneseVowels_TRAIN.ts (in the wheel of
aeon), Zernike moments of digits from DIR/mfeat/mfeat.npz, and responses to ligands from
DIR/il2/IL2_Response_Tensor.npy (in the wheel of tensorly), which has missing entries of its own;
without it, it leaves these problems out.

`defaults`: errors of `Impute()`, whose ranks follow the number of features, relative to the least
of three rivals on all samples pooled: scikit-learn's `KNNImputer` with ten neighbours and
`IterativeImputer` (left out for digits, whose 64 features take it minutes), and SoftImpute, whose
penalty is the best for a tenth of the entries that are held out. Clients are classes, or every
sixth or fifth sample; columns other than pixels have variance one. Planted data have two shared and
two local components and noise of the standard deviation that their name says. The largest of three
draws.

`subspace`: fifty clients have 60 samples of 30 features, three shared and three local components,
and noise 0.3. The table contains the error ‖P_U − P‖²/2 of the shared components that
`PerPCA` finds in the completed moments, and the relative error on the missing entries, as
means of five draws.
"""

import argparse
import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

import jaxfed as jf
from bench.common import machine, table
from jaxfed.preprocess import Impute

RATES = 0.1, 0.3, 0.5, 0.6, 0.7
ROUNDS = 50


class Problem(NamedTuple):
    """Samples of clients, in which NaN is what nobody knows, and ranks."""

    name: str
    samples: list[np.ndarray]
    shared_rank: int
    local_rank: int
    rank: int  # of the rivals' models; with more they overfit where much is missing


def problems(data: Path | None, seed: int) -> Iterator[Problem]:
    """Data sets, centred by common means."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    of_digit = [digits.data[digits.target == i] / 16 for i in range(10)]
    images = [of_digit[i % 10][rng.choice(170, 40, replace=False)] for i in range(40)]
    yield Problem("digits", images, 30, 2, 12)
    if data is None:
        return
    frames = speakers(data / "japanese_vowels" / "JapaneseVowels_TRAIN.ts")
    yield Problem("vowels", frames, 4, 4, 6)
    stored = np.load(data / "mfeat" / "mfeat.npz", allow_pickle=False)
    moments = (stored["zer"] - stored["zer"].mean(0)) / stored["zer"].std(0)
    labels = stored["labels"]
    chosen = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    several = [moments[rng.choice(chosen[i % 10], 50, replace=False)] for i in range(40)]
    yield Problem("mfeat", several, 30, 2, 12)
    path = data / "il2" / "IL2_Response_Tensor.npy"
    responses = np.log1p(np.maximum(np.load(path, allow_pickle=False), 0))
    # Ligands are clients; a sample is a time and a kind of cells, its features are doses.
    by_ligand = [np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in responses]
    yield Problem("IL2", [x[~np.isnan(x).all(1)] for x in by_ligand], 4, 2, 4)


def speakers(path: Path) -> list[np.ndarray]:
    """The frames of each speaker's utterances."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.lower().startswith("@data"))
    frames: dict[str, list[np.ndarray]] = {}
    for line in lines[start + 1 :]:
        *channels, label = line.strip().split(":")
        table_ = np.array([[float(x) for x in c.split(",") if x != "?"] for c in channels])
        frames.setdefault(label, []).append(table_.T)
    return [np.concatenate(own)[:150] for own in frames.values()]


def hidden(samples: np.ndarray, rate: float | None, rng: np.random.Generator) -> np.ndarray:
    """The samples with more gaps: at random, or in a block."""
    gaps = np.array(samples, np.float32)
    rows, features = gaps.shape
    if rate is None:
        columns = rng.choice(features, features // 3, replace=False)
        gaps[np.ix_(rng.permutation(rows)[: rows // 2], columns)] = np.nan
    else:
        gaps[rng.random(gaps.shape) < rate] = np.nan
    known = np.flatnonzero(np.isnan(gaps).all(1) & ~np.isnan(samples).all(1))
    for row in known:  # an entry each that is there
        column = rng.choice(np.flatnonzero(~np.isnan(samples[row])))
        gaps[row, column] = samples[row, column]
    return gaps


# --- rivals --------------------------------------------------------------------------------------


def by_impute(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    clients = jf.Clients.from_samples(gaps, missing="mask")
    algorithm = Impute(problem.shared_rank, problem.local_rank)
    solution = jf.fit(algorithm, clients, rounds=ROUNDS, key=jax.random.key(0))
    values = np.asarray(solution.result.local.transform(clients).data.values)
    return [x[: len(own)] for x, own in zip(values, gaps, strict=True)]


def by_means(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    pooled = np.nanmean(np.concatenate(gaps), axis=0)
    found = []
    for own in gaps:
        known = np.where(np.isnan(own).all(0), pooled, np.nanmean(own, axis=0))
        found.append(np.where(np.isnan(own), known, own))
    return found


def alone(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    means = by_means(problem, gaps)
    return [by_em(own, fill, problem.rank) for own, fill in zip(gaps, means, strict=True)]


def pooled(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    rows = np.concatenate(gaps)
    fill = np.where(np.isnan(rows), np.nanmean(rows, axis=0), rows)
    return parted(by_em(rows, fill, problem.rank), gaps)


def iterative(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parted(IterativeImputer(max_iter=10).fit_transform(np.concatenate(gaps)), gaps)


def mofa(problem: Problem, gaps: list[np.ndarray]) -> list[np.ndarray]:
    from mofapy2.run.entry_point import entry_point

    means = by_means(problem, gaps)
    centers = [
        np.nanmean(np.where(np.isnan(own), fill, own), axis=0)
        for own, fill in zip(gaps, means, strict=True)
    ]
    unit = np.nanstd(np.concatenate(gaps))  # small numbers end it at once
    model = entry_point()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_data_options(scale_views=False, center_groups=False)
        left = [((own - c) / unit).astype(float) for own, c in zip(gaps, centers, strict=True)]
        model.set_data_matrix([left])
        model.set_model_options(factors=problem.rank)
        model.set_train_options(iter=300, seed=0, convergence_mode="slow", quiet=True)
        model.build()
        model.run()
        scores = model.model.nodes["Z"].getExpectation()
        loadings = model.model.nodes["W"].getExpectation()[0]
    found = []
    for own, center, fit in zip(gaps, centers, parted(scores @ loadings.T, gaps), strict=True):
        found.append(np.where(np.isnan(own), center + unit * fit, own))
    return found


def parted(rows: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum([len(own) for own in like])[:-1])


def by_em(gaps: np.ndarray, fill: np.ndarray, rank: int, steps: int = 100) -> np.ndarray:
    """Probabilistic PCA of incomplete samples by expectation maximization."""
    seen = ~np.isnan(gaps)
    known = jnp.asarray(np.where(seen, gaps, 0), jnp.float32)
    return np.asarray(_em(known, jnp.asarray(seen, jnp.float32), jnp.asarray(fill), rank, steps))


def _em(known: jax.Array, seen: jax.Array, fill: ArrayLike, rank: int, steps: int) -> jax.Array:
    fill = jnp.asarray(fill, jnp.float32)
    mean = fill.mean(0)
    _, values, basis = jnp.linalg.svd(fill - mean, full_matrices=False)
    loadings = basis[:rank].T * values[:rank] / len(fill) ** 0.5
    noise = 0.5 * jnp.var(fill - mean) + 1e-6

    state, fitted = (mean, loadings, noise), fill
    for _ in range(steps):
        state, fitted = _em_step(known, seen, *state)
    return jnp.where(seen > 0, known, fitted)


@jax.jit
def _em_step(
    known: jax.Array, seen: jax.Array, mean: jax.Array, loadings: jax.Array, noise: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    rank = loadings.shape[1]
    second = loadings[:, :, None] * loadings[:, None, :]
    inner = (seen @ second.reshape(-1, rank**2)).reshape(-1, rank, rank)
    covariance = jnp.linalg.inv(jnp.eye(rank) + inner / noise)
    scores = jnp.einsum("nrs,ns->nr", covariance, (seen * (known - mean)) @ loadings / noise)
    full = covariance + scores[:, :, None] * scores[:, None, :]
    gram = (seen.T @ full.reshape(-1, rank**2)).reshape(-1, rank, rank)
    right = (seen * (known - mean)).T @ scores
    loadings = jnp.linalg.solve(gram + 1e-6 * jnp.eye(rank), right[..., None])[..., 0]
    fitted = scores @ loadings.T
    mean = jnp.sum(seen * (known - fitted), 0) / jnp.maximum(seen.sum(0), 1)
    rest = (seen * (known - mean - fitted) ** 2).sum()
    spread = jnp.einsum("nd,dr,nrs,ds->", seen, loadings, covariance, loadings)
    noise = jnp.maximum((rest + spread) / seen.sum(), 1e-6)
    return (mean, loadings, noise), fitted + mean


RIVALS: dict[str, Callable[[Problem, list[np.ndarray]], list[np.ndarray]]] = {
    "Impute": by_impute,
    "own means": by_means,
    "alone": alone,
    "pooled": pooled,
    "IterativeImputer": iterative,
    "MOFA2": mofa,
}


def entries(data: Path | None, draws: int) -> None:
    """The table of errors on hidden entries."""
    rivals = dict(RIVALS)
    if importlib.util.find_spec("mofapy2") is None:
        del rivals["MOFA2"]
    for name in [problem.name for problem in problems(data, 0)]:
        rows = []
        for rate in (*RATES, None):
            errors: dict[str, list[float]] = {rival: [] for rival in rivals}
            for seed in range(draws):
                (problem,) = (p for p in problems(data, seed) if p.name == name)
                rng = np.random.default_rng(100 + seed)
                mean = np.nanmean(np.concatenate(problem.samples), axis=0)
                samples = [(x - mean).astype(np.float32) for x in problem.samples]
                gaps = [hidden(x, rate, rng) for x in samples]
                full, some = np.concatenate(samples), np.concatenate(gaps)
                at = np.isnan(some) & ~np.isnan(full)
                common = np.nanmean(some, axis=0)
                unit = np.mean((full - common)[at] ** 2)
                for rival, complete in rivals.items():
                    found = np.concatenate(complete(problem, gaps))
                    errors[rival].append(float(np.sqrt(np.mean((found - full)[at] ** 2) / unit)))
            cells = {
                rival: f"{np.mean(x):.3f} ± {np.std(x, ddof=1) / len(x) ** 0.5:.3f}"
                for rival, x in errors.items()
            }
            rows.append({name: "blocks" if rate is None else f"{rate:.0%}", **cells})
            print(rows[-1], flush=True)
        print(table(rows), flush=True)


# --- default ranks -------------------------------------------------------------------------------


def tables(rng: np.random.Generator) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Samples of clients, by name."""
    digits = load_digits()
    of_digit = [digits.data[digits.target == i] / 16 for i in range(10)]
    yield "digits", [of_digit[i % 10][rng.choice(170, 40, replace=False)] for i in range(40)]
    for name, loaded, clients in [
        ("breast cancer", load_breast_cancer(), 6),
        ("wine", load_wine(), None),
        ("diabetes", load_diabetes(), 5),
        ("iris", load_iris(), None),
    ]:
        values = (loaded.data - loaded.data.mean(0)) / loaded.data.std(0)
        groups = loaded.target if clients is None else np.arange(len(values)) % clients
        yield name, [values[groups == i] for i in np.unique(groups)]
    for clients, samples, features, noise in [(5, 40, 12, 0.3), (20, 100, 20, 1.0)]:
        shared = rng.normal(size=(2, features))
        planted = [
            rng.normal(size=(samples, 2)) @ shared
            + rng.normal(size=(samples, 2)) @ rng.normal(size=(2, features))
            + noise * rng.normal(size=(samples, features))
            for _ in range(clients)
        ]
        yield f"planted, {noise:g}", planted
    yield "noise alone", [rng.normal(size=(40, 12)) for _ in range(6)]


def soft_impute(gaps: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Singular values of completed rows, thresholded (Mazumder, Hastie & Tibshirani 2010)."""
    mean, seen = np.nanmean(gaps, axis=0), ~np.isnan(gaps)
    values = np.where(seen, gaps - mean, 0)
    held_out = seen & (rng.random(gaps.shape) < 0.1)

    def fitted(known, penalty, found):
        for _ in range(100):
            left, scales, right = np.linalg.svd(np.where(known, values, found), full_matrices=False)
            found = (left * np.maximum(scales - penalty, 0)) @ right
        return found

    largest = np.linalg.norm(np.where(seen & ~held_out, values, 0), 2)
    penalties, errors, found = largest * np.geomspace(0.5, 0.002, 12), [], np.zeros_like(values)
    for penalty in penalties:
        found = fitted(seen & ~held_out, penalty, found)
        errors.append(np.mean((found - values)[held_out] ** 2))
    return mean + fitted(seen, penalties[int(np.argmin(errors))], found)


def defaults(draws: int) -> None:
    """The table of `Impute()` beside the best of others."""
    from sklearn.impute import KNNImputer

    worst: dict[str, dict[str, float]] = {}
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        for name, samples in tables(rng):
            for rate in (0.1, 0.3, 0.5):
                gaps = [hidden(x, rate, rng) for x in samples]
                full, some = np.concatenate(samples), np.concatenate(gaps)
                clients = jf.Clients.from_samples(gaps, missing="mask")
                model = jf.fit(Impute(), clients, rounds=ROUNDS, key=jax.random.key(seed)).result
                padded = np.asarray(model.local.transform(clients).data.values)
                ours = [x[: len(own)] for x, own in zip(padded, gaps, strict=True)]
                rivals = [KNNImputer(n_neighbors=10).fit_transform(some), soft_impute(some, rng)]
                if some.shape[1] < 40:
                    rivals.append(np.concatenate(iterative(Problem(name, [], 0, 0, 0), gaps)))
                at = np.isnan(some)
                own, *others = (
                    float(np.sqrt(np.mean((x - full)[at] ** 2)))
                    for x in (np.concatenate(ours), *rivals)
                )
                row = worst.setdefault(name, {})
                row[f"{rate:.0%}"] = max(row.get(f"{rate:.0%}", 0.0), own / min(others))
    rows = [
        {"data": name} | {rate: f"{value:.2f}" for rate, value in row.items()}
        for name, row in worst.items()
    ]
    print(table(rows))


# --- subspace ------------------------------------------------------------------------------------


def subspace() -> None:
    """The table of errors of the shared subspace."""
    rows = []
    for rate in (0.0, 0.2, 0.4, 0.6):
        distances, errors = [], []
        for seed in range(5):
            rng = np.random.default_rng(seed)
            truth = np.linalg.qr(rng.normal(size=(30, 3)))[0]
            samples = []
            for _ in range(50):
                own = np.linalg.qr(np.hstack([truth, rng.normal(size=(30, 3))]))[0]
                signal = 1.194 * rng.normal(size=(60, 6)) @ own.T
                samples.append(signal + 0.3 * rng.normal(size=(60, 30)))
            full = np.stack(samples).astype(np.float32)
            gaps = np.stack([hidden(x, rate, rng) for x in full])
            clients = jf.Clients.from_samples(gaps, missing="mask")
            found = jf.fit(Impute(3, 3), clients, rounds=ROUNDS, key=jax.random.key(0)).result
            moments = found.local.moments(clients)
            solver = jf.pca.PerPCA(3, 3)
            shared = jf.fit(solver, moments, rounds=100, key=jax.random.key(0)).result.shared
            distances.append(float(jf.metrics.projector_distance(shared, jnp.asarray(truth))) / 2)
            at = np.isnan(gaps)
            left = np.asarray(found.local.transform(clients).data.values) - full
            if at.any():
                errors.append(float(np.sqrt(np.mean(left[at] ** 2) / np.mean(full[at] ** 2))))
        rows.append(
            {
                "missing": f"{rate:.0%}",
                "‖P_U − P‖²/2": f"{np.mean(distances):.4f}",
                "± standard error": f"{np.std(distances, ddof=1) / 5**0.5:.4f}",
                "missing entries": f"{np.mean(errors):.2f}" if errors else "",
            }
        )
    print(table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("which", choices=["entries", "defaults", "subspace"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    if given.which == "entries":
        entries(given.data, given.draws)
    elif given.which == "defaults":
        defaults(given.draws)
    else:
        subspace()
