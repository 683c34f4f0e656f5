"""Messages to groups of clients, and the robust aggregates that replace means."""

from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.aggregation.rules import GroupRows, Rule, Shares, smoothed_distances, weighted_quantile
from jaxfed.core.contract.groups import Groups
from jaxfed.core.contract.reduction import (
    Gram,
    Max,
    Mean,
    Part,
    Sum,
    Symmetric,
    is_part,
    plain,
)
from jaxfed.linalg.sums import scaled_norm
from jaxfed.linalg.triangle import from_triangle

# The largest allowed curvature, as a multiple of the median one; see `Robust`.
CURVATURE = 2.0
# Maximum of numbers in the matrices of all groups that the server holds.
LARGEST = 2**29


ReductionKind = Literal["mean", "sum", "max"]


class _Grouped(eqx.Module):
    """A part of a message: what each group sends, and after reduction what all groups have sent."""

    value: Any
    kind: ReductionKind = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True, default=False)  # an upper triangle, row by row


def _is_grouped(node: object) -> bool:
    return isinstance(node, _Grouped)


class GroupMessage(NamedTuple):
    """A message whose means and sums are sent to the client's group."""

    parts: PyTree
    weight: PyTree  # a one, reduced to the groups' weights
    participants: PyTree  # a one, reduced to the groups' numbers of participants


class Received(NamedTuple):
    """A message with aggregates in place of the groups' sums."""

    message: PyTree
    distances: Shares  # of the groups from the aggregate, in units of the median one


class Sender(NamedTuple):
    """How ONE client sends to its group."""

    group: Int[Array, ""]
    groups: int
    masked: bool  # whether to send zeros to all other groups

    def sent(self, message: PyTree, finite: Bool[Array, ""], *, first: bool, name: str) -> PyTree:
        """Return the message with its means and sums sent to the client's group.

        Args:
            message: message of an algorithm.
            finite: whether the client takes part.
            first: whether it is the message before the rounds.
            name: name of the algorithm.

        Raises:
            ValueError: if a part has no robust form.
        """
        if not jax.tree.leaves(message):
            return message

        def one(part: Part | Array) -> PyTree:
            if not is_part(part):
                return self._grouped("mean", part)
            if isinstance(part, Sum):
                return self._grouped("sum", part.value)
            if isinstance(part, Max) and first:
                return self._grouped("max", part.value)
            if isinstance(part, Symmetric | Gram):
                part = part.as_sum() if isinstance(part, Gram) else part
                self._check_size(part.value)
                return self._grouped("mean" if part.weighted else "sum", part.value, True)
            # Such as the fingerprint of `PerPCA`, which only a plain mean preserves.
            if isinstance(part, Mean):
                return part
            raise ValueError(
                "algorithm: wanted messages of means and sums for a robust aggregate, "
                f"got {type(part).__name__} from {name}"
            )

        parts = jax.tree.map(one, _present(message, finite), is_leaf=is_part)
        kinds = {x.kind for x in jax.tree.leaves(parts, is_leaf=_is_grouped) if _is_grouped(x)}
        counts = finite.astype(jnp.result_type(*jax.tree.leaves(plain(message))))
        weight = self._to_group("mean", counts, 1.0) if kinds & {"mean", "max"} else None
        participants = self._to_group("sum", counts, 1.0) if "sum" in kinds else None
        return GroupMessage(parts, weight, participants)

    def _grouped(self, kind: ReductionKind, value: PyTree, symmetric: bool = False) -> PyTree:
        return jax.tree.map(lambda x: _Grouped(self._to_group(kind, x), kind, symmetric), value)

    def _to_group(self, kind: ReductionKind, x: Array, limit: float | None = None) -> Part:
        weighted = kind != "sum"
        if not self.masked:
            return Groups(x, self.groups, weighted, limit)
        # Masks hide all but the sum over clients, so each client sends a row for every group, with
        # zeros in those of the others.
        own = (jnp.arange(self.groups) == self.group).reshape(-1, *[1] * x.ndim)
        return (Mean if weighted else Sum)(jnp.where(own, x, 0))

    def _check_size(self, triangles: PyTree) -> None:
        for numbers in (x.size for x in jax.tree.leaves(triangles)):
            if self.groups * numbers > LARGEST:
                raise ValueError(
                    f"groups: wanted at most {LARGEST // numbers}, since the server holds a "
                    f"matrix of {numbers} numbers for each, got {self.groups}; take fewer, or a "
                    "warm_start where the matrices are those of a start"
                )


def aggregated(received: GroupMessage, rule: Rule, groups: int) -> Received:
    """Replace the groups' sums by aggregates."""
    nodes, structure = jax.tree.flatten(received.parts, is_leaf=_is_grouped)
    grouped = [i for i, node in enumerate(nodes) if _is_grouped(node)]
    if not grouped:
        return Received(received.parts, jnp.zeros(groups))
    # A mean counts groups by weight, a sum by participants.
    sizes = {"sum": received.participants, "mean": received.weight, "max": received.weight}
    present = {kind: _Present.of(sizes[kind]) for kind in {nodes[i].kind for i in grouped}}

    def means(node: Any) -> GroupRows:
        rows, there = node.value.reshape(groups, -1), present[node.kind].there
        # Mask both before dividing, so that derivatives of masked entries are zero.
        size = jnp.where(there, sizes[node.kind], 1)
        return jnp.where(there[:, None], rows, 0) / size[:, None]

    def in_median(lengths: Shares, shares: Shares) -> Shares:
        return lengths / weighted_quantile(lengths[:, None], shares, 0.5)

    def one(
        rows: GroupRows, shares: Shares, curvature: bool
    ) -> tuple[Float[Array, " numbers"], Shares]:
        """Return the aggregate of a part, and the groups' squared distances from it."""
        center, scale = _spread(rows, shares)
        if curvature:
            return jnp.minimum(CURVATURE * center, rows.max(0)), jnp.zeros_like(shares)
        # Beyond this distance no rule can tell groups apart, and squares of larger numbers
        # overflow.
        most = float(jnp.finfo(rows.dtype).max) ** 0.3
        scaled = jnp.clip((rows - center) / scale, -most, most)
        found = rule.aggregate(scaled, shares)
        # In units of the median distance, whatever the part's scale, and counted by its numbers.
        squares = rows.shape[1] * in_median(smoothed_distances(scaled, found), shares) ** 2
        return center + scale * found, squares

    # Parts of equal shape at once, so that a program holds the rule only once for all of them.
    alike: dict[Any, list[int]] = {}
    for i in grouped:
        form = nodes[i].value.shape, nodes[i].value.dtype, nodes[i].kind
        alike.setdefault(form, []).append(i)
    squares: list[Shares] = []
    for (shape, _, kind), places in alike.items():
        rows, own = jnp.stack([means(nodes[i]) for i in places]), present[kind]
        aggregate = partial(one, shares=own.shares, curvature=kind == "max")
        values, lengths = jax.vmap(aggregate)(rows)
        if kind != "max":
            squares.append(jnp.where(own.there, lengths.sum(0), 0))
        for i, value in zip(places, values, strict=True):
            if kind == "sum":
                value = value * own.total
            shaped = value.reshape(shape[1:])
            nodes[i] = from_triangle(shaped) if nodes[i].symmetric else shaped
    message = jax.tree.unflatten(structure, nodes)
    if not squares:
        return Received(message, jnp.zeros(groups))
    together = jnp.asarray(sum(squares))
    # Zero for groups without participants, where the root has no derivative.
    counts = together > 0
    lengths = jnp.where(counts, jnp.sqrt(jnp.where(counts, together, 1)), 0)
    shares = present["mean" if "mean" in present else "sum"].shares
    return Received(message, in_median(lengths, shares))


class _Present(NamedTuple):
    """The groups that count in one kind of part."""

    there: Bool[Array, " groups"]
    shares: Shares
    total: Float[Array, ""]

    @classmethod
    def of(cls, sizes: Shares) -> "_Present":
        # Groups without participants do not count. A lossy channel may make others negative.
        there = sizes > 1e-3 * sizes.max()
        counted = jnp.where(there, sizes, 0)
        return cls(there, counted / counted.sum(), counted.sum())


def _present(message: PyTree, finite: Bool[Array, ""]) -> PyTree:
    # Zeros instead of NaN, which would still be NaN after multiplication by a weight of zero.
    return jax.tree.map(lambda x: jnp.where(finite, x, 0), message)


class _Spread(NamedTuple):
    center: Float[Array, " numbers"]
    scale: Float[Array, ""]


def _spread(rows: GroupRows, shares: Shares) -> _Spread:
    """Return the coordinate-wise median of groups, and their median distance from it."""
    center = weighted_quantile(rows, shares, 0.5)
    # Each in its own unit: a group may send numbers of any size.
    lengths = jax.vmap(scaled_norm)(rows - center)
    typical = weighted_quantile(lengths[:, None], shares, 0.5)[0]
    return _Spread(center, jnp.where(typical > 0, typical, 1))
