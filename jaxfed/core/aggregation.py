"""How a server sees its clients' messages: as a mean, a sum, a maximum or a stack of them."""

import abc
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

Reduction = Literal["sum", "max", "stack"]


def _same(array: Array) -> Array:
    return array


class Aggregation(eqx.Module):
    """What is done to every message before the reduction over clients, and which reduction it is.

    `lift` maps each array of a decoded message on the server before it is reduced, so that,
    say, clients send thin factors and the server holds the mean of their products.
    """

    reduction: eqx.AbstractVar[Reduction]

    @abc.abstractmethod
    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """One client's part of the aggregate; `weight` is its share, 0 for an absent client."""


class Mean(Aggregation):
    """The weighted mean; weights are the clients' own and sum to one."""

    lift: Callable[[Array], Array] = eqx.field(static=True, default=_same)
    reduction: Reduction = eqx.field(static=True, default="sum", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The weighted, lifted message."""
        lifted = jax.tree.map(self.lift, message)
        return jax.tree.map(lambda x: weight.astype(x.dtype) * x, lifted)


class Sum(Aggregation):
    """The plain sum over the clients that take part, whatever their weights."""

    lift: Callable[[Array], Array] = eqx.field(static=True, default=_same)
    reduction: Reduction = eqx.field(static=True, default="sum", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The lifted message, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, self.lift(x), 0), message)


class Max(Aggregation):
    """The elementwise maximum over the clients that take part."""

    reduction: Reduction = eqx.field(static=True, default="max", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The message, or minus infinity from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, -jnp.inf), message)


class Stack(Aggregation):
    """All messages, one beside the other: for one-shot starts only.

    It gives the server every single message, so it cannot be had under secure aggregation.
    """

    reduction: Reduction = eqx.field(static=True, default="stack", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The message, zeroed where the client is absent."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), message)


def outer(factor: Array) -> Array:
    """Lift of a thin factor `(d, k)` to its product `F Fᵀ`, `(d, d)`."""
    return factor @ factor.T


def split(aggregation: PyTree[Aggregation], message: PyTree, weight: Array) -> dict[str, PyTree]:
    """One client's contributions, one entry a reduction; the other reductions' places are None."""
    leaves, structure = jax.tree.flatten(aggregation, is_leaf=_is_aggregation)
    parts = structure.flatten_up_to(message)
    return {
        kind: [
            rule.contribution(part, weight) if rule.reduction == kind else None
            for rule, part in zip(leaves, parts, strict=True)
        ]
        for kind in ("sum", "max", "stack")
    }


def join(aggregation: PyTree[Aggregation], parts: dict[str, PyTree]) -> PyTree:
    """The aggregate, put back into the message's structure; inverse of `split`."""
    leaves, structure = jax.tree.flatten(aggregation, is_leaf=_is_aggregation)
    chosen = [parts[rule.reduction][position] for position, rule in enumerate(leaves)]
    return jax.tree.unflatten(structure, chosen)


def _is_aggregation(node: object) -> bool:
    return isinstance(node, Aggregation)
