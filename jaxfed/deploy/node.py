"""One client on its own machine: it answers the server and saves its state."""

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed._versions import versions
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.energies import energies
from jaxfed.core.clients.units import warn_of_units
from jaxfed.core.common.files import locked, replacing
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round import client
from jaxfed.core.round.messages import receive
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember, broadcast_of
from jaxfed.core.round.protocol import Kind
from jaxfed.core.run.arguments import check_sharing
from jaxfed.core.store.arrays import Content, named, rebuilt
from jaxfed.core.store.identity import Identity, check_same, digest_of
from jaxfed.core.store.saved import Saved, write
from jaxfed.core.store.series import Series
from jaxfed.core.wire import calls as wire_calls
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy import limits
from jaxfed.deploy.data import (
    check_fits,
    clients_from,
    describe,
    number_of_samples,
    pad,
    shapes_from,
)
from jaxfed.deploy.masked import NodeMasks, discard
from jaxfed.deploy.masks import least_threshold
from jaxfed.deploy.messages import NodeError, Packet, failing_as
from jaxfed.deploy.run import (
    Run,
    Weights,
    description,
    numbers_of_versions,
    problem_of_run,
    programs_for,
)
from jaxfed.deploy.shapes import run_shapes
from jaxfed.deploy.store import home_of, make_private, secret_of, states
from jaxfed.deploy.transcript import check_roster, digests_after, is_masked, transcript_of
from jaxfed.privacy.ledger import Ledger

LOG = logging.getLogger("jaxfed.deploy")
# A client in other units than the rest would clip most of its numbers, and spoil the sum of all.
MOST_CLIPPED = 0.1  # of the numbers of a message


class Node:
    """One client.

    It writes its state to disk after each round it took part in, before it sends the answer. The
    server tells it the last round whose answer arrived (`base`), and the client continues from its
    state of that round, whatever it has computed since. So lost or late answers are ignored.
    """

    def __init__(
        self,
        client_id: int,
        algorithm: Algorithm,
        clients: Clients,
        wire: Wire,
        warm_start: Personalized | None,
        folder: Path,
        weights: Weights = "equal",
        ledger: Ledger | None = None,
    ):
        """Set up the only client of `clients`, which gives no message beyond a ledger's budget.

        Raises:
            ValueError: if `clients` holds more than one.
        """
        if len(clients) != 1:
            raise ValueError(f"make_data: wanted Clients with one client, got {len(clients)}")
        warn_of_units(algorithm, clients, 'compute with precision="double"')
        self.id, self.algorithm, self.wire = client_id, algorithm, wire
        self.data, self.weights = jax.tree.map(lambda x: x[0], clients.data), clients.weights
        self.names, self.guarantee = clients.names, clients.guarantee
        self.warm_start, self.folder = warm_start, folder
        self.weighting: Weights = weights
        self.ledger = ledger
        self._home = home_of(folder, client_id)
        hidden = wire.up.private or wire.first_up.private or algorithm.private
        shows = algorithm.energy_weighted and not hidden
        energy = float(energies(clients)[0]) if shows else 0.0
        self.energy = energy if 0 < energy < np.inf else None

    def answer(self, asked: Packet) -> Packet:
        """Return the reply to a message, which names the message.

        Raises:
            NodeError: if the client cannot answer; the message names its id.
        """
        try:
            with failing_as("failed"):
                make_private(self.folder, self._home)
            # One question after another, whichever process gets them: two that arrive together must
            # not both find a round that nobody has asked for.
            with locked(self._home, "folder", private=True, wait=True), failing_as("question"):
                reply = self._reply(asked)
        except NodeError as error:
            raise NodeError(error.code, f"client {self.id}: {error}") from error
        return reply._replace(words={**reply.words, "question": asked.digest})

    def _reply(self, asked: Packet) -> Packet:
        kind = asked.words["kind"]
        if kind == "hello":
            return self._hello()
        run = _NodeRun(self, asked.words)
        if kind in ("keys", "shares", "unmask"):
            return run.masks(asked).answer(asked)
        answer = {"first": run.first, "round": run.round, "finish": run.finish}[kind]
        return answer(asked)

    def _hello(self) -> Packet:
        with failing_as("data"):
            data = describe(self.data)
        return Packet(
            {
                "kind": "hello",
                "id": self.id,
                "data": data,
                "features": None if self.names.of_views else self.names.features,
                "samples": number_of_samples(self.data),
                "energy": self.energy,
                "guarantee": self.guarantee and self.guarantee._asdict(),
                "weights": self.weights.dtype.name,
                "run": self.description,
                "versions": versions(),
                "tag": self.tag,
            }
        )

    @property
    def description(self) -> Identity:
        """What must be the same on all machines, by name."""
        return description(self.algorithm, self.wire, self.warm_start, self.weighting)

    def raw_weight(self, position: int, size: int) -> float:
        """Return the client's weight before normalization.

        Args:
            position: among the clients.
            size: how many there are.

        Raises:
            ValueError: if weights are listed for another number of clients.
        """
        if self.weighting == "equal":
            return 1.0
        if self.weighting == "samples":
            return float(number_of_samples(self.data) or 0)
        if len(self.weighting) != size:
            raise ValueError(f"weights: wanted {size} clients', got {len(self.weighting)}")
        return float(self.weighting[position])

    @cached_property
    def tag(self) -> str:
        """Tells whether data, local start and folder are the same as before, and nothing else.

        Without the machine's secret, nobody can try which data have this tag.
        """
        local = self.warm_start and self.warm_start.local
        return self.keyed("tag", describe(self.data), digest_of((self.data, local))).hexdigest()

    @property
    def sharers(self) -> int:
        """How many clients share the noise of its data."""
        return 1 if self.guarantee is None else self.guarantee.sharers

    def spend(self, way: channel.Channel, run: str) -> None:
        """Count a message through a channel, before it is computed.

        Raises:
            NodeError: if the site's limit does not allow it.
        """
        if self.sharers > 1:
            limits.claim(self._home, self.tag, run)
        # What is computed from released moments costs no more. A warm start may be of other data.
        if self.ledger is not None and (self.guarantee is None or self.warm_start is not None):
            limits.spend(self.ledger, way)

    def keyed(self, purpose: str, *words: Any) -> Any:
        """Hash words with this machine's secret, differently for each purpose."""
        text = json.dumps([purpose, *words]).encode()
        with failing_as("failed"):
            return hashlib.blake2b(text, key=secret_of(self._home), digest_size=16)


class _Before(NamedTuple):
    """Where a round begins at a client."""

    history: str  # a digest of the questions so far
    broadcasts: list[str]  # digests, under masks
    state: ClientState
    downlink: PyTree


class _NodeRun:
    """A client's part in one run."""

    def __init__(self, node: Node, words: Mapping[str, Any]):
        run = Run.read(words["run"])
        self.node, self.run = node, run
        home, folder = node.folder.resolve(), (node.folder / run.name).resolve()
        if not folder.is_relative_to(home):
            raise ValueError(f"run: wanted a folder in {home}, got {folder}")
        self.folder = folder / f"client-{node.id}"
        self._check_bound(words["base"])
        local = jax.tree.leaves(node.warm_start and node.warm_start.local)
        check_fits(node.data, run.like, [node.weights, *local], run.size)
        data = pad(node.data, getattr(shapes_from(run.like), "lengths", ()))
        self.programs = programs_for(node.algorithm, data, node.weights)
        self.server = problem_of_run(node.algorithm, node.wire, run, node.weights.dtype)
        self.problem: Problem = self.server.for_client
        client_id = jnp.asarray(node.id, jnp.int32)
        prepare = self.programs(client.prepare, static_argnums=(3,))
        self.member = RunMember(
            data=prepare(self.problem, data, client_id, run.rounds),
            id=client_id,
            weight=jnp.asarray(words["weight"], node.weights.dtype),
            position=jnp.asarray(words["position"], jnp.int32),
            warm_start=None if node.warm_start is None else node.warm_start.local,
        )
        self.store = states(self.folder)
        everybody: Personalized | None = None
        if node.warm_start is not None:
            local = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (run.size, *x.shape)), node.warm_start.local
            )
            everybody = Personalized(node.warm_start.shared, local)
        if not words["base"]:  # nothing has been computed yet
            with failing_as("check"):
                self._check(everybody)
        kind = Kind.of(self.member.data, run.size)
        self.shapes = run_shapes(self.server, kind, everybody).sent
        make_private(home, folder, self.folder)
        if not self._bound.exists():
            with replacing(self._bound, private=True) as part:
                part.write_text(json.dumps(self._identity()), "utf8")

    @property
    def _bound(self) -> Path:
        """Holds what this run began with."""
        return self.folder / "run.json"

    def _check_bound(self, base: int) -> None:
        """Refuse a run that began with something else.

        Raises:
            NodeError: if it did, or the folder in which it began is gone.
        """
        if self._bound.exists():
            saved = json.loads(self._bound.read_text("utf8"))
            with failing_as("changed"):
                check_same("folder", self.folder, "run", saved, self._identity())
        elif base:
            raise self._lost(base)

    def _identity(self) -> Identity:
        """What must stay the same as long as this run lasts."""
        node, run = self.node, self.run
        return {
            **node.description,
            **numbers_of_versions(),
            "rounds": [str(run.rounds), ""],
            "key": ["", digest_of(run.key)],
            "data": ["", node.tag],
        }

    def _lost(self, base: int) -> NodeError:
        words = f"its state of round {base} is not in {self.folder}; an update was lost"
        return NodeError("lost", words)

    def _check(self, warm_start: Personalized | None) -> None:
        """Refuse data, or a warm start of the client's own, that the algorithm cannot use.

        Raises:
            ValueError: as in `fit`.
        """
        node = self.node
        node.algorithm.check(self._clients, warm_start)
        # One of weight zero would count in a masked sum, and add no noise to it.
        least = 1.0 if isinstance(node.weighting, str) else min(node.weighting)
        weights = np.full(self.run.size, least)
        with failing_as("limit"):
            check_sharing(node.guarantee, node.algorithm, node.wire, weights)

    @property
    def _clients(self) -> Clients:
        """All clients, as far as this one knows them: each as its own."""
        size = self.run.size
        counts = [number_of_samples(self.node.data)] * size
        ids = jnp.arange(size, dtype=jnp.int32)
        weights = jnp.broadcast_to(self.member.weight, size)
        return clients_from(self.run.like, ids, weights, counts)

    def first(self, asked: Packet) -> Packet:
        """Return the message before the rounds."""
        way, store, question = self.node.wire.first_up, states(self.folder / "first"), asked.core
        saved = self._answered(way, store, 0, question.digest)
        if saved is None:
            if jax.tree.leaves(self.shapes.firsts[0].payload):
                self.node.spend(way, self.run.name)
            problem = self._noisy(self.problem.wire.first_up, question.digest)
            broadcast = self._broadcast(problem, 0)
            first, known = self.programs(client.exchange)(problem, broadcast, self.member)
            words = {"kind": "first", "id": self.node.id, "broken": bool(first.not_finite)}
            reply = Packet(words, [channel.to_bytes(first.payload)])
            header = {"question": question.digest, "broadcasts": []}
            saved = self._keep(store, 0, named("first", known), reply, **header)
        return self._masked(way, self.shapes.firsts[0].payload, saved, asked)

    def round(self, asked: Packet) -> Packet:
        """Compute one round."""
        number, base, question = asked.words["round"], asked.words["base"], asked.core
        way = self.node.wire.up
        saved = self._answered(way, self.store, number, question.digest)
        if saved is None:
            history, broadcasts, state, downlink = self._state(base, question)
            # Noise is derived from everything that the message depends on: the same noise on two
            # different messages would reveal their difference.
            both = json.dumps([history, question.digest])
            history = hashlib.sha256(both.encode()).hexdigest()
            self.node.spend(way, self.run.name)
            problem = self._noisy(self.problem.wire.up, history)
            broadcast = self._broadcast(problem, number, downlink)
            member = self.member._replace(state=state)
            message, after = self.programs(client.exchange)(problem, broadcast, member)
            words = {"kind": "round", "id": self.node.id, "broken": bool(message.not_finite)}
            parts = [channel.to_bytes(message.payload)]
            if not self.problem.hides:  # an objective may reveal as much as the hidden message
                parts.append(channel.to_bytes(message.diagnostics))
            reply = Packet(words, parts)
            kept = named("state", (after, self._last(downlink)))
            header = {"question": question.digest, "history": history, "broadcasts": broadcasts}
            saved = self._keep(self.store, number, kept, reply, **header)
            # Keep the state of round `base`, from which the server asks again if this answer is
            # lost.
            self.store.remove_before(base)
        return self._masked(way, self.shapes.up, saved, asked)

    def _answered(
        self, way: channel.Channel, store: Series, number: int, question: str
    ) -> Content | None:
        """Return what was saved of a round if this was its question: servers may ask again.

        Raises:
            NodeError: if the channel hides messages, and the round had another question: two
                messages of a round reveal more than one.
        """
        saved = store.load(number)
        if saved is not None and saved.header["question"] == question:
            return saved
        hidden = way.private or self.node.algorithm.private
        if hidden and max(store.numbers(), default=-1) >= number:
            raise NodeError("asked", f"round {number}: it had another question")
        return None

    def _keep(
        self, store: Series, number: int, kept: dict[str, Any], reply: Packet, **header: Any
    ) -> Content:
        """Save what a round leaves, with its reply before masks, before anything is sent."""
        header["head"] = reply.head
        arrays = kept | {"reply": np.frombuffer(reply.body, np.uint8)}
        store.save(number, header, arrays)
        return Content(header, arrays)

    def finish(self, asked: Packet) -> Packet:
        """Save the client's model, which stays on this machine."""
        *broadcasts, end = asked.parts
        _, _, state, _ = self._state(asked.words["base"], asked._replace(parts=broadcasts))
        downlink = channel.from_bytes(end, self.shapes.downlink)
        model = self.programs(client.result)(self.problem, downlink, state.local, self.member.data)
        result = Personalized(None, jax.tree.map(lambda x: x[None], model))
        rounds = asked.words["rounds"]
        name, ids = repr(self.node.algorithm), np.asarray([self.node.id])
        saved = Saved(
            result, {}, rounds, "round_limit", name, 1, versions(), ids=ids, names=self.node.names
        )
        write(self.folder / "result.npz", saved, private=True)
        discard(self.folder / "masks")
        return Packet({"kind": "finish", "id": self.node.id})

    # --- masks and noise -----------------------------------------------------------------------

    def masks(self, asked: Packet) -> NodeMasks:
        """Return the client's part in the masked round that a question belongs to."""
        ways = self.node.wire.up, self.node.wire.first_up
        # A server may name any size, in any question.
        with failing_as("check"):
            for way in ways:
                wire_calls.check(way, self._clients, self.run.size, ())
        sharers = max(self.node.sharers, *map(wire_calls.sharers, ways))
        least = max(least_threshold(self.run.size), sharers)
        attempt = asked.words["attempt"]
        return NodeMasks(self.folder / "masks", self.node.id, self.run.name, attempt, least)

    def _masked(self, way: channel.Channel, like: PyTree, saved: Content, asked: Packet) -> Packet:
        """Return the saved reply, under the masks of an attempt if the channel hides it so."""
        reply = Packet.read(saved.header["head"], saved.arrays["reply"].tobytes())
        if not isinstance(way, MaskedChannel) or not jax.tree.leaves(like):
            return reply
        payload = channel.from_bytes(reply.parts[0], like)
        # Only this machine's log says how many: the server would learn more than the sum.
        if (clipped := way.clipped(payload)) and not reply.words["broken"]:
            numbers = len(way.numbers(payload))
            if clipped > MOST_CLIPPED * numbers:
                words = f"masks: {clipped} of {numbers} numbers exceed the channel's bound"
                raise NodeError("bound", words)
            LOG.warning(
                "masks: client %d clipped %d of %d numbers of its message; choose a larger bound",
                self.node.id,
                clipped,
                numbers,
            )
        roster, weight = asked.words["roster"], float(self.member.weight)
        position = int(self.member.position)
        check_roster(roster, self.node.id, position, weight, self.node.raw_weight)
        transcript = transcript_of(asked.words["run"], roster, saved.header["broadcasts"])
        hidden = self.masks(asked).masked(way, payload, asked, transcript)
        return reply._replace(parts=[channel.to_bytes(hidden)])

    def _noisy(self, way: channel.Channel, history: str) -> Problem:
        """Return the problem, with a secret key if noise is drawn from it."""
        if way.noise() is None and not self.node.algorithm.private:
            return self.problem
        # The server knows all questions, and could compute the noise without the secret. Eight
        # bytes are a Threefry key.
        seed = self.node.keyed("noise", history).digest()[:8]
        key = jax.random.wrap_key_data(jnp.frombuffer(seed, jnp.uint32), impl="threefry2x32")
        return eqx.tree_at(lambda problem: problem.key, self.problem, key)

    def _state(self, base: int, asked: Packet) -> "_Before":
        """Return where a round begins, from what was saved after round `base`."""
        history, state, downlink = "", None, None
        broadcasts: list[str] = []
        if base:
            saved = self.store.load(base)
            if saved is None:
                raise self._lost(base)
            like = self.shapes.client, self._last(self.shapes.downlink)
            state, downlink = rebuilt("state", saved.arrays, like)
            history, broadcasts = saved.header["history"], saved.header["broadcasts"]
        forms, missed = asked.words["broadcasts"], asked.words.get("missed", ())
        if is_masked(self.node.wire):
            broadcasts = digests_after(broadcasts, forms, asked.parts, missed)
        for form, part in zip(forms, asked.parts, strict=True):
            downlink = self._received(form, part, downlink)
            # The first downlink makes the initial state; a late client gets the whole current one
            # in its place.
            if state is None:
                state = self._first_state(downlink)
        if state is None:
            raise ValueError("broadcasts: wanted the first downlink before all others, got none")
        return _Before(history, broadcasts, state, downlink)

    def _received(self, form: str, part: bytes, last: PyTree) -> PyTree:
        if form == "whole":
            return jax.tree.map(jnp.asarray, channel.from_bytes(part, self.shapes.downlink))
        if form == "first":
            payload = channel.from_bytes(part, self.shapes.first_down)
            return self.programs(receive)(self.problem.wire.first_down, payload, None)
        payload = channel.from_bytes(part, self.shapes.down)
        return self.programs(receive)(self.problem.wire.down, payload, self._last(last))

    def _last(self, downlink: PyTree) -> PyTree:
        """Return the previous downlink if the next one depends on it."""
        return downlink if self.problem.wire.down.cumulative else None

    def _broadcast(self, problem: Problem, number: int, downlink: PyTree = None) -> Broadcast:
        warm_start = None if number else self.node.warm_start
        return self.programs(broadcast_of)(problem, number, downlink, warm_start)

    def _first_state(self, downlink: PyTree) -> ClientState:
        first = None
        if self.problem.wire.up.cumulative and jax.tree.leaves(self.shapes.firsts[0].payload):
            saved = states(self.folder / "first").load(0)
            if saved is None:  # the server has it, and differences start from it
                raise self._lost(0)
            first = rebuilt("first", saved.arrays, self.shapes.firsts[0].decoded)
        broadcast = self._broadcast(self.problem, 0, downlink)
        return self.programs(client.first_state)(self.problem, broadcast, self.member, first)
