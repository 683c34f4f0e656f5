"""Deep generalized CCA: networks, runs, refusals and results."""

import functools
import json
import re
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse

import jaxfed as jf
from jaxfed.cli import main
from jaxfed.gcca import DeepMaxVar
from jaxfed.models import Perceptron
from tests import helpers
from tests.references import deep_gcca as reference

RANK, HIDDEN, ENTITIES, FEATURES = 2, 6, 24, (3, 5, 4)
SGD = optax.sgd(1.0)
# A root has no derivative at zero, where the second moments of padding's gradients are.
ADAM = optax.adam(0.01, eps_root=1e-8)
SMALL = functools.partial(Perceptron, outputs=RANK, hidden=(HIDDEN,))
LINEAR = functools.partial(Perceptron, outputs=RANK, hidden=())
LOSSLESS = jf.channel.lossless()
THREE_BITS = jf.channel.difference(jf.channel.quantize(3))


def arrays(dtype=np.float64, seed=0, entities=ENTITIES, features=FEATURES):
    """Views that are nonlinear images of the same two latent variables."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(entities, 2))
    return [
        (np.tanh(latent @ rng.normal(size=(2, d))) + 0.2 * rng.normal(size=(entities, d))).astype(
            dtype
        )
        for d in features
    ]


def views(dtype=np.float64, **options):
    return jf.gcca.Views.from_arrays(arrays(dtype, **options))


def deep(network=SMALL, optimizer=SGD, **options):
    return DeepMaxVar(network, optimizer, **{"rank": RANK, "inner_epochs": 3} | options)


def batched(**options):
    return deep(optimizer=ADAM, **{"batch_size": 10} | options)


solve = functools.partial(helpers.solve, rounds=4)


def start_of(seed=1):
    """A representation and networks in the reference's form, with statistics of some past."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(ENTITIES, RANK))
    nets = [
        {
            "w1": rng.normal(size=(d, HIDDEN)),
            "b1": rng.normal(size=HIDDEN),
            "s": 1 + 0.3 * rng.normal(size=HIDDEN),
            "t": 0.3 * rng.normal(size=HIDDEN),
            "w2": rng.normal(size=(HIDDEN, RANK)),
            "b2": rng.normal(size=RANK),
            "mean": rng.normal(size=HIDDEN),
            "var": rng.uniform(0.5, 2, size=HIDDEN),
        }
        for d in FEATURES
    ]
    return reference.polar(g - g.mean(0)), nets


def stacked(nets):
    """The reference's networks as the library's; padding gets weights that must not count."""
    width = max(FEATURES)
    first = np.stack(
        [np.pad(n["w1"], ((0, width - len(n["w1"])), (0, 0)), constant_values=7.0) for n in nets]
    )
    parts = {k: jnp.asarray(np.stack([n[k] for n in nets])) for k in nets[0] if k != "w1"}
    model = SMALL(width, key=jax.random.key(0))
    moments = type(model.statistics[0])(parts["mean"], parts["var"])
    return eqx.tree_at(
        lambda m: (m.weights, m.biases, m.scales, m.shifts, m.statistics),
        model,
        (
            (jnp.asarray(first), parts["w2"]),
            (parts["b1"], parts["b2"]),
            (parts["s"],),
            (parts["t"],),
            (moments,),
        ),
    )


# --- the network ---------------------------------------------------------------------------------


def test_the_perceptron_equals_the_reference(key, x64):
    _, nets = start_of()
    x = arrays()[1]
    model = jax.tree.map(lambda leaf: leaf[1], stacked(nets))
    outputs, of_one, (found, moments) = jax.jit(
        lambda model, x: (model(x), model(x[0]), model.in_training(x))
    )(model, x)
    np.testing.assert_allclose(outputs, reference.outputs(nets[1], x), atol=1e-12)
    np.testing.assert_allclose(of_one, outputs[0], atol=1e-12)
    value, gradient, mean, var = reference.loss_and_gradient(nets[1], x, np.zeros((ENTITIES, RANK)))
    np.testing.assert_allclose((found**2).sum() / (2 * ENTITIES), value, rtol=1e-12)
    np.testing.assert_allclose(moments[0].mean, 0.9 * nets[1]["mean"] + 0.1 * mean, atol=1e-12)
    np.testing.assert_allclose(moments[0].variance, 0.9 * nets[1]["var"] + 0.1 * var, atol=1e-12)
    # The reference's gradients, by hand, against central differences of its own loss.
    h = 1e-6
    for name, slope in gradient.items():
        direction = np.random.default_rng(3).normal(size=slope.shape)
        ends = [
            reference.loss_and_gradient(
                nets[1] | {name: nets[1][name] + sign * h * direction}, x, np.zeros((1, RANK))
            )[0]
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(
            (slope * direction).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-8
        )


@pytest.mark.slow
def test_first_values_are_uniform_and_as_for_the_real_features(key):
    model = Perceptron(40, 2, hidden=(50, 30), key=key)
    assert [w.shape for w in model.weights] == [(40, 50), (50, 30), (30, 2)]
    for inputs, *layer in zip((40, 50, 30), model.weights, model.biases, strict=True):
        for drawn in layer:
            assert jnp.abs(drawn).max() <= inputs**-0.5
        np.testing.assert_allclose(layer[0].std(), (3 * inputs) ** -0.5, rtol=0.15)
    mask = (jnp.arange(55) < 40).astype(jnp.float32)
    wider = Perceptron(55, 2, hidden=(50, 30), mask=mask, key=key)
    np.testing.assert_allclose(wider.weights[0][:40], model.weights[0], rtol=1e-6)
    assert (wider.weights[0][40:] == 0).all()
    chex.assert_trees_all_close(wider.weights[1:], model.weights[1:])
    chex.assert_trees_all_close(wider.biases, model.biases, rtol=1e-6)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(Perceptron(2, 2, key=key)))
    # Weights and biases, scales and shifts, running means and variances.
    assert numbers == (2 * 128 + 128) + (128 * 64 + 64) + (64 * 2 + 2) + 4 * (128 + 64)


# --- what a run computes -------------------------------------------------------------------------


@pytest.mark.parametrize("proximal", [0.0, 0.4])
def test_rounds_equal_the_reference(proximal, key, x64):
    g, nets = start_of()
    wanted, trained, objective, _ = reference.deep_maxvar(
        arrays(), nets, g, 4, epochs=3, step_size=0.05, proximal=proximal
    )
    solution = solve(
        deep(step_size=0.05, proximal=proximal),
        views(),
        key,
        warm_start=jf.Personalized(jnp.asarray(g), stacked(nets)),
    )
    np.testing.assert_allclose(solution.result.shared, wanted, atol=1e-8)
    np.testing.assert_allclose(solution.history["objective"], objective, atol=1e-8)
    local, reached = solution.result.local, stacked(trained)
    for j, d in enumerate(FEATURES):
        np.testing.assert_allclose(local.weights[0][j, :d], reached.weights[0][j, :d], atol=1e-8)
        # No gradient ever reaches the weights of padding.
        np.testing.assert_array_equal(local.weights[0][j, d:], 7.0)
    for found, other in zip(jax.tree.leaves(local)[1:], jax.tree.leaves(reached)[1:], strict=True):
        np.testing.assert_allclose(found, other, atol=1e-8)


@pytest.mark.slow
def test_a_linear_network_takes_the_steps_of_the_linear_method(key, x64):
    x = np.random.default_rng(0).normal(size=(ENTITIES, 5))
    x = x - x.mean(0)  # so that the networks' constants stay zero
    same = jf.gcca.Views.from_arrays([x, 2 * x[:, ::-1], x @ np.diag([1, 1, 0.5, 1, 2])])
    # One step size for all views: that of each view's own largest eigenvalue is the linear one's.
    clients = same.take([0])
    rate = ENTITIES / np.linalg.norm(x, 2) ** 2
    rng = np.random.default_rng(1)
    g = reference.polar(x @ rng.normal(size=(5, RANK)))
    q = jnp.asarray(rng.normal(size=(1, 5, RANK)))
    model = jax.tree.map(lambda leaf: leaf[None], LINEAR(5, key=key))
    network = eqx.tree_at(lambda m: (m.weights, m.biases), model, ((q,), (jnp.zeros((1, RANK)),)))
    starts = (jf.Personalized(jnp.asarray(g), local) for local in (network, q))
    algorithms = (deep(LINEAR, step_size=rate), jf.gcca.MaxVar(RANK, inner_steps=3))
    found, wanted = (
        solve(algorithm, clients, key, warm_start=start)
        for algorithm, start in zip(algorithms, starts, strict=True)
    )
    np.testing.assert_allclose(found.result.shared, wanted.result.shared, atol=1e-10)
    np.testing.assert_allclose(found.result.local.weights[0], wanted.result.local, atol=1e-10)
    np.testing.assert_allclose(found.result.local.biases[0], 0, atol=1e-12)
    np.testing.assert_allclose(found.history["objective"], wanted.history["objective"], atol=1e-10)


class Counted(eqx.Module):
    """A weight for each entity of a one-hot view, and one that no batch sees."""

    values: jax.Array

    def __call__(self, x):
        return (x @ self.values)[None]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "epochs"), [(4, 1), (4, 3), (5, 1), (12, 2)])
def test_batches_go_through_all_entities_in_one_order(batch, epochs, key, x64):
    # One step changes the weights of the batch's entities by the step size times their residual.
    clients = jf.gcca.Views.from_arrays([np.eye(12)] * 2)
    algorithm = deep(
        lambda features, mask, key: Counted(jnp.zeros(features)),
        rank=1,
        batch_size=batch,
        inner_epochs=epochs,
        step_size=0.5,
    )
    g = np.random.default_rng(0).normal(size=(12, 1))
    g = (g - g.mean()) / np.linalg.norm(g - g.mean())
    start = jf.Personalized(jnp.asarray(g), Counted(jnp.zeros((2, 12))))
    result = solve(algorithm, clients, key, rounds=1, warm_start=start).result
    values = np.asarray(result.local.values)
    # After k visits (1 - (1 - 0.5 / batch)^k) of the target is there.
    visits = np.log1p(-values / (12**0.5 * g[:, 0])) / np.log1p(-0.5 / batch)
    np.testing.assert_allclose(visits, visits.round(), atol=1e-9)
    batches = -(-12 // batch)
    assert (visits.round().sum(axis=1) == epochs * batches * batch).all()
    # Every epoch is the same: all entities once, and those again that fill up the last batch.
    assert ((visits.round() == epochs) | (visits.round() == 2 * epochs)).all()


@pytest.mark.slow
def test_quantized_rounds_are_the_reference_up_to_the_channel(key, x64):
    g, nets = start_of()
    start = jf.Personalized(jnp.asarray(g), stacked(nets))

    class Rounded:
        """The nearest of seven levels up to the largest, as the channel without chance has them."""

        def __call__(self, v):
            scale = np.abs(v).max()
            return np.sign(v) * np.round(7 * np.abs(v) / scale) * scale / 7

    differences = jf.channel.difference(jf.channel.quantize(levels=7, rounding="nearest"))
    channel = jf.Wire(differences, differences, LOSSLESS)
    solution = solve(deep(step_size=0.05), views(), key, warm_start=start, channel=channel)
    wanted, *_, memories = reference.deep_maxvar(
        arrays(), nets, g, 4, epochs=3, step_size=0.05, compress=Rounded()
    )
    # The channel's scale travels in single precision.
    np.testing.assert_allclose(solution.result.shared, wanted, atol=1e-5)
    (found,) = jax.tree.leaves(solution.state.uplink.sender)
    np.testing.assert_allclose(found, memories, atol=1e-5)


@pytest.mark.slow
def test_three_bits_reach_the_same_objective_with_a_tenth_of_the_bits(key):
    clients = views(np.float32, entities=400)
    algorithm = batched(batch_size=100)
    full = solve(algorithm, clients, key, rounds=40)
    coarse = solve(algorithm, clients, key, rounds=40, channel=THREE_BITS)
    first, last = full.history["objective"][0], full.history["objective"][-1]
    assert last < 0.5 * first
    assert coarse.history["objective"][-1] < 1.1 * last
    a_round = [s.history["bits_up"][-1] - s.history["bits_up"][-2] for s in (full, coarse)]
    entries = 400 * RANK
    np.testing.assert_allclose(a_round, [32 * entries, 3 * entries + 32], rtol=1e-5)
    np.testing.assert_allclose(1 - a_round[1] / a_round[0], 0.906, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_representation_is_centred_and_orthonormal(dtype, key):
    with jax.enable_x64(dtype is np.float64):
        solution = solve(batched(), views(dtype), key)
        g = np.asarray(solution.result.shared)
        tolerance = 1e-12 if dtype is np.float64 else 1e-5
        np.testing.assert_allclose(g.T @ g, np.eye(RANK), atol=RANK * tolerance)
        np.testing.assert_allclose(g.sum(0), 0, atol=100 * tolerance)
        floats = {leaf.dtype for leaf in jax.tree.leaves((solution.result, solution.local))}
        assert floats == {jnp.dtype(dtype), jnp.dtype(np.int32)}


def test_single_precision_stays_single_where_64_bits_are_enabled(key, x64):
    out = jax.eval_shape(
        functools.partial(jf.rollout, rounds=2), batched(), views(np.float32), key=key
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(out.result)} == {jnp.dtype(np.float32)}
    assert out.history["objective"].dtype == np.float32


@pytest.mark.slow
def test_a_warm_start_continues_the_run(key, x64):
    first = solve(deep(), views(), key, rounds=2)
    whole = solve(deep(), views(), key, rounds=4)
    second = solve(deep(), views(), key, rounds=2, warm_start=first.result)
    chex.assert_trees_all_close(second.result, whole.result, atol=1e-10)

    # A start that is known while the rest is traced.
    def goes_on(key):
        return jf.rollout(deep(), views(), rounds=2, key=key, warm_start=first.result).result

    shapes = jax.eval_shape(goes_on, key)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, whole.result)


# --- where and with whom it runs -----------------------------------------------------------------


@pytest.mark.slow
def test_absent_views_do_not_count(key, x64):
    clients = jf.gcca.Views.from_arrays([*arrays(), *arrays(seed=1)])
    chosen = np.array([True, False, True, False, False, True])
    present = jf.participation.mask(chosen[None])
    some = solve(batched(), clients, key, participation=present)
    alone = solve(batched(), clients.take(np.flatnonzero(chosen)), key)
    # All views contribute to the first representation, so the two starts differ.
    assert np.abs(some.result.shared - alone.result.shared).max() > 1e-3
    start = some.result
    some = solve(batched(), clients, key, warm_start=start, participation=present)
    local = jax.tree.map(lambda leaf: leaf[chosen], start.local)
    alone = solve(
        batched(),
        clients.take(np.flatnonzero(chosen)),
        key,
        warm_start=jf.Personalized(start.shared, local),
    )
    np.testing.assert_allclose(some.result.shared, alone.result.shared, atol=1e-10)
    kept = jax.tree.map(lambda leaf: leaf[~chosen], some.result.local)
    chex.assert_trees_all_equal(kept, jax.tree.map(lambda leaf: leaf[~chosen], start.local))


@pytest.mark.slow
def test_one_view_in_six_per_round_converges_too(key):
    clients = jf.gcca.Views.from_arrays(
        [x for seed in (0, 0) for x in arrays(np.float32, entities=200, seed=seed)]
    )
    algorithm = batched(batch_size=100, inner_epochs=10)
    for channel in (LOSSLESS, THREE_BITS):
        history = solve(
            algorithm,
            clients,
            key,
            rounds=60,
            channel=channel,
            participation=jf.participation.uniform(1),
        ).history
        objective = np.asarray(history["objective"])
        assert (history["participants"] == 1).all() and np.isfinite(objective).all()
        assert objective[-10:].mean() < 0.5 * objective[:6].mean()


@pytest.mark.slow
def test_derivatives_are_finite_differences_over_a_sweep(key, x64):
    clients, other = views(), views(seed=1)

    def ended(numbers):
        algorithm = batched(step_size=numbers[0], proximal=numbers[1])
        result = jf.rollout(algorithm, clients, rounds=5, key=key).result
        return jnp.sum((algorithm.outputs(result.local, other).mean(0)) ** 2) + result.shared[0, 0]

    numbers, h = jnp.array([0.05, 0.3]), 1e-6 * jnp.eye(2)
    slope = jax.jit(jax.grad(ended))(numbers)
    above, below = jax.jit(jax.vmap(ended))(numbers + jnp.concatenate([h, -h])).reshape(2, 2)
    np.testing.assert_allclose(slope, (above - below) / 2e-6, rtol=1e-5)
    assert (jnp.abs(slope) > 1e-4).all()


# --- what comes of it ----------------------------------------------------------------------------


@pytest.mark.slow
def test_networks_apply_to_other_entities(key, x64):
    algorithm = batched()
    result = solve(algorithm, views(), key).result
    other = views(seed=5, entities=7)
    outputs = algorithm.outputs(result.local, other)
    assert outputs.shape == (3, 7, RANK)
    for j, d in enumerate(FEATURES):
        net = jax.tree.map(lambda leaf, j=j: leaf[j], result.local)
        np.testing.assert_allclose(net(other.data.values[j]), outputs[j], atol=1e-12)
        # An entity's output depends neither on other entities nor on padding.
        alone = eqx.tree_at(lambda m: m.weights[0], net, net.weights[0][:d])
        np.testing.assert_allclose(alone(other.data.values[j, 2, :d]), outputs[j, 2], atol=1e-12)
    shared = algorithm.represent(result.local, other)
    np.testing.assert_allclose(shared.T @ shared, np.eye(RANK), atol=1e-10)
    np.testing.assert_allclose(shared.sum(0), 0, atol=1e-10)
    # Of the entities that it was learned from, it is the server's own, up to the last step.
    again = algorithm.represent(result.local, views())
    np.testing.assert_allclose(again, result.shared, atol=1e-8)


@pytest.mark.slow
def test_any_module_is_a_network(key):
    def network(features, *, mask, key):
        del mask
        return eqx.nn.MLP(features, RANK, 8, 1, activation=jax.nn.tanh, key=key)

    algorithm = deep(network, ADAM, batch_size=8)
    clients = views(np.float32)
    solution = solve(algorithm, clients, key, rounds=30)
    assert solution.history["objective"][-1] < 0.6 * solution.history["objective"][0]
    assert algorithm.outputs(solution.result.local, clients).shape == (3, ENTITIES, RANK)
    # Its arrays, and None for its functions.
    assert solution.result.local.activation is None


@pytest.mark.slow
def test_the_three_views_of_two_classes(key):
    data = jf.data.nonlinear_views_synthetic(key=key, entities=2001, noise=0.0)
    assert [x.shape for x in data.views] == [(2001, 2)] * 3
    np.testing.assert_array_equal(data.labels[:4], [0, 1, 0, 1])
    one = np.asarray(data.labels) == 1
    circles, (x, y), third = data.views[0], data.views[1].T, data.views[2]
    np.testing.assert_allclose(np.linalg.norm(circles, axis=1), 1 + one, rtol=1e-5)
    np.testing.assert_allclose(y, np.where(one, 1 + 0.5 * x**2, 2 * x**2), rtol=1e-5)
    assert np.abs(x).max() < 3
    np.testing.assert_allclose(np.linalg.norm(third[~one], axis=1), 2, rtol=1e-5)
    np.testing.assert_allclose(np.cov(third[one].T), np.eye(2), atol=0.15)
    noisy = jf.data.nonlinear_views_synthetic(key=key, entities=2001)
    changes = [np.asarray(a - b) for a, b in zip(noisy.views, data.views, strict=True)]
    changes[2] = changes[2][~one]
    np.testing.assert_allclose([c.std() for c in changes], 0.1, rtol=0.1)
    # Only the class is in common: within one, angles of different views are independent.
    angles = [np.arctan2(v[:, 1], v[:, 0])[~one] for v in (data.views[0], data.views[2])]
    assert abs(np.corrcoef(np.cos(angles))[0, 1]) < 0.1
    for options in ({"entities": 1}, {"noise": -1.0}, {"noise": np.nan}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))}: wanted"):
            jf.data.nonlinear_views_synthetic(key=key, **options)


@pytest.mark.slow
def test_classes_that_a_line_divides_and_classes_that_none_does():
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    angle = rng.uniform(0, 2 * np.pi, 200)
    circles = (1 + 2 * labels[:, None]) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    heaps = 3 * labels[:, None] + 0.1 * rng.normal(size=(200, 2))
    svm = functools.partial(jf.metrics.svm_accuracy, train_labels=labels, test_labels=labels[:50])
    assert svm(heaps, test=heaps[:50]) == 1
    assert svm(circles, test=circles[:50], kernel="rbf") == 1
    assert svm(circles, test=circles[:50]) < 0.75
    # Who is right a quarter of the time: all the others are of the other class.
    wrong = np.where(np.arange(50) % 4, 1 - labels[:50], labels[:50])
    found = jf.metrics.svm_accuracy(heaps, labels, heaps[:50], wrong)
    assert found == np.mean(np.arange(50) % 4 == 0)
    cluster = jf.metrics.spectral_clustering_accuracy
    assert cluster(heaps, labels) == cluster(heaps, np.array(list("ba"))[labels]) == 1
    assert cluster(circles, labels, gamma=10.0) == 1
    # With next to no affinity between neighbours or next to none but equal ones, it guesses.
    assert cluster(circles, labels, gamma=1e-6) < 0.75


@pytest.mark.parametrize("module", ["sklearn.svm", "sklearn.cluster"])
def test_a_missing_package_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    rows, labels = np.eye(4), np.arange(4) % 2
    with pytest.raises(ImportError, match=rf"{module} is needed .* 'jaxfed\[data\]'"):
        if module.endswith("svm"):
            jf.metrics.svm_accuracy(rows, labels, rows, labels)
        else:
            jf.metrics.spectral_clustering_accuracy(rows, labels)


R, Y = np.eye(4), np.arange(4) % 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jf.metrics.svm_accuracy(R[0], Y, R, Y), r"train: wanted a table .* \(4,\)"),
        (lambda: jf.metrics.svm_accuracy(R, Y[:3], R, Y), r"train_labels: wanted 4.* \(3,\)"),
        (lambda: jf.metrics.svm_accuracy(R, Y, R * np.nan, Y), "test: wanted a table .* of finite"),
        (lambda: jf.metrics.svm_accuracy(R, Y, R[:, :2], Y), "test: wanted 4 features .* got 2"),
        (lambda: jf.metrics.svm_accuracy(R, 0 * Y, R, Y), "train_labels: wanted two classes"),
        (lambda: jf.metrics.svm_accuracy(R, Y, R, Y, kernel="cosine"), "kernel: .* 'cosine'"),
        (lambda: jf.metrics.svm_accuracy(R, Y, R, Y, penalty=0), "penalty: .* got 0"),
        (lambda: jf.metrics.spectral_clustering_accuracy(R, Y[1:]), "labels: wanted 4"),
        (lambda: jf.metrics.spectral_clustering_accuracy(R, 0 * Y), "labels: wanted two classes"),
        (lambda: jf.metrics.spectral_clustering_accuracy(R, Y, gamma=-1.0), "gamma: .* got -1"),
    ],
)
def test_unfit_rows_and_labels_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


# --- from the command line -----------------------------------------------------------------------


def seen(folder):
    """Three views of 60 entities as files."""
    folder.mkdir()
    for name, x in zip("abc", arrays(np.float32, entities=60), strict=True):
        np.save(folder / f"{name}.npy", x)
    return folder


@pytest.mark.slow
def test_fit_writes_what_is_learned_and_resumes(tmp_path, capsys):
    folder, out = seen(tmp_path / "data"), tmp_path / "out"
    command = ["fit", "deepmaxvar", "--data", folder, "--out", out, "--rank", 2, "--rounds", 6]
    command += ["--bits", 3, "--held-out", 0.25, "--checkpoint-every", 3, "--hidden", 8]
    command += ["--batch-size", 20, "--step-size", 0.01, "--report"]
    command = list(map(str, command))
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "45 entities to learn from, in batches of 20, and 15 held out" in printed
    assert "networks of a 3-8-2, b 5-8-2, c 4-8-2." in printed
    with np.load(out / "result.npz") as archive:
        found = dict(archive)
    table = json.loads((out / "result.json").read_text())["table"]
    value = {row["quantity"]: row["value"] for row in table}
    shared, scores = found["shared"], found["scores"]
    np.testing.assert_allclose(shared.T @ shared, np.eye(2), atol=1e-5)
    np.testing.assert_allclose(((scores - shared) ** 2).sum() / 2, value["cost"], rtol=1e-5)
    given = [value[f"representation that {name} gives (%)"] for name in "abc"]
    np.testing.assert_allclose(sum(1 - np.array(given) / 100), value["cost"], rtol=1e-4)
    assert value["held-out entities whose nearest in another view is themselves (%)"] > 100 / 15
    # Scores of eight bits, then numbers of three bits that fill up bytes, each with a scale.
    assert value["bits sent by a client"] == (45 * 2 * 8 + 32) + 6 * (272 + 32)
    # The written networks, by hand, give the written scores of the written entities.
    x = (np.load(folder / "b.npy")[found["entities"]] - found["mean"][1]) / found["scale"][1]
    z = x @ found["local.weights[0]"][1] + found["local.biases[0]"][1]
    mean, variance = (found[f"local.statistics[0].{name}"][1] for name in ("mean", "variance"))
    z = (z - mean) / np.sqrt(variance + 1e-5)
    h = np.maximum(z * found["local.scales[0]"][1] + found["local.shifts[0]"][1], 0)
    outputs = h @ found["local.weights[1]"][1] + found["local.biases[1]"][1]
    np.testing.assert_allclose(outputs / 45**0.5, scores[1], atol=1e-5)
    for name in ("agreement.png", "convergence.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "DeepMaxVar" in (out / "report.html").read_text()
    assert main(["info", str(out)]) == 0 and "DeepMaxVar" in capsys.readouterr().out

    before = (out / "result.npz").read_bytes()
    (out / "result.json").unlink()  # as if it had been interrupted at the end
    assert main(command) == 0
    assert "Taking up" in capsys.readouterr().out
    assert (out / "result.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "0"], "rank: wanted"),
        (["--rank", "60"], "rank: 60 orthonormal components of mean zero"),
        (["--rank", "2", "--bits", "9"], "bits: wanted"),
        (["--rank", "2", "--hidden", "8", "0"], "network: it fails .* hidden: wanted"),
        (["--rank", "2", "--batch-size", "61"], "batch_size: 61 of 60"),
        (["--rank", "2", "--step-size", "-1"], "step_size: wanted"),
    ],
)
def test_errors_are_reported_in_one_line(tmp_path, capsys, options, message):
    out = tmp_path / "out"
    data = ["--data", str(seen(tmp_path / "data")), "--out", str(out)]
    assert main(["fit", "deepmaxvar", *data, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"jaxfed: .*{message}", line)
    assert not out.exists()


def test_sparse_views_are_sent_to_the_linear_method(tmp_path, capsys):
    for name, x in zip("ab", arrays(np.float32), strict=False):
        scipy.sparse.save_npz(tmp_path / f"{name}.npz", scipy.sparse.csr_array(x))
    options = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--rank", "2"]
    assert main(["fit", "deepmaxvar", *options]) == 2
    assert "deepmaxvar needs dense views, got sparse ones" in capsys.readouterr().err


# --- what it refuses -----------------------------------------------------------------------------


def test_a_network_is_refused_in_place_of_its_factory(key):
    with pytest.raises(ValueError, match=r"^network: wanted a function.*got"):
        deep(Perceptron(2, 2, key=key))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features: .* got 0"),
        ({"outputs": 2.0}, "outputs: .* got 2.0"),
        ({"hidden": (8, 0)}, "hidden: .* got 0"),
        ({"momentum": 2.0}, "momentum: .* got 2.0"),
        ({"mask": np.ones(3)}, r"mask: wanted an array .*\(4\), got .*\(3,\)"),
    ],
)
def test_a_bad_perceptron_is_refused(options, message, key):
    with pytest.raises(ValueError, match=f"^{message}"):
        Perceptron(**{"features": 4, "outputs": 2} | options, key=key)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deep(rank=3), r"network: wanted outputs of shape \(24, 3\)"),
        (lambda: batched(batch_size=25), "batch_size: 25 of 24 entities"),
        (lambda: batched(batch_size=1), "network: it fails for batches of 1 entities"),
        (lambda: deep(lambda features: 3), "network: it fails for batches of 24"),
        (
            lambda: deep(lambda features, *, mask, key: eqx.nn.Identity()),
            "network: wanted parameters",
        ),
        (
            lambda: deep(lambda features, *, mask, key: eqx.nn.Linear(2, RANK, key=key)),
            "network: it fails for batches of 24 entities with 5 features",
        ),
        (lambda: deep(functools.partial(SMALL, outputs=24), rank=24), "rank: 24 orthonormal"),
        (lambda: deep(functools.partial(SMALL, outputs=25), rank=25), "rank: 25 orthonormal"),
    ],
)
def test_settings_that_do_not_fit_the_views_are_refused(make, message, key):
    with pytest.raises(ValueError, match=f"^{message}"):
        jf.fit(make(), views(np.float32), rounds=1, key=key)


def test_other_data_and_warm_starts_are_refused(key):
    fit = functools.partial(jf.fit, rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^clients: GCCA needs Views\.from_arrays"):
        fit(deep(), jf.Clients.from_samples(arrays(np.float32, features=(5, 5, 5))))
    sparse = jf.gcca.Views.from_sparse([scipy.sparse.csr_array(x) for x in arrays(np.float32)])
    with pytest.raises(ValueError, match=r"^clients: networks need dense views"):
        fit(deep(), sparse)
    clients = views(np.float32)
    result = jf.Personalized(jnp.eye(ENTITIES, RANK), stacked(start_of()[1]))
    result = jax.tree.map(lambda x: jnp.asarray(x, np.float32), result)
    wrong = (
        (result._replace(shared=result.shared[:-1]), "warm_start: wanted shared of shape"),
        (result._replace(shared=()), "warm_start: wanted shared of shape"),
        (
            result._replace(local=result.local.weights[0]),
            "warm_start: wanted as local part the arrays of 3 networks",
        ),
        (
            result._replace(local=jax.tree.map(lambda x: x * jnp.nan, result.local)),
            "warm_start: NaN or infinite",
        ),
    )
    for start, message in wrong:
        with pytest.raises(ValueError, match=f"^{message}"):
            fit(deep(), clients, warm_start=start)


def test_networks_refuse_other_views(key):
    algorithm, clients = deep(), views(np.float32)
    local = stacked(start_of()[1])
    with pytest.raises(ValueError, match=r"^local, views: \{3\} networks and 2 views"):
        algorithm.outputs(local, clients.take([0, 1]))
    narrow = jf.gcca.Views.from_arrays([x[:, :3] for x in arrays(np.float32)])
    with pytest.raises(ValueError, match=r"^views: the networks are not .* of 3 features"):
        algorithm.represent(local, narrow)
    with pytest.raises(ValueError, match=r"^views: GCCA needs"):
        algorithm.outputs(local, jf.Clients.from_samples(arrays(np.float32, features=(5, 5, 5))))


@pytest.mark.slow
def test_a_run_that_diverges_is_stopped(key):
    with pytest.raises(FloatingPointError, match=r"is not finite in round \d+"):
        jf.fit(deep(step_size=1e25), views(np.float32), rounds=20, key=key)
