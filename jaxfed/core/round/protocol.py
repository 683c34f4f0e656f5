"""Shapes of clients' data, states and messages, found without computing them."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree, UInt32

from jaxfed.core.common.buckets import shapes_differ
from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import contributions, joined, over_clients, separated
from jaxfed.core.round import client
from jaxfed.core.round.messages import ClientMessage, payload_shapes
from jaxfed.core.round.problem import ClientState, Costs, Problem, RunMember, broadcast_of
from jaxfed.core.wire import calls as wire_calls
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


class Protocol(NamedTuple):
    """Shapes of everything that travels in a run, and of what clients keep between rounds."""

    firsts: tuple[ClientMessage, ...]  # before the rounds, of one client of each kind
    first_down: PyTree  # a payload
    up: PyTree  # a payload
    diagnostics: PyTree
    down: PyTree  # a payload
    uplink: PyTree  # before its channel, in its reductions
    downlink: PyTree  # as it is received
    client: ClientState
    remembered: bool  # whether uplink differences start from the first messages
    counts: tuple[int, ...]  # number of clients of each kind

    @property
    def message(self) -> ClientMessage:
        """A client's message in a round, as it travels."""
        return ClientMessage(self.up, self.firsts[0].not_finite, self.diagnostics)

    def costs(self, bytes_up: UInt32[Any, ""], bytes_down: UInt32[Any, ""]) -> Costs:
        """Costs of the messages.

        Args:
            bytes_up: of all first messages, in parts of variable length.
            bytes_down: of the first downlink, in parts of variable length.
        """
        bits = [channel.fixed_bits(first.payload) for first in self.firsts]
        total, clients = sum(map(operator.mul, bits, self.counts)), sum(self.counts)
        return Costs(
            # Keep an integer where possible, since the history promises exact counts.
            first_up=total / clients if total % clients else total // clients,
            first_down=channel.fixed_bits(self.first_down),
            up=channel.fixed_bits(self.up),
            down=channel.fixed_bits(self.down),
            whole_down=channel.fixed_bits(self.downlink),
            first_bytes_up=bytes_up,
            first_bytes_down=bytes_down,
            varies=channel.varies(self.up) or channel.varies(self.down),
        )


def protocol(
    problem: Problem, kinds: Sequence[Kind], warm_start: Personalized | None, downlink: PyTree
) -> Protocol:
    """The shapes of everything that travels in a run, found without computing anything.

    Args:
        problem: the run, as the server knows it.
        kinds: shapes of the clients' data, starting with the largest.
        warm_start: a warm start with all clients' local parts, or its shapes.
        downlink: the first downlink as it is received, or its shapes.

    Raises:
        ValueError: if what clients keep or send in a round depends on the size of their data.
    """
    # Machines call this for every message: only functions of modules are evaluated here, no new
    # closures, so that JAX finds what it has traced before.
    run, wire = problem.for_client, problem.wire
    broadcast = jax.eval_shape(broadcast_of, run, 0, downlink, warm_start)
    members = [member_shapes(kind, warm_start) for kind in kinds]
    firsts = tuple(jax.eval_shape(client.exchange, run, broadcast, one)[0] for one in members)
    locals_ = [jax.eval_shape(client.first_local, run, broadcast, one) for one in members]
    # States are arrays with one row per client, so all clients' states need the same shape.
    if not all(calls.alike(local, locals_[0]) for local in locals_):
        raise shapes_differ("kept")
    before = ClientState(locals_[0], None)
    answers = [
        jax.eval_shape(client.answer, run, broadcast, one._replace(state=before)) for one in members
    ]
    uplink = answers[0].message
    if not all(calls.alike(answer.message, uplink) for answer in answers):
        raise shapes_differ("sent")
    return Protocol(
        firsts=firsts,
        first_down=payload_shapes(wire.first_down, broadcast.downlink),
        up=payload_shapes(wire.up, uplink),
        diagnostics=answers[0].diagnostics,
        down=payload_shapes(wire.down, broadcast.downlink),
        uplink=uplink,
        downlink=broadcast.downlink,
        client=before._replace(memory=jax.eval_shape(wire_calls.memory, wire.up, uplink)),
        remembered=all(client.remembers_first(problem, one.decoded, uplink) for one in firsts),
        counts=tuple(kind.count for kind in kinds),
    )


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
