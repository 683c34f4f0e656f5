"""Clients on other machines: the engine that asks them for their part of a run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.core.common.checks import check_flag
from jaxfed.core.round import server
from jaxfed.core.round.messages import Message
from jaxfed.core.round.problem import ClientState, State
from jaxfed.core.round.rounds import Collected, Turnout
from jaxfed.core.run.runner import FromHost
from jaxfed.core.run.separate import in_rows, received, received_first
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy.data import common
from jaxfed.deploy.exchange import Exchange, RefusedError, reading
from jaxfed.deploy.federation import Federation, Member, Settings, longer
from jaxfed.deploy.masked import masked_sum, means_of, over_survivors
from jaxfed.deploy.wire import Packet

LOG = logging.getLogger("jaxfed.deploy")


@final
class Remote(FromHost):
    """The members of a federation.

    Their states stay with them; what the server decodes, and what clients decode, is computed by
    the programs of `backend.separate()`, so that the numbers are those of `fit` with it.
    """

    def __init__(self, settings: Settings, exchange: Exchange):
        """Ask over this exchange; `use` says whom."""
        self.settings, self.exchange = settings, exchange
        self.members: list[Member] = []
        self.payloads: dict[int, bytes] = {}  # broadcasts that somebody may miss, by round
        self.present: list[list[int]] = []  # ids of who took part, by round

    def use(self, federation: Federation, members: list[Member]) -> None:
        """Go on with these members."""
        self.federation, self.members = federation, members
        self.problem, self.programs = federation.problem, federation.programs

    def prepared(self, problem, rounds):
        """Members prepare their own data."""
        del rounds
        return problem

    def before_round(self, state):
        """Take in clients that were not there before, where that can be done."""
        known = {member.id for member in self.members}
        new = [client for client in self.exchange.clients() if client not in known]
        return self._joined(state, new) if new else state

    def kinds(self, problem):
        """The shapes of the members' prepared data, which are padded to one."""
        del problem
        return (self.federation.kind,)

    def first_messages(self, problem, start):
        """Everybody's, unless the algorithm sends none."""
        del start
        like = self.federation.shapes.first
        if not jax.tree.leaves(like):
            message = Message(like, jnp.asarray(False))
            messages = [message] * len(self.members)
        else:
            way = self.settings.wire.first_up
            questions = {m.id: self._question(i, "first") for i, m in enumerate(self.members)}
            answers = self._answers(questions, way, like, "first messages", len(questions), 0)
            messages = [self._message(m.id, answers[m.id], like, None) for m in self.members]
        arrived = in_rows(messages, lambda: messages[0])
        contribution, failed = self.call(server.reduce_first, problem.for_server, arrived)
        return Collected(contribution, None, failed)

    def first_states(self, problem, start, broadcast, first):
        """Nothing that the server has."""
        del problem, start, broadcast, first
        return ClientState(None, None)

    def steps(self, problem, state, inclusion, broadcast):
        """The messages of those who answer in time."""
        del broadcast
        asked, shapes, number = self.settings, self.federation.shapes, int(state.round) + 1
        if asked.deadline is not None:  # the problem has everybody, since nobody knows who answers
            inclusion = self.call(server.inclusion_of, self.federation.planned, state.round)
        questions = {}
        for place in np.flatnonzero(np.asarray(inclusion) > 0).tolist():
            member = self.members[place]
            forms, parts = self.downlinks(state, member)
            questions[member.id] = self._question(
                place, "round", parts, round=number, broadcasts=forms
            )
        least = len(questions) if asked.at_least is None else asked.at_least
        answers = self._answers(
            questions, asked.wire.up, shapes.up, f"round {number}",
            min(least, len(questions)), number,
        )  # fmt: skip
        for client, answer in answers.items():
            if answer.words.get("round") != number:
                raise RefusedError(
                    f"client {client}: wanted its answer of round {number}, got that of round "
                    f"{answer.words.get('round')}"
                )
        messages = [
            self._message(m.id, answers[m.id], shapes.up, shapes.diagnostics)
            if m.id in answers
            else None
            for m in self.members
        ]
        self.present.append(sorted(answers))
        turnout = self._turnout(state, [message is not None for message in messages])
        if turnout is not None:
            problem, inclusion = turnout
        arrived = in_rows(messages, self._message_shapes)
        contribution, failed = self.call(
            server.reduce_round, problem.for_server, arrived, inclusion
        )
        return Collected(contribution, ClientState(None, None), failed, turnout)

    def opened(self, problem, opening):
        """With the downlink as clients decode it."""
        self.payloads[0] = channel.to_bytes(opening.payload)
        return received_first(self, problem, opening)

    def closed(self, problem, before, closing):
        """With the downlink as clients decode it; what clients have not told is NaN, not zero."""
        if self.settings.wire.up.private:
            record = closing.record
            hidden = {k for k in self.federation.shapes.diagnostics if not np.any(record[k])}
            record = record | {k: jnp.full_like(record[k], jnp.nan) for k in hidden}
            closing = closing._replace(record=record)
        number = int(before.round) + 1
        self.payloads[number] = channel.to_bytes(closing.payload)
        self.members[:] = [
            m._replace(base=number) if m.id in self.present[-1] else m for m in self.members
        ]
        oldest = min((m.base for m in self.members), default=0)
        needed = max(oldest, 1) if problem.downlink.cumulative else number
        for old in [k for k in self.payloads if k and k < needed]:
            del self.payloads[old]
        return received(self, problem, before, closing)

    def local_results(self, problem, state, downlink):
        """None: they stay with their clients; `finish_models` has them made."""
        del problem, state, downlink

    def finish_models(self, state: State) -> list[int]:
        """Have all clients that are there make their own models; the ids of those that do not."""
        end = channel.to_bytes(self.problem.algorithm.downlink(state.server))
        number, there, questions = int(state.round), self.exchange.clients(), {}
        for place, member in enumerate(self.members):
            forms, parts = self.downlinks(state, member, begin_only=True)
            if member.id in there:
                questions[member.id] = self._question(
                    place, "finish", [*parts, end], rounds=number, broadcasts=forms
                )
        least = 0 if self.settings.deadline else len(questions)
        answers = self._ask(questions, "results", least)
        return [member.id for member in self.members if member.id not in answers]

    def new_members(self, clients: Sequence[int], *, late: bool) -> list[Member]:
        """These clients, who come after those that there are.

        Raises:
            RefusedError: for a client without the samples that its weight is to be told by.
        """
        return [
            Member(c, self._raw_weight(c, i), late, 0, self.exchange.hello[c]["samples"])
            for i, c in enumerate(clients, len(self.members))
        ]

    def downlinks(
        self, state: State, member: Member, *, begin_only: bool = False
    ) -> tuple[list[str], list[bytes]]:
        """What a client must be sent to have the downlink that now holds: forms, and bytes."""
        last = int(state.round)  # the broadcast after this round
        current = state.downlink.receiver
        if not member.base and member.late:
            return ["whole"], [channel.to_bytes(current)]
        forms, parts = ([], []) if member.base else (["first"], [self.payloads[0]])
        if begin_only or not last:
            return forms, parts
        since = max(member.base, 1) if self.federation.problem.downlink.cumulative else last
        missed = [self.payloads[number] for number in range(since, last + 1)]
        if sum(map(len, missed)) < channel.fixed_bits(current) // 8 or len(missed) == 1:
            return [*forms, *["next"] * len(missed)], [*parts, *missed]
        return [*forms, "whole"], [*parts, channel.to_bytes(current)]

    # --- inside --------------------------------------------------------------------------------

    def _raw_weight(self, client: int, place: int) -> float:
        given = self.settings.weights
        if given == "equal":
            return 1.0
        if given == "samples":
            samples = self.exchange.hello[client]["samples"]
            if samples is None:
                raise RefusedError(f"weights: client {client} holds no samples to count")
            return float(samples)
        return float(given[place])

    def _joined(self, state: State, new: list[int]) -> State:
        """The state with room for new clients, or as it is if they cannot join."""
        try:
            uplink, run = self.problem.uplink, self.federation.run
            if uplink.cumulative or uplink.private:
                raise ValueError("its channel wants all clients from the start")
            self.settings.participants.check(len(self.members) + len(new))
            data = {-1: run.like} | {c: self.exchange.hello[c]["data"] for c in new}
            members = [*self.members, *self.new_members(new, late=True)]
            run = run._replace(like=common(data))
            federation = Federation(self.settings, run, self.federation.dtype, members)
            state = longer(state, federation.shapes.state)
        except (ValueError, IndexError) as error:
            LOG.warning("clients %s cannot join this run: %s", new, error)
            return state
        self.use(federation, members)
        LOG.info("clients %s join", new)
        return state

    def _turnout(self, state: State, there: Sequence[bool]) -> Turnout | None:
        """Who took part after all; None where that is who was asked."""
        asked, federation = self.settings, self.federation
        problem, lost = self.problem, not all(there)
        if asked.deadline is None and not (isinstance(asked.wire.up, MaskedChannel) and lost):
            return None
        if asked.deadline is not None:
            problem = federation.heard_from(np.asarray(there))
        inclusion = self.call(server.inclusion_of, problem.for_server, state.round)
        if isinstance(asked.wire.up, MaskedChannel) and lost:
            weights = np.asarray(problem.clients.weights)[np.asarray(there)]
            factor = jnp.asarray(1 / sum(map(float, weights)))
            uplink = over_survivors(problem.uplink, factor, means_of(federation.shapes.uplink))
            problem = replace(problem, uplink=uplink)
        return Turnout(problem, inclusion)

    def _ask(self, questions: Mapping[int, Packet], group: str, least: int) -> dict[int, Packet]:
        asked = self.settings
        return self.exchange.ask(
            questions, group=group, deadline=asked.deadline, at_least=least,
            patience=asked.patience,
        )  # fmt: skip

    def _question(self, place: int, kind: str, parts: Sequence[bytes] = (), **words: Any) -> Packet:
        member, federation = self.members[place], self.federation
        common = {
            "kind": kind, "run": federation.run.words, "position": place,
            "weight": float(federation.problem.clients.weights[place]), "base": member.base,
        }  # fmt: skip
        return Packet(common | words, parts)

    def _message(self, client: int, answer: Packet, like: Any, diagnostics: Any) -> Message:
        """What a client has sent; beside a hidden message it tells nothing."""
        with reading(f"client {client}"):
            payload, *rest = answer.parts
            found = channel.from_bytes(rest[0], diagnostics) if rest else _zeros(diagnostics)
            check_flag("broken", answer.words["broken"])
            not_finite = jnp.asarray(answer.words["broken"])
            return Message(channel.from_bytes(payload, like), not_finite, found)

    def _message_shapes(self) -> Message:
        shapes = self.federation.shapes
        not_finite = jax.eval_shape(lambda: jnp.asarray(False))
        return Message(shapes.up, not_finite, shapes.diagnostics)

    def _answers(
        self, questions: Mapping[int, Packet], way: channel.Channel, like: Any, group: str,
        least: int, number: int,
    ) -> dict[int, Packet]:  # fmt: skip
        """The answers; under masks, the sum of all as that of the first, the others' nothing."""
        if not isinstance(way, MaskedChannel):
            return self._ask(questions, group, least)
        places = {m.id: i for i, m in enumerate(self.members)}
        heard, total = masked_sum(
            self._ask,
            lambda client, *of, **words: self._question(places[client], *of, **words),
            questions,
            lambda part: way.numbers(channel.from_bytes(part, like)),
            run=self.federation.run.name, group=group, everybody=least == len(questions),
            threshold=max(self.federation.threshold, 0 if least == len(questions) else least),
        )  # fmt: skip
        parts = [total, *[np.zeros_like(total)] * (len(heard) - 1)]
        words = {"round": number}
        return {
            client: Packet(
                words | {"broken": False},
                [channel.to_bytes(way.with_numbers(_zeros(like), part))],
            )
            for client, part in zip(heard, parts, strict=True)
        }


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
