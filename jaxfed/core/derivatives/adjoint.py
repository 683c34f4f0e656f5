"""The implicit adjoint differentiates the equation that a solution satisfies."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxfed._checks import check_count, check_flag, check_instance, check_positive, check_whole
from jaxfed._optional import require
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.derivatives.implicit import TURNING, Report, differentiable
from jaxfed.core.derivatives.linear_system import SolverSettings
from jaxfed.core.round.problem import Problem
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.loop import whole_run, with_history


class _Implicit(Adjoint):
    algorithm: Algorithm | None
    report: Report | None
    settings: SolverSettings = eqx.field(static=True)

    def __repr__(self) -> str:
        given = {"through": self.algorithm, **self.settings._asdict()}
        defaults = inspect.signature(implicit).parameters
        words = (f"{x}={y!r}" for x, y in given.items() if y != defaults[x].default)
        return f"implicit({', '.join(words)})"

    def check(self, problem):
        self._through(problem)
        number = problem.participation.number(problem.size)
        if number != problem.size:
            raise ValueError(
                "participation: wanted everybody() for an implicit derivative, since rounds that "
                f"some clients miss have no fixed point, got {problem.participation!r}"
            )
        for way in (problem.wire.up, problem.wire.down):
            if not way.settles:
                raise ValueError(
                    "channel: wanted for an implicit derivative a channel that transmits messages "
                    "without loss once they stop changing, such as lossless() or "
                    f"difference(quantize(3)), got {way!r}"
                )

    def _through(self, problem: Problem) -> Algorithm:
        given = problem.algorithm if self.algorithm is None else self.algorithm
        named = given.through()
        # An algorithm passed by the caller is used itself, if its rounds have a fixed point.
        return named if self.algorithm is None else given

    def solve(self, problem, warm_start, tol, options):
        run = whole_run(*jax.lax.stop_gradient((problem, warm_start)), tol, options)
        solution = with_history(*run, tol, jnp)
        through, settings = self._through(problem), self.settings
        if problem.backend.processes > 1:
            # An error in one process would leave the others waiting.
            settings = settings._replace(throw=False)
        # Without a requested report the adjoint has no leaves, which optimizers would update.
        report = Report() if self.report is None else self.report
        return differentiable(
            problem, warm_start, jax.lax.stop_gradient(solution), through, report, settings
        )

    def with_report(self, report):
        return _Implicit(self.algorithm, report, self.settings)


def implicit(
    *,
    tol: float | None = None,
    max_rounds: int = 200,
    through: Algorithm | None = None,
    memory: int = 10,
    fixed_point_tol: float | None = None,
    turning_tol: float = TURNING,
    report: Report | None = None,
    throw: bool = True,
    direct: int = 0,
) -> Adjoint:
    """Differentiate the equation that a solution satisfies, not the path to it.

    Works in forward and reverse mode, under `jit` and `vmap` and on every backend: a product with
    the linear system's matrix is a round, forwards or backwards. The run itself is not
    differentiated, so it may take any number of rounds and end by `tol`; `history` has no
    derivative.

    Bases of subspaces make the system singular along their rotations, which are projected out at
    every step. A loss that depends on the rotation of a basis has no derivative there, and is
    refused in reverse mode. Forward mode does not see the loss; it differentiates along bases that
    do not rotate.

    Args:
        tol: residual of the linear system, relative to its right-hand side. By default 1e-10 in
            double and 1e-5 in single precision. A residual a hundred times as large is refused.
        max_rounds: approximate limit on the rounds that the linear system takes.
        through: an algorithm with the same solutions whose round is differentiated; by default the
            one that the algorithm itself names. If it differs from the run's algorithm, `result`
            has derivatives and the states have none.
        memory: rounds between restarts of GMRES, and the number of states it stores. The residual
            is checked at restarts: use more if restarts hinder convergence, fewer to save rounds.
        fixed_point_tol: how far a round may move any part of the states, relative to its norm. By
            default 1e-6 in double and 1e-4 in single precision. By default, reverse mode also
            estimates how far the loss is from its value at the fixed point, since a run that
            converges slowly moves little in a round: at most a thousandth of what the loss changes
            if states change by their norms.
        turning_tol: the fraction of a cotangent that may depend on rotations of bases.
        report: the argument whose derivative is a report on the linear system; see `Report`.
        throw: raise an error if there is no derivative: at a point that is not a fixed point, for a
            loss that depends on rotations of bases, and if the linear system is not solved. If
            False, and in a run across processes, such derivatives are NaN.
        direct: largest number of unknowns, the numbers in the states, for which the system's matrix
            is computed, by one round for each unknown, and factorized. This is faster than GMRES if
            many right-hand sides are solved at once under `vmap`.

    Raises:
        ValueError: if tolerances are not positive, numbers of rounds are not positive integers,
            `through` is not an algorithm, or `direct` is not a whole number.
        ImportError: if Lineax is missing.
    """
    check_positive("tol", tol, optional=True, single=True)
    check_count("max_rounds", max_rounds)
    check_count("memory", memory)
    check_whole("direct", direct, least=0)
    check_positive("fixed_point_tol", fixed_point_tol, optional=True, single=True)
    check_positive("turning_tol", turning_tol, single=True)
    check_flag("throw", throw)
    if through is not None:
        check_instance("through", through, Algorithm, "a jaxfed algorithm or None")
    if report is not None:
        check_instance("report", report, Report, "a jaxfed.adjoint.Report or None")
    require("lineax", extra="adjoint")
    settings = SolverSettings(
        None if tol is None else float(tol),
        max_rounds,
        memory,
        None if fixed_point_tol is None else float(fixed_point_tol),
        float(turning_tol),
        bool(throw),
        direct,
    )
    return _Implicit(through, report, settings)
