"""How a run is differentiated: `rollout(..., adjoint=...)`.

* `unrolled()`, the default, goes back through every round, whatever ended the run or how far from a
  solution it is. That is what one wants for few rounds, for derivatives by the start or a step size
  that matters, and for algorithms that never settle. Memory grows with the rounds.
* `checkpointed()` gives the same numbers in less memory, for more rounds computed again; a run that
  ends by `tol` has a reverse derivative too.
* `implicit()` differentiates the equation that a solution solves, z = T(z, θ) with T a round, and
  knows nothing of the rounds that led there. Memory is that of a round, time that of a few dozen
  rounds, and what does not influence a solution, as the start or a step size at a stationary point,
  has a derivative of exactly zero.

The gradient of a held-out error by the prior variance, at a converged solution:

    >>> import jax, jaxfed as jf
    >>> data = jf.data.hierarchical_synthetic(
    ...     jax.random.key(0), clients=4, features=6, rank=2, samples=12, prior_variance=0.05
    ... )
    >>> clients = jf.Clients.from_samples(data.samples)
    >>> def error(prior_variance, report):
    ...     algorithm = jf.pca.HierarchicalPCA(2, 0.5, prior_variance, solver="eigenvectors")
    ...     adjoint = jf.adjoint.implicit(report=report)
    ...     run = jf.rollout(
    ...         algorithm, clients, rounds=300, key=jax.random.key(0), adjoint=adjoint
    ...     )
    ...     return jf.metrics.expected_reconstruction_error(run.result.local, data.local, 0.5)
    >>> gradient = jax.jit(jax.grad(error, argnums=(0, 1)))
    >>> slope, report = gradient(0.05, jf.adjoint.Report())
    >>> bool(report.residual < 1e-3)
    True
"""

import abc
import math
from dataclasses import replace

import equinox as eqx
import jax
from jaxtyping import Array

from jaxfed import _names
from jaxfed._optional import require
from jaxfed.core import fixed_point
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.checks import check_count, check_flag, check_instance, check_positive
from jaxfed.core.fixed_point import DifferentiatedThrough, HasBases
from jaxfed.core.gauge import Bases
from jaxfed.core.implicit import Report, Settings, differentiable
from jaxfed.core.loop import Options, solve
from jaxfed.core.problem import Problem
from jaxfed.core.solution import Solution

__all__ = [
    "Adjoint",
    "Bases",
    "DifferentiatedThrough",
    "HasBases",
    "Report",
    "checkpointed",
    "implicit",
    "unrolled",
]


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


class _Implicit(Adjoint):
    algorithm: Algorithm | None
    report: Report | None
    settings: Settings = eqx.field(static=True)

    def check(self, problem):
        self._through(problem)
        number = problem.participation.number(problem.size)
        if number != problem.size:
            raise ValueError(
                "participation: wanted everybody() for an implicit derivative, since rounds that "
                f"some clients miss have no fixed point, got {problem.participation!r}"
            )
        for way in (problem.uplink, problem.downlink):
            if not way.settles:
                raise ValueError(
                    "channel: wanted for an implicit derivative one through which messages that "
                    "no longer change arrive as they are, such as lossless() or "
                    f"difference(quantize(3)), got {way!r}"
                )

    def _through(self, problem: Problem) -> Algorithm:
        given = problem.algorithm if self.algorithm is None else self.algorithm
        named = fixed_point.through(given)
        # What was given is meant, unless its rounds have no fixed point.
        return named if self.algorithm is None else given

    def solve(self, problem, start, tol, options):
        solution = solve(*jax.lax.stop_gradient((problem, start)), tol, options)
        through, settings = self._through(problem), self.settings
        if problem.backend.processes > 1:
            # An error in one process would leave the others waiting.
            settings = settings._replace(throw=False)
        # No leaves of this adjoint unless somebody asks for them: optimizers would move them.
        report = Report() if self.report is None else self.report
        return differentiable(
            problem, start, jax.lax.stop_gradient(solution), through, report, settings
        )


def with_report(adjoint: Adjoint, report: Report) -> Adjoint:
    """The same, which reports on its linear system if it has one."""
    if not isinstance(adjoint, _Implicit):
        return adjoint
    return _Implicit(adjoint.algorithm, report, adjoint.settings)


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


def implicit(
    *,
    tol: float | None = None,
    max_rounds: int = 200,
    through: Algorithm | None = None,
    memory: int = 10,
    fixed_point_tol: float | None = None,
    turning_tol: float = 1e-3,
    report: Report | None = None,
    throw: bool = True,
) -> Adjoint:
    """Differentiate the equation that a solution solves, and not the way to it.

    Works in forward and reverse mode, under `jit` and `vmap` and on every backend: a product of the
    linear system is a round, forwards or backwards. The run itself is differentiated by nothing, so
    that it may be as long as it takes and end by `tol`; `history` has no derivative.

    Bases that stand for subspaces make the system singular along their rotations, which it is
    projected away from at every step. A loss that depends on how a basis is turned has no
    derivative there, and is refused; forward mode does not see the loss, and differentiates along
    bases that do not turn.

    Args:
        tol: residual of the linear system, relative to its right-hand side. By default 1e-10 in
            double and 1e-5 in single precision. A hundred times as much is refused.
        max_rounds: at most about so many rounds of the linear system.
        through: an algorithm by whose round to differentiate, which has the same solutions; by
            default the one that the algorithm itself names. If it is another one than that of the
            run, `result` has derivatives and the states have none.
        memory: rounds between restarts of GMRES, and how many states it keeps. The residual is
            looked at then: more may be needed where restarts hinder, less saves rounds.
        fixed_point_tol: by how much of its norm a round may move any part of the states. By default
            1e-6 in double and 1e-4 in single precision.
        turning_tol: the share of a cotangent that may ask how bases are turned.
        report: what becomes a report on the linear system; see `Report`.
        throw: raise an error where a derivative is not to be had: at a point that is no fixed
            point, for a loss that asks how bases are turned, and where the linear system is not
            solved. Without, and in a run across processes, such derivatives are NaN.

    Raises:
        ValueError: for tolerances that are not positive, numbers of rounds that are not positive
            whole numbers, and a `through` that is no algorithm.
        ImportError: if Lineax is missing.
    """
    check_positive("tol", tol, optional=True, single=True)
    check_count("max_rounds", max_rounds)
    check_count("memory", memory)
    check_positive("fixed_point_tol", fixed_point_tol, optional=True, single=True)
    check_positive("turning_tol", turning_tol, single=True)
    check_flag("throw", throw)
    if through is not None:
        check_instance("through", through, Algorithm, "a jaxfed algorithm or None")
    if report is not None:
        check_instance("report", report, Report, "a jaxfed.adjoint.Report or None")
    require("lineax", extra="adjoint")
    settings = Settings(
        None if tol is None else float(tol),
        max_rounds,
        memory,
        None if fixed_point_tol is None else float(fixed_point_tol),
        float(turning_tol),
        bool(throw),
    )
    return _Implicit(through, report, settings)


__dir__ = _names.public_names(__name__)
