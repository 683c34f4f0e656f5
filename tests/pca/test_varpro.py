"""Variable projection: the same optimum as gradient descent, in far fewer rounds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf


@pytest.fixture
def problem(x64):
    data = jf.data.perpca_synthetic(
        jax.random.key(3),
        clients=20,
        features=12,
        shared_rank=2,
        local_rank=3,
        samples=[12] * 10 + [60] * 10,
        shared_scale=2.0,
        local_scale=3.0,
        noise_variance=0.5,
        dtype=jnp.float64,
    )
    return jf.Clients.from_samples(data.samples)


def rounds_to(history, optimum, relative=1e-8):
    reached = history["objective"] - optimum <= relative * abs(optimum)
    return int(np.argmax(reached)) + 1 if reached.any() else len(reached) + 1


@pytest.mark.parametrize("method", [None, "spectrum", "projector"])
def test_needs_a_fifth_of_the_rounds_at_most(problem, key, method):
    start = None
    if method is not None:
        start = jf.fit(jf.pca.OneShot(2, 3, method=method), problem, rounds=1, key=key)
    largest = max(
        float(jnp.linalg.eigvalsh(y[: int(n)].T @ y[: int(n)] / n)[-1])
        for y, n in zip(problem.data.values, problem.data.count, strict=True)
    )
    # Gradient descent at the largest step size that is sure to converge.
    slow = jf.fit(
        jf.pca.PerPCA(2, 3, step_size=1.9 / largest),
        problem,
        rounds=3000,
        key=key,
        warm_start=start,
    )
    fast = jf.fit(jf.pca.VarProPerPCA(2, 3), problem, rounds=60, key=key, warm_start=start)
    optimum = min(slow.history["objective"][-1], fast.history["objective"][-1])
    assert 5 * rounds_to(fast.history, optimum) <= rounds_to(slow.history, optimum) <= 3000


def test_ends_at_a_stationary_point(problem, key):
    result = jf.fit(jf.pca.VarProPerPCA(2, 3), problem, rounds=60, key=key).result
    shared, local = result
    moments = jax.vmap(lambda y, n: y.T @ y / n)(problem.data.values, problem.data.count)
    # (24) of Shi & Kontar (2024), written out.
    gradient = jax.vmap(
        lambda s, v: (
            (jnp.eye(12) - shared @ shared.T - v @ v.T) @ s @ jnp.concatenate([shared, v], axis=1)
        )
    )(moments, local)
    assert jnp.linalg.norm(gradient[:, :, :2].mean(0)) < 1e-7
    assert jnp.linalg.norm(gradient[:, :, 2:]) < 1e-9
    joint = jnp.concatenate([jnp.broadcast_to(shared, (20, 12, 2)), local], axis=2)
    chex.assert_trees_all_close(
        jnp.einsum("mdr,mds->mrs", joint, joint),
        jnp.broadcast_to(jnp.eye(5), (20, 5, 5)),
        atol=1e-12,
    )


def test_climbs_from_anywhere(problem, key):
    """From a random start, where some trials must be rejected, the line search is never lost."""
    start = jf.Personalized(jf.manifolds.stiefel.random(key, 12, 2, dtype=jnp.float64), None)
    far = jf.fit(jf.pca.VarProPerPCA(2, 3), problem, rounds=60, key=key, warm_start=start)
    near = jf.fit(jf.pca.VarProPerPCA(2, 3), problem, rounds=60, key=key)
    np.testing.assert_allclose(
        far.history["objective"][-1], near.history["objective"][-1], rtol=1e-8
    )
    assert far.history["objective"][0] > 1.5 * far.history["objective"][-1]


def test_refuses_what_does_not_fit(problem, key):
    with pytest.raises(ValueError, match="shared_rank"):
        jf.pca.VarProPerPCA(0, 3)
    with pytest.raises(ValueError, match="local_rank"):
        jf.pca.VarProPerPCA(2, -1)
    with pytest.raises(ValueError, match=r"shared_rank \+ local_rank"):
        jf.fit(jf.pca.VarProPerPCA(8, 5), problem, rounds=1, key=key)
