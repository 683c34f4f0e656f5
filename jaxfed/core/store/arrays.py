"""Files of named arrays with a header of JSON; nothing in such a file runs.

A file is an uncompressed `.npz`. Its entry `header` is a text, a JSON object with at least

    format   name and number of the layout, such as ["jaxfed.solution", 1]
    types    the type of each array, by the array's name

The other entries are the arrays. An array whose type is none of NumPy's own, such as bfloat16, is
stored as the bytes of its numbers. Entries that `types` does not name are ignored. Every entry has
a checksum, so that damage is found when the file is read.
"""

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.common.files import replacing

NUMBER = 1  # of the newest layout of every kind


class Content(NamedTuple):
    """What a file holds."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def entries(
    kind: str, header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The entries of a file, by name.

    Args:
        kind: name of the layout.
        header: what the header says besides `format` and `types`.
        arrays: numbers or booleans, by name.

    Raises:
        ValueError: for arrays of anything else.
    """
    arrays = {name: np.asarray(values) for name, values in arrays.items()}
    for name, values in arrays.items():
        if not _holds_numbers(values.dtype):
            raise ValueError(f"{name}: wanted an array of numbers, got {values.dtype}")
    types = {name: values.dtype.name for name, values in arrays.items()}
    text = json.dumps({"format": [kind, NUMBER], **header, "types": types})
    stored = {name: values.view(_stored(values.dtype)) for name, values in arrays.items()}
    return {"header": np.asarray(text), **stored}


def write(
    path: Path,
    kind: str,
    header: Mapping[str, Any],
    arrays: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Write a file: complete or not at all, and on the disk when this returns.

    Args:
        path: of the file.
        kind: name of the layout.
        header: what the header says besides `format` and `types`.
        arrays: numbers or booleans, by name.
        private: whether only the file's owner may read it.

    Raises:
        ValueError: for arrays of anything but numbers.
        OSError: if the file cannot be written; an earlier one in its place stays.
    """
    found = entries(kind, header, arrays)
    with replacing(path, private=private) as part, part.open("wb") as file:
        np.savez(file, **found)  # pyright: ignore[reportArgumentType]


def read(path: Path, kind: str) -> Content:
    """Read a file.

    No more memory is taken than the file has bytes, whatever its header says.

    Args:
        path: of the file.
        kind: name of the layout.

    Raises:
        ValueError: for a file that is damaged, is of another kind or has a later layout.
        OSError: if there is no such file, or it cannot be opened.
    """
    if path.exists() and not path.is_file():  # to open a pipe may never end
        raise ValueError("wanted a regular file")
    with path.open("rb") as file:
        try:
            return _content(file, path.stat().st_size, kind)
        except Exception as error:  # damaged files end in exceptions of every kind
            raise ValueError(str(error)) from error


def named(name: str, tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, each path after a name."""
    return {name + jax.tree_util.keystr(p): leaf for p, leaf in jax.tree.leaves_with_path(tree)}


def rebuilt(name: str, arrays: Mapping[str, Any], like: PyTree) -> PyTree:
    """Inverse of `named`.

    Args:
        name: as it was for `named`.
        arrays: what `named` returned; arrays of other names are ignored.
        like: arrays or their shapes, in the structure wanted.

    Raises:
        ValueError: if the arrays are not those of `like` in number, shape and type.
    """
    wanted = {path: (np.shape(x), jnp.result_type(x)) for path, x in named(name, like).items()}
    found = {path: (x.shape, x.dtype) for path, x in arrays.items() if path.startswith(name)}
    if wanted != found:
        raise ValueError(f"like: its {name} part has other arrays than the file")
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[p]) for p in wanted])


def _content(file: BinaryIO, size: int, kind: str) -> Content:
    _check_sizes(file, size)
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        header = json.loads(str(stored["header"]))
        name, number = header["format"]
        if name != kind or type(number) is not int or not 1 <= number <= NUMBER:
            raise ValueError(f"wanted format {[kind, NUMBER]}, got {header['format']!r}")
        types = header["types"].items()
        return Content(header, {name: _typed(name, stored[name], given) for name, given in types})


def _check_sizes(file: BinaryIO, size: int) -> None:
    """Refuse entries that take more memory than the file has bytes, whatever they claim."""
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        packed = [entry.filename for entry in listed if entry.compress_type]
        total = sum(entry.file_size for entry in listed)  # several may share the same bytes
        if packed:
            raise ValueError(f"wanted entries that are not compressed, got {packed[0]!r}")
        if total > size:
            raise ValueError(f"wanted entries of its {size:,} bytes, got {total:,}")
        for entry in listed:
            if not entry.filename.endswith(".npy"):
                continue
            with archive.open(entry) as array:
                first, _ = np.lib.format.read_magic(array)
                header = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
                shape, _, dtype = header[first > 1](array)
                held = entry.file_size - array.tell()
            if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
                raise ValueError(
                    f"{entry.filename!r}: wanted {dtype}{list(shape)}, got {held:,} bytes"
                )


def _typed(name: str, array: np.ndarray, given: str) -> np.ndarray:
    """An array in the type that the header names."""
    wanted = jnp.dtype(given)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype != _stored(wanted) or not _holds_numbers(wanted):
        raise ValueError(f"{name!r}: wanted numbers of {given}, got {array.dtype}")
    return array.view(wanted)


def _stored(dtype: np.dtype) -> np.dtype:
    """The type in which a file has an array: NumPy's own, or bytes for those of other packages."""
    return np.dtype(f"V{dtype.itemsize}") if dtype.isbuiltin == 2 else dtype


def _holds_numbers(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"
