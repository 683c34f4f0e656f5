"""The checks of `jaxfed.testing.check_algorithm`, each a claim of the contract."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import backend, channel, participation
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.common.buckets import Buckets
from jaxfed.core.contract.reduction import is_linear
from jaxfed.core.round.rounds import one_round
from jaxfed.core.run.host import fit, problem_of, rollout
from jaxfed.core.run.personalize import personalize
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.sweeps.grid import stack
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.testing._case import (
    Case,
    Foreign,
    Skipped,
    begun,
    chunk,
    chunked,
    combination,
    every_backend,
    every_channel,
    more_rows,
    scaled,
)
from jaxfed.testing._compare import (
    alike,
    cast,
    compilations,
    finite,
    floating,
    length,
    measured,
    refused,
    same,
    unpadded,
)


def check_structure(case: Case) -> None:
    one, three = (case.shapes(case.algorithm, case.clients, rounds) for rounds in (1, 3))
    for name in ("state", "result"):
        alike(
            getattr(three, name), getattr(one, name),
            f"the {name} has the same shapes and types after one round and after three",
        )  # fmt: skip
    first, downlink, uplink = case.messages()
    everything = {
        "first message": first, "downlink": downlink, "uplink": uplink, "server": one.server,
        "local": one.local, "result": one.result,
    }  # fmt: skip
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
                f"the history has one number a round: got shape {leaf.shape} of {name} after 3"
            )
    solution = case.solve()
    finite(case.says(solution), "the result and the objective are finite")
    if case.constraint is not None:
        case.constraint(solution.result)


def check_types(case: Case) -> None:
    for bits, dtype in ((False, np.float32), (True, np.float64), (True, np.float32)):
        with jax.enable_x64(bits):
            algorithm, clients = cast(case.algorithm, dtype), cast(case.clients, dtype)
            solution = case.shapes(algorithm, clients, 2)
        history = {k: x for k, x in solution.history.items() if not k.startswith("bits")}
        told = {
            "result": solution.result, "server": solution.server, "local": solution.local,
            "history": history,
        }  # fmt: skip
        for path, leaf in jax.tree_util.tree_leaves_with_path(told):
            if floating(leaf) and leaf.dtype != dtype:
                raise AssertionError(
                    f"numbers have the data's type: got {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)} from data of {np.dtype(dtype)}"
                    f"{', where 64 bits are enabled' * bits}"
                )
    if case.constraint is not None:
        with jax.enable_x64(False):
            single = cast(case.algorithm, np.float32), cast(case.clients, np.float32)
            case.constraint(case.solve(*single).result)


def check_compilation(case: Case) -> None:
    def runs(algorithm, clients, key):
        case.solve(algorithm, clients, key)
        chunked(case, algorithm, clients, key)

    another = jax.random.fold_in(case.key, 1)
    second = scaled(case.algorithm, 0.9)
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
    driven = chunked(case, case.algorithm, case.clients, case.key)
    sentence = "fit gives what rollout gives"
    if driven.rounds != int(traced.rounds):
        raise AssertionError(f"{sentence}: {driven.rounds} rounds and {int(traced.rounds)}")
    alike(driven.result, traced.result, sentence)
    case.same(case.says(driven), case.says(traced), sentence)
    case.same(dict(driven.history), dict(traced.history), sentence)


def check_vmap(case: Case) -> None:
    algorithms = [case.algorithm, scaled(case.algorithm, 0.8)]
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

    # Of the types that sums have, so that the function is compiled once.
    at = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (numbers, values))
    function = jax.jit(jax.value_and_grad(loss))
    result, gradient = function(at)
    finite(gradient, "derivatives by hyperparameters and data are finite")
    changes = jax.tree.map(lambda x, g: float(jnp.max(jnp.abs(x * g))), values, gradient[1])
    if not max(jax.tree.leaves(changes), default=0) > 1e-6 * abs(float(result)):
        raise AssertionError("the result depends on the data: its derivative by them is zero")
    if not case.deterministic:
        case.skipped["finite differences"] = "the algorithm is not said to be deterministic"
        return
    rng = np.random.default_rng(0)
    # In proportion to the numbers, so that padding stays padding.
    direction = jax.tree.map(lambda x: x * rng.normal(size=x.shape), at)

    def value(step):
        return float(function(jax.tree.map(lambda x, u: x + step * u, at, direction))[0])

    products = jax.tree.map(lambda g, u: jnp.sum(g * u), gradient, direction)
    exact = float(sum(jax.tree.leaves(products)))
    size = sum(float(jnp.abs(x)) for x in jax.tree.leaves(products))
    # Steps of two lengths, so that only what both leave is an error of the derivative.
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
    same(
        (tuple(other[0]), other[1]), ((shared, permuted), objective),
        "permuting clients permutes their results and changes nothing else", case.rtol, case.atol,
    )  # fmt: skip


def check_padding(case: Case) -> None:
    count = len(case.clients)
    pad = case.pad
    if pad is None and isinstance(case.clients.data, Samples):
        pad = more_rows
    if pad is None:
        case.skipped["padding of the data"] = "pad= says how these data are padded"
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


def check_backends(case: Case) -> None:
    wanted = case.solve()
    for name, mapped in (every_backend() if case.backends is None else case.backends).items():
        given = case.solve(backend=mapped)
        sentence = f"the backend {name} gives what vmap gives"
        case.same(case.says(given), case.says(wanted), sentence)
        case.same(dict(given.history), dict(wanted.history), sentence)


def check_buckets(case: Case) -> None:
    data = case.clients.data
    if not isinstance(data, Samples):
        raise Skipped("buckets are of samples")
    order = np.argsort(-np.asarray(data.count), kind="stable")
    groups = [np.sort(own) for own in np.array_split(order, 2)]
    parts = tuple(
        Samples(data.values[own, : int(data.count[own].max())], data.count[own]) for own in groups
    )
    places = tuple(map(jnp.asarray, groups))
    bucketed = eqx.tree_at(
        lambda c: c.data, case.clients, Buckets(parts, places, tuple(map(len, groups)))
    )
    wanted = case.solve()
    with unless_refused("clients in buckets"):
        given = case.solve(clients=bucketed)
    case.same(case.says(given), case.says(wanted), "clients in buckets give what others give")


@contextlib.contextmanager
def unless_refused(what: str) -> Iterator[None]:
    """Skip the check where the algorithm refuses such clients by name."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("clients: "):
            raise
        raise Skipped(f"the algorithm refuses {what}: {error}") from error


def check_source(case: Case) -> None:
    data = case.clients.data
    if not isinstance(data, Samples):
        raise Skipped("sources are of samples")
    counts = np.asarray(data.count).astype(int)
    values = [np.asarray(x[:n]) for x, n in zip(data.values, counts, strict=True)]
    size = 2 * max(array.nbytes for array in values)
    source = Clients.from_source(values, block_bytes=size)
    source = eqx.tree_at(
        lambda c: (c.ids, c.weights), source, (case.clients.ids, case.clients.weights)
    )
    run = {"rounds": min(case.rounds, 5), "key": case.key}
    wanted = fit(case.algorithm, case.clients, **run)
    with unless_refused("clients that are read block by block"):
        given = fit(case.algorithm, source, **run)
    sentence = "clients that are read block by block give what others give"
    case.same(case.says(given), case.says(wanted), sentence)
    case.same(dict(given.history), dict(wanted.history), sentence)


def check_participation(case: Case) -> None:
    present = np.arange(len(case.clients)) % 2 == 0
    chosen = participation.mask(present[None])

    def step(algorithm, clients, key):
        problem, state = begun(algorithm, clients, key, case.rounds, chosen)
        return state.local, one_round(problem, state)[0].local

    given = case.algorithm, case.clients, case.key
    if case.algorithm.needs_everybody:
        refused(lambda: jax.eval_shape(step, *given), "participation", "partial participation")
        raise Skipped("the algorithm needs every client in each round, and says so")
    before, after = jax.tree.map(lambda x: x[~present], jax.jit(step)(*given))
    same(after, before, "absent clients keep their states exactly", 0, 0)


def check_channels(case: Case) -> None:
    first, downlink, uplink = case.messages()
    exact = channel.top_k(1.0)
    for message in (first, downlink, uplink):
        for way in (channel.lossless(), exact):
            payload, _ = way.encode(case.key, message, way.memory(message))
            decoded = way.decode(payload)
            same(decoded, message, "a channel that loses nothing changes no bit", 0, 0)
            length(payload)
    if case.channels is None:
        through = case.solve(channel=Wire(exact, exact, exact))
        sentence = "a channel that loses nothing changes no number"
        case.same(case.says(through), case.says(case.solve()), sentence)
    known = every_channel(len(case.clients)) if case.channels is None else case.channels
    for name, given in known.items():
        try:
            solution = case.solve(channel=given, rounds=min(case.rounds, 5))
        except ValueError as refusal:
            if not re.match(r"(channel|participation): ", str(refusal)):
                raise AssertionError(
                    f"a channel runs or is refused by a ValueError about it: {name} ended in "
                    f"{refusal}"
                ) from refusal
            if checked_wire(given).up.private and is_linear((first, uplink)):
                raise AssertionError(
                    f"messages that are sums and means can be hidden: {name} was refused: {refusal}"
                ) from refusal
            case.skipped[f"channel {name}"] = str(refusal)
            continue
        bits = {k: x for k, x in solution.history.items() if k.startswith("bits")}
        told = case.essence(solution.result), bits
        finite(told, f"a run through a channel has finite numbers: {name}")
        if case.constraint is not None:
            try:
                case.constraint(solution.result)
            except AssertionError as error:
                raise AssertionError(f"the constraint holds through {name}: {error}") from error


def check_bits(case: Case) -> None:
    first, downlink, uplink = map(length, case.messages())
    history = case.solve().history
    number = np.arange(1, case.rounds + 1)
    wanted = {"bits_up": 8 * (first + uplink * number), "bits_down": 8 * downlink * number}
    given = {name: history[name] for name in wanted}
    same(given, wanted, "the history's bits are the length of the payloads", 1e-15, 0)


def check_newcomers(case: Case) -> None:
    solution = case.solve()
    models = personalize(case.algorithm, solution, case.others, rounds=2, key=case.key)
    alike(models.local, solution.result.local, "new clients' models are like the others'")
    finite(case.essence(models), "new clients' models are finite")
    order = np.arange(len(case.clients))[::-1]
    turned = problem_of(
        case.algorithm, case.clients.take(order), case.rounds, case.key, solution,
        channel.lossless(), None, backend.vmap(),
    )[1]  # fmt: skip
    assert turned is not None
    wanted = jax.tree.map(lambda x: x[order], solution.result.local)
    same(turned.local, wanted, "a warm start finds clients by their ids", 0, 0)


class _Interruption(Exception):
    """What ends a run in the middle."""


def check_checkpoint(case: Case) -> None:
    if find_spec("orbax") is None or find_spec("orbax.checkpoint") is None:
        raise Skipped("Orbax is not installed")
    given = case.algorithm, case.clients, case.key
    wanted = chunked(case, *given)
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoint(folder, every=chunk(case))

        def save_and_stop(*arguments):
            Checkpoint.save(saved, *arguments)
            raise _Interruption

        with mock.patch.object(saved, "save", save_and_stop), contextlib.suppress(_Interruption):
            chunked(case, *given, checkpoint=saved)
        resumed = chunked(case, *given, checkpoint=saved)
    for name in ("result", "server", "local", "history", "state"):
        same(
            getattr(resumed, name), getattr(wanted, name),
            f"an interrupted run ends bit for bit like one that was not: {name}", 0, 0,
        )  # fmt: skip


def check_refusals(case: Case) -> None:
    foreign = eqx.tree_at(lambda c: c.data, case.clients, Foreign(jnp.ones((len(case.clients), 2))))
    refused(lambda: case.shapes(case.algorithm, foreign, 1), "clients", "data of an unknown kind")


CHECKS: dict[str, Callable[[Case], None]] = {
    "structure": check_structure,
    "types": check_types,
    "compilation": check_compilation,
    "host": check_host,
    "vmap": check_vmap,
    "gradients": check_gradients,
    "order": check_order,
    "padding": check_padding,
    "backends": check_backends,
    "buckets": check_buckets,
    "source": check_source,
    "participation": check_participation,
    "channels": check_channels,
    "bits": check_bits,
    "newcomers": check_newcomers,
    "checkpoint": check_checkpoint,
    "refusals": check_refusals,
}
