"""Releases of means and standard deviations of features with noise that protects each person."""

import warnings
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, UInt32

from jaxfed._checks import checked_array, refuse
from jaxfed._names import caller
from jaxfed._numbers import UnitsWarning
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import Guarantee, Neighbours
from jaxfed.core.clients.names import listing, replace_names
from jaxfed.core.clients.samples import Samples
from jaxfed.core.clients.standardization import Standardization
from jaxfed.linalg.platforms import is_tracing
from jaxfed.privacy._exact import exact_noise
from jaxfed.privacy.ledger import Ledger
from jaxfed.privacy.releases import MARGIN, Release, checked_release, guarantee_of

# A number u of [-1, 1] becomes (u / √3, u² - 2/3), a point of a curve. At this factor, the noise of
# the mean is as large as with the factor 1, and that of the mean square the smallest.
FACTOR, CENTRE = 3**-0.5, 2 / 3
# Of a half range, the deviation of numbers spread evenly over it is 0.58. Beyond this, they are at
# its ends.
WIDE = 0.75
# The largest squared distance of two points of the curve is (2 - s)² (1/3 + s²), where s is the sum
# of two numbers; and that of a point from the origin.
_SUM = (1 + FACTOR) / 2
APART = (2 - _SUM) ** 2 * (1 / 3 + _SUM**2)
AWAY = CENTRE**2


class ReleasedUnits(NamedTuple):
    """Means and standard deviations of features, for all clients, and what their noise guarantees.

    Attributes:
        units: `units.transform(clients)` standardizes samples.
        mean_error: standard deviation of the noise in each mean, in the features' units.
        guarantee: of this release; further releases of the same persons add up.
    """

    units: Standardization
    mean_error: Float[np.ndarray, " features"]
    guarantee: Guarantee


def release_units(
    clients: Clients,
    lower: Float[ArrayLike, "*features"] | Sequence[float],
    upper: Float[ArrayLike, "*features"] | Sequence[float],
    *,
    epsilon: float,
    delta: float,
    neighbours: Neighbours = "replace",
    person: Sequence[ArrayLike | Sequence[object]] | None = None,
    noise: Literal["jax", "opendp"] = "jax",
    ledger: Ledger | None = None,
    key: Key[Array, ""] | UInt32[Array, " 2"] | None = None,
) -> ReleasedUnits:
    r"""Release the features' means and standard deviations once, with noise that protects persons.

    `release_moments` takes scales and centres as public. If nobody has published some, this spends
    a part of the budget on them:

    >>> import jax, jaxfed as jf
    >>> options = {"clients": 4, "samples": 2000, "features": 5, "shared_rank": 1, "local_rank": 1}
    >>> data = jf.data.perpca_synthetic(key=jax.random.key(0), **options)
    >>> clients = jf.Clients.from_samples(data.samples)
    >>> cost = {"epsilon": 1.0, "delta": 1e-5}
    >>> found = jf.privacy.release_units(clients, -5, 5, **cost)
    >>> scaled = found.units.transform(clients)
    >>> released = jf.privacy.release_moments(scaled, rows="directions", **cost)
    >>> "epsilon 1.465" in jf.privacy.statement(found, released)
    True

    Each client sends means over its persons of each feature and of its square, with noise added at
    home. Numbers outside of the public range \([l, u]\) are moved to its ends, so a range may be
    narrower than the data. With \(u \in [-1, 1]\) for a number within its range, a person moves
    \((\bar u / \sqrt3, \overline{u^2})\) of d features and P persons by at most
    \(\Delta = 1.184 \sqrt d / P\), and with `"add_remove"` by \(0.667 \sqrt d / P\). The noise
    shrinks with the number of persons of all clients together: its standard deviation in a mean is
    `mean_error`, \(\sqrt3\, \sigma\, P \Delta \sqrt m / n\) half ranges for m clients of n persons.
    A standard deviation that noise alone could explain becomes that of the noise.

    Args:
        clients: clients with samples; those of weight zero send nothing.
        lower: lower ends of the features' public ranges, `(features,)` or one for all, in the
            features' units. They must not be those of the data.
        upper: upper ends.
        epsilon: \(\varepsilon\), for each client's release.
        delta: \(\delta\).
        neighbours: as for `release_moments`.
        person: as for `release_moments`.
        noise: as for `release_moments`.
        ledger: as for `release_moments`.
        key: as for `release_moments`.

    Returns:
        Means and deviations for samples of all clients, and their guarantee.

    Raises:
        ValueError: if an argument is unsuitable or traced, or the budget does not suffice. This is
            said before anything is spent.

    Warns:
        jaxfed.UnitsWarning: if a standard deviation is hardly above its noise, since the range is
            wide, or that of numbers at the ends of the range, since it is narrow.

    Source: Balle & Wang (2018), Improving the Gaussian mechanism for differential privacy,
    Algorithm 1, for the noise.
    """
    if is_tracing((clients, key, lower, upper)):
        raise refuse("clients", "arrays, got tracers; call this outside of jax.jit", clients)
    guarantee = guarantee_of(epsilon, delta, neighbours=neighbours, several=person is not None)
    guarantee = guarantee._replace(rows="ranges")
    release = checked_release("release_units", guarantee, clients, person, noise, ledger, key)
    low, high = _ends("lower", lower, clients.features), _ends("upper", upper, clients.features)
    if not (low < high).all():
        place = int(np.argmin(low < high))
        wanted = f"more than lower, {low[place]:g}, of feature {place}"
        raise refuse("upper", wanted, float(high[place]))
    with np.errstate(over="ignore", invalid="ignore"):
        wide = ~np.isfinite(high - low)
    if wide.any():
        place = int(np.argmax(wide))
        wanted = f"a range from lower, {low[place]:g}, that the precision holds, of feature {place}"
        raise refuse("upper", wanted, float(high[place]))
    release.pay()
    middle, half = (low + high) / 2, (high - low) / 2
    sums, deviation = _noisy_sums(release, middle, half)
    people = float(np.asarray(release.people, float) @ _present(release.clients))
    first, second = (sums / people).reshape(2, -1)
    mean = np.clip(first / FACTOR, -1, 1)
    error = deviation / people
    # The noise of a variance, from those of the mean square and of the squared mean.
    least = np.hypot(error, 2 * mean * error / FACTOR)
    scale = np.sqrt(np.clip(second + CENTRE - mean**2, least, 1))
    _warn(scale, np.sqrt(least), release.clients.names.features)
    units = Standardization(middle + half * mean, half * scale)
    units = replace_names(units, release.clients.names)
    return ReleasedUnits(units, half * error / FACTOR, release.guarantee)


def _warn(
    scale: Float[np.ndarray, " d"], least: Float[np.ndarray, " d"], names: Sequence[str] | None
) -> None:
    """Warn of deviations that ranges spoil; they were released, so this reveals nothing more.

    Args:
        scale: the deviations, in half ranges.
        least: those of the noise.
        names: of the features; None if they have positions from 0 on.
    """
    known = [f"feature {k} (from 0)" for k in range(len(scale))] if names is None else list(names)
    for places, problem in (
        (scale < 2**0.5 * least, "are hardly above their noise; narrower ranges"),
        (scale > WIDE, "are those of numbers at the ends of the range or beyond; wider ranges"),
    ):
        if places.any():
            listed = listing([known[k] for k in np.flatnonzero(places)])
            words = f"lower, upper: the released deviations of {listed} {problem}, or more epsilon"
            warnings.warn(f"{words}, help", UnitsWarning, stacklevel=caller())


def _noisy_sums(
    release: Release, middle: Float[np.ndarray, " d"], half: Float[np.ndarray, " d"]
) -> tuple[Float[np.ndarray, " 2*d"], float]:
    """Add up what persons contribute, with each client's noise; and the deviation of all noise."""
    guarantee, whole = release.guarantee, release.clients
    data: Samples = whole.data
    # Of the sum over a client's persons, one of them moves it by the same, however many there are.
    far = (APART if guarantee.neighbours == "replace" else AWAY) ** 0.5 * len(middle) ** 0.5
    size = MARGIN * guarantee.noise_multiplier * far
    inside = np.clip((np.asarray(data.values, float) - middle) / half, -1, 1)
    weights = _weights_of_rows(np.asarray(release.codes))
    first = np.einsum("mn,mnd->md", weights, inside)
    second = np.einsum("mn,mnd->md", weights, inside**2 - CENTRE)
    sums = np.concatenate([FACTOR * first, second], axis=1)
    if release.exact:
        noisy = np.stack([exact_noise(x, size, guarantee.noise_multiplier) for x in sums])
    else:
        key = jax.random.fold_in(release.key, zlib.crc32(repr(guarantee).encode()))
        keys = jax.vmap(lambda own: jax.random.fold_in(key, own))(whole.ids)
        drawn = jax.vmap(lambda own: jax.random.normal(own, sums.shape[1:], np.float32))(keys)
        noisy = sums + size * np.asarray(drawn, float)
    present = _present(whole)
    return present @ noisy, size * float(present.sum()) ** 0.5


def _weights_of_rows(codes: Int[np.ndarray, "m rows"]) -> Float[np.ndarray, "m rows"]:
    """Weigh rows so that those of a person count as one; padding counts nothing."""
    clients, rows = codes.shape
    apart = codes + (rows + 1) * np.arange(clients)[:, None]
    sizes = np.bincount(apart.ravel(), minlength=clients * (rows + 1))
    return np.where(codes < rows, 1 / sizes[apart], 0)


def _present(clients: Clients) -> np.ndarray:
    return np.asarray(clients.weights) > 0


def _ends(name: str, given: object, features: int) -> Float[np.ndarray, " d"]:
    found = np.asarray(checked_array(name, given, "...", finite=True), float)
    if found.shape not in ((), (features,)):
        raise refuse(name, f"a number, or {features} of them, one for each feature", given)
    return np.broadcast_to(found, (features,))
