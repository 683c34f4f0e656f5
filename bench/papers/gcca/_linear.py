"""Runs of Shrestha & Fu (2023): federated linear GCCA with quantized messages.

The reference is an independent implementation in NumPy, in double precision, on draws of its own.
Costs are means over draws and have half the squared distances, as the authors' programs do. What
is counted in rounds is the position in the list of costs whose first entry is the start's.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float, Key

from jaxfed import Personalized, rollout, stack
from jaxfed import channel as channels
from jaxfed.gcca import MVLSA, MaxVar, Views, cost, optimum
from papers.communication import compression_ratio, rounds_to
from papers.runs import Seeds, runs
from papers.synthetic import gcca_synthetic

Costs = Float[np.ndarray, "draws rounds_plus_1"]

RANK, VIEW_RANK, BATCH = 5, 10, 150
GOALS = (4, 2, 1.5)  # multiples of the least cost
FULL = "full precision"


def drawn_views(keys: Key[Array, " draws"], **setting: Any) -> Views:
    return stack([Views.from_arrays(gcca_synthetic(key, **setting).views) for key in keys])


def drawn(
    seeds: Seeds, draws: int, **setting: Any
) -> Iterator[tuple[Key[Array, " draws"], Views, Personalized]]:
    """Each seed's keys, views, and their warm start."""
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        views = drawn_views(keys, **setting)
        yield keys, views, warm(views)


@jax.jit
def least_of(views: Views) -> Float[Array, " draws"]:
    return jax.vmap(lambda v: optimum(v, RANK).cost)(views)


@partial(jax.jit, static_argnames="view_rank")
def warm(views: Views, view_rank: int = VIEW_RANK) -> Personalized:
    def one(views):
        algorithm = MVLSA(RANK, view_rank=view_rank)
        return rollout(algorithm, views, rounds=1, key=jax.random.key(0)).result

    return jax.vmap(one)(views)


def random_start(views: Views, keys: Key[Array, " draws"]) -> Personalized:
    """The authors' random start, whose representation is not orthonormal."""
    _, clients, entities, features = views.data.values.shape

    def one(key):
        ours, theirs = jax.random.split(jax.random.fold_in(key, 1))
        shared = jax.random.normal(ours, (entities, RANK))
        return Personalized(shared, jax.random.normal(theirs, (clients, features, RANK)))

    return jax.vmap(one)(keys)


def _cost(views, result):
    return {"cost": cost(views, *result)}


_first_costs = jax.jit(jax.vmap(lambda views, start: cost(views, *start)))


def solved(
    views: Views,
    warm_start: Personalized,
    keys: Key[Array, " draws"],
    wire: channels.Channel,
    batch: int | None,
    rounds: int,
) -> tuple[Costs, Float[np.ndarray, "draws 2 rounds"]]:
    """Costs, at the start and after each round, and cumulative bits up and down."""
    history = runs(
        MaxVar(RANK, solver="gradient", batch_size=batch),
        views,
        keys,
        rounds,
        warm_start,
        channel=wire,
        given=views,
        measure=Partial(_cost),
    ).history
    costs = np.concatenate([_first_costs(views, warm_start)[:, None], history["cost"]], axis=1)
    return costs, np.stack([history["bits_up"], history["bits_down"]], axis=1)


def costs_of(
    views: Views,
    warm_start: Personalized,
    keys: Key[Array, " draws"],
    bits: int | None = None,
    *,
    batch: int | None = BATCH,
    rounds: int,
    contraction: float = 1.0,
) -> Costs:
    """Costs at the server's own representation, at the start and after each round."""
    return solved(views, warm_start, keys, wire_of(bits, contraction), batch, rounds)[0]


def processor_time(
    views: Views,
    warm_start: Personalized,
    keys: Key[Array, " draws"],
    bits: int | None = None,
    *,
    batch: int | None = BATCH,
    rounds: int = 20,
) -> float:
    """Seconds of a round of all draws, compiled before: the least of three runs."""

    def once() -> float:
        start_time = time.process_time()
        algorithm = MaxVar(RANK, solver="gradient", batch_size=batch)
        jax.block_until_ready(
            runs(algorithm, views, keys, rounds, warm_start, channel=wire_of(bits))
        )
        return time.process_time() - start_time

    once()
    return min(once() for _ in range(3)) / rounds


def wire_of(bits: int | None, contraction: float = 1.0) -> channels.Channel:
    """The paper's channel; full precision without a number of bits."""
    if bits is None:
        return channels.lossless()
    return channels.difference(channels.quantize(bits, contraction=contraction))


def first_at(costs: Float[np.ndarray, " rounds_plus_1"], goal: float) -> float:
    """The position, counted from 1, of the first cost of at most the goal; infinity without one."""
    position = int(rounds_to(costs, goal))
    return position if position > 0 else np.inf


def position_at(costs: Costs, least: Float[Array, " draws"], goal: float) -> float:
    return first_at(costs.mean(0), goal * float(np.mean(least)))


def bits_sent(sent: Float[np.ndarray, "draws 2 rounds"], position: float) -> float:
    """All that has travelled up to there, both ways, the start included."""
    if not np.isfinite(position) or position < 2:
        return float("nan")
    return float(np.asarray(sent, np.float64).mean(0)[:, int(position) - 2].sum())


def bits_an_entry(
    sent: Float[np.ndarray, "draws 2 rounds"], position: float, entries: int
) -> float:
    """Mean over the messages of the rounds up to there, all that travels counted."""
    # What travels before the rounds is one message of one size each way.
    start = 2 * float(np.mean(sent[:, 1, 0]))
    return (bits_sent(sent, position) - start) / (entries * (2 * position - 3))


def saved(position: float, full_position: float, bits: float) -> float:
    """The paper's compression ratio, which counts the start as one more round.

    NaN if a goal was not reached in full precision or by a few bits.
    """
    if not np.isfinite([position, full_position, bits]).all():
        return float("nan")
    return compression_ratio(position, full_position, bits)


def saved_in_all(bits: float, full_position: float, entries: int) -> float:
    """The share of all bits saved, of the start's too; NaN if a goal was not reached."""
    return 1 - bits / (32 * entries * (2 * full_position - 1)) if full_position < np.inf else np.nan
