"""The quasi-Newton server: its steps, where they end, and how many it takes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import jaxfed as jf
from jaxfed.pca import PerPCA
from jaxfed.pca._ascent import power_near
from tests.helpers import fit, gaussian_samples
from tests.references import perpca_quasi_newton as reference
from tests.references.perpca import moment


@pytest.fixture
def samples(x64):
    """Ragged clients, those with few samples first."""
    data = jf.data.perpca_synthetic(
        key=jax.random.key(3),
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
    return [np.asarray(y) for y in data.samples]


@pytest.fixture
def far(samples):
    """A start from which some trials are rejected."""
    return jf.manifolds.stiefel.random(12, 2, key=jax.random.key(0), dtype=jnp.float64)


@pytest.mark.parametrize("ranks", [(2,) * 10, (2, 0, 1, 2, 1) * 2], ids=["alike", "unequal"])
@pytest.mark.parametrize(("seed", "penalty"), [(10, 0.0), (11, 0.0), (13, 0.3)])
def test_steps_equal_the_reference(x64, ranks, seed, penalty):
    """On noise with few samples, where some trials are rejected long before the end."""
    rng = np.random.default_rng(5)
    turns = (np.linalg.qr(rng.normal(size=(12, 12)))[0] for _ in ranks)
    spread = np.linspace(2, 0.5, 12)
    samples = [
        rng.normal(size=(n, 12)) * spread @ q for n, q in zip([8, 20] * 5, turns, strict=True)
    ]
    start = np.linalg.qr(np.random.default_rng(seed).normal(size=(12, 2)))[0]
    algorithm = PerPCA(2, 2 if ranks[1] else ranks, memory=4, local_penalty=penalty)
    warm = jf.Personalized(jnp.asarray(start), None)
    found = fit(algorithm, samples, rounds=20, warm_start=warm).history["objective"]
    points, _, accepted = reference.quasi_newton(
        samples, start, ranks, 20, memory=4, penalty=penalty
    )
    moments = [moment(y) for y in samples]
    wanted = [reference.residual(moments, point, ranks) for point in points]
    np.testing.assert_allclose(found, wanted, rtol=1e-8)
    assert penalty or not accepted[:15].all()


def common_start(samples, shared_rank, rank):
    """Top eigenvectors of the mean of V K² (K + c)⁻² Vᵀ, where c is the least K times 0.03."""
    total = 0
    for y in samples:
        values, vectors = np.linalg.eigh(y.T @ y / len(y))
        values, vectors = values[-rank:], vectors[:, -rank:]
        weights = values / (values + 0.03 * values.min())
        total = total + vectors * weights**2 @ vectors.T
    return np.linalg.eigh(total)[1][:, -shared_rank:]


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["quasi_newton", "gradient"])
def test_starts_from_what_clients_have_in_common(solver, x64):
    samples = gaussian_samples((40,) * 5, np.linspace(2, 0.5, 8), dtype=float)
    found = fit(PerPCA(2, 2, solver=solver), samples, rounds=20).history["objective"]
    warm = jf.Personalized(jnp.asarray(common_start(samples, 2, 4)), None)
    wanted = fit(PerPCA(2, 2, solver=solver), samples, rounds=20, warm_start=warm).history[
        "objective"
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.slow
def test_identical_clients_share_the_largest_components():
    (rows,) = gaussian_samples((60,), np.linspace(3, 0.5, 8))
    top = np.linalg.eigvalsh(rows.T @ rows / 60)[-3:].sum()
    for start, least, most in (("local_first", 0, 0.7), ("common", 0.9999, 1.0001)):
        shared = fit(PerPCA(3, 2, start=start), [rows] * 4, rounds=30).result.shared
        assert least < np.sum((rows @ shared) ** 2) / 60 / top < most


@pytest.mark.slow
def test_finds_known_components(x64):
    """Without noise the optimum is zero, at the components that generated the data."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    rows = [4 * basis[:, :2].T * np.sqrt(4) for _ in range(3)]
    samples = [np.concatenate([x, 6 * basis[:, 2 + i : 3 + i].T]) for i, x in enumerate(rows)]
    start = jf.manifolds.stiefel.random(8, 2, key=jax.random.key(0), dtype=jnp.float64)
    run = fit(PerPCA(2, 1), samples, rounds=60, warm_start=jf.Personalized(start, None))
    shared, local = run.result
    assert jf.manifolds.grassmann.distance(shared, basis[:, :2]) < 1e-6
    for i in range(3):
        assert abs(local[i, :, 0] @ basis[:, 2 + i]) > 1 - 1e-12
    assert run.history["objective"][-1] < 1e-10


@pytest.mark.slow
def test_ends_at_a_stationary_point(samples):
    shared, local = fit(PerPCA(2, 3, local_penalty=0.0), samples, rounds=60).result
    joint = np.concatenate([np.broadcast_to(shared, (20, 12, 2)), local], axis=2)
    np.testing.assert_allclose(
        np.swapaxes(joint, 1, 2) @ joint, np.broadcast_to(np.eye(5), (20, 5, 5)), atol=1e-12
    )
    # (24) of Shi & Kontar (2024), written out.
    gradients = [
        (np.eye(12) - w @ w.T) @ (y.T @ y / len(y)) @ w for y, w in zip(samples, joint, strict=True)
    ]
    assert np.linalg.norm(np.mean(gradients, axis=0)[:, :2]) < 1e-6
    assert np.linalg.norm([g[:, 2:] for g in gradients]) < 1e-9


# The lowest objectives of four starts after 300 rounds in double precision.
@pytest.mark.slow
@pytest.mark.parametrize(("factor", "best"), [(1, 0.64219), (10, 1.22356)])
def test_digits_take_sixty_rounds(factor, best):
    """Forty clients of one digit each, one of whose data may be larger; to 0.1 % of the best."""
    key, digits = jax.random.key(0), load_digits()
    pixels = (digits.data / 16 - digits.data.mean(0) / 16).astype("float32")
    clients = jf.data.partition_by_class(pixels, digits.target, 40, 1, key=key)
    train = jf.data.train_test_split(clients.samples, 0.5, key=key)[0]
    train[0] = factor * train[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jf.EnergyWarning)
        algorithm = PerPCA(10, 2, start="local_first", local_penalty=0.0)
        found = fit(algorithm, train, rounds=80).history["objective"]
    within = found - best <= 1e-3 * best
    assert within[-1] and np.argmax(within) + 1 <= 60


@pytest.mark.slow
def test_takes_a_fifth_of_the_rounds_of_gradient_descent(samples):
    largest = max(np.linalg.norm(y.T @ y / len(y), 2) for y in samples)
    # At the largest step size that is sure to converge.
    start = "local_first"
    slow = jf.pca.PerPCA(2, 3, solver="gradient", step_size=1.9 / largest, start=start)
    slow = fit(slow, samples, rounds=3000)
    fast = fit(PerPCA(2, 3, start=start, local_penalty=0.0), samples, rounds=60)
    slow, fast = slow.history["objective"], fast.history["objective"]
    best = min(slow[-1], fast[-1])
    slow, fast = (int(np.argmax(h - best <= 1e-8 * best)) + 1 for h in (slow, fast))
    assert 1 < 5 * fast <= slow


@pytest.mark.slow
def test_converges_from_a_distant_start(samples, far):
    far = fit(PerPCA(2, 3), samples, rounds=60, warm_start=jf.Personalized(far, None))
    near = fit(PerPCA(2, 3), samples, rounds=60)
    far, near = far.history["objective"], near.history["objective"]
    np.testing.assert_allclose(far[-1], near[-1], rtol=1e-8)
    assert far[0] > 1.5 * far[-1]


def alike(strong, seed=0, count=60):
    """Samples of clients of one distribution, and the directions of its three largest variances."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    variances = np.array([*((4, 3, 2) if not strong else (50, 30, 20)), 1.5, 1, *[0] * 15]) + 0.1
    rows = rng.normal(size=(40, count, 20)) * np.sqrt(variances)
    return (rows @ basis.T).astype(np.float32), basis[:, :3]


@pytest.mark.slow
@pytest.mark.parametrize("strong", [False, True])
def test_alike_clients_share_the_larger_components(strong):
    samples, top = alike(strong)
    found, without = (
        fit(PerPCA(3, 2, local_penalty=penalty), list(samples), rounds=100).result.shared
        for penalty in (0.03, 0.0)
    )
    errors = [np.sum((x @ x.T - top @ top.T) ** 2) for x in map(np.asarray, (found, without))]
    assert errors[0] < 0.1 and errors[1] > 2 * errors[0]


@pytest.mark.slow
def test_the_penalty_leaves_clients_that_differ_alone():
    """Few clients, whose local components are far stronger than the shared ones."""
    data = jf.data.perpca_synthetic(
        key=jax.random.key(0),
        clients=3,
        features=30,
        shared_rank=2,
        local_rank=2,
        samples=60,
        shared_scale=1.2,
        local_scale=7.0,
        noise_variance=0.25,
    )
    one, other = (
        fit(PerPCA(2, 2, local_penalty=x), list(data.samples), rounds=100).result.shared
        for x in (0.03, 0.0)
    )
    assert jf.manifolds.grassmann.distance(one, other) < 0.05


@pytest.mark.slow
def test_the_solution_has_a_derivative_by_the_penalty(x64):
    samples = jnp.asarray(alike(strong=False)[0][:10], float)
    turn = jnp.asarray(np.random.default_rng(0).normal(size=(20, 20)))

    def loss(penalty):
        model = PerPCA(3, 2, local_penalty=penalty)
        clients, key = jf.Clients.from_samples(samples), jax.random.key(0)
        run = jf.rollout(model, clients, rounds=200, key=key, adjoint=jf.adjoint.implicit())
        return jnp.sum(turn * (run.result.shared @ run.result.shared.T))

    gradient = jax.jit(jax.grad(loss))(0.1)
    near, far = (loss(0.1 + h) - loss(0.1 - h) for h in (1e-4, 2e-4))
    np.testing.assert_allclose(gradient, (8 * near - far) / 12e-4, rtol=1e-5)


@pytest.mark.slow
def test_absent_clients_do_not_stop_it(samples, far):
    """A client that is absent now and then makes no difference in the end."""
    present = np.ones((80, 20), bool)
    present[np.arange(3, 40, 6), np.arange(7)] = False
    start = jf.Personalized(far, None)
    whole = fit(PerPCA(2, 3), samples, rounds=80, warm_start=start)
    mask = jf.participation.mask(present)
    part = fit(PerPCA(2, 3), samples, rounds=80, warm_start=start, participation=mask)
    np.testing.assert_allclose(
        part.history["objective"][-1], whole.history["objective"][-1], rtol=1e-7
    )


@pytest.mark.slow
def test_the_order_of_blocks_does_not_make_other_participants():
    """Rounds read, and add up, the blocks of a source forwards and backwards in turn."""
    values = np.random.default_rng(0).normal(size=(900, 20, 8)).astype("float32")
    values *= np.linspace(0.5, 1.5, 900, dtype="float32")[:, None, None]
    clients = jf.Clients.from_source(
        values * np.float32([4, 3, 3, 2, 2, 1, 1, 1]), block_bytes=8192
    )
    history = fit(PerPCA(2, 2), clients, rounds=8).history
    assert not np.isnan(history["stopping_measure"]).any()


def test_with_drawn_participants_it_gets_as_close_as_gradient_descent(samples, far):
    start = jf.Personalized(far, None)

    def objective(algorithm):
        # With these, comparing trials of different participants ends 2 % higher.
        options = {"participation": jf.participation.uniform(10), "key": jax.random.key(1)}
        run = fit(algorithm, samples, rounds=150, warm_start=start, **options)
        found = jf.Personalized(run.result.shared, None)
        measured = fit(PerPCA(2, 3), samples, rounds=1, warm_start=found)
        return measured.history["objective"][0]

    assert objective(PerPCA(2, 3)) <= 1.001 * objective(jf.pca.PerPCA(2, 3, solver="gradient"))


@pytest.mark.slow
def test_shrinkage_equals_that_of_gradient_descent(samples):
    slow = fit(jf.pca.PerPCA(2, 3, solver="gradient", shrinkage=True), samples, rounds=3000).result
    model = PerPCA(2, 3, shrinkage=True, local_penalty=0.0)
    fast = fit(model, samples, rounds=100).result
    assert jf.manifolds.grassmann.distance(fast.shared, slow.shared) < 1e-3


@pytest.mark.slow
def test_the_unrolled_derivative_equals_that_of_the_solution_with_weights(samples):
    """Even long after the steps have become mere rounding, and with clients of zero weight."""
    rows = jnp.asarray(np.stack([y[:12] for y in samples[10:15]])) * jnp.linspace(1, 3, 12)
    turn = jnp.asarray(np.random.default_rng(0).normal(size=(12, 12)))

    def loss(rows, adjoint):
        clients = jf.Clients.from_samples(rows, weights=jnp.array([1, 0, 2, 0.5, 0]))
        run = jf.rollout(PerPCA(2, 1), clients, rounds=200, key=jax.random.key(0), adjoint=adjoint)
        return jnp.sum(turn * (run.result.shared @ run.result.shared.T))

    unrolled = jax.grad(loss)(rows, jf.adjoint.unrolled())
    implicit = jax.grad(loss)(rows, jf.adjoint.implicit())
    error = jnp.linalg.norm(unrolled - implicit) / jnp.linalg.norm(implicit)
    assert error < 3e-3


@pytest.mark.slow
def test_is_scale_invariant(samples):
    sizes = [fit(PerPCA(2, 3), [s * y for y in samples], rounds=40) for s in (1.0, 1e-30)]
    np.testing.assert_allclose(
        sizes[1].history["objective"] / 1e-60, sizes[0].history["objective"], rtol=1e-8
    )


def test_bad_input_is_refused(samples):
    with pytest.raises(ValueError, match="shared_rank"):
        PerPCA(0, 3)
    with pytest.raises(ValueError, match="local_rank"):
        PerPCA(2, -1)
    with pytest.raises(ValueError, match="memory"):
        PerPCA(2, 3, memory=0)
    with pytest.raises(ValueError, match=r"shared_rank \+ local_rank"):
        fit(PerPCA(8, 5), samples, rounds=1)
    with pytest.raises(ValueError, match="2 ranks for 20 clients"):
        fit(PerPCA(2, (1, 2)), samples, rounds=1)


def test_the_unit_is_the_power_of_two_above_the_largest_number():
    info = np.finfo(np.float32)
    numbers = [1, 2, 1.5, 0.75, 3e-30, 3e30, info.tiny, info.max, 1e-40, 0, np.inf, np.nan]
    largest = np.array(numbers, np.float32)
    normal = (largest > info.tiny) & np.isfinite(largest)
    with np.errstate(over="ignore"):
        wanted = np.ldexp(np.float32(1), np.where(normal, np.frexp(largest)[1], 0))
    several = np.stack([-largest, largest / 4], axis=1)
    np.testing.assert_array_equal(jax.vmap(power_near)(several), wanted)
    # `jnp.frexp` and `jnp.ldexp` take four times as many lines to compile.
    assert len(jax.jit(power_near).lower(largest).as_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("features", "local_rank", "shrinkage"),
    [(6, 2, False), (40, 2, False), (6, 2, True), (6, (2, 1), False)],
)
def test_the_first_message_is_that_of_perpca_computed_once(features, local_rank, shrinkage, key):
    samples = gaussian_samples((9, 9), np.linspace(2, 1, features))
    data = jax.tree.map(lambda x: x[0], jf.Clients.from_samples(samples).data)
    model = PerPCA(1, local_rank, shrinkage=shrinkage)
    other = jf.pca.PerPCA(1, local_rank, solver="gradient", step_size=1.0, shrinkage=shrinkage)
    number = jnp.asarray(1)
    member = model.prepare(data, number, 5)
    assert (member.rows is not None) == (local_rank == 2 and not shrinkage)
    wanted = other.first_message(key, other.prepare(data, number, 5), None)["moment"]
    sent = model.first_message(key, member, None)["moment"]
    np.testing.assert_array_equal(sent.value, wanted.value)
