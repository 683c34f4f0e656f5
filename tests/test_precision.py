"""Full precision unless the user says otherwise, and what becomes of algorithms with less.

What a TPU's matrix unit makes of products is emulated, see `bench/tables/precision.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import jaxfed as jf
from bench.tables import precision as bench
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg.precision import client_matmul

HIGHEST, HIGH, DEFAULT = lax.Precision.HIGHEST, lax.Precision.HIGH, lax.Precision.DEFAULT


def marks(jaxpr):
    """With which precisions the products of a program are marked."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive is lax.dot_general_p:
            found |= set(equation.params["precision"] or [None])
        for inner in jaxprs_in_params(equation.params):
            found |= marks(inner)
    return found


def program(algorithm):
    def run(x):
        clients = jf.Clients(Samples(x, jnp.full(3, 20.0)), jnp.arange(3), jnp.full(3, 1 / 3))
        return jf.rollout(algorithm, clients, rounds=2, key=jax.random.key(0)).result

    return jax.make_jaxpr(run)(jnp.ones((3, 20, 8))).jaxpr


@pytest.mark.parametrize(
    "kind", [jf.pca.SubspaceIteration, pytest.param(jf.pca.BlockLanczos, marks=pytest.mark.slow)]
)
def test_runs_are_at_full_precision_unless_the_user_chooses(kind):
    """What holds the constraints stays so even then."""
    assert marks(program(kind(2))) == {HIGHEST}
    with jax.default_matmul_precision("bfloat16"):
        assert marks(program(kind(2))) == {HIGHEST, DEFAULT}
    with jax.default_matmul_precision("high"):
        assert marks(program(kind(2))) == {HIGHEST, HIGH}
    assert marks(program(kind(2))) == {HIGHEST}


@pytest.mark.slow
def test_fit_follows_the_choice(key):
    """Each choice is a program of its own."""
    clients = jf.Clients.from_samples(jax.random.normal(key, (3, 20, 8)))

    def fitted():
        return jf.fit(jf.pca.SubspaceIteration(2), clients, rounds=2, key=key).result.shared

    default = fitted()
    with jax.default_matmul_precision("bfloat16"):
        chosen = fitted()
    np.testing.assert_array_equal(default, chosen)  # a processor has no choice
    assert jax.config.jax_default_matmul_precision is None


def test_emulated_passes():
    """Of the rounding of bfloat16, of its square, and none; in loops too."""
    a, b = jax.random.normal(jax.random.key(0), (2, 64, 64))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)

    def error(precision, marks=True, loop=False):
        def product(a, b):
            return jnp.matmul(a, b, precision=precision)

        def looped(a, b):
            return lax.fori_loop(0, 1, lambda _, c: c + product(a, b), jnp.zeros((64, 64)))

        result = jax.jit(bench.emulated(looped if loop else product, marks=marks))(a, b)
        return np.linalg.norm(result - exact) / np.linalg.norm(exact)

    for loop in False, True:
        assert 1e-3 < error("bfloat16", loop=loop) < 4e-3
        assert 1e-6 < error("high", loop=loop) < 2e-5
        assert error("highest", loop=loop) < 1e-6
        assert 1e-3 < error("highest", marks=False, loop=loop) < 4e-3
    rounded = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (a, b)]
    result = jax.jit(bench.emulated(lambda a, b: jnp.matmul(a, b, precision="bfloat16")))(a, b)
    np.testing.assert_allclose(result, rounded[0] @ rounded[1], rtol=1e-4, atol=1e-4)


def check(kind, rounds):
    found = bench.ends(kind, rounds)
    three, one = (
        bench.measured(found[name], found["highest"]) for name in ("three passes", "one pass")
    )
    assert three[0] < 1e-4
    assert one[0] < 2e-2
    if not np.isnan(one[1]):
        rank = found["highest"][1].shape[1]
        assert three[1] < 1e-3 and one[1] < 2e-2
        assert three[2] < 1e-5 * rank and one[2] < 1e-5 * rank
    return found


@pytest.mark.slow
def test_less_precise_products_keep_the_constraint_and_nearly_the_solution():
    found = check("SubspaceIteration", 30)
    everywhere = bench.measured(found["one pass everywhere"], found["highest"])
    assert everywhere[2] > 1e-4  # which is why some products are always full


@pytest.mark.slow
@pytest.mark.parametrize(("m", "k", "n"), [(3, 2, 700), (4, 16, 5), (3, 17, 5), (1, 3, 1)])
@pytest.mark.parametrize("once", [False, True])
def test_products_of_many_clients_matrices(m, k, n, once, x64):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4, m, k)), rng.normal(size=(2, 4, k, n))

    def product(a, b):
        return client_matmul(a, b, once=once)

    # Both mapped, one of them, and over runs besides that share the other.
    for axes, left, right in (
        ([(0, 0)], a[0], b[0]),
        ([(0, None)], a[0], b[0, 0]),
        ([(None, 0)], a[0, 0], b[0]),
        ([(0, 0), (0, None)], a, b[0]),
        ([(0, None), (None, 0)], a[0], b[0]),
        ([], a[0, 0], b[0, 0]),
    ):
        mapped, plain = product, jnp.matmul
        for each in axes:
            mapped, plain = jax.vmap(mapped, each), jax.vmap(plain, each)
        expected = plain(left, right)
        chex.assert_trees_all_close(jax.jit(mapped)(left, right), expected, atol=1e-13)
        found, known = (jax.vjp(function, left, right)[1](expected) for function in (mapped, plain))
        chex.assert_trees_all_close(found, known, atol=1e-11)
