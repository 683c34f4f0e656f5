"""How a run is differentiated: what an adjoint is, and those that go back through every round."""

import abc
import math
from functools import partial

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from jaxfed._checks import check_count, check_flag
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem, blank
from jaxfed.core.run.loop import Options, forward, solve
from jaxfed.core.run.solution import Solution


class Adjoint(eqx.Module):
    """How a run is differentiated. The numbers of the run itself are the same by all of them."""

    @abc.abstractmethod
    def check(self, problem: Problem) -> None:
        """Refuse a run that has no such derivative.

        Raises:
            ValueError: naming the argument that does not go with it.
        """

    @abc.abstractmethod
    def solve(
        self,
        problem: Problem,
        start: Personalized | None,
        tol: Array | float | None,
        options: Options,
    ) -> Solution:
        """The run."""

    def with_report(self, report: PyTree) -> "Adjoint":
        """The same, whose backward pass makes `report` a `jaxfed.adjoint.Report`.

        By default it is this adjoint itself, for which there is no linear system to report on.
        """
        del report
        return self


class _Unrolled(Adjoint):
    remat: bool = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, start, tol, options):
        return solve(problem, start, tol, options, self._loop)

    def _loop(self, step, unfinished, state, options):
        if self.remat and not options.stops:
            step = jax.checkpoint(step)
        return forward(step, unfinished, state, options)


class _Checkpointed(Adjoint):
    states: int | None = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, start, tol, options):
        return solve(problem, start, tol, options, self._loop)

    def _loop(self, step, unfinished, state, options):
        """Scans within scans whose bodies are computed again.

        Each level keeps the states at which its parts begin, `width` of them, and the parts of only
        one of them are ever there. So levels cost a further evaluation of all rounds each, and
        width times their number in states.

        Source: Griewank (1992), Achieving logarithmic growth of temporal and spatial complexity in
        reverse automatic differentiation, in its simplest form, with equal parts.
        """
        rounds = options.rounds
        width = max(2, math.ceil(rounds**0.5)) if self.states is None else self.states
        length, levels = 1, 0
        while not levels or length < rounds:
            shapes = jax.eval_shape(step, state)[1]
            none = jax.tree.map(lambda x: blank(x.shape, x.dtype), shapes)
            # The branches are within what is computed again, or they would keep their inputs each
            # time.
            part = jax.checkpoint(partial(_if_unfinished, unfinished, step, none))
            count = min(width, -(-rounds // length))
            step = partial(_scan, part, count)
            length, levels = length * count, levels + 1
        state, history = step(state)
        if levels > 1:
            history = jax.tree.map(lambda x: x.reshape(-1, *x.shape[levels:])[:rounds], history)
        return state, history


def _if_unfinished(unfinished, step, none, state):
    return jax.lax.cond(unfinished(state), step, lambda state: (state, none), state)


def _scan(step, length, state):
    return jax.lax.scan(lambda state, _: step(state), state, length=length)


def unrolled(remat: bool = False) -> Adjoint:
    """Differentiate every round as it was computed.

    Args:
        remat: compute each round again in the backward pass instead of storing its inner parts;
            the states between rounds are stored all the same.

    Raises:
        ValueError: if `remat` is neither True nor False.
    """
    check_flag("remat", remat)
    return _Unrolled(bool(remat))


def checkpointed(n: int | None = None) -> Adjoint:
    """Differentiate every round, keeping few states and computing rounds again from them.

    The states are kept at levels: `n` along the whole run, `n` within that part of it which is
    being gone back through, and so on. With R rounds that makes log R / log n levels; each keeps n
    states and costs an evaluation of all rounds. A run that ends by `tol` has derivatives too.
    Under `vmap`, rounds that are left out by `tol` take their time nevertheless.

    Args:
        n: states at each level, at least two. None for the root of the rounds, which makes two
            levels; 2 for the least memory, in the logarithm of the rounds.

    Raises:
        ValueError: if `n` is not a whole number of at least two.

    Source: Griewank (1992), Achieving logarithmic growth of temporal and spatial complexity in
    reverse automatic differentiation.
    """
    if n is not None:
        check_count("n", n, least=2)
    return _Checkpointed(n)
