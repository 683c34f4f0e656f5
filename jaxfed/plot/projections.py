"""Axes and scores to draw, from whatever form of a result a caller has."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfed._checks import refuse
from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import learned_by
from jaxfed.core.clients.samples import IncompleteSamples, Samples
from jaxfed.core.run.result import Fitted, clients_of_run, names_of, place_of, result_of
from jaxfed.metrics.components import OVERLAP
from jaxfed.pca.fitted import principal_axes
from jaxfed.plot import drawing

_CLIENTS = 5  # of a model, whose local components are drawn

Tables = list[Float[np.ndarray, "n_i d"]]


class Projected(NamedTuple):
    """Scores of samples along axes.

    Attributes:
        scores: of the samples of each client that is drawn, `(n_i, r)`.
        axes: the axes, `(d, r)`.
        shares: of the samples' squared lengths, along each axis, from 0 to 1; None if the axes are
            not orthonormal.
        names: of the clients that are drawn.
        features: names of the features; None if they have none.
        label: what an axis is.
    """

    scores: list[Float[np.ndarray, "n_i r"]]
    axes: Float[np.ndarray, "d r"]
    shares: Float[np.ndarray, " r"] | None
    names: list[str]
    features: list[str] | None
    label: str


def clients_behind(fitted: Fitted, clients: Any, groups: Any) -> Clients:
    """The clients of a run, or those that an estimator makes of samples as rows.

    Args:
        fitted: as for `jaxfed.pca.transform`.
        clients: the caller's argument of that name: `Clients`, or what the estimator was fitted to.
        groups: the client of each row; None with `Clients`.

    Raises:
        ValueError: if an estimator is not fitted, or clients or groups are not those of the run.
    """
    kind = type(fitted)
    if hasattr(kind, "saved_") and learned_by(fitted) is fitted:
        raise ValueError(f"fitted: wanted a fitted estimator, got {kind.__name__} before fit")
    if not isinstance(clients, Clients) and hasattr(kind, "saved_"):
        estimator: Any = fitted
        return estimator._clients_of(clients, groups)
    if groups is not None:
        raise refuse("groups", "None but for an estimator and its samples as rows", groups)
    return clients_of_run(fitted, clients)


def tables_of(clients: Clients) -> Tables:
    """Each client's samples, in their precision, which is at least single.

    Raises:
        ValueError: if clients have missing entries, hold something else than samples, or these are
            not in the memory of this process.
    """
    held = clients.parts[0]
    if isinstance(held, IncompleteSamples):
        raise ValueError(
            "clients: wanted complete samples, got some with missing entries; complete them with "
            "jaxfed.preprocess.Impute"
        )
    if not isinstance(held, Samples):
        wanted = "clients: wanted samples, which have scores, got clients that hold"
        raise ValueError(f"{wanted} {type(held).__name__}")
    clients.layout.check_in_memory("a picture of scores")
    if not clients.layout.in_one_process:
        raise refuse("clients", "those of one process", clients)
    with precision_of(clients.weights.dtype):
        data = clients.unbucketed().data
        values = np.asarray(data.values.astype(data.count.dtype))
        counts = np.asarray(data.count).astype(int)
    return [table[:count] for table, count in zip(values, counts, strict=True)]


def turned(
    components: Float[np.ndarray, "d _r"], samples: Tables | None
) -> Float[np.ndarray, "d _r"]:
    """Principal axes of orthonormal components if there are samples; else the components."""
    present = components[:, np.abs(components).max(axis=0) > 0]  # a client may have fewer
    if not samples or not present.shape[1] or not _are_orthonormal(present):
        return components
    with precision_of(np.dtype(float)):
        return principal_axes(present.astype(float), samples)


def projected(
    fitted: Fitted,
    clients: Any,
    *,
    groups: Any = None,
    client: int | str | None = None,
    names: Sequence[str] | None = None,
    feature_names: Any = None,
) -> Projected:
    """Compute scores along the shared axes, or of one client along its local ones.

    Axes are principal ones, to which every client counts equally; of an estimator, they are its
    own, to which every sample does.

    Args:
        fitted: as for `jaxfed.pca.transform`.
        clients: as for `clients_behind`.
        groups: as for `clients_behind`.
        client: name or id of the client whose samples and local axes are wanted.
        names: names of all clients.
        feature_names: names of the features.

    Raises:
        ValueError: if there are no such components or samples, or names do not fit.
    """
    clients = clients_behind(fitted, clients, groups)
    result = result_of(fitted, "PCA")
    drawing.check_names("names", names, len(clients))
    known = names or clients.names.clients or [f"client {i}" for i in range(len(clients))]
    given = clients.names.features if feature_names is None else feature_names
    features = drawing.checked_features(given, clients.features)
    label, chosen, components = "shared axis", list(known), result.shared
    if client is not None:
        components = _local(fitted, result.local, len(clients), client)
        place = place_of(fitted, client, len(components))
        components, clients, chosen = components[place], clients.take([place]), [known[place]]
        label = "local axis"
    axes = _checked(fitted, components, clients.features, "shared" if client is None else "local")
    tables = tables_of(clients)
    with np.errstate(over="ignore"):
        energies = [np.einsum("ij,ij->", table, table, dtype=float) for table in tables]
    finite = np.flatnonzero(np.isfinite(energies))
    if not finite.size:
        raise ValueError("clients: wanted finite samples, got NaN or infinity in all of them")
    tables, chosen = [tables[i] for i in finite], [chosen[i] for i in finite]
    own = learned_by(fitted) is not fitted
    axes = axes if own else turned(axes, tables)
    scores = [table @ axes for table in tables]
    shares = None
    if _are_orthonormal(axes):
        # Samples of an estimator count equally, otherwise clients do.
        sizes = np.asarray([1 if own else len(table) for table in tables], float)
        along = [np.sum(x**2, axis=0) for x in scores] / sizes[:, None]
        shares = along.sum(axis=0) / (np.sum(np.asarray(energies)[finite] / sizes) or 1)
    return Projected(scores, axes, shares, chosen, features, label)


def groups_of(groups: Any) -> dict[str, np.ndarray]:
    """Components in columns by name: given ones, or the shared and some local ones of a model.

    Raises:
        ValueError: if there are none, or one is not `(features, rank)`.
    """
    named = groups if isinstance(groups, Mapping) else _parts(groups)
    arrays = {
        name: drawing.host(f"groups[{name!r}]", group, 2, "components of shape (features, rank)")
        for name, group in named.items()
        if group is not None
    }
    drawing.check_named("groups", arrays, "components")
    return arrays


def features_of(groups: Any, feature_names: Any) -> Any:
    """The given names of features, or else those that a model's features have."""
    if feature_names is None and not names_of(groups).of_views:
        return names_of(groups).features
    return feature_names


def _parts(model: Any) -> dict[str, Any]:
    """The shared components of a model and the local ones of its first clients, by name."""
    shared, local = result_of(model, "PCA", "groups")
    # Those of an estimator's clients, or names.
    labels = names_of(model).clients or range(_CLIENTS)
    names = [f"client {label}" for label in labels[:_CLIENTS]]
    if local is None or np.shape(local)[-1:] == (0,):
        return {"shared": shared}
    if np.ndim(local) != 3:
        raise refuse("groups", "a model with components (features, rank) of each client", model)
    return {"shared": shared, **dict(zip(names, local[:_CLIENTS], strict=False))}


def _local(fitted: Fitted, local: Any, clients: int, client: object) -> Any:
    if local is None:
        raise refuse("client", "None where nothing is local", client)
    if np.ndim(local) != 3 or len(local) != clients:
        wanted = f"local components (features, rank) of each of {clients} clients"
        raise refuse("fitted", wanted, fitted)
    return local


def _checked(fitted: Fitted, components: Any, features: int, kind: str) -> np.ndarray:
    """Finite components in double precision, `(features, rank)`, without columns of zeros."""
    if components is None or np.ndim(components) != 2 or len(components) != features:
        raise refuse("fitted", f"{kind} components of {features} features", fitted)
    axes = drawing.host("fitted", components, 2, f"{kind} components").astype(float)
    present = axes[:, np.abs(axes).max(axis=0) > 0]
    if not present.shape[1]:
        raise ValueError(f"fitted: wanted {kind} components, got zeros")
    return present


def _are_orthonormal(components: np.ndarray) -> bool:
    gram = components.T.astype(float) @ components
    return bool(np.abs(gram - np.eye(len(gram))).max() < OVERLAP)
