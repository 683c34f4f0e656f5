"""Results in a file: written by `Solution.save`, read by `load`.

The layout is that of `jaxfed.core.store.arrays`, of the kind `jaxfed.solution`. The header holds

    versions     of Python, jaxfed and the packages that computed
    algorithm    the algorithm as it is printed
    clients      how many there were; `local` may hold those of one process alone
    rounds       how many ran
    status       how the run ended, a name of `jaxfed.Status`
    parts        for `shared` and `local`: null where there is none, else the paths of its arrays
    properties   what each array of `shared` and `local` was when it was saved: "orthonormal" (its
                 columns are), "finite" or "any"; a file may have none
    remarks      what to know before relying on the result, sentences; a file may have none

The arrays are `shared` and `local` where such a part is one array, `shared.encoder` and the like
where it is a tree of them, and `history_NAME`. The command line adds entries that `load` ignores:
the clients' names and what was subtracted. A later layout has another number, and `load` goes on
reading this one.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed._versions import versions
from jaxfed.core.common.checks import check_count, check_instance, checked_path
from jaxfed.core.common.printing import columns, in_bytes
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store import arrays as files

KIND = "jaxfed.solution"
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
        private: whether only its owner may read it.

    Raises:
        ValueError: for what is no path.
        OSError: if it cannot be written.
    """
    files.write(checked_path("path", path), KIND, *_content(run), private=private)


def entries(run: Saved) -> dict[str, np.ndarray]:
    """What the file holds, by name, for a file that holds more."""
    return files.entries(KIND, *_content(run))


def _content(run: Saved) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a file."""
    parts = {name: _leaves(name, getattr(run.result, name)) for name in PARTS}
    arrays = {path: np.asarray(leaf) for part in parts.values() for path, leaf in part.items()}
    header = {
        "versions": run.versions,
        "algorithm": run.algorithm,
        "clients": run.clients,
        "rounds": run.rounds,
        "status": run.status,
        "parts": {name: list(part) or None for name, part in parts.items()},
        "properties": {path: _property(leaf, SLACK / 2) for path, leaf in arrays.items()},
        "remarks": list(run.remarks),
    }
    history = {HISTORY + name: np.asarray(values) for name, values in run.history.items()}
    return header, arrays | history


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
    try:
        header, arrays = files.read(place, KIND)
        _check_header(header)
        _check_arrays(header, arrays)
    except OSError:
        raise
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{place}: not a file that Solution.save wrote ({error})") from error
    parts = {}
    for name in PARTS:
        part = {path: jnp.asarray(arrays[path]) for path in header["parts"][name] or ()}
        parts[name] = part.get(name, part) if part else None
        if like is not None:
            whole = getattr(like, name)
            found = files.rebuilt(name, part, eqx.filter(whole, eqx.is_array))
            parts[name] = eqx.combine(found, whole)
    history = {k.removeprefix(HISTORY): x for k, x in arrays.items() if k.startswith(HISTORY)}
    described = {name: header[name] for name in Saved._fields if name in header}
    described["remarks"] = tuple(header.get("remarks", ()))
    return Saved(result=Personalized(**parts), history=history, **described)


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


def _leaves(name: str, tree: PyTree) -> dict[str, Any]:
    """A part's arrays by their paths, without what else its tree holds, such as functions."""
    return files.named(name, eqx.filter(tree, eqx.is_array))


def saved(run: Any, status: str) -> Saved:
    """What of a solution goes into a file."""
    history = {name: np.asarray(values) for name, values in run.history.items()}
    clients = len(run.failure.clients)
    return Saved(
        run.result, history, int(run.rounds), status, repr(run.algorithm), clients, versions()
    )
