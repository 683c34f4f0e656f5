"""Derivatives at a fixed point of the round: the adjoint of a federated round is a federated round.

The result of a converged run solves z = T(z, θ), where T is a round, z = (server, locals) and θ is
everything it depends on. So dz = ∂T/∂z dz + ∂T/∂θ dθ: a linear system whose products are rounds,
forwards or backwards, with one sum over clients each. It needs none of the rounds that led to z.

Source: Christianson (1994), Reverse accumulation and attractive fixed points; Blondel et al.
(2022), Efficient and modular implicit differentiation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.backends.one_device import in_blocks, vmap
from jaxfed.core.common.buckets import first_of
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.bases import Bases, vertical_part
from jaxfed.core.contract.reduction import contributions, plain
from jaxfed.core.derivatives.cotangent import with_hook
from jaxfed.core.derivatives.linear_system import SolverSettings, nan_where, or_precision, solved
from jaxfed.core.round.problem import Problem, State
from jaxfed.core.round.rounds import begin, one_round, result_of
from jaxfed.core.round.whole import WHOLE, prepared
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire import channel
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg.derivatives import DECOMPOSITION, with_rule
from jaxfed.linalg.sums import norm_of, scaled_norm

LOSSLESS = channel.lossless()
MOVES = (
    "adjoint: wanted a fixed point of the round for an implicit derivative, got a point that a "
    "round still moves; run more rounds, use a smaller tol or an algorithm that converges faster "
    "(PerPCA with its default solver), or pass jaxfed.adjoint.unrolled()"
)
TURNS = (
    "adjoint: wanted a loss that depends on subspaces alone, got one that depends on how their "
    "bases are turned, by which a solution has no derivative"
)
# How far the loss may still move, relative to what it moves with the whole point: a run that
# converges slowly moves little in a round, and is far from its fixed point all the same.
LEFT = 1e-3
TURNING = 1e-3  # the fraction of a cotangent that may depend on rotations of bases
RunStates = tuple[PyTree, PyTree]  # the server's state, and the clients' along a leading axis


def _real(x: ArrayLike) -> Array:
    return jnp.asarray(x, float)


class Report(eqx.Module):
    """What solving for a derivative took, returned as the gradient with respect to this argument.

    A backward pass can only return derivatives. To get a report, make `Report()` an argument of the
    differentiated function and pass it to `implicit(report=report)`: the gradient with respect to
    it is the report. Without a backward pass, all entries are zero.

    Attributes:
        rounds: adjoint rounds of all solves together.
        residual: residual of the linear system, relative to its right-hand side.
        turning: the fraction of the cotangent that depends on rotations of bases, which no subspace
            determines.
    """

    rounds: Float[Array, ""] = eqx.field(converter=_real, default=0.0)
    residual: Float[Array, ""] = eqx.field(converter=_real, default=0.0)
    turning: Float[Array, ""] = eqx.field(converter=_real, default=0.0)


class _Round(eqx.Module):
    """A round as a map of the numbers of the states that it changes."""

    problem: Problem
    template: State  # the rest of the state
    kept: RunStates  # parts that no round changes or that have no derivative; None elsewhere

    def __call__(self, point: RunStates) -> RunStates:
        server, local = eqx.combine(point, self.kept)
        # Make the downlink anew: a map of the states must not start from the template's, which is
        # that of the initial state. Without compression, it is what clients receive.
        downlink = self.problem.algorithm.downlink(server)
        link = channel.Link(LOSSLESS, self.template.downlink.sender, downlink)
        state = replace(self.template, server=server, local=local, downlink=link)
        state, _ = one_round(self.problem, state, WHOLE)
        return _where(point, (state.server, state.local))


def differentiable(
    problem: Problem,
    warm_start: Personalized | None,
    solution: Solution,
    through: Algorithm,
    report: Report,
    settings: SolverSettings,
) -> Solution:
    """A solution with the derivatives of a fixed point, with respect to everything in the problem.

    Args:
        problem: the unprepared problem, with its derivatives.
        warm_start: the warm start, if any.
        solution: the result of the run, without derivatives.
        through: the algorithm whose round is differentiated. If it is the problem's own, the states
            and the result have derivatives; otherwise only the result.
        report: the argument whose gradient becomes the report.
        settings: tolerances.
    """
    own, backend, data = through is problem.algorithm, problem.backend, problem.clients.data
    # `check` admits only channels that settle: messages that no longer change arrive without loss,
    # so the round at a fixed point is that of a lossless channel.
    problem = replace(problem, algorithm=through, wire=Wire(LOSSLESS, LOSSLESS))
    # Algorithms prepare data for a number of rounds; here it is that of the products with them.
    problem = prepared(problem, settings.max_rounds)
    template, _ = begin(problem, warm_start if own else solution.result, WHOLE)
    problem = replace(problem, backend=in_blocks(backend, data, DECOMPOSITION))
    if own:
        reached = solution.state.server, solution.state.local
    else:
        # An initial state may lack what a round computes.
        state, _ = one_round(*jax.lax.stop_gradient((problem, template)), WHOLE)
        reached = state.server, state.local
    free = _changing(problem, template)
    point = jax.tree.map(lambda x, free: x if free else None, reached, free)

    # What no round changes keeps its initial value and derivatives.
    def unchanged(first, last, free):
        return None if free else first if eqx.is_inexact_array(last) else last

    kept = jax.tree.map(unchanged, (template.server, template.local), reached, free)
    # At round 0 in every evaluation, so with the same random numbers: a fixed point is one of a
    # deterministic map.
    rest = jax.lax.stop_gradient(replace(template, server=None, local=None))
    point = _fixed_point(
        jax.lax.stop_gradient(point), _Round(problem, rest, kept), report, settings
    )

    numbers, others = eqx.partition(eqx.combine(point, kept), eqx.is_inexact_array)
    check = partial(_check_turning, _bases_in(through), settings)
    # The report rides along: its cotangent is the only place where a backward pass can leave a
    # number.
    numbers, _ = with_hook((numbers, report.turning), check)
    server, local = eqx.combine(numbers, others)
    final = replace(template, server=server, local=local)
    result = result_of(replace(problem, backend=in_blocks(backend, data)), final, WHOLE)
    if not own:
        return replace(solution, result=result)
    return replace(
        solution,
        result=result,
        server=server,
        local=problem.cut(local),
        state=replace(solution.state, server=server, local=local),
    )


def _where(mask: PyTree, tree: PyTree) -> PyTree:
    """The leaves of a tree where the mask has leaves, None elsewhere."""
    return jax.tree.map(
        lambda there, x: None if there is None else x, mask, tree, is_leaf=lambda x: x is None
    )


def _changing(problem: Problem, state: State) -> RunStates:
    """For each part of the states, whether it has a derivative and a round may change it."""
    algorithm = problem.algorithm.at_round(state.round + 1)
    clients, key = problem.clients, problem.key
    downlink = state.downlink.receiver
    own = jax.eval_shape(first_of, (clients.data, state.local))

    def work(downlink, own):
        data, local, client_id, weight = own
        uplink = contract.client_step(algorithm, key, downlink, local, data)[0]
        return contributions(uplink, weight, client_id), None

    def received(clients, local, downlink):
        everybody = clients.data, local, clients.ids, clients.weights
        return plain(collect(vmap(), work, downlink, everybody, problem.rows)[0])

    def server_after(server, uplink):
        return algorithm.server_step(key, server, uplink)[0]

    message = jax.eval_shape(received, clients, state.local, downlink)
    server = _changed(server_after, state.server, message)

    def local_after(local, data, downlink):
        return algorithm.client_step(key, downlink, local, data)[1]

    return server, _changed(local_after, own[1], own[0], downlink)


def _changed(function: Callable[..., PyTree], tree: PyTree, *others: PyTree) -> PyTree:
    """Which inexact leaves of its first argument a function changes."""
    program = jax.make_jaxpr(function)(tree, *others).jaxpr
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, program.invars[: len(leaves)], program.outvars, strict=True)
    # What a function returns untouched is one and the same variable of its program.
    return jax.tree.unflatten(
        structure, [jnp.issubdtype(x.dtype, jnp.inexact) and a is not b for x, a, b in pairs]
    )


# --- the bases -----------------------------------------------------------------------------------


def _bases_in(algorithm: Algorithm) -> Callable[[RunStates], Bases]:
    """The function that selects the bases in the states; it holds no arrays."""
    bare = eqx.filter(algorithm, eqx.is_array, inverse=True)

    def picked(states: RunStates) -> Bases:
        server, local = states
        if not jax.tree.leaves(local):
            return bare.bases(server, local)

        def of_one(own: PyTree) -> tuple:
            return tuple(bare.bases(server, own))

        # The shared bases are the server's, the same for all clients.
        return Bases(*jax.vmap(of_one, out_axes=(None, 0, 0))(local))

    return picked


def _check_turning(
    select: Callable[[RunStates], Bases], settings: SolverSettings, value: PyTree, cotangent: PyTree
) -> PyTree:
    """Refuse a cotangent that depends on rotations of bases; pass on the fraction that does."""
    (states, _), (of_states, of_turning) = value, cotangent
    known, seen = jax.lax.stop_gradient((states, of_states))
    size = norm_of(jax.tree.leaves(seen))
    turned = norm_of(jax.tree.leaves(vertical_part(select, known)(seen)))
    share = turned / jnp.where(size > 0, size, 1)
    of_states = nan_where(of_states, share > settings.turning_tol, settings.throw, TURNS)
    return of_states, of_turning + share.astype(of_turning.dtype)


# --- the linear system ---------------------------------------------------------------------------


def _fixed_point(
    point: RunStates, function: _Round, report: Report, settings: SolverSettings
) -> RunStates:
    """The point, with the derivatives of the fixed point."""
    arrays, others = eqx.partition((function, report), eqx.is_array)

    def rule(point, arrays, changes):
        return _linearized(point, eqx.combine(arrays, others), changes, settings)

    return with_rule(point, arrays, rule)


def _linearized(
    point: RunStates,
    by: tuple[_Round, Report],
    changes: tuple[PyTree, PyTree],
    settings: SolverSettings,
) -> tuple[RunStates, RunStates]:
    """The fixed point and its tangent."""
    (function, report), (change, report_change) = by, changes
    # Give it a derivative itself, for higher derivatives.
    point = _fixed_point(point, function, report, settings)
    # Linearize once, so that products of the linear system do not run the round again.
    image, derivative = jax.linearize(function, point)
    select, others = _bases_in(function.problem.algorithm), optax.tree.zeros_like(function.kept)
    vertical = vertical_part(lambda x: select(eqx.combine(x, others)), point)

    def horizontal(vector):
        return optax.tree.sub(vector, vertical(vector))

    moved_by = jax.lax.stop_gradient(horizontal(optax.tree.sub(image, point)))
    gap = _largest_ratio(moved_by, jax.lax.stop_gradient(point))
    # Do not use `>`, with which NaN would pass for a fixed point.
    moves = ~(gap <= or_precision(settings.fixed_point_tol, point, 1e-4, 1e-6))
    sure = nan_where(jnp.ones(()), moves, settings.throw, MOVES)

    # Use only active tangents: those of the data, say, would be zeros as large as the data.
    active = _where(change, function)
    right = optax.tree.zeros_like(point)
    if jax.tree.leaves(active):
        moved = jax.jvp(lambda x: eqx.combine(x, function)(point), (active,), (change,))[1]
        right = horizontal(moved)
    report_change = eqx.combine(report_change, optax.tree.zeros_like(report))

    # The report is a second block of the system. Its own equation is trivial, and its adjoint's
    # solution is the report.
    def product(pair):
        vector, reported = pair
        # Along rotations of bases this is the identity, where I - ∂T would be singular.
        return optax.tree.sub(vector, horizontal(derivative(horizontal(vector)))), reported

    def solve(product, pair):
        return solved(lambda x: product((x, pair[1]))[0], pair[0], settings)

    def forward(product, pair):
        return solve(product, pair).solution, pair[1]

    def backward(product, pair):
        found, like = solve(product, pair), pair[1]
        left = _loss_left(found.solution, moved_by, pair[0], jax.lax.stop_gradient(point))
        wrong = ~(left <= LEFT) if settings.fixed_point_tol is None else jnp.zeros((), bool)
        solution = nan_where(found.solution, wrong, settings.throw, MOVES)
        rounds, residual = found.rounds.astype(like.rounds.dtype), found.residual
        turning = jnp.zeros_like(like.turning)
        return solution, Report(rounds, residual.astype(like.residual.dtype), turning)

    right = _coupled((right, report_change))
    # Couple them again for the cotangents, if the backward pass is differentiated backwards.
    found, _ = _coupled(jax.lax.custom_linear_solve(product, right, forward, backward))
    return point, jax.tree.map(lambda x: sure.astype(x.dtype) * x, found)


def _loss_left(
    solution: PyTree, moved_by: PyTree, cotangent: PyTree, point: PyTree
) -> Float[Array, ""]:
    """How far the loss may move on the way to the fixed point, relative to moving by its norm.

    A Newton step to the fixed point solves the linear system for what a round moves. So it moves
    the loss by the product of that with the solution for the loss's cotangent.
    """

    def product(*trees: PyTree) -> Float[Array, ""]:
        sizes = [[scaled_norm(x) for x in jax.tree.leaves(tree)] for tree in trees]
        return sum((x * y for x, y in zip(*sizes, strict=True)), jnp.zeros(()))

    size = product(cotangent, point)
    return product(solution, moved_by) / jnp.where(size > 0, size, 1)


def _coupled(tree: PyTree) -> PyTree:
    """The same tree, with each part formally depending on the others as one right-hand side."""
    total = jnp.asarray(sum(jnp.sum(x).astype(float) for x in jax.tree.leaves(tree)))
    # Do not use zero times the total, which is NaN if one of them is.
    nothing = jax.lax.select(jnp.zeros((), bool), total, jnp.zeros_like(total))
    return jax.tree.map(lambda x: x + nothing.astype(x.dtype), tree)


def _largest_ratio(tree: PyTree, other: PyTree) -> Float[Array, ""]:
    """The largest norm of an array relative to that of its counterpart."""

    def ratio(x, y):
        size = scaled_norm(y)
        return scaled_norm(x) / jnp.where(size > 0, size, 1)

    ratios = jax.tree.leaves(jax.tree.map(ratio, tree, other))
    return jnp.max(jnp.stack([jnp.zeros(()), *ratios]))
