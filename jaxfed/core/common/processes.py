"""Runs that are spread over several JAX processes: what these tell each other.

Every process runs the same program and holds its own clients' data alone. A decision that one of
them takes by itself leaves the others waiting, so that whatever may differ between them (their
clients' sizes, an error in one of them, what is found on a disk) is exchanged first, as a few
numbers and words.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from jaxfed.core.common.files import reason

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessError(ConnectionError):
    """Another process of the run has ended, or cannot be reached."""


def exchanged(value: Any) -> list[Any]:
    """What every process has at this place, in the order of the processes.

    Args:
        value: what `json` can write; small.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([text.size], np.int32)))
    filled = np.pad(text, (0, int(sizes.max()) - text.size))
    texts = np.asarray(multihost_utils.process_allgather(filled))
    return [
        json.loads(one[:size].tobytes()) for one, size in zip(texts, sizes.ravel(), strict=True)
    ]


def attempted(name: str, attempt: Callable[[], Any]) -> list[Any]:
    """What an attempt gave in every process; an error in one of them is an error in all.

    Args:
        name: the argument that the attempt is about.
        attempt: its result is what `json` can write.

    Raises:
        ValueError: what the attempt raised here, or that it raised something elsewhere.
        OSError: what it raised here.
    """
    found, wrong = None, None
    try:
        found = attempt()
    except (ValueError, OSError) as error:
        wrong = error
    everywhere = exchanged({"found": found, "wrong": None if wrong is None else str(wrong)})
    if wrong is not None:
        raise wrong
    for place, each in enumerate(everywhere):
        if each["wrong"] is not None:
            raise ValueError(f"{name}: refused in process {place}: {each['wrong']}")
    return [each["found"] for each in everywhere]


def is_traced() -> bool:
    """Whether something is being compiled, within which processes cannot tell each other things."""
    return isinstance(jnp.zeros(()), Tracer)


def spans(tree: PyTree) -> bool:
    """Whether an array of the tree lies in several processes."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return any(not isinstance(x, Tracer) and not x.is_fully_addressable for x in arrays)


def is_here(array: jax.Array) -> bool:
    """Whether this process has all values of an array."""
    return array.is_fully_addressable or array.is_fully_replicated


def inspectable(array: Any) -> Any:
    """An array whose values are to be looked at before a run, by its methods."""
    # On the host, where that has them: within a traced function JAX would trace this too.
    return array if spans(array) and not is_here(array) else np.asarray(array)


def finite(array: Any) -> bool:
    """Whether all numbers of an array are."""
    seen = inspectable(array)
    return bool((np if isinstance(seen, np.ndarray) else jnp).isfinite(seen).all())


def on_host(array: Array | np.ndarray) -> np.ndarray:
    """An array's values; for those that are spread over processes all of these ask."""
    if isinstance(array, jax.Array) and not is_here(array):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def watched(function: Function) -> Function:
    """The function, which says what has happened where another process has gone.

    Raises:
        ProcessError: in place of what a broken operation between processes raises.
    """

    @functools.wraps(function)
    def reporting(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if jax.process_count() == 1 or not _is_loss(error):
                raise
            raise ProcessError(
                f"process {jax.process_index()} of {jax.process_count()} cannot reach the others, "
                "at least one of which has ended; what was saved stays: start all of them again, "
                f"in the same way, to go on from there ({reason(error)})"
            ) from error

    return cast(Function, reporting)


def _is_loss(error: Exception) -> bool:
    """Whether an error is what JAX raises where a process no longer answers."""
    words = ("gloo", "nccl", "connection", "heartbeat", "coordination", "barrier")
    return any(word in str(error).lower() for word in words)
