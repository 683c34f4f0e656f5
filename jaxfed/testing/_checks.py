"""Checks of an algorithm on its own, and the list of all checks."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.core.clients.samples import SampleRows, Samples
from jaxfed.core.run.rollout import rollout
from jaxfed.core.sweeps.sweep import stack
from jaxfed.gcca.views import View
from jaxfed.testing import _run_checks
from jaxfed.testing._case import (
    Case,
    Foreign,
    combination,
    fit_in_chunks,
    more_rows,
    with_scaled_hyperparameters,
)
from jaxfed.testing._compare import (
    check_finite,
    check_same_shapes,
    compilations,
    floating,
    floats_as,
    measured,
    refused,
    unpadded,
)
from jaxfed.testing._report import Skipped


def check_structure(case: Case) -> None:
    one, three = (case.shapes(case.algorithm, case.clients, rounds) for rounds in (1, 3))
    for name in ("state", "result"):
        sentence = f"the {name} has the same shapes and types after one round and after three"
        check_same_shapes(getattr(three, name), getattr(one, name), sentence)
    first, downlink, uplink = case.messages
    everything = {"first message": first, "downlink": downlink, "uplink": uplink}
    everything |= {"server": one.server, "local": one.local, "result": one.result}
    for name, tree in everything.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if 0 in leaf.shape:
                raise AssertionError(
                    "a part that does not exist is None, never an array without elements: got "
                    f"shape {leaf.shape} at {name}{jax.tree_util.keystr(path)}"
                )
    for name, tree in {"states": one.local, "results": one.result.local}.items():
        for leaf in jax.tree.leaves(tree):
            if leaf.shape[:1] != (len(case.clients),):
                raise AssertionError(
                    f"the clients' {name} have a leading axis of {len(case.clients)} clients: got "
                    f"shape {leaf.shape}"
                )
    for name, leaf in three.history.items():
        if leaf.shape != (3,):
            raise AssertionError(
                f"the history has one number per round: got shape {leaf.shape} of {name} after 3"
            )
    solution = case.solve()
    check_finite(case.says(solution), "the result and the objective are finite")
    if case.constraint is not None:
        case.constraint(solution.result)


def check_types(case: Case) -> None:
    for bits, dtype in ((False, np.float32), (True, np.float64), (True, np.float32)):
        with jax.enable_x64(bits):
            algorithm, clients = floats_as(case.algorithm, dtype), floats_as(case.clients, dtype)
            solution = case.shapes(algorithm, clients, 2)
        history = {k: x for k, x in solution.history.items() if not k.startswith("bits")}
        trees = {"result": solution.result, "server": solution.server, "local": solution.local}
        trees["history"] = history
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
            if floating(leaf) and leaf.dtype != dtype:
                raise AssertionError(
                    f"numbers have the data's type: got {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)} from data of {np.dtype(dtype)}"
                    f"{', where 64 bits are enabled' * bits}"
                )
    if case.constraint is not None:
        with jax.enable_x64(False):
            single = floats_as(case.algorithm, np.float32), floats_as(case.clients, np.float32)
            case.constraint(case.solve(*single).result)


def check_compilation(case: Case) -> None:
    def runs(algorithm, clients, key):
        case.solve(algorithm, clients, key)
        fit_in_chunks(case, algorithm, clients, key)

    another = jax.random.fold_in(case.key, 1)
    second = with_scaled_hyperparameters(case.algorithm, 0.9)
    runs(case.algorithm, case.clients, case.key)
    with compilations() as compiled:
        runs(second, case.others, another)
    if compiled:
        raise AssertionError(
            "a second call with other hyperparameters, data and key compiles nothing: it compiled "
            f"{', '.join(compiled)}"
        )


def check_host(case: Case) -> None:
    traced = case.solve()
    driven = fit_in_chunks(case, case.algorithm, case.clients, case.key)
    sentence = "fit gives what rollout gives"
    if driven.rounds != int(traced.rounds):
        raise AssertionError(f"{sentence}: {driven.rounds} rounds and {int(traced.rounds)}")
    check_same_shapes(driven.result, traced.result, sentence)
    case.same(case.says(driven), case.says(traced), sentence)
    case.same(dict(driven.history), dict(traced.history), sentence)


def check_vmap(case: Case) -> None:
    algorithms = [case.algorithm, with_scaled_hyperparameters(case.algorithm, 0.8)]
    clients, keys = [case.clients, case.others], jax.random.split(case.key)
    several = jax.jit(jax.vmap(lambda *given: case.says(case.solve(*given))))(
        stack(algorithms), stack(clients), keys
    )
    for i, one in enumerate(map(case.solve, algorithms, clients, keys)):
        chosen = jax.tree.map(lambda x, i=i: x[i], several)
        case.same(chosen, case.says(one), f"runs at once are those of a loop (number {i})")


def check_gradients(case: Case) -> None:
    numbers, settings = eqx.partition(case.algorithm, eqx.is_inexact_array)
    values, rest = eqx.partition(case.clients.data, measured)

    def loss(differentiated):
        numbers, values = differentiated
        clients = eqx.tree_at(lambda c: c.data, case.clients, eqx.combine(values, rest))
        solution = rollout(
            eqx.combine(numbers, settings), clients, rounds=min(case.rounds, 5), key=case.key
        )
        if case.loss is not None:
            return case.loss(solution.result)
        return combination(case.essence(solution.result))

    # Without weak types, so that the function is compiled once.
    at = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (numbers, values))
    function = jax.jit(jax.value_and_grad(loss))
    result, gradient = function(at)
    check_finite(gradient, "derivatives by hyperparameters and data are finite")
    # Missing numbers, which are NaN, stay NaN and do not count.
    changes = jax.tree.map(lambda x, g: float(jnp.nanmax(jnp.abs(x * g))), values, gradient[1])
    if not max(jax.tree.leaves(changes), default=0) > 1e-6 * abs(float(result)):
        raise AssertionError("the result depends on the data: its derivative by them is zero")
    if not case.deterministic:
        case.skipped["finite differences"] = "deterministic=True was not given"
        return
    rng = np.random.default_rng(0)
    # Proportional to the numbers, so that zeros in padding stay zero.
    direction = jax.tree.map(lambda x: x * rng.normal(size=x.shape), at)

    def value(step):
        return float(function(jax.tree.map(lambda x, u: x + step * u, at, direction))[0])

    products = jax.tree.map(lambda g, u: jnp.nansum(g * u), gradient, direction)
    exact = float(sum(jax.tree.leaves(products)))
    size = sum(float(jnp.abs(x)) for x in jax.tree.leaves(products))
    # Richardson extrapolation from two step sizes removes the second-order error.
    near, far = ((value(h) - value(-h)) / (2 * h) for h in (1e-5, 2e-5))
    differences = (4 * near - far) / 3
    if not abs(differences - exact) <= 1e-5 * max(abs(differences), size):
        raise AssertionError(
            "derivatives of a deterministic algorithm equal finite differences: along one "
            f"direction {exact:.10g} and {differences:.10g}"
        )


def check_order(case: Case) -> None:
    order = np.roll(np.arange(len(case.clients)), 2)
    order[:2] = order[1::-1]
    (shared, local), objective = case.says(case.solve())
    other = case.says(case.solve(clients=case.clients.take(order)))
    permuted = jax.tree.map(lambda x: x[order], local)
    sentence = "permuting clients permutes their results and changes nothing else"
    case.same((tuple(other[0]), other[1]), ((shared, permuted), objective), sentence)


def check_padding(case: Case) -> None:
    count = len(case.clients)
    pad = case.pad
    if pad is None and isinstance(case.clients.data, SampleRows):
        pad = more_rows
    if pad is None:
        case.skipped["padding of the data"] = "pad= was not given"
    stranger = jax.tree.map(lambda x: 5 * x[:1] if measured(x) else x[:1], case.others.data)
    larger = eqx.tree_at(
        lambda c: (c.data, c.ids, c.weights),
        case.clients,
        (
            jax.tree.map(lambda x, y: jnp.concatenate([x, y]), case.clients.data, stranger),
            jnp.append(case.clients.ids, case.clients.ids.max() + 1),
            jnp.append(case.clients.weights, 0.0),
        ),
    )
    larger = larger if pad is None else pad(larger)
    (shared, local), objective = case.says(case.solve())
    (shared_2, local_2), objective_2 = case.says(case.solve(case.wider, larger))
    local_2 = jax.tree.map(lambda x: x[:count], local_2)
    sentence = "a further client of weight 0 and padding change nothing"
    cut = jax.tree.map(lambda x, like: unpadded(x, like, sentence), local_2, local)
    case.same((shared_2, cut, objective_2), (shared, local, objective), sentence)


def check_samples(case: Case) -> None:
    if not case.algorithm.quadratic_in_samples:
        raise Skipped("the algorithm does not declare quadratic_in_samples")
    data = case.clients.data
    of_entities = isinstance(data, View)  # whose weights are the same in all views
    if not (isinstance(data, Samples) or (of_entities and data.observed is None)):
        raise Skipped("weights are of complete samples or dense views")
    values = np.array(data.values)
    pairs = values.shape[1] // 2
    first, second = values[:, : 2 * pairs : 2], values[:, 1 : 2 * pairs : 2]
    real = True if of_entities else np.asarray(data.mask)[:, 1 : 2 * pairs : 2, None] > 0
    drawn = np.random.default_rng(0).uniform(0.2, 1.8, (1 if of_entities else len(values), pairs))
    weights = np.where(real, drawn[..., None], 1)
    second[:] = np.where(real, first, second)
    equal = eqx.tree_at(lambda c: c.data.values, case.clients, jnp.asarray(values))
    first[:], second[:] = first * np.sqrt(weights), second * np.sqrt(2 - weights)
    weighted = eqx.tree_at(lambda c: c.data.values, case.clients, jnp.asarray(values))
    wanted, given = (case.says(case.solve(clients=each)) for each in (equal, weighted))
    if of_entities:  # results contain the entities' scores, which differ
        wanted, given = wanted[1], given[1]
    sentence = "a sample times the root of a weight counts as that many samples"
    case.same(given, wanted, sentence)


def check_refusals(case: Case) -> None:
    foreign = eqx.tree_at(lambda c: c.data, case.clients, Foreign(jnp.ones((len(case.clients), 2))))
    refused(lambda: case.shapes(case.algorithm, foreign, 1), "clients", "data of an unknown kind")


CHECKS: dict[str, Callable[[Case], None]] = {
    # The cheapest first, so that the commonest mistakes show at once; channels compile the most.
    "refusals": check_refusals,
    "structure": check_structure,
    "types": check_types,
    "compilation": check_compilation,
    "host": check_host,
    "participation": _run_checks.check_participation,
    "bits": _run_checks.check_bits,
    "newcomers": _run_checks.check_newcomers,
    "checkpoint": _run_checks.check_checkpoint,
    "order": check_order,
    "padding": check_padding,
    "samples": check_samples,
    "vmap": check_vmap,
    "gradients": check_gradients,
    "backends": _run_checks.check_backends,
    "buckets": _run_checks.check_buckets,
    "source": _run_checks.check_source,
    "channels": _run_checks.check_channels,
}
