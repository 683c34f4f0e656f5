"""How a server sees its clients' messages: a mean, sum, maximum, stack or products' mean."""

import abc
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

Reduction = Literal["sum", "max", "stack", "gram"]


class Aggregation(eqx.Module):
    """What is done to every message before the reduction over clients, and which reduction."""

    reduction: eqx.AbstractVar[Reduction]

    @abc.abstractmethod
    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """One client's part of the aggregate; `weight` is its share, 0 for an absent client."""


class Mean(Aggregation):
    """The weighted mean; weights are the clients' own and sum to one."""

    reduction: Reduction = eqx.field(static=True, default="sum", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The weighted message, or zero from an absent client, whatever it made."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, weight.astype(x.dtype) * x, 0), message)


class Sum(Aggregation):
    """The plain sum over the clients that take part, whatever their weights."""

    reduction: Reduction = eqx.field(static=True, default="sum", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The message, or zero from an absent client."""
        return jax.tree.map(lambda x: jnp.where(weight > 0, x, 0), message)


class Added(Aggregation):
    """The sum of what already are clients' parts of the aggregate, zeros from who is absent."""

    reduction: Reduction = eqx.field(static=True, default="sum", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The message as it is."""
        del weight
        return message


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


class Gram(Aggregation):
    """The weighted mean of the products `F Fᵀ`, `(d, d)`, of thin factors `F`, `(d, k)`.

    Clients send the factors; no client's product is ever formed, only their mean.
    """

    weighted: bool = eqx.field(static=True, default=True)  # False: the plain sum
    reduction: Reduction = eqx.field(static=True, default="gram", init=False)

    def contribution(self, message: PyTree, weight: Array) -> PyTree:
        """The factor, scaled by the root of its weight."""
        present = weight > 0
        scale = jnp.sqrt(jnp.where(present, weight, 1)) if self.weighted else jnp.ones_like(weight)
        return jax.tree.map(lambda x: jnp.where(present, scale.astype(x.dtype) * x, 0), message)


def split(aggregation: PyTree[Aggregation], message: PyTree, weight: Array) -> dict[str, PyTree]:
    """One client's contributions, one entry a reduction; the other reductions' places are None."""
    leaves, structure = jax.tree.flatten(aggregation, is_leaf=is_aggregation)
    parts = structure.flatten_up_to(message)
    return {
        kind: [
            rule.contribution(part, weight) if rule.reduction == kind else None
            for rule, part in zip(leaves, parts, strict=True)
        ]
        for kind in get_args(Reduction)
    }


def join(aggregation: PyTree[Aggregation], parts: dict[str, PyTree]) -> PyTree:
    """The aggregate, put back into the message's structure; inverse of `split`."""
    leaves, structure = jax.tree.flatten(aggregation, is_leaf=is_aggregation)
    chosen = [parts[rule.reduction][position] for position, rule in enumerate(leaves)]
    return jax.tree.unflatten(structure, chosen)


def is_linear(rules: PyTree[Aggregation]) -> bool:
    """Whether all of a message is aggregated by sums and means."""
    leaves = jax.tree.leaves(rules, is_leaf=is_aggregation)
    return all(isinstance(rule, Mean | Sum) for rule in leaves)


def is_aggregation(node: object) -> bool:
    """Whether this is a leaf of a tree of aggregations."""
    return isinstance(node, Aggregation)
