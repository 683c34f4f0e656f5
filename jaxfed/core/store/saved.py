"""Results in a file: written by `Solution.save`, read by `load`, with nothing in them that runs.

The file is an uncompressed `.npz`. Its entry `header` is a text, a JSON object:

    format       2-part name and number of this layout, ["jaxfed.solution", 1]
    versions     of Python, jaxfed and the packages that computed
    algorithm    the algorithm as it is printed
    clients      how many there were; `local` may hold those of one process alone
    rounds       how many ran
    status       how the run ended, a name of `jaxfed.Status`
    parts        for `shared` and `local`: null where there is none, else the paths of its arrays
    types        the type of each array
    properties   what each array of `shared` and `local` was when it was saved: "orthonormal" (its
                 columns are), "finite" or "any"; a file may have none
    remarks      what to know before relying on the result, sentences; a file may have none

The other entries are arrays: `shared` and `local` where such a part is one array, `shared.encoder`
and the like where it is a tree of them, and `history_NAME`. A file may have entries beside these,
which `load` passes over: the command line adds the clients' names and what was subtracted. A later
layout has another number, and `load` goes on reading this one.
"""

import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed._versions import versions
from jaxfed.core.common.checks import check_count, check_instance, checked_path
from jaxfed.core.common.files import replacing
from jaxfed.core.common.printing import columns, in_bytes
from jaxfed.core.contract.algorithm import Personalized

LAYOUT = ["jaxfed.solution", 1]
PARTS = Personalized._fields
HISTORY = "history_"
STATUSES = ("round_limit", "converged", "diverged", "stopped")  # the names of `jaxfed.Status`
PROPERTIES = ("any", "finite", "orthonormal")
SLACK = 1e-3  # by which columns that are orthonormal may fail to be


class Saved(NamedTuple):
    """What a file holds of a run: its result and history, and what is known of how it came about.

    Go on from it with `fit(..., warm_start=saved.result)`. What a run sent, for an account of
    privacy over several runs (`jaxfed.privacy.spent`), is not in the file.

    Attributes:
        result: the learned models, `result.shared` and `result.local`.
        history: `(rounds,)` arrays by name.
        rounds: how many rounds ran.
        status: how the run ended, a name of `jaxfed.Status`.
        algorithm: the algorithm as it is printed.
        clients: how many there were.
        versions: of Python, jaxfed and the packages that computed, by name.
        remarks: what to know before relying on the result, as `Solution.remarks` has it.
    """

    result: Personalized
    history: dict[str, np.ndarray]
    rounds: int
    status: str
    algorithm: str
    clients: int
    versions: dict[str, str]
    remarks: tuple[str, ...] = ()

    def summary(self) -> str:
        """What ran, how it ended and what it cost, in two columns of text."""
        return columns(story(self))


def story(run: Any) -> dict[str, str]:
    """What ran, how it ended and what it cost, of a `Saved` or what has the same attributes."""
    rows = {
        "algorithm": run.algorithm,
        "clients": f"{run.clients:,}",
        "rounds": f"{run.rounds:,}, {run.status.replace('_', ' ')}",
    }
    objective = np.asarray(run.history.get("objective", ()))
    if objective.size:
        rows["objective"] = f"{objective[0]:.6g} entering the first round, {objective[-1]:.6g} last"
    participants = np.asarray(run.history.get("participants", ()))
    if participants.size and (participants != run.clients).any():
        rows["participants"] = f"{participants.mean():.4g} a round"
    for name, words in (("bits_up", "sent"), ("bits_down", "received")):
        if np.size(run.history.get(name, ())):
            rows[words] = f"{in_bytes(run.history[name][-1] / 8)} by a client"
    for name in PARTS:
        leaves = jax.tree.leaves(getattr(run.result, name))
        rows[name] = ", ".join(str(tuple(np.shape(leaf))) for leaf in leaves) or "nothing"
    for number, remark in enumerate(run.remarks, 1):
        rows["remark" if len(run.remarks) == 1 else f"remark {number}"] = remark
    return rows


def write(path: str | os.PathLike[str], run: Saved, *, private: bool = False) -> None:
    """Write a file: complete or not at all.

    Args:
        path: of the file.
        run: what it holds.
        private: whether its owner alone may read it.

    Raises:
        ValueError: for what is no path.
        OSError: if it cannot be written.
    """
    place = checked_path("path", path)
    with replacing(place, private=private) as part, part.open("wb") as file:
        np.savez(file, **entries(run))  # pyright: ignore[reportArgumentType]


def entries(run: Saved) -> dict[str, np.ndarray]:
    """What the file holds, by name."""
    arrays, parts = {}, {}
    for name in PARTS:
        leaves = list(_named(name, getattr(run.result, name)))
        parts[name] = [path for path, _ in leaves] or None
        arrays |= dict(leaves)
    arrays |= {HISTORY + name: values for name, values in run.history.items()}
    arrays = {name: np.asarray(values) for name, values in arrays.items()}
    paths = [path for own in parts.values() for path in own or ()]
    header = {
        "format": LAYOUT,
        "versions": run.versions,
        "algorithm": run.algorithm,
        "clients": run.clients,
        "rounds": run.rounds,
        "status": run.status,
        "parts": parts,
        "types": {name: str(values.dtype) for name, values in arrays.items()},
        "properties": {path: _property(arrays[path], SLACK / 2) for path in paths},
        "remarks": list(run.remarks),
    }
    # NumPy's files have no half precision but IEEE's: others are written as the bytes they are.
    plain = {k: x.view(f"V{x.itemsize}") if x.dtype.kind == "V" else x for k, x in arrays.items()}
    return {"header": np.asarray(json.dumps(header)), **plain}


def load(path: str | os.PathLike[str], *, like: Personalized | None = None) -> Saved:
    """Read what `Solution.save` wrote.

    Args:
        path: of the file.
        like: a result of the same structure, for one whose parts are trees of arrays (networks);
            without it, such a part comes as a dictionary of its arrays by their paths.

    Returns:
        The result and its history.

    Raises:
        ValueError: for a file that `Solution.save` did not write or that is damaged, and for
            a `like` of other parts, shapes or types.
        OSError: if the file cannot be read.
    """
    place = checked_path("path", path)
    if like is not None:
        check_instance("like", like, Personalized, "a jaxfed.Personalized, such as a result")
    if place.exists() and not place.is_file():  # to open a pipe may never end
        raise ValueError(f"{place}: wanted a regular file")
    with place.open("rb") as file:
        try:
            header, arrays = _read(file, place.stat().st_size)
        except Exception as error:  # of every kind, by what is damaged
            raise ValueError(f"{place}: not a file that Solution.save wrote ({error})") from error
    parts = {}
    for name in PARTS:
        own = {path: jnp.asarray(arrays[path]) for path in header["parts"][name] or ()}
        parts[name] = _part(name, own, None if like is None else (getattr(like, name),))
    history = {k.removeprefix(HISTORY): x for k, x in arrays.items() if k.startswith(HISTORY)}
    kept = {name: header[name] for name in Saved._fields if name in header}
    kept["remarks"] = tuple(header.get("remarks", ()))
    return Saved(result=Personalized(**parts), history=history, **kept)


def _read(file: Any, size: int) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    with zipfile.ZipFile(file) as archive:
        # So that no file takes more memory than it has bytes, by entries that overlap neither.
        packed = [each.filename for each in archive.infolist() if each.compress_type]
        whole = sum(each.file_size for each in archive.infolist())
        if packed:
            raise ValueError(f"wanted entries that are not compressed, got {packed[0]!r}")
        if whole > size:
            raise ValueError(f"wanted entries of its {size:,} bytes, got {whole:,}")
        for each in archive.infolist():
            if each.filename.endswith(".npy"):
                _check_entry(archive, each)
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        header = json.loads(str(stored["header"]))
        name, number = header["format"]
        if name != LAYOUT[0] or type(number) is not int or not 1 <= number <= LAYOUT[1]:
            raise ValueError(f"wanted format {LAYOUT}, got {header['format']!r}")
        _check_header(header)
        arrays = {name: _typed(name, stored[name], kind) for name, kind in header["types"].items()}
    _check_arrays(header, arrays)
    return header, arrays


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Refuse an array that takes more memory than its entry has bytes."""
    with archive.open(entry) as file:
        first, _ = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
        shape, _, dtype = read[first > 1](file)
        held = entry.file_size - file.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{entry.filename!r}: wanted {dtype}{list(shape)}, got {held:,} bytes")


def _typed(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """An array in the type that the header names, which NumPy's files may not have."""
    wanted = jnp.dtype(kind)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    plain = f"V{wanted.itemsize}" if wanted.kind == "V" else wanted
    numbers = jnp.issubdtype(wanted, jnp.number) or wanted.kind == "b"
    if array.dtype != plain or not numbers:
        raise ValueError(f"{name}: wanted numbers of {kind}, got {array.dtype}")
    return array.view(wanted)


def _check_header(header: Mapping[str, Any]) -> None:
    """Refuse a header that says what no run does."""
    check_count("rounds", header["rounds"], least=0)
    check_count("clients", header["clients"])
    if header["status"] not in STATUSES:
        raise ValueError(f"status: wanted one of {STATUSES}, got {header['status']!r}")
    versions, types, remarks = header["versions"], header["types"], header.get("remarks", [])
    if not isinstance(remarks, list):
        raise ValueError(f"remarks: wanted a list of sentences, got {remarks!r}")
    # All of these go to terminals.
    texts = header["algorithm"], *versions, *versions.values(), *types, *types.values(), *remarks
    for text in texts:
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"wanted text that can be printed, got {text!r}")
    for name in PARTS:
        odd = [p for p in header["parts"][name] or () if p not in types or not p.startswith(name)]
        if odd:
            raise ValueError(f"parts: wanted paths of arrays within {name}, got {odd}")


def _check_arrays(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays that are not what their header says."""
    clients, length = header["clients"], None
    for name, array in arrays.items():
        if not name.startswith(HISTORY):
            continue
        length = array.shape[:1] if length is None else length
        # Who took part in a round is told of each client.
        each = [(), (clients,)] if array.dtype == bool else [()]
        if array.shape[:1] != length or not array.ndim or array.shape[1:] not in each:
            raise ValueError(f"{name}: wanted one number a round, got shape {array.shape}")
    participants = arrays.get(f"{HISTORY}participants", np.zeros(0))
    if (participants < 0).any() or (participants > clients).any():
        raise ValueError(f"participants: wanted at most {clients} clients")
    local = [arrays[path] for path in header["parts"]["local"] or ()]
    if any(x.shape[:1] != local[0].shape[:1] or not 1 <= np.size(x, 0) <= clients for x in local):
        wanted = f"the same number of clients in each array, at most {clients} clients"
        raise ValueError(f"local: wanted {wanted}, got shapes {[x.shape for x in local]}")
    paths = [path for name in PARTS for path in header["parts"][name] or ()]
    properties = header.get("properties", dict.fromkeys(paths, "any"))
    for path in paths:
        found = _property(arrays[path], SLACK)
        if PROPERTIES.index(found) < PROPERTIES.index(properties[path]):
            raise ValueError(f"{path}: wanted {properties[path]}, as it was saved, got {found}")


def _property(array: np.ndarray, slack: float) -> str:
    """The most that can be said of an array, of `PROPERTIES`."""
    shape = array.shape
    if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
        return "any"
    if array.dtype.kind != "f" or array.ndim < 2 or not 1 <= shape[-1] <= shape[-2]:
        return "finite"
    with np.errstate(all="ignore"):
        # Lengths first: of a large matrix that is no frame, products would take long.
        if not (np.abs((array * array).sum(-2) - 1) <= slack).all():
            return "finite"
        gram = array.swapaxes(-1, -2) @ array
    return "orthonormal" if (np.abs(gram - np.eye(shape[-1])) <= slack).all() else "finite"


def _part(name: str, arrays: Mapping[str, Any], like: tuple[PyTree] | None) -> PyTree:
    if like is None:
        return arrays.get(name, dict(arrays)) if arrays else None
    wanted = dict(_named(name, like[0]))
    shapes = {path: (np.shape(x), jnp.result_type(x)) for path, x in wanted.items()}
    if shapes != {path: (x.shape, x.dtype) for path, x in arrays.items()}:
        raise ValueError(f"like: its {name} part has other arrays than the file")
    found = iter(arrays[path] for path in wanted)
    return jax.tree.map(lambda x: next(found) if eqx.is_array(x) else x, like[0])


def _named(name: str, tree: PyTree) -> Iterator[tuple[str, Any]]:
    """A tree's arrays by their paths."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if eqx.is_array(leaf):
            yield name + jax.tree_util.keystr(path), leaf


def saved(run: Any, status: str) -> Saved:
    """What of a solution goes into a file."""
    history = {name: np.asarray(values) for name, values in run.history.items()}
    clients = len(run.failure.clients)
    return Saved(
        run.result, history, int(run.rounds), status, repr(run.algorithm), clients, versions()
    )
