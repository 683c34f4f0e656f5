"""Optax optimizers on manifolds."""

from functools import partial

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfed.manifolds import grassmann, riemannian, stiefel

DIM, RANK = 8, 3
SPECTRUM = jnp.array([4.0, 3.5, 3.0, 1.0, 0.8, 0.5, 0.2, 0.1])

DECAY = optax.cosine_decay_schedule(0.1, 500)
OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.02, momentum=0.9),
    "adam": optax.adam(DECAY),
    "adamw": optax.adamw(DECAY, weight_decay=0.1),
    "rmsprop": optax.rmsprop(DECAY, momentum=0.5),
    "lion": optax.lion(DECAY),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(DECAY)),
}


def problem(key):
    """A symmetric matrix of known spectrum, its top eigenvectors and a start."""
    keys = jax.random.split(key)
    rotation, start = stiefel.random(DIM, DIM, key=keys[0]), stiefel.random(DIM, RANK, key=keys[1])
    return (rotation * SPECTRUM) @ rotation.T, rotation[:, :RANK], start


def loss(a, x):
    return -jnp.trace(x.T @ a @ x)


def deviation(x):
    return jnp.linalg.norm(x.T @ x - jnp.eye(x.shape[-1]))


def descend(optimizer, objective, params, steps):
    """Parameters after ``steps`` and the largest deviation on the way."""

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(objective)(params), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), deviation(params)

    (params, _), deviations = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
    return params, deviations.max()


# The QR retraction compiles the fastest: the tests use it wherever any retraction would do.


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_find_the_top_eigenspace(name, key):
    """Minimizing -tr(xᵀ a x), with every iterate orthonormal."""
    a, top, start = problem(key)
    optimizer = riemannian(OPTIMIZERS[name], retraction="qr")
    x, largest = jax.jit(lambda x: descend(optimizer, partial(loss, a), x, 500))(start)
    assert largest <= 1e-5 * RANK
    assert grassmann.distance(x, top) < 2e-3


@pytest.mark.parametrize("retraction", stiefel.RETRACTIONS)
@pytest.mark.parametrize("manifold", ["stiefel", "grassmann"])
def test_every_manifold_and_retraction_in_double_precision(manifold, retraction, key, x64):
    a, top, start = problem(key)
    optimizer = riemannian(optax.sgd(0.02, momentum=0.9), manifold=manifold, retraction=retraction)
    x, largest = jax.jit(lambda x: descend(optimizer, partial(loss, a), x, 500))(start)
    assert x.dtype == jnp.float64
    assert largest <= 1e-12 * RANK
    assert grassmann.distance(x, top) < 1e-9


def test_brockett_cost_finds_the_eigenvectors_themselves(key, x64):
    """The weights tell the columns apart: a problem of frames and not only of subspaces."""
    a, top, start = problem(key)
    weights = jnp.array([3.0, 2.0, 1.0])
    optimizer = riemannian(optax.sgd(0.05, momentum=0.8))
    x, _ = jax.jit(
        lambda x: descend(optimizer, lambda x: -jnp.sum(weights * x * (a @ x)), x, 1500)
    )(start)
    chex.assert_trees_all_close(jnp.abs(x.T @ top), jnp.eye(RANK), atol=1e-8)


# What one update does


def test_update_is_project_transform_project_retract_transport(key, x64):
    a, _, x = problem(key)
    optimizer = riemannian(optax.adam(0.1))
    update, gradient = jax.jit(optimizer.update), jax.grad(partial(loss, a))
    # One step to have a first moment that is not tangent any more, one to look at.
    updates, state = update(gradient(x), optimizer.init(x), x)
    x = x + updates
    updates, new_state = update(gradient(x), state, x)

    step, plain = optax.adam(0.1).update(stiefel.project(x, gradient(x)), state, x)
    expected = jax.jit(stiefel.retract_polar)(x, stiefel.project(x, step))
    chex.assert_trees_all_close(x + updates, expected, atol=1e-14)
    mu, nu = new_state[0].mu, new_state[0].nu
    assert jnp.linalg.norm(plain[0].mu - mu) > 1e-3
    chex.assert_trees_all_close(mu, stiefel.transport(expected, plain[0].mu), atol=1e-14)
    chex.assert_trees_all_close(nu, plain[0].nu, rtol=1e-12)
    assert new_state[0].count == 2


def first_moments(state):
    return [
        value
        for path, value in jax.tree_util.tree_leaves_with_path(state)
        if {getattr(k, "name", None) for k in path} & {"mu", "trace", "ema"}
    ]


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adam(0.1),
        optax.rmsprop(0.1, momentum=0.9),
        optax.chain(optax.clip(0.5), optax.ema(0.9), optax.scale(-0.1)),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        optax.partition({"all": optax.adam(0.1)}, "all"),
    ],
    ids=["sgd", "adam", "rmsprop", "ema", "inject", "multi_steps", "partition"],
)
def test_first_moments_are_tangent_wherever_they_are_in_the_state(inner, key):
    a, _, x = problem(key)
    # The name of the parameter is that of a first moment, to lead the search astray.
    params = {"trace": [x]}
    optimizer = riemannian(inner, retraction="qr")
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for _ in range(2):
        gradient = jax.tree.map(jax.grad(partial(loss, a)), params)
        updates, state = step(gradient, state, params)
        params = optax.apply_updates(params, updates)
    (moment,) = first_moments(state)
    x = params["trace"][0]
    assert jnp.linalg.norm(moment) > 1e-2
    chex.assert_trees_all_close(x.T @ moment, -moment.T @ x, atol=1e-5)
    chex.assert_trees_all_equal_structs(state, inner.init(params))


def test_state_keeps_its_types(key):
    """A momentum may be shorter than the parameters, and the state must fit a scan."""
    a, _, x = problem(key)
    optimizer = riemannian(optax.adam(0.1, mu_dtype=jnp.bfloat16), retraction="qr")
    state = optimizer.init(x)
    updates, new_state = optimizer.update(jax.grad(partial(loss, a))(x), state, x)
    assert updates.dtype == jnp.float32
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new_state)


# Pytrees of mixed parameters


class Model(eqx.Module):
    basis: jax.Array
    bias: jax.Array
    activation: str = eqx.field(static=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"manifold": {"basis": "stiefel", "rest": "euclidean"}},
        {"mask": {"basis": True, "rest": False}},
        {"manifold": "grassmann", "mask": {"basis": True, "rest": {"bias": False, "wide": False}}},
    ],
)
def test_euclidean_leaves_get_the_plain_result(where, key):
    inner = optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale(-0.1))
    keys = jax.random.split(key, 3)
    params = {
        "basis": stiefel.random(6, 2, key=keys[0]),
        "rest": {"bias": jnp.ones(3), "wide": jax.random.normal(keys[1], (2, 5))},
    }
    optimizer = riemannian(inner, retraction="qr", **where)
    state, plain = optimizer.init(params), params["rest"]
    plain_state = inner.init(plain)
    for i in range(5):
        gradient = jax.tree.map(
            lambda p, i=i: jax.random.normal(jax.random.fold_in(keys[2], i), p.shape), params
        )
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = inner.update(gradient["rest"], plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    chex.assert_trees_all_equal(params["rest"], plain)
    assert deviation(params["basis"]) < 2e-5


def test_equinox_modules(key):
    model = Model(stiefel.random(5, 2, key=key), jnp.zeros(2), "relu")
    where = Model("stiefel", "euclidean", "relu")
    optimizer = riemannian(optax.adam(0.1), manifold=where, retraction="qr")
    target = jnp.arange(2.0)

    def objective(model):
        return jnp.sum(model.basis[0]) + jnp.sum((model.bias - target) ** 2)

    state = optimizer.init(model)
    for _ in range(3):
        updates, state = optimizer.update(jax.grad(objective)(model), state, model)
        model = optax.apply_updates(model, updates)
    assert deviation(model.basis) < 2e-5
    assert model.bias[1] > 0.2


@pytest.mark.slow
def test_leading_axes_are_points_of_their_own(key):
    x = jax.vmap(lambda k: stiefel.random(5, 2, key=k))(jax.random.split(key, 6)).reshape(
        2, 3, 5, 2
    )
    g = jax.random.normal(key, x.shape)
    optimizer = riemannian(optax.sgd(0.1, momentum=0.9))
    update = jax.jit(optimizer.update)
    updates, state = update(g, optimizer.init(x), x)
    for i, j in np.ndindex(2, 3):
        one, one_state = update(g[i, j], optimizer.init(x[i, j]), x[i, j])
        chex.assert_trees_all_close(updates[i, j], one, atol=1e-6)
        chex.assert_trees_all_close(state[0].trace[i, j], one_state[0].trace, atol=1e-6)


def test_inside_an_optax_partition(key):
    """As one of several optimizers, each with the parameters of its label."""
    params = {"basis": stiefel.random(5, 2, key=key), "bias": jnp.ones(2)}
    optimizer = optax.partition(
        {"on": riemannian(optax.adam(0.1), retraction="qr"), "off": optax.sgd(0.1)},
        {"basis": "on", "bias": "off"},
    )
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(params["bias"], jnp.full(2, 0.9))
    assert deviation(params["basis"]) < 2e-5


def test_extra_arguments_reach_the_transformation(key):
    a, _, x = problem(key)
    optimizer = riemannian(optax.polyak_sgd(0.1, f_min=-10.5), retraction="qr")
    value, gradient = jax.value_and_grad(partial(loss, a))(x)
    updates, _ = optimizer.update(gradient, optimizer.init(x), x, value=value)
    assert loss(a, x + updates) < value
    assert deviation(x + updates) < 3e-5


def test_tree_map_params_sees_through(key):
    """Optax asks for a state without parameters to find which leaves are shaped like them."""
    params = {"basis": stiefel.random(5, 2, key=key), "bias": jnp.ones(2)}
    optimizer = riemannian(optax.adam(0.1), manifold={"basis": "stiefel", "bias": "euclidean"})
    state = optax.tree_map_params(optimizer, lambda p: p + 1, optimizer.init(params))
    chex.assert_trees_all_equal(state[0].mu, jax.tree.map(jnp.ones_like, params))
    assert state[0].count == 0


# Transformations of JAX


def final_loss(a, x, learning_rate, inner):
    optimizer = riemannian(inner(learning_rate))
    return loss(a, descend(optimizer, partial(loss, a), x, 15)[0])


INNER = {
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate, eps_root=1e-8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER)
def test_gradient_with_respect_to_the_learning_rate(name, key, x64):
    a, _, x = problem(key)
    function = jax.jit(lambda rate: final_loss(a, x, rate, INNER[name]))
    derivative = jax.jit(jax.grad(function))
    for rate in (0.01, 0.03):
        difference = (function(rate + 1e-6) - function(rate - 1e-6)) / 2e-6
        assert abs(difference) > 1
        chex.assert_trees_all_close(derivative(rate), difference, rtol=1e-6)


@pytest.mark.slow
def test_vmap_over_learning_rates_is_a_loop(key):
    a, _, x = problem(key)
    function = jax.jit(lambda rate: final_loss(a, x, rate, INNER["momentum"]))
    rates = jnp.array([0.01, 0.03, 0.05])
    chex.assert_trees_all_close(
        jax.jit(jax.vmap(function))(rates), jnp.stack([function(r) for r in rates]), rtol=1e-5
    )


# Bad input


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^manifold: wanted .*stiefel, got 'sphere'"):
        riemannian(optax.sgd(0.1), manifold={"a": "stiefel", "b": "sphere"})
    with pytest.raises(ValueError, match=r"^retraction: wanted one of .*qr, got 'svd'"):
        riemannian(optax.sgd(0.1), retraction="svd")


@pytest.mark.parametrize("shape", [(2, 5), (5,), (), (3, 2, 5)])
def test_leaves_of_a_wrong_shape_are_refused_by_path(shape):
    optimizer = riemannian(optax.sgd(0.1), mask={"a": False, "layer": {"basis": True}})
    params = {"a": jnp.ones(2), "layer": {"basis": jnp.ones(shape)}}
    with pytest.raises(ValueError, match=r"params\['layer'\]\['basis'\].*d >= r, got \(") as error:
        optimizer.init(params)
    assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match=r"params\['layer'\]\['basis'\]"):
        jax.eval_shape(lambda p: optimizer.update(p, optax.EmptyState(), p), params)


def test_points_off_the_manifold_are_refused_when_concrete(key):
    optimizer = riemannian(optax.sgd(0.1))
    params = {"good": stiefel.random(5, 2, key=key), "bad": jnp.ones((5, 2))}
    with pytest.raises(ValueError, match=r"params\['bad'\] .* not orthonormal"):
        optimizer.init(params)
    jax.eval_shape(optimizer.init, params)


def test_params_are_required(key):
    x = stiefel.random(5, 2, key=key)
    optimizer = riemannian(optax.sgd(0.1))
    with pytest.raises(ValueError, match="params must be given"):
        optimizer.update(x, optimizer.init(x))


@pytest.mark.parametrize(
    "name, prefix", [("manifold", {"basis": "stiefel"}), ("mask", {"a": True})]
)
def test_prefixes_must_fit_the_parameters(name, prefix, key):
    optimizer = riemannian(optax.sgd(0.1), **{name: prefix})
    with pytest.raises(ValueError, match=f"{name} must be a prefix of the pytree of parameters"):
        optimizer.init({"basis": stiefel.random(5, 2, key=key), "bias": jnp.ones(2)})
