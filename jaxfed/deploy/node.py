"""One client on its own machine: it answers the server and saves its state."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxfed._versions import versions
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import SampleRows
from jaxfed.core.common.files import replacing
from jaxfed.core.common.printing import in_bytes
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round import client
from jaxfed.core.round.problem import (
    Broadcast,
    ClientState,
    Problem,
    RunMember,
    before_rounds,
    for_round,
)
from jaxfed.core.round.shapes import Kind
from jaxfed.core.store.arrays import named, rebuilt
from jaxfed.core.store.saved import Saved, write
from jaxfed.core.wire import channel
from jaxfed.core.wire.masks import MaskedChannel
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy.data import check_pads, clients_from, describe, pad, shapes_from
from jaxfed.deploy.masked import NodeMasks
from jaxfed.deploy.masks import KEY
from jaxfed.deploy.messages import Packet
from jaxfed.deploy.run import Run, description, problem_of_run, programs_for
from jaxfed.deploy.shapes import run_shapes
from jaxfed.deploy.store import states

LOG = logging.getLogger("jaxfed.deploy")
# This machine's memory in bytes; unknown on Windows.
MEMORY = (
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
)


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
    ):
        """Set up the only client of `clients`.

        Raises:
            ValueError: if `clients` holds more than one.
        """
        if len(clients) != 1:
            raise ValueError(f"make_data: wanted Clients with one client, got {len(clients)}")
        self.id, self.algorithm, self.wire = client_id, algorithm, wire
        self.data, self.weights = jax.tree.map(lambda x: x[0], clients.data), clients.weights
        self.warm_start, self.folder = warm_start, folder

    def answer(self, asked: Packet) -> Packet:
        """Return the reply to a message.

        Raises:
            ValueError: if the client cannot answer; the message names its id.
        """
        try:
            kind = asked.words["kind"]
            if kind == "hello":
                return self._hello()
            run = _NodeRun(self, asked.words)
            if kind in ("keys", "shares", "unmask"):
                return run.masks(asked).answer(asked)
            return {"first": run.first, "round": run.round, "finish": run.finish}[kind](asked)
        except (ValueError, KeyError) as error:
            raise ValueError(f"client {self.id}: {error}") from error

    def _hello(self) -> Packet:
        return Packet(
            {
                "kind": "hello",
                "id": self.id,
                "data": describe(self.data),
                "samples": _number_of_samples(self.data),
                "weights": self.weights.dtype.name,
                "run": description(self.algorithm, self.wire, self.warm_start),
                "versions": versions(),
            }
        )


class _NodeRun:
    """A client's part in one run."""

    def __init__(self, node: Node, words: Mapping[str, Any]):
        run = Run.read(words["run"])
        self.node, self.run = node, run
        home, folder = node.folder.resolve(), (node.folder / run.name).resolve()
        if not folder.is_relative_to(home):
            raise ValueError(f"run: wanted a folder in {home}, got {folder}")
        self.folder = folder / f"client-{node.id}"
        self._check_size()
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
            self._check(everybody)
        self.shapes = run_shapes(self.server, Kind.of(self.member.data, run.size), everybody)
        for place in (home, folder, self.folder):  # nobody else may read the client's states
            place.mkdir(0o700, parents=True, exist_ok=True)

    def _check_size(self) -> None:
        """Check the shapes that the server announces before allocating memory.

        Raises:
            ValueError: if the client's data cannot be padded to them, or they exceed this machine's
                memory.
        """
        node, run = self.node, self.run
        check_pads(node.data, run.like)
        each = [
            node.weights,
            np.int32(0),
            *jax.tree.leaves(node.warm_start and node.warm_start.local),
        ]
        data = jax.tree.leaves(shapes_from(run.like))
        parts = [(run.size, x) for x in each] + [(1, x) for x in data]
        needed = sum(number * x.size * x.dtype.itemsize for number, x in parts)
        if needed > MEMORY:
            raise ValueError(
                f"run: wanted data and clients of at most {in_bytes(MEMORY)}, which this machine "
                f"has, got {in_bytes(needed)}"
            )

    def _check(self, warm_start: Personalized | None) -> None:
        """Refuse data, or a warm start of the client's own, that the algorithm cannot use.

        Raises:
            ValueError: as in `fit`.
        """
        size, data, weight = self.run.size, self.node.data, self.member.weight
        counts = [_number_of_samples(data)] * size
        ids, weights = jnp.arange(size, dtype=jnp.int32), jnp.broadcast_to(weight, size)
        self.node.algorithm.check(clients_from(self.run.like, ids, weights, counts), warm_start)

    def first(self, asked: Packet) -> Packet:
        """Return the message before the rounds."""
        problem = self._noisy(self.problem.first_uplink, _digest(asked.head, asked.body.hex()))
        broadcast = self._before_rounds(problem)
        first = self.programs(client.first_message)(problem, broadcast, self.member)
        payload, _ = self._masked(self.node.wire.first_up, first.payload, asked)
        known = first.decoded if self.problem.uplink.cumulative else None
        states(self.folder / "first").save(0, {}, named("first", known))
        words = {"kind": "first", "id": self.node.id, "broken": bool(first.not_finite)}
        return Packet(words, [channel.to_bytes(payload)])

    def round(self, asked: Packet) -> Packet:
        """Compute one round."""
        number, base = asked.words["round"], asked.words["base"]
        question = _digest(asked.head, asked.body.hex())
        # An interrupted server asks again and gets the same answer.
        saved = self.store.load(number)
        if saved is not None and saved.header["question"] == question:
            return Packet.read(saved.header["head"], saved.arrays["reply"].tobytes())
        broadcasts = asked.parts[: len(asked.words["broadcasts"])]
        before, state, downlink = self._state(base, asked._replace(parts=broadcasts))
        done = jnp.asarray(number - 1, jnp.int32)
        # Noise is derived from everything that the message depends on: the same noise on two
        # different messages would reveal their difference.
        history = _digest(before, question)
        problem = self._noisy(self.problem.uplink, history)
        broadcast = self.programs(for_round)(problem, done, downlink)
        member = self.member._replace(state=state)
        message, after = self.programs(client.step)(problem, broadcast, member)
        words = {"kind": "round", "id": self.node.id, "round": number}
        words["broken"] = bool(message.not_finite)
        payload, hidden = self._masked(self.node.wire.up, message.payload, asked)
        parts = [channel.to_bytes(payload)]
        if not hidden:  # an objective may reveal as much as the hidden message
            parts.append(channel.to_bytes(message.diagnostics))
        reply = Packet(words, parts)
        self.store.save(
            number,
            {"question": question, "history": history, "head": reply.head},
            named("state", (after, self._last(downlink)))
            | {"reply": np.frombuffer(reply.body, np.uint8)},
        )
        # Keep the state of round `base`, from which the server asks again if this answer is lost.
        self.store.remove_before(base)
        return reply

    def finish(self, asked: Packet) -> Packet:
        """Save the client's model, which stays on this machine."""
        *broadcasts, end = asked.parts
        _, state, _ = self._state(asked.words["base"], asked._replace(parts=broadcasts))
        downlink = channel.from_bytes(end, self.shapes.end)
        model = self.programs(client.result)(self.problem, downlink, state.local, self.member.data)
        result = Personalized(None, jax.tree.map(lambda x: x[None], model))
        rounds = asked.words["rounds"]
        name, ids = repr(self.node.algorithm), np.asarray([self.node.id])
        saved = Saved(result, {}, rounds, "round_limit", name, 1, versions(), ids=ids)
        write(self.folder / "result.npz", saved, private=True)
        return Packet({"kind": "finish", "id": self.node.id})

    # --- masks and noise -----------------------------------------------------------------------

    def masks(self, asked: Packet) -> NodeMasks:
        """Return the client's part in the masked round that a question belongs to."""
        folder, attempt = self.folder / "masks", asked.words["attempt"]
        return NodeMasks(folder, self.node.id, self.run.name, attempt)

    def _masked(self, way: channel.Channel, payload: PyTree, asked: Packet) -> tuple[PyTree, bool]:
        """Return what is sent, and whether the channel hides it."""
        if not isinstance(way, MaskedChannel):
            return payload, way.private
        # Only this machine's log says so: the server would learn more than the sum.
        if clipped := way.clipped(payload):
            LOG.warning(
                "masks: client %d clipped %d of %d numbers of its message to the channel's bound",
                self.node.id,
                clipped,
                len(way.numbers(payload)),
            )
        givers = asked.words["givers"]
        encrypted = asked.parts[-len(givers) :]
        return self.masks(asked).masked(way, payload, givers, encrypted), True

    def _noisy(self, way: channel.Channel, history: str) -> Problem:
        """Return the problem, with a secret key if the channel draws noise from it."""
        if way.noise() is None:
            return self.problem
        key = _secret_key(self.folder, history)
        return eqx.tree_at(lambda problem: problem.key, self.problem, key)

    def _state(self, base: int, asked: Packet) -> tuple[str, ClientState, PyTree]:
        """Return a digest of the questions so far, the state after a round, and its downlink."""
        history, state, downlink = "", None, None
        if base:
            saved = self.store.load(base)
            if saved is None:
                raise ValueError(
                    f"its state of round {base} is not in {self.folder}; an update was lost: give "
                    "this machine the folder it had, or start a new run"
                )
            like = self.shapes.client, self._last(self.shapes.downlink)
            state, downlink = rebuilt("state", saved.arrays, like)
            history = saved.header["history"]
        for form, part in zip(asked.words["broadcasts"], asked.parts, strict=True):
            downlink = self._received(form, part, downlink)
            # The first downlink makes the initial state; a late client gets the whole current one
            # in its place.
            if state is None:
                state = self._first_state(downlink)
        if state is None:
            raise ValueError("broadcasts: wanted the first downlink before all others, got none")
        return history, state, downlink

    def _received(self, form: str, part: bytes, last: PyTree) -> PyTree:
        if form == "whole":
            return jax.tree.map(jnp.asarray, channel.from_bytes(part, self.shapes.downlink))
        if form == "first":
            payload = channel.from_bytes(part, self.shapes.first_down)
            return self.programs(client.receive_first)(self.problem, payload)
        payload = channel.from_bytes(part, self.shapes.down)
        return self.programs(client.receive)(self.problem, payload, self._last(last))

    def _last(self, downlink: PyTree) -> PyTree:
        """Return the previous downlink if the next one depends on it."""
        return downlink if self.problem.downlink.cumulative else None

    def _before_rounds(self, problem: Problem, downlink: PyTree = None) -> Broadcast:
        return self.programs(before_rounds)(problem, self.node.warm_start, downlink)

    def _first_state(self, downlink: PyTree) -> ClientState:
        first = None
        saved = states(self.folder / "first").load(0)
        if saved is not None and self.problem.uplink.cumulative:
            first = rebuilt("first", saved.arrays, self.shapes.decoded)
        broadcast = self._before_rounds(self.problem, downlink)
        return self.programs(client.first_state)(self.problem, broadcast, self.member, first)


def _secret_key(folder: Path, history: str) -> Key[Array, ""]:
    """Derive a random key from a secret of this machine, different for each history."""
    path = folder / "secret"
    if not path.exists():
        with replacing(path, private=True) as part:
            part.write_bytes(os.urandom(KEY))
    # Keyed by the secret: the server knows all questions, and could otherwise compute the noise.
    # Eight bytes are a Threefry key.
    seed = hashlib.blake2b(history.encode(), key=path.read_bytes(), digest_size=8).digest()
    return jax.random.wrap_key_data(jnp.frombuffer(seed, jnp.uint32), impl="threefry2x32")


def _number_of_samples(data: PyTree) -> int | None:
    return int(data.count) if isinstance(data, SampleRows) else None


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
