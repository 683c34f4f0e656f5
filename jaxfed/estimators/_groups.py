"""Group rows by client, and warn if clients are not given."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxfed import aggregation
from jaxfed._checks import check_flag, check_whole
from jaxfed._names import caller
from jaxfed._rows import rows_of_each
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.estimators._arrays import client_labels
from jaxfed.pca.variance_ranks import check_rank

LISTED = 5  # clients in a warning


def robust(algorithm: Algorithm, clients: int) -> Algorithm:
    """Return the algorithm with robust aggregation, each client as a group of its own."""
    if clients < 3:
        raise ValueError(f"robust: wanted three clients or more, got {clients}")
    return aggregation.Robust(algorithm, groups=clients)


def check_parameters(estimator: Any, ranks: Sequence[str]) -> None:
    """Refuse parameters of wrong types.

    Args:
        estimator: has them.
        ranks: the parameters that are numbers of components, or shares of the variance.

    Raises:
        ValueError: names the parameter.
    """
    check_whole("rounds", estimator.rounds)
    for name in ranks:
        check_rank(name, getattr(estimator, name), private=estimator.epsilon is not None)
    for name in ("center", "robust", "whiten"):
        check_flag(name, getattr(estimator, name))


def labels_of(groups: Any, X: np.ndarray, method: str) -> np.ndarray:
    """Return the client of each row; warn, and take all rows for one client's, if none is given."""
    if groups is None:
        warn("got none, so all samples are treated as one client's", method)
        return np.zeros(len(X), int)
    return client_labels(groups, X)


@runtime_checkable
class Model(Protocol):
    """How the samples of one client and their scores are related."""

    def scores(self, samples: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n r"]:
        """Compute scores of samples."""
        ...

    def reconstructed(self, scores: Float[np.ndarray, "n r"]) -> Float[np.ndarray, "n d"]:
        """Compute samples from scores, of which only the first count where there are more."""
        ...


class Group(NamedTuple):
    """The rows of one client, and its model; None for an unknown client."""

    rows: Int[np.ndarray, " n"]
    model: Any  # a `Model`


class Parted(NamedTuple):
    """Samples, centred where they are, and the client each belongs to."""

    X: Float[np.ndarray, "n d"]  # NaN for missing entries
    completed: Float[np.ndarray, "n d"]
    groups: list[Group]


class KnownClients(NamedTuple):
    """The clients that were in `fit` or `personalize`."""

    labels: np.ndarray
    models: Sequence[Model]
    anybody: Model  # of samples without a client
    has_own: bool  # whether clients have local components


def groups_of(X: np.ndarray, groups: Any, known: KnownClients) -> list[Group]:
    """Return the rows of each client; warn if clients are not given or all unknown."""
    if groups is None:
        if len(known.labels) > 1 and known.has_own:
            text = (
                f"got none, so samples belong to none of the {len(known.labels)} clients, and "
                "local components do not count"
            )
            warn(text, "transform", "score")
        return [Group(np.arange(len(X)), known.anybody)]
    labels, places = np.unique(client_labels(groups, X), return_inverse=True)
    if fault := other_type(known.labels, labels):
        message = f"{fault}, so all samples belong to clients that were not in fit"
        warnings.warn(message, stacklevel=caller())
    models = dict(zip(known.labels, known.models, strict=True))
    every = np.arange(len(X))
    parts = zip(rows_of_each(places), labels, strict=True)
    return [Group(every[rows], models.get(label)) for rows, label in parts]


def warn_of_new(groups: Any, parts: Sequence[Group], known: np.ndarray) -> None:
    """Warn that local components of new clients are learned from the samples at hand.

    If all labels are of another type than in `fit`, `groups_of` has already warned.
    """
    labels = np.asarray(groups)
    new = [part.rows for part in parts if part.model is None]
    if new and not other_type(known, labels):
        shown = ", ".join(f"{labels[rows[0]]} ({len(rows)} samples)" for rows in new[:LISTED])
        more = f" and {len(new) - LISTED} more" * (len(new) > LISTED)
        warnings.warn(
            f"groups: {shown}{more} not in fit; local components come from these samples alone. "
            "personalize(X, groups) learns and keeps them",
            stacklevel=caller(),
        )


def other_type(known: np.ndarray, labels: np.ndarray) -> str:
    """Return the error if labels are of another type than in `fit`: 0 is not "0"."""
    wanted, got = ("numbers" if each.dtype.kind in "biuf" else "names" for each in (known, labels))
    return "" if wanted == got else f"groups: wanted {wanted}, as in fit, got {got}"


def warn(what: str, *methods: str) -> None:
    """Warn that groups are missing, and say how pipelines and searches pass them on."""
    requests = ", ".join(f"set_{method}_request(groups=True)" for method in methods)
    warnings.warn(
        f"groups: {what}; pass the label of each row's client. Pipelines and searches pass them on "
        f"after sklearn.set_config(enable_metadata_routing=True) and the estimator's {requests}",
        stacklevel=caller(),
    )
