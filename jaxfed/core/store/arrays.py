"""Files of named arrays with a JSON header, read and written without pickle.

A file is an uncompressed `.npz`, which `numpy.load` opens. Two of its entries are texts:

    header   a JSON object. Its `format` is the name and the number of the layout, such as
             ["jaxfed.solution", 1]; its `types` gives each array's dtype by name
    digest   the SHA-256 hash of the header and the arrays

The others are arrays. NumPy cannot write dtypes of other packages, such as bfloat16; such arrays
are stored as raw bytes. Entries that `types` does not name are ignored.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.common.files import replacing
from jaxfed.core.common.processes import is_here

NUMBER = 1  # of the newest layout of every kind


class Content(NamedTuple):
    """The content of a file."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def entries(
    kind: str, header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The entries of a file, by name.

    Args:
        kind: name of the layout.
        header: content of the header besides `format` and `types`.
        arrays: numbers or booleans, by name.

    Raises:
        ValueError: if an array holds anything else.
    """
    types, stored = {}, {}
    for name, values in arrays.items():
        array = np.asarray(values)
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
            raise ValueError(f"{name}: wanted an array of numbers, got {array.dtype}")
        # The header names types without their byte order.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        types[name] = array.dtype.name
        # 2 means registered by another package, as bfloat16 is.
        raw = f"V{array.dtype.itemsize}" if array.dtype.isbuiltin == 2 else array.dtype
        stored[name] = array.view(raw)
    text = json.dumps({"format": [kind, NUMBER], **header, "types": types})
    digest = _digest(text, stored)
    return {"header": np.asarray(text), "digest": np.asarray(digest), **stored}


def write(
    path: Path,
    kind: str,
    header: Mapping[str, Any],
    arrays: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Write a file, completely or not at all; it is on disk when this returns.

    Args:
        path: the file.
        kind: name of the layout.
        header: content of the header besides `format` and `types`.
        arrays: numbers or booleans, by name.
        private: whether only the file's owner may read it.

    Raises:
        ValueError: if an array does not hold numbers.
        OSError: if the file cannot be written; an existing file stays.
    """
    found = entries(kind, header, arrays)
    with replacing(path, private=private) as part:
        write_entries(part, found)


def write_entries(path: Path, entries: Mapping[str, np.ndarray]) -> None:
    """Write arrays and texts by name, as `numpy.savez` does but without pickle.

    Raises:
        ValueError: if an entry holds Python objects.
        OSError: if the file cannot be written.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in entries.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def read(path: Path, kind: str) -> Content:
    """Read a file.

    Args:
        path: the file.
        kind: name of the layout.

    Raises:
        ValueError: if the file is damaged, was edited, is of another kind or has a later layout.
        OSError: if there is no such file, or it cannot be opened.
    """
    with opened(path) as stored:
        text = str(stored["header"])
        header = json.loads(text)
        if header["format"] != [kind, NUMBER]:
            raise ValueError(f"wanted format {[kind, NUMBER]}, got {header['format']!r}")
        types = header["types"]
        arrays = {name: stored[name] for name in types}
        # The archive has its own checksums, but editing an entry renews them.
        if str(stored["digest"]) != _digest(text, arrays):
            raise ValueError("wanted the content that was written, got another")
        return Content(header, {name: x.view(jnp.dtype(types[name])) for name, x in arrays.items()})


@contextmanager
def opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open a file, to read its entries by name.

    Args:
        path: the file.

    Raises:
        ValueError: if the file or an entry that is read is damaged.
        OSError: if there is no such file, or it cannot be opened.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ValueError("wanted a regular file")
    with path.open("rb") as file:
        try:
            size = path.stat().st_size
            # A few bytes could expand to gigabytes if they are compressed or listed more than once.
            total = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
            if total > size:
                raise ValueError(
                    f"wanted entries of at most {size:,} bytes, as the file, got {total:,}"
                )
            with np.lib.npyio.NpzFile(file) as stored:
                yield stored
        except Exception as error:  # damaged files end in exceptions of every kind
            raise ValueError(str(error)) from error


def _digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256(header.encode())
    for array in arrays.values():  # their names and dtypes are in the header
        # The shape too: the same bytes in another shape are another array.
        found.update(f"{array.shape}".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()


def named(name: str, tree: PyTree) -> dict[str, Any]:
    """A tree's arrays or shapes, keyed by a name followed by their paths.

    Typed keys of `jax.random` are given as numbers. An array spread over processes is given as the
    pieces of this process, by path and index.
    """
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        whole = name + jax.tree_util.keystr(path)
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not is_here(leaf):
            found |= {f"{whole} {each.index}": each.data for each in leaf.addressable_shards}
        else:
            found[whole] = leaf
    return found


def rebuilt(name: str, arrays: Mapping[str, Any], like: PyTree) -> PyTree:
    """Inverse of `named`.

    Args:
        name: as for `named`.
        arrays: the result of `named`; arrays with other names are ignored.
        like: arrays or shapes in the wanted structure. The new arrays get the devices of JAX arrays
            in it, and the same distribution over processes.

    Raises:
        ValueError: if the arrays differ from `like` in number, shape or type.
    """
    wanted = {path: _shape_and_type(x) for path, x in named(name, like).items()}
    found = {path: _shape_and_type(x) for path, x in arrays.items() if path.startswith(name)}
    if wanted != found:
        raise ValueError(f"like: wanted the arrays of {name} that the file has, got others")

    def place(path: str, leaf: Any) -> Any:
        if is_key(leaf):
            data = place(path, jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if not isinstance(leaf, jax.Array):
            return arrays[path] if isinstance(leaf, np.ndarray) else jnp.asarray(arrays[path])
        return jax.make_array_from_callback(
            leaf.shape,
            leaf.sharding,
            lambda index: arrays[path][index] if path in arrays else arrays[f"{path} {index}"],
        )

    leaves, structure = jax.tree.flatten_with_path(like)
    placed = [place(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return jax.tree.unflatten(structure, placed)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed key of `jax.random`, which NumPy cannot read."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape_and_type(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return np.shape(leaf), np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else np.result_type(leaf)
