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

from jaxfed.core.common.returned import broken, returned
from jaxfed.linalg.triangle import from_triangle, to_triangle


class Part(eqx.Module):
    """A part of a message, with the rule that combines the clients' contributions.

    A part that is not a `Reduction` is gathered: the server receives every client's contribution
    along a new leading axis.
    """

    value: eqx.AbstractVar[PyTree]

    linear: ClassVar[bool] = False
    """Whether the result is linear in each contribution, as difference channels require."""

    summed: ClassVar[bool] = False
    """Whether the result is one sum over all clients, as masks that hide contributions require."""

    def of_client(self, client_id: Int[Array, ""]) -> Self:
        """This part as sent by ONE client; by default it does not depend on the client."""
        del client_id
        return self

    @abc.abstractmethod
    def contribution(self, weight: Float[Array, ""]) -> Self:
        """ONE client's share of the result; `weight` is 0 for an absent client."""

    @property
    def is_mean(self) -> bool:
        """Whether contributions are scaled by the clients' weights; False by default."""
        return False

    def as_sum(self) -> "Part":
        """This part in a form that one sum reduces, if there is one; by default itself."""
        return self


class Reduction(Part):
    """A part that is reduced over clients. Its partial results form a commutative monoid."""

    @abc.abstractmethod
    def over_clients(self) -> Self:
        """Reduce contributions along the leading axis to a partial result."""

    @abc.abstractmethod
    def neutral(self) -> Self:
        """The partial result of no clients, with the shapes of this partial result."""

    @abc.abstractmethod
    def combined(self, other: Any) -> Self:
        """Combine two partial results."""

    @staticmethod
    @abc.abstractmethod
    def over_devices(parts: list["Reduction"], axis: str) -> list["Reduction"]:
        """Combine several partial results over a mapped axis of devices, in one call."""

    def to_combine(self) -> "Reduction":
        """Convert this partial result to the form that `combined` and `over_devices` accept.

        The identity by default. Reductions with a cheaper form for a result that is never combined
        convert it here.
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
        """The sum of both."""
        return jax.tree.map(jnp.add, self, other)

    @final
    @staticmethod
    def over_devices(parts: list[Reduction], axis: str) -> list[Reduction]:
        """Sum all parts in one all-reduce."""
        return jax.lax.psum(parts, axis)


@final
class Mean(Additive):
    """The mean over participating clients, weighted by the clients' weights."""

    value: PyTree

    linear = summed = True

    @property
    def is_mean(self) -> bool:
        """Always."""
        return True

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted part, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, scaled_part(weight, x), 0), self)

    def over_clients(self) -> Self:
        """The sum of the weighted parts."""
        return jax.tree.map(_total, self)


@final
class Sum(Additive):
    """The sum over participating clients, without weights."""

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

    Clients send the factors, and only the mean of the products is formed. With `weighted=False` it
    is the plain sum. With `thin=True`, and at most d / 2 columns over all clients, the mean is not
    formed either: the server receives the factors side by side, `(d, m k)`, a factor of the mean.
    """

    value: PyTree
    weighted: bool = eqx.field(static=True, default=True)
    thin: bool = eqx.field(static=True, default=False)

    @property
    def is_mean(self) -> bool:
        """Whether it is weighted."""
        return self.weighted

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The factor, scaled by the root of its weight, or zero from an absent client."""
        present = weight > 0
        scale = jnp.sqrt(jnp.where(present, weight, 1)) if self.weighted else jnp.ones_like(weight)
        return jax.tree.map(lambda x: jnp.where(present, scaled_part(scale, x), 0), self)

    def over_clients(self) -> Self:
        """The sum of the products, or the factors side by side."""
        factor = jax.tree.map(_side_by_side, self)
        few = all(2 * x.shape[1] <= x.shape[0] for x in jax.tree.leaves(factor))
        return factor if self.thin and few else factor._product()

    def to_combine(self) -> "Gram":
        """The sum of the products, since factors cannot be added."""
        return self._product() if self.thin else self

    def as_sum(self) -> "Symmetric":
        """The product itself, as its upper triangle."""
        return Symmetric(jax.tree.map(to_triangle, self._product().value), self.weighted)

    def _product(self) -> "Gram":
        return Gram(jax.tree.map(_gram, self.value), self.weighted)


@final
class Symmetric(Additive):
    """The weighted mean of symmetric matrices, `(d, d)`, sent as their upper triangles.

    The result has the type of `Gram`'s, so each client can send whichever is smaller. With
    `weighted=False` it is the plain sum.
    """

    value: PyTree  # vectors of d (d + 1) / 2 numbers, row by row
    weighted: bool = eqx.field(static=True, default=True)

    linear = summed = True

    @property
    def is_mean(self) -> bool:
        """Whether it is weighted."""
        return self.weighted

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted triangle, or zero from an absent client."""
        scale = weight if self.weighted else jnp.ones_like(weight)
        return jax.tree.map(lambda x: jnp.where(weight > 0, scaled_part(scale, x), 0), self)

    def over_clients(self) -> Gram:
        """The sum of the matrices."""
        return Gram(jax.tree.map(lambda x: from_triangle(_total(x)), self.value), self.weighted)


@final
class Max(Reduction):
    """The elementwise maximum over participating clients."""

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
        """The elementwise maximum of both."""
        return jax.tree.map(jnp.maximum, self, other)

    @staticmethod
    def over_devices(parts: list[Reduction], axis: str) -> list[Reduction]:
        """The maximum of the gathered values, since `lax.pmax` has no derivative."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis).max(0), parts)


@final
class Gather(Part):
    """All clients' parts along a new leading axis, with zeros from absent clients.

    The server sees each client's part, so secure aggregation is impossible. If the number of
    participants is fixed, only their parts are gathered.
    """

    value: PyTree

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The part, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), self)


def is_part(node: object) -> bool:
    """Whether this node of a message is a `Part`."""
    return isinstance(node, Part)


def wrapped(message: PyTree) -> PyTree[Part]:
    """The message with every bare array wrapped in `Mean`."""
    return jax.tree.map(lambda x: x if is_part(x) else Mean(x), message, is_leaf=is_part)


def plain(message: PyTree) -> PyTree:
    """The values in the message's structure, unwrapped."""
    return jax.tree.map(lambda x: x.value if is_part(x) else x, message, is_leaf=is_part)


def contributions(
    message: PyTree, weight: Float[Array, ""], client_id: Int[Array, ""] | None = None
) -> PyTree[Part]:
    """ONE client's share of the reduced message.

    Args:
        message: the client's message.
        weight: the client's weight; 0 if it is absent.
        client_id: the client's id, if a part may depend on it.
    """

    def one(part: Part) -> Part:
        if client_id is not None:
            part = returned(part, "of_client", part.of_client(client_id), type(part))
        return returned(part, "contribution", part.contribution(weight), type(part))

    return each(one, wrapped(message))


def is_linear(message: PyTree) -> bool:
    """Whether the reduced message is linear in what each client sends."""
    return all(part.linear for part in jax.tree.leaves(wrapped(message), is_leaf=is_part))


def is_summed(message: PyTree) -> bool:
    """Whether sums and means over all clients reduce the whole message."""
    return all(part.summed for part in jax.tree.leaves(wrapped(message), is_leaf=is_part))


def separated(parts: PyTree[Part]) -> tuple[PyTree[Reduction], PyTree[Part]]:
    """Split into reduced and gathered parts, each with None in place of the other."""
    return eqx.partition(parts, lambda x: isinstance(x, Reduction), is_leaf=is_part)


def joined(reduced: PyTree[Reduction], gathered: PyTree[Part]) -> PyTree[Part]:
    """Inverse of `separated`."""
    return eqx.combine(reduced, gathered, is_leaf=is_part)


def each(function: Callable[..., Part], *parts: PyTree[Part]) -> PyTree[Part]:
    """Apply a function to the parts at each position."""
    return jax.tree.map(function, *parts, is_leaf=is_part)


# --- check what reductions return while tracing; errors name the function ------------------------


def over_clients(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """Reduce contributions along the leading axis to partial results."""
    return each(lambda x: returned(x, "over_clients", x.over_clients(), Reduction), parts)


def neutral(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """The partial results of no clients, with the shapes of the given ones."""
    return each(lambda x: returned(x, "neutral", x.neutral(), x), parts)


def combined(total: PyTree[Reduction], part: PyTree[Reduction]) -> PyTree[Reduction]:
    """Combine two partial results, whose shapes do not depend on the number of clients."""

    def one(a: Reduction, b: Reduction) -> Reduction:
        returned(a, "over_clients", b, a, "{} from any number of clients")
        return returned(a, "combined", a.combined(b), a)

    return each(one, to_combine(total), to_combine(part))


def to_combine(parts: PyTree[Reduction]) -> PyTree[Reduction]:
    """Convert partial results to the form that can be combined."""
    return each(lambda x: returned(x, "to_combine", x.to_combine(), Reduction), parts)


def over_devices(parts: PyTree[Reduction], axis: str) -> PyTree[Reduction]:
    """Combine all devices' partial results, with one call for parts of one kind."""
    leaves, structure = jax.tree.flatten(to_combine(parts), is_leaf=is_part)
    for rule in dict.fromkeys(type(part).over_devices for part in leaves):
        places = [i for i, part in enumerate(leaves) if type(part).over_devices is rule]
        parts = [leaves[i] for i in places]
        results = rule(list(parts), axis)
        if not isinstance(results, list) or len(results) != len(parts):
            raise broken(parts[0], "over_devices", f"a list of {len(parts)}", results)
        for i, part, result in zip(places, parts, results, strict=True):
            leaves[i] = returned(part, "over_devices", result, part)
    return jax.tree.unflatten(structure, leaves)


def scaled_part(factor: Float[Array, ""], x: Array) -> Array:
    """A part times a number, in the part's precision; integers become floats."""
    return (factor.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else factor) * x


def _lowest(dtype: jnp.dtype) -> Array:
    """The lowest value of a type."""
    real = jnp.issubdtype(dtype, jnp.floating)
    return jnp.asarray(-jnp.inf if real else jnp.iinfo(dtype).min, dtype)


def _total(x: Shaped[Array, "m ..."]) -> Shaped[Array, "..."]:
    """The sum over clients."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.sum(0, dtype=None if x.dtype == bool else x.dtype)
    # On a CPU, XLA's sum over a leading axis is up to 14 times slower than this product.
    ones = jnp.ones(len(x), x.dtype)
    return jnp.tensordot(ones, x, 1, precision=jax.lax.Precision.HIGHEST)


def _side_by_side(factors: Float[Array, "m d k"]) -> Float[Array, "d columns"]:
    # The product of this wide matrix with its transpose is the sum of the clients' products.
    return jnp.moveaxis(factors, 0, 1).reshape(factors.shape[1], -1)


def _gram(wide: Float[Array, "d columns"]) -> Float[Array, "d d"]:
    return jnp.matmul(wide, wide.T, precision=jax.lax.Precision.HIGHEST)
