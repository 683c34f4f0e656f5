"""Metrics against the NumPy references, against each other, near zero, and on bad input."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed import metrics
from jaxfed.linalg import Moment
from tests.references import consensus
from tests.references import perpca as reference

M, D, R1, R2 = 5, 9, 2, 3
COUNTS = np.array([4, 12, 7, 12, 1])
RANKS = [3, 1, 2, 3, 3]


def bases(rng, ranks=(R2,) * M, d=D):
    """Shared and local components that are feasible, as lists."""
    shared = reference.polar(rng.standard_normal((d, R1)))
    locals_ = [rng.standard_normal((d, r)) for r in ranks]
    return shared, [reference.polar(v - shared @ (shared.T @ v)) for v in locals_]


def stack(locals_, rank=R2):
    """Local components of different ranks as one array, padded with columns of zeros."""
    return jnp.stack([jnp.pad(v, ((0, 0), (0, rank - v.shape[1]))) for v in locals_])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def samples(rng):
    return [rng.standard_normal((n, D)) * np.arange(1, D + 1) for n in COUNTS]


def forms(samples):
    """The same clients in every form that is accepted, with their counts."""
    padded = np.full((M, COUNTS.max(), D), 7.0)  # rows beyond the counts must not matter
    for row, y in zip(padded, samples, strict=True):
        row[: len(y)] = y
    zeros = np.where((np.arange(COUNTS.max()) < COUNTS[:, None])[..., None], padded, 0)
    moments = np.stack([reference.moment(y) for y in samples])
    return {
        "list": (samples, None),
        "padded": (padded, COUNTS),
        "moment": (jax.vmap(Moment.from_samples)(jnp.asarray(zeros), jnp.asarray(COUNTS)), None),
        "matrix": (jax.vmap(Moment.from_dense)(jnp.asarray(moments)), None),
    }


@pytest.mark.parametrize("form", ["list", "padded", "moment", "matrix"])
@pytest.mark.parametrize("ranks", [(R2,) * M, RANKS], ids=["equal", "unequal"])
def test_reconstruction_metrics_equal_the_reference(rng, x64, samples, form, ranks):
    shared, locals_ = bases(rng, ranks)
    data, counts = forms(samples)[form]
    local = stack(locals_)

    errors = metrics.reconstruction_error(
        jf.Personalized(shared, local), data, counts=counts, per_client=True
    )
    expected = reference.reconstruction_errors(samples, shared, locals_)
    np.testing.assert_allclose(errors, expected, rtol=1e-12, atol=1e-11)
    mean = metrics.reconstruction_error(jf.Personalized(shared, local), data, counts=counts)
    np.testing.assert_allclose(mean, expected.mean(), rtol=1e-12)

    energies = np.array([np.sum(y**2) / len(y) for y in samples])
    objective = reference.objective(samples, shared, locals_)
    captured = metrics.captured_energy(jf.Personalized(shared, local), data, counts=counts)
    np.testing.assert_allclose(captured, 2 * objective / energies.mean(), rtol=1e-12)

    shares = metrics.separation(
        jf.Personalized(shared, local), data, counts=counts, per_client=True
    )
    in_shared = np.array([np.sum((y @ shared) ** 2) / len(y) for y in samples])
    np.testing.assert_allclose(shares.shared, in_shared / energies, rtol=1e-12)
    np.testing.assert_allclose(sum(shares), np.ones(M), rtol=1e-12)

    found = metrics.kkt_violation(jf.Personalized(shared, local), data, counts=counts)
    np.testing.assert_allclose(found, reference.kkt_violation(samples, shared, locals_), rtol=1e-11)


@pytest.mark.parametrize("form", ["list", "padded", "moment"])
def test_pooled_metrics_equal_the_reference(rng, x64, samples, form):
    shared = reference.polar(rng.standard_normal((D, 3)))
    data, counts = forms(samples)[form]
    found = metrics.scaled_kkt_violation(jf.Personalized(shared, None), data, counts=counts)
    np.testing.assert_allclose(found, consensus.scaled_kkt_violation(samples, shared), rtol=1e-12)
    values, vectors = consensus.singular_values(samples, 3)
    found = metrics.relative_singular_value_error(
        jf.Personalized(shared, None), data, values, counts=counts
    )
    wanted = consensus.relative_singular_value_error(samples, shared)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert metrics.scaled_kkt_violation(jf.Personalized(vectors, None), data, counts=counts) < 1e-14
    assert (
        metrics.relative_singular_value_error(
            jf.Personalized(vectors, None), data, values, counts=counts
        )
        < 1e-14
    )


def test_moments_count_by_their_samples(rng, x64, samples):
    matrices = jnp.asarray(np.stack([reference.moment(y) for y in samples]))
    moments = jax.vmap(Moment.from_dense)(matrices, jnp.asarray(COUNTS))
    shared = reference.polar(rng.standard_normal((D, 2)))
    wanted = consensus.scaled_kkt_violation(samples, shared)
    np.testing.assert_allclose(
        metrics.scaled_kkt_violation(jf.Personalized(shared, None), moments), wanted, rtol=1e-12
    )
    assert metrics.scaled_kkt_violation(jf.Personalized(shared, None), np.zeros((2, 3, D))) == 0


@pytest.mark.parametrize("ranks", [(R2,) * M, RANKS], ids=["equal", "unequal"])
def test_subspace_metrics_equal_the_reference(rng, x64, ranks):
    shared, locals_ = bases(rng, ranks)
    true_shared, true_locals = bases(rng, ranks)
    local, true_local = stack(locals_), stack(true_locals)

    parts = reference.subspace_errors(shared, locals_, true_shared, true_locals)
    found = metrics.subspace_error(shared, local, true_shared, true_local)
    np.testing.assert_allclose(found, sum(parts), rtol=1e-12)
    np.testing.assert_allclose(
        metrics.projector_distance(shared, true_shared), parts[0], rtol=1e-12
    )
    np.testing.assert_allclose(
        metrics.client_distances(local), reference.client_distances(locals_), rtol=1e-12, atol=1e-28
    )
    np.testing.assert_allclose(
        metrics.misalignment(local), reference.misalignment(locals_), rtol=1e-12
    )


def test_distance_of_different_dimensions(rng, x64):
    x, y = bases(rng)[0], bases(rng)[1][0]
    expected = np.sum((reference.projector(x) - reference.projector(y)) ** 2)
    np.testing.assert_allclose(metrics.projector_distance(x, y), expected, rtol=1e-12)


def test_misalignment_of_few_clients_in_many_dimensions(rng, x64):
    locals_ = bases(rng, d=60)[1]
    np.testing.assert_allclose(
        metrics.misalignment(stack(locals_)), reference.misalignment(locals_), rtol=1e-12
    )


@given(st.floats(1e-12, 1e-3), st.integers(0, 5))
def test_small_distances_keep_their_digits_in_single_precision(angle, seed):
    rng = np.random.default_rng(seed)
    q = reference.polar(rng.standard_normal((8, 2))).astype(np.float32)
    u, v = q[:, :1], q[:, 1:]
    # A rotation by the angle: ||P - P'||_F^2 = 2 sin^2(angle). Rounding may turn u by about 1e-7.
    turned = jnp.asarray(np.cos(angle) * u + np.sin(angle) * v)
    distance = float(metrics.projector_distance(jnp.asarray(u), turned))
    assert abs(np.sqrt(distance / 2) - np.sin(angle)) < 3e-7


@pytest.mark.slow
def test_small_misalignment_is_told_from_none():
    # v_i = e_1 turned by ± 1e-4 towards e_2: θ = sin^2(1e-4) = 1e-8, below float32's epsilon.
    angle = 1e-4
    local = jnp.array([[[np.cos(angle)], [s * np.sin(angle)], [0.0]] for s in (1, -1)], jnp.float32)
    theta = float(metrics.misalignment(local))
    assert 0.99e-8 < theta < 1.01e-8
    assert 0 <= float(metrics.misalignment(local[:1])) < 1e-13
    assert 0 <= float(metrics.misalignment(jnp.repeat(local[:1], 4, axis=0))) < 1e-13


def test_noiseless_reconstruction_reaches_zero_in_single_precision(rng):
    shared, locals_ = bases(rng)
    y = np.stack(
        [
            rng.standard_normal((10, R1 + R2)) @ np.concatenate([shared, v], axis=1).T
            for v in locals_
        ]
    )
    arrays = [jnp.asarray(a, jnp.float32) for a in (y, shared, stack(locals_))]
    error = metrics.reconstruction_error(jf.Personalized(*arrays[1:]), arrays[0])
    assert error.dtype == jnp.float32
    assert float(error) < 1e-11


@pytest.mark.parametrize("missing", ["shared", "local"])
def test_components_that_do_not_exist_are_none(samples, missing, x64):
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.normal(size=(D, 2)))[0]
    local = np.linalg.qr(rng.normal(size=(M, D, 2)))[0]
    given = {"shared": shared, "local": local} | {missing: None}
    without = {"shared": np.zeros((D, 1)), "local": np.zeros((M, D, 1))}
    zeros = {"shared": shared, "local": local} | {missing: without[missing]}
    for measure in (metrics.reconstruction_error, metrics.captured_energy, metrics.separation):
        chex.assert_trees_all_close(
            measure(jf.Personalized(**given), samples), measure(jf.Personalized(**zeros), samples)
        )
    other, none = (
        metrics.kkt_violation(jf.Personalized(**given), samples),
        0 if missing == "shared" else 1,
    )
    assert float(other[none]) == 0 and float(other[1 - none]) > 0
    truth = {f"true_{name}": part for name, part in {"shared": shared, "local": local}.items()}
    assert float(metrics.subspace_error(**given, **truth)) == pytest.approx(2.0)
    same = {f"true_{name}": part for name, part in given.items()}
    assert float(metrics.subspace_error(**given, **same)) == pytest.approx(0.0, abs=1e-12)


def test_components_that_overlap_count_once(rng, samples):
    """As those of `HierarchicalPCA`, whose local components hold all of a client's."""
    shared = np.linalg.qr(rng.normal(size=(D, 2)))[0]
    local = np.linalg.qr(shared + 0.1 * rng.normal(size=(M, D, 2)))[0]
    both, own = jf.Personalized(shared, local), jf.Personalized(None, local)
    for measure in (metrics.reconstruction_error, metrics.captured_energy):
        chex.assert_trees_all_equal(measure(both, samples), measure(own, samples))
    alone = metrics.reconstruction_error(both, samples[1], client=1)
    each = metrics.reconstruction_error(both, samples, per_client=True)
    np.testing.assert_allclose(alone, each[1], rtol=1e-6)


def test_some_components_are_needed(samples):
    with pytest.raises(ValueError, match=r"^fitted: wanted what PCA learned"):
        metrics.reconstruction_error(jf.Personalized(None, None), samples)
    for measure in (metrics.misalignment, metrics.client_distances):
        with pytest.raises(ValueError, match=r"^local: wanted an array .* got None"):
            measure(None)


@pytest.mark.slow
def test_components_that_are_zero(samples, x64):
    shared, local = jnp.zeros((D, 1)), jnp.zeros((M, D, 1))
    energies = np.array([np.sum(y**2) / len(y) for y in samples])
    chex.assert_trees_all_close(
        metrics.reconstruction_error(jf.Personalized(shared, local), samples),
        jnp.asarray(energies.mean()),
    )
    for d in (D, 3):  # more, and fewer, dimensions than components
        assert float(metrics.misalignment(jnp.zeros((M, d, 1)))) == pytest.approx(1.0)
    chex.assert_trees_all_equal(metrics.client_distances(jnp.zeros((2, 3, 1))), jnp.zeros((2, 2)))
    chex.assert_trees_all_equal(
        metrics.captured_energy(jf.Personalized(shared, local), jnp.zeros((M, 2, D))),
        jnp.asarray(0.0),
    )


def test_jit_and_vmap_over_solutions(rng, x64, samples):
    several = [bases(rng) for _ in range(3)]
    shared = jnp.stack([s for s, _ in several])
    local = jnp.stack([stack(v) for _, v in several])
    data, counts = forms(samples)["padded"]
    data, counts = jnp.asarray(data), jnp.asarray(counts)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def everything(shared, local, data, counts):
        return {
            "error": metrics.reconstruction_error(
                jf.Personalized(shared, local), data, counts=counts
            ),
            "shares": metrics.separation(jf.Personalized(shared, local), data, counts=counts),
            "kkt": metrics.kkt_violation(jf.Personalized(shared, local), data, counts=counts),
            "theta": metrics.misalignment(local),
            "rho": metrics.client_distances(local),
        }

    mapped = jax.vmap(everything, in_axes=(0, 0, None, None))(shared, local, data, counts)
    for i, (u, v) in enumerate(several):
        one = jax.tree.map(lambda x, i=i: x[i], mapped)
        expected = reference.reconstruction_errors(samples, u, v).mean()
        np.testing.assert_allclose(one["error"], expected, rtol=1e-12)
        np.testing.assert_allclose(one["theta"], reference.misalignment(v), rtol=1e-11)
        np.testing.assert_allclose(one["rho"], reference.client_distances(v), atol=1e-13)
        np.testing.assert_allclose(one["kkt"], reference.kkt_violation(samples, u, v), rtol=1e-11)


@pytest.mark.slow
def test_gradients_equal_finite_differences(rng, x64, samples):
    shared, locals_ = bases(rng)
    local = stack(locals_)
    data, counts = forms(samples)["padded"]

    def moved(t, direction):
        """Local components along a curve of orthonormal matrices."""
        return stack([reference.polar(v + t * x) for v, x in zip(locals_, direction, strict=True)])

    direction = [rng.standard_normal(v.shape) for v in locals_]
    direction = [x - v @ (v.T @ x) for v, x in zip(locals_, direction, strict=True)]
    functions = {
        "theta": metrics.misalignment,
        "error": lambda v: metrics.reconstruction_error(
            jf.Personalized(shared, v), data, counts=counts
        ),
        "distance": lambda v: jnp.sum(metrics.client_distances(v) ** 2),
    }
    for name, function in functions.items():
        slope = jnp.sum(jax.grad(function)(local) * jnp.asarray(np.stack(direction)))
        h = 1e-5
        expected = (function(moved(h, direction)) - function(moved(-h, direction))) / (2 * h)
        np.testing.assert_allclose(slope, expected, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_gradient_of_misalignment_is_finite_at_a_repeated_eigenvalue():
    local = jnp.eye(4)[None, :, :2].repeat(3, axis=0)  # the mean projector is diag(1, 1, 0, 0)
    chex.assert_tree_all_finite(jax.grad(metrics.misalignment)(local))
    chex.assert_tree_all_finite(jax.jit(jax.grad(metrics.misalignment))(local[:1]))


def test_clustering_scores():
    labels = [0, 0, 0, 1, 1, 2]
    assert metrics.clustering_accuracy(labels, [5, 5, 5, 9, 9, 7]) == 1.0
    # The first groups share three items, the second ones one; the third is left over.
    assert metrics.clustering_accuracy(labels, [0, 0, 0, 0, 1, 1]) == pytest.approx(4 / 6)
    assert metrics.clustering_accuracy(labels, np.zeros(6)) == pytest.approx(0.5)


Y, U, V = np.zeros((2, 3, 4)), np.zeros((4, 1)), np.zeros((2, 4, 2))
BASES = np.stack([np.eye(4)[:, :2], np.eye(4)[:, 1:3]])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: metrics.reconstruction_error(jf.Personalized(U[:3], V), Y), "fitted"),
        (lambda: metrics.reconstruction_error(jf.Personalized(U, V[0]), Y), "fitted"),
        (lambda: metrics.reconstruction_error(jf.Personalized(U, V), Y[0]), "samples"),
        (lambda: metrics.reconstruction_error(jf.Personalized(U, V), Y[:, :, :3]), "samples"),
        (lambda: metrics.reconstruction_error(jf.Personalized(U, V), Y[:1]), "samples"),
        (
            lambda: metrics.reconstruction_error(jf.Personalized(U, V), [Y[0], Y[1, :, :2]]),
            "samples",
        ),
        (lambda: metrics.reconstruction_error(jf.Personalized(U, V), []), "samples"),
        (
            lambda: metrics.reconstruction_error(
                jf.Personalized(U, V), Moment.from_samples(jnp.asarray(Y[0]))
            ),
            "axis",
        ),
        (
            lambda: metrics.reconstruction_error(jf.Personalized(U, V), list(Y), counts=[3, 3]),
            "counts",
        ),
        (lambda: metrics.separation(jf.Personalized(U, V), Y, counts=np.ones(3)), "counts"),
        (
            lambda: metrics.captured_energy(jf.Personalized(U, V), Y, counts=np.array([-1, 1])),
            "counts",
        ),
        (
            lambda: metrics.kkt_violation(jf.Personalized(U, V), Y, counts=np.array([4, 1])),
            "counts",
        ),
        (lambda: metrics.projector_distance(U, U[:3]), "y"),
        (lambda: metrics.projector_distance(U[:, 0], U[:, 0]), "x"),
        (lambda: metrics.subspace_error(U, V, U, V[:1]), "true_local"),
        (lambda: metrics.subspace_error(U, V, U[:2], V), "true_local"),
        (lambda: metrics.misalignment(U), "local"),
        (lambda: metrics.misalignment(V[:0]), "local"),
        (lambda: metrics.client_distances(U), "local"),
        (lambda: metrics.client_distances(2 * BASES), "local: wanted orthonormal"),
        (lambda: jf.pca.cluster_clients(1e30 * BASES, 2), "local: wanted orthonormal"),
        (lambda: jf.pca.embed_clients(1e-3 * BASES), "local: wanted orthonormal"),
        (lambda: metrics.clustering_accuracy([0, 1], [0]), "labels"),
        (lambda: metrics.clustering_accuracy([], []), "labels"),
        (lambda: metrics.scaled_kkt_violation(jf.Personalized(U[:3], None), Y), "shared"),
        (lambda: metrics.scaled_kkt_violation(jf.Personalized(U, None), Y[0]), "samples"),
        (
            lambda: metrics.relative_singular_value_error(jf.Personalized(U, None), Y, np.ones(2)),
            "singular_values",
        ),
    ],
)
def test_bad_input_is_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_units_of_a_feature_change_no_metric(factor):
    def rounded(frame):
        """To single precision, in which it is not orthonormal."""
        return np.float32(frame).astype(float)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 50, 2)) @ rng.normal(size=(2, 6)) + 0.4 * rng.normal(size=(4, 50, 6))
    x = np.float32(x * np.where(np.arange(6) == 2, factor, 1)).astype(float)
    sigma = np.linalg.svd(x.reshape(-1, 6))[1][:2]
    # Of these components, the basis is not that of principal axes.
    shared = rounded(np.linalg.svd(x.reshape(-1, 6))[2][:2].T @ [[0.8, -0.6], [0.6, 0.8]])
    exact = np.linalg.qr(shared)[0]
    local = rounded([np.linalg.svd(y - y @ exact @ exact.T)[2][:1].T for y in x])

    def measure(dtype):
        # `jnp.asarray` keeps double precision under `enable_x64` alone.
        exact = dtype == np.float64
        frames = [np.linalg.qr(x)[0] if exact else x for x in (shared, local)]
        fitted = jf.Personalized(*(jnp.asarray(x, dtype) for x in frames))
        rows = np.asarray(x, dtype)
        return (
            metrics.reconstruction_error(fitted, rows),
            metrics.separation(fitted, list(rows), per_client=True),
            1 + 1e4 * metrics.relative_singular_value_error(fitted, rows, sigma),
            1 + 1e4 * metrics.scaled_kkt_violation(fitted, rows),
        )

    found = measure(np.float32)
    with jax.enable_x64(True):
        wanted = jax.tree.map(np.asarray, measure(np.float64))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))
    chex.assert_trees_all_close(found, jax.tree.map(np.float32, wanted), rtol=2e-3)


@pytest.mark.parametrize("offset", [1e4, 1e9])
def test_classes_do_not_depend_on_a_common_mean(offset):
    labels = np.repeat([0, 1, 2], 20)
    rng = np.random.default_rng(0)
    rows = 2 * rng.normal(size=(3, 2))[labels] + 0.15 * rng.normal(size=(60, 2))
    for function in (
        lambda x: metrics.spectral_clustering_accuracy(x, labels),
        lambda x: metrics.svm_accuracy(x, labels, x, labels),
        lambda x: metrics.svm_accuracy(x, labels, x, labels, kernel="rbf"),
    ):
        assert function(rows + offset) == function(rows) > 0.9


def test_little_that_components_leave_of_small_samples(rng):
    shared = np.linalg.qr(rng.normal(size=(D, R1)))[0].astype(np.float32)
    rows = rng.normal(size=(2, 30, R1)) @ shared.T + 1e-3 * rng.normal(size=(2, 30, D))
    rows = (1e-15 * rows).astype(np.float32)
    left = rows - rows.astype(float) @ shared @ shared.T.astype(float)
    exact = np.sum(left**2, axis=2)
    fitted = jf.Personalized(shared, None)
    errors = jax.jit(lambda x: metrics.reconstruction_error(fitted, x))(rows)
    np.testing.assert_allclose(errors, exact.mean(), rtol=1e-5)
    np.testing.assert_allclose(jf.pca.anomaly_score(fitted, rows), exact, rtol=2e-3)
