"""Communication between the JAX processes of a run.

Every process runs the same program and holds only its own clients' data. If a process decides
something alone, the others wait forever. Everything that may differ between processes (their
clients' sizes, an error, the files on a disk) is therefore exchanged first, as a few numbers and
words.
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
    """Exchange a value; return every process's, in the order of the processes.

    Args:
        value: a small value that `json` can write.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # All processes must gather arrays of one shape, so they agree on the longest text first.
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([text.size], np.int32)))
    filled = np.pad(text, (0, int(sizes.max()) - text.size))
    texts = np.asarray(multihost_utils.process_allgather(filled))
    return [
        json.loads(one[:size].tobytes()) for one, size in zip(texts, sizes.ravel(), strict=True)
    ]


def attempted(name: str, attempt: Callable[[], Any]) -> list[Any]:
    """The results of an attempt in every process; an error in one of them is an error in all.

    Args:
        name: the argument that the attempt is about.
        attempt: returns a value that `json` can write.

    Raises:
        ValueError: if the attempt raised one here, or any error elsewhere.
        OSError: if the attempt raised one here.
    """
    found, wrong = None, None
    try:
        found = attempt()
    except (ValueError, OSError) as error:
        wrong = error
    # Exchange before raising: a process that raised at once would leave the others waiting here.
    everywhere = exchanged({"found": found, "wrong": None if wrong is None else str(wrong)})
    if wrong is not None:
        raise wrong
    for place, each in enumerate(everywhere):
        if each["wrong"] is not None:
            raise ValueError(f"{name}: refused in process {place}: {each['wrong']}")
    return [each["found"] for each in everywhere]


def spans(tree: PyTree) -> bool:
    """Whether an array of the tree spans several processes."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return any(not isinstance(x, Tracer) and not x.is_fully_addressable for x in arrays)


def is_here(array: jax.Array) -> bool:
    """Whether this process has all values of an array."""
    return array.is_fully_addressable or array.is_fully_replicated


def inspectable(array: Any) -> Any:
    """An array whose values the caller can inspect before a run, with methods of its own."""
    # On the host if it has the values: within a traced function, JAX would trace the inspection.
    return array if spans(array) and not is_here(array) else np.asarray(array)


def finite(array: Any) -> bool:
    """Whether all numbers of an array are finite."""
    seen = inspectable(array)
    return bool((np if isinstance(seen, np.ndarray) else jnp).isfinite(seen).all())


def on_host(array: Array | np.ndarray) -> np.ndarray:
    """An array's values; if they span processes, all of them must call this."""
    if isinstance(array, jax.Array) and not is_here(array):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def watched(function: Function) -> Function:
    """Wrap a function to raise a clear error if another process has ended.

    Raises:
        ProcessError: in place of JAX's error for a broken connection.
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
                "at least one of which has ended; start all of them again, in the same way, to "
                f"resume from what was saved ({reason(error)})"
            ) from error

    return cast(Function, reporting)


def _is_loss(error: Exception) -> bool:
    """Whether JAX raised this error because a process no longer answers."""
    # JAX has no exception of its own for this. The words depend on what notices the loss first, the
    # collective library or the coordination service.
    words = ("gloo", "nccl", "connection", "heartbeat", "coordination", "barrier")
    return any(word in str(error).lower() for word in words)
