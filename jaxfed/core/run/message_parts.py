"""Lists the parts of clients' messages in a run, and how the server reduced each."""

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import is_part
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.arguments import LOSSLESS, VMAP, problem_of
from jaxfed.core.run.loop import protocol_of
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.release import Release
from jaxfed.core.wire.wire import Wire


class MessagePart(NamedTuple):
    """A part of a client's message.

    Attributes:
        before: whether it was sent before the first round instead of in each round.
        name: its path in the message.
        rule: its reduction, by name in `jaxfed.reduction`, such as `"Mean"`.
        shape: shape of one client's part.
        dtype: type of its numbers, before the channel.
    """

    before: bool
    name: str
    rule: str
    shape: tuple[int, ...]
    dtype: str


@in_enough_precision
def message_parts(solution: Solution, clients: Clients) -> list[MessagePart]:
    """List the parts of each client's messages in a run, by abstract evaluation in its precision.

    Args:
        solution: solution of the run.
        clients: clients of the run; only their shapes matter.

    Returns:
        The parts of the message before the first round, if there was one, then those of a round's
        message. If clients' shapes differ, they are the largest client's.

    Raises:
        ValueError: if the algorithm cannot have run on these clients.
    """
    # Those of a warm start come before this run's own two.
    *_, first, last = solution.releases
    rounds = max(1, int(solution.rounds))
    sketch = clients.sketch()
    found = []
    for start in (None, Personalized(*solution.result)):
        problem, start = problem_of(
            solution.algorithm, sketch, rounds, jax.random.key(0), start, LOSSLESS, None, VMAP
        )
        found.append(_parts(problem, start, rounds, first, last))
        # A run with a warm start may have sent less before the rounds.
        problem = replace(problem, wire=Wire(LOSSLESS, LOSSLESS, first.channel))
        nothing = np.zeros((), np.uint32)
        sent = protocol_of(problem, start, rounds).costs(nothing, nothing).first_up
        if sent == first.bits:
            return found[-1]
    # Neither layout matches: listing a part that was not sent is better than omitting one that was.
    return found[0]


def _parts(
    problem: Problem, warm_start: Personalized | None, rounds: int, first: Release, last: Release
) -> list[MessagePart]:
    shapes = protocol_of(problem, warm_start, rounds)
    messages = shapes.firsts[0].decoded, shapes.uplink
    pairs = zip((True, False), messages, (first, last), strict=True)
    return [part for before, tree, release in pairs if release.bits for part in _of(before, tree)]


def _of(before: bool, message: PyTree) -> list[MessagePart]:
    parts = jax.tree.leaves_with_path(message, is_leaf=is_part)
    return [
        MessagePart(
            before,
            jax.tree_util.keystr((*path, *inner[1:]), simple=True, separator="."),
            type(part).__name__,
            tuple(leaf.shape),
            str(leaf.dtype),
        )
        for path, part in parts
        for inner, leaf in jax.tree.leaves_with_path(part)
    ]
