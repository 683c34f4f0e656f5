"""Estimate how many directions views share, by the two bounds of AJIVE."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_number, checked_key
from jaxfed.contract import check_count
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.run.runner import call_compiled
from jaxfed.gcca._signal import (
    Ranks,
    Signal,
    check_fit,
    checked_ranks,
    concatenated,
    rank_of,
    signal_of,
)
from jaxfed.gcca.views import View, check_views
from jaxfed.linalg import matmul, svd


class JointRank(NamedTuple):
    """The number of joint directions, and the numbers it is derived from.

    Attributes:
        rank: number of squared singular values above both bounds.
        squared_singular_values: those of all views' bases side by side, descending. The largest
            possible value, the number of views, means a direction lies in every view's signal.
        wedin_bound: lower bound for a joint direction despite noise.
        random_bound: upper bound for directions of unrelated bases.
    """

    rank: int
    squared_singular_values: Float[np.ndarray, " directions"]
    wedin_bound: float
    random_bound: float


class _Signals(NamedTuple):
    """The signals' ranks."""

    ranks: Ranks

    @property
    def eigenvectors(self) -> int:
        """Of a view, at most."""
        return int(np.max(self.ranks))


class _Bounds(NamedTuple):
    """Draws whose quantiles are the bounds."""

    squared_singular_values: Float[Array, " directions"]
    wedin: Float[Array, " samples"]
    random: Float[Array, " samples"]


def joint_rank(
    views: Clients,
    signal_rank: int | tuple[int, ...],
    *,
    key: Key[Array, ""],
    samples: int = 1000,
    wedin_percentile: float = 5.0,
    random_percentile: float = 95.0,
) -> JointRank:
    r"""Estimate the number of directions that lie in the signals of all views, for `jf.gcca.AJIVE`.

    Without noise, a direction that m views share has the squared singular value m in the bases of
    their signals side by side. Noise rotates the basis of view i by an angle of at most
    \(\theta_i\), by Wedin's theorem, which leaves at least \(m - \sum_i \sin^2 \theta_i\). Each
    client estimates its angle many times, from random directions in the complement of its signal,
    and sends these numbers with its basis. The second bound is the largest squared singular value
    of random bases, which the server draws alone. Directions above both bounds are joint.

    Args:
        views: the clients, with dense views.
        signal_rank: number of directions of a view that are not noise, as in `jf.gcca.AJIVE`.
        key: random key.
        samples: number of draws of each angle and of the random bases.
        wedin_percentile: percentile of the draws that is the first bound.
        random_percentile: percentile of the draws that is the second bound.

    Raises:
        ValueError: if clients do not hold dense views, ranks do not fit, or numbers are out of
            range.

    Source: Feng, Jiang, Hannig & Marron (2018), Sections 2.2 and 2.3, Lemma 3.
    """
    check_views(views, 1, "views", dense="the joint rank needs", complete="the joint rank needs")
    ranks = checked_ranks("signal_rank", signal_rank, least=1)
    check_fit("signal_rank", ranks, views)
    check_count("samples", samples)
    for name, given in (
        ("wedin_percentile", wedin_percentile),
        ("random_percentile", random_percentile),
    ):
        check_number(name, given, "a number from 0 to 100", lambda x: (x >= 0) & (x <= 100))
    drawn = _drawn(_Signals(ranks), views, key=checked_key("key", key), samples=samples)
    squares = np.asarray(drawn.squared_singular_values)
    wedin = float(np.percentile(drawn.wedin, wedin_percentile))
    random = float(np.percentile(drawn.random, random_percentile))
    # Without noise, a joint direction equals the bound up to rounding.
    slack = np.finfo(squares.dtype).eps * len(squares) * len(views)
    return JointRank(int(np.sum(squares > max(wedin, random) - slack)), squares, wedin, random)


@in_enough_precision
def _drawn(wanted: _Signals, views: Clients, *, key: Key[Array, ""], samples: int) -> _Bounds:
    arguments = key, views.data, views.ids, wanted.ranks, samples
    return call_compiled(_bounds, *arguments, static_argnums=(3, 4))


def _bounds(
    key: Key[Array, ""], views: View, ids: Int[Array, " views"], ranks: Ranks, samples: int
) -> _Bounds:
    of_views, of_bases = jax.random.split(key)
    signals = jax.vmap(lambda view, i: signal_of(view, ranks, i))(views, ids)
    squares = svd(concatenated(signals.left))[1] ** 2

    def wedin(key):
        # By id, so that a view's draws do not depend on the other views.
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
        return len(ids) - jnp.sum(jax.vmap(_sine)(keys, views, signals) ** 2)

    def of_unrelated(key):
        drawn = jax.random.normal(key, signals.left.shape, squares.dtype)
        bases = jax.vmap(lambda x, i: _basis(x, rank_of(ranks, i)))(drawn, ids)
        return _norm(concatenated(bases)) ** 2

    return _Bounds(
        squares,
        wedin=jax.lax.map(wedin, jax.random.split(of_views, samples)),
        random=jax.lax.map(of_unrelated, jax.random.split(of_bases, samples)),
    )


def _sine(key: Key[Array, ""], view: View, signal: Signal) -> Float[Array, ""]:
    """Estimate the sine of the angle by which noise rotates ONE view's signal."""
    entities, features = view.shape
    dtype = view.values.dtype
    drawn = jax.random.normal(key, (entities + features, signal.left.shape[1]), dtype)
    rows = _outside(signal.left, drawn[:entities], jnp.asarray(entities, dtype))
    columns = _outside(signal.right, drawn[entities:] * view.mask[:, None], view.count)
    # Wedin's bound of the sine is max(‖E V‖, ‖EᵀU‖) / σ_r. The noise E is not known, but X along
    # random directions outside its signal is all noise.
    noise = jnp.maximum(_norm(matmul(view.values.T, rows)), _norm(matmul(view.values, columns)))
    least = jnp.min(signal.singular, where=signal.singular > 0, initial=jnp.inf)
    # Without a signal, the rotation is unbounded.
    return jnp.where(jnp.isinf(least), 1, jnp.minimum(noise / least, 1))


def _outside(
    basis: Float[Array, "dim width"], drawn: Float[Array, "dim width"], dim: Float[Array, ""]
) -> Float[Array, "dim width"]:
    """Return orthonormal directions outside the signal, as many as it has if there are so many."""
    rank = jnp.sum(jnp.any(basis != 0, axis=0))
    return _basis(drawn - matmul(basis, matmul(basis.T, drawn)), jnp.minimum(rank, dim - rank))


def _basis(
    drawn: Float[Array, "dim width"], rank: Int[Array, ""] | Float[Array, ""]
) -> Float[Array, "dim width"]:
    """Return an orthonormal basis of the span of the first `rank` columns."""
    used = jnp.arange(drawn.shape[1]) < rank
    return svd(drawn * used)[0] * used


def _norm(matrix: Float[Array, "rows columns"]) -> Float[Array, ""]:
    """Return the largest singular value."""
    return svd(matrix)[1][0]
