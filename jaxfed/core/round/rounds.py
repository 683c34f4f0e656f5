"""The start of a run and one federated round, written once for all engines.

An `Engine` knows where the clients are, runs their part and collects their messages. Everything
else is here, in `client` and in `server`.
"""

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, PyTree

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import server
from jaxfed.core.round.messages import Contribution
from jaxfed.core.round.problem import Broadcast, ClientState, Costs, Problem, State, before_rounds
from jaxfed.core.round.server import Closing, Opening
from jaxfed.core.round.shapes import Kind

T = TypeVar("T")


class Turnout(NamedTuple):
    """The actual participants, if clients were lost during the round."""

    problem: Problem  # with the actual participation and uplink
    inclusion: Float[Array, " clients"]


class Collected(NamedTuple):
    """The outcome of the clients' part of a round."""

    received: Contribution  # the clients' messages, reduced
    kept: PyTree  # what clients keep, leading axis = clients, if the engine stores it
    failed: Bool[Array, " rows"]  # clients whose objective or message is not finite
    turnout: Turnout | None = None  # None: as planned


class Engine(abc.ABC):
    """Runs the clients' part of a run, wherever they are, and collects their messages."""

    @abc.abstractmethod
    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function of the server, as its own program or within the round's."""

    @abc.abstractmethod
    def kinds(self, problem: Problem) -> tuple[Kind, ...]:
        """Shapes of the clients' prepared data, starting with the largest."""

    @abc.abstractmethod
    def first_messages(self, problem: Problem, warm_start: Personalized | None) -> Collected:
        """Collect the clients' messages before the first round.

        If uplink differences start from them, clients keep them as the server decoded them.
        """

    @abc.abstractmethod
    def first_states(
        self, problem: Problem, warm_start: Personalized | None, broadcast: Broadcast, first: PyTree
    ) -> ClientState:
        """The clients' initial states, from what `first_messages` kept."""

    @abc.abstractmethod
    def steps(
        self,
        problem: Problem,
        state: State,
        inclusion: Float[Array, " clients"],
        broadcast: Broadcast,
    ) -> Collected:
        """Run the participants' part of a round; they keep their states."""

    @abc.abstractmethod
    def opened(self, problem: Problem, opening: Opening) -> Opening:
        """The opening with the downlink as clients receive it."""

    @abc.abstractmethod
    def closed(self, problem: Problem, before: State, closing: Closing) -> Closing:
        """The closing of a round with the next downlink as clients receive it.

        Args:
            problem: the run.
            before: the server's state before the round.
            closing: the server's result of the round.
        """

    @abc.abstractmethod
    def local_results(self, problem: Problem, state: State, downlink: PyTree) -> PyTree:
        """The clients' own models, leading axis = clients."""


def begin(problem: Problem, warm_start: Personalized | None, engine: Engine) -> tuple[State, Costs]:
    """The state before the first round, and the cost of messages.

    Args:
        problem: the run, with prepared data.
        warm_start: a warm start.
        engine: runs the clients' part.
    """
    firsts = engine.first_messages(problem, warm_start)
    opening: Opening = engine.call(
        server.open_run, problem.for_server, firsts.received, engine.kinds(problem), warm_start
    )
    opening = engine.opened(problem, opening)
    state = opening.state
    downlink = state.downlink.receiver
    broadcast = engine.call(before_rounds, problem.for_server, warm_start, downlink)
    state = state.with_clients(engine.first_states(problem, warm_start, broadcast, firsts.kept))
    failure = state.failure._replace(clients=firsts.failed)
    return replace(state, failure=failure), opening.costs


def one_round(problem: Problem, state: State, engine: Engine) -> tuple[State, dict[str, Array]]:
    """One federated round: participants' steps, uplink, server step, downlink.

    Returns:
        The state after the round, and its history entries.
    """
    # The server's functions never get the clients' data or states, so that they cannot come to
    # depend on them.
    run, before = problem.for_server, state.for_server
    inclusion, broadcast = engine.call(server.call_round, run, before)
    collected = engine.steps(problem, state, inclusion, broadcast)
    # In a deployment, clients may be lost after the call.
    if collected.turnout is not None:
        run, inclusion = collected.turnout.problem.for_server, collected.turnout.inclusion
    closing: Closing = engine.call(
        server.close_round, run, before, inclusion, collected.received, collected.failed
    )
    closing = engine.closed(problem, before, closing)
    # The participants have taken their steps even if the server rejects the round.
    return closing.state.with_clients(collected.kept), closing.record


def result_of(problem: Problem, state: State, engine: Engine) -> Personalized:
    """The shared and local models of a state, without padding."""
    shared, downlink = engine.call(server.shared_result, problem.for_server, state.for_server)
    return Personalized(shared, engine.local_results(problem, state, downlink))
