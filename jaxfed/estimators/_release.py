"""Moments whose noise protects each person, for estimators with `epsilon`."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_instance, check_name, refuse
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.clients import Clients
from jaxfed.estimators._arrays import client_labels
from jaxfed.estimators._normal import axes
from jaxfed.privacy.ledger import Ledger
from jaxfed.privacy.moments import release_moments
from jaxfed.privacy.releases import guarantee_of

# Parameters whose messages the guarantee does not cover, and their values without such messages.
UNCOVERED = {
    "center": False,
    "scale": "none",
    "shrinkage": False,
    "robust": False,
    "forgetting": None,
    "impute": None,
    "bootstrap": 0,
    "noise_variance": None,
}
WHY = {
    "center": "which does not cover the mean of all clients' rows; subtract each client's own mean "
    "from its rows",
    "scale": "which does not cover the deviations of all clients' rows; divide rows by known units",
    "noise_variance": "whose moments of directions have no unit",
}


def check(estimator: Any, person: object) -> None:
    """Refuse what the guarantee of `epsilon` does not cover, before anything is computed.

    Raises:
        ValueError: names the parameter.
    """
    epsilon = estimator.epsilon
    guarantee_of(1.0 if epsilon is None else epsilon, estimator.delta, several=person is not None)
    check_name("noise", estimator.noise, ("jax", "opendp"))
    if estimator.ledger is not None:
        wanted = "a jaxfed.privacy.Ledger or None"
        check_instance("ledger", estimator.ledger, Ledger, wanted)
    if epsilon is None:
        for name, given in (("person", person), ("ledger", estimator.ledger)):
            if given is not None:
                raise refuse(name, "None without epsilon", given)
        if estimator.noise != "jax":
            raise refuse("noise", "'jax', the default, without epsilon", estimator.noise)
        return
    for name, kept in UNCOVERED.items():
        given = getattr(estimator, name, kept)
        if np.ndim(given) or given != kept:
            why = WHY.get(name, "which does not cover it")
            raise refuse(name, f"{kept} with epsilon, {why}", given)


def released(
    estimator: Any,
    clients: Clients,
    places: Int[np.ndarray, " n"],
    person: Any,
    key: Key[Array, ""] | None,
) -> Clients:
    """Release the clients' moments.

    Args:
        estimator: has `epsilon`, `delta`, `noise` and `ledger`, and says whether its model needs
            moments without negative eigenvalues.
        clients: with samples.
        places: the client of each row of the table.
        person: whose row each row of the table is; None if each is another person's.
        key: of the noise; None takes one from the system's randomness, as exact noise does.
    """
    owners = None
    if person is not None:
        labels = client_labels(person, places, "person")
        owners = [labels[rows] for rows in rows_of_each(places)]
    return release_moments(
        clients,
        epsilon=estimator.epsilon,
        delta=estimator.delta,
        person=owners,
        semidefinite=estimator.semidefinite,
        noise=estimator.noise,
        key=None if estimator.noise == "opendp" else key,
        ledger=estimator.ledger,
    )


def axes_of(sent: Clients, shared: Float[np.ndarray, "d r"]) -> Float[np.ndarray, "r r"]:
    """Return the rotation of shared components to axes, in order of released variance."""
    moments = np.asarray(sent.data.dense, float)
    weights = np.asarray(sent.counts, float) / np.sum(sent.counts)
    return axes(shared, shared.T @ np.tensordot(weights, moments, 1) @ shared)
