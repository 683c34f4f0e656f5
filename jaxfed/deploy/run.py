"""The parts of a run that the server and the clients must agree on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jaxfed import backend, participation
from jaxfed._checks import check_count, checked_key, refuse
from jaxfed._versions import versions
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.compiling import compiler_options
from jaxfed.core.run.runner import Programs, programs
from jaxfed.core.store.identity import Identity, digest_of, text_and_digest
from jaxfed.core.wire.masks import without_masks
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy.data import shapes_from

WEIGHTS = "weights"  # among the names of `description`


class Run(NamedTuple):
    """What the server tells clients about a run in each of its questions."""

    name: str
    rounds: int
    size: int  # number of clients
    like: dict[str, Any]  # of one client's data, padded to the longest; see `data.describe`
    key: Key[Array, ""]

    @property
    def words(self) -> dict[str, Any]:
        """The run in a form that JSON can write."""
        data = np.asarray(jax.random.key_data(self.key)).tolist()
        return self._asdict() | {"key": {"data": data, "impl": str(jax.random.key_impl(self.key))}}

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Self:
        """Inverse of `words`.

        Raises:
            ValueError: if the words are invalid, in particular a name that could be a path.
        """
        try:
            data = jnp.asarray(words["key"]["data"], jnp.uint32)
            key = jax.random.wrap_key_data(data, impl=words["key"]["impl"])
            run = cls(**{**words, "key": key})
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise refuse("run", "the words of a run", words) from error
        check_file_name("run", run.name)
        check_count("rounds", run.rounds)
        check_count("size", run.size)
        checked_key("key", run.key)
        shapes_from(run.like)
        return run


def check_file_name(argument: str, given: object) -> None:
    """Check a name from another machine that becomes the name of a file.

    Raises:
        ValueError: if it is not 1 to 64 hexadecimal digits.
    """
    if not isinstance(given, str) or not re.fullmatch("[0-9a-f]{1,64}", given):
        raise refuse(argument, "1 to 64 hexadecimal digits", given)


def problem_of_run(algorithm: Algorithm, wire: Wire, run: Run, dtype: Any) -> Problem:
    """The run as the server knows it: without data, with equal weights and full participation."""
    weights = jnp.full(run.size, 1 / run.size, dtype)
    # Masks come from keys that clients agree on, not from the run's key.
    return Problem(
        algorithm=algorithm,
        clients=Clients(None, jnp.arange(run.size, dtype=jnp.int32), weights),
        wire=Wire(*map(without_masks, wire.channels)),
        participation=participation.everybody(),
        backend=backend.separate(),
        key=run.key,
        size=run.size,
    )


def programs_for(algorithm: Algorithm, data: PyTree, weights: Float[Array, " clients"]) -> Programs:
    """The programs of `backend.separate()`, for one client's data or their shapes."""
    # Compiler options depend on the size of a client's data, and the last bits of results on them:
    # the server and all clients need those of `backend.separate()`.
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), data)
    clients = Clients(one, jnp.zeros(1, jnp.int32), weights[:1])
    return programs(**compiler_options(algorithm, clients))


Weights = Literal["equal", "samples"] | Sequence[float]
"""How clients weigh: alike, by their numbers of samples, or as listed by position."""


def description(algorithm: Algorithm, wire: Wire, warm_start: PyTree, weights: Weights) -> Identity:
    """What must be the same on all machines, by name; weights only under masks."""
    shared = ["none", ""] if warm_start is None else ["some", digest_of(warm_start.shared)]
    return {
        "algorithm": text_and_digest(algorithm),
        "channel": text_and_digest(wire.channels),
        "warm_start": shared,
        WEIGHTS: text_and_digest(weights),
        "precision": ["double" if jax.enable_x64.value else "single", ""],
    }


def numbers_of_versions() -> Identity:
    """Everything installed that the last digits depend on, by name."""
    return {f"version of {name}": [number, ""] for name, number in versions().items()}
