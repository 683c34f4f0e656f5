"""Reference values of the neighbouring papers' targets, by the implementations in plain NumPy.

    PYTHONPATH=.:bench python -m papers.neighbours.reference_values neighbours/hmf --draws 10

The implementations are those of `tests/references`, written from the papers; the draws are the
targets' own, from seeds far from those that targets take.
"""

from collections.abc import Iterator

import numpy as np

from papers.neighbours import ajive as toy
from papers.neighbours import hmf as factors
from papers.neighbours import inmf as tiles
from papers.neighbours import pertucker as patterns
from papers.neighbours import tcmf as sparse
from papers.reference_values import Rows, main, top
from tests.references import ajive as ajive_reference
from tests.references import hmf as hmf_reference
from tests.references import inmf as inmf_reference
from tests.references import tcmf as tcmf_reference
from tests.references import tucker as tucker_reference

FIRST = 1_000_000  # the first seed


def _seeds(draws: int) -> Iterator[int]:
    return iter(range(FIRST, FIRST + draws))


def hmf(draws: int) -> Rows:
    """Both step rules from the same random components; curvatures are squared scales."""
    for seed in _seeds(draws):
        truth, start = factors.recovery(seed), factors.random_start(seed)
        for name in (factors.ALIKE, factors.UNLIKE):
            sizes = factors.scales(name)
            matrices = [s * y.T for s, y in zip(sizes, truth.samples, strict=True)]
            masks = [np.ones_like(m) for m in matrices]
            largest, own = float(sizes.max() ** 2), sizes**2
            step, penalty = factors.STEP_SIZE / largest, factors.PENALTY * largest
            rules = {
                factors.ONE_STEP: hmf_reference.Steps.equal(step, penalty, len(own)),
                factors.OWN_STEPS: hmf_reference.Steps(
                    1 / (2.4 * largest), list(1 / (2.4 * own)), 0.5, largest / 10, list(own / 10)
                ),
            }
            for method, steps in rules.items():
                ug, ul = np.asarray(start.shared), list(np.asarray(start.local))
                vg = [m.T @ ug for m in matrices]
                vl = [m.T @ u for m, u in zip(matrices, ul, strict=True)]
                curves: dict[str, list[float]] = {factors.SHARED: [], factors.LOCAL: []}
                last = (
                    (300 if method == factors.ONE_STEP else 150) if name == factors.ALIKE else 100
                )
                for k in range(factors.EVERY, last + 1, factors.EVERY):
                    ug, vg, ul, vl, _ = hmf_reference.rounds(
                        matrices, masks, ug, vg, ul, vl, steps, factors.EVERY
                    )
                    pairs = {
                        factors.SHARED: (np.linalg.qr(ug)[0], truth.shared),
                        factors.LOCAL: (np.linalg.qr(np.stack(ul))[0], truth.locals_),
                    }
                    for part, pair in pairs.items():
                        found, true = (x @ np.swapaxes(x, -1, -2) for x in pair)
                        error = np.linalg.norm(found - true, axis=(-2, -1)).mean()
                        curves[part].append(float(np.log10(error)))
                        if k in (20, 50, 100):
                            yield f"{name}, {method}, {k}, {part}", curves[part][-1]
                if name == factors.ALIKE:
                    slope = factors.rate(curves[factors.SHARED])
                    yield f"{name}, {method}, {factors.RATE}, {factors.SHARED}", slope


def tcmf(draws: int) -> Rows:
    """From the best local components, and the shared ones of the mean deflated moment."""
    for seed in _seeds(draws):
        for share in sparse.SHARES:
            truth = sparse.draw(seed, share)
            matrices = [y.T for y in truth.samples]
            masks = [np.ones(m.shape, bool) for m in matrices]
            first = [3 * np.quantile(np.abs(m), 0.75) for m in matrices]
            deflated = []
            for m, threshold in zip(matrices, first, strict=True):
                moment = np.where(np.abs(m) > threshold, 0, m)
                moment = moment @ moment.T
                own = top(moment, sparse.RANK)
                outside = np.eye(len(own)) - own @ own.T
                deflated.append(outside @ moment @ outside)
            start = top(np.mean(deflated, axis=0), sparse.RANK)
            for k in sparse.ROUNDS[:-1] if share == sparse.FEW else sparse.ROUNDS[-1:]:
                ug, errors, _ = tcmf_reference.rounds(
                    matrices, masks, start, sparse.RANK, (0.0, first), sparse.DECAY, k
                )
                cleaned = np.stack([(m - s).T for m, s in zip(matrices, errors, strict=True)])
                own = np.stack([tcmf_reference.best(y.T, ug, sparse.RANK)[0] for y in cleaned])
                for part, error in sparse.mistakes(ug, own, cleaned, truth).items():
                    yield f"{share:.0%}, TCMF, {k}, {part}", error


def ajive(draws: int) -> Rows:
    """In double precision, and the bound of random directions."""
    for seed in _seeds(draws):
        drawn, rng = toy.draw(seed), np.random.default_rng([seed, 1])
        parts = ajive_reference.ajive(drawn.views, 1, toy.RANKS)
        for quantity, error in toy.errors(drawn, toy.Parts(*parts[:3])).items():
            yield f"AJIVE, {quantity}", error
        left = [np.linalg.svd(x, full_matrices=False)[0] for x in drawn.views]
        for ranks in (toy.RANKS, toy.GENEROUS):
            rule = f"rule, signal ranks {ranks[0]} and {ranks[1]}"
            bases = np.hstack([u[:, :r] for u, r in zip(left, ranks, strict=True)])
            squares = np.linalg.svd(bases, compute_uv=False) ** 2
            for i in range(3):
                yield f"{rule}, squared singular value {i + 1}", squares[i]
            bases = [np.linalg.qr(rng.normal(size=(toy.DRAWS, len(bases), r)))[0] for r in ranks]
            norms = np.linalg.svd(np.concatenate(bases, axis=-1), compute_uv=False)[:, 0]
            yield f"{rule}, random bound", float(np.percentile(norms**2, 95))


def pertucker(draws: int) -> Rows:
    """Thirty passes over both modes, from random factors."""
    for seed in _seeds(draws):
        rng = np.random.default_rng([seed, 1])
        for count in patterns.IMAGES:
            drawn = patterns.images(seed, count)
            shape = (2, patterns.SIZE, patterns.RANKS[0])
            u = list(np.linalg.qr(rng.normal(size=shape))[0])
            v = []
            for _ in patterns.PATTERNS:
                own = rng.normal(size=shape)
                v.append([np.linalg.qr(w - x @ x.T @ w)[0] for w, x in zip(own, u, strict=True)])
            _, v, _ = tucker_reference.passes(list(drawn.train), u, v, patterns.MODES, 0.0, 30)
            own = np.stack([np.kron(*factors) for factors in v])
            energy = patterns.cores(own, patterns.flat(drawn.test))
            for quantity, value in patterns.scores(energy).items():
                if quantity == patterns.RIGHT or count == patterns.IMAGES[-1]:
                    yield f"{patterns.TUCKER}, {count}, {quantity}", value


def inmf(draws: int) -> Rows:
    """Loadings by non-negative least squares of SciPy, from random components."""
    for seed in _seeds(draws):
        samples, held_out = tiles.tiles(seed)
        samples, masks = list(samples.astype(float)), [~held_out] * len(samples)
        energy = np.mean([np.sum(x[~held_out] ** 2) for x in samples])
        for k in tiles.RANKS:
            rng = np.random.default_rng([seed, k])
            for penalty in tiles.PENALTIES:
                w, *vs = rng.random((1 + len(samples), k, tiles.FEATURES))
                w, vs, objectives = inmf_reference.rounds(
                    samples, masks, w, vs, penalty, tiles.ROUNDS
                )
                yield f"{penalty}, {k}, {tiles.OBJECTIVE}", objectives[-1] / energy
                squares = 0.0
                for x, mask, v in zip(samples, masks, vs, strict=True):
                    h = inmf_reference.loadings(x, mask, w, v, penalty)
                    squares += np.mean((h @ (w + v) - x)[held_out] ** 2) / len(samples)
                yield f"{penalty}, {k}, {tiles.HELD_OUT}", np.sqrt(squares) / tiles.NOISE


if __name__ == "__main__":
    made = (hmf, tcmf, ajive, pertucker, inmf)
    main({f"neighbours/{function.__name__}": function for function in made})
