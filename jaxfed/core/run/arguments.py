"""Checks a run's arguments before anything is computed."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree, UInt32

from jaxfed._checks import (
    LARGEST,
    check_callable,
    check_count,
    check_flag,
    check_instance,
    check_number,
    checked_key,
    is_list,
    is_whole,
    refuse,
)
from jaxfed._names import caller
from jaxfed.core.backends import backend
from jaxfed.core.backends.one_device import vmap
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import Guarantee, least_deviation
from jaxfed.core.clients.names import learned_by, without_names
from jaxfed.core.clients.units import UnitsWarning, as_precise_as
from jaxfed.core.common.meshes import check_context, is_explicit
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import exchanged, spans
from jaxfed.core.contract import participation
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.calls import is_number
from jaxfed.core.contract.reduction import is_linear
from jaxfed.core.round.problem import Problem
from jaxfed.core.run import adjoint
from jaxfed.core.run.callbacks import Callback
from jaxfed.core.run.loop import protocol_of
from jaxfed.core.run.new_clients import by_id
from jaxfed.core.run.result import Fitted
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.checkpoint import Checkpoint
from jaxfed.core.store.identity import digest_of
from jaxfed.core.store.saved import Saved
from jaxfed.core.wire import calls, channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.linalg import Moment
from jaxfed.linalg.platforms import is_tracing

LOSSLESS, VMAP, EVERYBODY = channel.lossless(), vmap(), participation.everybody()
UNROLLED = adjoint.unrolled()


def problem_of(
    algorithm: Algorithm,
    clients: Clients,
    rounds: int,
    key: Key[Array, ""] | UInt32[Array, " 2"],
    warm_start: Fitted | None,
    channels: channel.Channel | Wire,
    participants: participation.Participation | None,
    mapped: backend.Backend,
) -> tuple[Problem, Personalized | None]:
    """Check the arguments of a run; return its problem and warm start.

    Raises:
        ValueError: names the first unsuitable argument.
    """
    check_context()
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    for leaf in jax.tree.leaves(algorithm):
        if not is_number(leaf):
            raise ValueError(
                f"algorithm: wanted numbers and arrays as fields of {type(algorithm).__name__}, "
                f"and others static, got {leaf!r}; such a field is eqx.field(static=True)"
            )
    if not isinstance(clients, Clients):
        raise ValueError(
            f"clients: wanted jaxfed.Clients, got {type(clients).__name__}; "
            "build them with Clients.from_samples(arrays)"
        )
    # Again, since `Clients.take` may have chosen a client twice.
    clients.check_ids()
    check_rounds(rounds)
    check_instance("backend", mapped, backend.Backend, "one of jaxfed.backend")
    wire, participants = checked_wire(channels), _checked_participation(participants)
    earlier = as_precise_as(clients, learned_by(warm_start))
    start = checked_warm_start(earlier)
    clients.layout.check_backend(mapped)
    participants.check(len(clients))
    key = checked_key("key", key)
    # Without them, so that runs on clients of other names, imputed or released otherwise,
    # share one compiled program.
    own = without_names(clients)
    if own.guarantee is not None or own.imputed:
        own = replace(own, guarantee=None, imputed=False)
    problem = Problem(algorithm, own, wire, participants, mapped, key, len(clients))
    if isinstance(earlier, Solution | Saved):
        start = by_id(earlier, problem)
    start = without_names(start)
    for leaf in jax.tree.leaves(None if start is None else start.local):
        if leaf.shape[0] != len(clients.ids):
            raise ValueError(
                f"warm_start: its local part is for {leaf.shape[0]} clients, "
                f"there are {len(clients.ids)}"
            )
    _check_axes(clients=clients, warm_start=start)
    algorithm.check(clients, start)
    check_sharing(clients.guarantee, algorithm, wire, clients.weights)
    _warn_of_clipping(clients, wire)
    _check_processes(problem, start)
    check_together(problem, start, int(rounds))
    return problem, start


def _check_axes(**given: PyTree) -> None:
    """Refuse arrays on explicit mesh axes, which most operations do not support."""
    for name, tree in given.items():
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array) and is_explicit(leaf):
                raise ValueError(
                    f"{name}: wanted arrays on meshes of automatic axes, got "
                    f"{jax.typeof(leaf)}; make clients by Clients.from_samples outside of jit, "
                    "or the mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
                )


def check_host_alone(*given: PyTree) -> None:
    """Refuse traced values, since `fit` runs from the host.

    Raises:
        ValueError: if anything is traced.
    """
    if is_tracing(given):
        raise ValueError(
            "fit: wanted arguments with values, since it runs from the host, got traced ones; "
            "use rollout within jit, vmap and grad"
        )


def _check_processes(problem: Problem, warm_start: Personalized | None) -> None:
    """Refuse arguments that differ between processes, which would silently mix runs."""
    if problem.backend.processes == 1 or jax.process_count() == 1 or is_tracing():
        return
    for name, given in (
        ("algorithm", problem.algorithm),
        ("clients", problem.clients),
        ("key", problem.key),
        ("warm_start", warm_start),
        ("participation", problem.participation),
    ):
        leaves = jax.tree.leaves(given)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            continue
        # An array that spans processes is the same in all of them.
        own = digest_of([leaf for leaf in leaves if not spans(leaf)])
        others = [place for place, one in enumerate(exchanged(own)) if one != own]
        if others:
            raise ValueError(
                f"{name}: wanted the same in every process, got another in {others} than in "
                f"{jax.process_index()}; make clients by Clients.from_process_local, or let each "
                "process run by itself on its jax.local_devices()"
            )


def _checked_participation(given: Any) -> participation.Participation:
    """The checked participation; all clients by default."""
    given = EVERYBODY if given is None else given
    check_instance(
        "participation", given, participation.Participation, "one of jaxfed.participation"
    )
    return given


def checked_warm_start(warm_start: object) -> Personalized | None:
    """The result to start from, or None.

    Raises:
        ValueError: if it is something else.
    """
    earlier = learned_by(warm_start)
    start = earlier.result if isinstance(earlier, Solution | Saved) else earlier
    if start is not None and not isinstance(start, Personalized):
        raise ValueError(
            "warm_start: wanted a solution, its result, a fitted estimator, or what jaxfed.load "
            f"returned, got {type(start).__name__}"
        )
    return start


def check_passed_on(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments now that `rollout` would refuse only once it is traced.

    Raises:
        ValueError: names the argument.
    """
    known = arguments.get
    check_instance("backend", known("backend", VMAP), backend.Backend, "one of jaxfed.backend")
    checked_wire(known("channel", LOSSLESS))
    _checked_participation(known("participation"))
    checked_warm_start(known("warm_start"))
    check_loop(
        known("tol"), known("metrics"), known("metrics_every", 1), known("adjoint", UNROLLED)
    )


def check_together(problem: Problem, warm_start: Personalized | None, rounds: int) -> None:
    """Refuse a channel, participation and algorithm that do not work together.

    Args:
        problem: the run; only the shapes of its clients' data matter.
        warm_start: a warm start.
        rounds: number of rounds.

    Raises:
        ValueError: states what is wanted.
    """
    algorithm, clients, up = problem.algorithm, problem.clients, problem.wire.up
    number = problem.participation.number(len(clients))
    if problem.wire.first_up.cumulative:
        raise ValueError(
            "channel: wanted for the start one without memory at both ends, such as quantize(8), "
            f"got {problem.wire.first_up!r}"
        )
    if number != len(clients) and algorithm.needs_everybody:
        raise ValueError(
            f"participation: {type(algorithm).__name__} needs every client in each round; "
            "use everybody()"
        )
    first_up = problem.wire.first_up
    # Messages are traced only for channels that look at them, since tracing takes a while.
    can_refuse = calls.can_refuse(up) or calls.can_refuse(first_up)
    if not (up.private or up.cumulative or first_up.private or can_refuse):
        return
    # Without these channels, which may refuse a message in other words.
    sketch = replace(problem, clients=clients.sketch(), wire=Wire(LOSSLESS, LOSSLESS))
    messages = protocol_of(sketch, warm_start, rounds)
    uplink = jax.eval_shape(calls.carried, up, messages.uplink)
    if up.cumulative and not is_linear(uplink):
        raise ValueError(
            f"channel: differences add up only in means and sums, but "
            f"{type(algorithm).__name__} reduces its messages in another way"
        )
    calls.check(up, clients, number, uplink)
    for sent in messages.firsts:
        first = jax.eval_shape(calls.carried, first_up, sent.decoded)
        if not (bits := channel.fixed_bits(first)):
            continue
        if up.private and not first_up.private:
            raise ValueError(
                "channel: it hides what clients send in the rounds, and "
                f"{type(algorithm).__name__} sends {bits} bits in the clear "
                "before them; wanted a start channel that hides them too, or a warm start and "
                "explicit settings in place of automatic ones"
            )
        calls.check(first_up, clients, len(clients), first)


def check_sharing(
    guarantee: Guarantee | None, algorithm: Algorithm, wire: Wire, weights: Array | np.ndarray
) -> None:
    """Refuse a run that shows more of moments whose noise clients share than a sum of enough.

    Args:
        guarantee: of the data.
        algorithm: that runs.
        wire: its channels.
        weights: of the clients; nobody knows them within `jit`.

    Raises:
        ValueError: names what would show more.
    """
    if guarantee is None or guarantee.sharers == 1:
        return
    sharing = f"for moments whose noise {guarantee.sharers} clients share"
    # A client of weight zero sends zeros, without its noise.
    known = not isinstance(weights, Tracer)
    number = int(np.count_nonzero(np.asarray(weights) > 0)) if known else len(weights)
    if number < guarantee.sharers:
        wanted = f"at least {guarantee.sharers} of positive weight {sharing}"
        raise ValueError(f"clients: wanted {wanted}, got {number}")
    if not algorithm.sums_moments:
        wanted = "one that sends the sum of all moments and nothing else, such as Pooled,"
        raise ValueError(f"algorithm: wanted {wanted} {sharing}, got {algorithm!r}")
    for way in (wire.up, wire.first_up):
        step = way.step if isinstance(way, MaskedChannel) else None
        if step is None:
            raise ValueError(f"channel: wanted secure_sum, around lossless, {sharing}, got {way!r}")
        # Rounding at random widens the noise, unless its steps are as wide as the noise.
        if 4 * step > (deviation := least_deviation(guarantee)):
            raise ValueError(
                f"channel: wanted numbers rounded to at most {deviation / 4:.2g} {sharing}, got "
                f"{step:.2g}; give it more bits, or a smaller bound"
            )


def _warn_of_clipping(clients: Clients, wire: Wire) -> None:
    """Warn if masks of the first message clip moments whose noise clients share.

    On separate machines, each client looks at its own message instead.
    """
    guarantee, way = clients.guarantee, wire.first_up
    if guarantee is None or guarantee.sharers == 1 or not isinstance(way, MaskedChannel):
        return
    totals = (
        np.abs(np.asarray(part.dense)).max(axis=(1, 2)) * np.asarray(part.count)
        for part in clients.parts
        if isinstance(part, Moment) and all(map(is_known, (part.dense, part.count)))
    )
    largest = max((float(np.max(each)) for each in totals), default=0.0)
    if largest > way.largest:
        warnings.warn(
            "channel: wanted a bound above every entry of a client's moment times its number of "
            f"persons, up to {largest:.3g}, got {way.largest:.3g}, which clips the larger ones",
            UnitsWarning,
            stacklevel=caller(),
        )


def check_rounds(rounds: Any) -> None:
    """Check a number of rounds.

    Raises:
        ValueError: if it is not a positive integer.
    """
    if not is_whole(rounds) or not 0 < rounds <= LARGEST:
        raise refuse("rounds", f"a positive whole number of at most {LARGEST}", rounds)


def check_loop(tol: Any, metrics: Any, metrics_every: Any, given: Any = UNROLLED) -> None:
    """Check the arguments of the traced loop.

    Raises:
        ValueError: names the argument.
    """
    if tol is not None and not isinstance(tol, Tracer):
        check_number("tol", tol, "a non-negative number or None", lambda x: x >= 0)
    if metrics is not None:
        check_callable("metrics", metrics, "a function of the result or None")
    check_count("metrics_every", metrics_every)
    check_instance("adjoint", given, adjoint.Adjoint, "one of jaxfed.adjoint")


def check_host_arguments(
    checkpoint: Any, callbacks: Any, best: Any, rounds_per_chunk: Any, progress: Any, throw: Any
) -> None:
    """Check the arguments that only `fit` has.

    Raises:
        ValueError: names the argument.
    """
    if checkpoint is not None:
        check_instance("checkpoint", checkpoint, Checkpoint, "jaxfed.Checkpoint(path)")
    if not is_list(callbacks) or not all(
        isinstance(callback, Callback) or callable(callback) for callback in callbacks
    ):
        raise refuse("callbacks", "a list of callbacks", callbacks)
    if best is not None and not isinstance(best, str):
        raise refuse("best", "the name of an entry of the history", best)
    check_flag("progress", progress)
    check_flag("throw", throw)
    if rounds_per_chunk is not None:
        check_count("rounds_per_chunk", rounds_per_chunk)
