"""Metrics of GCCA: cost and optimum, distances, accuracy, and scores of new entities."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed._checks import checked_array, refuse
from jaxfed.contract import check_count, check_factor
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like, replace_names
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.common.printing import is_known
from jaxfed.core.run.result import Fitted, ids_of, not_learned, result_of
from jaxfed.gcca.factors import factorize
from jaxfed.gcca.maxvar import MaxVar
from jaxfed.gcca.shares import divided, root_of, seen_rows
from jaxfed.gcca.views import check_views
from jaxfed.linalg import matmul, orthonormalize, top_eigenvectors
from jaxfed.linalg.division import ratio
from jaxfed.linalg.svd import singular_values


def cost(
    views: Clients,
    shared: Float[Array, "entities rank"],
    local: Float[Array, "clients features rank"],
    *,
    ridge: float | Array = 0.0,
) -> Float[Array, ""]:
    r"""Compute the objective of MAX-VAR GCCA, `1/2 sum_j ||X_j Q_j / sqrt(L) - G||_F^2`.

    Each view counts only the entities that it has seen.

    As a metric of a run: `metrics=lambda result: {"cost": jf.gcca.cost(views, *result)}`.

    Args:
        views: the clients.
        shared: the common representation `G`.
        local: the views' maps `Q_j`.
        ridge: the algorithm's ridge; adds `ridge / 2 sum_j ||Q_j||_F^2`.

    Returns:
        The cost, a scalar.

    Raises:
        ValueError: if clients do not hold views or shapes do not fit.

    Source: Shrestha & Fu (2023), equation (7), with the factor 1/2 of their programs.
    """
    check_views(views, 1, "views")
    clients, (entities, features) = len(views), views.data.shape
    shared = checked_array("shared", shared, f"{entities} rank")
    local = checked_array("local", local, f"{clients} {features} {shared.shape[1]}")
    check_factor("ridge", ridge, single=True)
    return _cost(views, shared, local, ridge)


@jax.jit
def _cost(views: Clients, shared: Array, local: Array, ridge: float | Array) -> Float[Array, ""]:
    misfits = _scores(views, local, len(shared)) - shared
    if views.data.observed is not None:
        misfits = jax.vmap(seen_rows)(views.data.observed, misfits)
    return (jnp.sum(misfits**2) + jnp.sum(ridge * local * local)) / 2


def transform(fitted: Fitted, views: Clients) -> Float[Array, "views entities rank"]:
    r"""Compute each view's scores of entities, seen in training or not.

    The maps `Q_j` of a linear method turn view j into `X_j Q_j / sqrt(L)`, where L is the number
    of entities that they were learned from. The mean over the views is the common representation
    of new entities. Rows of entities that a view has not seen are NaN; take the mean with
    `jnp.nanmean` to leave them out.

    Args:
        fitted: a solution of `MaxVar` or `MVLSA`, its result, a `FederatedGCCA`, or what
            `jaxfed.load` returned.
        views: the same views, or some of them, centred in the same way, of any entities; matched
            by name, without names by id, and by position where `fitted` has neither.

    Raises:
        ValueError: if `fitted` is not a result of these, clients do not hold views, or shapes do
            not fit.

    Source: Shrestha & Fu (2023), equation (7).
    """
    result = result_of(fitted, "MaxVar or MVLSA")
    if [getattr(part, "ndim", None) for part in result] != [2, 3]:
        raise not_learned(fitted, "MaxVar or MVLSA")
    check_views(views, 1, "views")
    # By name, but for the entities, which may be others.
    views = like(replace_names(views, views.names._replace(entities=None)), fitted)
    local, ids = result.local, ids_of(fitted)
    if ids is not None and is_known(views.ids):
        wanted = np.asarray(views.ids)
        if not np.isin(wanted, ids).all():
            raise refuse("views", f"views of the run, whose ids are {ids.tolist()}", wanted)
        places = [ids.tolist().index(number) for number in wanted.tolist()]
        local = local[np.asarray(places)]
    local = checked_array("fitted", local, f"{len(views)} {views.data.shape[1]} rank")
    scores = _scores(views, local, jnp.shape(result.shared)[0])
    observed = views.data.observed
    return scores if observed is None else jnp.where(observed[..., None] > 0, scores, jnp.nan)


def _scores(views: Clients, local: Array, entities: int) -> Float[Array, "views entities rank"]:
    return jax.vmap(lambda view, weights: view.mv(weights))(views.data, local) / entities**0.5


class Optimum(NamedTuple):
    """The solution of MAX-VAR GCCA.

    Attributes:
        cost: the minimum cost.
        shared: a common representation that attains it.
        local: the corresponding maps.
        eigenvalues: all nonzero eigenvalues of `sum_j X_j X_j^+` (with a ridge, of its regularized
            form), descending, at most the number of views. The representation is unique up to a
            rotation if there is a gap after the first `rank`.
    """

    cost: Float[Array, ""]
    shared: Float[Array, "entities rank"]
    local: Float[Array, "clients features rank"]
    eigenvalues: Float[Array, " total"]


def optimum(views: Clients, rank: int, *, ridge: float | Array = 0.0) -> Optimum:
    """Compute the closed-form solution: top eigenvectors of the summed projections onto the views.

    They are the left singular vectors of the views' orthonormal bases side by side, which pools all
    views. If clients have seen different entities, both are scaled by the shares of clients that
    have seen each entity (see `MaxVar`).

    Args:
        views: the clients.
        rank: number of components.
        ridge: the algorithm's ridge; see `cost`.

    Returns:
        The optimum. Directions of a view below rounding error (in its precision) are ignored; use
        double precision for ill-conditioned views.

    Raises:
        ValueError: if clients hold no views or sparse ones, or the rank exceeds their entities or
            features.

    Source: Shrestha & Fu (2023), Section II; van de Velden & Takane (2012) for missing rows.
    """
    check_count("rank", rank)
    check_views(views, rank, "views", dense="the optimum needs")
    check_factor("ridge", ridge, single=True)
    clients, (entities, features) = len(views), views.data.shape
    if rank > clients * min(entities, features):
        raise ValueError(f"rank: {rank} components from {clients} views of {features} features")
    return _optimum(MaxVar(rank), views, ridge=ridge)


@in_enough_precision
def _optimum(algorithm: MaxVar, views: Clients, *, ridge: float | Array) -> Optimum:
    return _compiled_optimum(views, algorithm.rank, ridge)


@partial(jax.jit, static_argnames="rank")
def _compiled_optimum(views: Clients, rank: int, ridge: float | Array) -> Optimum:
    clients, (entities, features) = len(views), views.data.shape
    width = min(entities, features)
    factors = jax.vmap(lambda view: factorize(view, width))(views.data)
    # A ridge shrinks each direction of a view by s² / (s² + L ridge) in its projection.
    # In units in which no square over- or underflows, not even in derivatives.
    unit = jnp.maximum(jnp.max(factors.singular, axis=1), jnp.sqrt(entities * ridge))
    unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1))[:, None]
    squares = (factors.singular / unit) ** 2
    penalty = ratio(ratio(jnp.asarray(entities * ridge, unit.dtype), unit), unit)
    kept = squares / jnp.where(squares + penalty > 0, squares + penalty, 1)
    bases = factors.left * jnp.where(kept > 0, jnp.sqrt(jnp.where(kept > 0, kept, 1)), 0)[:, None]
    observed = views.data.observed
    root = None if observed is None else root_of(observed.mean(0))
    together = divided(bases.transpose(1, 0, 2).reshape(entities, clients * width), root)
    # Orthonormal bases are well conditioned, so the smaller Gram matrix loses nothing.
    wide = clients * width >= entities
    gram = matmul(together, together.T) if wide else matmul(together.T, together)
    values, _ = top_eigenvectors(gram, len(gram))
    _, shared = top_eigenvectors(gram, rank)
    if not wide:
        shared = orthonormalize(matmul(together, shared))
    shared = divided(shared, root)
    local = jax.vmap(lambda view: view.solve(shared, ridge))(factors)
    # A sum of squares: clients * rank minus the eigenvalues would cancel for a small cost.
    inside = factors.left.mT @ shared
    outside = shared - factors.left @ inside
    if observed is not None:
        outside = jax.vmap(seen_rows)(observed, outside)
    shrunk = (1 - kept)[..., None] * inside**2
    return Optimum((jnp.sum(outside**2) + jnp.sum(shrunk)) / 2, shared, local, values)


def subspace_distance(
    shared: Float[Array, "entities rank"], other: Float[Array, "entities rank"]
) -> Float[Array, ""]:
    """Compute the sine of the largest angle between the spans of two orthonormal bases.

    It says little if the optimum has no clear gap after the leading eigenvalues: the span can be
    far off although the cost is nearly minimal.

    Args:
        shared: a common representation.
        other: another one, such as that of `optimum`.

    Returns:
        The distance, from 0 to 1.

    Raises:
        ValueError: if the shapes differ.

    Source: Golub & Van Loan, Matrix Computations; Shrestha & Fu (2023), Section IV-B.
    """
    shared = checked_array("shared", shared, "entities rank")
    other = checked_array("other", other, " ".join(map(str, shared.shape)))
    return _sine(shared, other)


@jax.jit
def _sine(shared: Array, other: Array) -> Float[Array, ""]:
    return singular_values(shared - other @ (other.T @ shared))[0]


def alignment_accuracy(scores: Float[Array, "views entities rank"]) -> Float[Array, ""]:
    """Compute how often an entity's nearest neighbour in another view is itself.

    Args:
        scores: each view's representation of the same entities, `X_j Q_j`.

    Returns:
        The share of entities of view i whose nearest neighbour in view j is the same entity, over
        all entities and all pairs of views `i < j`.

    Raises:
        ValueError: if there are fewer than two views.

    Source: Shrestha & Fu (2023), Section V-A5.
    """
    scores = checked_array("scores", scores, "views entities rank")
    if len(scores) < 2:
        raise ValueError(f"scores: wanted those of two views at least, got {scores.shape}")
    return _alignment_accuracy(scores)


# A loop outside of `jit` would be compiled at every call.
@jax.jit
def _alignment_accuracy(scores: Float[Array, "views entities rank"]) -> Float[Array, ""]:
    # Distances do not change, but keep their digits.
    scores = scores - jnp.mean(scores, axis=(0, 1))
    first, second = np.triu_indices(len(scores), 1)
    squares = jnp.sum(scores**2, axis=-1)

    def matched(pair):
        i, j = pair
        # The squared length of scores[i] is the same for all candidates.
        distances = squares[j] - 2 * scores[i] @ scores[j].T
        return jnp.mean(jnp.argmin(distances, axis=1) == jnp.arange(scores.shape[1]))

    return jnp.mean(jax.lax.map(matched, (jnp.asarray(first), jnp.asarray(second))))
