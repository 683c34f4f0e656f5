"""Calls an algorithm's functions and checks their results against the contract.

Each function is traced once per process for given shapes, whichever programs call it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxfed.core.common.returned import alike as alike
from jaxfed.core.common.returned import broken, returned
from jaxfed.core.common.returned import is_number as is_number
from jaxfed.core.contract.algorithm import Algorithm, Diagnostics
from jaxfed.core.contract.participation import Participation
from jaxfed.core.contract.remarks import MEASURES

# History entries that the run itself writes.
RESERVED = ("participants", "bits_up", "bits_down")


def checked_result(algorithm: Algorithm, function: str, value: Any) -> PyTree:
    """The result of one of the algorithm's functions, as arrays.

    Raises:
        ValueError: if the result is not a tree of arrays; the message names the function.
    """
    returned(algorithm, function, value, argument="algorithm")
    return jax.tree.map(jnp.asarray, value)


@jax.jit
def first_message(
    algorithm: Algorithm, key: Key[Array, ""], data: PyTree, warm_start: PyTree
) -> PyTree:
    """One client's message before the rounds.

    Raises:
        ValueError: if it is not a tree of arrays.
    """
    return checked_result(
        algorithm, "first_message", algorithm.first_message(key, data, warm_start)
    )


@jax.jit
def client_init(
    algorithm: Algorithm, key: Key[Array, ""], downlink: PyTree, data: PyTree, warm_start: PyTree
) -> PyTree:
    """One client's initial state.

    Raises:
        ValueError: if it is not a tree of arrays.
    """
    return checked_result(
        algorithm, "client_init", algorithm.client_init(key, downlink, data, warm_start)
    )


@jax.jit
def client_step(
    algorithm: Algorithm, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
) -> tuple[PyTree, PyTree, Diagnostics]:
    """One client's step.

    Raises:
        ValueError: if the number of results is wrong, the objective is missing, diagnostics are not
            named scalars, or the state changes its shapes or types.
    """
    name = "client_step"
    result = algorithm.client_step(key, downlink, local, data)
    _check_results(algorithm, name, ("uplink", "local", "diagnostics"), local, result)
    uplink, after = (checked_result(algorithm, name, part) for part in result[:2])
    diagnostics = _diagnostics(algorithm, name, result[2])
    if "objective" not in diagnostics or diagnostics["objective"].ndim:
        raise _wrong(algorithm, name, "a scalar 'objective' among the diagnostics", diagnostics)
    returned(algorithm, name, after, local, "a state like that of client_init, {}", "algorithm")
    return uplink, after, diagnostics


@jax.jit
def server_step(
    algorithm: Algorithm, key: Key[Array, ""], server: PyTree, uplink: PyTree
) -> tuple[PyTree, Mapping[str, Array]]:
    """The server's step. Message recorders add arrays to its diagnostics.

    Raises:
        ValueError: if the number of results is wrong, diagnostics have no names, or the state
            changes its shapes or types.
    """
    name = "server_step"
    result = algorithm.server_step(key, server, uplink)
    _check_results(algorithm, name, ("server", "diagnostics"), server, result)
    after = checked_result(algorithm, name, result[0])
    returned(algorithm, name, after, server, "a state like that of server_init, {}", "algorithm")
    return after, _diagnostics(algorithm, name, result[1])


@jax.jit
def client_result(algorithm: Algorithm, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
    """One client's model after the last round."""
    return algorithm.client_result(downlink, local, data)


def check_inclusion(participation: Participation, clients: int, factors: Any) -> None:
    """Check what a participation's `inclusion` returned.

    Raises:
        ValueError: if it is not a floating-point number for each client.
    """
    array = is_number(factors) and jnp.issubdtype(jnp.result_type(factors), jnp.floating)
    if not array or jnp.shape(factors) != (clients,):
        wanted = f"a floating-point array of {(clients,)}"
        raise broken(participation, "inclusion", wanted, factors, "participation")


def _check_results(
    algorithm: Algorithm, function: str, names: tuple[str, ...], state: PyTree, result: Any
) -> None:
    """Check that a function returned a tuple with these parts.

    A state returned alone may itself be a tuple of that length; it is refused as a whole, since
    blaming its fields would mislead.
    """
    alone = jax.tree.structure(result) == jax.tree.structure(state)
    if not isinstance(result, tuple) or len(result) != len(names) or alone:
        raise _wrong(algorithm, function, f"({', '.join(names)})", result)


def _diagnostics(algorithm: Algorithm, function: str, given: Any) -> dict[str, Array]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise _wrong(algorithm, function, "diagnostics by name", given)
    if taken := [name for name in RESERVED if name in given]:
        wanted = f"diagnostics with other names than the history's own {', '.join(RESERVED)}"
        raise _wrong(algorithm, function, wanted, taken)
    found = checked_result(algorithm, function, dict(given))
    # Squares may overflow, and then even a derivative times zero is NaN.
    measures = {name: jax.lax.stop_gradient(found[name]) for name in MEASURES if name in found}
    return found | measures


def _wrong(algorithm: Algorithm, function: str, wanted: str, given: Any) -> ValueError:
    return broken(algorithm, function, wanted, given, "algorithm")
