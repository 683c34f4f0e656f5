"""Result files, written by `Solution.save` and read by `load`.

The layout is that of `jaxfed.core.store.arrays`, of the kind `jaxfed.solution`. The header holds

    versions     of Python, jaxfed and the packages used
    algorithm    the algorithm as printed
    clients      number of clients; `local` may hold only those of one process
    rounds       number of rounds that ran
    status       how the run ended, a name of `jaxfed.Status`
    remarks      what to know before relying on the result, as sentences
    channel      the channels as printed; empty if they are not known
    participation   who took part in a round, as printed; empty if it is not known
    guarantees   what protects the persons behind the data, as of `Guarantee`; empty if nothing does
    names        of clients, features and entities, as lists of texts; null without any
    moments      names of the clients' moments, in the same form, if there are such moments
    preprocessing, imputation  names behind these models, in the same form, if there are such models

The arrays are `shared` and `local` if such a part is one array, `shared.encoder` and the like if it
is a tree of arrays, `history_NAME`, `ids`, `downlink` or `downlink.NAME` if there are local models,
`preprocessing.mean` and `preprocessing.scale` if samples were standardized, `imputation.mean` and
the like if missing entries were filled in, and `moments.data.dense` and the like of the clients'
moments. The command line adds entries that `load` ignores. A later layout will have another number,
and `load` will still read this one.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed._checks import check_count, check_instance, checked_path
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import Guarantee, checked_guarantee
from jaxfed.core.clients.imputation import Imputation
from jaxfed.core.clients.names import NAMELESS, Names, listing, replace_names, texts_of
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.common.printing import columns, in_bytes
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.remarks import is_told
from jaxfed.core.store import arrays as files
from jaxfed.linalg import Moment

KIND = "jaxfed.solution"
PARTS = Personalized._fields
BEFORE = {"preprocessing": Standardization, "imputation": Imputation}  # the fit, in this order
HISTORY = "history_"
IDS, DOWNLINK, MOMENTS = "ids", "downlink", "moments"
TEXTS = ("algorithm", "channel", "participation")
KNOWN = ("versions", "clients", "rounds", "status", "remarks", *TEXTS)
# The names of `jaxfed.Status`, and what each means.
STATUSES = {
    "round_limit": "All rounds ran before the stopping measure was small.",
    "converged": "The stopping measure is small.",
    "diverged": "An objective or a message is no longer finite.",
    "stopped": "A callback stopped the run.",
    "unmeasured": "The entry that `best` names was never a number: this is the last state.",
    "rising": "The objective rose.",
    "suboptimal": "A local component is common to all clients and exceeds the shared ones.",
    "noisy": "The objective no longer falls, though the stopping measure is not small.",
}


class Saved(NamedTuple):
    """The content of a result file: result, history, and how they were computed.

    Continue from it with `fit(..., warm_start=saved)`. The file does not record what the run sent,
    which `jaxfed.privacy.spent` needs to account for several runs.

    Attributes:
        result: the learned models, `result.shared` and `result.local`.
        history: `(rounds,)` arrays by name.
        rounds: number of rounds that ran.
        status: how the run ended, a name of `jaxfed.Status`.
        algorithm: the algorithm as printed.
        clients: number of clients.
        versions: of Python, jaxfed and the packages used, by name.
        remarks: what to know before relying on the result; see `Solution.remarks`.
        preprocessing: the standardization before the fit, if `save` was given one.
        imputation: the model that filled in missing entries, if `save` was given one.
        ids: the clients' ids, in the order of `result.local`; None if they are not known.
        downlink: what the server sent last, from which new clients start, as arrays by path; None
            without local models.
        moments: the clients' second moments, if `save` was given them.
        channel: the channels as printed.
        participation: who took part in a round, as printed.
        guarantees: what protects the persons behind the clients' data: those of the releases from
            which all messages were computed; empty if some were computed from other data.
        names: the names of clients and features, as of the solution.
    """

    result: Personalized
    history: dict[str, np.ndarray]
    rounds: int
    status: str
    algorithm: str
    clients: int
    versions: dict[str, str]
    remarks: tuple[str, ...] = ()
    preprocessing: Standardization | None = None
    imputation: Imputation | None = None
    ids: Int[Array | np.ndarray, " clients"] | None = None
    downlink: Mapping[str, Array | np.ndarray] | None = None
    moments: Clients | None = None
    channel: str = ""
    participation: str = ""
    guarantees: tuple[Guarantee, ...] = ()
    names: Names = NAMELESS

    def summary(self) -> str:
        """Describe the run, how it ended and what it cost, in two columns of text."""
        return columns(story(self))


def story(run: Any) -> dict[str, str]:
    """What ran, how it ended and what it cost, for a `Saved` or anything with its attributes."""
    rows = {
        "verdict": run.status and f"{run.status.replace('_', ' ')}: {STATUSES[run.status]}",
        "algorithm": run.algorithm,
        "clients": f"{run.clients:,}{_listed(run.names.clients)}",
        "features": "" if run.names.of_views else _counted(run.names.features),
        "rounds": run.status and f"{run.rounds:,}",
    }
    rows = {name: text for name, text in rows.items() if text}  # of a result alone, little is known
    objective = np.asarray(run.history.get("objective", ()))
    if objective.size:
        rows["objective"] = f"{objective[0]:.6g} entering the first round, {objective[-1]:.6g} last"
    participants = np.asarray(run.history.get("participants", ()))
    if participants.size and (participants != run.clients).any():
        rows["participants"] = f"{participants.mean():.4g} a round"
    if run.guarantees:
        rows["privacy"] = "; ".join(map(str, run.guarantees))
    for name, words in (("bits_up", "sent"), ("bits_down", "received")):
        if np.size(run.history.get(name, ())):
            rows[words] = f"{in_bytes(run.history[name][-1] / 8)} by a client"
    for name in PARTS:
        leaves = jax.tree.leaves(getattr(run.result, name))
        rows[name] = ", ".join(str(tuple(np.shape(leaf))) for leaf in leaves) or "nothing"
    for number, remark in enumerate(run.remarks, 1):
        rows["remark" if len(run.remarks) == 1 else f"remark {number}"] = remark
    return rows


def _counted(names: Sequence[str] | None) -> str:
    """How many names there are, and the first few."""
    return f"{len(names):,}{_listed(names)}" if names else ""


def _listed(names: Sequence[str] | None) -> str:
    """The first few names in brackets, if there are any."""
    return f" ({listing(names)})" if names else ""


def ended_badly(status: str, history: Mapping[str, np.ndarray]) -> bool:
    """Whether a run is known to have ended without a result to rely on.

    Of a run that is too short for a stopping measure, nothing is known.
    """
    measure = np.asarray(history.get("stopping_measure", ()), float)
    measure = measure[~np.isnan(measure)]
    known = len(measure) > 0 and is_told(measure[-1], len(measure))
    return status in ("diverged", "unmeasured", "rising", "noisy", "suboptimal") or (
        status == "round_limit" and known
    )


def write(path: str | os.PathLike[str], run: Saved, *, private: bool = False) -> None:
    """Write a file, completely or not at all.

    Args:
        path: the file.
        run: its content.
        private: whether only the file's owner may read it.

    Raises:
        ValueError: if `path` is not a path.
        OSError: if the file cannot be written.
    """
    files.write(checked_path("path", path), KIND, *_content(run), private=private)


def entries(run: Saved) -> dict[str, np.ndarray]:
    """The file's content by name, to store it in a larger file."""
    return files.entries(KIND, *_content(run))


def _content(run: Saved) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the arrays of a file."""
    arrays: dict[str, Any] = {HISTORY + name: values for name, values in run.history.items()}
    for name in PARTS:
        arrays |= files.named(name, _arrays_of(getattr(run.result, name)))
    for name in (*BEFORE, IDS, MOMENTS):
        arrays |= files.named(name, getattr(run, name))
    arrays |= run.downlink or {}
    header = {name: getattr(run, name) for name in KNOWN}
    header["guarantees"] = [each._asdict() for each in run.guarantees]
    if run.moments is not None:
        header[MOMENTS] = run.moments.names._asdict()
    for name in BEFORE:
        if getattr(run, name) is not None:
            header[name] = getattr(run, name).names._asdict()
    return header | {"names": run.names._asdict()}, arrays


def _arrays_of(part: PyTree) -> PyTree:
    """A part of a result, without leaves that are not arrays, such as functions."""
    return eqx.filter(part, eqx.is_array)


def load(path: str | os.PathLike[str], *, like: Personalized | None = None) -> Saved:
    """Read a file that `Solution.save` wrote.

    Args:
        path: the file.
        like: a result of the same structure, for parts that are trees of arrays (networks); without
            it, such a part is a dictionary of its arrays by path.

    Returns:
        The result and its history.

    Raises:
        ValueError: if `Solution.save` did not write the file, the file was damaged or edited, or
            `like` has other parts, shapes or types.
        OSError: if the file cannot be read.
    """
    place = checked_path("path", path)
    if like is not None:
        check_instance("like", like, Personalized, "a jaxfed.Personalized, such as a result")
    try:
        header, arrays = files.read(place, KIND)
        known = _known(header)
        names = {name: known.pop(name) for name in BEFORE}
        before = {
            name: replace_names(kind(*map(jnp.asarray, found)), names[name])
            for name, kind in BEFORE.items()
            if (found := [x for path, x in arrays.items() if path.startswith(f"{name}.")])
        }
    except OSError:
        raise
    except Exception as error:  # its kind depends on what the header lacks
        raise ValueError(
            f"path: wanted a file that Solution.save wrote, got {place} ({error})"
        ) from error
    parts = {}
    for name in PARTS:
        part = {path: jnp.asarray(x) for path, x in arrays.items() if path.startswith(name)}
        parts[name] = part.get(name, part) if part else None
        if like is not None:
            whole = getattr(like, name)
            parts[name] = eqx.combine(files.rebuilt(name, part, _arrays_of(whole)), whole)
    history = {k.removeprefix(HISTORY): x for k, x in arrays.items() if k.startswith(HISTORY)}
    result, ids = Personalized(**parts), arrays.get(IDS)
    downlink = {name: x for name, x in arrays.items() if name.startswith(DOWNLINK)} or None
    found = {k: x for k, x in arrays.items() if k.startswith(MOMENTS)}
    moments = _moments(found, known.pop(MOMENTS))
    return Saved(result, history, ids=ids, downlink=downlink, moments=moments, **before, **known)


def _moments(found: Mapping[str, np.ndarray], names: Names) -> Clients | None:
    if not found:
        return None
    part: dict[str, Any] = {k.rpartition(".")[2]: jnp.asarray(x) for k, x in found.items()}
    forms = part.get("dense"), part.get("samples")  # of which one is None
    data = jax.vmap(Moment)(*forms, part["count"], part["trace"])
    return Clients(data, part["ids"], part["weights"], names=names)


def _known(header: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a header that describe a run.

    Raises:
        ValueError: if they are impossible, or have text that could control a terminal.
    """
    known = {name: header[name] for name in KNOWN}
    check_count("rounds", known["rounds"], least=0)
    check_count("clients", known["clients"])
    if known["status"] not in STATUSES:
        raise ValueError(f"status: wanted one of {tuple(STATUSES)}, got {known['status']!r}")
    packages, remarks = dict(known["versions"]), tuple(known["remarks"])
    guarantees = tuple(checked_guarantee(**each) for each in header.get("guarantees", ()))
    # Files of earlier versions have none.
    names = {
        part: Names.of_lists(*(header.get(part, {}).get(each) for each in Names._fields))
        for part in ("names", MOMENTS, *BEFORE)
    }
    # Files may come from others, and these texts are printed.
    texts = (
        *(known[name] for name in TEXTS),
        *remarks,
        *(each.mechanism for each in guarantees),
        *packages,
        *packages.values(),
        *header["types"],
        *(text for each in names.values() for text in texts_of(each)),
    )
    for text in texts:
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"wanted text that can be printed, got {text!r}")
    known |= {"versions": packages, "remarks": remarks, "guarantees": guarantees}
    return known | names
