"""Splits a data set over clients, and each client's samples into training and test sets.

These functions run on the host and return NumPy arrays, which may differ in length between
clients. Every sample goes to at most one client. The same random key gives the same split.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, Shaped

from jaxfed._checks import (
    check_factor,
    check_list,
    check_number,
    check_positive,
    check_whole,
    checked_key,
    checked_labels,
    counts_of,
    host_array,
    refuse,
)

ArrayLike = Array | np.ndarray


class Partition(NamedTuple):
    """One data set split over clients.

    Attributes:
        samples: each client's samples.
        labels: each client's labels; an empty list if the data set has no labels.
        indices: the positions of each client's samples in the data set.
    """

    samples: list[Shaped[np.ndarray, "n_i ..."]]
    labels: list[Shaped[np.ndarray, " n_i"]]
    indices: list[Int[np.ndarray, " n_i"]]


def partition_iid(
    samples: Shaped[ArrayLike, "n ..."],
    labels: Shaped[ArrayLike, " n"] | None,
    clients: int,
    *,
    key: PRNGKeyArray,
    sizes: int | Sequence[int] | None = None,
) -> Partition:
    """Split at random, so that all clients have the same distribution.

    Args:
        samples: the whole data set.
        labels: a label for each sample, or None.
        clients: number of clients.
        key: random key.
        sizes: samples per client, one number or one per client; by default all samples are divided
            as equally as possible.

    Returns:
        Samples, labels and indices of each client.

    Raises:
        ValueError: if lengths differ or there are too few samples.
    """
    samples, labels = _check(samples, labels, clients)
    sizes = counts_of("sizes", _equal(len(samples), clients) if sizes is None else sizes, clients)
    if sum(sizes) > len(samples):
        raise ValueError(
            f"sizes: wanted {len(samples)} at most, the number of samples, got {sum(sizes)} in all"
        )
    order = _generator(key).permutation(len(samples))[: sum(sizes)]
    return _take(samples, labels, np.split(order, np.cumsum(sizes)[:-1]))


def partition_by_class(
    samples: Shaped[ArrayLike, "n ..."],
    labels: Shaped[ArrayLike, " n"],
    clients: int,
    classes_per_client: int,
    *,
    key: PRNGKeyArray,
    sizes: int | Sequence[int] | None = None,
    classes: Shaped[ArrayLike, " k"] | Sequence[int] | None = None,
) -> Partition:
    """Give each client samples of only a few classes (pathological label skew).

    Clients take turns drawing classes at random among those drawn least so far, so that the numbers
    of clients per class differ by at most one. The clients of a class share its samples without
    overlap.

    Args:
        samples: the whole data set.
        labels: the class of each sample.
        clients: number of clients.
        classes_per_client: number of distinct classes of each client.
        key: random key.
        sizes: samples per client, one number or one per client, divided equally (up to one) among
            its classes; by default the clients of a class share all of its samples.
        classes: the classes to draw from; by default all that have samples.

    Returns:
        Samples, labels and indices of each client.

    Raises:
        ValueError: if lengths differ, there are fewer classes than `classes_per_client`, a class
            has too few samples for its clients, or one of `classes` has none or is repeated.

    Source:
        McMahan et al. (2017), Communication-efficient learning of deep networks from
        decentralized data, section 3.
    """
    samples, labels = _check(samples, labels, clients)
    known = _classes(labels, classes)
    check_whole("classes_per_client", classes_per_client, most=len(known))
    rng = _generator(key)
    owns = np.zeros((clients, len(known)), bool)  # which client has which class
    for client in range(clients):
        # Order by how often a class was drawn, at random among equals.
        least_drawn = np.lexsort((rng.random(len(known)), owns.sum(axis=0)))
        owns[client, least_drawn[:classes_per_client]] = True

    available = np.array([np.sum(labels == value) for value in known])
    quota = np.zeros(owns.shape, int)  # samples of each class for each client
    if sizes is None:
        for c in range(len(known)):
            quota[owns[:, c], c] = _equal(int(available[c]), int(owns[:, c].sum()))
    else:
        for client, size in enumerate(counts_of("sizes", sizes, clients)):
            quota[client, owns[client]] = _equal(size, classes_per_client)
    # Even a client whose quota rounds to zero needs one sample of each of its classes.
    needed = np.maximum(quota, owns).sum(axis=0)
    if np.any(needed > available):
        c = int(np.argmax(needed > available))
        raise ValueError(
            f"clients, labels: class {known[c]} has {available[c]} samples, but its "
            f"{owns[:, c].sum()} clients need {needed[c]}"
        )
    if np.any(quota[owns] == 0):
        raise ValueError(f"sizes: wanted at least classes_per_client = {classes_per_client}")

    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c, value in enumerate(known):
        members = rng.permutation(np.flatnonzero(labels == value))
        # The last piece, beyond all clients' quotas, is left over.
        for part, share in zip(parts, np.split(members, np.cumsum(quota[:, c])), strict=False):
            part.append(share)
    return _take(samples, labels, [np.concatenate(part) for part in parts])


def partition_dirichlet(
    samples: Shaped[ArrayLike, "n ..."],
    labels: Shaped[ArrayLike, " n"],
    clients: int,
    alpha: float,
    *,
    key: PRNGKeyArray,
    min_samples: int = 1,
) -> Partition:
    """Divide each class in Dirichlet(alpha, ..., alpha) proportions (graded label skew).

    A small `alpha` gives a class to few clients, a large one to all equally. Clients' sizes differ
    too. Every sample is used. A client with fewer than `min_samples` gets random samples from the
    largest client, which always works, unlike drawing again.

    Args:
        samples: the whole data set.
        labels: the class of each sample.
        clients: number of clients.
        alpha: concentration, positive.
        key: random key.
        min_samples: minimum number of samples of a client.

    Returns:
        Samples, labels and indices of each client.

    Raises:
        ValueError: if lengths differ, `alpha` is not positive or there are too few samples.

    Source:
        Hsu, Qi & Brown (2019), Measuring the effects of non-identical data distribution for
        federated visual classification.
    """
    samples, labels = _check(samples, labels, clients)
    check_positive("alpha", alpha, single=True)
    _check_min_samples(len(samples), clients, min_samples)
    rng = _generator(key)
    shares: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        # For tiny alpha all gamma variables may underflow to 0; in the limit one client owns all.
        with np.errstate(invalid="ignore", divide="ignore"):
            proportions = rng.dirichlet(np.full(clients, alpha))
        if not np.isclose(proportions.sum(), 1):
            proportions = np.eye(clients)[rng.integers(clients)]
        # Rounding the ends instead of the shares makes the shares add up.
        ends = np.round(np.cumsum(proportions) * len(members)).astype(int)
        for share, part in zip(shares, np.split(members, ends[:-1]), strict=True):
            share.append(part)
    indices = [rng.permutation(np.concatenate(share)) for share in shares]
    for i in range(clients):
        while (missing := min_samples - len(indices[i])) > 0:
            richest = max(range(clients), key=lambda j: len(indices[j]))
            # The largest client must keep enough samples itself.
            spare = min(missing, len(indices[richest]) - min_samples)
            indices[i] = np.concatenate([indices[i], indices[richest][:spare]])
            indices[richest] = indices[richest][spare:]
    return _take(samples, labels, indices)


def partition_sizes(
    total: int,
    clients: int,
    skew: float = 0.0,
    *,
    key: PRNGKeyArray,
    min_samples: int = 1,
) -> Int[np.ndarray, " m"]:
    """Draw unequal numbers of samples, proportional to log-normal weights exp(skew z).

    Args:
        key: random key.
        total: number of samples to divide.
        clients: number of clients m.
        skew: standard deviation of the logarithm of a client's size; 0 gives equal sizes, up to
            one.
        min_samples: minimum number of samples of a client.

    Returns:
        Sizes that add up to `total`.

    Raises:
        ValueError: if `skew` is negative or there are too few samples.
    """
    check_whole("total", total)
    check_whole("clients", clients)
    check_factor("skew", skew, single=True)
    _check_min_samples(total, clients, min_samples)
    logits = skew * _generator(key).standard_normal(clients)
    weights = np.exp(logits - logits.max())  # shifted, so that nothing overflows
    exact = (total - min_samples * clients) * weights / weights.sum()
    sizes = np.floor(exact).astype(int)
    # Round up the largest remainders.
    rest = total - min_samples * clients - sizes.sum()
    sizes[np.argsort(sizes - exact, kind="stable")[:rest]] += 1
    return sizes + min_samples


def train_test_split(
    arrays: Sequence[Shaped[ArrayLike, "n_i ..."]] | Shaped[ArrayLike, "m n ..."],
    test: float | int | Sequence[int],
    *,
    key: PRNGKeyArray,
) -> tuple[list[Shaped[np.ndarray, "..."]], list[Shaped[np.ndarray, "..."]]]:
    """Hold out random samples of every client for testing.

    The split depends only on the key and the lengths, so the same call splits the labels alike.

    Args:
        arrays: each client's samples.
        test: the fraction to hold out, between 0 and 1 (rounded, but never all or none), or the
            number of samples to hold out, one integer or one per client.
        key: random key.

    Returns:
        Training samples and test samples of each client.

    Raises:
        ValueError: if the fraction is not between 0 and 1, or one part of a client would be empty.
    """
    if isinstance(arrays, np.ndarray | jax.Array):
        arrays = list(_table("arrays", arrays))
    check_list("arrays", arrays, "clients")
    arrays = [_table(f"arrays[{i}]", array) for i, array in enumerate(arrays)]
    # A float is a fraction even if it is whole: 1.0 is refused, 1 holds out one sample.
    if isinstance(test, float | np.floating):
        check_number(
            "test", test, "a share between 0 and 1, or a number", lambda x: (x > 0) & (x < 1)
        )
        counts = [min(max(round(test * len(a)), 1), len(a) - 1) for a in arrays]
    else:
        counts = counts_of("test", test, len(arrays))
    rng = _generator(key)
    train, held_out = [], []
    for i, (array, count) in enumerate(zip(arrays, counts, strict=True)):
        if not 1 <= count < len(array):
            raise ValueError(
                f"arrays, test: client {i} has {len(array)} samples, cannot hold out "
                f"{max(count, 1)} and keep one to train on"
            )
        order = rng.permutation(len(array))
        held_out.append(array[order[:count]])
        train.append(array[order[count:]])
    return train, held_out


def _generator(key: PRNGKeyArray) -> np.random.Generator:
    # NumPy's generator need not compile a program for every new length.
    return np.random.default_rng(np.asarray(jax.random.key_data(checked_key("key", key))))


def _table(name: str, given: object) -> np.ndarray:
    """An array of any type with a leading axis of samples."""
    array = host_array(name, given, "an array with a leading axis of samples")
    if array.ndim < 1:
        raise refuse(name, "an array with a leading axis of samples", given)
    return array


def _check(samples, labels, clients) -> tuple[np.ndarray, Any]:
    samples = _table("samples", samples)
    check_whole("clients", clients, most=len(samples))
    return samples, labels if labels is None else checked_labels("labels", labels, len(samples))


def _check_min_samples(total: int, clients: int, min_samples: int) -> None:
    check_whole("min_samples", min_samples)
    if min_samples * clients > total:
        raise ValueError(
            f"clients, min_samples: {clients} clients of at least {min_samples} samples need "
            f"{min_samples * clients}, but there are {total}"
        )


def _classes(labels, classes) -> np.ndarray:
    present = np.unique(labels)
    if classes is None:
        return present
    chosen = checked_labels("classes", classes)
    if len(np.unique(chosen)) != len(chosen):
        raise refuse("classes", "a list of different classes", classes)
    empty = [value for value in chosen.tolist() if value not in present.tolist()]
    if empty:
        raise ValueError(
            f"classes: wanted those that have samples, got {', '.join(map(str, empty))}; "
            f"the labels are {', '.join(map(str, present.tolist()))}"
        )
    return chosen


def _equal(total: int, parts: int) -> list[int]:
    """Integers that add up to the total and differ by at most one."""
    return [total // parts + (k < total % parts) for k in range(parts)]


def _take(samples, labels, indices) -> Partition:
    return Partition(
        samples=[samples[i] for i in indices],
        labels=[] if labels is None else [labels[i] for i in indices],
        indices=list(indices),
    )
