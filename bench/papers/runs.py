"""Seeds of a target, and runs of all seeds in one compiled call."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Key

from jaxfed import Algorithm, Clients, Personalized, Solution, rollout
from jaxfed import backend as backends
from jaxfed import channel as channels


@dataclass(frozen=True)
class Seeds:
    """Seeds of a target; another base gives seeds that nothing was tuned on.

    Base 0 has the seeds 0, 1, ...; the first ones of a base do not depend on their number.

    Attributes:
        count: how many.
        base: from which they are derived.
    """

    count: int
    base: int = 0

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"--seeds: wanted a positive number, got {self.count}")
        if self.base < 0:
            raise ValueError(f"--seed: wanted a number of at least 0, got {self.base}")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    @property
    def _numbers(self) -> np.ndarray:
        if self.base == 0:
            return np.arange(self.count, dtype=np.int32)
        words = np.random.SeedSequence(self.base).generate_state(self.count, np.uint32)
        return (words >> 2).astype(np.int32)  # some targets count on from a seed

    def first(self, count: int) -> "Seeds":
        """The first `count` seeds of the same base, which may be more than there are here."""
        return Seeds(count, self.base)

    def at(self, position: int) -> int:
        """The seed at this position, counted from 0; it may lie beyond `count`."""
        return list(self.first(position + 1))[position]

    def keys(self, part: int | None = None) -> Key[Array, " runs"]:
        """One key per seed, others for each part of an experiment."""
        keys = jax.vmap(jax.random.key)(jnp.asarray(self._numbers))
        if part is None:
            return keys
        return jax.vmap(lambda key: jax.random.fold_in(key, part))(keys)

    def split(self, parts: int) -> list[Key[Array, " runs"]]:
        """Independent keys for each part of an experiment, one per seed."""
        return list(jax.vmap(lambda key: jax.random.split(key, parts))(self.keys()).T)


@partial(jax.jit, static_argnames=("rounds", "every", "channel", "one_for_all", "in_turn"))
def runs(
    algorithm: Algorithm,
    clients: Clients,
    keys: Key[Array, " runs"],
    rounds: int = 1,
    warm_start: Personalized | None = None,
    *,
    tol: float | None = None,
    measure: Partial | None = None,
    given: Any = None,
    every: int = 1,
    channel: channels.Channel = channels.lossless(),  # noqa: B008
    one_for_all: bool = False,
    in_turn: bool = False,
) -> Solution:
    """One run per data set, start and key, which all carry a leading axis.

    Args:
        algorithm: with no such axis.
        clients: data sets.
        keys: random keys.
        rounds: how many rounds.
        warm_start: what the runs start from.
        tol: of the stopping rule, if it is to stop.
        measure: metrics of the result, or of `given` and the result; of a function of a module,
            so that all calls with it are compiled once.
        given: what a run is measured by, with the leading axis.
        every: rounds from one measurement to the next.
        channel: of the messages.
        one_for_all: `clients` are one data set for all runs, without the leading axis.
        in_turn: one run after the other, and in each one client after the other, so that no run and
            no client waits for the slowest; for problems that fill a processor one by one.

    Returns:
        The solutions, stacked.
    """

    def one(clients, key, warm_start, given):
        def metrics(result):
            return measure(result) if given is None else measure(given, result)

        return rollout(
            algorithm,
            clients,
            rounds=rounds,
            key=key,
            warm_start=warm_start,
            tol=tol,
            channel=channel,
            metrics=None if measure is None else metrics,
            metrics_every=every,
            backend=backends.chunked(1) if in_turn else backends.vmap(),
        )

    if in_turn:
        each = None if one_for_all else clients, keys, warm_start, given
        return jax.lax.map(lambda run: one(clients if one_for_all else run[0], *run[1:]), each)
    return jax.vmap(one, (None if one_for_all else 0, 0, 0, 0))(clients, keys, warm_start, given)


def learned(*arguments: Any, **options: Any) -> Personalized:
    """The results of such `runs`, without their histories."""
    return runs(*arguments, **options).result
