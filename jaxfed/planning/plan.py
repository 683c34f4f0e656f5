"""What a run takes on machines that nobody has rented yet: memory, messages, whether it fits."""

import math
import re
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxfed import backend, channel, participation
from jaxfed.core.backends.backend import AXIS, Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import check_count, check_instance, checked_dtype, refuse
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.arguments import LOSSLESS, checked_start, problem_of
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.loop import Options, prepare
from jaxfed.core.run.runner import programs, whole_run
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.wire import Wire
from jaxfed.planning.targets import GIB, Compiled, Target, compiled, target

_SMALLEST = 64  # clients in a block, below which nothing is tried
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


class Memory(NamedTuple):
    """Bytes on one device, as the compiler's own analysis gives them."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Plan(NamedTuple):
    """What a run takes. Every figure is a compiler's or a count: nothing ran.

    Attributes:
        topology: what was planned for.
        devices: how many there are.
        clients: how many of them one device holds, with those that only fill it up.
        fits: whether it does; None where the device's memory is not known.
        chunk_size: of `jaxfed.backend.chunked` on each device; None: all its clients at once. If
            nothing fits, the smallest that was tried.
        memory: of one device, as `compiled.memory_analysis()` of the program of `jaxfed.fit` has
            it; None where the compiler refused it.
        needed: bytes of one device in all, also where the compiler refused.
        available: bytes that one device has, or None.
        bytes_up: of one participant's message, a round; parts of variable length come on top.
        bytes_down: of the server's, a round.
        first_bytes_up: of a client's first message, before the rounds.
        first_bytes_down: of the server's answer to that.
        varies: whether there are parts of variable length, which only the data tell.
        all_reduces: exchanges between devices in the program; those in the rounds' loop count once.
        seconds: compiling took here, all attempts together.
        recomputed: what is computed more than once, and when.
        advice: what would fit, where this does not.
    """

    topology: str
    devices: int
    clients: int
    fits: bool | None
    chunk_size: int | None
    memory: Memory | None
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
        held = "all at once" if self.chunk_size is None else f"chunked({self.chunk_size})"
        fits = {True: "fits", False: "does not fit", None: "fits where there is as much memory"}
        lines = [
            f"{self.topology}, {self.devices} devices with {self.clients:,} clients each, {held}: "
            f"{fits[self.fits]}",
            f"memory of a device    {_size(self.needed)}"
            + ("" if self.available is None else f" of {_size(self.available)}"),
        ]
        if self.memory is not None:
            lines += [f"  {name:<20}{_size(x)}" for name, x in self.memory._asdict().items()]
        more = " and parts of variable length" if self.varies else ""
        lines += [
            f"a round, up           {_size(self.bytes_up)} a client{more}",
            f"a round, down         {_size(self.bytes_down)} a client{more}",
            f"before the rounds     {_size(self.first_bytes_up)} up, "
            f"{_size(self.first_bytes_down)} down",
        ]
        if self.all_reduces is not None:
            lines.append(f"all-reduces           {self.all_reduces} in the program")
        lines += [f"computed again        {text}" for text in self.recomputed or ("nothing",)]
        lines.append(f"compiled in           {self.seconds:.0f} s; nothing ran")
        if self.advice:
            lines.append(self.advice)
        return "\n".join(lines)


def _size(count: float) -> str:
    unit = next((u for u in ("T", "G", "M", "K") if count >= _UNITS[u]), "")
    return f"{count / _UNITS[unit]:.3g} {unit + 'iB' if unit else 'B'}"


def plan(
    algorithm: Algorithm,
    clients: Clients,
    *,
    topology: str,
    rounds: int = 100,
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
    participation: participation.Participation | None = None,
    backend: Backend | None = None,
    chunk_size: int | None = None,
) -> Plan:
    """Compile the program of `jaxfed.fit` for machines that are not here, and say what it takes.

    Several devices share the clients, as by `jaxfed.backend.shard`; where all clients of a device
    at once are too many, blocks are found that fit. Each attempt is a compilation, and the next
    takes a power of two of clients for which there would be room if what the last one needed
    beyond its arguments were as much for each client. Nothing is compiled where
    arguments alone are more than a device has.

    Args:
        algorithm: what would run.
        clients: whom it would run on; only shapes count, so that `jax.ShapeDtypeStruct`s do in
            place of arrays, as `shapes_of` makes them.
        topology: `"v5e:4x4"`, a slice of TPUs; `"v5e"`, one chip; `"h100"` or `"h100:8"`; `"cpu"`,
            this processor by its own compiler.
        rounds: how many.
        warm_start: as of `fit`.
        channel: as of `fit`.
        participation: as of `fit`.
        backend: how clients are mapped; None chooses as described above.
        chunk_size: clients in a block on each device, if it is not to be found.

    Returns:
        The plan; `print` shows it.

    Raises:
        ValueError: for arguments that do not fit together.
        ImportError: without the compiler, which `pip install 'jaxfed[aot]'` installs;
            `topology="cpu"` needs none.
    """
    check_count("rounds", rounds)
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    checked_start(warm_start)
    if backend is not None:
        check_instance("backend", backend, Backend, "one of jaxfed.backend")
        if chunk_size is not None:
            raise refuse("chunk_size", "None beside a backend", chunk_size)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)
    place = target(topology)
    count = len(place.devices)
    each = -(-len(clients) // count)
    clients = _filled(clients, each * count)

    def attempt(size: int | None) -> _Attempt:
        mapped = _mapped(place, size) if backend is None else backend
        return _attempt(
            place, mapped, size, algorithm, clients, rounds, warm_start, channel, participation
        )

    if backend is not None or chunk_size is not None:
        tried = [attempt(chunk_size)]
    else:
        tried = [attempt(None)]
        while tried[-1].fits is False and (size := _smaller(tried[-1], place, each)):
            tried.append(attempt(size))
    return _reported(place, tried[-1], each, sum(x.seconds for x in tried))


def shapes_of(clients: int, samples: int, features: int, dtype: Any = jnp.float32) -> Clients:
    """Clients without data, for `plan`: `samples` of `features` numbers each.

    Raises:
        ValueError: for numbers that are not positive and whole, and what is no floating type.
    """
    for name, number in (("clients", clients), ("samples", samples), ("features", features)):
        check_count(name, number)
    shape = jax.ShapeDtypeStruct((clients, samples, features), checked_dtype("dtype", dtype))
    return jax.eval_shape(Clients.from_samples, shape)


def _smaller(last: "_Attempt", place: Target, each: int) -> int | None:
    """How many clients to take in a block after so many were too many; None if that is hopeless."""
    assert place.memory is not None
    room, taken = place.memory - last.held, last.needed - last.held
    if room <= 0:
        return None
    before = last.size or each
    # At most half, since what was refused may have been counted short.
    size = min(before // 2, int(before * room / max(taken, 1)))
    return 2 ** int(math.log2(size)) if size >= _SMALLEST else None


# --- one compilation ------------------------------------------------------------------------------


class _Attempt(NamedTuple):
    size: int | None
    fits: bool | None
    needed: int
    seconds: float
    found: Compiled | None
    costs: Any
    held: int  # the arguments' bytes on a device, from their shapes


def _mapped(place: Target, size: int | None) -> Backend:
    inner = backend.vmap() if size is None else backend.chunked(size)
    return inner if len(place.devices) == 1 else backend.shard(place.mesh(), inner=inner)


def _filled(clients: Clients, count: int) -> Clients:
    """Shapes of so many clients."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), clients)


def _attempt(
    place: Target, mapped: Backend, size: int | None, algorithm: Algorithm, clients: Clients,
    rounds: int, warm_start: Any, channels: channel.Channel | Wire, participants: Any,
) -> _Attempt:  # fmt: skip
    def made(algorithm, clients, key, warm_start):
        return problem_of(
            algorithm, clients, rounds, key, warm_start, channels, participants, mapped
        )

    key = jax.eval_shape(lambda: jax.random.key(0))
    problem, start = jax.eval_shape(made, algorithm, clients, key, warm_start)
    costs = jax.eval_shape(lambda *given: prepare(given[0], given[1], rounds)[2], problem, start)
    mesh = place.mesh()
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def along(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), tree)

    problem = eqx.tree_at(lambda p: p.clients, problem, along(problem.clients))
    if start is not None:
        start = start._replace(local=along(start.local))
    options = Options(rounds, stops=False)
    run = programs(**compiler_options(algorithm, clients, place.platform))(whole_run)
    local = None if start is None else start.local
    held = sum(map(_bytes, jax.tree.leaves((problem.clients, local)))) // len(place.devices)
    if place.memory is not None and held > place.memory:
        return _Attempt(size, False, held, 0.0, None, costs, held)
    begun = time.perf_counter()
    try:
        found = compiled(run, problem, start, None, options, target=place)
    except Exception as error:
        used = _used(str(error))
        if used is None:
            raise
        return _Attempt(size, False, used, time.perf_counter() - begun, None, costs, held)
    needed = _memory(found).total
    fits = None if place.memory is None else needed <= place.memory
    return _Attempt(size, fits, needed, found.seconds, found, costs, held)


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _used(message: str) -> int | None:
    """The bytes that a compiler says it would have needed."""
    # All of it, or, where these alone are too much, its temporaries.
    match = re.search(r"(?:Used |HLO temporaries \()([0-9.]+)([KMGT]?)", message)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def _memory(found: Compiled) -> Memory:
    analysis = found.program.memory_analysis()
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def _reported(place: Target, best: _Attempt, each: int, seconds: float) -> Plan:
    advice = None
    if best.fits is False and place.memory is not None:
        least = math.ceil(len(place.devices) * best.needed / place.memory)
        # What was not compiled is known by its arguments alone.
        about = "more than" if best.needed == best.held else "about"
        advice = f"{about} {least:,} such devices would hold it, or fewer samples on each"
    recomputed = ()
    if best.size is not None and best.size < each:
        recomputed = ("in a reverse derivative, the steps of each block: only results are kept",)
    return Plan(
        topology=place.name,
        devices=len(place.devices),
        clients=each,
        fits=best.fits,
        chunk_size=best.size,
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
