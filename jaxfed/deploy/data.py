"""What machines tell one another of the data that stay on them: kinds and shapes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.clients import Samples
from jaxfed.deploy.exchange import RefusedError
from jaxfed.gcca.views import SparseView, View
from jaxfed.linalg import Moment


class _Kind(NamedTuple):
    """How one kind of data is told about."""

    ragged: tuple[int | None, ...]  # for each array the axis that is padded up to the longest
    fields: tuple[str, ...] = ()  # that are no arrays


_KINDS: dict[type, _Kind] = {
    Samples: _Kind((0, None)),
    View: _Kind((1, None)),
    SparseView: _Kind((0, 0, 0, 0, None), ("shape",)),
    Moment: _Kind((None,) * 4),
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
    kind = _KINDS[type(data)]
    arrays = {name: x for name, x in vars(data).items() if name not in kind.fields}
    return {
        "kind": type(data).__name__,
        "fields": {name: getattr(data, name) for name in kind.fields},
        "arrays": {
            name: None if x is None else [list(x.shape), np.dtype(x.dtype).name]
            for name, x in arrays.items()
        },
    }


def shaped(words: Mapping[str, Any]) -> PyTree:
    """What `told` tells of, as `jax.ShapeDtypeStruct`."""
    kind = _NAMES[words["kind"]]
    found = object.__new__(kind)
    for name, value in words["arrays"].items():
        array = value and jax.ShapeDtypeStruct(tuple(value[0]), jnp.dtype(value[1]))
        object.__setattr__(found, name, array)
    for name, value in words["fields"].items():
        object.__setattr__(found, name, tuple(value) if isinstance(value, list) else value)
    return found


def common(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The words of data that are padded to the longest client's.

    Raises:
        RefusedError: naming the first client whose data do not go with the others'.
    """
    first, words = next(iter(by_client.items()))
    whole = {**words, "arrays": {k: v and [list(v[0]), v[1]] for k, v in words["arrays"].items()}}
    ragged = _KINDS[_NAMES[words["kind"]]].ragged
    for client, said in by_client.items():
        if not _fits(said, whole, ragged):
            raise RefusedError(
                f"data: wanted at client {client} what goes with client {first}'s, "
                f"{_shown(words)}, got {_shown(said)}"
            )
        for (shape, _), (own, _), axis in _pairs(whole, said, ragged):
            if axis is not None:
                shape[axis] = max(shape[axis], own[axis])
    return whole


def _fits(said: Mapping[str, Any], whole: Mapping[str, Any], ragged: Sequence[int | None]) -> bool:
    if (said["kind"], said["fields"]) != (whole["kind"], whole["fields"]):
        return False
    if [x is None for x in said["arrays"].values()] != [
        x is None for x in whole["arrays"].values()
    ]:
        return False
    return all(
        a[1] == b[1] and len(a[0]) == len(b[0])
        and all(x == y or k == axis for k, (x, y) in enumerate(zip(a[0], b[0], strict=True)))
        for a, b, axis in _pairs(whole, said, ragged)
    )  # fmt: skip


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any], ragged: Sequence[int | None]):
    both = zip(one["arrays"].values(), other["arrays"].values(), ragged, strict=True)
    return [(a, b, axis) for a, b, axis in both if a is not None]


def _shown(words: Mapping[str, Any]) -> str:
    arrays = [f"{name} {kind}{shape}" for name, (shape, kind) in
              ((n, v) for n, v in words["arrays"].items() if v)]  # fmt: skip
    return f"{words['kind']}({', '.join(arrays)})"


def padded(data: PyTree, words: Mapping[str, Any]) -> PyTree:
    """One client's data, with zeros up to the longest client's."""

    def one(leaf, like):
        missing = [(0, b - a) for a, b in zip(leaf.shape, like.shape, strict=True)]
        return jnp.pad(leaf, missing) if any(more for _, more in missing) else leaf

    return jax.tree.map(one, data, shaped(words))
