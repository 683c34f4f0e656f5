"""Labelled grids: a function of named settings at every point, compiled once, resumable."""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Int, Shaped

from jaxfed._optional import require
from jaxfed.core.backend import Backend, vmap
from jaxfed.core.checkpoint import digest_of
from jaxfed.core.clients import Clients, Samples

_VMAP = vmap()


@dataclass(frozen=True)
class Grid:
    """Numbers over named axes.

    Attributes:
        axes: the values along each axis, by its name.
        values: arrays by name. Their leading axes are those of `axes`, in that order; what
            follows is the entry's own, such as rounds.
    """

    axes: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    def mean(self, *over: str) -> Self:
        """Means over these axes, which are then gone.

        Raises:
            ValueError: if there is no such axis.
        """
        return self._reduced(over, np.mean)

    def sd(self, *over: str) -> Self:
        """Standard deviations over these axes (of a sample: n - 1), NaN for a single value.

        Raises:
            ValueError: if there is no such axis.
        """

        def spread(values, axis):
            number = math.prod(values.shape[i] for i in axis)
            if number == 1:
                return np.full_like(np.mean(values, axis), np.nan)
            return np.std(values, axis, ddof=1)

        return self._reduced(over, spread)

    def at(self, **chosen: Any) -> Self:
        """The part with these values of these axes, which are then gone.

        Raises:
            ValueError: if there is no such axis, or it has no such value.
        """
        place: list[Any] = [slice(None)] * len(self.axes)
        for name, value in chosen.items():
            (position,) = self._positions([name])
            found = np.flatnonzero(self.axes[name] == value)
            if len(found) == 0:
                raise ValueError(f"{name}: wanted one of {self.axes[name].tolist()}, got {value}")
            place[position] = found[0]
        axes = {name: values for name, values in self.axes.items() if name not in chosen}
        return type(self)(axes, {name: x[tuple(place)] for name, x in self.values.items()})

    def _reduced(self, over: Sequence[str], reduction: Callable) -> Self:
        gone = tuple(self._positions(over))
        axes = {name: values for name, values in self.axes.items() if name not in over}
        return type(self)(axes, {name: reduction(x, gone) for name, x in self.values.items()})

    def _positions(self, names: Sequence[str]) -> list[int]:
        for name in names:
            if name not in self.axes:
                raise ValueError(f"axis {name!r}: there are {list(self.axes)}")
        return [list(self.axes).index(name) for name in names]


def masked(
    clients: Clients,
    *,
    size: int | Int[Array, ""] | None = None,
    samples: int | Int[Array, ""] | None = None,
) -> Clients:
    """Only the first clients, with only their first samples, in arrays of the same shape.

    Rows beyond are zero and do not count, clients beyond have weight 0: a run's shared part, the
    others' local parts and its history are those without them. The two numbers may be traced, so
    grids over them are one compiled call.

    Args:
        clients: clients with samples.
        size: how many of them; all by default.
        samples: how many samples of each that has as many; all by default.

    Returns:
        The clients; their weights sum to one.

    Raises:
        ValueError: if the clients hold moments instead of samples, or a number that is not traced
            is not positive or more than there are.
    """
    data, weights = clients.data, clients.weights
    if not isinstance(data, Samples):
        raise ValueError(f"clients: wanted clients with samples, got {type(data).__name__}")
    for name, number, most in (
        ("size", size, len(clients)),
        ("samples", samples, data.values.shape[-2]),
    ):
        if number is not None and not isinstance(number, Tracer) and not 1 <= number <= most:
            raise ValueError(f"{name}: wanted a number from 1 to {most}, got {number}")
    if samples is not None:
        data = Samples(data.values, jnp.minimum(data.count, samples).astype(data.count.dtype))
        data = Samples(jnp.where(data.mask[..., None] > 0, data.values, 0), data.count)
    if size is not None:
        weights = jnp.where(jnp.arange(len(clients)) < size, weights, 0)
        weights = weights / weights.sum()
    return Clients(data, clients.ids, weights)


def grid(
    function: Callable[..., Mapping[str, Shaped[Array, "..."]]],
    axes: Mapping[str, Shaped[ArrayLike, " _"] | Sequence[float]],
    *,
    block: int | None = None,
    backend: Backend = _VMAP,
    progress: bool = False,
    folder: str | Path | None = None,
) -> Grid:
    """Evaluate a function at every point of a grid, compiled once, block by block.

    Args:
        function: `f(**point)`, traced, with one scalar for each axis: what to do with a prior
            variance, a seed, a number of samples (`masked`), an index into stacked data sets.
            It returns arrays by name. Large arrays that it closes over become constants of the
            compiled function; `jax.tree_util.Partial(f, data)` passes them as arguments.
        axes: the values along each axis, by the name of the function's argument.
        block: how many points go side by side; all by default. Smaller blocks need less memory;
            on a processor, one run of many clients after the other is often the fastest.
        backend: how a block's points are mapped, as clients are in a run: on one device
            (`jf.backend.vmap()`), or spread over several (`jf.backend.shard()`, `pmap()`), with at
            least one point each. The cores of a processor become devices by
            `jax.config.update("jax_num_cpu_devices", 2)` before anything is computed.
        progress: show a progress bar.
        folder: where finished blocks are kept. The same call takes an interrupted grid up again,
            with the same numbers, bit for bit if `block` is the same.

    Returns:
        The labelled values, on the host.

    Raises:
        ValueError: for axes that are not one-dimensional, finite numbers or do not fit the
            function, a function that returns something else than arrays by name, a block that is
            not positive, a backend that is none, and a folder that holds anything but an earlier
            part of this grid.
        ImportError: if a progress bar is asked for and tqdm is missing.
    """
    checked = _checked(axes, function)
    if block is not None and (not isinstance(block, int) or block <= 0):
        raise ValueError(f"block: wanted a positive whole number, got {block!r}")
    if not isinstance(backend, Backend):
        raise ValueError(f"backend: wanted one of jaxfed.backend, got {backend!r}")
    sizes = tuple(map(len, checked.values()))
    columns = np.meshgrid(*checked.values(), indexing="ij")
    points = {name: column.ravel() for name, column in zip(checked, columns, strict=True)}
    total = math.prod(sizes)
    # Every device has as many points as the others.
    size = -(-min(block or total, total) // backend.multiple) * backend.multiple

    pieces: list[dict[str, np.ndarray]] = []
    if folder is not None:
        folder = Path(folder)
        pieces = _taken_up(folder, _identity(function, checked, points))
    done = np.zeros(total, bool)
    for piece in pieces:
        done[piece[_INDEX]] = True
    missing = np.flatnonzero(~done)
    bar = None
    if progress:
        tqdm = require("tqdm.auto", extra="cli").tqdm
        bar = tqdm(total=total, initial=total - len(missing), unit="run")
    for first in range(0, len(missing), size):
        chosen = missing[first : first + size]
        # The last block is filled up with points that are computed twice.
        filled = {name: x[np.resize(chosen, size)] for name, x in points.items()}
        names, found = _block(function, filled, backend)
        arrays = (np.asarray(values)[: len(chosen)] for values in found)
        piece = dict(zip(map("value {}".format, names), arrays, strict=True))
        pieces.append({_INDEX: chosen, **piece})
        if folder is not None:
            with _replacing(folder / f"{chosen[0]:08d}.npz") as part:
                np.savez(part, **pieces[-1])  # pyright: ignore[reportArgumentType]
        if bar is not None:
            bar.update(len(chosen))
    if bar is not None:
        bar.close()

    order = np.argsort(np.concatenate([piece[_INDEX] for piece in pieces]))
    values = {}
    for name in pieces[0]:
        if name != _INDEX:
            whole = np.concatenate([piece[name] for piece in pieces])[order]
            values[name.removeprefix("value ")] = whole.reshape(*sizes, *whole.shape[1:])
    return Grid(checked, values)


_INDEX = "index"  # of the points that a file holds


@eqx.filter_jit
def _block(function, points, backend):
    names: list[str] = []  # in the function's order; a dictionary would come back sorted
    arrays, others = eqx.partition(function, eqx.is_array)

    def one(arrays, point):
        found = eqx.combine(arrays, others)(**point)
        if not isinstance(found, Mapping) or not found:
            raise ValueError(f"function: wanted arrays by name as its result, got {found!r}")
        names[:] = map(str, found)
        return list(map(jnp.asarray, found.values()))

    points = jax.tree.map(jnp.asarray, points)
    return names, backend.map(one, arrays, points)


def _checked(axes, function) -> dict[str, np.ndarray]:
    if not isinstance(axes, Mapping) or not axes:
        raise ValueError(f"axes: wanted values by the name of each axis, got {axes!r}")
    checked = {name: np.asarray(values) for name, values in axes.items()}
    for name, values in checked.items():
        if values.ndim != 1 or len(values) == 0 or values.dtype.kind not in "iuf":
            raise ValueError(f"axes: wanted a list of numbers for {name!r}, got {axes[name]!r}")
        if not np.isfinite(values).all():
            raise ValueError(f"axes: wanted finite numbers for {name!r}, got {axes[name]!r}")
    try:
        inspect.signature(function).bind(**checked)
    except TypeError as error:
        raise ValueError(f"axes: {sorted(checked)} do not fit the function: {error}") from error
    return checked


# --- resuming ------------------------------------------------------------------------------------


def _identity(function, axes, points) -> dict[str, Any]:
    """What tells one grid from another: its points, and what is computed at one of them."""
    one = {name: column[0] for name, column in points.items()}
    lowered = eqx.filter_jit(lambda function, point: function(**point)).lower(function, one)
    digest = hashlib.sha256((lowered.as_text() + digest_of(function)).encode())
    return {
        "axes": {name: values.tolist() for name, values in axes.items()},
        "computation": digest.hexdigest()[:16],
    }


def _taken_up(folder: Path, identity: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What an earlier call with the same arguments left; the folder is this grid's from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    described = folder / "grid.json"
    if described.exists():
        saved = json.loads(described.read_text())
        if saved["axes"] != identity["axes"]:
            raise ValueError(
                f"folder: {folder} holds another grid; its axes are {saved['axes']}, "
                f"this one's are {identity['axes']}"
            )
        if saved != identity:
            raise ValueError(
                f"folder: {folder} holds a grid of another computation: another algorithm, other "
                "data, keys or rounds, or another version of JAX"
            )
    elif any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ValueError(f"folder: {folder} holds something else than a grid")
    else:
        with _replacing(described) as part:
            part.write_text(json.dumps(identity, indent=1))
    pieces = []
    for path in sorted(folder.glob("[0-9]*.npz")):
        with np.load(path) as arrays:
            pieces.append(dict(arrays))
    return pieces


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside the wanted one, put in its place once it is complete."""
    part = path.with_name(f".part-{path.name}")
    yield part
    part.replace(path)
