"""Integrative non-negative factors and loadings of three clients, beside pyliger."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS = "integrative NMF", "relative objective", 4
RANK, PENALTY, ROUNDS = 10, 5.0, 1000
TOL = 1e-2  # enough for a lower objective than pyliger's after its default iterations


def counts(seed, clients, samples, features):
    """Samples with loadings of few components, parts of which are the client's own."""
    rng = np.random.default_rng(seed)
    shared = rng.gamma(0.5, size=(features, RANK))
    own = shared + 0.4 * rng.gamma(0.5, size=(clients, features, RANK))
    values = rng.gamma(0.7, size=(clients, samples, RANK)) @ own.swapaxes(1, 2)
    return {"x": values + 0.1 * rng.random(values.shape)}


def jaxfed():
    import jax

    import jaxfed as jf

    fit, from_samples, nmf = jf.fit, jf.Clients.from_samples, jf.nmf

    def solve(data):
        options = {"rounds": ROUNDS, "tol": TOL, "key": jax.random.key(0)}
        solution = fit(nmf.INMF(RANK, PENALTY), from_samples(data["x"]), **options)
        return [*map(np.asarray, solution.result), np.asarray(nmf.transform(solution, data["x"]))]

    return solve


def _pyliger(algorithm):
    from bench.oracles.inmf import liger_object

    def solve(data):
        found = liger_object(data["x"])
        algorithm(found, RANK, PENALTY)
        parts = [(x.varm["W"], x.varm["V"], x.obsm["H"]) for x in found.adata_list]
        shared, own, loadings = map(np.stack, zip(*parts, strict=True))
        return shared[0], own, loadings

    return solve


def pyliger_als():
    from pyliger.factorization._iNMF_ANLS import optimize_ALS

    return _pyliger(optimize_ALS)


def pyliger_hals():
    from pyliger.factorization._iNMF_HALS import iNMF_HALS

    return _pyliger(iNMF_HALS)


def answer(data, found):
    """The paper's objective, relative to the samples' squares."""
    (shared, own, loadings), x = found, data["x"]
    left = x - loadings @ (shared + own).swapaxes(1, 2)
    penalty = PENALTY * np.sum(np.square(loadings @ own.swapaxes(1, 2)))
    return (np.sum(left * left) + penalty) / np.sum(x * x)


CASES = {"3 clients, 1,000 x 200, rank 10": partial(counts, clients=3, samples=1000, features=200)}
SIDES = {"jaxfed": jaxfed, "pyliger, ALS": pyliger_als, "pyliger, HALS": pyliger_hals}
