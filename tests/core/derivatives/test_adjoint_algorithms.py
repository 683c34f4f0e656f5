"""Derivatives of every deterministic algorithm against differences of whole solves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests import examples

FEATURES, CLIENTS = 5, 3
SGD = optax.sgd(1.0)

pytestmark = pytest.mark.usefixtures("x64")


def samples(count):
    """Strong shared and local components, little noise, so that all solves converge soon."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(FEATURES, 2))
    values = np.empty((CLIENTS, count, FEATURES))
    for rows in values:
        # The strongest is a client's own, the next two are shared.
        frame = np.linalg.qr(np.concatenate([shared, rng.normal(size=(FEATURES, 3))], axis=1))[0]
        scores = np.linalg.qr(rng.normal(size=(count, FEATURES)))[0]
        rows[:] = scores * [6.0, 3.0, 9.0, 0.5, 0.3] @ frame.T
    return values + 0.1 * rng.normal(size=values.shape)


def clients_of(algorithm, values, weights):
    if isinstance(algorithm, jf.nmf.INMF):
        values = jnp.abs(values)
    if isinstance(algorithm, jf.gcca.MaxVar):
        views = jf.gcca.Views.from_arrays(list(values))
        return eqx.tree_at(lambda c: c.weights, views, weights / weights.sum())
    return jf.Clients.from_samples(values, weights=weights)


class Line(eqx.Module):
    """A model with one best fit: the last feature from the others."""

    slopes: jax.Array

    def __call__(self, x):
        return x[-1] - self.slopes @ x[:-1]


def fit_loss(model, batch, key):
    del key
    return jnp.mean(jax.vmap(model)(batch) ** 2) + 0.1 * jnp.sum(model.slopes**4)


def essence(result):
    """A smooth function of subspaces, and of what turns along with them."""
    shared, local = result
    rng = np.random.default_rng(3)
    parts = []
    if isinstance(shared, jf.preprocess.Standardization):
        return jnp.sum(jnp.sin(shared.mean + local.scale))
    if isinstance(shared, jf.preprocess.Imputation):
        products = jnp.einsum("mdr,mer->mde", local.loadings, local.loadings)
        return jnp.sum(jnp.sin(local.mean)) + jnp.sum(jnp.tanh(products))
    if isinstance(shared, Line):
        return jnp.sum(jnp.sin(shared.slopes))
    if shared is not None:
        parts.append(shared @ shared.T)
    if local is not None:
        parts.append(jnp.einsum("mdr,mer->mde", local, local))
    return sum((jnp.asarray(rng.normal(size=p.shape)) * jnp.tanh(p)).sum() for p in parts)


def fedavg():
    return jf.generative.FedAvg(
        Line(jnp.zeros(FEATURES - 1)), fit_loss, SGD, local_steps=2, step_size=0.01, proximal=0.1
    )


PCA = jf.pca
NETWORKS = {
    jf.gcca.DeepMaxVar,
    jf.generative.AdaptiveTraining,
}
# What is solved, in how many rounds, and to what accuracy differences of the solves agree.
CASES = {
    "PerPCA gradient": (lambda: PCA.PerPCA(2, 1, solver="gradient", step_size=0.1), 1500, 1e-6),
    "PerPCA automatic": (lambda: PCA.PerPCA(1, 1, solver="gradient"), 1500, 1e-6),
    "PerPCA polar": (
        lambda: PCA.PerPCA(1, 1, solver="gradient", variant="polar", step_size=0.1),
        1500,
        1e-6,
    ),
    "PerPCA power": (lambda: PCA.PerPCA(1, 1, solver="gradient", variant="power"), 300, 1e-6),
    "PerPCA gradient ranks": (lambda: PCA.PerPCA(2, (1, 0, 1), solver="gradient"), 1500, 1e-6),
    "PerPCA gradient shrinkage": (
        lambda: PCA.PerPCA(2, 1, solver="gradient", shrinkage=True),
        1500,
        1e-6,
    ),
    "PerPCA": (lambda: PCA.PerPCA(2, 1), 300, 1e-6),
    "PerPCA ranks": (lambda: PCA.PerPCA(2, (1, 0, 1)), 300, 1e-6),
    "PerPCA shrinkage": (lambda: PCA.PerPCA(2, 1, shrinkage=True), 300, 1e-6),
    "SubspaceIteration": (lambda: PCA.SubspaceIteration(2), 300, 1e-6),
    "BlockLanczos": (lambda: PCA.BlockLanczos(2), 20, 1e-6),
    "LocalPower": (lambda: PCA.LocalPower(2), 300, 1e-6),
    "FAPS": (lambda: PCA.FAPS(2), 1000, 1e-6),
    "HMF": (lambda: PCA.HMF(2, 1), 1500, 1e-6),
    "TCMF": (lambda: PCA.TCMF(2, 1, 2.0), 400, 1e-6),
    "PerTucker": (lambda: PCA.PerTucker((5, 1), (2, 1), (1, 1), orthogonal_modes=(0,)), 2000, 1e-6),
    "HierarchicalPCA given": (lambda: PCA.HierarchicalPCA(2, 0.5, 0.1), 1500, 1e-6),
    "HierarchicalPCA eigenvectors": (
        lambda: PCA.HierarchicalPCA(2, 0.5, 0.1, solver="eigenvectors"),
        400,
        1e-6,
    ),
    "HierarchicalPCA quasi_newton": (
        lambda: PCA.HierarchicalPCA(2, 0.5, 0.1, solver="quasi_newton"),
        60,
        1e-6,
    ),
    "HierarchicalPCA printed": (
        lambda: PCA.HierarchicalPCA(2, 0.5, 0.1, likelihood="half", align=False),
        3000,
        1e-6,
    ),
    "HierarchicalPCA": (lambda: PCA.HierarchicalPCA(2, 0.5), 2000, 1e-6),
    "HierarchicalPCA log": (
        lambda: PCA.HierarchicalPCA(
            2, 0.5, hyper_prior=0.1, variance_update="log", solver="eigenvectors"
        ),
        1000,
        1e-6,
    ),
    "EmpiricalBayesPCA": (lambda: PCA.EmpiricalBayesPCA(2, 0.5), 400, 1e-6),
    # Of one component, since with more the start, which is random, chooses the solution.
    "INMF": (lambda: jf.nmf.INMF(1, 1.0), 1000, 1e-6),
    "MaxVar": (lambda: jf.gcca.MaxVar(2, solver="gradient", ridge=0.1), 3000, 1e-6),
    "MaxVar exact": (lambda: jf.gcca.MaxVar(2, memory=0, ridge=0.3, proximal=0.2), 500, 1e-6),
    "MaxVar memory": (lambda: jf.gcca.MaxVar(2, ridge=0.3), 40, 1e-6),
    "FedAvg": (fedavg, 2000, 1e-6),
    "Standardize": (jf.preprocess.Standardize, 3, 1e-6),
    "Impute": (lambda: jf.preprocess.Impute(1, 1), 3000, 1e-6),
    # By a rule that is continuous in what groups weigh.
    "MultiStart": (lambda: jf.MultiStart(PCA.PerPCA(2, 1, start="random"), 2), 300, 1e-6),
    "Robust": (
        lambda: jf.aggregation.Robust(
            PCA.PerPCA(1, 1, solver="gradient", variant="power"),
            jf.aggregation.trimmed_mean(0.1),
            groups=CLIENTS,
        ),
        300,
        1e-6,
    ),
}


def compiled(name, adjoint, rounds=None):
    """Value and derivatives of a run by its algorithm's numbers, samples and weights."""
    make, enough, _ = CASES[name]
    rounds = enough if rounds is None else rounds
    numbers, settings = eqx.partition(make(), eqx.is_inexact_array)

    def value(at):
        numbers, values, weights = at
        algorithm = eqx.combine(numbers, settings)
        clients = clients_of(algorithm, values, weights)
        run = jf.rollout(algorithm, clients, rounds=rounds, key=jax.random.key(0), adjoint=adjoint)
        return essence(run.result)

    # With few samples, shrinkage takes too much for noise to leave anything to share.
    values = samples(30 if "shrinkage" in name else 9)
    at = jax.tree.map(jnp.asarray, (numbers, values, np.array([0.2, 0.5, 0.3])))
    return jax.jit(jax.value_and_grad(value)), at


def check(name, adjoint, rounds=None):
    """Against differences along random directions, one for each number, samples and weights."""
    function, at = compiled(name, adjoint, rounds)
    gradient = jax.tree.leaves(function(at)[1])
    rng = np.random.default_rng(1)
    places, structure = jax.tree.flatten_with_path(at)
    leaves = [leaf for _, leaf in places]
    for i, (path, leaf) in enumerate(places):
        direction = leaf * rng.normal(size=leaf.shape)

        def value(step, i=i, moved=leaf, direction=direction):
            moved = moved + step * direction
            return function(jax.tree.unflatten(structure, [*leaves[:i], moved, *leaves[i + 1 :]]))[
                0
            ]

        step = 2e-4
        near, far = (value(h) - value(-h) for h in (step, 2 * step))
        np.testing.assert_allclose(
            jnp.sum(gradient[i] * direction),
            (8 * near - far) / (12 * step),
            rtol=CASES[name][2],
            atol=1e-9,
            err_msg=jax.tree_util.keystr(path),
        )


def test_every_algorithm_is_differentiated_or_refused():
    """One of each: in the cases above, or without a fixed point and refused by name."""
    refused, others = set(), set()
    for example in examples.GOOD.values():
        algorithm = example.make(CLIENTS)
        try:
            algorithm.through()
        except ValueError as error:
            assert str(error).startswith("adjoint: wanted"), error
            refused.add(type(algorithm))
        else:
            others.add(type(algorithm))
    assert {jf.pca.Pooled, jf.pca.OneShot, jf.gcca.MVLSA, jf.gcca.AJIVE} <= refused
    checked = {type(make()) for make, _, _ in CASES.values()}
    # Networks on full batches have fixed points, which runs hardly reach: short of one, any
    # derivative is refused when it is computed.
    assert others - checked == NETWORKS


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_implicit_derivatives_are_those_of_whole_solves(name):
    check(name, jf.adjoint.implicit())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_single_precision_is_near_double(name):
    function, at = compiled(name, jf.adjoint.implicit())
    double = jax.tree.leaves(function(at)[1])
    single = jax.tree.leaves(function(jax.tree.map(lambda x: x.astype(jnp.float32), at))[1])
    # What is small beside the others has their rounding.
    largest = max(float(jnp.max(jnp.abs(y))) for y in double)
    for x, y in zip(single, double, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * largest)


# The first rounds of FAPS amplify any change, a thousandfold in twenty.
UNROLLED = dict.fromkeys(CASES) | {"FAPS": 6}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNROLLED)
@pytest.mark.parametrize("adjoint", [jf.adjoint.unrolled(), jf.adjoint.checkpointed()], ids=repr)
def test_unrolled_derivatives_are_those_of_whole_solves(name, adjoint):
    check(name, adjoint, UNROLLED[name])


@pytest.mark.slow
def test_another_round_with_the_same_solution_gives_the_same_derivative():
    algorithm = CASES["PerPCA gradient"][0]()

    def gradient(through):
        function, at = compiled("PerPCA gradient", jf.adjoint.implicit(through=through))
        return function(at)[1]

    found, wanted = gradient(algorithm), gradient(None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), found, wanted)
