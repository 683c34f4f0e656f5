"""What estimators keep of samples from earlier calls: means and second moments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed._checks import check_number
from jaxfed.core.clients.clients import Clients
from jaxfed.estimators._completion import Completion
from jaxfed.linalg import Moment
from jaxfed.stream import Forgetting

Table = Float[np.ndarray, "n d"]


class Seen(NamedTuple):
    """Moments of all samples so far."""

    origin: Float[np.ndarray, " d"]  # subtracted from samples, so that moments do not cancel
    labels: np.ndarray  # of the clients, by id
    moments: Clients  # second moments of (sample - origin, 1), which include the means


class Summary(NamedTuple):
    """The clients' moments about the mean, in the order of their labels."""

    labels: np.ndarray
    mean: Float[np.ndarray, " d"]
    clients: Clients
    tables: list[Table]  # for each client, rows that have its second moment
    together: Table  # rows that have the second moment of all samples


def check_forgetting(given: object) -> None:
    """Refuse values other than None and a share in (0, 1].

    Raises:
        ValueError: for other values.
    """
    if given is not None:
        check_number("forgetting", given, "a number in (0, 1] or None", lambda x: 0 < x <= 1)


def taken_in(
    seen: Seen | None,
    X: Table,
    labels: np.ndarray,
    forgetting: float | None,
    center: bool,
    completion: Completion | None,
) -> Seen:
    """Add new samples to those seen so far.

    Args:
        seen: moments of the samples so far; None if there are none.
        X: new samples as rows.
        labels: the client of each row.
        forgetting: the share of the new samples; None forgets nothing.
        center: whether samples will be centred.
        completion: imputes missing entries; None for complete samples.
    """
    rule = Forgetting(forgetting)
    if seen is None:
        origin = X.mean(axis=0) if center else np.zeros(X.shape[1])
        if completion is not None:
            origin = completion.origin
        known = labels[:0]
    else:
        origin, known = seen.origin, seen.labels
    present, places = np.unique(labels, return_inverse=True)
    known = np.concatenate([known, np.setdiff1d(present, known)])
    number = {label: place for place, label in enumerate(known.tolist())}
    if completion is None:
        rows = np.column_stack([X - origin, np.ones(len(X))])
        newer = Clients.from_samples([rows[places == i] for i in range(len(present))])
    else:
        newer = completion.moments(X, labels)
    ids = jnp.asarray([number[label] for label in present.tolist()], jnp.int32)
    newer = Clients(newer.data, ids, newer.weights)
    return Seen(origin, known, rule.update(None if seen is None else seen.moments, newer))


def summary_of(seen: Seen, center: bool) -> Summary:
    """Return the clients' moments, about the mean of all samples if `center`."""
    order = np.argsort(seen.labels[np.asarray(seen.moments.ids)])
    clients = seen.moments.take(order)
    (part,) = clients.parts
    moments, counts = np.asarray(part.dense, float), np.asarray(part.count, float)
    means = moments[:, :-1, -1]
    # The last column of a moment of (x - origin, 1) is the mean, and every sample counts equally.
    mean = counts @ means / counts.sum() if center else np.zeros(means.shape[1])
    # About a mean μ a moment is (I, -μ) S (I, -μ)ᵀ.
    about = np.column_stack([np.eye(len(mean)), -mean])
    moments = about @ moments @ about.T
    data = jax.vmap(Moment.from_dense)(jnp.asarray(moments, part.dense.dtype), part.count)
    together = np.tensordot(counts / counts.sum(), moments, 1)
    return Summary(
        labels=seen.labels[np.asarray(clients.ids)],
        mean=seen.origin + mean,
        clients=Clients(data, clients.ids, clients.weights),
        tables=[_rows(moment) for moment in moments],
        together=_rows(together),
    )


def _rows(moment: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Return as many rows as features, with this second moment."""
    values, vectors = np.linalg.eigh(moment)
    # Second moments of tables are divided by their number of rows, here that of the features.
    return np.sqrt(len(values) * np.maximum(values, 0))[:, None] * vectors.T
