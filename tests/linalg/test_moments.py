"""Second moments: both representations are one matrix."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed.linalg import Moment
from jaxfed.linalg.moments import should_densify

RNG = np.random.default_rng(0)
FEATURES = 6


def padded_samples(n, padding=0):
    return jnp.asarray(np.pad(RNG.normal(size=(n, FEATURES)), ((0, padding), (0, 0))))


def pair(n, padding=0):
    """The same moment twice, and its matrix."""
    samples = padded_samples(n, padding)
    real = np.asarray(samples[:n])
    moment = Moment.from_samples(samples, n)
    return moment, moment.densified(), real.T @ real / n


SIZES = [(20, 0), (20, 3), (4, 0), (4, 5), (3, 1)]


@pytest.mark.parametrize(("n", "padding"), SIZES)
def test_representations_agree(n, padding, x64):
    moment, dense, matrix = pair(n, padding)
    w = jnp.asarray(RNG.normal(size=(FEATURES, 2)))
    basis = jnp.linalg.qr(w)[0]
    projector = np.eye(FEATURES) - basis @ basis.T
    for each in (moment, dense):
        assert each.dim == FEATURES
        assert each.count == n
        chex.assert_trees_all_close(each.matrix(), matrix, atol=1e-13)
        chex.assert_trees_all_close(each.trace, np.trace(matrix), atol=1e-13)
        chex.assert_trees_all_close(each.mv(w), matrix @ w, atol=1e-13)
        chex.assert_trees_all_close(each.quadratic(w), np.trace(w.T @ matrix @ w), atol=1e-12)
        product, within = each.row_products(w.T)
        chex.assert_trees_all_close(product, w.T @ matrix, atol=1e-12)
        chex.assert_trees_all_close(within, w.T @ matrix @ w, atol=1e-12)
        rest = each.deflate(basis)
        assert (rest.dense is None) == (each.dense is None)
        chex.assert_trees_all_close(rest.matrix(), projector @ matrix @ projector, atol=1e-13)
        chex.assert_trees_all_close(rest.trace, np.trace(projector @ matrix), atol=1e-13)


@pytest.mark.parametrize(("n", "padding", "rank"), [(20, 3, 3), (4, 0, 3), (4, 1, 1), (3, 1, 5)])
def test_top_is_the_same_by_either_side(n, padding, rank, x64):
    moment, _, matrix = pair(n, padding)
    values, vectors = jax.jit(Moment.top, static_argnums=1)(moment, rank)
    exact_values, exact_vectors = (x[..., ::-1] for x in np.linalg.eigh(matrix))
    chex.assert_trees_all_close(values, exact_values[:rank], atol=1e-13)
    chex.assert_trees_all_close(
        jax.jit(Moment.largest_eigenvalue)(moment), exact_values[0], atol=1e-13
    )
    # Beyond the rank of the moment the basis is completed, somehow.
    chex.assert_trees_all_close(vectors.T @ vectors, np.eye(rank), atol=1e-13)
    known = min(rank, n)
    exact = exact_vectors[:, :known] * np.sign(np.sum(exact_vectors[:, :rank] * vectors, 0))[:known]
    chex.assert_trees_all_close(vectors[:, :known], exact, atol=1e-12)
    largest = np.take_along_axis(np.asarray(vectors), np.abs(vectors).argmax(0)[None], 0)
    assert (largest > 0).all()


@pytest.mark.parametrize("n", [4, 20])
def test_derivative_of_the_top_subspace(n, x64):
    samples, direction = RNG.normal(size=(2, n, FEATURES))
    weights = RNG.normal(size=(FEATURES, FEATURES))

    def loss(samples):
        values, vectors = Moment.from_samples(samples).top(2)
        return jnp.sum(weights * (vectors @ vectors.T)) + jnp.sum(values)

    def exact(samples):
        values, vectors = np.linalg.eigh(samples.T @ samples / n)
        return np.sum(weights * (vectors[:, -2:] @ vectors[:, -2:].T)) + np.sum(values[-2:])

    slope = np.vdot(jax.jit(jax.grad(loss))(samples), direction)
    step = 1e-6 * direction
    expected = (exact(samples + step) - exact(samples - step)) / 2e-6
    chex.assert_trees_all_close(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("n", [4, 20])
def test_derivative_of_the_top_subspace_beside_others(n, scale, x64):
    """In both modes, by samples and by the basis that is left out, along turns of it."""
    rng = np.random.default_rng(1)
    samples, samples_change = rng.normal(size=(2, n, FEATURES))
    basis, _ = jnp.linalg.qr(rng.normal(size=(FEATURES, 2)))
    skew = rng.normal(size=(FEATURES, FEATURES))
    skew = skew - skew.T
    weights = rng.normal(size=(FEATURES, FEATURES))

    def loss(samples, basis):
        values, vectors = Moment.from_samples(samples * scale).top(2, beside=basis)
        return jnp.sum(weights * jnp.tanh(vectors @ vectors.T)) + jnp.sum(values) / scale**2

    def exact(step):
        turned = np.asarray(jax.scipy.linalg.expm(step * skew)) @ basis
        left = samples + step * samples_change
        left = left - left @ turned @ turned.T
        values, vectors = np.linalg.eigh(left.T @ left / n)
        projector = vectors[:, -2:] @ vectors[:, -2:].T
        return np.sum(weights * np.tanh(projector)) + np.sum(values[-2:])

    at, change = (samples, basis), (samples_change, skew @ basis)
    value, forward = jax.jit(lambda at, change: jax.jvp(loss, at, change))(at, change)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(*at)
    backward = sum(np.vdot(g, c) for g, c in zip(gradient, change, strict=True))
    expected = (8 * (exact(1e-4) - exact(-1e-4)) - exact(2e-4) + exact(-2e-4)) / 12e-4
    chex.assert_trees_all_close(value, exact(0.0), rtol=1e-12)
    chex.assert_trees_all_close(forward, expected, rtol=1e-8)
    chex.assert_trees_all_close(backward, expected, rtol=1e-8)


@pytest.mark.slow
def test_the_second_derivative_beside_others(x64):
    rng = np.random.default_rng(2)
    samples, direction = rng.normal(size=(2, 4, FEATURES))
    basis, _ = jnp.linalg.qr(rng.normal(size=(FEATURES, 2)))
    weights = rng.normal(size=(FEATURES, FEATURES))

    def loss(samples):
        vectors = Moment.from_samples(samples).top(1, beside=basis)[1]
        return jnp.sum(weights * jnp.tanh(vectors @ vectors.T))

    slope = jax.jit(lambda samples: jax.jvp(loss, (samples,), (direction,))[1])
    second = jax.jit(lambda samples: jax.jvp(jax.grad(loss), (samples,), (direction,))[1])
    expected = (slope(samples + 1e-5 * direction) - slope(samples - 1e-5 * direction)) / 2e-5
    chex.assert_trees_all_close(np.vdot(second(samples), direction), expected, rtol=1e-6)


@pytest.mark.slow
def test_a_derivative_beside_others_keeps_nothing_of_the_size_of_the_samples():
    samples = jnp.asarray(RNG.normal(size=(100, 500)), jnp.float32)
    basis = jnp.eye(500, 3, dtype=jnp.float32)

    def kept(top):
        _, pull = jax.vjp(lambda basis: top(Moment.from_samples(samples), basis)[1], basis)
        return [x.size >= samples.size for x in jax.tree.leaves(pull)].count(True)

    assert kept(lambda moment, basis: moment.top(2, beside=basis)) == 1  # the samples
    assert kept(lambda moment, basis: moment.deflate(basis).top(2)) > 1


@pytest.mark.parametrize("n", [4, 20])
def test_top_beside_others_where_there_is_less(n):
    """Directions that do not exist, ties, zeros: no derivative is NaN."""
    kinds = np.zeros((4, n, FEATURES), np.float32)
    kinds[1, 0, 0] = kinds[2, :] = 1.0
    kinds[3, range(4), range(4)] = 1.0
    basis = np.eye(FEATURES, 2, dtype=np.float32)

    def loss(samples, basis):
        values, vectors = Moment.from_samples(samples).top(3, beside=basis)
        return jnp.sum((vectors @ vectors.T)[0] ** 3) + jnp.sum(values)

    for scale in (1.0, 1e-12, 1e12):
        found = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None)))(
            kinds * scale, basis
        )
        chex.assert_tree_all_finite(found)


def test_one_program_serves_clients_of_all_sizes(x64):
    """Under vmap and jit, with padding, and without any sample at all."""
    sizes = np.array([4.0, 3.0, 1.0, 0.0])
    samples = np.stack(
        [np.pad(RNG.normal(size=(int(n), FEATURES)), ((0, 4 - int(n)), (0, 0))) for n in sizes]
    )
    w = jnp.asarray(RNG.normal(size=(4, FEATURES, 2)))

    @jax.jit
    @jax.vmap
    def use(samples, count, w):
        moment = Moment.from_samples(samples, count)
        return moment.mv(w), moment.densified().mv(w), moment.trace, *moment.top(3)

    thin, dense, trace, values, vectors = use(samples, sizes, w)
    chex.assert_trees_all_close(thin, dense, atol=1e-13)
    for i, n in enumerate(sizes):
        matrix = samples[i].T @ samples[i] / max(n, 1)
        chex.assert_trees_all_close(thin[i], matrix @ w[i], atol=1e-13)
        chex.assert_trees_all_close(trace[i], np.trace(matrix), atol=1e-13)
        chex.assert_trees_all_close(values[i], np.linalg.eigvalsh(matrix)[:2:-1], atol=1e-13)
        chex.assert_trees_all_close(vectors[i].T @ vectors[i], np.eye(3), atol=1e-13)


def test_is_a_pytree_of_what_it_has():
    moment, dense, _ = pair(4)
    assert [leaf.shape for leaf in jax.tree.leaves(moment)] == [(4, FEATURES), (), ()]
    assert [leaf.shape for leaf in jax.tree.leaves(dense)] == [(FEATURES, FEATURES), (), ()]


def test_product_never_forms_the_matrix():
    moment = Moment.from_samples(jnp.ones((3, 50)))
    program = str(jax.make_jaxpr(Moment.mv)(moment, jnp.ones((50, 2))))
    assert "50,50" not in program
    assert "50,50" in str(jax.make_jaxpr(Moment.matrix)(moment))


def test_forming_pays_after_enough_rounds():
    # samples, features, rank, and the rounds after which it pays (None: never)
    table = [(1000, 15, 12, 1), (120, 784, 20, None), (392, 784, 20, None), (1000, 784, 20, 17)]
    for samples, features, rank, pays in table:
        for rounds in (1, 2, 16, 17, 10**6):
            wanted = pays is not None and rounds >= pays
            assert should_densify(samples, features, rank, rounds) == wanted


def test_refuses_what_is_no_moment():
    with pytest.raises(ValueError, match=r"^samples: wanted .*\(n, d\)"):
        Moment.from_samples(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"^samples: wanted .* floating-point"):
        Moment.from_samples(jnp.ones((3, 4), jnp.int32))
    with pytest.raises(ValueError, match="matrix: wanted a square matrix"):
        Moment.from_dense(jnp.ones((3, 4)))
    with pytest.raises(ValueError, match="rank: wanted a whole number from 1 to 4, got 5"):
        Moment.from_samples(jnp.ones((2, 4))).top(5)


@pytest.mark.slow
def test_largest_eigenvalue_of_many_features(x64):
    """By products, or where these do not tell eigenvalues apart, by a decomposition."""
    gaps = np.array([[1e-2], [1e-5], [1e-9]])
    values = np.maximum(1 - gaps * np.arange(520), 0)
    turn = np.eye(520) - np.full((520, 520), 2 / 520)
    moments = jax.vmap(Moment.from_dense)(jnp.asarray(turn * values[:, None] @ turn))
    found = jax.jit(jax.vmap(Moment.largest_eigenvalue))(moments)
    chex.assert_trees_all_close(found, np.ones(3), atol=1e-13)


@pytest.mark.slow
def test_derivative_of_the_largest_eigenvalue(x64):
    """With fewer samples than features, of the samples' Gram matrix."""
    samples = RNG.normal(size=(4, FEATURES))
    left, singular, right = np.linalg.svd(samples)
    slope = jax.grad(lambda x: Moment.from_samples(x).largest_eigenvalue())(jnp.asarray(samples))
    wanted = 2 * singular[0] / 4 * np.outer(left[:, 0], right[0])
    chex.assert_trees_all_close(slope, wanted, atol=1e-12)
