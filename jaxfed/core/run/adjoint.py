"""The base class of adjoints, and those that differentiate through every round."""

import abc
import math
from functools import partial
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxfed._checks import check_count, check_flag
from jaxfed.core.common.printing import as_call
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Problem, blank
from jaxfed.core.run.loop import Options, forward, whole_run, with_history
from jaxfed.core.run.solution import Solution


class Adjoint(eqx.Module):
    """A way to differentiate a run. The numbers of the run do not depend on it."""

    factory: ClassVar[str] = ""
    """Name of the function that makes it; empty for the class itself."""

    def __repr__(self) -> str:
        return as_call(self)

    @abc.abstractmethod
    def check(self, problem: Problem) -> None:
        """Refuse a run that this adjoint cannot differentiate.

        Raises:
            ValueError: names the unsuitable argument.
        """

    @abc.abstractmethod
    def solve(
        self,
        problem: Problem,
        warm_start: Personalized | None,
        tol: Array | float | None,
        options: Options,
    ) -> Solution:
        """Run the problem."""

    def with_report(self, report: PyTree) -> "Adjoint":
        """The same adjoint, whose backward pass returns `report` as a `jaxfed.adjoint.Report`.

        By default the adjoint itself, since it has no linear system to report on.
        """
        del report
        return self


class _Unrolled(Adjoint):
    factory = "unrolled"
    remat: bool = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, warm_start, tol, options):
        run = whole_run(problem, warm_start, tol, options, self._loop)
        return with_history(*run, tol, jnp)

    def _loop(self, step, unfinished, state, options):
        # With a tolerance the loop is a `while_loop`, which has no reverse derivative.
        if self.remat and not options.stops:
            step = jax.checkpoint(step)
        return forward(step, unfinished, state, options)


class _Checkpointed(Adjoint):
    factory = "checkpointed"
    # Equinox' checkpointed `while_loop` takes less memory (1.6 against 3.4 MB over 100 rounds of
    # PerPCA) and a quarter more time, but it has no forward mode, which Hessians of runs need.
    n: int | None = eqx.field(static=True)

    def check(self, problem):
        del problem

    def solve(self, problem, warm_start, tol, options):
        run = whole_run(problem, warm_start, tol, options, self._loop)
        return with_history(*run, tol, jnp)

    def _loop(self, step, unfinished, state, options):
        """Nested scans whose bodies are recomputed.

        Each level stores the `width` states at which its parts begin. Only one part of a level is
        expanded at a time, so each further level costs one more evaluation of all rounds and
        another `width` states.

        Source: Griewank (1992), Achieving logarithmic growth of temporal and spatial complexity in
        reverse automatic differentiation, in its simplest form, with equal parts.
        """
        rounds = options.rounds
        width = max(2, math.ceil(rounds**0.5)) if self.n is None else self.n
        length, levels = 1, 0
        while not levels or length < rounds:
            shapes = jax.eval_shape(step, state)[1]
            none = jax.tree.map(lambda x: blank(x.shape, x.dtype), shapes)
            # Recompute the branch too; otherwise each branch would store its inputs.
            part = jax.checkpoint(partial(_if_unfinished, unfinished, step, none))
            # Parts are equally long, so there may be room for more than `rounds`; those beyond do
            # nothing, and their blank records are cut off.
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
    """Differentiate through every round as it was computed.

    Args:
        remat: recompute each round in the backward pass instead of storing its intermediate values.
            The states between rounds are stored either way.

    Raises:
        ValueError: if `remat` is neither True nor False.
    """
    check_flag("remat", remat)
    return _Unrolled(bool(remat))


def checkpointed(n: int | None = None) -> Adjoint:
    """Differentiate through every round, storing few states and recomputing the rounds between.

    States are stored at several levels: `n` along the whole run, `n` within the part that is being
    differentiated, and so on. R rounds take log R / log n levels, each of which stores n states and
    costs one evaluation of all rounds. A run that ends by `tol` has derivatives too. Under `vmap`,
    rounds skipped by `tol` still take time.

    Args:
        n: states per level, at least two. None means the square root of the number of rounds, which
            gives two levels. 2 stores the fewest states, logarithmic in the number of rounds. But
            each level also needs working memory, more than that of a state if a state is small
            beside the data; so this pays for large states or very many rounds.

    Raises:
        ValueError: if `n` is not an integer of at least two.

    Source: Griewank (1992), Achieving logarithmic growth of temporal and spatial complexity in
    reverse automatic differentiation.
    """
    if n is not None:
        check_count("n", n, least=2)
    return _Checkpointed(n)
