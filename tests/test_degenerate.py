"""Data with fewer directions than components: those that do not exist disturb nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from bench.robustness import properties

CLIENTS, SAMPLES, FEATURES, ROUNDS = 3, 6, 5, 4

# One object each, which is compiled once.
ALGORITHMS = {
    "PerPCA, gradient": jf.pca.PerPCA(2, 2, solver="gradient"),
    "PerPCA, qr": jf.pca.PerPCA(2, 2, solver="gradient", retraction="qr", decay=0.5),
    "PerPCA, polar": jf.pca.PerPCA(2, 2, solver="gradient", variant="polar"),
    "PerPCA, power": jf.pca.PerPCA(2, 2, solver="gradient", variant="power"),
    "PerPCA, ranks": jf.pca.PerPCA(2, (2, 0, 1), solver="gradient"),
    "PerPCA, shrinkage": jf.pca.PerPCA(2, 2, solver="gradient", shrinkage=True),
    "PerPCA": jf.pca.PerPCA(2, 2),
    "OneShot, projector": jf.pca.OneShot(2, 2),
    "OneShot, spectrum": jf.pca.OneShot(2, 1, method="spectrum"),
    "OneShot, local_first": jf.pca.OneShot(2, 2, method="local_first"),
}


@st.composite
def client(draw, ties):
    """Samples of low rank, constant, repeated, along the axes, or of nothing but zeros."""
    rank = draw(st.integers(0, FEATURES))
    rows = np.random.default_rng(draw(st.integers(0, 1000))).normal(size=(SAMPLES, FEATURES))
    left, _, right = np.linalg.svd(rows, full_matrices=False)
    if draw(st.booleans()):
        left, right = np.eye(SAMPLES, FEATURES), np.eye(FEATURES)
    values = np.ones(FEATURES) if ties else 3.0 ** -np.arange(FEATURES)
    rows = (left * values * (np.arange(FEATURES) < rank)) @ right
    kind = draw(st.sampled_from(["as it is", "constant", "repeated"]))
    if kind != "as it is":
        rows = rows[:1].repeat(SAMPLES, 0) if kind == "constant" else np.repeat(rows[:3], 2, 0)
    return draw(st.sampled_from([1e-8, 1e-3, 1.0, 1e4])) * rows


@st.composite
def federation(draw, ties=False):
    """Clients that differ, or are all the same."""
    if draw(st.booleans()):
        rows = [draw(client(ties))] * CLIENTS
    else:
        rows = [draw(client(ties)) for _ in range(CLIENTS)]
    return np.stack(rows).astype(np.float32)


@partial(jax.jit, static_argnames="rounds")
def rolled(algorithm, clients, start, rounds):
    key = jax.random.key(0)
    return jf.rollout(algorithm, clients, rounds=rounds, key=key, warm_start=start)


def check(solution, clients):
    """Components are orthonormal, all of one client's together; objectives are not negative."""
    shared, local = map(np.float64, solution.result)
    for own in local:
        w = np.concatenate([shared, own], axis=1)
        used = np.linalg.norm(w, axis=0) > 0.5
        np.testing.assert_allclose(w.T @ w, np.diag(used), atol=2e-5)
    objective = np.asarray(solution.history["objective"])
    energy = float(np.mean(np.sum(np.square(clients.data.values), axis=(1, 2)) / SAMPLES))
    assert (objective >= 0).all() and (objective <= energy * (1 + 1e-5)).all()
    return energy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxfed.core.clients.energies.EnergyWarning")
@pytest.mark.parametrize("name", ALGORITHMS)
@given(rows=federation())
def test_components_that_do_not_exist(name, rows):
    algorithm, clients = ALGORITHMS[name], jf.Clients.from_samples(rows)
    rounds = 1 if "OneShot" in name else ROUNDS
    traced = rolled(algorithm, clients, None, rounds)
    fitted = jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0))
    energy = check(traced, clients)
    check(fitted, clients)
    # Whether the start counts a component of a variance near rounding is left to rounding errors.
    # So is, for power iteration of clients on one line, when local components lose what a shared
    # one misses of it: nothing tells the two apart as long as together they hold the line.
    allowed = 1e-2 if "power" in name else 1e-5
    np.testing.assert_allclose(
        fitted.history["objective"], traced.history["objective"], rtol=1e-2, atol=allowed * energy
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@given(rows=federation(ties=True))
def test_variances_that_are_equal(name, rows):
    # Which of the directions are chosen is left to rounding errors.
    clients = jf.Clients.from_samples(rows)
    rounds = 1 if "OneShot" in name else ROUNDS
    check(rolled(ALGORITHMS[name], clients, None, rounds), clients)


@pytest.mark.slow
@pytest.mark.parametrize("name", properties.settings())
def test_a_few_hundred_cases_of_the_campaign(name):
    setting = properties.settings()[name]
    rows = properties.draw(np.random.default_rng(0), properties.BATCH)
    keys = jax.random.split(jax.random.key(0), properties.BATCH)
    found = properties.faults(setting, *properties.runner(setting)(rows, keys))
    assert not {fault: rows[cases.argmax()] for fault, cases in found.items() if cases.any()}


@pytest.mark.slow
def test_a_warm_start_whose_parts_overlap():
    """What the shared components took of local ones used to be completed by those themselves."""
    rng = np.random.default_rng(0)
    algorithm, rounds = ALGORITHMS["PerPCA, gradient"], 8
    for _ in range(10):
        rows = rng.normal(size=(CLIENTS, SAMPLES, FEATURES)).astype(np.float32)
        axes = np.eye(FEATURES, dtype=np.float32)[:, rng.permutation(FEATURES)]
        local = np.stack([axes[:, [0, 2 + i]] for i in range(CLIENTS)])
        clients = jf.Clients.from_samples(rows)
        run = rolled(algorithm, clients, jf.Personalized(axes[:, :2], local), rounds)
        check(run, clients)
        values = [np.linalg.svd(x, compute_uv=False) ** 2 / SAMPLES for x in rows]
        least = np.mean([own[4:].sum() for own in values])  # beyond four components
        assert (run.history["objective"] >= least * (1 - 1e-4)).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e12])
def test_variable_projection_at_every_scale(scale, key):
    """Squares of its gradients used to vanish or overflow, and with them its progress.

    Compared where it has converged: on the way there, rounding decides which trials are accepted.
    """
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(CLIENTS, 30, FEATURES)) * [3, 2.5, 2, 1.5, 0.6]
    last = [
        jf.fit(
            ALGORITHMS["PerPCA"],
            jf.Clients.from_samples(np.float32(factor * rows)),
            rounds=300,
            key=key,
        ).history["objective"][-1]
        / factor**2
        for factor in (1.0, scale)
    ]
    np.testing.assert_allclose(last[1], last[0], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PerPCA", "PerPCA"])
def test_derivatives_of_tiny_and_of_huge_data(name, key):
    """Of zeros, and where squares of moments vanish or overflow: the step used to lose them."""
    rows = np.random.default_rng(0).normal(size=(CLIENTS, SAMPLES, FEATURES))

    @jax.jit
    @jax.vmap
    def slope(values):
        def last(values):
            clients = jf.Clients.from_samples(values)
            run = jf.rollout(ALGORITHMS[name], clients, rounds=3, key=key)
            return run.history["objective"][-1]

        return jax.grad(last)(values)

    scales = np.float32([1, 1e-6, 1e-12, 1e12, 0])
    slopes = slope(scales[:, None, None, None] * rows.astype(np.float32))
    assert np.isfinite(slopes).all() and not slopes[-1].any()
    for scale, found in zip(scales[1:-1], slopes[1:-1], strict=True):
        np.testing.assert_allclose(found / scale, slopes[0], atol=2e-3 * np.abs(slopes[0]).max())


# Where squares of second moments overflow or vanish in single precision.
SCALED = {
    "BlockLanczos": jf.pca.BlockLanczos(2),
    "PerPCA, gradient": ALGORITHMS["PerPCA, gradient"],
    "PerPCA, decay": jf.pca.PerPCA(2, 2, solver="gradient", decay=0.5, start="random"),
    "PerPCA, ranks": ALGORITHMS["PerPCA, ranks"],
    "PerPCA, shrinkage": ALGORITHMS["PerPCA, shrinkage"],
    "PerPCA": ALGORITHMS["PerPCA"],
    "OneShot, local_first": ALGORITHMS["OneShot, local_first"],
    "SubspaceIteration": jf.pca.SubspaceIteration(2, stop="kkt"),
    "LocalPower": jf.pca.LocalPower(2, local_steps=2, stop="kkt"),
    "FAPS": jf.pca.FAPS(2, stop="kkt"),
    "HierarchicalPCA": jf.pca.HierarchicalPCA(2, 0.5, 0.1),
    "HierarchicalPCA learned": jf.pca.HierarchicalPCA(2, 0.5),
    "EmpiricalBayesPCA": jf.pca.EmpiricalBayesPCA(2, 0.5),
    "MaxVar": jf.gcca.MaxVar(2),
    "MaxVar, gradient": jf.gcca.MaxVar(2, solver="gradient"),
    "MVLSA": jf.gcca.MVLSA(2),
    "AJIVE": jf.gcca.AJIVE(2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_derivatives_of_data_of_every_size(name, key):
    """Finite at every scale, of objective and components; none of what is nothing."""
    algorithm = SCALED[name]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(CLIENTS, SAMPLES, FEATURES))
    kinds = [rows, rows[:, :1] + 0 * rows]
    kinds += [rows[..., :rank] @ rng.normal(size=(rank, FEATURES)) for rank in (1, 2)]
    scales, tiny = 10.0 ** np.arange(-15, 16, 3), [1e-13, *10.0 ** np.arange(-20, -15.5, 0.25)]
    every = [*scales, *tiny]
    several = np.stack([*(scale * x for x in kinds for scale in every), 0 * rows])

    @jax.jit
    @jax.vmap
    def slopes(values):
        def ends(values):
            views = type(algorithm).__module__.startswith("jaxfed.gcca")
            given = jf.gcca.Views.from_arrays(list(values)) if views else None
            given = given or jf.Clients.from_samples(values)
            run = jf.rollout(algorithm, given, rounds=3, key=key)
            leaves = [x for x in jax.tree.leaves(run.result) if x.ndim > 1]
            frames = [x @ jnp.swapaxes(x, -1, -2) for x in leaves]
            turned = sum(jnp.sum(x * jnp.arange(1.0, 1 + x.shape[-1])) for x in frames)
            return run.history["objective"][-1], 0 if views else turned

        (objective, turned), back = jax.vjp(ends, values)
        one, none = jnp.ones_like(objective), jnp.zeros_like(objective)
        return objective, turned, back((one, none))[0], back((none, one))[0]

    found = slopes(several.astype(np.float32))
    for values in found:
        assert np.isfinite(values).all(axis=tuple(range(1, np.ndim(values)))).all()
    if name in ("PerPCA", "BlockLanczos", "PerPCA", "FAPS"):  # which know no scale
        slope = np.asarray(found[2][: len(scales)]) / scales[:, None, None, None]
        middle = slope[len(scales) // 2]
        for one in slope:
            np.testing.assert_allclose(one, middle, atol=0.03 * np.abs(middle).max())


@pytest.mark.slow
def test_rank_one_and_rank_two_data(key):
    direction = np.ones((FEATURES, 1)) / np.sqrt(FEATURES)
    scores = np.random.default_rng(0).normal(size=(CLIENTS, SAMPLES, 1))
    one = jf.Clients.from_samples((scores @ direction.T).astype(np.float32))
    for solution in (
        jf.fit(ALGORITHMS["PerPCA"], one, rounds=ROUNDS, key=key),
        rolled(ALGORITHMS["PerPCA"], one, None, ROUNDS),
    ):
        check(solution, one)
        assert solution.history["objective"].max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PerPCA", "SubspaceIteration"])
def test_implicit_derivatives_are_finite_or_refused(name, key):
    """Where there are fewer directions than components, at a scale, or none to choose between."""
    algorithm = (
        jf.pca.PerPCA(1, 1, solver="gradient") if name == "PerPCA" else jf.pca.SubspaceIteration(2)
    )
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(CLIENTS, SAMPLES, FEATURES)) * [3, 2, 1, 0.5, 0.2]
    kinds = {
        "plain": rows,
        "tiny": 1e-12 * rows,
        "huge": 1e12 * rows,
        "zero": 0 * rows,
        "rank one": rows[..., :1] @ rng.normal(size=(1, FEATURES)),
        "the same": rows[:1].repeat(CLIENTS, 0),
        "constant": rows[:, :1].repeat(SAMPLES, 1),
    }

    @jax.jit
    @jax.grad
    def slope(values):
        run = jf.rollout(
            algorithm,
            jf.Clients.from_samples(values),
            rounds=200,
            key=key,
            adjoint=jf.adjoint.implicit(),
        )
        return jnp.sum(run.result.shared @ run.result.shared.T * jnp.arange(1.0, FEATURES + 1))

    for kind, values in kinds.items():
        try:
            found = np.asarray(slope(values.astype(np.float32)))
        except Exception as error:
            assert kind not in ("plain", "tiny", "huge") and "adjoint: " in str(error), kind
        else:
            assert np.isfinite(found).all() and (kind == "zero") <= (not found.any()), kind
