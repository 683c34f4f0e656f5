"""Derivatives of runs from few stored states, and of fixed points of the round."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf

FEATURES, CLIENTS, SAMPLES, RANK = 4, 3, 6, 2

pytestmark = pytest.mark.usefixtures("x64")


def drawn(seed):
    """Samples whose second moments decay clearly, and a matrix to weigh projectors with."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(CLIENTS, SAMPLES, FEATURES)) * [3.0, 2.5, 1.0, 0.5]
    return values, rng.normal(size=(FEATURES, FEATURES)), rng.normal(size=values.shape)


def top(values):
    """The first eigenvectors of all samples together, in order."""
    rows = values.reshape(-1, FEATURES)
    return np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :RANK]


def along(function, at, direction, step=1e-4):
    """Central difference of fourth order."""
    near, far = (
        function(at + h * direction) - function(at - h * direction) for h in (step, 2 * step)
    )
    return (8 * near - far) / (12 * step)


# --- checkpointed --------------------------------------------------------------------------------


def weighed(values, adjoint, rounds, tol=None):
    """A weighted sum of the projector, and the history, of a run from a random start."""
    solution = jf.rollout(
        jf.pca.SubspaceIteration(RANK),
        jf.Clients.from_samples(values),
        rounds=rounds,
        key=jax.random.key(0),
        tol=tol,
        adjoint=adjoint,
        metrics=lambda result: {"first": result.shared[0, 0]},
        metrics_every=2,
    )
    projector = solution.result.shared @ solution.result.shared.T
    return (drawn(0)[1] * projector).sum(), solution.history


@pytest.mark.slow
def test_checkpointed_derivatives_equal_unrolled_ones():
    def all_of_them(values):
        ways = jf.adjoint.unrolled(), jf.adjoint.checkpointed(2)
        return [
            jax.value_and_grad(weighed, has_aux=True)(values, adjoint, rounds=7) for adjoint in ways
        ]

    wanted, found = jax.jit(all_of_them)(drawn(0)[0])
    assert jnp.abs(wanted[1]).max() > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, wanted)


@pytest.mark.slow
def test_a_run_that_stops_by_its_tolerance_has_a_reverse_derivative():
    values, _, _ = drawn(1)
    (_, history), gradient = jax.jit(
        jax.value_and_grad(
            lambda values: weighed(values, jf.adjoint.checkpointed(3), 30, tol=1e-3), has_aux=True
        )
    )(values)
    objectives = np.asarray(history["objective"])
    rounds = int(np.isfinite(objectives).sum())
    assert 2 < rounds < 28 and np.isfinite(objectives[:rounds]).all()
    unrolled = jax.jit(jax.grad(lambda v: weighed(v, jf.adjoint.unrolled(), rounds)[0]))(values)
    np.testing.assert_allclose(gradient, unrolled, atol=1e-12)


@pytest.mark.slow
def test_checkpointed_runs_take_less_memory():
    values = np.random.default_rng(0).normal(size=(CLIENTS, 4, 60))

    def memory(adjoint):
        def loss(values):
            clients, key = jf.Clients.from_samples(values), jax.random.key(0)
            algorithm = jf.pca.SubspaceIteration(20)
            run = jf.rollout(algorithm, clients, rounds=1024, key=key, adjoint=adjoint)
            return (run.result.shared**3).sum()

        program = jax.jit(jax.grad(loss)).lower(values).compile()
        return program.memory_analysis().temp_size_in_bytes

    ways = jf.adjoint.unrolled(), jf.adjoint.checkpointed(), jf.adjoint.checkpointed(2)
    unrolled, root, least = map(memory, ways)
    assert root < unrolled / 10 and least < 0.7 * root


# --- implicit ------------------------------------------------------------------------------------


def loss(values, frame, turned, report, throw=False):
    """A function of the subspace after one round, plus a multiple of one of its basis."""
    solution = jf.rollout(
        jf.pca.SubspaceIteration(RANK),
        jf.Clients.from_samples(values),
        rounds=1,
        key=jax.random.key(0),
        warm_start=jf.Personalized(frame, None),
        adjoint=jf.adjoint.implicit(report=report, throw=throw),
    )
    shared, weights = solution.result.shared, jnp.asarray(drawn(0)[1])
    of_basis = (weights[:, :RANK] * shared).sum()
    return jnp.tanh(weights * (shared @ shared.T)).sum() + turned * of_basis


def reference(values):
    """The same function of the subspace of the samples."""
    frame = top(values)
    return np.tanh(drawn(0)[1] * (frame @ frame.T)).sum()


@functools.cache
def compiled():
    """Gradients of several problems at once."""
    gradient = jax.grad(loss, argnums=(0, 1, 3))
    return jax.jit(jax.vmap(gradient, in_axes=(0, 0, 0, None), out_axes=0))


def test_implicit_derivatives():
    simple, other = drawn(0)[0], drawn(1)[0]
    repeated = np.zeros((CLIENTS, SAMPLES, FEATURES))
    repeated[:, range(FEATURES), range(FEATURES)] = [2.0, 2.0, 1.0, 0.5]
    rng = np.random.default_rng(2)
    turn, start = (np.linalg.qr(rng.normal(size=(n, RANK)))[0] for n in (RANK, FEATURES))
    cases = [
        (simple, top(simple), 0.0),
        (other, top(other), 0.0),
        (repeated, top(repeated) @ turn, 0.0),  # any basis of the subspace is equally good
        (simple, start, 0.0),
        (simple, top(simple), 1.0),
    ]
    values, frames, turned = map(np.stack, zip(*cases, strict=True))
    by_values, by_frames, report = compiled()(values, frames, turned, jf.adjoint.Report())

    for i in range(3):
        direction = drawn(i)[2]
        wanted = along(reference, values[i], direction)
        assert abs(wanted) > 1e-2
        np.testing.assert_allclose((by_values[i] * direction).sum(), wanted, rtol=1e-7)
        assert (by_frames[i] == 0).all()  # the start does not matter
    assert (report.residual[:3] < 1e-10).all() and (report.turning[:3] < 1e-10).all()
    assert (report.rounds[:3] >= 1).all() and (report.rounds[:3] < 30).all()
    # A round from another start ends at no fixed point, and a basis has no derivative.
    assert np.isnan(by_values[3]).all() and np.isnan(by_values[4]).all()
    assert report.turning[4] > 0.1


@pytest.mark.slow
def test_problems_without_a_derivative_are_refused():
    values, _, _ = drawn(0)
    gradient = jax.jit(jax.grad(functools.partial(loss, report=None, throw=True)))
    assert np.isfinite(gradient(values, top(values), 0.0)).all()
    with pytest.raises(Exception, match="depends on how their bases are turned"):
        gradient(values, top(values), 1.0).block_until_ready()
    with pytest.raises(Exception, match="wanted a fixed point of the round"):
        gradient(values, top(drawn(1)[0]), 0.0).block_until_ready()


@pytest.mark.slow
def test_a_run_that_converges_slowly_is_not_at_a_fixed_point():
    """A round moves it by 5e-5 of its norm; its derivative would be twice the right one."""
    drawn = jf.data.hierarchical_synthetic(
        key=jax.random.key(0), clients=4, features=6, rank=2, samples=12, prior_variance=0.05
    )

    def derivative(factor, **options):
        adjoint = jf.adjoint.implicit(max_rounds=1000, throw=False, **options)
        values = jnp.float32(drawn.samples).at[..., 3].multiply(factor)

        @jax.jit
        @jax.grad
        def loss(prior_variance):
            run = jf.rollout(
                jf.pca.HierarchicalPCA(2, 0.5, prior_variance),
                jf.Clients.from_samples(values),
                rounds=1000,
                key=jax.random.key(0),
                adjoint=adjoint,
            )
            return jnp.sum(jnp.sin(3 * run.result.local @ run.result.local.mT))

        return loss(jnp.float32(0.05))

    assert np.isnan(derivative(30.0)) and np.isfinite(derivative(30.0, fixed_point_tol=1e-4))
    assert np.isfinite(derivative(1.0))


@pytest.mark.slow
def test_the_reason_of_a_refusal_precedes_the_traceback(caplog):
    values, _, _ = drawn(0)
    gradient = jax.jit(jax.grad(functools.partial(loss, report=None, throw=True)))
    with pytest.raises(Exception, match="wanted a fixed point of the round") as refused:
        gradient(values, top(drawn(1)[0]), 0.0).block_until_ready()
    said = caplog.messages[0]
    assert said.startswith("adjoint: wanted a fixed point of the round for an implicit derivative")
    assert "PerPCA" in said and "unrolled()" in said
    assert str(refused.value).endswith(f"ValueError: {said}")


@pytest.mark.slow
def test_a_factorized_system_has_the_same_solution():
    """For several right-hand sides at once, and in reverse mode."""
    values, _, _ = drawn(0)
    start = jf.Personalized(jnp.asarray(top(values)), None)

    def projector(values, **options):
        run = jf.rollout(
            jf.pca.SubspaceIteration(RANK),
            jf.Clients.from_samples(values),
            rounds=1,
            key=jax.random.key(0),
            warm_start=start,
            adjoint=jf.adjoint.implicit(tol=1e-10, **options),
        )
        return run.result.shared @ run.result.shared.T

    directions = jax.random.normal(jax.random.key(1), (3, *values.shape), values.dtype)
    found = []
    for options in ({}, {"direct": 100}):
        tangent = jax.linearize(functools.partial(projector, **options), values)[1]
        gradient = jax.grad(lambda x, given=options: projector(x, **given)[0, 1])(values)
        found.append((jax.vmap(tangent)(directions), gradient))
    assert np.abs(found[0][0]).max() > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), *found)
    assert not np.array_equal(found[0][0], found[1][0])


@pytest.mark.slow
def test_a_loss_has_a_derivative_in_any_unit():
    samples, moved = np.random.default_rng(0).normal(size=(2, 3, 12, 5)).astype(np.float32)
    samples = samples * np.float32([3, 2, 1, 0.5, 0.3])

    @jax.jit
    def slope(unit, turning):
        def loss(step, report):
            solution = jf.rollout(
                jf.pca.SubspaceIteration(2),
                jf.Clients.from_samples(samples + step * moved),
                rounds=150,
                key=jax.random.key(0),
                adjoint=jf.adjoint.implicit(report=report, throw=False),
            )
            shared = solution.result.shared
            return unit * (jnp.sum((shared @ shared.T)[0] ** 2) + turning * jnp.sum(shared[0]))

        found, report = jax.grad(loss, argnums=(0, 1))(0.0, jf.adjoint.Report())
        return found / unit, report.residual

    right, _ = slope(1.0, 0.0)
    for unit in (1e-30, 1e-15, 1e15, 1e30):
        found, residual = slope(unit, 0.0)
        np.testing.assert_allclose(found, right, rtol=1e-4)
        assert 0 < residual < 1e-4
        assert np.isnan(slope(unit, 1.0)[0])  # the loss has none, however small it is


@pytest.mark.slow
@pytest.mark.parametrize("throw", [True, False])
def test_an_unsolved_system_is_refused(throw):
    values, _, _ = drawn(0)

    def error(values):
        run = jf.rollout(
            jf.pca.SubspaceIteration(RANK),
            jf.Clients.from_samples(values),
            rounds=1,
            key=jax.random.key(0),
            warm_start=jf.Personalized(jnp.asarray(top(drawn(0)[0])), None),
            adjoint=jf.adjoint.implicit(max_rounds=1, memory=1, tol=1e-9, throw=throw),
        )
        return (run.result.shared @ run.result.shared.T)[0, 1]

    gradient = jax.jit(jax.grad(error))
    if throw:
        with pytest.raises(Exception, match="could not be solved in max_rounds"):
            gradient(values).block_until_ready()
    else:
        assert np.isnan(gradient(values)).all()


@pytest.mark.slow
def test_a_channel_whose_memory_has_not_settled_is_refused():
    """Even from the solution itself, which three rounds of rounded differences move away from."""
    values, _, direction = drawn(0)
    start = jf.Personalized(jnp.asarray(top(values)), None)

    def gradient(rounds):
        def error(values):
            run = jf.rollout(
                jf.pca.SubspaceIteration(RANK),
                jf.Clients.from_samples(values),
                rounds=rounds,
                key=jax.random.key(0),
                warm_start=start,
                channel=jf.channel.difference(jf.channel.quantize(3)),
                adjoint=jf.adjoint.implicit(throw=False),
            )
            shared = run.result.shared
            return jnp.tanh(jnp.asarray(drawn(0)[1]) * (shared @ shared.T)).sum()

        return jax.jit(jax.grad(error))(values)

    assert np.isnan(gradient(3)).all()
    wanted = along(reference, values, direction)
    np.testing.assert_allclose((gradient(150) * direction).sum(), wanted, rtol=1e-4)


@pytest.mark.slow
def test_forward_mode_and_forward_over_reverse():
    values, _, direction = drawn(0)
    frame = jnp.asarray(top(values))

    def derivatives(values):
        def value(values):
            return loss(values, frame, 0.0, None)

        def both(values):
            return value(values), jax.grad(value)(values)

        return jax.jvp(both, (values,), (direction,))[1]

    first, second = jax.jit(derivatives)(values)
    np.testing.assert_allclose(first, along(reference, values, direction), rtol=1e-7)

    def slope(values):
        return along(reference, values, direction)

    np.testing.assert_allclose(
        (second * direction).sum(), along(slope, values, direction), rtol=1e-4
    )


@pytest.mark.slow
def test_a_thousand_random_problems_have_finite_derivatives():
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.1, 3.0, size=(1000, 1, 1, FEATURES))
    values = rng.normal(size=(1000, CLIENTS, SAMPLES, FEATURES)) * scales
    frames = np.stack([top(one) for one in values])
    by_values, _, report = compiled()(values, frames, np.zeros(1000), jf.adjoint.Report())
    assert np.isfinite(by_values).all() and (report.residual < 1e-8).all()


@pytest.mark.slow
def test_single_precision_is_close_to_double():
    values, _, _ = drawn(0)

    def gradient(dtype):
        given = values.astype(dtype), top(values).astype(dtype), np.zeros((), dtype)
        return jax.jit(jax.grad(lambda *at: loss(*at, None)))(*given)

    single, double = gradient(np.float32), gradient(np.float64)
    assert single.dtype == np.float32
    assert np.abs(single - double).max() < 1e-4 * np.abs(double).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [jf.backend.chunked(2), jf.backend.pmap(2), jf.backend.shard(2)], ids=repr
)
def test_every_backend_gives_the_same_derivative(backend):
    def gradient(backend):
        def error(values):
            algorithm = jf.pca.PerPCA(1, 1, solver="gradient", variant="polar", step_size=0.1)
            run = jf.rollout(
                algorithm,
                jf.Clients.from_samples(values),
                rounds=500,
                key=jax.random.key(0),
                adjoint=jf.adjoint.implicit(),
                backend=backend,
            )
            shared, local = run.result
            weights = jnp.asarray(drawn(0)[1])
            parts = shared @ shared.T + jnp.einsum("mdr,mer->de", local, local)
            return (weights * parts).sum()

        return jax.jit(jax.grad(error))(drawn(3)[0])

    np.testing.assert_allclose(gradient(backend), gradient(jf.backend.vmap()), atol=1e-8)


def personalized(values, weights):
    """A function of all subspaces of a run that has converged."""
    run = jf.rollout(
        jf.pca.PerPCA(1, 1, solver="gradient"),
        jf.Clients.from_samples(values, weights=weights),
        rounds=3000,
        key=jax.random.key(0),
        adjoint=jf.adjoint.implicit(throw=False),
    )
    shared, local = run.result
    parts = shared @ shared.T + jnp.einsum("mdr,mer->de", local, local)
    return jnp.tanh(parts).sum()


@pytest.mark.slow
def test_clients_in_blocks_give_the_same_derivative(monkeypatch):
    values = np.concatenate([drawn(seed)[0] for seed in range(7)])[:20]
    weights = np.linspace(1.0, 2.0, len(values))

    def gradient():
        return jax.jit(jax.grad(lambda v, w: personalized(v, w / w.sum()), argnums=(0, 1)))

    at_once = gradient().lower(values, weights)
    monkeypatch.setattr("jaxfed.core.backends.one_device.BLOCK_BYTES", 1)
    in_blocks = gradient().lower(values, weights)
    two_weights = "(tensor<20xf64>, tensor<i64>) -> tensor<2xf64>"
    assert two_weights in in_blocks.as_text() and two_weights not in at_once.as_text()
    wanted, found = (lowered.compile()(values, weights) for lowered in (at_once, in_blocks))
    assert abs(wanted[1]).max() > 1e-3
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-8)


@pytest.mark.slow
def test_implicit_derivatives_store_nothing_as_large_as_the_data(monkeypatch):
    monkeypatch.setattr("jaxfed.core.backends.one_device.BLOCK_BYTES", 1)
    values, weights = np.random.default_rng(0).normal(size=(20, 50, 200)), np.ones(20) / 20

    def beside(function):
        program = jax.jit(function).lower(values, weights).compile()
        return program.memory_analysis().temp_size_in_bytes

    solve, implicit = beside(personalized), beside(jax.grad(personalized, argnums=1))
    assert implicit < solve + 0.6 * values.nbytes


SGD = optax.sgd(1.0)


def fedavg(**options):
    model = jf.models.Autoencoder(FEATURES, 1, key=jax.random.key(0))
    return jf.generative.FedAvg(model, jf.models.reconstruction_loss, SGD, local_steps=1, **options)


REFUSED = {
    "a minibatch": (lambda: fedavg(batch_size=2), {}, "^adjoint: wanted FedAvg.batch_size=None"),
    "some entities": (
        lambda: jf.gcca.MaxVar(2, batch_size=2),
        {},
        "^adjoint: wanted MaxVar.batch_size=None",
    ),
    "some entities for networks": (
        lambda: jf.gcca.DeepMaxVar(
            functools.partial(jf.models.Perceptron, outputs=2, hidden=(4,)),
            SGD,
            rank=2,
            batch_size=2,
        ),
        {},
        "^adjoint: wanted DeepMaxVar.batch_size=None",
    ),
    "no rounds": (lambda: jf.pca.Pooled(2), {}, "^adjoint: .* Pooled has no rounds"),
    "sampled clients": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"participation": jf.participation.uniform(2)},
        "^participation: wanted everybody",
    ),
    "given clients": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"participation": jf.participation.mask(np.eye(3, dtype=bool))},
        "^participation: wanted everybody",
    ),
    "a stochastic channel": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"channel": jf.channel.quantize(3)},
        "^channel: .*difference",
    ),
    "a random part of each message": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"channel": jf.channel.random_k(0.5)},
        "^channel: ",
    ),
    "noise": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"channel": jf.Wire(jf.channel.gaussian(1.0, 1.0), jf.channel.lossless())},
        "^channel: ",
    ),
    "a stochastic channel down": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"channel": jf.Wire(jf.channel.lossless(), jf.channel.quantize(3))},
        "^channel: .*difference",
    ),
    "error feedback": (
        lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
        {"channel": jf.channel.error_feedback(jf.channel.top_k(0.5))},
        "^channel: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_without_a_fixed_point_are_refused(name, key):
    make, options, message = REFUSED[name]
    algorithm, values = make(), drawn(0)[0]
    views = "gcca" in type(algorithm).__module__
    clients = jf.gcca.Views.from_arrays(list(values)) if views else jf.Clients.from_samples(values)
    with pytest.raises(ValueError, match=message):
        jf.rollout(algorithm, clients, rounds=1, key=key, adjoint=jf.adjoint.implicit(), **options)


def test_a_given_round_without_a_fixed_point_is_refused(key):
    clients, adjoint = jf.Clients.from_samples(drawn(0)[0]), jf.adjoint.implicit
    for through, message in (
        (jf.pca.Pooled(1), "Pooled has no rounds"),
        (fedavg(batch_size=2), "batches at random"),
    ):
        with pytest.raises(ValueError, match=f"^adjoint: .*{message}"):
            jf.rollout(
                jf.pca.PerPCA(1, 1, solver="gradient"),
                clients,
                rounds=1,
                key=key,
                adjoint=adjoint(through=through),
            )


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("n", lambda: jf.adjoint.checkpointed(1)),
        ("remat", lambda: jf.adjoint.unrolled(1)),
        ("tol", lambda: jf.adjoint.implicit(tol=0.0)),
        ("max_rounds", lambda: jf.adjoint.implicit(max_rounds=0)),
        ("memory", lambda: jf.adjoint.implicit(memory=2.0)),
        ("direct", lambda: jf.adjoint.implicit(direct=-1)),
        ("fixed_point_tol", lambda: jf.adjoint.implicit(fixed_point_tol=-1.0)),
        ("turning_tol", lambda: jf.adjoint.implicit(turning_tol=None)),
        ("through", lambda: jf.adjoint.implicit(through="subspace")),
        ("report", lambda: jf.adjoint.implicit(report=True)),
        ("throw", lambda: jf.adjoint.implicit(throw="no")),
    ],
)
def test_arguments_are_refused(name, make):
    with pytest.raises(ValueError, match=f"^{name}: wanted .* got"):
        make()


class Shrunk(jf.Algorithm):
    """The shrunk mean of all samples, without any statement about fixed points."""

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(like.values.shape[-1])

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        gap = data.values.mean(0) - downlink
        return gap, local, {"objective": (gap**2).sum()}

    def server_step(self, key, server, uplink):
        return server + 0.5 * (uplink - 0.25 * server), {}


def test_an_algorithm_that_says_nothing_is_differentiated_by_its_own_round(key):
    def first(values):
        run = jf.rollout(
            Shrunk(),
            jf.Clients.from_samples(values),
            rounds=60,
            key=key,
            adjoint=jf.adjoint.implicit(),
        )
        return run.result.shared[0]

    gradient = jax.jit(jax.grad(first))(drawn(0)[0])
    wanted = np.zeros(gradient.shape)
    wanted[..., 0] = 0.8 / (CLIENTS * SAMPLES)
    np.testing.assert_allclose(gradient, wanted, atol=1e-12)


class Turned(jf.Algorithm):
    """Subspace iteration whose basis turns by an angle, at zero a fixed point, in each round."""

    angle: jax.Array

    def server_init(self, key, first, like, warm_start):
        return warm_start.shared

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        product = data.values.T @ (data.values @ downlink)
        return product, local, {"objective": -jnp.vdot(downlink, product)}

    def server_step(self, key, server, uplink):
        skew = jnp.array([[0.0, -1.0], [1.0, 0.0]])
        return jf.linalg.polar(uplink @ (jnp.eye(2) + self.angle * skew)), {}

    def bases(self, server, local):
        return jf.adjoint.Bases(shared=(server,))


@pytest.mark.slow
def test_forward_mode_leaves_out_how_bases_turn(key):
    """Turning the bases moves no solution, and would leave the linear system without one."""
    values, weights, direction = drawn(0)
    frame = jnp.asarray(top(values))

    def value(angle, values):
        run = jf.rollout(
            Turned(angle),
            jf.Clients.from_samples(values),
            rounds=1,
            key=key,
            warm_start=jf.Personalized(frame, None),
            adjoint=jf.adjoint.implicit(throw=False),
        )
        shared = run.result.shared
        return jnp.tanh(weights * (shared @ shared.T)).sum()

    slope = jax.jit(lambda *u: jax.jvp(value, (jnp.zeros(()), jnp.asarray(values)), u)[1])
    both = slope(jnp.ones(()), direction)
    np.testing.assert_allclose(both, along(reference, values, direction), rtol=1e-7)


@pytest.mark.slow
def test_other_adjoints_are_refused(key):
    clients = jf.Clients.from_samples(drawn(0)[0])
    with pytest.raises(ValueError, match=r"^adjoint: wanted one of .*adjoint, got 'implicit'"):
        jf.rollout(jf.pca.Pooled(1), clients, rounds=1, key=key, adjoint="implicit")


@pytest.mark.slow
@pytest.mark.parametrize("module", [jf.adjoint, jf.nn], ids=lambda module: module.__name__)
def test_examples_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 3 and failed == 0
