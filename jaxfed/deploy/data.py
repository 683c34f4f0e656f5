"""What machines tell one another of the data that stay on them: kinds and shapes."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Ragged, Samples
from jaxfed.core.common.checks import check_count, refuse
from jaxfed.core.contract.calls import alike
from jaxfed.deploy.exchange import RefusedError
from jaxfed.gcca.views import SparseView, View
from jaxfed.linalg import Moment

# Each with those of its fields that are no arrays.
_KINDS: dict[type, tuple[str, ...]] = {
    Samples: (),
    View: (),
    SparseView: ("shape",),
    Moment: (),
}
_NAMES = {kind.__name__: kind for kind in _KINDS}


def told(data: PyTree) -> dict[str, Any]:
    """One client's data, in words: their kind, and shapes and types of their arrays.

    Raises:
        ValueError: for data of another kind than `Clients` has constructors for.
    """
    if type(data) not in _KINDS:
        raise ValueError(
            f"make_data: wanted clients that hold {', '.join(_NAMES)}, got {type(data).__name__}"
        )
    plain = _KINDS[type(data)]
    arrays = {name: x for name, x in vars(data).items() if name not in plain}
    return {
        "kind": type(data).__name__,
        "fields": {name: list(getattr(data, name)) for name in plain},
        "arrays": {
            name: None if x is None else [list(x.shape), np.dtype(x.dtype).name]
            for name, x in arrays.items()
        },
    }


def shaped(words: Mapping[str, Any]) -> PyTree:
    """What `told` tells of, as `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: for what it never tells.
    """
    try:
        kind = _NAMES[words["kind"]]
        found = object.__new__(kind)
        for name, value in words["arrays"].items():
            array = value and jax.ShapeDtypeStruct(_lengths(value[0]), jnp.dtype(value[1]))
            object.__setattr__(found, name, array)
        for name, value in words["fields"].items():
            object.__setattr__(found, name, _lengths(value))
        complete = vars(found).keys() == {field.name for field in fields(kind)}
        if not complete or told(found) != words:
            raise ValueError
        if isinstance(found, Ragged):
            _filled(found, found.lengths)  # which needs all axes
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise refuse("data", "the kind and the shapes of a client's data", words) from error
    return found


def _lengths(given: Sequence[int]) -> tuple[int, ...]:
    for length in given:
        check_count("length", length, least=0)
    return tuple(given)


def sketched(
    words: Mapping[str, Any], ids: Int[Array, " clients"], weights: Float[Array, " clients"],
    counts: Sequence[int | None],
) -> Clients:  # fmt: skip
    """Clients of whose data only shapes are known, and numbers of samples, if they are told."""
    data = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(counts), *x.shape), x.dtype), shaped(words)
    )
    if isinstance(data, Samples) and None not in counts:
        data = Samples(data.values, np.asarray(counts, data.count.dtype))  # pyright: ignore
    return Clients(data, ids, weights)


def common(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The words of data that are padded to the longest client's.

    Raises:
        RefusedError: naming the first client whose data do not go with the others'.
    """
    shapes = {client: shaped(words) for client, words in by_client.items()}
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
    return told(whole)


def _filled(data: PyTree, lengths: tuple[int, ...]) -> PyTree:
    if not isinstance(data, Ragged):
        return data
    return jax.eval_shape(lambda data: _one_filled(data, lengths), data)


def _one_filled(data: Ragged, lengths: tuple[int, ...]) -> PyTree:
    everybody = jax.tree.map(lambda x: x[None], data)
    return jax.tree.map(lambda x: x[0], everybody.filled(lengths))


def _shown(words: Mapping[str, Any]) -> str:
    arrays = [f"{name} {kind}{shape}" for name, (shape, kind) in
              ((n, v) for n, v in words["arrays"].items() if v)]  # fmt: skip
    return f"{words['kind']}({', '.join(arrays)})"


def check_pads(data: PyTree, words: Mapping[str, Any]) -> None:
    """Check that one client's data can be padded to these shapes.

    Raises:
        ValueError: if they cannot; the message has both shapes.
    """
    lengths = getattr(shaped(words), "lengths", ())
    own = getattr(data, "lengths", ())
    shorter = len(own) == len(lengths) and all(map(operator.le, own, lengths))
    if not shorter or told(_filled(data, lengths)) != words:
        raise ValueError(
            f"data: wanted shapes that {_shown(told(data))} can be padded to, got {_shown(words)}"
        )


def padded(data: PyTree, words: Mapping[str, Any]) -> PyTree:
    """One client's data, with zeros up to the longest client's."""
    return _one_filled(data, shaped(words).lengths) if isinstance(data, Ragged) else data
