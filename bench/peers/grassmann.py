"""The least value of a quadratic on a Grassmann manifold, beside Pymanopt."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS = "a quadratic on Grassmann", "above the minimum", 2
TOL = 1e-6  # of the gradient's length, where the minimum is -1


def quadratic(seed, features, rank):
    """A symmetric matrix whose largest eigenvalues add up to one, and a start."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(features, features)))[0]
    values = np.concatenate([np.linspace(3, 2, rank), np.linspace(1.8, 0, features - rank)])
    start = np.linalg.qr(rng.normal(size=(features, rank)))[0]
    return {"matrix": turn * (values / values[:rank].sum()) @ turn.T, "start": start}


def jaxfed():
    import jax.numpy as jnp

    from jaxfed import manifolds

    def solve(data):
        matrix = jnp.asarray(data["matrix"])
        found = manifolds.minimise(
            lambda x: -jnp.sum(x * (matrix @ x)), data["start"], manifold="grassmann", tol=TOL
        )
        return np.asarray(found.point)

    return solve


def pymanopt():
    import autograd.numpy as anp
    import pymanopt

    def solve(data):
        manifold = pymanopt.manifolds.Grassmann(*data["start"].shape)

        @pymanopt.function.autograd(manifold)
        def cost(x):
            return -anp.sum(x * (data["matrix"] @ x))

        solver = pymanopt.optimizers.ConjugateGradient(min_gradient_norm=TOL, verbosity=0)
        return solver.run(pymanopt.Problem(manifold, cost), initial_point=data["start"]).point

    return solve


def answer(data, point):
    """How far the value is above the minimum, -1."""
    x = np.linalg.qr(np.asarray(point, float))[0]
    return 1 - np.sum(x * (data["matrix"] @ x))


CASES = {"500 x 10": partial(quadratic, features=500, rank=10)}
SIDES = {"jaxfed": jaxfed, "Pymanopt": pymanopt}
