"""Reductions of the clients' messages: means, sums, maxima, mean products, and gathering.

An algorithm wraps each part of its message in one of these classes; a bare array is a mean. The
server receives the same structure, reduced.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from jaxfed.core.common.returned import check_alike, check_arrays, described


class Part(eqx.Module):
    """A part of a message, with the way in which those of all clients are brought together.

    Unless it is a `Reduction` it is gathered: the server receives every client's contribution,
    along a new leading axis.
    """

    value: eqx.AbstractVar[PyTree]

    linear: ClassVar[bool] = False
    """Whether the result is linear in every contribution; only then differences may be sent."""

    summed: ClassVar[bool] = False
    """Whether the result is one sum over all clients; only then masks can hide contributions."""

    def of_client(self, client_id: Int[Array, ""]) -> Self:
        """This part as sent by ONE client; by default it makes no difference who that is."""
        del client_id
        return self

    @abc.abstractmethod
    def contribution(self, weight: Float[Array, ""]) -> Self:
        """ONE client's share of the result; `weight` is 0 for an absent client."""

    @property
    def is_mean(self) -> bool:
        """Whether contributions are scaled by the clients' weights; no by default."""
        return False


class Reduction(Part):
    """A part that is reduced over clients, by a commutative monoid of partial results."""

    @abc.abstractmethod
    def over_clients(self) -> Self:
        """The partial result of contributions along a leading axis."""

    @abc.abstractmethod
    def neutral(self) -> Self:
        """The partial result of no client, from the shapes of any partial result."""

    @abc.abstractmethod
    def combined(self, other: Any) -> Self:
        """The partial result of two."""

    @staticmethod
    @abc.abstractmethod
    def over_devices(parts: list["Reduction"], axis: str) -> list["Reduction"]:
        """The results of several partial results over a mapped axis of devices, at once."""

    def to_combine(self) -> "Reduction":
        """This partial result, in the form that `combined` and `over_devices` take.

        By default itself. A partial result that needs no combining may have a cheaper form, which
        is converted here.
        """
        return self


class Additive(Reduction):
    """A reduction whose partial results are added."""

    @final
    def neutral(self) -> Self:
        """Zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self)

    @final
    def combined(self, other: Any) -> Self:
        """Their sum."""
        return jax.tree.map(jnp.add, self, other)

    @final
    @staticmethod
    def over_devices(parts: list[Reduction], axis: str) -> list[Reduction]:
        """One all-reduce of all of them."""
        return jax.lax.psum(parts, axis)


@final
class Mean(Additive):
    """The weighted mean over the clients that take part, by the clients' own weights."""

    value: PyTree

    linear = summed = True

    @property
    def is_mean(self) -> bool:
        """Always."""
        return True

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted part, or zero from an absent client, whatever it made."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, scaled(weight, x), 0), self)

    def over_clients(self) -> Self:
        """The sum of the weighted parts."""
        return jax.tree.map(_total, self)


@final
class Sum(Additive):
    """The plain sum over the clients that take part, whatever their weights."""

    value: PyTree

    linear = summed = True

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The part, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), self)

    def over_clients(self) -> Self:
        """The sum of the parts."""
        return jax.tree.map(_total, self)


@final
class Gram(Additive):
    """The weighted mean of products `F Fᵀ`, `(d, d)`, of thin factors `F`, `(d, k)`.

    Clients send the factors; only the mean of the products is ever formed. Without weights it is
    the plain sum. With `thin=True`, and at most d / 2 columns in the factors of all clients
    together, it is not formed either: the server receives them side by side, `(d, m k)`, a factor
    of the mean.
    """

    value: PyTree
    weighted: bool = eqx.field(static=True, default=True)
    thin: bool = eqx.field(static=True, default=False)

    @property
    def is_mean(self) -> bool:
        """If it is weighted."""
        return self.weighted

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The factor, scaled by the root of its weight, or zero from an absent client."""
        present = weight > 0
        scale = jnp.sqrt(jnp.where(present, weight, 1)) if self.weighted else jnp.ones_like(weight)
        return jax.tree.map(lambda x: jnp.where(present, scaled(scale, x), 0), self)

    def over_clients(self) -> Self:
        """The sum of the products, or the factors side by side."""
        factor = jax.tree.map(_side_by_side, self)
        few = all(2 * x.shape[1] <= x.shape[0] for x in jax.tree.leaves(factor))
        return factor if self.thin and few else factor._product()

    def to_combine(self) -> "Gram":
        """The sum of the products, since factors cannot be added."""
        return self._product() if self.thin else self

    def _product(self) -> "Gram":
        return Gram(jax.tree.map(_gram, self.value), self.weighted)


@final
class Symmetric(Additive):
    """The weighted mean of symmetric matrices, `(d, d)`, which travel as their upper triangles.

    The result is that of `Gram`, so that each client may send the smaller of the two. Without
    weights it is the plain sum.
    """

    value: PyTree  # vectors of d (d + 1) / 2 numbers, row by row
    weighted: bool = eqx.field(static=True, default=True)

    linear = summed = True

    @property
    def is_mean(self) -> bool:
        """If it is weighted."""
        return self.weighted

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted triangle, or zero from an absent client."""
        scale = weight if self.weighted else jnp.ones_like(weight)
        return jax.tree.map(lambda x: jnp.where(weight > 0, scaled(scale, x), 0), self)

    def over_clients(self) -> Gram:
        """The sum of the matrices."""
        return Gram(jax.tree.map(lambda x: unfolded(_total(x)), self.value), self.weighted)


@final
class Max(Reduction):
    """The elementwise maximum over the clients that take part."""

    value: PyTree

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The part, or the type's lowest value from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, _lowest(x.dtype)), self)

    def over_clients(self) -> Self:
        """The maximum along the leading axis."""
        return jax.tree.map(lambda x: x.max(0), self)

    def neutral(self) -> Self:
        """The type's lowest values."""
        return jax.tree.map(lambda x: jnp.full(x.shape, _lowest(x.dtype)), self)

    def combined(self, other: Any) -> Self:
        """The larger ones."""
        return jax.tree.map(jnp.maximum, self, other)

    @staticmethod
    def over_devices(parts: list[Reduction], axis: str) -> list[Reduction]:
        """The maxima of the gathered values: `lax.pmax` has no derivative."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis).max(0), parts)


@final
class Gather(Part):
    """All clients' parts, side by side along a new leading axis, zeros from absent clients.

    The server sees every client's, so that secure aggregation is impossible. With a fixed number of
    participants only theirs are gathered.
    """

    value: PyTree

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The part, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), self)


def is_part(node: object) -> bool:
    """Whether this node of a message is wrapped."""
    return isinstance(node, Part)


def wrapped(message: PyTree) -> PyTree[Part]:
    """The message with every bare array as a `Mean`."""
    return jax.tree.map(lambda x: x if is_part(x) else Mean(x), message, is_leaf=is_part)


def plain(message: PyTree) -> PyTree:
    """The values alone, in the message's structure."""
    return jax.tree.map(lambda x: x.value if is_part(x) else x, message, is_leaf=is_part)


def contributions(
    message: PyTree, weight: Float[Array, ""], client_id: Int[Array, ""] | None = None
) -> PyTree[Part]:
    """ONE client's share of the reduced message.

    Args:
        message: the client's.
        weight: the client's; 0 if it is absent.
        client_id: the client's, where a part may be reduced by it.
    """

    def one(part: Part) -> Part:
        if client_id is not None:
            part = _returned(part, "of_client", part.of_client(client_id), type(part))
        return _returned(part, "contribution", part.contribution(weight), type(part))

    return each(one, wrapped(message))


def is_linear(message: PyTree) -> bool:
    """Whether all of a reduced message is linear in what each client sends."""
    return all(part.linear for part in _parts_of(message))


def is_summed(message: PyTree) -> bool:
    """Whether all of a message is reduced by sums and means over all clients."""
    return all(part.summed for part in _parts_of(message))


def _parts_of(message: PyTree) -> list[Part]:
    return jax.tree.leaves(wrapped(message), is_leaf=is_part)


def separated(parts: PyTree[Part]) -> tuple[PyTree[Reduction], PyTree[Part]]:
    """The reduced parts and the gathered ones, each with None in place of the others."""
    return eqx.partition(parts, lambda x: isinstance(x, Reduction), is_leaf=is_part)


def joined(reduced: PyTree[Reduction], gathered: PyTree[Part]) -> PyTree[Part]:
    """Inverse of `separated`."""
    return eqx.combine(reduced, gathered, is_leaf=is_part)


def each(function: Callable[..., Part], *parts: PyTree[Part]) -> PyTree[Part]:
    """A function of the parts at each place."""
    return jax.tree.map(function, *parts, is_leaf=is_part)


# --- what reductions return is checked where they are traced; errors name the function -----------


def over_clients(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """The partial results of contributions along a leading axis."""
    return each(lambda x: _returned(x, "over_clients", x.over_clients(), Reduction), parts)


def neutral(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """The partial results of no client, from the shapes of any."""
    return each(lambda x: _like(x, "neutral", x.neutral()), parts)


def combined(total: PyTree[Reduction], part: PyTree[Reduction]) -> PyTree[Reduction]:
    """The partial result of two, which are alike whatever the numbers of their clients."""

    def one(a: Reduction, b: Reduction) -> Reduction:
        _like(a, "over_clients", b, " from any number of clients")
        return _like(a, "combined", a.combined(b))

    return each(one, to_combine(total), to_combine(part))


def to_combine(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """Partial results in the form that can be combined."""
    return each(lambda x: _returned(x, "to_combine", x.to_combine(), Reduction), parts)


def over_devices(parts: PyTree[Reduction], axis: str) -> PyTree[Reduction]:
    """The results of all devices' partial results; parts of one kind travel together."""
    leaves, structure = jax.tree.flatten(to_combine(parts), is_leaf=is_part)
    for rule in dict.fromkeys(type(part).over_devices for part in leaves):
        places = [i for i, part in enumerate(leaves) if type(part).over_devices is rule]
        parts = [leaves[i] for i in places]
        results = rule(list(parts), axis)
        if not isinstance(results, list) or len(results) != len(parts):
            where = f"{type(parts[0]).__name__}.over_devices"
            raise ValueError(f"{where}: wanted a list of {len(parts)}, got {described(results)}")
        for i, part, result in zip(places, parts, results, strict=True):
            leaves[i] = _like(part, "over_devices", result)
    return jax.tree.unflatten(structure, leaves)


def _returned(part: Part, function: str, result: Any, kind: type) -> Any:
    where = f"{type(part).__name__}.{function}: wanted"
    if not isinstance(result, kind):
        raise ValueError(f"{where} a {kind.__name__}, got {described(result)}")
    check_arrays(where, result)
    return result


def _like(part: Part, function: str, result: Any, why: str = "") -> Any:
    check_alike(f"{type(part).__name__}.{function}: wanted", part, result, why)
    return result


def scaled(factor: Float[Array, ""], x: Array) -> Array:
    """A part times a number, in the part's own precision; whole numbers become real ones."""
    return (factor.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else factor) * x


def _lowest(dtype: jnp.dtype) -> Array:
    """The lowest value of a type."""
    real = jnp.issubdtype(dtype, jnp.floating)
    return jnp.asarray(-jnp.inf if real else jnp.iinfo(dtype).min, dtype)


def _total(x: Shaped[Array, "m ..."]) -> Shaped[Array, "..."]:
    """The sum over clients."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.sum(0, dtype=None if x.dtype == bool else x.dtype)
    # XLA's sum over a leading axis is up to 14 times slower on a processor than this product.
    ones = jnp.ones(len(x), x.dtype)
    return jnp.tensordot(ones, x, 1, precision=jax.lax.Precision.HIGHEST)


def _side_by_side(factors: Float[Array, "m d k"]) -> Float[Array, "d columns"]:
    # The product of this wide matrix with itself is the sum of the clients' products.
    return jnp.moveaxis(factors, 0, 1).reshape(factors.shape[1], -1)


def _gram(wide: Float[Array, "d columns"]) -> Float[Array, "d d"]:
    return jnp.matmul(wide, wide.T, precision=jax.lax.Precision.HIGHEST)


def unfolded(triangle: Float[Array, " size"]) -> Float[Array, "d d"]:
    """The symmetric matrix of which this is the upper triangle, row by row."""
    # The root of d (d + 1) / 2 = size.
    dim = int(((8 * triangle.size + 1) ** 0.5 - 1) / 2)
    rows, columns = jnp.triu_indices(dim)
    upper = jnp.zeros((dim, dim), triangle.dtype).at[rows, columns].set(triangle)
    return upper.at[columns, rows].set(triangle)
