"""Products with second moments: the kernel, interpreted, against plain ones, and its derivative."""

import re
from functools import partial
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxfed_kernels import second_moment, second_moment_reads_less, second_moment_reference

from jaxfed.linalg import Moment, _dispatch, polar
from jaxfed.linalg.platforms import per_platform

interpreted = partial(second_moment, interpret=True)


def matrices(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def check(clients, samples, features, rank, block=None, counts=None, dtype=np.float32, quick=False):
    x, w = matrices((clients, samples, features), (clients, rank, features), dtype=dtype)
    if counts is not None:  # what is no sample may be anything
        x = jnp.where((jnp.arange(samples) < counts[:, None])[..., None], x, jnp.nan)
    precision = lax.Precision.DEFAULT if quick else lax.Precision.HIGHEST
    product = interpreted(x, w, counts, block=block, precision=precision)
    assert product.dtype == jnp.float32
    assert product.shape == w.shape
    wide, thin = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if counts is not None:
        wide = np.where(np.isnan(wide), 0, wide)
    exact = (thin @ wide.mT) @ wide
    tolerance = 1e-2 if quick else 1e-6
    for result in (product, second_moment_reference(x, w, counts, precision=precision)):
        assert np.linalg.norm(result - exact) <= tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("dtype", "quick"),
    [(np.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)],
    ids=["float32", "bfloat16", "bfloat16 in one pass"],
)
@pytest.mark.parametrize(
    "shape", [(2, 300, 130, 3, 128), (3, 257, 40, 9, 128), (1, 5, 7, 1, None), (0, 9, 4, 2, None)]
)
def test_kernel_is_the_two_products(shape, dtype, quick):
    check(*shape, dtype=dtype, quick=quick)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.tuples(st.integers(0, 4), st.integers(0, 700), st.integers(1, 300), st.integers(1, 40)),
    st.sampled_from([None, 128, 256]),
    st.sampled_from([(np.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)]),
    st.data(),
)
def test_kernel_at_any_size(shape, block, kind, data):
    counts = None
    if data.draw(st.booleans()):
        most = st.integers(0, shape[1])
        counts = np.asarray(data.draw(st.lists(most, min_size=shape[0], max_size=shape[0])), int)
    check(*shape, block, counts, *kind)


def test_ragged_counts():
    check(4, 300, 24, 3, 128, np.array([300, 129, 1, 0]))


def test_what_is_better_left_to_two_products():
    assert second_moment_reads_less(2048, 784, 24, jnp.float32)
    assert not second_moment_reads_less(2048, 784, 24, jnp.float64)
    assert not second_moment_reads_less(8, 32, 5, jnp.float32)  # over before a step begins
    assert not second_moment_reads_less(300, 784, 5, jnp.float32)  # tiles a sixth empty
    assert not second_moment_reads_less(4096, 1024, 2000, jnp.float32)  # does not fit on the chip


@pytest.fixture
def on_a_tpu():
    """What a TPU would be given, with the kernel interpreted."""
    kernels = dict.fromkeys(("cpu", "tpu"), _dispatch._in_one_pass)
    here = per_platform(_dispatch._two_products, kernels=kernels)
    with (
        mock.patch.object(_dispatch, "second_moment", interpreted),
        mock.patch.object(_dispatch, "_chosen_product", here),
    ):
        jax.clear_caches()
        yield
    jax.clear_caches()


SIZE = (300, 128)


def for_tpu(f, *arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


def kernels(program):
    """The shapes of the thin matrices that the kernels of a program for TPUs are given."""
    calls = re.findall(r"tpu_custom_call.* -> tensor<([0-9x]+)xf32>", program)
    return [tuple(map(int, call.split("x"))) for call in calls]


def over_clients(w, x):
    moment = jax.vmap(Moment.from_samples)(x)
    return jax.vmap(Moment.row_products, in_axes=(0, 0 if w.ndim == 3 else None))(moment, w)


def expected(w, x):
    scores = jnp.einsum("...rd,cnd->...crn" if w.ndim == 2 else "...crd,cnd->...crn", w, x)
    product = jnp.einsum("...crn,cnd->...crd", scores, x)
    return product / SIZE[0], jnp.einsum("...crn,...csn->...crs", scores, scores) / SIZE[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "given"),
    [((3, 2, 128), (3, 2, 128)), ((2, 128), (3, 2, 128)), ((5, 3, 2, 128), (3, 10, 128))],
    ids=["a basis each", "one for all", "runs"],
)
def test_clients_are_one_call_and_runs_join_their_rows(on_a_tpu, shape, given):
    """Mapped over clients, and over runs that share the samples."""
    x, w = matrices((3, *SIZE), shape)
    f = jax.vmap(over_clients, in_axes=(0, None)) if w.ndim == 4 else over_clients
    chex.assert_trees_all_close(f(w, x), expected(w, x), rtol=1e-4, atol=1e-4)
    with mock.patch.object(_dispatch, "second_moment", second_moment):
        jax.clear_caches()
        assert kernels(for_tpu(f, w, x)) == [given]


def step(x, w):
    """What rounds do: a product, and the polar factor of the moved basis."""
    return polar(w + 0.1 * Moment.from_samples(x).mv(w))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [True, False])
def test_derivatives_are_those_of_the_two_products(on_a_tpu, wide):
    x, w, dx, dw = matrices(SIZE, (SIZE[1], 2), SIZE, (SIZE[1], 2))
    if wide:
        w, dw = w.T, dw.T
    product = partial(_dispatch.second_moment_product, wide=wide)
    plain = partial(_dispatch._two_products, wide=wide, precision=lax.Precision.HIGHEST)

    def loss(f):
        return lambda x, w: jnp.sum(jnp.sin(f(x, w) / 100))

    close = partial(chex.assert_trees_all_close, rtol=2e-5, atol=2e-4)
    close(jax.jvp(product, (x, w), (dx, dw)), jax.jvp(plain, (x, w), (dx, dw)))
    close(*(jax.grad(loss(f), argnums=(0, 1))(x, w) for f in (product, plain)))
    second = [
        jax.jvp(jax.grad(loss(f), argnums=(0, 1)), (x, w), (dx, dw)) for f in (product, plain)
    ]
    close(*second)


def test_gradient_through_polar_and_clients():
    """The kernel forward and back, and nowhere the two products."""
    x, w = matrices((3, *SIZE), (SIZE[1], 2))

    def loss(w):
        return jnp.sum(jax.vmap(step, in_axes=(0, None))(x, w) ** 3)

    program = for_tpu(jax.grad(loss), w)
    assert set(kernels(program)) == {(3, 2, SIZE[1])}
    assert "dot_general" in program
    assert not re.search(r"dot_general.*3x300x128", program)


@pytest.mark.slow
def test_gradient_through_polar_and_clients_is_right(on_a_tpu):
    x, w = matrices((3, *SIZE), (SIZE[1], 2))

    def loss(w):
        return jnp.sum(jax.vmap(step, in_axes=(0, None))(x, w) ** 3)

    gradient = jax.jit(jax.grad(loss))(w)
    two = partial(_dispatch._two_products, precision=lax.Precision.HIGHEST)
    with mock.patch.object(_dispatch, "_product", lambda x, w, wide: two(x, w, wide=wide)):
        jax.clear_caches()
        plain = jax.jit(jax.grad(loss))(w)
    chex.assert_trees_all_close(gradient, plain, rtol=1e-4, atol=1e-5)


def test_is_chosen_where_a_program_is_lowered():
    """On this machine, which has no TPU."""
    x, w = (
        jax.ShapeDtypeStruct((4, 1024, 128), np.float32),
        jax.ShapeDtypeStruct((4, 128, 3), np.float32),
    )
    traced = jax.jit(jax.vmap(lambda x, w: Moment.from_samples(x).mv(w))).trace(x, w)
    for platform, kernels in ("tpu", 1), ("cuda", 0), ("cpu", 0):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert program.count("custom_call @tpu_custom_call") == kernels


def test_a_processor_gets_the_thin_side_first():
    """Turned around, as the compiler would have it, its library copies all samples."""
    x, w = matrices((3, 100, 80), (80, 4))
    for wide, thin in ((False, w), (True, w.T)):
        product = partial(_dispatch.second_moment_product, w=thin, wide=wide)
        program = jax.jit(jax.vmap(product)).lower(x).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program)
        assert "3,4,80" in shapes and "3,80,4" not in shapes, shapes
        exact = np.einsum("cnd,cne,er->cdr", *2 * [np.asarray(x, np.float64)], w)
        found = jax.vmap(product)(x)
        np.testing.assert_allclose(found.mT if wide else found, exact, rtol=1e-4, atol=1e-3)
