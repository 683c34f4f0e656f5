"""Runs on clients that are read block by block: the functions of a round, one block at a time.

The host goes through the blocks, and the next one is read while the device works on one. What
clients send is reduced block by block, what they keep lies with the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from jaxfed.core.clients.energies import warn_of_large
from jaxfed.core.clients.samples import Samples
from jaxfed.core.clients.source import Block, Reader, States, read_ahead, rows
from jaxfed.core.common.buckets import first_of, unlike
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import combined, joined, separated
from jaxfed.core.round.ends import Opening, opened, remembers_first, server_round
from jaxfed.core.round.problem import Costs, Problem, State, blank, zeros_of
from jaxfed.core.round.rounds import announced, begun, shapes_of, stepped, turn_of, with_clients
from jaxfed.core.run.loop import Metrics, Options, evaluated, finish, with_bits
from jaxfed.core.run.solution import Solution


class Streamed:
    """The programs of a run, like those on clients in memory."""

    def __init__(self, **options: bool | int):
        """Compile with these options."""
        jit = partial(jax.jit, compiler_options=options)
        self._announced, self._opened, self._initial = map(jit, (_announced, _opened, _initial))
        self._turn, self._stepped, self._served = map(jit, (turn_of, _stepped, server_round))
        self._combined, self._modelled = map(jit, (combined, _modelled))

    def run(
        self, problem: Problem, start: Personalized | None, tol: Any, options: Options
    ) -> Solution:
        """A whole run."""
        problem, state, costs = self.prepare(problem, start, options.rounds)
        state, history = self.advance(problem, state, tol, options)
        history = {name: values[: int(state.round)] for name, values in history.items()}
        history = with_bits(history, jax.tree.map(np.asarray, costs), problem.size, np)
        return self.finish(problem, state, costs, history, tol)

    def prepare(
        self, problem: Problem, start: Personalized | None, rounds: int
    ) -> tuple[Problem, State, Costs]:
        """What there is before the first round.

        Raises:
            ValueError: if states or messages have shapes that depend on the number of samples.
        """
        del rounds  # what is prepared serves once
        reader, blocks = _reader(problem), _reader(problem).blocks
        local_start = None if start is None else start.local
        shared_start = None if start is None else start._replace(local=None)
        each = [_one(problem, block, local_start) for block in _kinds(reader)]
        first: list[PyTree] = []
        broken = np.zeros(problem.size, bool)
        energies = np.zeros(problem.size)

        def announce(block, data):
            if problem.algorithm.energy_weighted:
                values, counts = data
                energies[block.places] = np.einsum("mnd,mnd->m", values, values) / counts
            own = (data, *_whose(problem, block), block.places, rows(local_start, block.places))
            return self._announced(problem, shared_start, own)

        def remember(block, kept):
            broken[block.places] = kept[1]
            if problem.uplink.cumulative:
                first.append(jax.tree.map(np.asarray, kept[0]))

        needed = any(_reads(partial(_first_message, problem, start), *one) for one in each)
        heard = self._over(reader, range(len(blocks)), announce, remember, needed)
        warn_of_large(energies, problem.clients)
        opening = self._opened(problem, start, heard)

        begin_one = partial(_client_init, problem, start, opening.downlink)
        locals_ = [jax.eval_shape(begin_one, *one) for one in each]
        _check_alike("kept", locals_)

        def begin(block, data):
            own = data, _whose(problem, block)[0], rows(local_start, block.places)
            return None, self._initial(problem, shared_start, opening.downlink, own)

        needed = any(_reads(begin_one, *one) for one in each)
        local = self._kept(problem, locals_[0], begin, needed)

        prepared = [jax.eval_shape(partial(_prepared, problem), *one[:2]) for one in each]
        kinds = zip(prepared, locals_, (one[2] for one in each), strict=True)
        times = [len(own) for own in reader.groups]
        shapes = shapes_of(problem, shared_start, opening.downlink, list(kinds), times)
        ones = [jax.eval_shape(first_of, message) for message in first]
        remembered = bool(ones) and all(
            remembers_first(problem, one, shapes.uplink) for one in ones
        )
        nothing = problem.uplink.memory(zeros_of(shapes.uplink))
        sender = States(nothing, problem.size, reader.states)
        for number, block in enumerate(blocks):
            own = jax.vmap(problem.uplink.memory)(first[number]) if remembered else nothing
            sender.put(block.places, own)
        state, costs = with_clients(
            problem, opening, shapes, remembered, (local, sender.all()), jnp.asarray(broken)
        )
        return problem, state, costs

    def advance(
        self, problem: Problem, state: State, tol: Any, options: Options
    ) -> tuple[State, dict[str, np.ndarray]]:
        """So many more rounds, with their history."""
        records: list[dict[str, np.ndarray]] = []
        while len(records) < options.rounds:
            # One round in any case, even of a run whose first messages are not finite: it says
            # what the history has.
            met = options.stops and float(state.measure) <= tol
            if records and (met or int(state.failure.round)):
                break
            state, record = self._round(problem, state)
            if options.metrics is not None:
                record |= self._measured(
                    problem, state, record, options.metrics, options.metrics_every
                )
            records.append(jax.tree.map(np.asarray, record))
        none = {k: np.asarray(blank((), x.dtype)) for k, x in records[0].items()}
        records += [none] * (options.rounds - len(records))
        return state, {name: np.stack([one[name] for one in records]) for name in none}

    def finish(
        self, problem: Problem, state: State, costs: Costs, history: dict[str, Any], tol: Any
    ) -> Solution:
        """What a run returns, from its last state."""
        return finish(problem, state, costs, history, tol, self._models(problem, state))

    def lower(self, problem: Problem, state: State, tol: Any, options: Options) -> Any:
        """The program of a block's steps, for what it says."""
        del tol, options
        (inclusion, shared), block = self._turn(problem, _bare(state)), _reader(problem).blocks[0]
        data = _zeros(_reader(problem), block)
        own = _own(problem, state, np.asarray(inclusion), block, data)
        return self._stepped.lower(problem, shared, own)

    # --- inside ------------------------------------------------------------------------------

    def _over(
        self, reader: Reader, numbers: Sequence[int], work: Callable[[Block, Any], tuple],
        keep: Callable[[Block, PyTree], None], needed: bool = True, wanted: Any = None,
    ) -> PyTree:  # fmt: skip
        """What the clients of blocks send, reduced; what they keep is handed over.

        Args:
            reader: reads them.
            numbers: of the blocks.
            work: what clients of a block with its data send, reduced, and what they keep.
            keep: takes what the clients of a block keep.
            needed: whether their samples count; if not, they are not read.
            wanted: whose messages are gathered, by place; everybody's by default.
        """
        blocks = read_ahead(reader, numbers)
        if not needed:
            blocks = ((reader.blocks[n], _zeros(reader, reader.blocks[n])) for n in numbers)
        total, gathered, places = None, [], []
        for block, data in blocks:
            sent, kept = work(block, data)
            part, own = separated(sent)
            total = part if total is None else self._combined(total, part)
            # The block after the next is read to where these data lie.
            jax.block_until_ready((total, kept, own))
            keep(block, kept)
            gathered.append(own)
            places.append(block.places)
        found = np.concatenate(places)
        order = np.argsort(found)
        if wanted is not None:
            order = order[wanted[found[order]]]
        everyone = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *gathered)
        return joined(total, everyone)

    def _kept(
        self, problem: Problem, like: PyTree, work: Callable[[Block, Any], tuple], needed: bool
    ) -> PyTree:
        """What the clients of all blocks keep, of shapes that are known."""
        reader = _reader(problem)
        room = States(like, problem.size, reader.states)
        if jax.tree.leaves(like):
            numbers = range(len(reader.blocks))
            self._over(reader, numbers, work, lambda block, x: room.put(block.places, x), needed)
        return room.all()

    def _round(self, problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
        reader, bare = _reader(problem), _bare(state)
        inclusion, shared = self._turn(problem, bare)
        present = np.asarray(inclusion)
        # There and back again: what was read last is what the system still has in its cache.
        numbers, wanted = range(len(reader.blocks))[:: 1 if int(state.round) % 2 else -1], None
        number = problem.participation.number(problem.size)
        if number is not None and number != problem.size:
            # In a round that does not take place anybody will do.
            wanted = present > 0 if present.any() else np.arange(problem.size) < number
            numbers = [i for i in numbers if wanted[reader.blocks[i].places].any()]
        before = state.local, state.uplink.sender
        room = States(jax.eval_shape(first_of, before), problem.size, reader.states)
        for other in set(range(len(reader.blocks))).difference(numbers):
            places = reader.blocks[other].places
            room.put(places, rows(before, places))
        troubled = np.zeros((2, problem.size), bool)

        def work(block, data):
            return self._stepped(problem, shared, _own(problem, state, present, block, data))

        def keep(block, kept):
            room.put(block.places, kept[0])
            troubled[:, block.places] = np.stack(kept[1])

        heard = self._over(reader, numbers, work, keep, wanted=wanted)
        failed = jnp.asarray(troubled.any(axis=0))
        after, record = self._served(problem, bare, inclusion, heard, failed)
        local, sender = room.all()
        return replace(after, local=local, uplink=replace(after.uplink, sender=sender)), record

    def _models(self, problem: Problem, state: State) -> Personalized:
        """The models at this state."""
        downlink = problem.algorithm.downlink(state.server)
        each = [_one(problem, block, state.local) for block in _kinds(_reader(problem))]
        model = partial(_client_result, problem, downlink)
        likes = [jax.eval_shape(model, *one) for one in each]
        _check_alike("left", likes)

        def work(block, data):
            own = data, _whose(problem, block)[0], rows(state.local, block.places)
            return None, self._modelled(problem, downlink, own)

        needed = any(_reads(model, *one) for one in each)
        local = self._kept(problem, likes[0], work, needed)
        return Personalized(problem.algorithm.shared_result(state.server), local)

    def _measured(
        self, problem: Problem, state: State, record: dict[str, Array], metrics: Metrics, every: int
    ) -> dict[str, Array]:
        """The requested metrics after a round, or that there are none."""
        if int(state.round) % every == 0:
            values = evaluated(metrics, self._models(problem, state))
        else:
            one = _one(problem, _reader(problem).blocks[0], state.local)
            downlink = problem.algorithm.downlink(state.server)
            like = jax.eval_shape(partial(_client_result, problem, downlink), *one)
            local = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype), like
            )
            shared = jax.eval_shape(problem.algorithm.shared_result, state.server)
            shapes = jax.eval_shape(partial(evaluated, metrics), Personalized(shared, local))
            values = {name: blank((), x.dtype) for name, x in shapes.items()}
        if taken := values.keys() & {*record, "bits_up", "bits_down"}:
            raise ValueError(f"metrics: {sorted(taken)} are names of the run's own history")
        return values


@cache
def streamed(**options: bool | int) -> Streamed:
    """The programs with these compiler options, the same ones each time."""
    return Streamed(**options)


def _reader(problem: Problem) -> Reader:
    return problem.clients.data.reader


def _bare(state: State) -> State:
    """Without what clients keep."""
    return replace(state, local=None, uplink=replace(state.uplink, sender=None))


def _check_alike(what: str, shapes: Sequence[PyTree]) -> None:
    if not all(contract.alike(one, shapes[0]) for one in shapes):
        raise unlike(what)


# --- a block -------------------------------------------------------------------------------------


def _whose(problem: Problem, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the weights of a block's clients."""
    clients = problem.clients
    return np.asarray(clients.ids)[block.places], np.asarray(clients.weights)[block.places]


def _own(problem: Problem, state: State, present: np.ndarray, block: Block, data: Any) -> PyTree:
    """What a block's clients have in a round."""
    places = block.places
    before = rows((state.local, state.uplink.sender), places)
    return data, *before, *_whose(problem, block), places, present[places]


def _prepared_all(problem: Problem, data: Any, ids: Array) -> PyTree:
    return problem.backend.map(lambda _, own: _prepared(problem, *own), None, (Samples(*data), ids))


def _announced(problem: Problem, start: Personalized | None, own: PyTree) -> PyTree:
    data, ids, *others = own
    own = (_prepared_all(problem, data, ids), ids, *others)
    return announced(problem, start, own, len(ids))


def _initial(problem: Problem, start: Personalized | None, downlink: PyTree, own: PyTree) -> PyTree:
    data, ids, local_start = own
    return begun(problem, start, downlink, (_prepared_all(problem, data, ids), ids, local_start))


def _stepped(problem: Problem, shared: PyTree, own: PyTree) -> PyTree:
    data, local, memory, ids, *others = own
    own = (_prepared_all(problem, data, ids), local, memory, ids, *others)
    return stepped(problem, shared, own, len(ids))


def _modelled(problem: Problem, downlink: PyTree, own: PyTree) -> PyTree:
    return problem.backend.map(
        lambda downlink, own: _client_result(problem, downlink, Samples(*own[0]), *own[1:]),
        downlink, own,
    )  # fmt: skip


def _opened(problem: Problem, start: Personalized | None, heard: PyTree) -> Opening:
    data, client_id, _ = _one(problem, _reader(problem).blocks[0], None)
    like = jax.eval_shape(partial(_prepared, problem), data, client_id)
    return opened(problem, heard, like, start)


# --- one client ----------------------------------------------------------------------------------


def _prepared(problem: Problem, data: Samples, client_id: Array) -> PyTree:
    return problem.algorithm.prepare(data, client_id, 1)


def _first_message(problem, start, data, client_id, local_start):
    begun = None if start is None else Personalized(start.shared, local_start)
    return problem.algorithm.first_message(problem.key, _prepared(problem, data, client_id), begun)


def _client_init(problem, start, downlink, data, client_id, local_start):
    begun = None if start is None else Personalized(start.shared, local_start)
    return contract.arrays_of(
        problem.algorithm, "client_init",
        problem.algorithm.client_init(
            problem.key, downlink, _prepared(problem, data, client_id), begun
        ),
    )  # fmt: skip


def _client_result(problem, downlink, data, client_id, local):
    return problem.algorithm.client_result(downlink, local, _prepared(problem, data, client_id))


def _kinds(reader: Reader) -> list[Block]:
    """The first block of each number of rows."""
    return list({block.rows: block for block in reversed(reader.blocks)}.values())[::-1]


def _one(problem: Problem, block: Block, kept: PyTree) -> tuple[Samples, Any, PyTree]:
    """Shapes and types of one client's samples, id and what is kept of it, in a block."""
    reader = _reader(problem)
    values = jax.ShapeDtypeStruct((block.rows, reader.features), reader.dtype)
    samples = Samples(values, jax.ShapeDtypeStruct((), reader.dtype))  # pyright: ignore
    client_id = jax.ShapeDtypeStruct((), problem.clients.ids.dtype)
    return samples, client_id, jax.eval_shape(first_of, kept)


def _zeros(reader: Reader, block: Block) -> tuple[Any, Any]:
    """In place of a block's samples, where they do not count: of their shape, in no memory."""
    shape = len(block.places), block.rows, reader.features
    nothing = np.broadcast_to(np.zeros((), reader.dtype), shape)
    return nothing, reader.sizes[block.places].astype(reader.dtype)


def _reads(function: Callable[..., PyTree], *given: PyTree) -> bool:
    """Whether a function's result depends on its first argument's first array."""
    program = jax.make_jaxpr(function)(*given).jaxpr
    needed = {x for x in program.outvars if not isinstance(x, Literal)}
    for equation in reversed(program.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return program.invars[0] in needed
