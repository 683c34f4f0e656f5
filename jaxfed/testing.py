"""What every algorithm must keep, as one check for algorithms of one's own: `check_algorithm`."""

import contextlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jaxfed.core import backend, channel, contract, participation
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.backend import Backend
from jaxfed.core.buckets import Buckets, first_of
from jaxfed.core.channel import Channels
from jaxfed.core.checkpoint import Checkpoint
from jaxfed.core.checks import (
    check_callable,
    check_factor,
    check_flag,
    check_instance,
    check_texts,
    check_whole,
    checked_key,
    refuse,
)
from jaxfed.core.clients import Clients, Samples
from jaxfed.core.grid import stack
from jaxfed.core.personalize import personalize
from jaxfed.core.reduction import is_linear, wrapped
from jaxfed.core.rounds import begin, one_round, prepared
from jaxfed.core.run import Solution, fit, problem_of, rollout

Essence = Callable[[Personalized], PyTree]


class Report(NamedTuple):
    """What was checked.

    Attributes:
        checked: names of the checks that ran and passed.
        skipped: why others, or parts of them, did not run, by name.
    """

    checked: tuple[str, ...]
    skipped: dict[str, str]


def check_algorithm(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int = 4,
    key: Key[Array, ""] | None = None,
    essence: Essence | None = None,
    loss: Callable[[Personalized], Float[Array, ""]] | None = None,
    constraint: Callable[[Personalized], None] | None = None,
    others: Clients | None = None,
    wider: Algorithm | None = None,
    pad: Callable[[Clients], Clients] | None = None,
    deterministic: bool = False,
    channels: Mapping[str, Channels] | None = None,
    backends: Mapping[str, Backend] | None = None,
    checks: Sequence[str] | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> Report:
    """Check that an algorithm keeps the contract of `jaxfed.Algorithm`.

    Most checks compare two runs that must agree, in double precision, whatever the settings of the
    caller. They are:

    * `"structure"`: states keep shapes and types, no array is without elements, the clients'
      states have a leading axis of clients, all numbers are finite, and constraints are met;
    * `"types"`: results have the data's precision, single or double, and meet constraints there;
    * `"compilation"`: a second call with other numbers compiles nothing, by `rollout` and `fit`;
    * `"host"`: `fit`, in chunks of rounds, gives what `rollout` gives;
    * `"vmap"`: runs at once over algorithms, clients and keys are those of a loop;
    * `"gradients"`: derivatives by hyperparameters and data, of at most five rounds, are finite and
      not all zero; of a deterministic algorithm, equal to finite differences;
    * `"order"`: permuting clients permutes their results and changes nothing else;
    * `"padding"`: a further client of weight 0 and padding change nothing;
    * `"backends"`: every backend gives what `vmap` gives;
    * `"buckets"`: samples in buckets, each padded by itself, give what they give in one array;
    * `"source"`: so do samples that are read block by block;
    * `"participation"`: absent clients keep their states exactly, or the algorithm refuses;
    * `"channels"`: at most five rounds through a channel give finite numbers or are refused by a
      `ValueError` about that argument; a channel that loses nothing changes nothing;
    * `"bits"`: what the history counts is the length of the payloads in bytes;
    * `"newcomers"`: `jaxfed.personalize` gives clients that took no part finite models of the same
      shapes, and a warm start finds its clients by their ids;
    * `"checkpoint"`: an interrupted run ends bit for bit like one that was not;
    * `"refusals"`: data of an unknown kind are refused by a `ValueError` about `clients`.

    Args:
        algorithm: what to check.
        clients: whom to run it on; at least three.
        rounds: how many rounds the runs have, at least two.
        key: random key.
        essence: `f(result) -> (shared, local)`, what the result says: what is compared, free of
            arbitrary choices such as bases of a subspace. The result itself by default.
        loss: `f(result) -> number`, what is differentiated; by default a fixed combination of all
            numbers of the essence.
        constraint: `f(result)`, raises an AssertionError for a result that should not be, such as
            components that are not orthonormal; called in both precisions.
        others: other clients of the same shapes; by default these with their data exchanged.
        wider: the algorithm for one client more, where it depends on their number.
        pad: gives the clients with more padding; by default rows of zeros where the data are
            `jaxfed.Samples`, else that part is skipped.
        deterministic: whether the result depends smoothly on data and hyperparameters, so that
            derivatives must equal finite differences.
        channels: channels to run through, by any names; by default one of each kind.
        backends: backends, by any names; by default all that the devices allow.
        checks: names of the checks to run; all of them by default.
        rtol: relative tolerance of the comparisons.
        atol: absolute tolerance.

    Returns:
        What was checked, and what was skipped and why.

    Raises:
        AssertionError: naming the property that does not hold, with what was compared.
        ValueError: for an unknown check, too few clients or too few rounds.
    """
    names = tuple(_CHECKS) if checks is None else checks
    check_texts("checks", names)
    if unknown := set(names) - _CHECKS.keys():
        raise ValueError(f"checks: wanted some of {', '.join(_CHECKS)}, got {sorted(unknown)}")
    for name, given, kind in (
        ("algorithm", algorithm, Algorithm),
        ("wider", algorithm if wider is None else wider, Algorithm),
        ("clients", clients, Clients),
        ("others", clients if others is None else others, Clients),
    ):
        check_instance(name, given, kind, f"a jaxfed.{kind.__name__}")
    if len(clients) < 3:
        raise ValueError(f"clients: wanted at least 3, got {len(clients)}")
    check_whole("rounds", rounds, least=2)
    check_flag("deterministic", deterministic)
    for name, given in (
        ("essence", essence),
        ("loss", loss),
        ("constraint", constraint),
        ("pad", pad),
    ):
        if given is not None:
            check_callable(name, given)
    for name, given in (("channels", channels), ("backends", backends)):
        if given is not None and not isinstance(given, Mapping):
            raise refuse(name, "a dictionary by any names", given)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        key = jax.random.key(0) if key is None else checked_key("key", key)
        if others is None:
            data = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), clients.data)
            others = eqx.tree_at(lambda c: c.data, clients, data)
        case = _Case(
            algorithm=_cast(algorithm, np.float64),
            clients=_cast(clients, np.float64),
            others=_cast(others, np.float64),
            wider=_cast(algorithm if wider is None else wider, np.float64),
            key=key,
            rounds=rounds,
            essence=essence or (lambda result: result),
            loss=loss,
            constraint=constraint,
            pad=pad,
            deterministic=deterministic,
            channels=channels,
            backends=backends,
            rtol=rtol,
            atol=atol,
            skipped={},
        )
        checked = []
        for name in names:
            try:
                _CHECKS[name](case)
                checked.append(name)
            except _Skipped as reason:
                case.skipped[name] = str(reason)
    return Report(tuple(checked), case.skipped)


class _Skipped(Exception):
    """Why a check does not run."""


class _Interruption(Exception):
    """What ends a run in the middle."""


@dataclass(frozen=True)
class _Case:
    algorithm: Algorithm
    clients: Clients
    others: Clients
    wider: Algorithm
    key: Key[Array, ""]
    rounds: int
    essence: Essence
    loss: Callable[[Personalized], Float[Array, ""]] | None
    constraint: Callable[[Personalized], None] | None
    pad: Callable[[Clients], Clients] | None
    deterministic: bool
    channels: Mapping[str, Channels] | None
    backends: Mapping[str, Backend] | None
    rtol: float
    atol: float
    skipped: dict[str, str]

    def solve(
        self,
        algorithm: Algorithm | None = None,
        clients: Clients | None = None,
        key: Key[Array, ""] | None = None,
        *,
        rounds: int | None = None,
        **options: Any,
    ) -> Solution:
        """A compiled run, where nothing else is said with the case's own arguments."""
        given = (
            self.algorithm if algorithm is None else algorithm,
            self.clients if clients is None else clients,
            self.key if key is None else key,
        )
        return _solve(*given, rounds=self.rounds if rounds is None else rounds, **options)

    def shapes(self, algorithm: Algorithm, clients: Clients, rounds: int) -> Solution:
        """Shapes and types of a run, without computing it."""

        def run(algorithm, clients, key):
            return rollout(algorithm, clients, rounds=rounds, key=key)

        return jax.eval_shape(run, algorithm, clients, self.key)

    def says(self, solution: Solution) -> tuple[PyTree, Array]:
        """What is compared of a run."""
        return self.essence(solution.result), solution.history["objective"]

    def same(self, given: PyTree, wanted: PyTree, sentence: str) -> None:
        """Refuse what is not the same up to the tolerances."""
        _same(given, wanted, sentence, self.rtol, self.atol)

    def messages(self) -> tuple[PyTree, PyTree, PyTree]:
        """One client's first message, a downlink and an uplink, of their shapes, at random."""

        def made(algorithm, clients, key):
            problem, state = _begun(algorithm, clients, key, self.rounds, None)
            data, local = first_of((problem.clients.data, state.local))
            first = contract.first_message(algorithm, key, data, None)
            downlink = state.downlink.receiver
            uplink = contract.client_step(algorithm, key, downlink, local, data)[0]
            return wrapped(first), downlink, wrapped(uplink)

        def drawn(shape):
            values = rng.normal(size=shape.shape)
            return jnp.asarray(values if _floating(shape) else np.abs(9 * values), shape.dtype)

        rng = np.random.default_rng(0)
        return jax.tree.map(drawn, jax.eval_shape(made, self.algorithm, self.clients, self.key))


def _run(algorithm, clients, key, channel=None, participation=None, backend=None, *, rounds):
    given = {"channel": channel, "participation": participation, "backend": backend}
    chosen = {name: value for name, value in given.items() if value is not None}
    return rollout(algorithm, clients, rounds=rounds, key=key, **chosen)


# One compiled function for all checks: what one of them compiles is there for the next.
_solve = jax.jit(_run, static_argnames="rounds")


def _begun(algorithm, clients, key, rounds, participants):
    """What there is before the first round."""
    problem, start = problem_of(
        algorithm, clients, rounds, key, None, channel.lossless(), participants, backend.vmap()
    )
    problem = prepared(problem, rounds)
    return problem, begin(problem, start)[0]


# ---------------------------------------------------------------------------------------------
# The checks.


def _check_structure(case: _Case) -> None:
    one, three = (case.shapes(case.algorithm, case.clients, rounds) for rounds in (1, 3))
    for name in ("state", "result"):
        _alike(
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
    _finite(case.says(solution), "the result and the objective are finite")
    if case.constraint is not None:
        case.constraint(solution.result)


def _check_types(case: _Case) -> None:
    for bits, dtype in ((False, np.float32), (True, np.float64), (True, np.float32)):
        with jax.enable_x64(bits):
            algorithm, clients = _cast(case.algorithm, dtype), _cast(case.clients, dtype)
            solution = case.shapes(algorithm, clients, 2)
        history = {k: x for k, x in solution.history.items() if not k.startswith("bits")}
        told = {
            "result": solution.result, "server": solution.server, "local": solution.local,
            "history": history,
        }  # fmt: skip
        for path, leaf in jax.tree_util.tree_leaves_with_path(told):
            if _floating(leaf) and leaf.dtype != dtype:
                raise AssertionError(
                    f"numbers have the data's type: got {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)} from data of {np.dtype(dtype)}"
                    f"{', where 64 bits are enabled' * bits}"
                )
    if case.constraint is not None:
        with jax.enable_x64(False):
            single = _cast(case.algorithm, np.float32), _cast(case.clients, np.float32)
            case.constraint(case.solve(*single).result)


def _check_compilation(case: _Case) -> None:
    def runs(algorithm, clients, key):
        case.solve(algorithm, clients, key)
        _chunked(case, algorithm, clients, key)

    another = jax.random.fold_in(case.key, 1)
    second = _scaled(case.algorithm, 0.9)
    runs(case.algorithm, case.clients, case.key)
    with _compilations() as compiled:
        runs(second, case.others, another)
    if compiled:
        raise AssertionError(
            "a second call with other hyperparameters, data and key compiles nothing: it compiled "
            f"{', '.join(compiled)}"
        )


def _check_host(case: _Case) -> None:
    traced = case.solve()
    driven = _chunked(case, case.algorithm, case.clients, case.key)
    sentence = "fit gives what rollout gives"
    if driven.rounds != int(traced.rounds):
        raise AssertionError(f"{sentence}: {driven.rounds} rounds and {int(traced.rounds)}")
    _alike(driven.result, traced.result, sentence)
    case.same(case.says(driven), case.says(traced), sentence)
    case.same(dict(driven.history), dict(traced.history), sentence)


def _check_vmap(case: _Case) -> None:
    algorithms = [case.algorithm, _scaled(case.algorithm, 0.8)]
    clients, keys = [case.clients, case.others], jax.random.split(case.key)
    several = jax.jit(jax.vmap(lambda *given: case.says(case.solve(*given))))(
        stack(algorithms), stack(clients), keys
    )
    for i, one in enumerate(map(case.solve, algorithms, clients, keys)):
        chosen = jax.tree.map(lambda x, i=i: x[i], several)
        case.same(chosen, case.says(one), f"runs at once are those of a loop (number {i})")


def _check_gradients(case: _Case) -> None:
    numbers, settings = eqx.partition(case.algorithm, eqx.is_inexact_array)
    values, rest = eqx.partition(case.clients.data, _measured)

    def loss(differentiated):
        numbers, values = differentiated
        clients = eqx.tree_at(lambda c: c.data, case.clients, eqx.combine(values, rest))
        solution = rollout(
            eqx.combine(numbers, settings), clients, rounds=min(case.rounds, 5), key=case.key
        )
        if case.loss is not None:
            return case.loss(solution.result)
        return _combination(case.essence(solution.result))

    # Of the types that sums have, so that the function is compiled once.
    at = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (numbers, values))
    function = jax.jit(jax.value_and_grad(loss))
    result, gradient = function(at)
    _finite(gradient, "derivatives by hyperparameters and data are finite")
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


def _check_order(case: _Case) -> None:
    order = np.roll(np.arange(len(case.clients)), 2)
    order[:2] = order[1::-1]
    (shared, local), objective = case.says(case.solve())
    other = case.says(case.solve(clients=case.clients.take(order)))
    permuted = jax.tree.map(lambda x: x[order], local)
    _same(
        (tuple(other[0]), other[1]), ((shared, permuted), objective),
        "permuting clients permutes their results and changes nothing else", case.rtol, case.atol,
    )  # fmt: skip


def _check_padding(case: _Case) -> None:
    count = len(case.clients)
    pad = case.pad
    if pad is None and isinstance(case.clients.data, Samples):
        pad = _more_rows
    if pad is None:
        case.skipped["padding of the data"] = "pad= says how these data are padded"
    stranger = jax.tree.map(lambda x: 5 * x[:1] if _measured(x) else x[:1], case.others.data)
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
    cut = jax.tree.map(lambda x, like: _unpadded(x, like, sentence), local_2, local)
    case.same((shared_2, cut, objective_2), (shared, local, objective), sentence)


def _check_backends(case: _Case) -> None:
    wanted = case.solve()
    for name, mapped in (_backends() if case.backends is None else case.backends).items():
        given = case.solve(backend=mapped)
        sentence = f"the backend {name} gives what vmap gives"
        case.same(case.says(given), case.says(wanted), sentence)
        case.same(dict(given.history), dict(wanted.history), sentence)


def _check_buckets(case: _Case) -> None:
    data = case.clients.data
    if not isinstance(data, Samples):
        raise _Skipped("buckets are of samples")
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
    with _unless_refused("clients in buckets"):
        given = case.solve(clients=bucketed)
    case.same(case.says(given), case.says(wanted), "clients in buckets give what others give")


@contextlib.contextmanager
def _unless_refused(what: str) -> Iterator[None]:
    """Skip the check where the algorithm refuses such clients by name."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("clients: "):
            raise
        raise _Skipped(f"the algorithm refuses {what}: {error}") from error


def _check_source(case: _Case) -> None:
    data = case.clients.data
    if not isinstance(data, Samples):
        raise _Skipped("sources are of samples")
    counts = np.asarray(data.count).astype(int)
    values = [np.asarray(x[:n]) for x, n in zip(data.values, counts, strict=True)]
    size = 2 * max(array.nbytes for array in values)
    source = Clients.from_source(values, block_bytes=size)
    source = eqx.tree_at(
        lambda c: (c.ids, c.weights), source, (case.clients.ids, case.clients.weights)
    )
    run = {"rounds": min(case.rounds, 5), "key": case.key}
    wanted = fit(case.algorithm, case.clients, **run)
    with _unless_refused("clients that are read block by block"):
        given = fit(case.algorithm, source, **run)
    sentence = "clients that are read block by block give what others give"
    case.same(case.says(given), case.says(wanted), sentence)
    case.same(dict(given.history), dict(wanted.history), sentence)


def _check_participation(case: _Case) -> None:
    present = np.arange(len(case.clients)) % 2 == 0
    chosen = participation.mask(present[None])

    def step(algorithm, clients, key):
        problem, state = _begun(algorithm, clients, key, case.rounds, chosen)
        return state.local, one_round(problem, state)[0].local

    given = case.algorithm, case.clients, case.key
    if case.algorithm.needs_everybody:
        _refused(lambda: jax.eval_shape(step, *given), "participation", "partial participation")
        raise _Skipped("the algorithm needs every client in each round, and says so")
    before, after = jax.tree.map(lambda x: x[~present], jax.jit(step)(*given))
    _same(after, before, "absent clients keep their states exactly", 0, 0)


def _check_channels(case: _Case) -> None:
    first, downlink, uplink = case.messages()
    exact = channel.top_k(1.0)
    for message in (first, downlink, uplink):
        for way in (channel.lossless(), exact):
            payload, _ = way.encode(case.key, message, way.memory(message))
            decoded = way.decode(payload)
            _same(decoded, message, "a channel that loses nothing changes no bit", 0, 0)
            _length(payload)
    if case.channels is None:
        through = case.solve(channel=(exact, exact, exact))
        sentence = "a channel that loses nothing changes no number"
        case.same(case.says(through), case.says(case.solve()), sentence)
    known = _channels(len(case.clients)) if case.channels is None else case.channels
    for name, given in known.items():
        try:
            solution = case.solve(channel=given, rounds=min(case.rounds, 5))
        except ValueError as refusal:
            if not re.match(r"(channel|participation): ", str(refusal)):
                raise AssertionError(
                    f"a channel runs or is refused by a ValueError about it: {name} ended in "
                    f"{refusal}"
                ) from refusal
            if channel.ways(given).uplink.private and is_linear((first, uplink)):
                raise AssertionError(
                    f"messages that are sums and means can be hidden: {name} was refused: {refusal}"
                ) from refusal
            case.skipped[f"channel {name}"] = str(refusal)
            continue
        bits = {k: x for k, x in solution.history.items() if k.startswith("bits")}
        told = case.essence(solution.result), bits
        _finite(told, f"a run through a channel has finite numbers: {name}")


def _check_bits(case: _Case) -> None:
    first, downlink, uplink = map(_length, case.messages())
    history = case.solve().history
    number = np.arange(1, case.rounds + 1)
    wanted = {"bits_up": 8 * (first + uplink * number), "bits_down": 8 * downlink * number}
    given = {name: history[name] for name in wanted}
    _same(given, wanted, "the history's bits are the length of the payloads", 1e-15, 0)


def _check_newcomers(case: _Case) -> None:
    solution = case.solve()
    models = personalize(case.algorithm, solution, case.others, rounds=2, key=case.key)
    _alike(models.local, solution.result.local, "new clients' models are like the others'")
    _finite(case.essence(models), "new clients' models are finite")
    order = np.arange(len(case.clients))[::-1]
    turned = problem_of(
        case.algorithm, case.clients.take(order), case.rounds, case.key, solution,
        channel.lossless(), None, backend.vmap(),
    )[1]  # fmt: skip
    assert turned is not None
    wanted = jax.tree.map(lambda x: x[order], solution.result.local)
    _same(turned.local, wanted, "a warm start finds clients by their ids", 0, 0)


def _check_checkpoint(case: _Case) -> None:
    if find_spec("orbax") is None or find_spec("orbax.checkpoint") is None:
        raise _Skipped("Orbax is not installed")
    given = case.algorithm, case.clients, case.key
    wanted = _chunked(case, *given)
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoint(folder, every=_chunk(case))

        def save_and_stop(*arguments):
            Checkpoint.save(saved, *arguments)
            raise _Interruption

        with mock.patch.object(saved, "save", save_and_stop), contextlib.suppress(_Interruption):
            _chunked(case, *given, checkpoint=saved)
        resumed = _chunked(case, *given, checkpoint=saved)
    for name in ("result", "server", "local", "history", "state"):
        _same(
            getattr(resumed, name), getattr(wanted, name),
            f"an interrupted run ends bit for bit like one that was not: {name}", 0, 0,
        )  # fmt: skip


def _check_refusals(case: _Case) -> None:
    foreign = eqx.tree_at(
        lambda c: c.data, case.clients, _Foreign(jnp.ones((len(case.clients), 2)))
    )
    _refused(lambda: case.shapes(case.algorithm, foreign, 1), "clients", "data of an unknown kind")


_CHECKS: dict[str, Callable[[_Case], None]] = {
    "structure": _check_structure,
    "types": _check_types,
    "compilation": _check_compilation,
    "host": _check_host,
    "vmap": _check_vmap,
    "gradients": _check_gradients,
    "order": _check_order,
    "padding": _check_padding,
    "backends": _check_backends,
    "buckets": _check_buckets,
    "source": _check_source,
    "participation": _check_participation,
    "channels": _check_channels,
    "bits": _check_bits,
    "newcomers": _check_newcomers,
    "checkpoint": _check_checkpoint,
    "refusals": _check_refusals,
}
CHECKS = tuple(_CHECKS)


# ---------------------------------------------------------------------------------------------
# What they are made of.


class _Foreign(eqx.Module):
    """Data that no algorithm knows."""

    unknown: Array


def _backends() -> dict[str, Backend]:
    devices = min(2, jax.local_device_count())
    return {
        "chunked(2)": backend.chunked(2),
        f"pmap({devices})": backend.pmap(devices),
        f"shard({devices})": backend.shard(devices),
    }


def _channels(clients: int) -> dict[str, Channels]:
    open_way = channel.lossless()
    return {
        "difference(quantize(3))": channel.difference(channel.quantize(3)),
        "error_feedback(quantize(4))": channel.error_feedback(channel.quantize(4)),
        "quantize(4), entropy-coded": channel.quantize(4, coding="entropy"),
        "top_k(0.5)": channel.top_k(0.5),
        "gaussian": (channel.gaussian(1e3, 1e-6), open_way),
        "secure_sum": (channel.secure_sum(clients, bits=24, bound=1e3), open_way),
    }


def _chunk(case: _Case) -> int:
    return max(1, case.rounds // 2)


def _chunked(
    case: _Case, algorithm: Algorithm, clients: Clients, key: Key[Array, ""], **options: Any
) -> Solution:
    """A run by `fit`, in two chunks or three."""
    return fit(
        algorithm, clients, rounds=case.rounds, key=key, chunk_rounds=_chunk(case), **options
    )


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _measured(x: Any) -> bool:
    """Whether an array holds measurements; whole numbers are counts, masks or labels."""
    return eqx.is_inexact_array(x) and bool((np.asarray(x) % 1 != 0).any())


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    """With floating numbers of a type; those without one of their own keep following others."""

    def cast(x):
        if not eqx.is_inexact_array(x):
            return x
        if x.weak_type and x.ndim == 0:
            return jnp.asarray(float(x))
        return jnp.asarray(np.asarray(x), dtype)

    return jax.tree.map(cast, tree)


def _scaled(algorithm: Algorithm, factor: float) -> Algorithm:
    """With other hyperparameters."""
    return jax.tree.map(lambda x: factor * x if eqx.is_inexact_array(x) else x, algorithm)


def _combination(tree: PyTree) -> Float[Array, ""]:
    """Of all numbers, with different factors."""
    leaves = [x for x in jax.tree.leaves(tree) if _floating(x)]
    return sum(
        (
            jnp.sum(x * jnp.cos(jnp.arange(x.size) + i).reshape(x.shape))
            for i, x in enumerate(leaves)
        ),
        start=jnp.zeros(()),
    )


def _more_rows(clients: Clients) -> Clients:
    widths = [(0, 0), (0, 4), (0, 0)]
    return eqx.tree_at(lambda c: c.data.values, clients, jnp.pad(clients.data.values, widths))


def _unpadded(x: Array, like: Array, sentence: str) -> np.ndarray:
    """Without what padding adds, which is nothing but zeros."""
    inside = tuple(map(slice, like.shape))
    outside = np.array(x)
    outside[inside] = 0
    if outside.any():
        raise AssertionError(f"{sentence}: got numbers in the place of the padding")
    return np.asarray(x)[inside]


def _length(payload: PyTree) -> int:
    """Bytes of a payload, which must be what is counted."""
    length, bits = len(channel.to_bytes(payload)), int(channel.bits(payload))
    if 8 * length != bits:
        raise AssertionError(
            f"the bits that are counted are those of the payload: {bits} are counted, {length} "
            "bytes would travel"
        )
    return length


def _refused(run: Callable[[], Any], argument: str, what: str) -> None:
    """Insist on a ValueError about an argument."""
    try:
        run()
    except ValueError as refusal:
        if str(refusal).startswith(f"{argument}: "):
            return
        raise AssertionError(
            f"{what} is refused by a ValueError that begins with {argument!r}: it says {refusal}"
        ) from refusal
    except Exception as error:
        raise AssertionError(
            f"{what} is refused by a ValueError that begins with {argument!r}: it ended in "
            f"{type(error).__name__}: {error}"
        ) from error
    raise AssertionError(f"{what} is refused by a ValueError: nothing was raised")


def _numbers(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _alike(given: PyTree, wanted: PyTree, sentence: str) -> None:
    """Refuse other structures, shapes or types."""
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise AssertionError(
            f"{sentence}: got {jax.tree.structure(given)}, wanted {jax.tree.structure(wanted)}"
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise AssertionError(
                f"{sentence}: at {jax.tree_util.keystr(path)} got {x.dtype}{list(x.shape)}, wanted "
                f"{y.dtype}{list(y.shape)}"
            )


def _same(given: PyTree, wanted: PyTree, sentence: str, rtol: float, atol: float) -> None:
    """Refuse other numbers; bit for bit where the tolerances are zero."""
    leaves, others = jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(wanted)
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise AssertionError(
            f"{sentence}: got {jax.tree.structure(given)}, wanted {jax.tree.structure(wanted)}"
        )
    for (path, x), y in zip(leaves, others, strict=True):
        x, y = _numbers(x), _numbers(y)
        place = jax.tree_util.keystr(path) or "the only array"
        if x.shape != y.shape:
            raise AssertionError(f"{sentence}: at {place} got shape {x.shape}, wanted {y.shape}")
        if x.dtype.kind not in "fiub" or not np.allclose(x, y, rtol, atol, equal_nan=True):
            if np.array_equal(x, y):
                continue
            with np.errstate(invalid="ignore"):
                off = np.abs(x.astype(float) - y.astype(float)).max()
            raise AssertionError(
                f"{sentence}: at {place} they differ by up to {off:.3g} (numbers up to "
                f"{np.abs(y.astype(float)).max():.3g})"
            )


def _finite(tree: PyTree, sentence: str) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        bad = ~np.isfinite(_numbers(x).astype(float))
        if bad.any():
            raise AssertionError(
                f"{sentence}: {bad.sum()} of {bad.size} numbers at "
                f"{jax.tree_util.keystr(path) or 'the only array'} are not"
            )


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """The names of what is compiled meanwhile."""
    compiled: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.match(r"Compiling (\S+)", record.getMessage()):
                compiled.append(found[1])

    logger = logging.getLogger("jax")
    before = logger.handlers, logger.propagate, logger.level
    # JAX reports compilations as warnings, which are for these eyes only.
    logger.handlers, logger.propagate = [Listener()], False
    try:
        with jax.log_compiles():
            yield compiled
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
