"""Describes the shapes of clients' data in messages, since the data stay with the clients."""

import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxfed._checks import check_count, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import Texts, check_same_names, checked_names
from jaxfed.core.clients.samples import IncompleteSamples, Ragged, SampleRows, Samples
from jaxfed.core.common.printing import in_bytes
from jaxfed.core.contract.calls import alike
from jaxfed.deploy.exchange import RefusedError
from jaxfed.gcca.views import SparseView, View
from jaxfed.linalg import Moment

# This machine's memory in bytes; unknown on Windows.
MEMORY = (
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
)
KINDS = {kind.__name__: kind for kind in (Samples, IncompleteSamples, View, SparseView, Moment)}


def describe(data: PyTree) -> dict[str, Any]:
    """Describe one client's data: their kind, and shapes and types of their arrays.

    Raises:
        ValueError: if `Clients` has no constructor for this kind of data.
    """
    kind = type(data).__name__
    if KINDS.get(kind) is not type(data):
        raise ValueError(f"make_data: wanted clients that hold {', '.join(KINDS)}, got {kind}")
    static = [field.name for field in fields(data) if field.metadata.get("static")]
    arrays = {name: x for name, x in vars(data).items() if name not in static}
    return {
        "kind": kind,
        "fields": {name: list(getattr(data, name)) for name in static},
        "arrays": {
            name: None if x is None else [list(x.shape), np.dtype(x.dtype).name]
            for name, x in arrays.items()
        },
    }


def shapes_from(words: Mapping[str, Any]) -> PyTree:
    """Inverse of `describe`, with `jax.ShapeDtypeStruct` in place of arrays.

    Raises:
        ValueError: if `describe` cannot have produced the description.
    """
    try:
        kind = KINDS[words["kind"]]
        found = object.__new__(kind)  # constructors require arrays
        for name, value in words["arrays"].items():
            array = value and jax.ShapeDtypeStruct(_lengths(value[0]), jnp.dtype(value[1]))
            object.__setattr__(found, name, array)
        for name, value in words["fields"].items():
            object.__setattr__(found, name, _lengths(value))
        complete = vars(found).keys() == {field.name for field in fields(kind)}
        # Refuse anything that `describe` would describe differently.
        if not complete or describe(found) != words:
            raise ValueError
        if isinstance(found, Ragged):
            _filled(found, found.lengths)  # fails where an axis is missing
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise refuse("data", "the kind and the shapes of a client's data", words) from error
    return found


def _lengths(given: Sequence[int]) -> tuple[int, ...]:
    for length in given:
        check_count("length", length, least=0)
    return tuple(given)


def number_of_samples(data: PyTree) -> int | None:
    """One client's number of samples, if its data are samples."""
    return int(data.count) if isinstance(data, SampleRows) else None


def clients_from(
    words: Mapping[str, Any],
    ids: Int[Array, " clients"],
    weights: Float[Array, " clients"],
    counts: Sequence[int | None],
) -> Clients:
    """Clients with shapes in place of data, and their numbers of samples if known."""
    data = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(counts), *x.shape), x.dtype), shapes_from(words)
    )
    if isinstance(data, SampleRows) and None not in counts:
        known = np.asarray(counts, data.count.dtype)
        # Checks of algorithms may look at the numbers of samples, as in `fit`; everything else is a
        # shape.
        data = eqx.tree_at(lambda samples: samples.count, data, known)
    return Clients(data, ids, weights)


def common(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Describe data that are padded to the longest client's.

    Raises:
        RefusedError: names the first client whose data do not match the others'.
    """
    shapes = {client: shapes_from(words) for client, words in by_client.items()}
    lengths = [data.lengths for data in shapes.values() if isinstance(data, Ragged)]
    longest = tuple(map(max, zip(*lengths, strict=False)))
    first, one = next(iter(shapes.items()))
    whole = _filled(one, longest)
    for client, data in shapes.items():
        if type(data) is not type(one) or not alike(_filled(data, longest), whole):
            raise RefusedError(
                f"data: wanted at client {client} what goes with client {first}'s, "
                f"{_shown(by_client[first])}, got {_shown(by_client[client])}"
            )
    return describe(whole)


def features_with(known: Texts | None, hello: Mapping[str, Any]) -> Texts | None:
    """The names of a run's features, once one more client has said its own.

    Args:
        known: the names that earlier clients have given; None if they gave none.
        hello: the client's description of itself.

    Raises:
        RefusedError: if its features are others, or in another order; names it.
        ValueError: if they are no names of its data's features.
    """
    width = jax.tree.leaves(shapes_from(hello["data"]))[0].shape[-1]
    own = checked_names("features", hello["features"], width, "feature")
    try:
        check_same_names(f"features of client {hello['id']}", known, own)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    return known if own is None else own


def check_pads(data: PyTree, words: Mapping[str, Any]) -> None:
    """Check that one client's data can be padded to these shapes.

    Raises:
        ValueError: if they cannot; the message has both shapes.
    """
    lengths = getattr(shapes_from(words), "lengths", ())
    own = getattr(data, "lengths", ())
    shorter = len(own) == len(lengths) and all(map(operator.le, own, lengths))
    if not shorter or describe(_filled(data, lengths)) != words:
        raise ValueError(
            f"data: wanted shapes that {_shown(describe(data))} can be padded to, got "
            f"{_shown(words)}"
        )


def check_fits(data: PyTree, words: Mapping[str, Any], others: Sequence[Any], size: int) -> None:
    """Check the shapes that the server announces before allocating memory.

    Args:
        data: one client's data.
        words: the description of the run's data.
        others: the client's other arrays, of which every client of the run may have one.
        size: number of clients.

    Raises:
        ValueError: if the data cannot be padded to the run's, or the arrays exceed this machine's
            memory.
    """
    check_pads(data, words)
    parts = [(size, x) for x in (np.int32(0), *others)]
    parts += [(1, x) for x in jax.tree.leaves(shapes_from(words))]
    needed = sum(number * x.size * x.dtype.itemsize for number, x in parts)
    if needed > MEMORY:
        raise ValueError(
            f"run: wanted data and clients of at most {in_bytes(MEMORY)}, which this machine has, "
            f"got {in_bytes(needed)}"
        )


def pad(data: PyTree, lengths: tuple[int, ...]) -> PyTree:
    """One client's data, padded with zeros to these lengths."""
    if not isinstance(data, Ragged):
        return data
    # `filled` expects all clients' data, with an axis of clients.
    everybody = jax.tree.map(lambda x: x[None], data)
    return jax.tree.map(lambda x: x[0], everybody.filled(lengths))


def _filled(data: PyTree, lengths: tuple[int, ...]) -> PyTree:
    return jax.eval_shape(lambda data: pad(data, lengths), data)


def _shown(words: Mapping[str, Any]) -> str:
    arrays = {name: value for name, value in words["arrays"].items() if value}
    shapes = (f"{name} {dtype}{shape}" for name, (shape, dtype) in arrays.items())
    return f"{words['kind']}({', '.join(shapes)})"
