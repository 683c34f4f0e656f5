"""Compare the manifolds and their solvers with Pymanopt's, and run Pymanopt's and geoopt's tests.

    python -m bench.speed.manifolds                     # PCA of 1000 x 20
    python -m bench.speed.manifolds --pymanopt DIR      # Pymanopt's tests of Stiefel and Grassmann
    python -m bench.speed.manifolds --geoopt DIR        # geoopt's basic tests of Stiefel

Install Pymanopt and autograd, and for the last command PyTorch and geoopt. The folders are
checkouts. Their tests run unchanged, on manifolds that pass every call on to `jaxfed.manifolds`.
"""

import argparse
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from bench.common import every_turn, machine, table
from jaxfed import manifolds
from jaxfed.manifolds import grassmann, stiefel


class _Ours:
    """What the adapters share: a function of one point, of one or several, compiled once."""

    def __init__(self):
        self.compiled = {}

    def __call__(self, function, *arrays, **static):
        name = function, tuple(np.ndim(x) for x in arrays), tuple(sorted(static.items()))
        if name not in self.compiled:

            def one(*given):
                return function(*given, **static)

            for _ in range(np.ndim(arrays[-1]) - 2):
                one = jax.vmap(one)
            self.compiled[name] = jax.jit(one)
        return np.asarray(self.compiled[name](*map(jnp.asarray, arrays)))


ours = _Ours()


# --- Pymanopt ------------------------------------------------------------------------------------


rng = np.random.default_rng(0)


def keys(count):
    return jax.random.split(jax.random.key(rng.integers(2**31)), count)


class _ForPymanopt:
    """A product of one or several manifolds, with Pymanopt's names."""

    def __init__(self, n, p, *, k=1, retraction="qr"):
        self.n, self.p, self.k, self.name = n, p, k, retraction
        self.typical_dist = np.sqrt(p * k)

    def random_point(self):
        points = jax.vmap(lambda key: self.space.random(self.n, self.p, key=key))(keys(self.k))
        return np.asarray(points[0] if self.k == 1 else points)

    def random_tangent_vector(self, point):
        given = point.reshape(-1, self.n, self.p)
        drawn = jax.vmap(lambda key, x: self.space.random_tangent(x, key=key))(
            keys(self.k), jnp.asarray(given)
        )
        return np.asarray(drawn.reshape(point.shape)) / np.sqrt(self.k)

    def inner_product(self, point, a, b):
        return ours(self.space.inner, point, a, b).sum()

    def norm(self, point, vector):
        return np.sqrt(np.sum(ours(self.space.norm, point, vector) ** 2))

    def projection(self, point, vector):
        return ours(self.space.project, point, vector)

    def exp(self, point, vector):
        return ours(self.space.exp, point, vector)

    def log(self, point, other):
        return ours(self.space.log, point, other)

    def retraction(self, point, vector):
        return ours(self.space.RETRACTIONS[self.name], point, vector)

    def euclidean_to_riemannian_hessian(self, point, gradient, hessian, vector):
        return ours(self.space.ehess2rhess, point, gradient, hessian, vector)


class _Stiefel(_ForPymanopt):
    space = stiefel

    @property
    def dim(self):
        return self.k * (self.n * self.p - self.p * (self.p + 1) // 2)


class _Grassmann(_ForPymanopt):
    space = grassmann

    def __init__(self, n, p, *, k=1):
        super().__init__(n, p, k=k, retraction="polar")

    @property
    def dim(self):
        return self.k * self.p * (self.n - self.p)

    def dist(self, a, b):
        return np.linalg.norm(ours(grassmann.distance, a, b, kind="geodesic"))


class _Given:
    """A Pytest plugin that puts our manifolds where a test module imported others."""

    def __init__(self, replaced):
        self.replaced = replaced

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for name, ours in self.replaced.items():
                if hasattr(item.module, name):
                    setattr(item.module, name, ours)


def tests(paths, replaced, *options):
    np.random.seed(42)  # noqa: NPY002, what the tests draw from
    given = ["-q", "--noconftest", "-n", "0", "-p", "no:cacheprovider", "-c", os.devnull, *options]
    return pytest.main([*given, *map(str, paths)], plugins=[_Given(replaced)])


# --- geoopt --------------------------------------------------------------------------------------


def on_tensors(function, *tensors, **static):
    import torch

    # In double precision, as the tests compare; some points are made before they ask for it.
    arrays = [t.detach().double().numpy() for t in tensors]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    found = ours(function, *(np.broadcast_to(x, shape) for x in arrays), **static)
    return torch.from_numpy(found.copy()).to(tensors[0].dtype)


def nearest(x):
    return stiefel.retract_polar(x, 0 * x)


def along_geodesic(x, u, v):
    return jax.jvp(lambda t: stiefel.exp(x, u + t * v), (0.0,), (1.0,))[1]


def for_geoopt(metric, retract, transport):
    """Methods of a manifold; a scaled one looks at the names of their arguments.

    Neither `dist` nor `logmap`, which geoopt lacks here too, so that it skips their tests: the
    vectors that these go along are longer than the injectivity radius.
    """

    def projx(self, x):
        return on_tensors(nearest, x)

    def proju(self, x, u):
        return on_tensors(stiefel.egrad2rgrad, x, u, metric=metric)

    def inner(self, x, u, v=None, *, keepdim=False):
        found = on_tensors(stiefel.inner, x, u, u if v is None else v, metric=metric)
        return found[..., None, None] if keepdim else found

    def expmap(self, x, u):
        return on_tensors(stiefel.exp, x, u, metric=metric)

    def retr(self, x, u):
        return on_tensors(retract, x, u)

    def transp_follow_retr(self, x, u, v):
        return on_tensors(transport, x, u, v)

    def retr_transp(self, x, u, v):
        return on_tensors(retract, x, u), on_tensors(transport, x, u, v)

    return projx, proju, inner, expmap, retr, transp_follow_retr, retr_transp


def replace_geoopt():
    """Let geoopt's Stiefel manifolds hand everything to ours."""
    from geoopt.manifolds import CanonicalStiefel, EuclideanStiefel, EuclideanStiefelExact

    by_qr = partial(stiefel.transport_differential, retraction="qr")
    rules = {
        CanonicalStiefel: ("canonical", stiefel.retract_cayley, stiefel.transport_cayley),
        EuclideanStiefel: ("euclidean", stiefel.retract_qr, by_qr),
        EuclideanStiefelExact: ("euclidean", stiefel.exp, along_geodesic),
    }
    for kind, rule in rules.items():
        for method in for_geoopt(*rule):
            setattr(kind, method.__name__, method)


# --- a race --------------------------------------------------------------------------------------


def covariance(features, rank):
    """Eigenvalues of principal components from 3 to 2, of all others up to 1.8."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(features, features)))[0]
    values = np.concatenate([np.linspace(3, 2, rank), np.linspace(1.8, 0, features - rank)])
    return turn * values @ turn.T, values[:rank].sum()


def of_pymanopt(matrix, start):
    """Its solvers, with derivatives by autograd, as its examples have them, and by hand."""
    import autograd.numpy as anp
    import pymanopt

    manifold = pymanopt.manifolds.Grassmann(*start.shape)

    @pymanopt.function.autograd(manifold)
    def traced(x):
        return -anp.sum(x * (matrix @ x))

    @pymanopt.function.numpy(manifold)
    def cost(x):
        return -np.sum(x * (matrix @ x))

    @pymanopt.function.numpy(manifold)
    def slope(x):
        return -2 * (matrix @ x)

    @pymanopt.function.numpy(manifold)
    def curvature(x, v):
        return -2 * (matrix @ v)

    by_hand = {"euclidean_gradient": slope, "euclidean_hessian": curvature}
    problems = {
        "autograd": pymanopt.Problem(manifold, traced),
        "by hand": pymanopt.Problem(manifold, cost, **by_hand),
    }
    optimizers = pymanopt.optimizers
    solvers = {
        "conjugate gradients": optimizers.ConjugateGradient,
        "trust regions": optimizers.TrustRegions,
    }

    def solved(problem, optimizer, tol):
        solver = optimizer(min_gradient_norm=tol, verbosity=0, max_iterations=1000)
        found = solver.run(problem, initial_point=start)
        return found.iterations, found.cost

    return {
        f"Pymanopt, {name}, {how}": partial(solved, problem, optimizer)
        for name, optimizer in solvers.items()
        for how, problem in problems.items()
    }


def of_ours(matrix, start):
    """Our solvers, compiled."""

    @partial(jax.jit, static_argnums=0)
    def solved(solver, tol, matrix, start):
        found = manifolds.minimise(
            lambda x: -jnp.sum(x * (matrix @ x)),
            start,
            manifold="grassmann",
            solver=solver,
            tol=tol,
        )
        return found.steps, found.value

    return {
        f"jaxfed, {solver.replace('_', ' ')}": lambda tol, solver=solver: solved(
            solver, tol, matrix, start
        )
        for solver in manifolds.SOLVERS
    }


def race(features, rank, repeats):
    threadpool_limits(1, user_api="blas")
    matrix, most = covariance(features, rank)
    start = np.linalg.qr(np.random.default_rng(1).normal(size=(features, rank)))[0]
    ways = of_pymanopt(matrix, start) | of_ours(jnp.asarray(matrix), jnp.asarray(start))
    runs, rows = {}, {}
    for name, way in ways.items():
        # Each with the loosest tolerance, of its own meaning, that leads to the gap.
        for tol in 10.0 ** -np.arange(0, 9, 0.5):
            steps, value = way(tol)
            gap = 1 + float(value) / most
            if gap <= 1e-8:
                break
        rows[name] = {"way": name, "iterations": int(steps), "relative gap": f"{gap:.1e}"}
        runs[name] = partial(way, tol)
    took = every_turn(runs, repeats)
    print(machine())
    print(
        table(
            [
                row
                | {f"{clock} ms": f"{1e3 * np.median(x):.0f}" for clock, x in took[name].items()}
                for name, row in rows.items()
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pymanopt", type=Path, help="a checkout")
    parser.add_argument("--geoopt", type=Path, help="a checkout")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.pymanopt:
        folder = given.pymanopt / "tests" / "manifolds"
        replaced = {"Stiefel": _Stiefel, "Grassmann": _Grassmann}
        code = tests([folder / "test_stiefel.py", folder / "test_grassmann.py"], replaced)
        raise SystemExit(int(code))
    if given.geoopt:
        replace_geoopt()
        path = given.geoopt / "tests" / "test_manifold_basic.py"
        raise SystemExit(int(tests([path], {}, "-k", "Stiefel", "-rs")))
    race(1000, 20, given.repeats)


if __name__ == "__main__":
    main()
