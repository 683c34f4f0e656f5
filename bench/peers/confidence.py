"""A bound of the angle of principal components by the bootstrap, beside a loop in NumPy."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS = "bootstrap", "degrees", 3
RANK, LOCAL, RESAMPLES, ROUNDS = 2, 1, 200, 50


def clients(seed, count, samples, features):
    """Samples of clients with two strong components in common, and a weak one each."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(features, RANK)))[0]
    own = np.linalg.qr(rng.normal(size=(count, features, LOCAL)))[0]
    x = rng.normal(size=(count, samples, RANK)) * (3, 2) @ shared.T
    x += rng.normal(size=(count, samples, LOCAL)) @ own.swapaxes(1, 2)
    return {"x": x + 0.5 * rng.normal(size=x.shape)}


def jaxfed():
    import jax

    import jaxfed as jf

    fit, Clients, PerPCA, confidence = jf.fit, jf.Clients, jf.pca.PerPCA, jf.inference.confidence
    key = jax.random.key(0)

    def solve(data):
        given = Clients.from_samples(data["x"])
        solution = fit(PerPCA(RANK, LOCAL), given, rounds=ROUNDS, tol=1e-8, key=key)
        return np.asarray(confidence(solution, given, key=key, resamples=RESAMPLES).angle)

    return solve


def numpy_loop():
    def components(x):
        """Alternate between the clients' own components and the shared ones."""
        moments = x.swapaxes(1, 2) @ x
        shared = np.linalg.eigh(moments.mean(0))[1][:, -RANK:]
        for _ in range(10):
            free = np.eye(x.shape[2]) - shared @ shared.T
            own = np.linalg.eigh(free @ moments @ free)[1][:, :, -LOCAL:]
            free = np.eye(x.shape[2]) - own @ own.swapaxes(1, 2)
            shared = np.linalg.eigh((free @ moments @ free).mean(0))[1][:, -RANK:]
        return shared

    def solve(data):
        x, rng = data["x"], np.random.default_rng(0)
        found, angles = components(x), []
        for _ in range(RESAMPLES):
            rows = rng.integers(x.shape[1], size=x.shape[:2])
            other = components(np.take_along_axis(x, rows[:, :, None], axis=1))
            cosines = np.linalg.svd(found.T @ other, compute_uv=False)
            angles.append(np.arccos(min(1, cosines[-1])))
        return np.quantile(angles, 0.95)

    return solve


def answer(data, angle):
    """The bound."""
    return np.degrees(angle)


CASES = {
    "10 clients, 100 x 20, 200 resamples": partial(clients, count=10, samples=100, features=20)
}
SIDES = {"jaxfed": jaxfed, "NumPy": numpy_loop}
