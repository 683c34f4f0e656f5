"""Clients of very different sizes: their data in a few rectangular arrays, padded one by one."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree


class Buckets(eqx.Module):
    """What clients have, where it is not of one shape for all of them.

    A node of a pytree whose other leaves have a leading axis of all clients.
    """

    parts: tuple[PyTree, ...]  # leading axis = the clients of one bucket
    places: tuple[Int[Array | np.ndarray, " bucket"], ...]  # where these stand among all clients
    sizes: tuple[int, ...] = eqx.field(static=True)  # without those that fill up devices

    def __repr__(self) -> str:
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(self.parts)):
            return eqx.tree_pformat(self)
        each = zip(self.sizes, self.parts, strict=True)
        return "; ".join(f"{number:,} of {part!r}" for number, part in each)


def is_buckets(node: Any) -> bool:
    """Whether this node of a tree is in buckets."""
    return isinstance(node, Buckets)


def over_parts(function: Callable[..., PyTree], data: PyTree) -> PyTree:
    """A function of each rectangular part of clients' data, in buckets or not."""
    if not is_buckets(data):
        return function(data)
    return Buckets(tuple(map(function, data.parts)), data.places, data.sizes)


def parts_of(data: PyTree) -> tuple[PyTree, ...]:
    """The rectangular parts of clients' data, those of the longest clients first."""
    return data.parts if is_buckets(data) else (data,)


def layout_of(tree: PyTree) -> Buckets | None:
    """The buckets within a tree, which all are alike; None where there are none."""
    return next(filter(is_buckets, jax.tree.leaves(tree, is_leaf=is_buckets)), None)


def shapes_differ(what: str) -> ValueError:
    """The error for what must be of one shape for all clients, in whichever bucket; raise it."""
    return ValueError(
        f"clients: wanted all of one size, without buckets, since what is {what} has shapes that "
        "depend on the number of samples"
    )


def split(own: PyTree) -> tuple[PyTree, ...]:
    """What clients have, leading axis = clients, as one rectangular tree a bucket."""
    layout = layout_of(own)
    if layout is None:
        return (own,)

    def of_one(number: int, places: Array) -> PyTree:
        def part(x):
            return x.parts[number] if is_buckets(x) else x[places]

        return jax.tree.map(part, own, is_leaf=is_buckets)

    return tuple(of_one(number, places) for number, places in enumerate(layout.places))


def in_order(layout: Buckets | None, parts: Sequence[PyTree]) -> PyTree:
    """What the clients of the buckets have, as one tree in the clients' order.

    What differs between the buckets in its shape stays in buckets.
    """
    if layout is None:
        return parts[0]
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
    """What the first client of each bucket has; of all clients, where they are in none."""
    return tuple(jax.tree.map(lambda x: x[0], part) for part in split(tree))


def first_of(tree: PyTree) -> PyTree:
    """What one client has, one of the longest."""
    return each_first(tree)[0]


def take(data: PyTree, indices: Int[ArrayLike, " chosen"]) -> PyTree:
    """Clients' data at positions, in this order.

    Raises:
        ValueError: for positions that are traced, where the data are in buckets.
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
    """Data with copies of clients after the others, so that each part divides among devices.

    Args:
        data: of all clients.
        clients: how many.
        multiple: what the number of clients of each part is to be a multiple of.

    Returns:
        The data, and whose copies they are, beginning with the clients themselves.
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
    """Some of the clients, among them all that were wanted."""

    own: PyTree  # what they have, in buckets if all clients are
    positions: Int[Array, " selected"]  # among all clients
    wanted: slice | Int[Array, " wanted"]  # those of them that were, in the clients' order


def select(own: PyTree, wanted: Bool[Array, " clients"], number: int) -> Selection:
    """Select `number` clients, or as many of each bucket if it has as many.

    How many clients of a bucket are wanted differs from round to round, and shapes do not, so that
    more clients may be selected than are wanted.

    Args:
        own: leading axis = clients.
        wanted: which clients must be among them, at most `number`.
        number: how many.
    """
    layout = layout_of(own)
    if layout is None:
        chosen = jnp.nonzero(wanted, size=number)[0]
        return Selection(jax.tree.map(lambda x: x[chosen], own), chosen, slice(None))
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

    order = jnp.argsort(jnp.where(wanted[chosen], chosen, len(wanted)))[:number]
    return Selection(jax.tree.map(some, own, is_leaf=is_buckets), chosen, order)


def grouped(sizes: Int[np.ndarray, " clients"], factor: float) -> list[Int[np.ndarray, " bucket"]]:
    """Clients in as few groups as keep padding to a group's longest within a factor of the data.

    Args:
        sizes: positive numbers of samples.
        factor: above one; rows with padding over rows without.

    Returns:
        The positions in each group, ascending, the group with the longest clients first.
    """
    # Sizes within a tenth of what may be wasted stay together, so that there are few of them.
    fine = np.floor(np.log(sizes.max() / sizes) / np.log1p((factor - 1) / 10))
    level = np.unique(fine, return_inverse=True)[1]
    longest = np.zeros(level.max() + 1, int)
    np.maximum.at(longest, level, sizes)
    before = np.concatenate([[0], np.cumsum(np.bincount(level))])
    # Rows of levels i to j as one group; the least of levels 0 to j as one group, two, and so on.
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
