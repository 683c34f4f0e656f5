"""Labelled grids evaluate a function at every point, compiled once, in resumable blocks."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Shaped

from jaxfed._checks import (
    check_callable,
    check_count,
    check_flag,
    check_instance,
    check_texts,
    checked_path,
    host_array,
    is_real,
    refuse,
    shown,
)
from jaxfed._optional import require
from jaxfed._versions import versions
from jaxfed.core.backends.backend import Backend
from jaxfed.core.backends.one_device import vmap
from jaxfed.core.common.files import locked
from jaxfed.core.common.processes import attempted, on_host, spans, watched
from jaxfed.core.store.grid import GridBlock, Store
from jaxfed.core.store.identity import digest_of, digest_of_text
from jaxfed.core.sweeps.sweep import mapped

if TYPE_CHECKING:
    from xarray import Dataset

_VMAP = vmap()


@watched
def grid(
    function: Callable[..., Mapping[str, Shaped[Array, "..."]]],
    axes: Mapping[str, Shaped[ArrayLike, " _"] | Sequence[float]],
    *,
    dims: Mapping[str, Sequence[str]] | None = None,
    runs_at_once: int | None = None,
    backend: Backend = _VMAP,
    progress: bool = False,
    folder: str | Path | None = None,
) -> "Dataset":
    """Evaluate a function at every point of a grid, compiled once, block by block.

    Points at which the function creates the same key draw the same random numbers; see `sweep` for
    what that means for private channels.

    Args:
        function: `f(**point)`, which is traced with one scalar per axis, such as a prior variance,
            a seed, a number of samples (`Clients.restrict`) or an index into stacked data sets. It
            returns arrays by name. Large arrays that it closes over become constants of the
            compiled function; `jax.tree_util.Partial(f, data)` passes them as arguments instead.
        axes: the values along each axis, by name of the function's argument.
        dims: names for the further dimensions of the function's arrays, by name of the array:
            `{"objective": ["round"]}` for a history. Arrays may share dimensions.
        runs_at_once: number of points evaluated at once, a block; all by default. Smaller blocks
            need less memory. On a CPU, with many clients, single runs are often the fastest.
        backend: how a block's points are mapped, like the clients of a run: on one device
            (`jf.backend.vmap()`), or over several (`jf.backend.shard()`, `pmap()`) with at least
            one point each. To turn CPU cores into devices, call
            `jax.config.update("jax_num_cpu_devices", 2)` before anything is computed.
        progress: show a progress bar.
        folder: where to keep finished blocks; with several processes, the first one writes. The
            same call resumes an interrupted grid, with the same numbers, bit for bit if
            `runs_at_once` is the same. Damaged blocks are computed again, with a warning. Only one
            process at a time may use a folder; this is not checked on Windows, nor on file systems
            without locks, where a warning says so.

    Returns:
        An `xarray.Dataset` on the host, with a variable for each array of the function. Its leading
        dimensions are the axes, with their values as coordinates. Further dimensions that `dims`
        does not name are called `objective_0`, `objective_1` and so on for the array `objective`;
        none of them has coordinates (`found.assign_coords(round=...)`). Use the names in `sel`,
        `mean`, `std`, `plot` and `to_netcdf`. By default, reductions skip NaN and thus diverged
        runs; `skipna=False` includes them. `attrs` records the versions used, and
        `attrs["computation"]` a digest of the function and its data.

    Raises:
        ValueError: if axes are not one-dimensional, finite numbers or do not fit the function, the
            function does not return arrays by name, names of arrays or dimensions clash,
            `runs_at_once` is not positive, `backend` is not a backend, or the folder holds anything
            but an earlier part of this grid.
        BlockingIOError: if another process is using the folder.
        ImportError: if xarray is missing, or tqdm if a progress bar is requested.
        jaxfed.ProcessError: if another process of the grid has ended.
    """
    xarray = require("xarray", extra="sweep")
    checked = _checked(axes, function)
    if runs_at_once is not None:
        check_count("runs_at_once", runs_at_once)
    check_instance("backend", backend, Backend, "one of jaxfed.backend")
    check_flag("progress", progress)
    if dims is not None:
        _check_dims(dims)
    if folder is not None:
        folder = checked_path("folder", folder)
    sizes = tuple(map(len, checked.values()))
    columns = np.meshgrid(*checked.values(), indexing="ij")
    points = {name: column.ravel() for name, column in zip(checked, columns, strict=True)}
    total = math.prod(sizes)
    # Give every device the same number of points.
    size = -(-min(runs_at_once or total, total) // backend.multiple) * backend.multiple

    first = {name: jnp.asarray(column[0]) for name, column in points.items()}
    names, shapes = eqx.filter_eval_shape(_at_point, function, first)
    dimensions = _dimensions(dict(zip(checked, sizes, strict=True)), names, shapes, dims or {})
    lowered = _at_point.lower(function, first)  # pyright: ignore[reportFunctionMemberAccess]
    # Data of a `Partial` are arguments of the program, so its text alone would not tell two data
    # sets apart.
    computation = digest_of_text(lowered.as_text() + digest_of(function))
    values = [np.empty((total, *one.shape), one.dtype) for one in shapes]
    done = np.zeros(total, bool)

    def keep(chosen: np.ndarray, found: Sequence[np.ndarray]) -> None:
        for whole, part in zip(values, found, strict=True):
            whole[chosen] = part
        done[chosen] = True

    # If several processes compute it together, only one writes and shows progress.
    several = jax.process_count() > 1 and (spans(function) or backend.processes > 1)
    speaks = not several or jax.process_index() == 0
    store = None
    with ExitStack() as stack:

        def take_up() -> None:
            nonlocal store
            if folder is None or not speaks:
                return
            store = Store(folder, checked, computation, names)
            stack.enter_context(locked(folder, "folder"))
            for block in store.load():
                keep(block.points, block.values)

        if several and folder is not None:
            # An error in the process that reads the folder must end all of them.
            attempted("folder", take_up)
            found = multihost_utils.broadcast_one_to_all((done.astype(np.int32), values))
            done, values = np.asarray(found[0]) > 0, [np.array(x) for x in found[1]]
        else:
            take_up()
        missing = np.flatnonzero(~done)
        bar = None
        if progress and speaks:
            tqdm = require("tqdm.auto", extra="cli").tqdm
            bar = tqdm(total=total, initial=total - len(missing), unit="run")
        for start in range(0, len(missing), size):
            chosen = missing[start : start + size]
            # Fill up the last block with points that are computed twice.
            filled = {name: x[np.resize(chosen, size)] for name, x in points.items()}
            found = [on_host(x)[: len(chosen)] for x in _block(function, filled, backend)]
            keep(chosen, found)
            if store is not None:
                store.save(GridBlock(chosen, found))
            if bar is not None:
                bar.update(len(chosen))
        if bar is not None:
            bar.close()

    arrays = (whole.reshape(*sizes, *whole.shape[1:]) for whole in values)
    return xarray.Dataset(
        dict(zip(names, zip(dimensions, arrays, strict=True), strict=True)),
        coords=checked,
        attrs=versions() | {"computation": computation},
    )


@eqx.filter_jit
def _at_point(function, point):
    """Names and arrays at one point, in the function's order, since jit sorts dictionaries."""
    found = function(**point)
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"function: wanted arrays by name as its result, got {shown(found)}")
    return list(map(str, found)), [_array(name, value) for name, value in found.items()]


def _array(name: object, value: Any) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        array = None
    if array is None or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(f"function: wanted an array of numbers for {name!r}, got {shown(value)}")
    return array


@eqx.filter_jit
def _block(function, points, backend):
    def arrays(function, point):
        return _at_point(function, point)[1]

    return mapped(Partial(arrays, function), jax.tree.map(jnp.asarray, points), backend)


def _checked(axes: Any, function: Any) -> dict[str, np.ndarray]:
    """The values along each axis, checked against the function's arguments."""
    check_callable("function", function)
    if not isinstance(axes, Mapping) or not axes or not all(isinstance(n, str) for n in axes):
        raise refuse("axes", "values by the name of each axis", axes)
    checked = {}
    for name, given in axes.items():
        values = checked[name] = host_array("axes", given, f"a list of numbers for {name!r}")
        if values.ndim != 1 or len(values) == 0 or not is_real(values.dtype):
            raise refuse("axes", f"a list of numbers for {name!r}", given)
        if not np.isfinite(values).all():
            raise refuse("axes", f"finite numbers for {name!r}", given)
    try:
        inspect.signature(function).bind(**checked)
    except (TypeError, ValueError) as error:  # other arguments, or no signature to inspect
        raise ValueError(f"axes: {sorted(checked)} do not fit the function: {error}") from error
    return checked


def _check_dims(dims: Any) -> None:
    if not isinstance(dims, Mapping):
        raise refuse("dims", "lists of names by the name of the array", dims)
    for name, further in dims.items():
        check_texts(f"dims[{name!r}]", further)


def _dimensions(
    sizes: dict[str, int], names: list[str], shapes: list, dims: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    """The names of each array's dimensions, given the sizes of the axes."""
    axes = tuple(sizes)
    for name in names:
        if [*axes, *names].count(name) > 1:
            raise ValueError(
                "function: wanted names for its arrays that differ from each other and from the "
                f"axes {list(axes)}, got {name!r} twice"
            )
    for name in dims:
        if name not in names:
            raise ValueError(f"dims: wanted names of the function's arrays {names}, got {name!r}")
    sizes = dict(sizes)
    found = []
    for name, one in zip(names, shapes, strict=True):
        further = tuple(dims.get(name, [f"{name}_{i}" for i in range(one.ndim)]))
        if len(further) != one.ndim or len(set(further)) != one.ndim:
            raise ValueError(
                f"dims: wanted {one.ndim} different names for {name!r}, got {list(further)}"
            )
        for dimension, size in zip(further, one.shape, strict=True):
            if dimension in axes or dimension in names:
                raise ValueError(
                    f"dims: wanted a name that is not yet an axis or an array for a dimension of "
                    f"{name!r}, got {dimension!r}"
                )
            if sizes.setdefault(dimension, size) != size:
                raise ValueError(
                    f"dims: wanted arrays that share {dimension!r} to be of one size along it, "
                    f"got {sizes[dimension]} and {size}"
                )
        found.append(axes + further)
    return found
