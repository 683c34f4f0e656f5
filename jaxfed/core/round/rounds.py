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
from jaxfed.core.round.problem import Broadcast, ClientState, Costs, Problem, State, broadcast_of
from jaxfed.core.round.protocol import Kind
from jaxfed.core.round.server import Closing, Opening

T = TypeVar("T")
Sent = TypeVar("Sent", Opening, Closing)


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
    def exchange(
        self,
        problem: Problem,
        broadcast: Broadcast,
        warm_start: Personalized | None,
        state: State | None,
        inclusion: Float[Array, " clients"] | None,
    ) -> Collected:
        """Run the clients' part of a round, and collect their messages.

        Participants keep their states. Before the rounds, all clients send their first messages,
        and keep them as the server decodes them if uplink differences may start from them.

        Args:
            problem: the run.
            broadcast: of the round.
            warm_start: a warm start, before the rounds.
            state: the state before the round; None before the rounds.
            inclusion: factors on the clients' weights; None before the rounds.
        """

    @abc.abstractmethod
    def first_states(
        self, problem: Problem, warm_start: Personalized | None, broadcast: Broadcast, first: PyTree
    ) -> ClientState:
        """The clients' initial states, from what they kept of the exchange before the rounds."""

    @abc.abstractmethod
    def local_results(self, problem: Problem, state: State, downlink: PyTree) -> PyTree:
        """The clients' own models, leading axis = clients."""

    # --- optional methods ----------------------------------------------------------------------

    def prepared(self, problem: Problem, rounds: int) -> Problem:
        """The problem with prepared data; by default unchanged, as where clients prepare theirs."""
        del rounds
        return problem

    def before_round(self, problem: Problem, state: State) -> tuple[Problem, State]:
        """The problem and the state from which the next round starts; clients may join here."""
        return problem, state

    def received(self, problem: Problem, before: State | None, sent: Sent) -> Sent:
        """The server's result with its downlink as clients receive it.

        Args:
            problem: the run.
            before: the server's state before the round; None before the rounds.
            sent: the server's result of the round; an opening before the rounds.
        """
        del problem, before
        return sent

    def text(self, problem: Problem, state: State) -> str:
        """The text of a round's program, which is part of a checkpoint's identity; "" by default.

        Args:
            problem: the run, with prepared data.
            state: the state before a round.
        """
        del problem, state
        return ""


def begin(problem: Problem, warm_start: Personalized | None, engine: Engine) -> tuple[State, Costs]:
    """The state before the first round, and the cost of messages.

    Args:
        problem: the run, with prepared data.
        warm_start: a warm start.
        engine: runs the clients' part.
    """
    broadcast = engine.call(broadcast_of, problem.for_server, 0, None, warm_start)
    firsts = engine.exchange(problem, broadcast, warm_start, None, None)
    opening: Opening = engine.call(
        server.open_run, problem.for_server, firsts.received, engine.kinds(problem), warm_start
    )
    opening = engine.received(problem, None, opening)
    state = opening.state
    broadcast = broadcast._replace(downlink=state.downlink.receiver)
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
    collected = engine.exchange(problem, broadcast, None, state, inclusion)
    # In a deployment, clients may be lost after the call.
    if collected.turnout is not None:
        run, inclusion = collected.turnout.problem.for_server, collected.turnout.inclusion
    closing: Closing = engine.call(
        server.close_round, run, before, inclusion, collected.received, collected.failed
    )
    closing = engine.received(problem, before, closing)
    # The participants have taken their steps even if the server rejects the round.
    return closing.state.with_clients(collected.kept), closing.record


def result_of(problem: Problem, state: State, engine: Engine) -> Personalized:
    """The shared and local models of a state, without padding."""
    shared, downlink = engine.call(server.shared_result, problem.for_server, state.for_server)
    return Personalized(shared, engine.local_results(problem, state, downlink))
