"""How a run is differentiated: what an adjoint is, and those that go back through every round."""

import abc
import math
from dataclasses import replace

import equinox as eqx
from jaxtyping import Array

from jaxfed.core.common.checks import check_count, check_flag
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.loop import Options, solve
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
        self, problem: Problem, start: Personalized | None, tol: Array | float | None,
        options: Options,
    ) -> Solution:  # fmt: skip
        """The run."""


class _Unrolled(Adjoint):
    remat: bool = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, start, tol, options):
        return solve(problem, start, tol, replace(options, remat=self.remat))


class _Checkpointed(Adjoint):
    states: int | None = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, start, tol, options):
        width = self.states
        if width is None:
            width = max(2, math.ceil(options.rounds**0.5))
        return solve(problem, start, tol, replace(options, width=width))


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
