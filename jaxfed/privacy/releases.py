"""What releases have in common: who is protected, how far, by which randomness, and who pays."""

import os
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxfed._checks import (
    check_count,
    check_instance,
    check_name,
    check_positive,
    check_probability,
    checked_key,
    checked_labels,
    is_list,
    refuse,
)
from jaxfed._names import caller
from jaxfed._optional import require
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import DISCRETE, NEIGHBOURS, ROWS, Guarantee, Neighbours, Rows
from jaxfed.core.clients.samples import Samples, check_complete_samples
from jaxfed.linalg.platforms import is_tracing
from jaxfed.privacy._gaussian import noise_of
from jaxfed.privacy.ledger import Ledger

# So that rounding in single precision, of noise and of lengths, leaves no less noise than asked.
MARGIN = 1 + 1e-6


class Release(NamedTuple):
    """Arguments of a release that were checked; nothing is spent yet."""

    guarantee: Guarantee
    clients: Clients  # with samples in one array
    codes: Array  # whose row each is, from 0 on
    people: Array  # each client's number of persons
    key: Key[Array, ""]
    exact: bool  # whether the noise is sampled exactly
    ledger: Ledger | None

    def pay(self) -> None:
        """Write the release into the ledger, before anything is computed."""
        if self.ledger is not None:
            self.ledger.spend(self.guarantee, self.clients)


def checked_release(
    function: str,
    guarantee: Guarantee,
    clients: Any,
    person: object,
    noise: str,
    ledger: object,
    key: Any,
) -> Release:
    """Check the arguments of a release by a function of this name.

    Raises:
        ValueError: names the argument.
    """
    check_name("noise", noise, ("jax", "opendp"))
    exact = noise == "opendp"
    if exact:
        guarantee = guarantee._replace(mechanism=DISCRETE)
        require("opendp", extra="privacy")
    check_instance("clients", clients, Clients, "jaxfed.Clients with samples")
    check_complete_samples(clients, function)
    if ledger is not None and not isinstance(ledger, Ledger):
        raise refuse("ledger", "a jaxfed.privacy.Ledger", ledger)
    # There, one line would be written, or one key be drawn, for many releases.
    again = is_tracing((clients, key))
    if again and ledger is not None:
        raise refuse("ledger", "None within jit and vmap, which may release again", ledger)
    if exact and (again or key is not None):
        raise refuse("key", "None with noise='opendp', and no jit or vmap", key)
    if again and key is None:
        raise refuse("key", "a random key within jit and vmap, which may release again", key)
    key = secret_key() if key is None else checked_key("key", key)
    if clients.guarantee is not None:
        raise refuse("clients", "samples that are not released yet", clients)
    whole = clients.unbucketed()
    codes, people = persons_of(whole, person)
    _check_delta(guarantee.delta, people)
    if person is not None:
        _check_weights(whole)
    return Release(guarantee, whole, codes, people, key, exact, ledger)


def secret_key() -> Key[Array, ""]:
    """A random key from the system's randomness, which nobody can draw again."""
    words = jnp.asarray(np.frombuffer(os.urandom(8), np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def guarantee_of(
    epsilon: float,
    delta: float,
    rows: Rows = "pairs",
    bound: float | None = None,
    neighbours: Neighbours = "replace",
    sharers: int = 1,
    *,
    several: bool,
) -> Guarantee:
    """The guarantee of a release with these arguments, and `several` rows of a person.

    Raises:
        ValueError: if an argument is unsuitable.
    """
    check_positive("epsilon", epsilon, single=True)
    check_terms(delta, rows, bound, neighbours)
    check_count("sharers", sharers)
    for name, given in (("epsilon", epsilon), ("delta", delta), ("bound", bound)):
        if is_traced(given):
            raise refuse(name, "a known number, since the noise is computed from it", given)
    return Guarantee(
        "person" if several else "row",
        neighbours,
        float(epsilon),
        float(delta),
        noise_of(float(epsilon), float(delta)),
        rows,
        None if bound is None else float(bound),
        sharers=int(sharers),
    )


def check_terms(delta: Any, rows: Any, bound: Any, neighbours: Any) -> None:
    """Refuse unsuitable terms of a release of second moments.

    Raises:
        ValueError: names the argument.
    """
    check_probability("delta", delta)
    check_name("rows", rows, ROWS)
    check_name("neighbours", neighbours, NEIGHBOURS)
    if rows == "clip":
        check_positive("bound", bound, single=True)
    elif bound is not None:
        raise refuse("bound", f"None with rows={rows!r}, whose rows have length one", bound)


def persons_of(clients: Clients, person: object) -> tuple[Array, Array]:
    """Whose row each is, as numbers from 0 on, and each client's number of persons.

    Raises:
        ValueError: if there is not one label for each row.
    """
    data: Samples = clients.data
    rows = data.values.shape[1]
    if person is None:
        numbers = jnp.arange(rows)
        return jnp.where(data.mask > 0, numbers, rows), data.count
    if not is_list(person) or len(person) != len(clients):
        raise refuse("person", f"{len(clients)} arrays of labels, one for each client", person)
    if is_traced(data.count):
        raise refuse("person", "None where the clients are traced", person)
    codes = np.full((len(clients), rows), rows, np.int32)
    people = np.zeros(len(clients))
    for i, (own, count) in enumerate(zip(person, np.asarray(data.count), strict=True)):
        found = _labels(f"person[{i}]", own, int(count))
        codes[i, : int(count)] = found
        people[i] = len(np.unique(found))
    return jnp.asarray(codes), jnp.asarray(people, data.count.dtype)


def _labels(name: str, given: object, rows: int) -> np.ndarray:
    labels = np.asarray(given, object) if is_list(given) else given
    gaps = [] if not isinstance(labels, np.ndarray) else labels.ravel().tolist()
    for place, label in enumerate(gaps):
        if label is None or label != label or label == "":
            raise ValueError(
                f"{name}: wanted whose row each of {rows} rows is, got a gap at row {place}"
            )
    found = checked_labels(name, given, rows)
    return np.unique(found, return_inverse=True)[1].reshape(-1)


def _check_delta(delta: float, people: Array) -> None:
    if is_traced(people):
        return
    most = float(np.max(np.asarray(people)))
    if delta > 1 / most:
        warnings.warn(
            f"delta: {delta:g} is above one over the {most:g} persons of a client: a mechanism "
            "that publishes one of them at random would satisfy it",
            stacklevel=caller(),
        )


def _check_weights(clients: Clients) -> None:
    weights, counts = np.asarray(clients.weights, float), np.asarray(clients.counts, float)
    if np.ptp(weights) > 1e-5 * weights.max() and np.allclose(
        weights / weights.sum(), counts / counts.sum(), rtol=1e-5
    ):
        raise ValueError(
            "clients: wanted weights that do not tell numbers of rows, which person protects, got "
            "weights='samples'"
        )
