"""How many components views have in common, tested by permuting entities."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key

from jaxfed._checks import check_number, checked_key, refuse
from jaxfed.contract import check_count, check_factor
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.run.runner import call_compiled
from jaxfed.gcca.factors import factorize
from jaxfed.gcca.views import View, check_views
from jaxfed.linalg import matmul, top_eigenvectors
from jaxfed.linalg.eigen import top_eigenvalue


class CommonComponents(NamedTuple):
    """The components that views have in common beyond chance.

    Attributes:
        rank: number of leading components whose p-value is at most the level.
        p_values: of each component; they do not decrease.
        agreement: mean squared correlation of the views with each component, where earlier
            components are removed from each view.
        chance: the quantile `1 - level` of the same number over permutations.
    """

    rank: int
    p_values: Float[np.ndarray, " components"]
    agreement: Float[np.ndarray, " components"]
    chance: Float[np.ndarray, " components"]


class _Most(NamedTuple):
    """The number of components to test."""

    eigenvectors: int


def permutation_test(
    views: Clients,
    most: int,
    *,
    key: Key[Array, ""],
    permutations: int = 199,
    ridge: float | Array = 0.0,
    level: float = 0.05,
) -> CommonComponents:
    """Test how many components views have in common, for `jf.gcca.MaxVar`.

    If views have nothing in common, it does not matter which rows belong to the same entity. So
    each view's rows are permuted many times, and the largest agreement of the permuted views is
    compared with that of the views. For later components, the parts of each view that fit earlier
    ones are removed first. Rows must be exchangeable: not, for instance, in order of time. Views
    are centred.

    It pools all views, as `jf.gcca.optimum` does.

    Args:
        views: the clients, with dense views of all entities.
        most: largest number of components to test.
        key: random key.
        permutations: number of permutations; no p-value is below `1 / (1 + permutations)`.
        ridge: the algorithm's ridge; see `jf.gcca.cost`.
        level: chance of naming components as common if there are no more, in (0, 1).

    Returns:
        The number of components, and p-values.

    Raises:
        ValueError: if clients do not hold dense views of all entities, there are fewer than two
            views, or numbers are out of range.

    Source: Winkler, Renaud, Smith & Nichols (2020), Permutation inference for canonical correlation
    analysis, NeuroImage 220, for two views; here with the largest eigenvalue of the views' summed
    projections in place of Wilks' statistic.
    """
    check_count("most", most)
    check_views(views, most, "views", dense="the test needs", complete="the test needs")
    if len(views) < 2:
        raise refuse("views", "at least two", len(views))
    check_count("permutations", permutations)
    check_factor("ridge", ridge, single=True)
    check_number("level", level, "a number in (0, 1)", lambda x: (x > 0) & (x < 1))
    options = {"permutations": permutations, "ridge": ridge}
    drawn = _drawn(_Most(most), views, key=checked_key("key", key), **options)
    found, permuted = np.asarray(drawn[0], float), np.asarray(drawn[1], float)
    # Views that fit any representation agree as much when permuted, up to rounding.
    slack = np.finfo(drawn[0].dtype).eps * len(views) * min(views.data.shape)
    exceeded = np.sum(permuted >= found - slack, axis=0)
    p_values = np.maximum.accumulate((1 + exceeded) / (1 + permutations))
    chance = np.quantile(permuted, 1 - level, axis=0)
    return CommonComponents(int(np.sum(p_values <= level)), p_values, found, chance)


@in_enough_precision
def _drawn(
    wanted: _Most, views: Clients, *, key: Key[Array, ""], permutations: int, ridge: ArrayLike
) -> tuple[Float[Array, " most"], Float[Array, "permutations most"]]:
    arguments = key, views.data, views.ids, ridge, wanted.eigenvectors, permutations
    return call_compiled(_agreements, *arguments, static_argnums=(4, 5))


def _agreements(
    key: Key[Array, ""],
    views: View,
    ids: Int[Array, " views"],
    ridge: ArrayLike,
    most: int,
    permutations: int,
) -> tuple[Float[Array, " most"], Float[Array, "permutations most"]]:
    """Return each component's agreement in the views, and in permuted ones."""
    bases = jax.vmap(lambda view: _basis(view, ridge))(views)
    clients, entities, width = bases.shape
    together = bases.transpose(1, 0, 2).reshape(entities, clients * width)
    kept = min(most, clients * width)
    _, directions = top_eigenvectors(matmul(together.T, together), kept)
    # Of each view, orthonormal columns, the first k of which span what fits k components.
    spans = jax.vmap(_nested)(directions.T.reshape(-1, clients, width).transpose(1, 2, 0))
    # All rows sum to zero, and what fits a component is removed from all views. So rows are
    # permuted in coordinates of the rest alone, as where nuisance variables are removed: Huh &
    # Jhun (2001), Random permutation testing in multiple linear regression.
    ones = jnp.ones((entities, 1), together.dtype)
    nuisance = jnp.concatenate([ones, matmul(together, directions)], axis=1)

    def of_component(k):
        """The agreement with k components removed, and that of permuted rows."""
        rows = _reflected(together, nuisance, k + 1)
        rows = rows.reshape(entities, clients, width).transpose(1, 0, 2)
        removed = spans * (jnp.arange(kept) < k)
        rest = rows - matmul(matmul(rows, removed), removed.mT)
        first = jnp.arange(entities) <= k

        def agreement(draws):
            orders = jnp.argsort(jnp.where(first, -1, draws), axis=1)
            moved = jnp.take_along_axis(rest, orders[..., None], axis=1)
            moved = jnp.where(first[:, None], 0, moved).transpose(1, 0, 2).reshape(together.shape)
            return top_eigenvalue(matmul(moved.T, moved)) / clients

        def permuted(number):
            # By id, so that a view's permutations do not depend on the other views.
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), number))(ids)
            return agreement(
                jax.vmap(lambda key: jax.random.uniform(key, (entities,), jnp.float32))(keys)
            )

        in_order = jnp.broadcast_to(jnp.arange(entities), (clients, entities))
        return agreement(in_order), jax.lax.map(permuted, jnp.arange(permutations))

    found, permuted = jax.lax.map(of_component, jnp.arange(most))
    return found, permuted.T


def _reflected(
    rows: Float[Array, "entities width"],
    columns: Float[Array, "entities most"],
    k: Int[Array, ""],
) -> Float[Array, "entities width"]:
    """Return rows in an orthonormal basis that begins with that of the first k columns.

    Source: Golub & Van Loan, Matrix Computations, Section 5.2 (Householder QR).
    """
    places = jnp.arange(len(columns))

    def reflect(i, state):
        column = jnp.where(places >= i, state[0][:, i], 0)
        norm = jnp.linalg.norm(column) * jnp.where(column[i] < 0, -1, 1)
        normal = column.at[i].add(norm)
        length = jnp.linalg.norm(normal)
        normal = normal / jnp.where(length > 0, length, 1)
        return jax.tree.map(lambda x: x - 2 * jnp.outer(normal, matmul(normal, x)), state)

    return jax.lax.fori_loop(0, k, reflect, (columns, rows))[1]


def _basis(view: View, ridge: ArrayLike) -> Float[Array, "entities k"]:
    """Return ONE view's orthonormal directions, each times the root of what a ridge leaves."""
    values = view.values - jnp.mean(view.values, axis=0)
    factors = factorize(eqx.tree_at(lambda x: x.values, view, values), min(view.shape))
    singular, penalty = factors.singular, jnp.sqrt(view.shape[0] * jnp.asarray(ridge))
    # In units in which no square over- or underflows.
    unit = jnp.maximum(jnp.max(singular), penalty.astype(singular.dtype))
    along = singular / jnp.where(unit > 0, unit, 1)
    against = penalty.astype(singular.dtype) / jnp.where(unit > 0, unit, 1)
    norm = jnp.hypot(along, against)
    return factors.left * (along / jnp.where(norm > 0, norm, 1))


def _nested(fits: Float[Array, "k most"]) -> Float[Array, "k most"]:
    """Return orthonormal columns, whose first k span the first k; dependent ones are zero."""
    rounding = jnp.finfo(fits.dtype).eps * fits.size

    def step(i, basis):
        rest = fits[:, i]
        for _ in range(2):  # rounding in the first pass brings parts of the basis back
            rest = rest - matmul(basis, matmul(basis.T, rest))
        norm = jnp.linalg.norm(rest)
        return basis.at[:, i].set(jnp.where(norm > rounding, rest / norm, 0))

    return jax.lax.fori_loop(0, fits.shape[1], step, jnp.zeros_like(fits))
