"""The engine for clients on other machines: it asks them for their part of a run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed._checks import check_flag
from jaxfed.core.round import server
from jaxfed.core.round.messages import ClientMessage
from jaxfed.core.round.problem import ClientState, State, zeros_of
from jaxfed.core.round.rounds import Collected, Turnout
from jaxfed.core.run.runner import FromHost
from jaxfed.core.run.separate import in_rows, received, received_first
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy.data import common
from jaxfed.deploy.exchange import Exchange, RefusedError, reading_from
from jaxfed.deploy.federation import Federation, RegisteredClient, Settings, enlarged
from jaxfed.deploy.masked import MaskedSum, OverSurvivors, masked_sum, means_of
from jaxfed.deploy.messages import Packet

LOG = logging.getLogger("jaxfed.deploy")


class Broadcasts(NamedTuple):
    """The broadcasts that a client needs to have the current downlink."""

    forms: list[str]  # of each part: "first", "next" or "whole", as `Node` reads them
    parts: list[bytes]


@final
class Remote(FromHost):
    """Runs the members of a federation.

    Clients keep their states. The programs of `backend.separate()` compute what the server and the
    clients decode, so that the numbers equal those of `fit` with that backend.

    Attributes:
        payloads: broadcasts that some member has not received, by round.
        present: ids of the participants, by round.
    """

    def __init__(self, settings: Settings, exchange: Exchange):
        """Ask over this exchange; `use` sets the members."""
        self.settings, self.exchange = settings, exchange
        self.members: list[RegisteredClient] = []
        self.payloads: dict[int, bytes] = {}
        self.present: list[list[int]] = []

    def use(self, federation: Federation, members: list[RegisteredClient]) -> None:
        """Continue with these members."""
        self.federation, self.members = federation, members
        self.problem, self.programs = federation.problem, federation.programs

    def prepared(self, problem, rounds):
        """Return the problem unchanged, since members prepare their own data."""
        del rounds
        return problem

    def before_round(self, state):
        """Add newly connected clients, if possible."""
        known = {member.id for member in self.members}
        new = [client for client in self.exchange.clients() if client not in known]
        return self._joined(state, new) if new else state

    def kinds(self, problem):
        """The shapes of the members' prepared data, which are padded to one shape."""
        del problem
        return (self.federation.kind,)

    def first_messages(self, problem, warm_start):
        """The messages of all members, unless the algorithm sends none."""
        del warm_start
        like = self.federation.shapes.first
        messages = [ClientMessage(like, jnp.asarray(False))] * len(self.members)
        if jax.tree.leaves(like):
            questions = {m.id: self._question(i, "first") for i, m in enumerate(self.members)}
            found = self._messages(questions, len(questions), 0)
            messages = [found[member.id] for member in self.members]
        arrived = in_rows(messages, lambda: messages[0])
        contribution, failed = self.call(server.reduce_first, problem.for_server, arrived)
        return Collected(contribution, None, failed)

    def first_states(self, problem, warm_start, broadcast, first):
        """Empty, since the clients keep their states."""
        del problem, warm_start, broadcast, first
        return ClientState(None, None)

    def steps(self, problem, state, inclusion, broadcast):
        """The messages of the members that answer in time."""
        del broadcast
        settings, number = self.settings, int(state.round) + 1
        # With a deadline the problem has all members, since those that will answer are unknown.
        if settings.deadline is not None:
            inclusion = self.call(server.inclusion_of, self.federation.planned, state.round)
        questions = {}
        for place in np.flatnonzero(np.asarray(inclusion) > 0).tolist():
            member = self.members[place]
            forms, parts = self._broadcasts(state, member)
            words = {"round": number, "broadcasts": forms}
            questions[member.id] = self._question(place, "round", parts, **words)
        least = min(settings.at_least or len(questions), len(questions))
        found = self._messages(questions, least, number)
        self.present.append(sorted(found))
        messages = [found.get(member.id) for member in self.members]
        turnout = self._turnout(state, [message is not None for message in messages])
        if turnout is not None:
            problem, inclusion = turnout
        arrived = in_rows(messages, self._message_shapes)
        contribution, failed = self.call(
            server.reduce_round, problem.for_server, arrived, inclusion
        )
        return Collected(contribution, ClientState(None, None), failed, turnout)

    def opened(self, problem, opening):
        """The opening with the downlink as clients decode it."""
        self.payloads[0] = channel.to_bytes(opening.payload)
        return received_first(self, problem, opening)

    def closed(self, problem, before, closing):
        """The closing with the downlink as clients decode it; NaN for diagnostics nobody sent."""
        if self.settings.wire.up.private:
            record = closing.record
            named = self.federation.shapes.diagnostics.keys() & record.keys()
            hidden = {k for k in named if not np.any(record[k])}
            record = record | {k: jnp.full_like(record[k], jnp.nan) for k in hidden}
            closing = closing._replace(record=record)
        number = int(before.round) + 1
        self.payloads[number] = channel.to_bytes(closing.payload)
        self.members[:] = [
            m._replace(base=number) if m.id in self.present[-1] else m for m in self.members
        ]
        # Only a cumulative downlink requires the broadcasts that a client has missed.
        oldest = min((m.base for m in self.members), default=0)
        needed = max(oldest, 1) if problem.downlink.cumulative else number
        # The first downlink stays: a client that has not answered yet makes its initial state from
        # it.
        for old in [k for k in self.payloads if k and k < needed]:
            del self.payloads[old]
        return received(self, problem, before, closing)

    def local_results(self, problem, state, downlink):
        """None, since models stay with their clients; `finish_models` has them computed."""
        del problem, state, downlink

    def finish_models(self, state: State) -> list[int]:
        """Have all connected clients compute their own models; return the ids of the others."""
        end = channel.to_bytes(self.problem.algorithm.downlink(state.server))
        number, there, questions = int(state.round), self.exchange.clients(), {}
        for place, member in enumerate(self.members):
            forms, parts = self._broadcasts(state, member, for_state=True)
            if member.id in there:
                words = {"rounds": number, "broadcasts": forms}
                questions[member.id] = self._question(place, "finish", [*parts, end], **words)
        answers = self._ask(questions, "results", 0 if self.settings.deadline else len(questions))
        return [member.id for member in self.members if member.id not in answers]

    def new_members(self, clients: Sequence[int], *, late: bool) -> list[RegisteredClient]:
        """These clients as new members, which follow the present ones.

        Raises:
            RefusedError: if weights are numbers of samples and a client has no samples.
        """
        return [
            RegisteredClient(c, self._raw_weight(c, i), late, 0, self.exchange.hello[c]["samples"])
            for i, c in enumerate(clients, len(self.members))
        ]

    # --- inside --------------------------------------------------------------------------------

    def _raw_weight(self, client: int, place: int) -> float:
        weights, samples = self.settings.weights, self.exchange.hello[client]["samples"]
        if weights == "equal":
            return 1.0
        if weights != "samples":
            return float(weights[place])
        if samples is None:
            raise RefusedError(f"weights: client {client} holds no samples to count")
        return float(samples)

    def _joined(self, state: State, new: list[int]) -> State:
        """The state with room for new clients, or unchanged if they cannot join."""
        try:
            uplink, run = self.problem.uplink, self.federation.run
            if uplink.cumulative or uplink.private:
                raise ValueError("its channel wants all clients from the start")
            self.settings.participants.check(len(self.members) + len(new))
            data = {-1: run.like} | {c: self.exchange.hello[c]["data"] for c in new}
            members = [*self.members, *self.new_members(new, late=True)]
            run = run._replace(like=common(data))
            federation = Federation(self.settings, run, self.federation.dtype, members)
            state = enlarged(state, federation.shapes.state)
        # `IndexError` if weights are listed and there is none for a new client.
        except (ValueError, IndexError) as error:
            LOG.warning("clients %s cannot join this run: %s", new, error)
            return state
        self.use(federation, members)
        LOG.info("clients %s join", new)
        return state

    def _broadcasts(
        self, state: State, member: RegisteredClient, *, for_state: bool = False
    ) -> Broadcasts:
        """The broadcasts that a client needs to have the current downlink.

        Args:
            state: the server's state.
            member: the client.
            for_state: return only what its state requires, without the current downlink.
        """
        last = int(state.round)  # the broadcast after this round
        current = state.downlink.receiver
        if not member.base and member.late:
            return Broadcasts(["whole"], [channel.to_bytes(current)])
        first = Broadcasts([], []) if member.base else Broadcasts(["first"], [self.payloads[0]])
        if for_state or not last:
            return first
        # The broadcast after round k opens round k + 1. So a client whose last answer is that of
        # round b has those before b, and lacks b and later ones; the first one, 0, is listed above.
        since = max(member.base, 1) if self.federation.problem.downlink.cumulative else last
        missed = [self.payloads[number] for number in range(since, last + 1)]
        # Send all missed broadcasts or the downlink itself, whichever is shorter.
        if sum(map(len, missed)) < channel.fixed_bits(current) // 8 or len(missed) == 1:
            return Broadcasts(first.forms + ["next"] * len(missed), first.parts + missed)
        return Broadcasts([*first.forms, "whole"], [*first.parts, channel.to_bytes(current)])

    def _turnout(self, state: State, there: Sequence[bool]) -> Turnout | None:
        """The actual participants, if they differ from the planned ones; else None."""
        settings, federation = self.settings, self.federation
        problem = self.problem
        lost_masks = isinstance(settings.wire.up, MaskedChannel) and not all(there)
        if settings.deadline is None and not lost_masks:
            return None
        if settings.deadline is not None:
            problem = federation.with_only(np.asarray(there))
        inclusion = self.call(server.inclusion_of, problem.for_server, state.round)
        if lost_masks:
            # Clients have multiplied their messages by weights that sum to one over all of them.
            weights = np.asarray(problem.clients.weights)[np.asarray(there)]
            factor = jnp.asarray(1 / sum(map(float, weights)))
            uplink = OverSurvivors(problem.uplink, factor, means_of(federation.shapes.uplink))
            problem = replace(problem, uplink=uplink)
        return Turnout(problem, inclusion)

    def _question(self, place: int, kind: str, parts: Sequence[bytes] = (), **words: Any) -> Packet:
        member, federation = self.members[place], self.federation
        common = {
            "kind": kind,
            "run": federation.run.words,
            "position": place,
            "weight": float(federation.problem.clients.weights[place]),
            "base": member.base,
        }
        return Packet(common | words, parts)

    def _ask(self, questions: Mapping[int, Packet], group: str, least: int) -> dict[int, Packet]:
        limits = {"deadline": self.settings.deadline, "patience": self.settings.patience}
        return self.exchange.ask(questions, group=group, at_least=least, **limits)

    def _messages(
        self, questions: Mapping[int, Packet], least: int, number: int
    ) -> dict[int, ClientMessage]:
        """The messages by client; under masks, the first has the sum and the others are zero.

        Args:
            questions: by client.
            least: number of answers needed.
            number: the round, or 0 for the messages before the rounds.
        """
        shapes, wire = self.federation.shapes, self.settings.wire
        way, like, diagnostics = wire.first_up, shapes.first, None
        if number:
            way, like, diagnostics = wire.up, shapes.up, shapes.diagnostics
        group = f"round {number}" if number else "first messages"
        nothing = ClientMessage(zeros_of(like), jnp.asarray(False), zeros_of(diagnostics))
        if isinstance(way, MaskedChannel):
            survivors, total, not_finite = self._masked_sum(questions, way, like, group, least)
            found = {
                client: nothing._replace(not_finite=jnp.asarray(not_finite[client]))
                for client in survivors
            }
            # `server.reduce_round` adds up rows, so the sum may stand in any one of them.
            whole = way.with_numbers(nothing.payload, total)
            found[survivors[0]] = found[survivors[0]]._replace(payload=whole)
            return found
        messages = {}
        for client, answer in self._ask(questions, group, least).items():
            if (answered := answer.words.get("round", 0)) != number:
                raise RefusedError(
                    f"client {client}: wanted its answer of round {number}, got that of round "
                    f"{answered}"
                )
            with reading_from(f"client {client}"):
                payload, *rest = answer.parts
                check_flag("broken", answer.words["broken"])
                messages[client] = ClientMessage(
                    channel.from_bytes(payload, like),
                    jnp.asarray(answer.words["broken"]),
                    # If messages are hidden, nothing else is sent with them.
                    channel.from_bytes(rest[0], diagnostics) if rest else nothing.diagnostics,
                )
        return messages

    def _masked_sum(
        self,
        questions: Mapping[int, Packet],
        way: MaskedChannel,
        like: PyTree,
        group: str,
        least: int,
    ) -> MaskedSum:
        places, everybody = {m.id: i for i, m in enumerate(self.members)}, least == len(questions)
        return masked_sum(
            self._ask,
            lambda client, *of, **words: self._question(places[client], *of, **words),
            questions,
            lambda part: way.numbers(channel.from_bytes(part, like)),
            run=self.federation.run.name,
            group=group,
            threshold=max(self.federation.threshold, 0 if everybody else least),
            everybody=everybody,
        )

    def _message_shapes(self) -> ClientMessage:
        shapes = self.federation.shapes
        not_finite = jax.eval_shape(lambda: jnp.asarray(False))
        return ClientMessage(shapes.up, not_finite, shapes.diagnostics)
