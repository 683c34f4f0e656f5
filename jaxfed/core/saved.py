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
    remarks      what to know before relying on the result; files of before have none

The other entries are arrays: `shared` and `local` where such a part is one array, `shared.encoder`
and the like where it is a tree of them, and `history_NAME`. A file may have entries beside these,
which `load` passes over: the command line adds the clients' names and what was subtracted. A later
layout has another number, and `load` goes on reading this one.
"""

import json
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
from jaxfed.core.algorithm import Personalized
from jaxfed.core.checks import check_instance, checked_path
from jaxfed.core.described import columns, in_bytes
from jaxfed.core.files import replacing

LAYOUT = ["jaxfed.solution", 1]
PARTS = Personalized._fields
HISTORY = "history_"
# A relative fall of the objective in the second half of a run that is worth a remark.
FALL = 1e-3


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


def still_falling(run: Saved) -> tuple[str, ...]:
    """A remark if the objective was still falling when the rounds were over.

    The fall of the second half of the rounds is what the next ones may well bring again. Tenths of
    the rounds are compared, so that what scatters from round to round does not count as a fall.
    """
    objective = np.asarray(run.history.get("objective", ()), float)
    objective = objective[np.isfinite(objective)]
    rounds = len(objective)
    if rounds < 10:
        return ()
    tenth = max(2, rounds // 10)
    middle, last = objective[rounds // 2 - tenth : rounds // 2], objective[-tenth:]
    before = objective[-2 * tenth : -tenth]
    scale = max(abs(objective[-1]), 1e-3 * abs(objective).max())
    fall = (middle.min() - last.max()) / scale if scale else 0.0
    if not (fall > FALL and before.mean() - last.mean() > 1e-2 * FALL * scale):
        return ()
    return (
        f"The objective still fell by {100 * fall:.2g} % in the second half of the rounds: the run "
        "has not converged; run more rounds (warm_start=) or choose a faster solver.",
    )


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
    header = {
        "format": LAYOUT,
        "versions": run.versions,
        "algorithm": run.algorithm,
        "clients": run.clients,
        "rounds": run.rounds,
        "status": run.status,
        "parts": parts,
        "types": {name: str(values.dtype) for name, values in arrays.items()},
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
        ValueError: for a file that `Solution.save` did not write, one of a later layout, and
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
        raise ValueError(f"wanted entries that are not compressed, got {packed[0]}")
    if whole > size:
        raise ValueError(f"wanted entries of its {size:,} bytes, got {whole:,}")
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        header = json.loads(str(stored["header"]))
        name, number = header["format"]
        if name != LAYOUT[0] or number > LAYOUT[1]:
            raise ValueError(f"wanted format {LAYOUT}, got {header['format']}")
        types = header["types"]
        arrays = {key: stored[key].view(jnp.dtype(types[key])) for key in types}
    _check(header, arrays)
    return header, arrays


def _check(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse a header and arrays that are not what they should be."""
    wanted = {"rounds": int, "clients": int, "status": str, "algorithm": str, "versions": dict}
    for name, kind in wanted.items():
        if type(header[name]) is not kind:
            raise ValueError(f"{name}: wanted {kind.__name__}, got {header[name]!r}")
    missing = {p for name in PARTS for p in header["parts"][name] or ()} - header["types"].keys()
    if missing:
        raise ValueError(f"parts without arrays: {sorted(missing)}")
    texts = {"algorithm": header["algorithm"]}
    texts |= {f"remarks[{i}]": text for i, text in enumerate(header.get("remarks", ()))}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.isprintable():  # they go to terminals
            raise ValueError(f"{name}: wanted text that can be printed, got {text!r}")
    for name, array in arrays.items():
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
            raise ValueError(f"{name}: wanted numbers, got {array.dtype}")
        # Who took part in a round is told of each client.
        each = [(), (header["clients"],)] if array.dtype == bool else [()]
        if name.startswith(HISTORY) and (not array.ndim or array.shape[1:] not in each):
            raise ValueError(f"{name}: wanted one number a round, got shape {array.shape}")
    local = arrays.get("local")
    if local is not None and not 1 <= np.size(local, 0) <= header["clients"]:
        wanted = f"at most {header['clients']} clients"
        raise ValueError(f"local: wanted {wanted}, got shape {local.shape}")


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
