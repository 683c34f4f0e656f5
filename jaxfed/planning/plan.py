"""Predicts memory and messages of a run on machines that need not be present."""

import math
import re
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed import backend, channel, participation
from jaxfed._checks import check_count, check_instance, checked_dtype, refuse
from jaxfed.core.backends.backend import AXIS, Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.arguments import LOSSLESS, checked_warm_start, problem_of
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.loop import Options, protocol_of, whole_run
from jaxfed.core.run.result import Fitted
from jaxfed.core.run.runner import programs
from jaxfed.core.wire.wire import Wire
from jaxfed.planning.targets import GIB, Compiled, Target, compiled, target

_SMALLEST = 64  # clients; smaller blocks are not tried
_UNITS = {"T": 2**40, "G": GIB, "M": 2**20, "K": 2**10, "": 1}


class MemoryUse(NamedTuple):
    """Bytes on one device, by the compiler's own analysis."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """The sum of the four."""
        return sum(self)


class Plan(NamedTuple):
    """The predicted cost of a run. The compiler reports every figure, or it is a count.

    Attributes:
        topology: the devices that the plan is for.
        devices: number of devices.
        clients: clients per device, including padding.
        fits: whether the run fits into the device's memory; None if that is unknown.
        clients_per_block: of `jaxfed.backend.chunked` on each device; None for all clients at
            once. If nothing fits, the smallest size tried.
        memory: per device, as in `compiled.memory_analysis()` of the program of `jaxfed.fit`; None
            if the compiler refused the program.
        needed: bytes per device in total, even if the compiler refused the program.
        available: bytes per device, or None.
        bytes_up: of one participant's message in a round, without parts of variable length.
        bytes_down: of the server's message in a round.
        first_bytes_up: of a client's first message, before the rounds.
        first_bytes_down: of the server's answer to it.
        varies: whether messages have parts of variable length, which depend on the data.
        all_reduces: number of exchanges between devices in the program; one in a loop counts once.
        seconds: total time of all compilations.
        recomputed: what is computed more than once, and when.
        advice: what would fit, if this does not.
    """

    topology: str
    devices: int
    clients: int
    fits: bool | None
    clients_per_block: int | None
    memory: MemoryUse | None
    needed: int
    available: int | None
    bytes_up: float
    bytes_down: float
    first_bytes_up: float
    first_bytes_down: float
    varies: bool
    all_reduces: int | None
    seconds: float
    recomputed: tuple[str, ...]
    advice: str | None

    def __str__(self) -> str:
        size = self.clients_per_block
        held = "all at once" if size is None else f"chunked({size})"
        fits = {True: "fits", False: "does not fit", None: "needs this much memory"}
        room = "" if self.available is None else f" of {_size(self.available)}"
        more = " and parts of variable length" if self.varies else ""
        first = f"{_size(self.first_bytes_up)} up, {_size(self.first_bytes_down)} down"
        rows = [("memory of a device", _size(self.needed) + room)]
        if self.memory is not None:
            rows += [(f"  {name}", _size(x)) for name, x in self.memory._asdict().items()]
        rows += [
            ("a round, up", f"{_size(self.bytes_up)} a client{more}"),
            ("a round, down", f"{_size(self.bytes_down)} a client{more}"),
            ("before the rounds", first),
        ]
        if self.all_reduces is not None:
            rows.append(("all-reduces", f"{self.all_reduces} in the program"))
        rows += [("computed again", text) for text in self.recomputed or ("nothing",)]
        rows.append(("compiled in", f"{self.seconds:.0f} s; nothing ran"))
        title = (
            f"{self.topology}, {self.devices} devices with {self.clients:,} clients each, {held}: "
            f"{fits[self.fits]}"
        )
        advice = [self.advice] if self.advice else []
        return "\n".join([title, *(f"{name:<22}{text}" for name, text in rows), *advice])


def _size(count: float) -> str:
    unit, size = next(((u, n) for u, n in _UNITS.items() if count >= n), ("", 1))
    return f"{count / size:.3g} {unit + 'iB' if unit else 'B'}"


def plan(
    algorithm: Algorithm,
    clients: Clients,
    *,
    topology: str,
    rounds: int = 100,
    warm_start: Fitted | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
    participation: participation.Participation | None = None,
    backend: Backend | None = None,
    clients_per_block: int | None = None,
) -> Plan:
    """Predict what `jaxfed.fit` needs on machines that are not present, by compiling for them.

    Several devices share the clients, as with `jaxfed.backend.shard`. If a device has too little
    memory for all its clients at once, `plan` searches for a block size that fits, with one
    compilation per attempt. The next size is the largest power of two that would fit if the memory
    beyond the arguments were proportional to the number of clients in a block. Nothing is compiled
    if the arguments alone are too large.

    Args:
        algorithm: the algorithm to run.
        clients: the clients to run it on. Only shapes matter: `jax.ShapeDtypeStruct`s can replace
            arrays, as in `shapes_of`.
        topology: `"v5e:4x4"`, a slice of TPUs; `"v5e"`, one chip; `"h100"` or `"h100:8"`; `"cpu"`,
            this CPU with its own compiler.
        rounds: number of rounds.
        warm_start: as in `fit`.
        channel: as in `fit`.
        participation: as in `fit`.
        backend: how clients are mapped; None chooses as described above.
        clients_per_block: clients per block on each device; None searches for it.

    Returns:
        The plan, which you can print.

    Raises:
        ValueError: if arguments do not fit together.
        ImportError: if the compiler is missing; `pip install 'jaxfed[aot]'` installs it.
            `topology="cpu"` needs none.
    """
    check_count("rounds", rounds)
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    start = checked_warm_start(warm_start)
    if backend is not None and clients_per_block is not None:
        raise refuse("clients_per_block", "None beside a backend", clients_per_block)
    if clients_per_block is not None:
        check_count("clients_per_block", clients_per_block)
    place = target(topology)
    count = len(place.devices)
    each = -(-len(clients) // count)
    filled = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((each * count, *x.shape[1:]), x.dtype), clients
    )
    run = _Run(algorithm, filled, rounds, start, channel, participation)
    tried = [_attempt(place, run, backend or _mapped(place, clients_per_block), clients_per_block)]
    if backend is None and clients_per_block is None:
        while tried[-1].fits is False and (size := _smaller(tried[-1], place, each)):
            tried.append(_attempt(place, run, _mapped(place, size), size))
    return _reported(place, tried[-1], each, sum(x.seconds for x in tried))


def shapes_of(clients: int, samples: int, features: int, dtype: Any = jnp.float32) -> Clients:
    """Create clients without data for `plan`: each has `samples` of `features` numbers.

    Raises:
        ValueError: if a number is not a positive integer, or `dtype` is not a floating type.
    """
    for name, number in (("clients", clients), ("samples", samples), ("features", features)):
        check_count(name, number)
    shape = jax.ShapeDtypeStruct((clients, samples, features), checked_dtype("dtype", dtype))
    return jax.eval_shape(Clients.from_samples, shape)


class _Run(NamedTuple):
    """The arguments of `jaxfed.fit` to plan for."""

    algorithm: Algorithm
    clients: Clients
    rounds: int
    warm_start: Any
    channel: channel.Channel | Wire
    participation: participation.Participation | None


class _Attempt(NamedTuple):
    """A compilation, or the reason why there was none."""

    size: int | None  # clients per block; None for all at once
    fits: bool | None
    needed: int
    seconds: float
    found: Compiled | None
    costs: Any
    held: int  # the arguments' bytes per device, from their shapes


def _mapped(place: Target, size: int | None) -> Backend:
    inner = backend.vmap() if size is None else backend.chunked(size)
    return inner if len(place.devices) == 1 else backend.shard(place.mesh(), inner=inner)


def _smaller(last: _Attempt, place: Target, each: int) -> int | None:
    """The next block size to try after one that did not fit; None if none would."""
    assert place.memory is not None
    room, taken = place.memory - last.held, last.needed - last.held
    if room <= 0:
        return None
    before = last.size or each
    # Halve it at least, because a compiler that refuses a program may underestimate its need.
    size = min(before // 2, int(before * room / max(taken, 1)))
    return 2 ** int(math.log2(size)) if size >= _SMALLEST else None


def _attempt(place: Target, run: _Run, mapped: Backend, size: int | None) -> _Attempt:
    def made(algorithm, clients, key, warm_start):
        channels, participants = run.channel, run.participation
        return problem_of(
            algorithm, clients, run.rounds, key, warm_start, channels, participants, mapped
        )

    # Shapes stand in for arrays, so that nothing is computed or stored here.
    key = jax.eval_shape(lambda: jax.random.key(0))
    problem, start = jax.eval_shape(made, run.algorithm, run.clients, key, run.warm_start)
    nothing = np.zeros((), np.uint32)  # parts of variable length are not counted
    costs = protocol_of(problem, start, run.rounds).costs(nothing, nothing)
    spread = jax.sharding.NamedSharding(place.mesh(), jax.sharding.PartitionSpec(AXIS))

    def along(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), tree)

    # Spread what belongs to clients over the devices, and replicate everything else.
    problem = eqx.tree_at(lambda p: p.clients, problem, along(problem.clients))
    local = None
    if start is not None:
        local = along(start.local)
        start = start._replace(local=local)
    leaves = jax.tree.leaves((problem.clients, local))
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // len(place.devices)
    if place.memory is not None and held > place.memory:
        return _Attempt(size, False, held, 0.0, None, costs, held)
    options = Options(run.rounds, stops=False)
    program = programs(**compiler_options(run.algorithm, run.clients, place.platform))(whole_run)
    started = time.perf_counter()
    try:
        found = compiled(program, problem, start, None, options, target=place)
    except Exception as error:
        # A compiler may refuse a program that does not fit, and report what it would need.
        used = _used(str(error))
        if used is None:
            raise
        return _Attempt(size, False, used, time.perf_counter() - started, None, costs, held)
    needed = _memory(found).total
    fits = None if place.memory is None else needed <= place.memory
    return _Attempt(size, fits, needed, found.seconds, found, costs, held)


def _used(message: str) -> int | None:
    """The bytes that a program needs, from the compiler's message that it does not fit."""
    # The total, or the temporaries if they alone are too large.
    match = re.search(r"(?:Used |HLO temporaries \()([0-9.]+)([KMGT]?)", message)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def _memory(found: Compiled) -> MemoryUse:
    analysis = found.program.memory_analysis()
    return MemoryUse(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def _reported(place: Target, best: _Attempt, each: int, seconds: float) -> Plan:
    advice = None
    if best.fits is False and place.memory is not None:
        least = math.ceil(len(place.devices) * best.needed / place.memory)
        # Without a compilation, only the size of the arguments is known.
        about = "more than" if best.needed == best.held else "about"
        advice = f"{about} {least:,} such devices would hold it, or fewer samples on each"
    recomputed = ()
    if best.size is not None and best.size < each:
        recomputed = ("in reverse derivatives, each block's steps, of which only results are kept",)
    return Plan(
        topology=place.name,
        devices=len(place.devices),
        clients=each,
        fits=best.fits,
        clients_per_block=best.size,
        memory=None if best.found is None else _memory(best.found),
        needed=best.needed,
        available=place.memory,
        bytes_up=best.costs.up / 8,
        bytes_down=best.costs.down / 8,
        first_bytes_up=best.costs.first_up / 8,
        first_bytes_down=best.costs.first_down / 8,
        varies=best.costs.varies,
        all_reduces=None if best.found is None else best.found.all_reduces,
        seconds=seconds,
        recomputed=recomputed,
        advice=advice,
    )
