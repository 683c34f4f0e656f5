"""The input of the checks, and runs and settings that several checks use."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jaxfed import backend, channel
from jaxfed._checks import refuse
from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round.rounds import begin
from jaxfed.core.round.whole import WHOLE, prepared
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.fit import fit
from jaxfed.core.run.loop import protocol_of
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.wire import Wire
from jaxfed.testing._compare import floating, same

Essence = Callable[[Personalized], PyTree]
Loss = Callable[[Personalized], Float[Array, ""]]
Constraint = Callable[[Personalized], None]


def checked_essence(essence: Essence | None) -> Essence:
    """Return the function, or the identity, with a check of what it returns."""

    def checked(result: Personalized) -> PyTree:
        found = result if essence is None else essence(result)
        if not isinstance(found, tuple) or len(found) != 2:
            raise refuse("essence", "a function that returns a pair (shared, local)", found)
        return found

    return checked


def checked_loss(loss: Loss) -> Loss:
    """Return the function, with a check of what it returns."""

    def checked(result: Personalized) -> Float[Array, ""]:
        found = loss(result)
        if jnp.shape(found) != () or not eqx.is_inexact_array(found):
            raise refuse("loss", "a function that returns a scalar array of floats", found)
        return found

    return checked


def checked_constraint(constraint: Constraint) -> Constraint:
    """Return the function, with a check that it does not return what it should raise."""

    def checked(result: Personalized) -> None:
        found = constraint(result)
        if found is not None:
            wanted = "a function that raises an AssertionError, or else returns None"
            raise refuse("constraint", wanted, found)

    return checked


class Messages(NamedTuple):
    """One client's messages."""

    first: PyTree
    downlink: PyTree
    uplink: PyTree


@dataclass(frozen=True)
class Case:
    """The arguments of `check_algorithm`, in double precision."""

    algorithm: Algorithm
    clients: Clients
    others: Clients
    wider: Algorithm
    key: Key[Array, ""]
    rounds: int
    essence: Essence
    loss: Loss | None
    constraint: Constraint | None
    pad: Callable[[Clients], Clients] | None
    deterministic: bool
    channels: Mapping[str, Channel | Wire] | None
    backends: Mapping[str, Backend] | None
    rtol: float
    atol: float
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by name

    def solve(
        self,
        algorithm: Algorithm | None = None,
        clients: Clients | None = None,
        key: Key[Array, ""] | None = None,
        *,
        rounds: int | None = None,
        **options: Any,
    ) -> Solution:
        """Compile and run, by default with the case's own arguments."""
        given = (
            self.algorithm if algorithm is None else algorithm,
            self.clients if clients is None else clients,
            self.key if key is None else key,
        )
        return _solve(*given, rounds=self.rounds if rounds is None else rounds, **options)

    def shapes(self, algorithm: Algorithm, clients: Clients, rounds: int) -> Solution:
        """Return shapes and types of a run, without computing it."""

        def run(algorithm, clients, key):
            return rollout(algorithm, clients, rounds=rounds, key=key)

        return jax.eval_shape(run, algorithm, clients, self.key)

    def says(self, solution: Solution) -> tuple[PyTree, Array | np.ndarray]:
        """Return what to compare of a run: the essence of its result, first and last objective.

        Objectives in between may differ: a solver that leaves a saddle point amplifies rounding
        errors on its way, and forgets them once it has converged.
        """
        return self.essence(solution.result), solution.history["objective"][jnp.array([0, -1])]

    def same(self, given: PyTree, wanted: PyTree, sentence: str) -> None:
        """Raise an AssertionError unless both agree within the case's tolerances."""
        same(given, wanted, sentence, self.rtol, self.atol)

    @functools.cached_property
    def messages(self) -> Messages:
        """One client's first message, a downlink and an uplink, filled with random numbers."""

        def drawn(shape):
            values = rng.normal(size=shape.shape)
            return jnp.asarray(values if floating(shape) else np.abs(9 * values), shape.dtype)

        rng = np.random.default_rng(0)
        options = None, channel.lossless(), None, backend.vmap()
        problem, start = problem_of(self.algorithm, self.clients, self.rounds, self.key, *options)
        shapes = protocol_of(problem, start, self.rounds)
        messages = Messages(shapes.firsts[0].decoded, shapes.downlink, shapes.uplink)
        return jax.tree.map(drawn, messages)


def _run(algorithm, clients, key, channel=None, participation=None, backend=None, *, rounds):
    given = {"channel": channel, "participation": participation, "backend": backend}
    chosen = {name: value for name, value in given.items() if value is not None}
    return rollout(algorithm, clients, rounds=rounds, key=key, **chosen)


# One compiled function, so that all checks share its programs.
_solve = jax.jit(_run, static_argnames="rounds")


def problem_and_state(algorithm, clients, key, rounds, participants):
    """Return the problem, and the state before the first round."""
    problem, start = problem_of(
        algorithm, clients, rounds, key, None, channel.lossless(), participants, backend.vmap()
    )
    problem = prepared(problem, rounds)
    return problem, begin(problem, start, WHOLE)[0]


def chunk(case: Case) -> int:
    return max(1, case.rounds // 2)


def fit_in_chunks(
    case: Case, algorithm: Algorithm, clients: Clients, key: Key[Array, ""], **options: Any
) -> Solution:
    """Run `fit` in two or three chunks."""
    return fit(
        algorithm, clients, rounds=case.rounds, key=key, rounds_per_chunk=chunk(case), **options
    )


def every_backend() -> dict[str, Backend]:
    devices = min(2, jax.local_device_count())
    return {
        "chunked(2)": backend.chunked(2),
        f"pmap({devices})": backend.pmap(devices),
        f"shard({devices})": backend.shard(devices),
    }


def every_channel(clients: int) -> dict[str, Channel | Wire]:
    open_way = channel.lossless()
    return {
        "difference(quantize(3))": channel.difference(channel.quantize(3)),
        "error_feedback(quantize(4))": channel.error_feedback(channel.quantize(4)),
        "quantize(4), entropy-coded": channel.quantize(4, coding="entropy"),
        "top_k(0.5)": channel.top_k(0.5),
        "gaussian": Wire(channel.gaussian(1e3, 1e-6), open_way),
        "secure_sum": Wire(channel.secure_sum(clients, bits=24, bound=1e3), open_way),
    }


class Foreign(eqx.Module):
    """Data of a type that no algorithm knows."""

    unknown: Array


def with_scaled_hyperparameters(algorithm: Algorithm, factor: float) -> Algorithm:
    """Multiply all hyperparameters of an algorithm by a factor."""
    return jax.tree.map(lambda x: factor * x if eqx.is_inexact_array(x) else x, algorithm)


def combination(tree: PyTree) -> Float[Array, ""]:
    """Return a fixed linear combination of all numbers, with different factors."""
    leaves = [x for x in jax.tree.leaves(tree) if floating(x)]
    return sum(
        (
            jnp.sum(x * jnp.cos(jnp.arange(x.size) + i).reshape(x.shape))
            for i, x in enumerate(leaves)
        ),
        start=jnp.zeros(()),
    )


def more_rows(clients: Clients) -> Clients:
    widths = [(0, 0), (0, 4), (0, 0)]
    return eqx.tree_at(lambda c: c.data.values, clients, jnp.pad(clients.data.values, widths))
