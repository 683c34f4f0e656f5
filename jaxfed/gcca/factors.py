"""Truncated singular value decompositions of views, and least-squares maps from them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.run.runner import call_compiled
from jaxfed.gcca.views import FactoredView, Scores, SparseView, View, Weights
from jaxfed.linalg import matmul, svd, transposed_product
from jaxfed.linalg.division import ratio
from jaxfed.linalg.svd import leading_triples, not_rounding


class Factors(NamedTuple):
    """One view's truncated singular value decomposition; rounding errors are set to zero."""

    left: Float[Array, "entities k"]
    singular: Float[Array, " k"]
    right: Float[Array, "features k"]
    observed: Float[Array, " entities"] | None = None

    def solve(self, scores: Scores, ridge: Float[Array, ""] | float = 0.0) -> Weights:
        r"""Return the least-squares map, of least \(\|X Q / \sqrt L - Y\|^2 + ridge \|Q\|^2\)."""
        length, kept = len(self.left), self.singular > 0
        ridge = jnp.asarray(ridge, self.singular.dtype)
        # In units in which no square over- or underflows, not even in derivatives.
        unit = jnp.maximum(jnp.max(self.singular), jnp.sqrt(ridge * length))
        unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1))
        singular = self.singular / unit
        # Two ratios, since compilers turn `/ unit / unit` into a division by a vanishing square.
        squares = singular**2 + ratio(ratio(ridge * length, unit), unit)
        shrunk = jnp.where(kept, singular / jnp.where(kept, squares, 1), 0) / unit
        along = shrunk[:, None] * transposed_product(self.left, scores)
        return matmul(self.right, along) * length**0.5

    def mv(self, weights: Weights) -> Scores:
        """Return the product `X Q`."""
        return matmul(self.left, self.singular[:, None] * matmul(self.right.T, weights))


class _Whole(NamedTuple):
    """A decomposition that is not truncated."""

    eigenvectors: int


def factored(clients: Clients) -> Clients:
    """Compute all views' singular value decompositions, for several runs on them."""
    return _decomposed(_Whole(min(clients.data.shape)), clients)


@in_enough_precision
def _decomposed(whole: _Whole, clients: Clients) -> Clients:
    data = call_compiled(_factored, clients.data)
    return Clients(data, clients.ids, clients.weights)


def _factored(data: View) -> FactoredView:
    def of_one(view: View) -> FactoredView:
        return FactoredView(view.mask, *factorize(view, min(view.shape)))

    return jax.vmap(of_one)(data)


def factorize(view: View | FactoredView | SparseView, rank: int) -> Factors:
    """Compute the leading singular triples of ONE view.

    Sparse views use subspace iteration with ten more columns than triples (Halko, Martinsson &
    Tropp 2011). The result is exact if the view has no more directions than columns. Otherwise it
    is more accurate the faster the singular values decay.
    """
    if isinstance(view, FactoredView):
        left, right = view.left[:, :rank], view.right[:, :rank]
        return Factors(left, view.singular[:rank], right, view.observed)
    if isinstance(view, View):
        left, singular, right = leading_triples(view.with_zeros().values, rank)
    else:
        width = min(rank + 10, *view.shape)
        # A fixed key, because a view's factors should not differ between runs.
        start = jax.random.normal(jax.random.key(0), (view.shape[1], width), view.values.dtype)

        def iterate(_, basis):
            return jnp.linalg.qr(view.rmv(jnp.linalg.qr(view.mv(basis))[0]))[0]

        basis = jax.lax.fori_loop(0, 8, iterate, start * view.mask[:, None])
        left, singular, right = svd(view.mv(basis))
        right = matmul(right, basis.T)
    left, singular, right = left[:, :rank], singular[:rank], right[:rank].T
    kept = not_rounding(singular, view.shape)
    return Factors(left * kept, singular * kept, right * kept, view.observed)
