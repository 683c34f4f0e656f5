"""Solves a linear system given by its products, and raises errors from compiled programs."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._optional import require
from jaxfed.linalg.sums import unit_of

LOG = logging.getLogger("jaxfed.adjoint")
UNSOLVED = (
    "adjoint: the linear system of an implicit derivative could not be solved in max_rounds "
    "rounds; increase max_rounds or memory, or pass another algorithm as through="
)


class SolverSettings(NamedTuple):
    """Tolerances and limits; a tolerance of None follows from the precision."""

    tol: float | None
    max_rounds: int
    memory: int
    fixed_point_tol: float | None
    turning_tol: float
    throw: bool
    direct: int = 0


class Solved(NamedTuple):
    """A solution, the rounds it took, and the residual relative to the right-hand side."""

    solution: PyTree
    rounds: Int[Array, ""]
    residual: Float[Array, ""]


def solved(product: Callable[[PyTree], PyTree], right: PyTree, settings: SolverSettings) -> Solved:
    """Solve `product(x) = right` by factorizing the matrix if it is small enough, or by GMRES."""
    tol = or_precision(settings.tol, right, 1e-5, 1e-10)
    # In a unit of its own, since squares of a small loss's derivatives vanish, and GMRES has
    # absolute thresholds.
    unit = unit_of(*jax.tree.leaves(right))
    right = jax.tree.map(lambda x: x / unit.astype(x.dtype), right)
    unknowns = sum(x.size for x in jax.tree.leaves(right))
    solve = _by_matrix if unknowns <= settings.direct else _by_products
    found = solve(product, right, tol, settings)
    # Negate, so that NaN counts as wrong.
    wrong = ~(found.residual <= 100 * tol)
    solution = jax.tree.map(lambda x: x * unit.astype(x.dtype), found.solution)
    return found._replace(solution=nan_where(solution, wrong, settings.throw, UNSOLVED))


def _by_matrix(
    product: Callable[[PyTree], PyTree], right: PyTree, tol: float, settings: SolverSettings
) -> Solved:
    """Solve with the matrix, which is the same for all right-hand sides of a `vmap`."""
    del tol, settings
    flat, unflat = ravel_pytree(right)

    def column(unit: Float[Array, " n"]) -> Float[Array, " n"]:
        return ravel_pytree(product(unflat(unit)))[0]

    matrix = jax.vmap(column, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))
    found = jsp.linalg.lu_solve(jsp.linalg.lu_factor(matrix), flat)
    residual = jnp.linalg.norm(flat - matrix @ found) / _scale(flat)
    return Solved(unflat(found), jnp.asarray(flat.size, jnp.int32), residual)


def _scale(right: PyTree) -> Float[Array, ""]:
    size = optax.tree.norm(right)
    # A right-hand side of zero has the solution zero, with residual zero.
    return jnp.where(size > 0, size, 1)


def _by_products(
    product: Callable[[PyTree], PyTree], right: PyTree, tol: float, settings: SolverSettings
) -> Solved:
    """Solve by GMRES, with one product for each step.

    It restarts like GMRES(memory); between restarts, the true residual decides when to stop.
    """
    lineax = require("lineax", extra="adjoint")
    scale = _scale(right)
    operator = lineax.FunctionLinearOperator(product, jax.eval_shape(lambda: right))
    length = min(settings.memory, sum(x.size for x in jax.tree.leaves(right)))
    # Lineax's tolerances are out of reach, so that it always does one full cycle: `unfinished`
    # decides by the true residual. Two steps, of which it spends the first on that residual.
    solver = lineax.GMRES(rtol=0.0, atol=1e-30, norm=optax.tree.norm, restart=length, max_steps=2)

    def unfinished(carry):
        found, falling = carry
        return (found.residual > tol) & (found.rounds < settings.max_rounds) & falling

    def cycle(carry):
        before, _ = carry
        options = {"y0": before.solution}
        new = lineax.linear_solve(operator, right, solver, options=options, throw=False).value
        residual = optax.tree.norm(optax.tree.sub(right, product(new))) / scale
        better = residual < before.residual
        solution = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, before.solution)
        # GMRES also computes residuals, besides its own products, and so does the line above.
        rounds = before.rounds + length + 3
        # Stop after a cycle that leaves more: two such cycles would not halve the residual.
        falling = better & (residual < 0.7 * before.residual)
        return Solved(solution, rounds, jnp.minimum(residual, before.residual)), falling

    start = optax.tree.zeros_like(right)
    first = Solved(start, jnp.zeros((), jnp.int32), optax.tree.norm(right) / scale)
    return jax.lax.while_loop(unfinished, cycle, (first, jnp.ones((), bool)))[0]


def nan_where(tree: PyTree, wrong: Bool[Array, ""], throw: bool, message: str) -> PyTree:
    """NaN in place of wrong results, and an error when they are computed."""

    def refuse(_):
        # Log it, since an error raised from a compiled program is buried in its traceback.
        LOG.error(message)
        raise ValueError(message)

    if throw:
        # The condition must not be batched: under `jax.vmap` a batched one runs both branches, and
        # would raise the error for sound problems too. Add its result, since a callback whose
        # result is unused is removed.
        wrong |= jax.lax.cond(
            _anywhere(wrong),
            lambda wrong: jax.pure_callback(refuse, wrong, wrong, vmap_method="broadcast_all"),
            jnp.zeros_like,
            wrong,
        )
    return jax.tree.map(lambda x: jnp.where(wrong, jnp.nan, x), tree)


@jax.custom_batching.custom_vmap
def _anywhere(wrong: Bool[Array, ""]) -> Bool[Array, ""]:
    """Identity for one problem; for a batch, whether any is wrong, for all problems alike."""
    return wrong


@_anywhere.def_vmap
def _(size, batched, wrong):
    del size, batched
    return _anywhere(jnp.any(wrong)), False


def or_precision(given: float | None, tree: PyTree, single: float, double: float) -> float:
    """The given tolerance, or the default for the precision of a tree's numbers."""
    if given is not None:
        return given
    types = {x.dtype for x in jax.tree.leaves(tree)}
    return double if types <= {jnp.dtype("float64")} else single
