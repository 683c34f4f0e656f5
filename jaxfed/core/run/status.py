"""How a run ended: `Status`, and the rules that find it from the run's history.

A run has converged if its stopping measure is within the tolerance. Otherwise the objective tells
why: it rises, or it scatters without falling further, or rounds ended too early.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.remarks import ENERGIES
from jaxfed.core.store.saved import STATUSES

# The tolerance of a run without one, and the relative change of the objective that counts.
SMALL = 1e-3
BLOCKS = 10  # of rounds, whose levels are compared
RISE = 1e-2
# Of the mean variance along a local component over that along a shared one; and the misalignment
# of directions that count as common.
EXCESS, COMMON = 1.05, 0.05
PRODUCTS = 30


class Status(eqx.Enumeration):
    """How a run ended."""

    round_limit = STATUSES["round_limit"]
    converged = STATUSES["converged"]
    diverged = STATUSES["diverged"]
    stopped = STATUSES["stopped"]
    unmeasured = STATUSES["unmeasured"]
    rising = STATUSES["rising"]
    noisy = STATUSES["noisy"]
    suboptimal = STATUSES["suboptimal"]


# In the order of the codes of `verdict`.
_ENDS = (Status.round_limit, Status.converged, Status.rising, Status.noisy, Status.suboptimal)


def verdict(
    history: Mapping[str, Any],
    tol: Array | float | None,
    stochastic: bool,
    xp: Any,
    local: Any = None,
) -> Int[Any, ""]:
    """Return a code for `status_of`, from the rounds that ran.

    Args:
        history: `(rounds,)` arrays by name; NaN in rounds that did not run.
        tol: the tolerance.
        stochastic: whether steps use a part of the data; such a run has converged once the
            objective is level.
        xp: `jax.numpy`, or NumPy on the host.
        local: the clients' local components, `(clients, features, rank)`, if the algorithm shares
            what is common to them.
    """
    if not history["objective"].shape[0]:
        return xp.asarray(0)
    levels = _levels(history["objective"], xp)
    measure = history["stopping_measure"]
    small = _last(measure, xp) <= (SMALL if tol is None else tol)
    if stochastic and tol is None:
        small = small | (levels.level & ~levels.rises)
    late = xp.where(levels.rises, 2, xp.where(levels.level & levels.scatters, 3, 0))
    code = xp.where(small, 1, late)
    if local is None or len(local) < 2:  # with one client, nothing is common
        return code
    # Cheap, and mostly false: on the host, nothing else is computed then.
    shared, own = (_last(history[name], xp) for name in ENERGIES)
    misplaced = own > EXCESS * shared
    if xp is np and not misplaced:
        return code
    return xp.where(misplaced & (_overlap(local, xp) > 1 - COMMON), 4, code)


def is_lost(history: Mapping[str, Any], shared: Any, xp: Any) -> Bool[Any, ""]:
    """Whether a run ended without a result: it is not finite, or no client's message was.

    Runs that leave out such messages, as robust ones do, go on without any.

    Args:
        history: as in `verdict`.
        shared: the shared part of the result.
        xp: `jax.numpy`, or NumPy on the host.
    """
    lost = xp.asarray(False)
    if "not_finite" in history:
        lost = xp.nan_to_num(history["not_finite"])[-1] >= 1 - SMALL
    for leaf in jax.tree.leaves(shared):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and (xp is jnp or is_known(leaf)):
            lost = lost | ~xp.isfinite(xp.asarray(leaf)).all()
    return lost


def status_of(code: Int[Any, ""], failed: Bool[Any, ""], xp: Any) -> Status:
    """Return the status of a code, or that of a run that failed, which has not converged."""
    if xp is np:
        return Status.diverged if failed else _ENDS[int(code)]
    status = _ENDS[0]
    for number, other in enumerate(_ENDS[1:], 1):
        status = Status.where(jnp.asarray(code == number), other, status)
    return Status.where(jnp.asarray(failed), Status.diverged, status)


class _Levels(NamedTuple):
    rises: Any  # from the lowest block to the last, by more than either scatters
    level: Any  # whether the second half of the rounds no longer falls
    scatters: Any


def _levels(objective: Any, xp: Any) -> _Levels:
    known = xp.isfinite(objective)
    count = known.sum()
    # The place of a round among those that are known, in tenths of their number.
    blocks = (xp.cumsum(known) - 1) * BLOCKS // xp.maximum(count, 1)
    member = known & (blocks == np.arange(BLOCKS)[:, None])
    value = xp.where(known, objective, 0)
    mean = (member * value).sum(1) / xp.maximum(member.sum(1), 1)
    least = xp.where(member, value, xp.inf).min(1)
    most = xp.where(member, value, -xp.inf).max(1)
    enough = count >= 2 * BLOCKS
    lowest = xp.argmin(mean)
    size = xp.maximum(abs(mean[-1]), SMALL * xp.maximum(abs(mean[0]), abs(most[0])))
    size_then = xp.maximum(abs(mean[lowest]), SMALL * abs(mean[-1]))
    rises = enough & (least[-1] - most[lowest] > RISE * size_then)
    falls = least[BLOCKS // 2 - 1] - most[-1] > SMALL * size
    falls = falls & (mean[-2] - mean[-1] > 1e-2 * SMALL * size)
    scatter = xp.where(member[-1], abs(value - mean[-1]), 0).max() > SMALL / 10 * size
    return _Levels(rises, enough & ~falls & ~rises, scatter)


def _last(values: Any, xp: Any) -> Any:
    """The last entry that is a number, infinity if there is none."""
    place = xp.arange(values.shape[0]) * ~xp.isnan(values)
    last = values[xp.argmax(place)]
    return xp.where(xp.isnan(last), xp.inf, last)


def _overlap(local: Any, xp: Any) -> Any:
    """The largest eigenvalue of the mean projector on local components, by power iteration."""
    start = np.random.default_rng(0).standard_normal(local.shape[1])

    def step(_, pair):
        vector, _ = pair
        vector = vector / xp.linalg.norm(vector)
        product = xp.einsum("mdr,mr->d", local, xp.einsum("mdr,d->mr", local, vector))
        return product / len(local), vector @ product / len(local)

    pair = xp.asarray(start, local.dtype), xp.zeros((), local.dtype)
    if xp is np:
        for number in range(PRODUCTS):
            pair = step(number, pair)
        return pair[1]
    return jax.lax.fori_loop(0, PRODUCTS, step, pair)[1]
