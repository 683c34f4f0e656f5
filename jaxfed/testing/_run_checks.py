"""Checks of an algorithm with options of a run: backends, layouts, channels, checkpoints."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import backend, channel, participation
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import IncompleteSamples, SampleRows
from jaxfed.core.common.buckets import Buckets
from jaxfed.core.contract.reduction import is_summed
from jaxfed.core.round.rounds import one_round
from jaxfed.core.round.whole import WHOLE
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.fit import fit
from jaxfed.core.run.personalize import personalize
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.testing._case import (
    Case,
    chunk,
    every_backend,
    every_channel,
    fit_in_chunks,
    problem_and_state,
)
from jaxfed.testing._compare import check_finite, check_same_shapes, checked_length, refused, same
from jaxfed.testing._report import Skipped


def check_backends(case: Case) -> None:
    wanted = case.solve()
    for name, mapped in (every_backend() if case.backends is None else case.backends).items():
        given = case.solve(backend=mapped)
        sentence = f"the backend {name} gives what vmap gives"
        case.same(case.says(given), case.says(wanted), sentence)
        case.same(dict(given.history), dict(wanted.history), sentence)


def check_buckets(case: Case) -> None:
    data = case.clients.data
    if not isinstance(data, SampleRows):
        raise Skipped("buckets are of samples")
    # Two buckets, each padded to its own longest client.
    order = np.argsort(-np.asarray(data.count), kind="stable")
    groups = [np.sort(half) for half in np.array_split(order, 2)]
    parts = tuple(
        type(data)(data.values[half, : int(data.count[half].max())], data.count[half])
        for half in groups
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
    """Skip the check if the algorithm refuses such clients with an error about `clients`."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("clients: "):
            raise
        raise Skipped(f"the algorithm refuses {what}: {error}") from error


def check_source(case: Case) -> None:
    data = case.clients.data
    if not isinstance(data, SampleRows):
        raise Skipped("sources are of samples")
    counts = np.asarray(data.count).astype(int)
    values = [np.asarray(x[:n]) for x, n in zip(data.values, counts, strict=True)]
    size = 2 * max(array.nbytes for array in values)  # at least two blocks
    missing = "mask" if isinstance(data, IncompleteSamples) else "refuse"
    source = Clients.from_source(values, block_bytes=size, missing=missing)
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
        problem, state = problem_and_state(algorithm, clients, key, case.rounds, chosen)
        return state.local, one_round(problem, state, WHOLE)[0].local

    given = case.algorithm, case.clients, case.key
    if case.algorithm.needs_everybody:
        refused(lambda: jax.eval_shape(step, *given), "participation", "partial participation")
        raise Skipped("the algorithm needs every client in each round, and says so")
    before, after = jax.tree.map(lambda x: x[~present], jax.jit(step)(*given))
    same(after, before, "absent clients keep their states exactly", 0, 0)


def check_channels(case: Case) -> None:
    first, _, uplink = case.messages
    exact = channel.top_k(1.0)

    @jax.jit
    def sent(key, messages):
        def one(way, message):
            payload, _ = way.encode(key, message, way.memory(message))
            return payload, way.decode(payload)

        return [[one(way, x) for way in (channel.lossless(), exact)] for x in messages]

    for message, through in zip(case.messages, sent(case.key, case.messages), strict=True):
        for payload, decoded in through:
            same(decoded, message, "a channel that loses nothing changes no bit", 0, 0)
            checked_length(payload)
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
            if checked_wire(given).up.private and is_summed((first, uplink)):
                raise AssertionError(
                    f"messages that are sums and means can be hidden: {name} was refused: {refusal}"
                ) from refusal
            case.skipped[f"channel {name}"] = str(refusal)
            continue
        bits = {k: x for k, x in solution.history.items() if k.startswith("bits")}
        check_finite(
            (case.essence(solution.result), bits),
            f"a run through a channel has finite numbers: {name}",
        )
        if case.constraint is not None:
            try:
                case.constraint(solution.result)
            except AssertionError as error:
                raise AssertionError(f"the constraint holds through {name}: {error}") from error


def check_bits(case: Case) -> None:
    first, downlink, uplink = map(checked_length, case.messages)
    history = case.solve().history
    number = np.arange(1, case.rounds + 1)
    wanted = {"bits_up": 8 * (first + uplink * number), "bits_down": 8 * downlink * number}
    given = {name: history[name] for name in wanted}
    same(given, wanted, "the history's bits are the length of the payloads", 1e-15, 0)


def check_newcomers(case: Case) -> None:
    solution = case.solve()
    models = personalize(case.algorithm, solution, case.others, rounds=2, key=case.key)
    check_same_shapes(
        models.local, solution.result.local, "new clients' models are like the others'"
    )
    check_finite(case.essence(models), "new clients' models are finite")
    order = np.arange(len(case.clients))[::-1]
    reversed_clients = case.clients.take(order)
    options = channel.lossless(), None, backend.vmap()
    _, start = problem_of(
        case.algorithm, reversed_clients, case.rounds, case.key, solution, *options
    )
    assert start is not None
    wanted = jax.tree.map(lambda x: x[order], solution.result.local)
    same(start.local, wanted, "a warm start finds clients by their ids", 0, 0)


class _Interruption(Exception):
    """Interrupts a run."""


def check_checkpoint(case: Case) -> None:
    given = case.algorithm, case.clients, case.key
    wanted = fit_in_chunks(case, *given)
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoint(folder, every=chunk(case))

        def save_and_stop(*arguments):
            Checkpoint.save(saved, *arguments)
            raise _Interruption

        with mock.patch.object(saved, "save", save_and_stop), contextlib.suppress(_Interruption):
            fit_in_chunks(case, *given, checkpoint=saved)
        resumed = fit_in_chunks(case, *given, checkpoint=saved)
    for name in ("result", "server", "local", "history", "state"):
        sentence = f"an interrupted run ends bit for bit like one that was not: {name}"
        same(getattr(resumed, name), getattr(wanted, name), sentence, 0, 0)
