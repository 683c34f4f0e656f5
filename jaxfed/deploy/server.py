"""The server on its own machine: rounds with whoever answers, and a state that outlives it."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed._versions import versions
from jaxfed.core.common.checks import check_count, check_flag, checked_dtype
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Costs, State
from jaxfed.core.run import apart, steps
from jaxfed.core.run.loop import with_bits
from jaxfed.core.store.saved import Saved, write
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.deploy.data import common, shaped
from jaxfed.deploy.exchange import Exchange, RefusedError, reading
from jaxfed.deploy.federation import Federation, Member, Settings, longer
from jaxfed.deploy.masked import masked_sum, means_of, over_survivors
from jaxfed.deploy.progress import Progress
from jaxfed.deploy.run import Run, description
from jaxfed.deploy.store import Store
from jaxfed.deploy.wire import Packet

LOG = logging.getLogger("jaxfed.deploy")


class Server:
    """One run."""

    run: Run
    state: State
    costs: Costs
    dtype: str  # of weights
    federation: Federation

    def __init__(self, settings: Settings, exchange: Exchange):
        """Begin, or go on where an interrupted server has saved its last round."""
        self.settings, self.exchange = settings, exchange
        self.store = Store(settings.out / "server")
        self.members: list[Member] = []
        self.records: list[dict[str, np.ndarray]] = []
        self.present: list[list[int]] = []  # ids, by round
        self.payloads: dict[int, bytes] = {}  # broadcasts that somebody may miss, by round
        exchange.accept = self._accept
        if not self._resume():
            exchange.gather(settings.clients, settings.patience)
            self._open()
            self._save()

    def solve(self) -> Saved:
        """All rounds, then everybody's own models; what was learned is in `out` too.

        Raises:
            RefusedError: if clients do not fit together, or one answers with an error.
            TimeoutError: if too few clients answer.
            FloatingPointError: if the run diverges; what there was before is saved.
        """
        while int(self.state.round) < self.settings.rounds and not self._converged():
            self._round()
            self._save()
            objective = float(self.records[-1]["objective"])
            LOG.info(
                "round %d of %d: %d clients%s",
                self.state.round, self.settings.rounds, len(self.present[-1]),
                "" if np.isnan(objective) else f", objective {objective:.6g}",
            )  # fmt: skip
        return self._finish()

    def _converged(self) -> bool:
        return self.settings.tol is not None and bool(self.state.measure <= self.settings.tol)

    # --- who takes part ------------------------------------------------------------------------

    def _accept(self, said: Mapping[str, Any]) -> None:
        """Refuse a client that does not fit the run.

        Raises:
            ValueError: naming what does not, a `RefusedError` where the client is named too.
        """
        client, asked = said["id"], self.settings
        shaped(said["data"])
        checked_dtype("weights", said["weights"])
        if said["samples"] is not None:
            check_count("samples", said["samples"])
        for name, value in description(asked.algorithm, asked.wire, asked.start).items():
            if said["run"][name] != value:
                raise RefusedError(
                    f"{name}: wanted at client {client} the server's, {value}, got "
                    f"{said['run'][name]}"
                )
        for name, number in versions().items():
            if said["versions"].get(name) != number:
                LOG.warning(
                    "client %d has %s %s, the server %s: numbers may differ in their last digits",
                    client, name, said["versions"].get(name), number,
                )  # fmt: skip
        if any(member.id == client for member in self.members):
            wanted = self.run.like
            if common({-1: wanted, client: said["data"]}) != wanted:
                raise RefusedError(f"data: client {client} has more than it had at the start")

    def _members(self, clients: Sequence[int], *, late: bool) -> list[Member]:
        """These clients, who come after those that there are."""
        return [
            Member(c, self._raw_weight(c, i), late, 0, self.exchange.hello[c]["samples"])
            for i, c in enumerate(clients, len(self.members))
        ]

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

    def _with(self, run: Run, members: list[Member]) -> None:
        """Go on with these members."""
        self.federation = Federation(self.settings, run, self.dtype, members)
        self.run, self.members = self.federation.run, members

    def _welcome(self) -> None:
        """Take in clients that were not there before, where that can be done."""
        known = {member.id for member in self.members}
        new = [client for client in self.exchange.clients() if client not in known]
        if not new:
            return
        try:
            uplink = self.federation.problem.uplink
            if uplink.cumulative or uplink.private:
                raise ValueError("its channel wants all clients from the start")
            self.settings.participants.check(len(self.members) + len(new))
            data = {-1: self.run.like} | {c: self.exchange.hello[c]["data"] for c in new}
            members = [*self.members, *self._members(new, late=True)]
            run = self.run._replace(like=common(data))
            federation = Federation(self.settings, run, self.dtype, members)
            self.state = longer(self.state, federation.shapes.state)
        except (ValueError, IndexError) as error:
            LOG.warning("clients %s cannot join this run: %s", new, error)
            return
        self.federation, self.run, self.members = federation, federation.run, members
        LOG.info("clients %s join", new)

    # --- questions -----------------------------------------------------------------------------

    def _ask(self, questions: Mapping[int, Packet], group: str, least: int) -> dict[int, Packet]:
        asked = self.settings
        return self.exchange.ask(
            questions, group=group, deadline=asked.deadline, at_least=least,
            patience=asked.patience,
        )  # fmt: skip

    def _question(self, place: int, kind: str, parts: Sequence[bytes] = (), **words: Any) -> Packet:
        member = self.members[place]
        own = {
            "kind": kind, "run": self.run.words, "position": place,
            "weight": float(self.federation.problem.clients.weights[place]), "base": member.base,
        }  # fmt: skip
        return Packet(own | words, parts)

    def _said(self, client: int, answer: Packet, like: Any, told: Any) -> steps.Said:
        """What a client has said; beside a hidden message it tells nothing."""
        with reading(f"client {client}"):
            payload, *rest = answer.parts
            diagnostics = channel.from_bytes(rest[0], told) if rest else _zeros(told)
            check_flag("broken", answer.words["broken"])
            broken = jnp.asarray(answer.words["broken"])
            return steps.Said(channel.from_bytes(payload, like), diagnostics, broken)

    def _hears(
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
            run=self.run.name, group=group, everybody=least == len(questions),
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

    def _downlinks(
        self, member: Member, *, begin_only: bool = False
    ) -> tuple[list[str], list[bytes]]:
        """What a client must be sent to have the downlink that now holds."""
        last = int(self.state.round)  # the broadcast after this round
        current = self.state.downlink.receiver
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

    # --- the run -------------------------------------------------------------------------------

    def _open(self) -> None:
        """The first messages, and what the server makes of them."""
        asked, clients = self.settings, self.exchange.clients()
        said = self.exchange.hello
        self.dtype = said[clients[0]]["weights"]
        like = common({client: said[client]["data"] for client in clients})
        # No two runs share a name, or states on a client's disk.
        run = Run(secrets.token_hex(8), asked.rounds, len(clients), like, asked.key)
        self._with(run, self._members(clients, late=False))
        federation = self.federation
        federation.check()
        heard: list[steps.Said | None] = []
        if jax.tree.leaves(federation.shapes.first):
            questions = {c: self._question(i, "first") for i, c in enumerate(clients)}
            answers = self._hears(
                questions, asked.wire.first_up, federation.shapes.first, "first messages",
                len(clients), 0,
            )  # fmt: skip
            heard += [
                self._said(client, answers[client], federation.shapes.first, None)
                for client in clients
            ]
        else:
            heard += [steps.Said(federation.shapes.first, None, jnp.asarray(False))] * len(clients)
        opened = apart.opened(
            federation.made, federation.problem, steps.heard(heard),
            steps.Like.of(federation.like), asked.start,
        )  # fmt: skip
        self.state, self.costs = opened.state, opened.costs
        self.payloads = {0: channel.to_bytes(opened.payload)}
        self._check_sound()

    def _round(self) -> None:
        """One round, with those who answer in time."""
        self._welcome()
        federation = self.federation
        asked, number = self.settings, int(self.state.round) + 1
        inclusion = federation.made.inclusion(apart.of_server(federation.planned), self.state.round)
        planned = np.asarray(inclusion)
        questions = {}
        for place in np.flatnonzero(planned > 0).tolist():
            member = self.members[place]
            forms, parts = self._downlinks(member)
            questions[member.id] = self._question(
                place, "round", parts, round=number, broadcasts=forms
            )
        least = len(questions) if asked.at_least is None else asked.at_least
        answers = self._hears(
            questions, asked.wire.up, federation.shapes.up, f"round {number}",
            min(least, len(questions)), number,
        )  # fmt: skip
        for client, answer in answers.items():
            if answer.words.get("round") != number:
                raise RefusedError(
                    f"client {client}: wanted its answer of round {number}, got that of round "
                    f"{answer.words.get('round')}"
                )
        shapes = federation.shapes
        said = [
            self._said(m.id, answers[m.id], shapes.up, shapes.diagnostics)
            if m.id in answers
            else None
            for m in self.members
        ]
        problem = federation.problem
        if asked.deadline is not None:
            problem = federation.heard_from(np.asarray([one is not None for one in said]))
            inclusion = federation.made.inclusion(apart.of_server(problem), self.state.round)
        if isinstance(asked.wire.up, MaskedChannel) and len(answers) < len(self.members):
            there = sum(float(problem.clients.weights[i]) for i, one in enumerate(said) if one)
            factor, means = jnp.asarray(1 / there), means_of(federation.shapes.uplink)
            problem = replace(problem, uplink=over_survivors(problem.uplink, factor, means))
        after, record, payload = apart.served(
            federation.made, problem, self.state, steps.heard(said), inclusion
        )
        if asked.wire.up.private:
            # What clients have not told is not zero; what the server itself measures stays.
            hidden = {k for k in federation.shapes.diagnostics if not np.any(record[k])}
            record = record | {k: jnp.full_like(record[k], jnp.nan) for k in hidden}
        link = replace(after.uplink, channel=federation.problem.uplink)
        self.state = replace(after, uplink=link)
        self._check_sound()
        self.records.append(jax.tree.map(np.asarray, record))
        self.present.append(sorted(answers))
        self.members = [m._replace(base=number) if m.id in answers else m for m in self.members]
        self.payloads[number] = channel.to_bytes(payload)
        oldest = min((m.base for m in self.members), default=0)
        needed = max(oldest, 1) if federation.problem.downlink.cumulative else number
        self.payloads = {k: v for k, v in self.payloads.items() if not k or k >= needed}

    def _check_sound(self) -> None:
        failure = self.state.failure
        if int(failure.round):
            clients = [self.members[i].id for i in np.flatnonzero(failure.clients)]
            raise FloatingPointError(
                "an objective or a message is not finite in round "
                f"{int(failure.round)}, at clients {clients}; a smaller step size or smaller data "
                f"may help; what there was before is in {self.store.folder}"
            )

    def _finish(self) -> Saved:
        """Everybody's own model, on their machines, and the shared one here."""
        made, problem = self.federation.made, self.federation.problem
        shared, downlink = made.ended(apart.of_server(problem), self.state)
        end, questions = channel.to_bytes(downlink), {}
        number = int(self.state.round)
        there = self.exchange.clients()
        for place, member in enumerate(self.members):
            forms, parts = self._downlinks(member, begin_only=True)
            if member.id in there:
                questions[member.id] = self._question(
                    place, "finish", [*parts, end], rounds=number, broadcasts=forms
                )
        answers = self._ask(questions, "results", 0 if self.settings.deadline else len(questions))
        missing = [m.id for m in self.members if m.id not in answers]
        if missing:
            LOG.warning("clients %s were not there to make their own models", missing)
        status = "converged" if self._converged() else "round_limit"
        saved = Saved(
            Personalized(shared, None), self._history(), number, status,
            repr(self.settings.algorithm), len(self.members), versions(),
        )  # fmt: skip
        write(self.settings.out / "solution.npz", saved)
        return saved

    def _history(self) -> dict[str, np.ndarray]:
        history = {k: np.stack([x[k] for x in self.records]) for k in self.records[0]}
        if self.settings.wire.up.private:  # what clients have told in no round is none
            told = self.federation.shapes.diagnostics
            history = {k: x for k, x in history.items() if k not in told or not np.isnan(x).all()}
        costs = jax.tree.map(np.asarray, self.costs)
        history = with_bits(history, costs, len(self.members), np)
        history["present"] = np.asarray(
            [[m.id in present for m in self.members] for present in self.present]
        )
        return history

    # --- what outlives it ----------------------------------------------------------------------

    def _save(self) -> None:
        progress = Progress(
            self.run, self.dtype, self.members, self.state, self.costs, self.payloads,
            self.records, self.present,
        )  # fmt: skip
        progress.save(self.store, self._description())

    def _description(self) -> dict[str, str]:
        asked = self.settings
        known = description(asked.algorithm, asked.wire, asked.start)
        return known | {
            "participation": repr(asked.participants), "rounds": str(asked.rounds),
            "deadline": str(asked.deadline is not None),
        }  # fmt: skip

    def _resume(self) -> bool:
        """Whether there was something to go on from."""
        found = Progress.load(self.store, self._description(), self._shapes_with)
        if found is None:
            return False
        self.state, self.costs, self.payloads = found.state, found.costs, found.payloads
        self.records, self.present = found.records, found.present
        LOG.info("goes on after round %d", self.state.round)
        return True

    def _shapes_with(self, run: Run, dtype: str, members: list[Member]) -> State:
        self.dtype = dtype
        self._with(run, members)
        return self.federation.shapes.state


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
