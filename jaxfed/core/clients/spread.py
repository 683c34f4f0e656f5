"""Clients of several processes, on the devices of the process that has their data.

All devices hold blocks of equally many rows. Copies of a process's clients, with weight 0, pad its
blocks.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree, Shaped

from jaxfed._checks import LARGEST, checked_weights, host_array, refuse
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.layout import InMemory, check_leading
from jaxfed.core.clients.names import Names, together
from jaxfed.core.clients.samples import known_counts
from jaxfed.core.common.processes import attempted, exchanged, is_here


class ClientRows(NamedTuple):
    """Which rows of the arrays are clients: one block per device, each padded to the same length.

    Attributes:
        blocks: number of clients per device.
        length: rows per block.
    """

    blocks: tuple[int, ...]
    length: int

    @property
    def numbers(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; the number of clients for padding."""
        first = np.cumsum((0, *self.blocks))
        row = np.arange(self.length)
        parts = [
            np.where(row < size, begin + row, first[-1])
            for begin, size in zip(first, self.blocks, strict=False)
        ]
        return np.concatenate(parts).astype(np.int32)

    @property
    def real(self) -> Bool[np.ndarray, " rows"]:
        """Whether a row is a client."""
        return self.numbers < sum(self.blocks)


@final
@dataclass(frozen=True)
class Spread(InMemory):
    """Arrays whose rows are on the devices of the process that has the client."""

    data: PyTree
    blocks: tuple[int, ...]  # number of clients per device
    length: int
    in_one_process = False

    @property
    def _rows(self) -> ClientRows:
        return ClientRows(self.blocks, self.length // len(self.blocks))

    def take(self, indices):
        raise ValueError("take: wanted clients of one process, got those of several")

    @property
    def numbers(self):
        return self._rows.numbers

    def rows(self, clients):
        real = self._rows.real
        # A slice moves no data between devices.
        return slice(clients) if real.all() else jnp.asarray(np.flatnonzero(real))

    def with_all_rows(self, tree, clients):
        # A warm start of such clients is a result of theirs, which has padding already.
        return tree

    def without_more_rows(self, tree, clients):
        return tree  # so that each process keeps its own rows

    def in_rows(self, values):
        real = np.flatnonzero(self._rows.real)
        return jnp.zeros(self.length, values.dtype).at[real].set(values)

    def own_rows(self, array):
        check_leading(array, self.length)
        like, real, block = jax.tree.leaves(self.data)[0], self._rows.real, self._rows.length
        # A set, since devices along the mesh's other axes hold the same block; a single block has
        # no start.
        starts = sorted({shard.index[0].start or 0 for shard in like.addressable_shards})
        mine = [start + np.flatnonzero(real[start : start + block]) for start in starts]
        if not isinstance(array, jax.Array) or is_here(array):
            return np.asarray(array)[np.concatenate(mine)]
        # Users' functions may return another sharding; all processes then redistribute the array
        # together.
        along = NamedSharding(like.sharding.mesh, PartitionSpec(like.sharding.spec[0]))
        if not array.sharding.is_equivalent_to(along, array.ndim):
            array = jax.device_put(array, along)
        parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate(
            [
                np.asarray(parts[start])[rows - start]
                for start, rows in zip(starts, mine, strict=True)
            ]
        )

    def check_backend(self, backend):
        wanted = backend.sharding
        fits = wanted is not None and backend.multiple == len(self.blocks)
        for leaf in jax.tree.leaves(self.data):
            if fits and not isinstance(leaf, Tracer):
                fits = leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        if not fits:
            raise ValueError(
                "backend: wanted the one that the clients were made with, by default shard(), "
                f"since they lie on {len(self.blocks)} devices, got {backend!r}"
            )


class AllClients(NamedTuple):
    """The arrays of all processes' clients.

    Attributes:
        data: leading axis = rows, each process's on its own devices.
        ids: the same in all processes.
        weights: the same in all processes; 0 for padding.
        blocks: number of clients per device.
        names: the clients' names, without padding.
    """

    data: PyTree
    ids: Int[Array, " rows"]
    weights: Float[Array, " rows"]
    blocks: tuple[int, ...]
    names: Names


def spread(
    own: Any,
    check: Callable[[], None],
    sharding: NamedSharding,
    ids: Sequence[int] | None,
    weights: Literal["equal", "samples"] | ArrayLike | Sequence[float],
) -> AllClients:
    """Distribute the clients of all processes; each process keeps the data of its own.

    Processes exchange only ids, names, weights and shapes.

    Args:
        own: this process's clients.
        check: refuses what are no clients.
        sharding: of the leading axis.
        ids: ids of this process's clients; None to number all clients.
        weights: `"equal"`, `"samples"`, or the weights of this process's clients, on any scale.

    Raises:
        ValueError: if a process refuses its clients, or the processes' clients do not match.
    """
    places = owners(sharding)

    def described() -> dict[str, Any]:
        check()
        clients = own
        if is_traced(clients.ids) or not clients.layout.in_one_process:
            raise refuse("own", "clients of this process alone, not traced", clients)
        if not clients.layout.in_memory or len(clients.parts) > 1:
            raise refuse("own", "clients whose samples are in one array, without buckets", clients)
        if any(np.shape(x)[:1] != (len(clients),) for x in jax.tree.leaves(clients.data)):
            raise refuse("own", "clients in arrays with a row for each, without buckets", clients)
        return {
            "ids": len(clients) if ids is None else _checked_ids(ids, len(clients)).tolist(),
            "weights": _raw_weights(weights, clients).tolist(),
            "lengths": list(getattr(clients.data, "lengths", ())),
            "names": clients.names,
        }

    everybody = attempted("own", described)
    if missing := set(range(len(everybody))) - set(places):
        raise ValueError(f"backend: wanted devices of every process, got none of {sorted(missing)}")
    data = own.data
    if lengths := everybody[0]["lengths"]:
        # The number of lengths may differ; `_compare` refuses such data below.
        each = zip(*(one["lengths"] for one in everybody), strict=False)
        lengths = tuple(max(sizes) for sizes in each)
        data = data.filled(lengths) if len(data.lengths) == len(lengths) else data
    _compare(data)

    raw = [np.asarray(one["weights"], float) for one in everybody]
    total = sum(each.sum() for each in raw)
    if not total > 0:
        raise ValueError("weights: wanted some above zero, got only zeros in all processes")
    layout = ClientRows(*_blocks(places, list(map(len, raw))))
    numbers = _in_rows(_all_ids(everybody), places, layout).astype(np.int32)
    # Padding rows are copies and would have their clients' weights.
    shares = _in_rows([each / total for each in raw], places, layout) * layout.real
    return AllClients(
        jax.tree.map(lambda leaf: _on_devices(leaf, places, layout, sharding), data),
        _replicated(numbers, sharding),
        _replicated(shares.astype(own.weights.dtype), sharding),
        layout.blocks,
        together([Names.of_lists(*one["names"]) for one in everybody], "own"),
    )


def _checked_ids(ids: Any, clients: int) -> np.ndarray:
    wanted = f"{clients} whole numbers from 0 to {LARGEST}, one per client"
    found = host_array("ids", ids, wanted)
    if found.dtype.kind not in "iu" or found.shape != (clients,):
        raise refuse("ids", wanted, ids)
    if found.min() < 0 or found.max() > LARGEST:
        raise refuse("ids", wanted, found.tolist())
    return found


def _raw_weights(weights: Any, clients: Any) -> np.ndarray:
    """This process's clients' weights, on a scale common to all processes."""
    count = len(clients)
    if not isinstance(weights, str):
        return checked_weights(weights, count)
    if weights == "equal":
        if np.ptp(np.asarray(clients.weights)) > 1e-5 / count:
            wanted = "numbers on a scale common to all processes, since the weights in own differ"
            raise refuse("weights", wanted, weights)
        return np.ones(count)
    counts = known_counts(clients.data)
    if weights != "samples" or counts is None:
        known = "'equal', 'samples' or numbers" if counts is not None else "'equal' or numbers"
        raise refuse("weights", known, weights)
    return counts


def _all_ids(everybody: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """Each process's ids; consecutive numbers if none are given."""
    given = [one["ids"] for one in everybody]
    if all(isinstance(each, int) for each in given):
        first = np.cumsum([0, *given])
        return [begin + np.arange(count) for begin, count in zip(first, given, strict=False)]
    for place, each in enumerate(given):
        if isinstance(each, int):
            raise ValueError(f"ids: wanted them from all processes or none, got none from {place}")
    return [np.asarray(each) for each in given]


def _compare(data: PyTree) -> None:
    """Refuse processes whose clients' data differ in kind, shape or type."""
    leaves, structure = jax.tree.flatten(data)
    shapes = ", ".join(f"{leaf.dtype}{leaf.shape[1:]}" for leaf in leaves)
    # The text of a structure is long, so show only its type and compare a digest.
    digest = hashlib.sha256(str(structure).encode()).hexdigest()[:8]
    own = f"{type(data).__name__} {digest} of {shapes} a client"

    for place, other in enumerate(exchanged(own)):
        if other != own:
            raise ValueError(
                "own: wanted clients whose data are alike in every process, up to padding, "
                f"got {own} here and {other} in process {place}"
            )


def owners(sharding: NamedSharding) -> list[int]:
    """The process that owns each block.

    Raises:
        ValueError: if several processes own the same block.
    """
    axis = str(sharding.spec[0])
    devices = np.moveaxis(
        np.asarray(sharding.mesh.devices), sharding.mesh.axis_names.index(axis), 0
    )
    blocks = devices.reshape(len(devices), -1)
    found = [{device.process_index for device in block} for block in blocks]
    for each in found:
        if len(each) > 1:
            raise ValueError(
                f"backend: wanted a mesh whose axis {axis!r} lies across processes and whose other "
                f"axes lie within them, got one in which {sorted(each)} would have the same clients"
            )
    return [each.pop() for each in found]


def _blocks(places: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The number of clients per device, and the length of a block."""
    length = max(-(-count // places.count(owner)) for owner, count in enumerate(counts))
    # Fill one device of a process after another; the last ones may have fewer clients, or none.
    blocks, left = [], list(counts)
    for owner in places:
        blocks.append(min(length, left[owner]))
        left[owner] -= blocks[-1]
    return tuple(blocks), length


def _sources(places: Sequence[int], layout: ClientRows) -> list[tuple[int, np.ndarray]]:
    """For each block, its process and the positions of its rows among that process's clients."""
    counts = [0] * (max(places) + 1)
    for owner, size in zip(places, layout.blocks, strict=True):
        counts[owner] += size
    done, found = [0] * len(counts), []
    for owner, size in zip(places, layout.blocks, strict=True):
        # Pad with copies, since zeros could make derivatives NaN.
        rows = done[owner] + np.arange(layout.length)
        found.append((owner, rows % counts[owner]))
        done[owner] += size
    return found


def _in_rows(
    values: Sequence[np.ndarray], places: Sequence[int], layout: ClientRows
) -> Shaped[np.ndarray, " rows"]:
    """All processes' numbers, arranged by row."""
    return np.concatenate([values[owner][rows] for owner, rows in _sources(places, layout)])


def _on_devices(
    leaf: Array, places: Sequence[int], layout: ClientRows, sharding: NamedSharding
) -> Array:
    """This process's rows on its devices, block after block."""
    values, sources = np.asarray(leaf), _sources(places, layout)

    def part(index: Any) -> np.ndarray:
        rows = sources[(index[0].start or 0) // layout.length][1]
        # A full block needs no copy.
        full = rows[-1] - rows[0] == len(rows) - 1
        return values[rows[0] : rows[-1] + 1] if full else values[rows]

    shape = (len(places) * layout.length, *values.shape[1:])
    return jax.make_array_from_callback(shape, sharding, part)


def _replicated(values: np.ndarray, sharding: NamedSharding) -> Array:
    """The same values on all devices of all processes."""
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(values.shape, whole, lambda index: values[index])
