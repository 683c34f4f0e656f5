"""Runs clients that are read block by block; one program computes a block's part of a round.

The host iterates over the blocks and reads the next one while the device computes. Messages are
reduced block by block; clients' states stay on the host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Bool, Int, PyTree

from jaxfed.core.clients.energies import energy_of, warn_of_large
from jaxfed.core.clients.samples import SampleRows, sample_shapes
from jaxfed.core.clients.source import ClientBlock, Reader, read_ahead
from jaxfed.core.clients.states import States, rows
from jaxfed.core.common.buckets import first_of, shapes_differ
from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import combined, joined, separated
from jaxfed.core.round import client, server, whole
from jaxfed.core.round.messages import Contribution
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember, State
from jaxfed.core.round.protocol import Kind, member_shapes, protocol
from jaxfed.core.round.rounds import Collected, Engine
from jaxfed.core.run.runner import Programs

PREPARED_FOR = 1  # rounds, since a block is prepared each time it is read


@final
class Streamed(Engine):
    """Runs clients of `Clients.from_source`."""

    def __init__(self, programs: Programs):
        """Run them with these programs."""
        self._programs = programs

    def call(self, function, *arguments):
        return self._programs(function)(*arguments)

    def kinds(self, problem):
        reader = _reader(problem)
        ids = problem.clients.ids
        prepare = partial(_prepared, problem)
        return tuple(
            Kind.of(jax.eval_shape(prepare, _shapes_of(reader, rows), ids[0]), count)
            for rows, count in _sizes(reader)
        )

    def exchange(self, problem, broadcast, warm_start, state, inclusion):
        reader, room, wanted, needed = _reader(problem), None, None, True
        numbers = range(len(reader.blocks))
        firsts: list[PyTree] = [None] * len(reader.blocks)
        failed, energies = np.zeros(problem.size, bool), np.zeros(problem.size)
        if state is None:
            present = np.ones(problem.size, problem.clients.weights.dtype)
            needed = self._reads(
                problem, warm_start, lambda member: client.exchange(problem, broadcast, member)
            )
        else:
            present = np.asarray(inclusion)
            number = problem.participation.number(problem.size)
            if number is not None and number != problem.size:
                # If the round does not take place, take any clients.
                wanted = present > 0 if present.any() else np.arange(problem.size) < number
            room, numbers = self._room(problem, state, wanted)

        def work(number: int, block: ClientBlock, data: tuple) -> Collected:
            places = block.places
            if state is None and problem.algorithm.energy_weighted:
                # While the block is in memory anyway; `fit` warns of clients in memory, but would
                # have to read these for it. If first messages need no samples, these are zeros, and
                # there is no warning.
                energies[places] = energy_of(reader.kind(*jax.device_put(data)))
            members = _members(problem, block, data, warm_start)._replace(
                state=None if state is None else rows(state.clients, places),
                present=present[places],
            )
            found = self.call(_exchange, problem, broadcast, members)
            failed[places] = found.failed
            if room is None:
                # Keep them on the host, since those of all clients may not fit on the device.
                firsts[number] = jax.tree.map(np.asarray, found.kept)
            else:
                room.put(places, found.kept)
            return found

        received = self._reduced(reader, numbers, work, needed, wanted)
        if state is None:
            warn_of_large(energies, problem.clients)
        return Collected(received, firsts if room is None else room.all(), jnp.asarray(failed))

    def first_states(self, problem, warm_start, broadcast, first):
        shapes = [jax.eval_shape(first_of, each) for each in first]
        if not all(calls.alike(each, shapes[0]) for each in shapes):
            first = [None] * len(first)  # messages of several shapes differ from a round's

        def work(number: int, block: ClientBlock, data: tuple) -> PyTree:
            members = _members(problem, block, data, warm_start)
            return self.call(_first_states, problem, broadcast, members, first[number])

        like = protocol(problem, self.kinds(problem), warm_start, broadcast.downlink).client
        needed = self._reads(
            problem, warm_start, lambda member: client.first_local(problem, broadcast, member)
        )
        return self._kept(problem, like, work, needed)

    def local_results(self, problem, state, downlink):
        def model(member):
            return client.result(problem, downlink, member.state.local, member.data)

        def work(number: int, block: ClientBlock, data: tuple) -> PyTree:
            del number
            members, local = _members(problem, block, data, None), rows(state.local, block.places)
            return self.call(_results, problem, downlink, members, local)

        one = ClientState(jax.eval_shape(first_of, state.local), None)
        likes = [
            jax.eval_shape(model, member_shapes(kind, None)._replace(state=one))
            for kind in self.kinds(problem)
        ]
        if not all(calls.alike(like, likes[0]) for like in likes):
            raise shapes_differ("left")
        needed = self._reads(problem, None, model, one)
        return self._kept(problem, likes[0], work, needed)

    def text(self, problem, state):
        reader = _reader(problem)
        # Blocks of other sizes run the same function, so one block is enough.
        block = reader.blocks[0]
        inclusion, broadcast = self.call(server.call_round, problem.for_server, state.for_server)
        members = _members(problem, block, _zeros(reader, block), None)._replace(
            state=rows(state.clients, block.places), present=np.asarray(inclusion)[block.places]
        )
        return self._programs(_exchange).lower(problem, broadcast, members).as_text()

    # --- inside ------------------------------------------------------------------------------

    def _room(
        self, problem: Problem, state: State, wanted: Bool[np.ndarray, " clients"] | None
    ) -> tuple[States, Sequence[int]]:
        """Room for the states after a round, and the blocks of its participants."""
        reader, before = _reader(problem), state.clients
        # Alternate the direction, since the system still caches the blocks read last.
        numbers = range(len(reader.blocks))[:: -1 if int(state.round) % 2 == 0 else 1]
        if wanted is not None:
            numbers = [i for i in numbers if wanted[reader.blocks[i].places].any()]
        # Do not write in place: a round that diverges must restore the states before it.
        room = States(jax.eval_shape(first_of, before), problem.size, reader.states)
        # Skip blocks without participants, but carry their clients' states over.
        for other in set(range(len(reader.blocks))).difference(numbers):
            places = reader.blocks[other].places
            room.put(places, rows(before, places))
        return room, numbers

    def _each(
        self, reader: Reader, numbers: Sequence[int], work: Callable[..., Any], needed: bool
    ) -> None:
        """Run `work` on each block, and read its samples only if needed."""
        blocks = read_ahead(reader, numbers)
        if not needed:
            blocks = ((reader.blocks[n], _zeros(reader, reader.blocks[n])) for n in numbers)
        for number, (block, data) in zip(numbers, blocks, strict=True):
            # Wait, since the block after next overwrites this block's memory.
            jax.block_until_ready(work(number, block, data))

    def _reduced(
        self,
        reader: Reader,
        numbers: Sequence[int],
        work: Callable[[int, ClientBlock, tuple], Collected],
        needed: bool = True,
        wanted: Bool[np.ndarray, " clients"] | None = None,
    ) -> Contribution:
        """Run the clients of these blocks and reduce their messages.

        Args:
            reader: reads the blocks.
            numbers: the blocks.
            work: runs a block's clients.
            needed: whether `work` needs their samples.
            wanted: whose messages are gathered; all by default.
        """
        total, gathered = None, []

        def add(number: int, block: ClientBlock, data: tuple) -> PyTree:
            nonlocal total
            part, own = separated(work(number, block, data).received)
            total = part if total is None else self.call(combined, total, part)
            gathered.append(own)
            # The caller waits for these before it reuses the block's memory.
            return total, own

        self._each(reader, numbers, add, needed)
        places = np.concatenate([reader.blocks[number].places for number in numbers])
        order = np.argsort(places)
        if wanted is not None:
            order = order[wanted[places[order]]]
        # Gathered parts are in the order of the clients, not of the blocks.
        everyone = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *gathered)
        return joined(total, everyone)

    def _kept(
        self, problem: Problem, like: PyTree, work: Callable[..., PyTree], needed: bool
    ) -> PyTree:
        """Compute what all clients keep, block by block.

        Args:
            problem: the run.
            like: shapes of what one client keeps.
            work: computes it for a block's clients.
            needed: whether `work` needs their samples.
        """
        reader = _reader(problem)
        room = States(like, problem.size, reader.states)

        def put(number: int, block: ClientBlock, data: tuple) -> None:
            room.put(block.places, work(number, block, data))

        if jax.tree.leaves(like):
            self._each(reader, range(len(reader.blocks)), put, needed)
        return room.all()

    def _reads(
        self,
        problem: Problem,
        warm_start: Personalized | None,
        function: Callable[[RunMember], PyTree],
        state: ClientState | None = None,
    ) -> bool:
        """Whether a function of a client depends on its samples, found by tracing it."""
        reader = _reader(problem)
        member = member_shapes(Kind.of(None, 1), warm_start)._replace(state=state)

        def of_samples(samples: SampleRows, member: RunMember) -> PyTree:
            data = _prepared(problem, samples, member.id)
            return function(member._replace(data=data))

        def reads(rows: int) -> bool:
            samples = _shapes_of(reader, rows)
            program = jax.make_jaxpr(of_samples)(samples, member).jaxpr
            # Whether the first input, the samples' values, is still used once dead code is removed.
            return dce_jaxpr(program, [True] * len(program.outvars))[1][0]

        return any(reads(rows) for rows, _ in _sizes(reader))


# --- functions of one block, to be compiled -------------------------------------------------------


def _first_states(
    problem: Problem, broadcast: Broadcast, members: RunMember, first: PyTree
) -> ClientState:
    return whole.first_states(problem, broadcast, _ready(problem, members), first)


def _exchange(problem: Problem, broadcast: Broadcast, members: RunMember) -> Collected:
    return whole.exchange(problem, broadcast, _ready(problem, members), len(members.id))


def _results(problem: Problem, downlink: PyTree, members: RunMember, local: PyTree) -> PyTree:
    return whole.results(problem, downlink, local, _ready(problem, members).data)


def _ready(problem: Problem, members: RunMember) -> RunMember:
    """The clients with prepared data."""

    def prepare(_, own):
        return _prepared(problem, *own)

    data = problem.backend.map(prepare, None, (_reader(problem).kind(*members.data), members.id))
    return members._replace(data=data)


def _prepared(problem: Problem, samples: SampleRows, client_id: Int[Array, ""]) -> PyTree:
    return client.prepare(problem, samples, client_id, PREPARED_FOR)


# --- blocks and their clients --------------------------------------------------------------------


def _reader(problem: Problem) -> Reader:
    return problem.clients.data.reader


def _members(
    problem: Problem, block: ClientBlock, data: tuple, warm_start: Personalized | None
) -> RunMember:
    """The clients of a block, with unprepared samples."""
    clients, places = problem.clients, block.places
    local = None if warm_start is None else rows(warm_start.local, places)
    ids, weights = np.asarray(clients.ids)[places], np.asarray(clients.weights)[places]
    whose: tuple[Any, Any, Any] = ids, weights, places  # on the host
    return RunMember(data, *whose, local)


def _sizes(reader: Reader) -> list[tuple[int, int]]:
    """For each group of clients, their padded number of samples and the number of clients."""
    return [(int(reader.sizes[own].max()), len(own)) for own in reader.groups]


def _shapes_of(reader: Reader, rows: int) -> SampleRows:
    """Shapes of one client's samples."""
    return sample_shapes((rows, reader.features), reader.dtype, reader.kind)


def _zeros(reader: Reader, block: ClientBlock) -> tuple[Any, Any]:
    """Zeros in place of a block's unneeded samples; they take no memory."""
    shape = len(block.places), block.rows, reader.features
    nothing = np.broadcast_to(np.zeros((), reader.dtype), shape)
    return nothing, reader.sizes[block.places].astype(reader.dtype)
