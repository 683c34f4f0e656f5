"""An algorithm's functions, held to the contract where they are traced.

Each is traced once for all programs of a process that call it on the same shapes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxfed.core.common.returned import alike as alike
from jaxfed.core.common.returned import check_alike, check_arrays, described
from jaxfed.core.common.returned import is_number as is_number
from jaxfed.core.contract.algorithm import Algorithm, Diagnostics

# What a run's history has of itself.
RESERVED = ("participants", "bits_up", "bits_down")


def arrays_of(algorithm: Algorithm, function: str, value: Any) -> PyTree:
    """What one of its functions returned, as arrays.

    Raises:
        ValueError: for a tree of anything else; the message names the function.
    """
    check_arrays(_wanted(algorithm, function), value)
    return jax.tree.map(jnp.asarray, value)


@jax.jit
def first_message(algorithm: Algorithm, key: Key[Array, ""], data: PyTree, start: PyTree) -> PyTree:
    """One client's message before the rounds.

    Raises:
        ValueError: for a tree of anything but arrays.
    """
    return arrays_of(algorithm, "first_message", algorithm.first_message(key, data, start))


@jax.jit
def client_init(
    algorithm: Algorithm, key: Key[Array, ""], downlink: PyTree, data: PyTree, start: PyTree
) -> PyTree:
    """One client's first state.

    Raises:
        ValueError: for a tree of anything but arrays.
    """
    return arrays_of(algorithm, "client_init", algorithm.client_init(key, downlink, data, start))


@jax.jit
def client_step(
    algorithm: Algorithm, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
) -> tuple[PyTree, PyTree, Diagnostics]:
    """One client's step.

    Raises:
        ValueError: for a wrong number of results, no objective, diagnostics that are no scalars by
            name, or a state of other shapes or types.
    """
    name = "client_step"
    result = algorithm.client_step(key, downlink, local, data)
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            f"{_wanted(algorithm, name)} (uplink, local, diagnostics), got {described(result)}"
        )
    uplink, after = (arrays_of(algorithm, name, part) for part in result[:2])
    diagnostics = _diagnostics(algorithm, name, result[2])
    if "objective" not in diagnostics or diagnostics["objective"].ndim:
        raise ValueError(
            f"{_wanted(algorithm, name)} a scalar 'objective' among the diagnostics, got "
            f"{described(diagnostics)}"
        )
    check_alike(f"{_wanted(algorithm, name)} a state like that of client_init,", local, after)
    return uplink, after, diagnostics


@jax.jit
def server_step(
    algorithm: Algorithm, key: Key[Array, ""], server: PyTree, uplink: PyTree
) -> tuple[PyTree, Diagnostics]:
    """The server's step.

    Raises:
        ValueError: for a wrong number of results, diagnostics that are not by name, or a state of
            other shapes or types.
    """
    name = "server_step"
    result = algorithm.server_step(key, server, uplink)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{_wanted(algorithm, name)} (server, diagnostics), got {described(result)}"
        )
    after = arrays_of(algorithm, name, result[0])
    check_alike(f"{_wanted(algorithm, name)} a state like that of server_init,", server, after)
    return after, _diagnostics(algorithm, name, result[1])


@jax.jit
def client_result(algorithm: Algorithm, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
    """What one client has in the end."""
    return algorithm.client_result(downlink, local, data)


def _diagnostics(algorithm: Algorithm, name: str, given: Any) -> dict[str, Array]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{_wanted(algorithm, name)} diagnostics by name, got {described(given)}")
    for taken in RESERVED:
        if taken in given:
            raise ValueError(
                f"{_wanted(algorithm, name)} diagnostics with names of their own, got {taken!r}, "
                "which the run's history has of itself"
            )
    return arrays_of(algorithm, name, dict(given))


def _wanted(algorithm: Algorithm, function: str) -> str:
    return f"algorithm: wanted of {type(algorithm).__name__}.{function}"
