"""What estimators keep of samples from earlier calls: means and second moments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed._checks import check_number
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.checks import on_device
from jaxfed.core.clients.clients import Clients
from jaxfed.estimators._arrays import deviation, median_of_means
from jaxfed.estimators._completion import Completion
from jaxfed.linalg import Moment
from jaxfed.stream import Forgetting

Table = Float[np.ndarray, "n d"]


class Seen(NamedTuple):
    """Moments of all samples so far."""

    origin: Float[np.ndarray, " d"]  # subtracted from samples, so that moments do not cancel
    labels: np.ndarray  # of the clients, by id
    moments: Clients  # second moments of ((sample - origin) / unit, 1), which include the means
    unit: Float[np.ndarray, " d"] | None = None  # None for one


class Summary(NamedTuple):
    """The clients' scaled moments about the mean, in the order of their labels."""

    labels: np.ndarray
    mean: Float[np.ndarray, " d"]
    scale: Float[np.ndarray, " d"] | None
    clients: Clients
    moments: Float[np.ndarray, "m d d"]  # the clients' data, on the host


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
    robust: bool,
    scale: bool,
    completion: Completion | None,
    weights: np.ndarray | None = None,
) -> Seen:
    """Add new samples to those seen so far.

    Args:
        seen: moments of the samples so far; None if there are none.
        X: new samples as rows.
        labels: the client of each row.
        forgetting: the share of the new samples; None forgets nothing.
        center: whether samples will be centred.
        robust: whether by the median of the clients' means.
        scale: whether samples will be scaled.
        completion: imputes missing entries; None for complete samples.
        weights: positive, of complete samples; None counts each once.
    """
    rule = Forgetting(forgetting)
    present, places = np.unique(labels, return_inverse=True)
    if seen is None:
        origin, unit = np.zeros(X.shape[1]), None
        if center or scale:  # of a variance about a distant origin, few digits are left
            origin = median_of_means(X, places, weights) if robust else _mean(X, weights)
        if completion is not None:
            origin, unit = completion.origin, completion.unit if scale else None
        known = labels[:0]
    else:
        origin, unit, known = seen.origin, seen.unit, seen.labels
    known = np.concatenate([known, np.setdiff1d(present, known)])
    number = {label: place for place, label in enumerate(known.tolist())}
    if completion is not None:
        newer = completion.moments(X, labels)
    else:
        rows = np.column_stack([X - origin, np.ones(len(X))])
        clients = rows_of_each(places)
        if weights is None:
            newer = Clients.from_samples([rows[own] for own in clients])
        else:
            totals = np.bincount(places, weights)
            scaled = rows * np.sqrt(weights / totals[places])[:, None]
            moments = np.stack([scaled[own].T @ scaled[own] for own in clients])
            newer = Clients.from_moments(moments, counts=totals)
    ids = jnp.asarray([number[label] for label in present.tolist()], jnp.int32)
    newer = Clients(newer.data, ids, newer.weights)
    return Seen(origin, known, rule.update(None if seen is None else seen.moments, newer), unit)


def _mean(X: Table, weights: np.ndarray | None) -> Float[np.ndarray, " d"]:
    return X.mean(axis=0) if weights is None else np.average(X, axis=0, weights=weights)


def summary_of(seen: Seen, center: bool, robust: bool, scale: bool) -> Summary:
    """Return the clients' moments, if `center` about the mean of all samples.

    If `robust`, about the median of the clients' means. If `scale`, of samples divided by the
    unit of the moments, or where they have none, by the deviations that they have.
    """
    ids = np.asarray(seen.moments.ids)
    order = np.argsort(seen.labels[ids])
    (part,) = seen.moments.parts
    # On the host, since JAX would compile each step.
    both, counts, weights, ids = (
        np.asarray(x)[order] for x in (part.dense, part.count, seen.moments.weights, ids)
    )
    unit = 1.0 if seen.unit is None else seen.unit
    means = both[:, :-1, -1]
    # The last column of a moment of (x - origin, 1) is the mean, and every sample counts equally.
    about = np.median(means, axis=0) if robust else counts @ means / counts.sum()
    mean = about if center else -seen.origin / unit
    # About a mean μ a moment is (I, -μ) S (I, -μ)ᵀ.
    cross = means[:, :, None] * mean
    moments = both[:, :-1, :-1] - cross - cross.swapaxes(1, 2) + mean[:, None] * mean
    scales = seen.unit if scale else None
    if scale and scales is None:
        squares = np.diagonal(both, axis1=1, axis2=2)[:, :-1] - (2 * means - about) * about
        variance = np.median(squares, axis=0) if robust else counts @ squares / counts.sum()
        scales = deviation(variance, seen.origin + about, np.dtype(float))
    relative = (1.0 if scales is None else scales) / unit
    moments = moments / relative / np.reshape(relative, (-1, 1))
    traces = np.trace(moments, axis1=1, axis2=2)
    dense, sizes, traces = (on_device(x, fresh=True) for x in (moments, counts, traces))
    data = jax.vmap(Moment)(dense, None, sizes, traces)
    clients = Clients(data, on_device(ids), on_device(weights))
    found = seen.origin + unit * mean if center else np.zeros(len(seen.origin))
    return Summary(seen.labels[ids], found, scales, clients, moments)
