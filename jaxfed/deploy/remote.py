"""The engine for clients on other machines: it asks them for their part of a run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jaxfed._checks import check_flag
from jaxfed.core.clients.guarantee import checked_guarantee
from jaxfed.core.clients.names import Texts
from jaxfed.core.round import server
from jaxfed.core.round.messages import ClientMessage, is_not_finite
from jaxfed.core.round.problem import ClientState, State, zeros_of
from jaxfed.core.round.rounds import Collected, Engine, Sent, Turnout
from jaxfed.core.round.server import Closing
from jaxfed.core.run.separate import in_rows, received
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy.data import common
from jaxfed.deploy.exchange import Exchange, RefusedError
from jaxfed.deploy.federation import Federation, RegisteredClient, Settings, enlarged
from jaxfed.deploy.masked import MaskedSum, OverSurvivors, group_of, masked_sum, means_of
from jaxfed.deploy.messages import Packet
from jaxfed.deploy.transcript import digests_after, is_masked, transcript_of

LOG = logging.getLogger("jaxfed.deploy")
T = TypeVar("T")


class Broadcasts(NamedTuple):
    """The broadcasts that a client needs to have the current downlink."""

    forms: list[str]  # of each part: "first", "next" or "whole", as `Node` reads them
    parts: list[bytes]
    missed: Sequence[str] = ()  # digests of those before the last that the client does not need


@final
class Remote(Engine):
    """Runs the members of a federation.

    Clients keep their states. The programs of `backend.separate()` compute what the server and the
    clients decode, so that the numbers equal those of `fit` with that backend.

    Attributes:
        payloads: broadcasts that some member has not received, by round.
        digests: of all broadcasts.
        present: ids of the participants, by round.
        features: their names, if some client has given them.
    """

    def __init__(self, settings: Settings, exchange: Exchange):
        """Ask over this exchange; `use` sets the members."""
        self.settings, self.connections = settings, exchange
        self.members: list[RegisteredClient] = []
        self.payloads: dict[int, bytes] = {}
        self.digests: list[str] = []
        self.present: list[list[int]] = []
        self.features: Texts | None = None

    def use(self, federation: Federation, members: list[RegisteredClient]) -> None:
        """Continue with these members."""
        self.federation, self.members = federation, members

    def call(self, function, *arguments):
        """Run one of the programs of `backend.separate()`."""
        return self.federation.programs(function)(*arguments)

    def before_round(self, problem, state):
        """Add newly connected clients, if possible."""
        del problem
        known = {member.id for member in self.members}
        new = [client for client in self.connections.clients() if client not in known]
        for client in new:  # each for itself: one that does not fit keeps no other out
            state = self._joined(state, client)
        return self.federation.problem, state

    def kinds(self, problem):
        """The shapes of the members' prepared data, which are padded to one shape."""
        del problem
        return (self.federation.kind,)

    def exchange(self, problem, broadcast, warm_start, state, inclusion):
        """The messages of the members that answer in time; before the rounds, of all members."""
        del broadcast, warm_start
        settings, turnout = self.settings, None
        number = 0 if state is None else int(state.round) + 1
        # With a deadline the problem has all members, since those that will answer are unknown.
        if state is not None and settings.deadline is not None:
            inclusion = self.call(server.inclusion_of, self.federation.planned, state.round)
        questions = self._questions(state, inclusion)
        least = len(questions)
        if number:
            least = min(settings.at_least or least, least)
        found = self._messages(questions, least, number)
        messages = [found.get(member.id) for member in self.members]
        if state is not None:
            self.present.append(sorted(found))
            turnout = self._turnout(state, [message is not None for message in messages])
        if turnout is not None:
            problem, inclusion = turnout
        sent = self.federation.shapes.sent
        like = sent.message if number else sent.firsts[0]._replace(decoded=None)
        arrived = in_rows(messages, like)
        received, failed = self.call(server.reduce, problem.for_server, arrived, inclusion)
        kept = None if state is None else ClientState(None, None)
        return Collected(received, kept, failed, turnout)

    def first_states(self, problem, warm_start, broadcast, first):
        """Empty, since the clients keep their states."""
        del problem, warm_start, broadcast, first
        return ClientState(None, None)

    def received(self, problem, before, sent):
        """The result with the downlink as clients decode it; NaN for diagnostics nobody sent."""
        number = 0 if before is None else int(before.round) + 1
        payload = channel.to_bytes(sent.payload)
        self.payloads[number] = payload
        self.digests = digests_after(self.digests, ["next"], [payload], [])
        if not isinstance(sent, Closing):
            return self._sound(received(self, problem, before, sent), number)
        if problem.hides:
            record = sent.record
            named = self.federation.shapes.sent.diagnostics.keys() & record.keys()
            hidden = {k for k in named if not np.any(record[k])}
            record = record | {k: jnp.full_like(record[k], jnp.nan) for k in hidden}
            sent = sent._replace(record=record)
        self.members[:] = [
            m._replace(base=number) if m.id in self.present[-1] else m for m in self.members
        ]
        # Only a cumulative downlink requires the broadcasts that a client has missed.
        oldest = min((m.base for m in self.members), default=0)
        needed = max(oldest, 1) if problem.wire.down.cumulative else number
        # The first downlink stays: a client that has not answered yet makes its initial state from
        # it.
        for old in [k for k in self.payloads if k and k < needed]:
            del self.payloads[old]
        return self._sound(received(self, problem, before, sent), number)

    def local_results(self, problem, state, downlink):
        """None, since models stay with their clients; `finish_models` has them computed."""
        del problem, state, downlink

    def finish_models(self, state: State) -> list[int]:
        """Have all connected clients compute their own models; return the ids of the others."""
        end = channel.to_bytes(self.federation.problem.algorithm.downlink(state.server))
        number, there, questions = int(state.round), self.connections.clients(), {}
        for place, member in enumerate(self.members):
            forms, parts, _ = self._broadcasts(state, member, for_state=True)
            if member.id in there:
                words = {"rounds": number, "broadcasts": forms}
                questions[member.id] = self._question(place, "finish", [*parts, end], **words)
        # The shared model is made, so nobody's trouble may end the run now.
        answers = self._ask(questions, "results", 0, lambda client, answer: answer)
        return [member.id for member in self.members if member.id not in answers]

    def new_members(self, clients: Sequence[int], *, late: bool) -> list[RegisteredClient]:
        """These clients as new members, which follow the present ones.

        Raises:
            RefusedError: if weights are numbers of samples and a client has no samples.
        """
        hello, first = self.connections.hello, len(self.members)
        return [
            RegisteredClient(
                c,
                self._raw_weight(c, i),
                late,
                0,
                hello[c]["samples"],
                hello[c]["tag"],
                hello[c]["guarantee"],
            )
            for i, c in enumerate(clients, first)
        ]

    # --- inside --------------------------------------------------------------------------------

    def _sound(self, sent: Sent, number: int) -> Sent:
        """The server's result of a round, before it is saved.

        Raises:
            FloatingPointError: if no run could go on from it, though no message says so.
        """
        state = sent.state
        if not int(state.failure.round) and is_not_finite(state.downlink.receiver):
            raise FloatingPointError(
                f"round {number}: the messages are finite, and what the server makes of them is "
                f"not; wanted smaller data or steps; the state before it is in {self.settings.out}"
            )
        return sent

    def _raw_weight(self, client: int, place: int) -> float:
        weights, samples = self.settings.weights, self.connections.hello[client]["samples"]
        if weights == "equal":
            return 1.0
        if weights != "samples":
            return float(weights[place])
        if samples is None:
            raise RefusedError(f"weights: client {client} holds no samples to count")
        return float(samples)

    def _joined(self, state: State, new: int) -> State:
        """The state with room for a new client, or unchanged if it cannot join."""
        try:
            uplink, run = self.federation.problem.wire.up, self.federation.run
            if uplink.cumulative or uplink.private:
                raise ValueError("its channel wants all clients from the start")
            self.settings.participants.check(len(self.members) + 1)
            data = {-1: run.like, new: self.connections.hello[new]["data"]}
            members = [*self.members, *self.new_members([new], late=True)]
            run = run._replace(like=common(data))
            federation = Federation(self.settings, run, self.federation.dtype, members)
            state = enlarged(state, federation.shapes.state)
        # `IndexError` if weights are listed and there is none for it.
        except (ValueError, IndexError) as error:
            LOG.warning("client %d cannot join this run: %s", new, error)
            return state
        self.use(federation, members)
        LOG.info("client %d joins", new)
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
        since = max(member.base, 1) if self.federation.problem.wire.down.cumulative else last
        missed = [self.payloads[number] for number in range(since, last + 1)]
        # Send all missed broadcasts or the downlink itself, whichever is shorter; but under masks,
        # clients must see that all get the same.
        shorter = sum(map(len, missed)) < channel.fixed_bits(current) // 8
        if shorter or len(missed) == 1 or is_masked(self.settings.wire):
            forms, parts = first.forms + ["next"] * len(missed), first.parts + missed
            return Broadcasts(forms, parts, self.digests[max(member.base, 1) : since])
        return Broadcasts([*first.forms, "whole"], [*first.parts, channel.to_bytes(current)])

    def _turnout(self, state: State, there: Sequence[bool]) -> Turnout | None:
        """The actual participants, if they differ from the planned ones; else None."""
        settings, federation = self.settings, self.federation
        problem = self.federation.problem
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
            uplink = OverSurvivors(problem.wire.up, factor, means_of(federation.shapes.sent.uplink))
            problem = replace(problem, wire=Wire(uplink, *problem.wire.channels[1:]))
        return Turnout(problem, inclusion)

    def _questions(
        self, state: State | None, inclusion: Float[Array, " members"] | None
    ) -> dict[int, Packet]:
        """The questions for messages, by client."""
        if state is None or inclusion is None:
            # Nobody is asked for a message without parts.
            asked = (
                self.members
                if jax.tree.leaves(self.federation.shapes.sent.firsts[0].payload)
                else []
            )
            return {m.id: self._question(i, "first") for i, m in enumerate(asked)}
        questions, number = {}, int(state.round) + 1
        for place in np.flatnonzero(np.asarray(inclusion) > 0).tolist():
            member = self.members[place]
            forms, parts, missed = self._broadcasts(state, member)
            words = {"round": number, "broadcasts": forms}
            if is_masked(self.settings.wire):
                words["missed"] = missed
            questions[member.id] = self._question(place, "round", parts, **words)
        return questions

    def _question(self, place: int, kind: str, parts: Sequence[bytes] = (), **words: Any) -> Packet:
        member, federation = self.members[place], self.federation
        common = {
            "kind": kind,
            "run": federation.run.words,
            "position": place,
            "weight": float(federation.problem.clients.weights[place]),
            "base": member.base,
        }
        if is_masked(self.settings.wire):
            common["roster"] = self._roster()
        return Packet(common | words, parts)

    def _roster(self) -> dict[str, Any]:
        """All clients by position, and the sum of their weights; see `transcript_of`."""
        return {"ids": [m.id for m in self.members], "total": sum(m.raw for m in self.members)}

    def _ask(
        self,
        questions: Mapping[int, Packet],
        group: str,
        least: int,
        read: Callable[[int, Packet], T],
    ) -> dict[int, T]:
        limits = {"deadline": self.settings.deadline, "patience": self.settings.patience}
        return self.connections.ask(questions, read, group=group, at_least=least, **limits)

    def _messages(
        self, questions: Mapping[int, Packet], least: int, number: int
    ) -> dict[int, ClientMessage]:
        """The messages by client; under masks, the first has the sum and the others are zero.

        Args:
            questions: by client.
            least: number of answers needed.
            number: the round, or 0 for the messages before the rounds.
        """
        sent, wire = self.federation.shapes.sent, self.settings.wire
        way, like, diagnostics = wire.first_up, sent.firsts[0].payload, None
        if number:
            way, like, diagnostics = wire.up, sent.up, sent.diagnostics
        if not questions:
            return {}
        nothing = ClientMessage(zeros_of(like), jnp.asarray(False), zeros_of(diagnostics))
        if isinstance(way, MaskedChannel) and jax.tree.leaves(like):  # else nothing to hide
            survivors, total, not_finite = self._masked_sum(questions, way, like, number, least)
            found = {
                client: nothing._replace(not_finite=jnp.asarray(not_finite[client]))
                for client in survivors
            }
            # `server.reduce` adds up rows, so the sum may stand in any one of them.
            whole = way.with_numbers(nothing.payload, total)
            found[survivors[0]] = found[survivors[0]]._replace(payload=whole)
            return found

        def read(client: int, answer: Packet) -> ClientMessage:
            payload, *rest = answer.parts
            broken = answer.words["broken"]
            check_flag("broken", broken)
            message = ClientMessage(
                channel.from_bytes(payload, like),
                jnp.asarray(broken),
                # If messages are hidden, nothing else is sent with them.
                channel.from_bytes(rest[0], diagnostics) if rest else nothing.diagnostics,
            )
            # A client that says so ends the run, as in `fit`; one that does not would spoil the
            # state, from which no run could go on.
            if not broken and not self.call(_is_sound, way, message.payload):
                raise RefusedError(
                    f"client {client}: wanted finite numbers whose squares are finite too, got "
                    "others, of which it does not say so"
                )
            return message

        return self._ask(questions, group_of(number), least, read)

    @property
    def _sharers(self) -> int:
        """The fewest clients whose messages protect persons together."""
        given = [member.guarantee for member in self.members]
        return max((checked_guarantee(**each).sharers for each in given if each), default=1)

    def _masked_sum(
        self,
        questions: Mapping[int, Packet],
        way: MaskedChannel,
        like: PyTree,
        number: int,
        least: int,
    ) -> MaskedSum:
        places, everybody = {m.id: i for i, m in enumerate(self.members)}, least == len(questions)
        return masked_sum(
            self._ask,
            lambda client, *of, **words: self._question(places[client], *of, **words),
            questions,
            lambda part: way.numbers(channel.from_bytes(part, like)),
            run=self.federation.run.name,
            transcript=transcript_of(self.federation.run.words, self._roster(), self.digests),
            number=number,
            threshold=max(self.federation.threshold, self._sharers, 0 if everybody else least),
            everybody=everybody,
        )


def _is_sound(way: channel.Channel, payload: PyTree) -> Bool[Array, ""]:
    """Whether the numbers of a payload and of what it decodes to have finite squares."""
    numbers = jax.tree.leaves((payload, way.decode(payload)))
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in numbers]
    return ~is_not_finite([jnp.square(x) for x in wide if jnp.issubdtype(x.dtype, jnp.inexact)])
