"""What server and clients must agree on in a run."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxfed import backend, participation
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import check_count, checked_key, refuse
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.round.problem import Problem
from jaxfed.core.store.identity import digest_of
from jaxfed.core.wire.masks import without_masks
from jaxfed.core.wire.wire import Wire
from jaxfed.deploy.data import shaped
from jaxfed.deploy.wire import check_name, key_from_words, key_to_words


class Run(NamedTuple):
    """What the server tells everybody of a run."""

    name: str
    rounds: int
    size: int  # clients
    like: dict[str, Any]  # of one client's data, padded to the longest; see `data.told`
    key: Key[Array, ""]

    @property
    def words(self) -> dict[str, Any]:
        """As JSON knows them."""
        return self._asdict() | {"key": key_to_words(self.key)}

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Self:
        """Inverse of `words`.

        Raises:
            ValueError: for what no run has, above all a name that would be a path.
        """
        try:
            run = cls(**{**words, "key": key_from_words(words["key"])})
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise refuse("run", "the words of a run", words) from error
        check_name("run", run.name)
        check_count("rounds", run.rounds)
        check_count("size", run.size)
        checked_key("key", run.key)
        shaped(run.like)
        return run


def problem_of_run(
    algorithm: Algorithm,
    wire: Wire,
    run: Run,
    dtype: Any,
    participants: participation.Participation | None = None,
) -> Problem:
    """The run as the server knows it: with nobody's data, and with equal weights."""
    weights = jnp.full(run.size, 1 / run.size, dtype)
    clients = Clients(None, jnp.arange(run.size, dtype=jnp.int32), weights)
    chosen = participation.everybody() if participants is None else participants
    # Here masks come from keys that clients agree on, not from the run's.
    up, down, first_up, first_down = map(without_masks, wire.channels)
    return Problem(
        algorithm, clients, up, down, first_up, first_down, chosen, backend.separate(), run.key,
        run.size,
    )  # fmt: skip


def description(algorithm: Algorithm, wire: Wire, start: PyTree) -> dict[str, str]:
    """What must be the same on all machines, by name, in a few words."""
    return {
        "algorithm": f"{_text(algorithm)} {digest_of(algorithm)}",
        "channel": _text(wire.channels),
        "warm_start": "none" if start is None else digest_of(start.shared),
        "precision": "64 bits" if jax.config.read("jax_enable_x64") else "32 bits",
    }


def _text(tree: Any) -> str:
    text = " ".join(eqx.tree_pformat(tree).split())
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # where a function lies differs
