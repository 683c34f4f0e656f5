"""Shapes of clients' data, states and messages, found without computing them."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxfed.core.common.buckets import shapes_differ
from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import contributions, joined, over_clients, separated
from jaxfed.core.round import client
from jaxfed.core.round.problem import Problem, RunMember, before_rounds
from jaxfed.core.wire import channel


class Kind(eqx.Module):
    """Clients whose data have the same shape: the shape, and the number of clients.

    All fields are static, so compiled functions are specialised to them.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)
    count: int = eqx.field(static=True)

    @classmethod
    def of(cls, data: PyTree, count: int) -> "Kind":
        """From one client's prepared data or their shapes."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: data))
        return cls(tuple(leaves), structure, count)

    @property
    def data(self) -> PyTree:
        """Shapes of one client's prepared data."""
        return jax.tree.unflatten(self.structure, self.leaves)


class MessageShapes(NamedTuple):
    """Shapes of the clients' messages."""

    uplink: PyTree
    objective: jax.ShapeDtypeStruct
    first_bits: int | float  # of a first message; mean over clients of different shapes
    remembered: bool  # whether uplink differences start from the first messages


def message_shapes(
    problem: Problem, kinds: Sequence[Kind], warm_start: Personalized | None, downlink: PyTree
) -> MessageShapes:
    """Shapes of the clients' messages, found without computing them.

    Raises:
        ValueError: if what clients keep or send in a round depends on the size of their data.
    """
    broadcast = before_rounds(problem, warm_start, downlink)
    members = [member_shapes(kind, warm_start) for kind in kinds]
    firsts = [jax.eval_shape(partial(client.first_message, problem, broadcast), x) for x in members]
    locals_ = [jax.eval_shape(partial(client.first_local, problem, broadcast), x) for x in members]
    # States are arrays with one row per client, so all clients' states need the same shape.
    if not all(calls.alike(local, locals_[0]) for local in locals_):
        raise shapes_differ("kept")
    rounds = [
        client.round_shapes(problem, broadcast, local, member.data)
        for local, member in zip(locals_, members, strict=True)
    ]
    uplink, objective = rounds[0]
    if not all(calls.alike(each.uplink, uplink) for each in rounds):
        raise shapes_differ("sent")
    bits = [channel.fixed_bits(first.payload) for first in firsts]
    counts = [kind.count for kind in kinds]
    total, clients = sum(map(operator.mul, bits, counts)), sum(counts)
    # Keep an integer where possible, since the history promises exact counts.
    mean = total / clients if total % clients else total // clients
    remembered = all(client.remembers_first(problem, first.decoded, uplink) for first in firsts)
    return MessageShapes(uplink, objective, mean, remembered)


def received_shapes(uplink: PyTree) -> PyTree:
    """Shapes of the reduction of messages with these shapes."""

    def of_one(uplink):
        shares = contributions(uplink, jnp.ones(()), jnp.zeros((), jnp.int32))
        reduced, gathered = separated(jax.tree.map(lambda x: x[None], shares))
        return joined(over_clients(reduced), gathered)

    return jax.eval_shape(of_one, uplink)


def member_shapes(kind: Kind, warm_start: Personalized | None) -> RunMember:
    """Shapes of one client of this kind, with its part of a warm start."""

    def member(data, local):
        zero = jnp.zeros((), jnp.int32)
        return RunMember(data, zero, jnp.ones(()), zero, jax.tree.map(lambda x: x[0], local))

    return jax.eval_shape(member, kind.data, None if warm_start is None else warm_start.local)
