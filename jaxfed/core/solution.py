"""What a run returns, and what it raises."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed.core.algorithm import Personalized
from jaxfed.core.release import Release
from jaxfed.core.rounds import Failure, State


class Status(eqx.Enumeration):
    """How a run ended."""

    round_limit = "All rounds ran."
    converged = "The stopping measure met the tolerance."
    diverged = "An objective or a message is no longer finite."
    stopped = "A callback stopped the run."


class Solution(eqx.Module):
    """What a run returns.

    Attributes:
        server: the algorithm's final server state.
        local: the clients' final states, leading axis = clients.
        history: `(rounds,)` arrays: the weighted means of the clients' diagnostics
            (`"objective"` is evaluated at the iterate that enters the round), the server's
            diagnostics, the requested metrics, `"participants"`, and `"bits_up"` and
            `"bits_down"`, cumulative per client, the exchange before the rounds included. Entries
            that were not computed (metrics between their rounds, rounds after the tolerance was
            met or whose participants have no weight) are NaN.
        rounds: number of rounds that ran.
        status: how the run ended, one of `jaxfed.Status`.
        failure: where it diverged: the round, counted from 1 (0: it did not), and a truth value
            for each client.
        result: the learned models, `result.shared` and `result.local`.
        state: what the next round would start from.
        releases: what left the clients, how often and with which participation, that of a solution
            which was the warm start included; `jaxfed.privacy.spent` is the account of it.
    """

    server: PyTree
    local: PyTree
    history: dict[str, Any]
    rounds: int | Int[Array, ""]
    status: Status
    failure: Failure
    result: Personalized
    state: State
    releases: tuple[Release, ...]


class DivergenceError(FloatingPointError):
    """An objective or a message that is no longer finite.

    Attributes:
        round: the round in which it is not, counted from 1; what is sent before the rounds counts
            to the first.
        clients: the positions of the clients whose own are not; empty if all are.
        solution: what there was before that round.
    """

    def __init__(self, message: str, solution: Solution):
        """Keep what is known."""
        super().__init__(message)
        self.round, self.solution = int(solution.failure.round), solution
        self.clients = tuple(np.flatnonzero(solution.failure.clients).tolist())
