"""Clients' second moments over time: new samples are added, and old ones forgotten."""

from functools import partial
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import check_count, check_instance, check_positive, hyperparameter, refuse
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like
from jaxfed.core.clients.samples import Samples, other_data
from jaxfed.core.clients.units import warn_of_units
from jaxfed.core.common.buckets import in_order, layout_of, parts_of
from jaxfed.linalg import Moment, matmul
from jaxfed.linalg.derivatives import zero_with_derivative
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import precise

MomentRows = Float[Array, "rows features"]


class _Union(NamedTuple):
    """The clients of two sets: the known ones in their order, then the new ones."""

    ids: Int[Array | np.ndarray, " all"]
    known: Int[np.ndarray, " all"]  # positions in the first set, -1 for clients not in it
    newer: Int[np.ndarray, " all"]  # positions in the second set


@final
class Forgetting(eqx.Module):
    r"""Clients' second moments, updated by new samples: bounded memory for data streams.

    `clients = forgetting.update(clients, newer)` replaces each client's moment by
    \(S \leftarrow (1 - a) S + a\,\frac1n \sum_j x_j x_j^\top\) over its n new samples. Algorithms
    that accept `jaxfed.Clients.from_moments` accept these clients. Samples are not centred.

    With a `rank`, a moment is kept as that many rows F with \(S \approx F^\top F\). An update
    stacks the earlier rows and the new samples, scaled, and decomposes them; the leading squared
    singular values are reduced by the first one that is dropped. With l rows and the eigenvalues
    \(\lambda_j\) of the exact moment,

    \[ 0 \preceq S - F^\top F \preceq \frac{1}{l + 1 - k} \sum_{j > k} \lambda_j\, I,
    \qquad k = 0, \dots, l. \]

    In both forms, the trace is that of the exact moment, so that objectives count all energy.

    It works under `jit`, `vmap` and `grad`. If ids are traced, both sets must have the same clients
    in the same order. With a `rank`, there are first derivatives only, and those with respect to
    the rate need a rate below one.

    Source: Liberty (2013), Simple and deterministic matrix sketching; Ghashami, Liberty, Phillips &
    Woodruff (2016), Frequent directions, for the bound. The number of samples behind a moment is
    the effective sample size of Kish (1965), \(1/c \leftarrow (1-a)^2/c + a^2/n\).
    """

    rate: Float[Array, ""] | None
    rank: int | None = eqx.field(static=True)

    def __init__(self, rate: float | Array | None, rank: int | None = None):
        """Set up the rule.

        Args:
            rate: a, in (0, 1]: the share of the new samples in each update. A sample's weight
                halves in about 0.7 / a updates; 1 keeps only the newest samples. None forgets
                nothing: all samples count equally, as if all had come at once.
            rank: number of rows kept for each client, at most the number of features; None keeps
                the matrix, `(features, features)`.

        Raises:
            ValueError: if the rate is not in (0, 1], or the rank is not a positive whole number.
        """
        check_positive("rate", rate, optional=True)
        if rate is not None and not is_traced(rate) and np.max(rate) > 1:
            raise refuse("rate", "a number in (0, 1] or None", rate)
        if rank is not None:
            check_count("rank", rank)
        self.rate, self.rank = hyperparameter(rate), rank

    @property
    def eigenvectors(self) -> int:
        """The number of directions that are kept; 0 if all are."""
        return self.rank or 0

    def update(self, clients: Clients | None, newer: Clients) -> Clients:
        """Update clients' moments with new samples.

        Args:
            clients: what the last update returned; None before the first update, which then returns
                the moments of the new samples.
            newer: clients with new samples or with moments of these, matched by name, without names
                by id; features are put in the order of before, by name.

        Returns:
            All clients of both, known clients first. A client that is not in `newer`, or has no
            samples there, keeps its moment and its weight, which is 0 until it has samples; use
            `take` to remove clients that are gone for good. Clients with new samples get their
            weight in `newer`, relative to the mean weight of those with samples.

        Raises:
            ValueError: if clients hold neither samples nor moments, or their data are read block by
                block or lie in other processes; if features, type or rank differ from before; or if
                the numbers of traced clients differ.

        Warns:
            jaxfed.UnitsWarning: with a `rank`, if single precision loses features in small units.
        """
        _check(newer, "newer")
        if self.rank is not None and self.rank > newer.features:
            raise refuse("rank", f"at most the {newer.features} features", self.rank)
        # Of rows, unlike a matrix, the leading directions alone are kept.
        warn_of_units(self, newer, "keep matrices, with rank=None")
        if clients is not None:
            _check(clients, "clients")
            newer = like(newer, clients)
        today = self._summaries(newer)
        if clients is None:
            return Clients(today, newer.ids, newer.weights, names=newer.names)
        before = self._checked(clients, today)
        if is_traced(clients.ids) or is_traced(newer.ids):
            if len(clients) != len(newer):
                wanted = f"the {len(clients)} clients of before, in their order, as ids are traced"
                raise refuse("newer", wanted, newer)
            places = np.arange(len(newer))
            union = _Union(newer.ids, places, places)
        else:
            union = _union(np.asarray(clients.ids), np.asarray(newer.ids))
        data = self._of_union(before, today, union)
        weights = _chosen(union, clients.weights, newer.weights, before.count, today.count)
        names = clients.names.with_others(newer.names, union.known, union.newer)
        return Clients(data, jnp.asarray(union.ids), weights / weights.sum(), names=names)

    def _summaries(self, newer: Clients) -> Moment:
        """Return the new samples' moments in the stored form, with a leading client axis."""
        with precise():
            found = newer.layout.over_parts(partial(_summaries, rank=self.rank))
        return in_order(layout_of(found), parts_of(found))

    def _merged(self, before: Moment, today: Moment) -> Moment:
        with precise():
            return _merged(self.rate, before, today, rank=self.rank)

    def _of_union(self, before: Moment, today: Moment, union: _Union) -> Moment:
        """Return the moments of known and new clients."""
        # A client that is in one set only borrows the first place of the other; what is merged
        # there is not used.
        old = jax.tree.map(lambda x: x[np.maximum(union.known, 0)], before)
        new = jax.tree.map(lambda x: x[np.maximum(union.newer, 0)], today)
        merged = self._merged(old, new)
        in_both = (union.known >= 0) & (union.newer >= 0)

        def chosen(merged: Array, old: Array, new: Array) -> Array:
            only = jnp.where(_column(union.known >= 0, old), old, new)
            return jnp.where(_column(in_both, old), merged, only)

        return jax.tree.map(chosen, merged, old, new)

    def _checked(self, clients: Clients, today: Moment) -> Moment:
        """Return the earlier moments.

        Raises:
            ValueError: if they do not have the form of the new ones.
        """
        before = clients.parts[0]

        def form(data):
            return [(x.shape[1:], x.dtype.name) for x in jax.tree.leaves(data)]

        kept = isinstance(before, Moment)
        alike = kept and jax.tree.structure(before) == jax.tree.structure(today)
        if not alike or form(before) != form(today):
            wanted = f"moments of shape and type {form(today)[0]}, as {self!r} keeps of newer"
            got = form(before)[0] if kept else type(before).__name__
            raise ValueError(f"clients: wanted {wanted}, got {got}")
        return before


def _check(clients: Clients, name: str) -> None:
    check_instance(name, clients, Clients, "jaxfed.Clients")
    if not all(isinstance(part, Samples | Moment) for part in clients.parts):
        raise other_data("Clients.from_samples or Clients.from_moments", clients.parts[0], name)
    clients.layout.check_in_memory("Forgetting.update")
    if not clients.layout.in_one_process:
        raise refuse(name, "clients of this process alone", clients)


@partial(jax.jit, static_argnames="rank")
def _summaries(data: Samples | Moment, *, rank: int | None) -> Moment:
    return jax.vmap(partial(_summary, rank=rank))(data)


def _summary(data: Samples | Moment, *, rank: int | None) -> Moment:
    """Return ONE client's moment in the stored form."""
    moment = data if isinstance(data, Moment) else Moment.from_samples(data.values, data.count)
    if rank is None:
        return moment.densified()
    return _sketched(_root(moment), moment.count, moment.trace, rank)


@partial(jax.jit, static_argnames="rank")
def _merged(
    rate: Float[Array, ""] | None, before: Moment, today: Moment, *, rank: int | None
) -> Moment:
    return jax.vmap(partial(_merged_of_one, rate, rank=rank))(before, today)


def _merged_of_one(
    rate: Float[Array, ""] | None, before: Moment, today: Moment, *, rank: int | None
) -> Moment:
    """Merge ONE client's earlier moment with its new samples; either may be of no samples."""
    has_old, has_new = before.count > 0, today.count > 0
    old, new = jnp.where(has_old, before.count, 1), jnp.where(has_new, today.count, 1)
    # Without forgetting, both sides count by their samples, and 1/c below is 1 / (old + new).
    rate = new / (old + new) if rate is None else rate.astype(new.dtype)
    count = 1 / ((1 - rate) ** 2 / old + rate**2 / new)
    trace = (1 - rate) * before.trace + rate * today.trace
    if rank is None:
        matrix = (1 - rate) * before.matrix() + rate * today.matrix()
        merged = Moment(matrix, None, count, trace)
    else:
        rows = [jnp.sqrt(1 - rate) * _root(before), jnp.sqrt(rate) * _root(today)]
        merged = _sketched(jnp.concatenate(rows), count, trace, rank)

    def chosen(merged: Array, before: Array, today: Array) -> Array:
        return jnp.where(has_new, jnp.where(has_old, merged, today), before)

    return jax.tree.map(chosen, merged, before, today)


def _root(moment: Moment) -> MomentRows:
    """Return rows F with `S = Fᵀ F`.

    Raises:
        ValueError: if the moment is kept as a matrix.
    """
    if moment.samples is None:
        raise refuse("rank", "None where newer holds matrices of moments", moment)
    return moment.samples.astype(moment.count.dtype) / jnp.sqrt(jnp.maximum(moment.count, 1))


def _sketched(
    rows: MomentRows, count: Float[Array, ""], trace: Float[Array, ""], rank: int
) -> Moment:
    """Sketch rows F by `rank` rows, by frequent directions."""
    if len(rows) <= rank:
        kept = jnp.pad(rows, ((0, rank - len(rows)), (0, 0)))
    else:
        moment = Moment.from_samples(rows, 1)
        values, vectors = moment.top(min(rank + 1, moment.dim))
        dropped = values[rank] if rank < len(values) else jnp.zeros_like(values[0])
        left = lax.stop_gradient(jnp.maximum(values - dropped, 0))
        root = jnp.sqrt(left)
        # The result is V M Vᵀ with the diagonal M = VᵀSV - dropped. The derivative of eigenvectors
        # leaves out a part of it; a root R of M changes by RᵀdR + dRᵀR = dM.
        inside = vectors.T @ moment.mv(vectors) - dropped * jnp.eye(len(values), dtype=rows.dtype)
        weight = ratio(root[:, None] * jnp.ones_like(root), left[:, None] + left)
        factor = jnp.diag(root) + weight * zero_with_derivative(inside)
        kept = matmul(factor[:rank], vectors.T)
    # A `Moment` divides by its count. Its trace is the exact one, not that of the rows.
    return Moment(None, kept * jnp.sqrt(jnp.maximum(count, 1)), count, trace)


def _union(known: Int[np.ndarray, " m"], newer: Int[np.ndarray, " n"]) -> _Union:
    ids = np.concatenate([known, newer[~np.isin(newer, known)]])

    def places(of: Int[np.ndarray, " some"]) -> Int[np.ndarray, " all"]:
        found = {int(number): place for place, number in enumerate(of)}
        return np.asarray([found.get(int(number), -1) for number in ids])

    return _Union(ids, places(known), places(newer))


def _chosen(
    union: _Union,
    known: Float[Array, " m"],
    newer: Float[Array, " n"],
    old: Float[Array, " m"],
    new: Float[Array, " n"],
) -> Float[Array, " all"]:
    """Return the clients' weights: those of the newer clients if they have samples.

    Weights are relative to their mean over the clients with samples, of which `old` and `new` are
    the numbers.
    """
    known, newer = (jnp.sum(n > 0) * w for w, n in ((known, old), (newer, new)))
    at = np.maximum(union.known, 0), np.maximum(union.newer, 0)
    earlier = jnp.where(union.known >= 0, known[at[0]], 0)
    return jnp.where((union.newer >= 0) & (new[at[1]] > 0), newer[at[1]], earlier)


def _column(which: Bool[np.ndarray, " all"], like: Array) -> Bool[np.ndarray, "all ..."]:
    """Add axes to one truth value per client, to match an array."""
    return which.reshape(-1, *(1,) * (like.ndim - 1))
