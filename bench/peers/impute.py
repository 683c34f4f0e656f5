"""Missing entries of a table, beside `IterativeImputer` of scikit-learn and SoftImpute."""

import numpy as np

WORK, ANSWER, DIGITS, CLIENTS = "imputation", "relative error", 3, 5


def tumours(seed, samples=565, features=30):
    """Wisconsin's breast cancers, standardized; a fifth of the entries is hidden at random."""
    from sklearn.datasets import load_breast_cancer

    rng = np.random.default_rng(seed)
    x = rng.permutation(load_breast_cancer().data)[:samples, :features]
    x = (x - x.mean(0)) / x.std(0)
    return {"x": np.where(rng.random(x.shape) < 0.2, np.nan, x), "truth": x}


def jaxfed():
    import jax

    import jaxfed as jf

    fit, from_samples, Impute = jf.fit, jf.Clients.from_samples, jf.preprocess.Impute

    def solve(data):
        shape = data["x"].shape
        clients = from_samples(data["x"].reshape(CLIENTS, -1, shape[1]), missing="mask")
        solution = fit(Impute(), clients, rounds=50, key=jax.random.key(0))
        return np.asarray(solution.result.local.transform(clients).data.values).reshape(shape)

    return solve


def scikit_learn():
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    return lambda data: IterativeImputer(random_state=0).fit_transform(data["x"])


def fancyimpute():
    from fancyimpute import SoftImpute

    return lambda data: SoftImpute(verbose=False).fit_transform(data["x"])


def answer(data, filled):
    """Root mean square error on hidden entries, relative to that of the means."""
    hidden = np.isnan(data["x"])
    means = np.broadcast_to(np.nanmean(data["x"], axis=0), hidden.shape)
    off, by_means = (np.sum(np.square((x - data["truth"])[hidden])) for x in (filled, means))
    return np.sqrt(off / by_means)


CASES = {"565 x 30": tumours}
SIDES = {"jaxfed": jaxfed, "scikit-learn": scikit_learn, "fancyimpute": fancyimpute}
