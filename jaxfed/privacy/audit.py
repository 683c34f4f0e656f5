"""An audit: what an attacker measures of a mechanism's privacy."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, UInt32
from scipy.stats import beta

from jaxfed._checks import (
    check_callable,
    check_count,
    check_instance,
    check_probability,
    checked_key,
    refuse,
)
from jaxfed.core.clients.clients import Clients

AT_ONCE = 10_000  # runs
LEAST = 1000  # runs
Outputs = Float[np.ndarray, "runs numbers"]


def audit(
    mechanism: Callable[[Clients, Key[Array, ""]], PyTree],
    clients: Clients,
    neighbour: Clients,
    *,
    delta: float,
    runs: int = 100_000,
    confidence: float = 0.99,
    key: Key[Array, ""] | UInt32[Array, " 2"],
) -> float:
    r"""Bound the \(\varepsilon\) of a mechanism from below, by an attack on two neighbours.

    The mechanism runs many times on both data sets. From half of the runs, an attacker learns the
    linear score that tells them apart best, and a threshold. With its rates of true and false
    alarms on the other half, no mechanism with a smaller \(\varepsilon\) than
    \(\log((\mathrm{TPR} - \delta) / \mathrm{FPR})\) does that.

    A bound above the claimed \(\varepsilon\) proves that the mechanism is broken, at this
    confidence. A bound below proves nothing: it is largest if the two data sets are as far apart as
    neighbours can be, and grows with the number of runs.

    Args:
        mechanism: from clients and a random key to what it releases, arrays or `Clients`. It must
            work under `jax.vmap` over keys.
        clients: a data set.
        neighbour: the same data set with another person.
        delta: \(\delta\) of the claim.
        runs: number of runs on each data set; half of them learn the attack.
        confidence: the probability with which the bound holds.
        key: random key of the audit.

    Returns:
        A lower bound on \(\varepsilon\), at least 0.

    Raises:
        ValueError: if an argument is unsuitable, or the mechanism's outputs are no finite numbers.

    Source: Jagielski, Ullman & Oprea (2020), Auditing differentially private machine learning;
    Clopper & Pearson (1934) for the confidence.
    """
    check_callable("mechanism", mechanism, "a function of clients and a key")
    for name, data in (("clients", clients), ("neighbour", neighbour)):
        check_instance(name, data, Clients, "jaxfed.Clients")
    check_probability("delta", delta)
    check_count("runs", runs, least=LEAST)
    check_probability("confidence", confidence)
    keys = jax.random.split(checked_key("key", key), 2)
    outputs = [
        _outputs(mechanism, data, own, runs)
        for data, own in zip((clients, neighbour), keys, strict=True)
    ]
    if outputs[0].shape != outputs[1].shape:
        raise refuse("neighbour", "clients for which the mechanism releases as much", neighbour)
    half = runs // 2
    score = _score(outputs[0][:half], outputs[1][:half])
    learned = [x[:half] @ score for x in outputs]
    held_out = [x[half : 2 * half] @ score for x in outputs]
    alpha = (1 - confidence) / 2  # for each of the two rates
    side, threshold = _attack(learned[0], learned[1], float(delta), alpha)
    false, true = _sides(held_out[0], held_out[1], side)
    alarms = _above(false, threshold), _above(true, threshold)
    return max(0.0, _bound(*alarms, half, float(delta), alpha))


def _outputs(mechanism: Callable, data: Clients, key: Key[Array, ""], runs: int) -> Outputs:
    def once(own: Key[Array, ""]) -> Float[Array, " numbers"]:
        leaves = jax.tree.leaves(mechanism(data, own))
        return jnp.concatenate([jnp.ravel(x).astype(float) for x in map(jnp.asarray, leaves)])

    many = jax.jit(jax.vmap(once))
    places = np.array_split(np.arange(runs), math.ceil(runs / AT_ONCE))
    found = np.concatenate([np.asarray(many(_keys(key, jnp.asarray(x)))) for x in places])
    if not np.isfinite(found).all():
        raise ValueError("mechanism: wanted finite outputs, got NaN or infinity")
    return found.astype(np.float64)


def _keys(key: Key[Array, ""], numbers: Array) -> Key[Array, " runs"]:
    return jax.vmap(partial(jax.random.fold_in, key))(numbers)


def _score(one: Outputs, other: Outputs) -> Float[np.ndarray, " numbers"]:
    """The direction in which the outputs differ most, relative to their scatter."""
    difference = other.mean(axis=0) - one.mean(axis=0)
    rest = np.concatenate([one - one.mean(axis=0), other - other.mean(axis=0)])
    # Each output in a unit of its own: the one that tells the most may be the smallest.
    units = np.hypot(rest.std(axis=0), difference)
    units[units == 0] = 1
    difference = difference / units
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov((rest / units).T)))
    # Directions without scatter tell the most: keep them, but for rounding.
    floor = max(values[-1], difference @ difference) * 1e-12 or 1.0
    score = vectors @ ((vectors.T @ difference) / np.maximum(values, floor)) / units
    length = np.linalg.norm(score)
    return score / length if length > 0 else score


def _attack(false: np.ndarray, true: np.ndarray, delta: float, alpha: float) -> tuple[int, float]:
    """The side and the threshold with the best bound."""
    # Far in the tails, the best of many bounds is one by luck: ask them for more confidence.
    alpha = alpha / 1000
    best = (-math.inf, 1, 0.0)
    for side in (1, -1):
        low, high = _sides(false, true, side)
        thresholds = np.quantile(low, 1 - np.geomspace(1 / len(low), 0.5, 60))
        for threshold in thresholds:
            found = _bound(_above(low, threshold), _above(high, threshold), len(low), delta, alpha)
            best = max(best, (float(found), side, float(threshold)))
    return best[1:]


def _sides(one: np.ndarray, other: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The scores without and with the person whom the attacker looks for."""
    return (one, other) if side > 0 else (-other, -one)


def _above(scores: np.ndarray, threshold: float) -> int:
    return int((scores > threshold).sum())


def _bound(false: int, true: int, runs: int, delta: float, alpha: float) -> float:
    """The bound from numbers of false and true alarms, with confidence in both."""
    most = beta.ppf(1 - alpha, false + 1, runs - false) if false < runs else 1.0
    least = beta.ppf(alpha, true, runs - true + 1) if true else 0.0
    return math.log((least - delta) / most) if least > delta else -math.inf
