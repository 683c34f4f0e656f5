"""Stores the data of clients of very different sizes in a few separately padded arrays."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree


class Buckets(eqx.Module):
    """Clients' data that do not have one shape for all clients.

    It is a node of a pytree whose other leaves have a leading axis of all clients.
    """

    parts: tuple[PyTree, ...]  # leading axis = the clients of one bucket
    places: tuple[Int[Array | np.ndarray, " bucket"], ...]  # their positions among all clients
    sizes: tuple[int, ...] = eqx.field(static=True)  # number of clients, without padding

    def __repr__(self) -> str:
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(self.parts)):
            return eqx.tree_pformat(self)
        each = zip(self.sizes, self.parts, strict=True)
        return "; ".join(f"{number:,} of {part!r}" for number, part in each)


def is_buckets(node: Any) -> bool:
    """Whether this node of a tree is a `Buckets`."""
    return isinstance(node, Buckets)


def over_parts(function: Callable[..., PyTree], data: PyTree) -> PyTree:
    """Apply a function to each rectangular part of clients' data, in buckets or not."""
    if not is_buckets(data):
        return function(data)
    return Buckets(tuple(map(function, data.parts)), data.places, data.sizes)


def parts_of(data: PyTree) -> tuple[PyTree, ...]:
    """The rectangular parts of clients' data, starting with the longest clients."""
    return data.parts if is_buckets(data) else (data,)


def layout_of(tree: PyTree) -> Buckets | None:
    """The buckets of a tree, all of which have one layout; None if there are none."""
    return next(filter(is_buckets, jax.tree.leaves(tree, is_leaf=is_buckets)), None)


def shapes_differ(what: str) -> ValueError:
    """The error to raise if something must have one shape for all clients, in any bucket."""
    return ValueError(
        f"clients: wanted all of one size, without buckets, since what is {what} has shapes that "
        "depend on the number of samples"
    )


def split(own: PyTree) -> tuple[PyTree, ...]:
    """Split clients' data, leading axis = clients, into one rectangular tree per bucket."""
    layout = layout_of(own)
    if layout is None:
        return (own,)

    def of_one(number: int, places: Array | np.ndarray) -> PyTree:
        def part(x):
            return x.parts[number] if is_buckets(x) else x[places]

        return jax.tree.map(part, own, is_leaf=is_buckets)

    return tuple(of_one(number, places) for number, places in enumerate(layout.places))


def in_order(layout: Buckets | None, parts: Sequence[PyTree]) -> PyTree:
    """Join the data of all buckets into one tree in the clients' order.

    Data whose shape differs between buckets stay in buckets.
    """
    if layout is None:
        return parts[0]
    # Places are a permutation of all rows, so sorting them inverts it.
    order = jnp.argsort(jnp.concatenate(layout.places))

    def one(*nodes: Any) -> PyTree:
        leaves, structures = zip(*map(_children, nodes), strict=True)
        if any(structure != structures[0] for structure in structures):
            return Buckets(nodes, layout.places, layout.sizes)
        if structures[0] != _LEAF:
            children = [one(*each) for each in zip(*leaves, strict=True)]
            return jax.tree.unflatten(structures[0], children)
        if len({(x.shape[1:], x.dtype) for x in nodes}) > 1:
            return Buckets(nodes, layout.places, layout.sizes)
        return jnp.concatenate(nodes)[order]

    return one(*parts)


def _children(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda x: x is not node)


_LEAF = jax.tree.structure(0)


def each_first(tree: PyTree) -> tuple[PyTree, ...]:
    """The data of each bucket's first client; of the first client, if there are no buckets."""
    return tuple(jax.tree.map(lambda x: x[0], part) for part in split(tree))


def first_of(tree: PyTree) -> PyTree:
    """The data of one of the longest clients."""
    return each_first(tree)[0]


def take(data: PyTree, indices: Int[ArrayLike, " chosen"] | Sequence[int]) -> PyTree:
    """The data of the clients at these positions, in this order.

    Raises:
        ValueError: if positions are traced and the data are in buckets.
    """
    if not is_buckets(data):
        return jax.tree.map(lambda x: x[jnp.asarray(indices)], data)
    try:
        chosen, places = np.asarray(indices), [np.asarray(own) for own in data.places]
    except jax.errors.TracerArrayConversionError:
        raise ValueError(
            "indices: wanted positions that are known for clients in buckets, got traced ones; "
            "restrict() takes numbers that are traced"
        ) from None
    bucket, row = np.zeros((2, sum(data.sizes)), int)
    for number, own in enumerate(places):
        bucket[own], row[own] = number, np.arange(len(own))
    kept = [np.flatnonzero(bucket[chosen] == number) for number in range(len(places))]
    found = [
        (jax.tree.map(lambda x, rows=row[chosen[own]]: x[rows], part), jnp.asarray(own))
        for part, own in zip(data.parts, kept, strict=True)
        if len(own)
    ]
    if len(found) == 1:
        return found[0][0]
    parts, places = zip(*found, strict=True)
    return Buckets(parts, places, tuple(map(len, places)))


def filled(data: PyTree, clients: int, multiple: int) -> tuple[PyTree, Int[Array, " all"]]:
    """Pad data with copies of clients, so that each part divides among devices.

    Args:
        data: of all clients.
        clients: number of clients.
        multiple: the number of clients of each part becomes a multiple of this.

    Returns:
        The data, and for each row its client; the clients themselves come first.
    """
    layout = data if is_buckets(data) else Buckets((data,), (jnp.arange(clients),), (clients,))
    parts, places, whose = [], [], [jnp.arange(clients)]
    end = clients
    for part, own in zip(layout.parts, layout.places, strict=True):
        shortage = -len(own) % multiple
        index = jnp.arange(len(own) + shortage) % len(own)
        if shortage:
            part = jax.tree.map(lambda x, index=index: x[index], part)
        parts.append(part)
        places.append(jnp.append(own, jnp.arange(end, end + shortage)))
        whose.append(own[index[len(own) :]])
        end += shortage
    if not is_buckets(data):
        return parts[0], jnp.concatenate(whose)
    return Buckets(tuple(parts), tuple(places), layout.sizes), jnp.concatenate(whose)


class Selection(NamedTuple):
    """Some of the clients, including all wanted ones."""

    own: PyTree  # their data, in buckets if all clients are
    positions: Int[Array, " selected"]  # among all clients
    wanted: slice | Int[Array, " wanted"]  # the wanted ones of them, in the clients' order


def select(own: PyTree, wanted: Bool[Array, " clients"], number: int) -> Selection:
    """Select `number` clients, or `number` of each bucket (all, if it has fewer).

    The number of wanted clients in a bucket varies from round to round, but shapes must not, so
    more clients may be selected than wanted.

    Args:
        own: leading axis = clients.
        wanted: which clients must be selected, at most `number`.
        number: how many to select.
    """
    layout = layout_of(own)
    if layout is None:
        # If nobody is wanted, because the round does not take place, this is client 0 repeated; it
        # is absent, so its state stays.
        chosen = jnp.nonzero(wanted, size=number)[0]
        return Selection(jax.tree.map(lambda x: x[chosen], own), chosen, slice(None))
    # The wanted clients of a bucket come first, then others up to a fixed number.
    rows = [
        jax.lax.top_k(wanted[places].astype(jnp.int32), min(number, len(places)))[1]
        for places in layout.places
    ]
    chosen = jnp.concatenate([x[r] for x, r in zip(layout.places, rows, strict=True)])
    ends = np.cumsum([0, *map(len, rows)])
    places = tuple(map(jnp.arange, ends[:-1], ends[1:]))

    def some(x):
        if not is_buckets(x):
            return x[chosen]
        parts = [
            jax.tree.map(lambda leaf, r=r: leaf[r], part)
            for part, r in zip(x.parts, rows, strict=True)
        ]
        return Buckets(tuple(parts), places, tuple(map(len, rows)))

    # In the clients' order, and those that only fill up last, where they are cut off.
    order = jnp.argsort(jnp.where(wanted[chosen], chosen, len(wanted)))[:number]
    return Selection(jax.tree.map(some, own, is_leaf=is_buckets), chosen, order)


def grouped(sizes: Int[np.ndarray, " clients"], factor: float) -> list[Int[np.ndarray, " bucket"]]:
    """Group clients into as few groups as keep padded rows within a factor of the data.

    Args:
        sizes: positive numbers of samples.
        factor: above one; rows with padding over rows without.

    Returns:
        The positions in each group, ascending; the group with the longest clients first.
    """
    # Merge sizes that differ by less than a tenth of the allowed waste, to limit levels: the tables
    # below are quadratic in them.
    fine = np.floor(np.log(sizes.max() / sizes) / np.log1p((factor - 1) / 10))
    level = np.unique(fine, return_inverse=True)[1]
    longest = np.zeros(level.max() + 1, int)
    np.maximum.at(longest, level, sizes)
    before = np.concatenate([[0], np.cumsum(np.bincount(level))])
    # `rows[i, j]` are those of levels i to j as one group; `least[j]` the fewest of levels 0 to j
    # in one group, then in two, and so on (dynamic programming).
    rows = (longest[:, None] * (before[1:] - before[:-1, None])).astype(float)
    rows[np.tri(len(rows), k=-1, dtype=bool)] = np.inf
    least, starts = rows[0], []
    while least[-1] > factor * sizes.sum():
        several = least[:-1, None] + rows[1:]
        starts.append(several.argmin(axis=0) + 1)
        least = several.min(axis=0)
    cuts = [len(rows)]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1] - 1]))
    cuts = [0, *reversed(cuts)]
    return [
        np.flatnonzero((level >= first) & (level < end)) for first, end in itertools.pairwise(cuts)
    ]
