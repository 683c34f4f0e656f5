"""A deployed run and its members, derived from the settings and the connected clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Key, PyTree

from jaxfed import participation
from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.reduction import plain
from jaxfed.core.round import client, server
from jaxfed.core.round.problem import Problem, State, broadcast_of
from jaxfed.core.round.protocol import Kind, member_shapes, received_shapes
from jaxfed.core.run.arguments import check_together
from jaxfed.core.store.identity import digest_of_text
from jaxfed.core.wire import calls as wire_calls
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy.data import clients_from, shapes_from
from jaxfed.deploy.masks import least_threshold
from jaxfed.deploy.run import Run, problem_of_run, programs_for
from jaxfed.deploy.shapes import run_shapes


class Settings(NamedTuple):
    """The settings of a run; see `jaxfed.deploy.flower.server_app`."""

    algorithm: Algorithm
    wire: Wire
    warm_start: Personalized | None
    clients: int
    rounds: int
    key: Key[Array, ""]
    participants: participation.Participation
    weights: Literal["equal", "samples"] | Sequence[float]
    tol: float | None
    deadline: float | None
    at_least: int | None
    patience: float
    out: Path


class RegisteredClient(NamedTuple):
    """A client, as the server knows it."""

    id: int
    raw: float  # its weight before normalisation
    late: bool  # whether it joined after the first messages
    base: int  # the last round whose answer has arrived; 0 for none
    samples: int | None  # None if its data are not samples
    tag: str  # of its data, see `Node.tag`
    guarantee: Mapping[str, Any] | None  # of the release that its data are, as it says


class Federation:
    """The run with these members.

    Attributes:
        run: of this size.
        clients: the members, with shapes in place of data.
        dtype: of weights.
        problem: with the members' ids and weights; with a deadline, all take part in each round.
        planned: the same with the requested participation.
        programs: those of `backend.separate()`.
        kind: shapes of one member's prepared data.
        shapes: of everything that is sent and saved.
    """

    def __init__(
        self, settings: Settings, run: Run, dtype: str, members: Sequence[RegisteredClient]
    ):
        """Create the run.

        Args:
            settings: the settings.
            run: the run; its size is replaced by the number of members.
            dtype: of weights.
            members: in order.

        Raises:
            ValueError: if the algorithm refuses their data, as in `fit`.
        """
        self._settings, self.dtype = settings, dtype
        self.run = run._replace(size=len(members))
        raw = np.asarray([member.raw for member in members])
        ids = jnp.asarray([member.id for member in members], jnp.int32)
        # Normalised in double precision, as in `fit` (`clients.checks.shares_of`), for the same
        # bits.
        weights = jnp.asarray(raw / raw.sum(), dtype)
        counts = [member.samples for member in members]
        self.clients = clients_from(run.like, ids, weights, counts)
        settings.algorithm.check(self.clients, settings.warm_start)
        self.planned = eqx.tree_at(
            lambda p: (p.clients.ids, p.clients.weights, p.participation),
            problem_of_run(settings.algorithm, settings.wire, self.run, dtype),
            (ids, weights, settings.participants),
        )
        # With a deadline, the participants are not known beforehand.
        everybody = np.ones(len(members), bool)
        self.problem = self.planned if settings.deadline is None else self.with_only(everybody)
        data = shapes_from(run.like)
        self.programs = programs_for(settings.algorithm, data, weights)
        prepared = jax.eval_shape(
            lambda data: client.prepare(self.problem.for_client, data, ids[0], settings.rounds),
            data,
        )
        self.kind = Kind.of(prepared, len(members))
        self.shapes = run_shapes(self.problem, self.kind, settings.warm_start)

    def check(self) -> None:
        """Refuse settings that do not work together, as `fit` does.

        Raises:
            ValueError: names them.
        """
        settings, wire = self._settings, self._settings.wire
        settings.participants.check(self.run.size)
        # Check the original channels, since `planned` has them without their masks.
        given = replace(self.planned, clients=self.clients, wire=wire)
        check_together(given, settings.warm_start, settings.rounds)
        if given.hides and settings.tol is not None:
            raise ValueError(
                "tol: wanted None, since clients that hide their messages report no objective"
            )

    def with_only(self, present: Bool[np.ndarray, " members"]) -> Problem:
        """The run in a round in which these members take part."""
        return replace(self.planned, participation=participation.mask(present))

    @cached_property
    def program(self) -> str:
        """A digest of what clients and server compute: their functions' code, and its shapes."""
        problem, sent, state = self.problem, self.shapes.sent, self.shapes.state
        broadcast = jax.eval_shape(broadcast_of, problem.for_client, 0, sent.downlink)
        member = member_shapes(self.kind, None)._replace(state=sent.client)
        received = received_shapes(sent.uplink)
        steps = [
            jax.jit(client.answer).lower(problem.for_client, broadcast, member),
            jax.jit(_server_step).lower(problem.for_server, state, received),
            jax.jit(server.shared_result).lower(problem.for_server, state),
        ]
        return digest_of_text(" ".join(step.as_text() for step in steps))

    @property
    def threshold(self) -> int:
        """The number of clients that must remain in a round with masks: two thirds.

        More, if more share the channel's noise.
        """
        wire = self._settings.wire
        sharers = max(map(wire_calls.sharers, (wire.up, wire.first_up)))
        return max(least_threshold(self.run.size), -(-2 * self.run.size // 3), sharers)


def _server_step(problem: Problem, state: State, received: PyTree) -> tuple[PyTree, PyTree]:
    algorithm = problem.algorithm.at_round(state.round + 1)
    return calls.server_step(algorithm, problem.key, state.server, plain(received))


def enlarged(state: State, like: State) -> State:
    """The server's state with room for more clients.

    Raises:
        ValueError: if anything but lists of clients would have to grow.
    """
    size = len(like.failure.clients)

    def grown(x):
        return jnp.pad(x, (0, size - len(x)))

    clients = grown(state.failure.clients)
    state = replace(state, failure=state.failure._replace(clients=clients))
    if state.missed is not None:
        state = replace(state, missed=jax.tree.map(grown, state.missed))
    found = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    if found != [(x.shape, x.dtype) for x in jax.tree.leaves(like)]:
        raise ValueError("the algorithm's state depends on how many there are")
    return state
