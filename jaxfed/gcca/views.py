"""Views: clients that hold the same entities, each with features of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental.sparse import BCOO
from jaxtyping import Array, ArrayLike, Float, Int, Key

from jaxfed._checks import check_list
from jaxfed.contract import ClientsLike, Personalized, check_flag
from jaxfed.core.clients.checks import check_tables, checked_array
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Ragged, padded, widened
from jaxfed.linalg import matmul, svd, transposed_product
from jaxfed.linalg.division import ratio
from jaxfed.linalg.sparse import checked_rows
from jaxfed.linalg.svd import not_rounding

RandomKey = Key[Array, ""]
Start = Personalized | None  # the warm start
Scores = Float[Array, "entities rank"]
Weights = Float[Array, "features rank"]

MATRICES = "(entities, features) matrices, one per view"


@final
class View(Ragged):
    """One client's view: entities as rows, padded with zero columns up to the widest view.

    With a leading client axis on both fields it holds all views.
    """

    values: Float[Array, "*clients entities features"]
    count: Float[Array, "*clients"]  # of features

    @property
    def shape(self) -> tuple[int, int]:
        """Entities, and features of the widest view."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def mask(self) -> Float[Array, "*clients features"]:
        """1 for a real feature, 0 for padding."""
        return _mask(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The widest view's number of features."""
        return (self.values.shape[-1],)

    def filled(self, lengths: tuple[int, ...]) -> Self:
        """With more columns of zeros."""
        return type(self)(widened(self.values, {-1: lengths[0]}), self.count)

    def mv(self, weights: Weights) -> Scores:
        """The product `X Q` of ONE view."""
        return matmul(self.values, weights)

    def rmv(self, scores: Scores) -> Weights:
        """The product `X' Y` of ONE view."""
        return transposed_product(self.values, scores)


@final
class SparseView(Ragged):
    """One client's view as the list of its non-zero values, by rows; never filled.

    Lists are padded with zeros up to the longest. With a leading client axis on all fields it
    holds all views.
    """

    values: Float[Array, "*clients nonzeros"]
    rows: Int[Array, "*clients nonzeros"]
    columns: Int[Array, "*clients nonzeros"]
    mean: Float[Array, "*clients features"]  # subtracted from each row
    count: Float[Array, "*clients"]  # of features
    shape: tuple[int, int] = eqx.field(static=True)

    summed_by_index = True

    @property
    def mask(self) -> Float[Array, "*clients features"]:
        """1 for a real feature, 0 for padding."""
        return _mask(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest list's number of values, and the widest view's of features."""
        return self.values.shape[-1], self.shape[1]

    def filled(self, lengths: tuple[int, ...]) -> Self:
        """With more zeros in the lists, and columns without values."""
        longest, features = lengths
        # The new zeros are in the last row, so that the lists stay sorted by rows.
        values, columns = (widened(x, {-1: longest}) for x in (self.values, self.columns))
        more = longest - self.rows.shape[-1]
        rows = jnp.pad(self.rows, ((0, 0), (0, more)), constant_values=self.shape[0] - 1)
        mean, shape = widened(self.mean, {-1: features}), (self.shape[0], features)
        return type(self)(values, rows, columns, mean, self.count, shape)

    def mv(self, weights: Weights) -> Scores:
        """The product `X Q` of ONE view."""
        # As fast as products of BCOO arrays, without a second list of values for X'.
        terms = self.values[:, None] * weights[self.columns]
        # Centring subtracts the same row from all.
        return jax.ops.segment_sum(terms, self.rows, self.shape[0]) - matmul(self.mean, weights)

    def rmv(self, scores: Scores) -> Weights:
        """The product `X' Y` of ONE view."""
        terms = self.values[:, None] * scores[self.rows]
        total = jax.ops.segment_sum(terms, self.columns, self.shape[1])
        ones = jnp.ones(len(scores), scores.dtype)
        return total - jnp.outer(self.mean, matmul(ones, scores))


class Factors(NamedTuple):
    """One view's truncated singular value decomposition, with zeros in place of rounding."""

    left: Float[Array, "entities k"]
    singular: Float[Array, " k"]
    right: Float[Array, "features k"]

    def solve(self, scores: Scores, ridge: Float[Array, ""] | float = 0.0) -> Weights:
        r"""The least-squares map, the `Q` of least \(\|X Q / \sqrt L - Y\|^2 + ridge \|Q\|^2\)."""
        length, kept = len(self.left), self.singular > 0
        ridge = jnp.asarray(ridge, self.singular.dtype)
        # In units in which no square over- or underflows, not even in the derivative.
        unit = jnp.maximum(jnp.max(self.singular), jnp.sqrt(ridge * length))
        unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1))
        singular = self.singular / unit
        # Two ratios, since a compiler turns `/ unit / unit` into a division by a vanishing square.
        squares = singular**2 + ratio(ratio(ridge * length, unit), unit)
        shrunk = jnp.where(kept, singular / jnp.where(kept, squares, 1), 0) / unit
        along = shrunk[:, None] * transposed_product(self.left, scores)
        return matmul(self.right, along) * length**0.5

    def mv(self, weights: Weights) -> Scores:
        """The product `X Q`."""
        return matmul(self.left, self.singular[:, None] * matmul(self.right.T, weights))


def factorize(view: View | SparseView, rank: int) -> Factors:
    """The first singular triples of ONE view.

    Those of a sparse view come from a subspace iteration with ten more columns than triples
    (Halko, Martinsson & Tropp 2011). They are exact where the view has no more directions than
    that, and otherwise the more accurate the faster its singular values fall.
    """
    if isinstance(view, View):
        left, singular, right = svd(view.values)
    else:
        width = min(rank + 10, *view.shape)
        start = jax.random.normal(jax.random.key(0), (view.shape[1], width), view.values.dtype)

        def iterate(_, basis):
            return jnp.linalg.qr(view.rmv(jnp.linalg.qr(view.mv(basis))[0]))[0]

        basis = jax.lax.fori_loop(0, 8, iterate, start * view.mask[:, None])
        left, singular, right = svd(view.mv(basis))
        right = matmul(right, basis.T)
    left, singular, right = left[:, :rank], singular[:rank], right[:rank].T
    kept = not_rounding(singular, view.shape)
    return Factors(left * kept, singular * kept, right * kept)


class Views(Clients):
    """Clients that hold different features of the same entities, in the same order.

    Each view counts the same. `features` is the number of features of the widest.
    """

    @classmethod
    def from_arrays(cls, arrays: Sequence[ArrayLike], *, center: bool = False) -> Self:
        """Clients from their views.

        Args:
            arrays: one `(entities, features_j)` array per client.
            center: subtract each feature's mean over the entities, which needs no exchange.

        Returns:
            The clients, in single precision unless the arrays are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: for an empty list, views that are not two-dimensional, without entities or
                features or with different numbers of entities, and data that are not real
                floating point numbers of one type or not finite. The message names the view.
        """
        check_list("arrays", arrays, MATRICES)
        check_flag("center", center)
        views = [checked_array(array, f"arrays[{j}]") for j, array in enumerate(arrays)]
        check_tables("arrays", views, "view", 1, "entities", "features")
        if center:
            views = [view - view.mean(0) for view in views]
        sizes = jnp.asarray([view.shape[1] for view in views], views[0].dtype)
        return cls._of(View(padded(views), sizes))

    @classmethod
    def from_sparse(cls, matrices: Sequence[Any], *, center: bool = False) -> Self:
        """Clients from sparse views, which stay sparse; `jf.gcca.MaxVar` and `MVLSA` take them.

        Args:
            matrices: one `(entities, features_j)` matrix per client: of `scipy.sparse`, in any
                format, or a `jax.experimental.sparse.BCOO`.
            center: subtract each feature's mean over the entities; products subtract it, so that
                zeros stay zeros.

        Returns:
            The clients, in single precision unless the values are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: for matrices that are not sparse, indices outside of a matrix, and as
                `from_arrays` does.
        """
        check_list("matrices", matrices, MATRICES)
        check_flag("center", center)
        lists = [_as_list(matrix, f"matrices[{j}]") for j, matrix in enumerate(matrices)]
        check_tables("matrices", lists, "view", 1, "entities", "features")
        shape = (lists[0].shape[0], max(each.shape[1] for each in lists))
        longest = max(1, *(each.nnz for each in lists))
        dtype = lists[0].dtype
        values = np.zeros((len(lists), longest), dtype)
        rows = np.full((len(lists), longest), shape[0] - 1, np.int32)  # the order is kept
        columns = np.zeros((len(lists), longest), np.int32)
        mean = np.zeros((len(lists), shape[1]), dtype)
        for j, each in enumerate(lists):
            values[j, : each.nnz] = each.data
            rows[j, : each.nnz], columns[j, : each.nnz] = each.coords
            if center:
                mean[j, : each.shape[1]] = each.mean(axis=0)
        sizes = jnp.asarray([each.shape[1] for each in lists], dtype)
        values, rows, columns, mean = map(jnp.asarray, (values, rows, columns, mean))
        return cls._of(SparseView(values, rows, columns, mean, sizes, shape))

    @classmethod
    def _of(cls, data: View | SparseView) -> Self:
        clients = len(data.count)
        ids = jnp.arange(clients, dtype=jnp.int32)
        return cls(data, ids, jnp.full(clients, 1 / clients, data.count.dtype))

    @property
    def features(self) -> int:
        """Number of features of the widest view."""
        return self.data.shape[1]


def _as_list(matrix: Any, name: str) -> Any:
    """The matrix's values by rows, each place once."""
    from_jax = isinstance(matrix, BCOO) and matrix.n_batch == matrix.n_dense == 0
    if not (from_jax or scipy.sparse.issparse(matrix)):
        raise ValueError(
            f"{name}: wanted a matrix of scipy.sparse or a BCOO, got {type(matrix).__name__}; "
            "Views.from_arrays takes dense ones"
        )
    try:
        rows = checked_rows(_from_jax(matrix) if from_jax else matrix)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    values = np.asarray(checked_array(rows.data, f"{name}, its non-zero values"))
    return scipy.sparse.csr_array((values, rows.indices, rows.indptr), rows.shape).tocoo()


def _from_jax(matrix: BCOO) -> scipy.sparse.coo_array:
    places = np.asarray(matrix.indices)
    inside = places[:, 0] < matrix.shape[0]  # JAX pads lists with places outside the matrix
    return scipy.sparse.coo_array(
        (np.asarray(matrix.data)[inside], tuple(places[inside].T)), shape=matrix.shape
    )


def _mask(view: View | SparseView) -> Float[Array, "*clients features"]:
    columns = jnp.arange(view.shape[-1], dtype=view.count.dtype)
    return (columns < view.count[..., None]).astype(view.values.dtype)


def check_views(
    clients: ClientsLike, rank: int, name: str = "clients", *, dense: str | None = None
) -> None:
    """Raise a `ValueError` for clients without views, or more components than entities.

    `dense` is what refuses sparse views, such as "networks need".
    """
    data = clients.data if isinstance(clients, Clients) else clients
    if isinstance(clients, Clients) and not clients.layout.in_memory:
        raise ValueError(
            f"{name}: wanted views in memory, as of Views.from_arrays or Views.from_sparse: each "
            "is one table of all entities, and sources are read by whole clients"
        )
    if not isinstance(data, View | SparseView):
        kind = type(data).__name__
        raise ValueError(f"{name}: GCCA needs Views.from_arrays, got data of type {kind}")
    if dense and isinstance(data, SparseView):
        raise ValueError(f"{name}: {dense} dense views, Views.from_arrays, got sparse ones")
    entities = data.shape[0]
    if rank > entities:
        raise ValueError(f"rank: {rank} orthonormal components do not fit {entities} entities")


def check_shape(part: str, array: Any, wanted: tuple[int, ...]) -> None:
    """Raise a `ValueError` for a part of a warm start of another shape."""
    shape = getattr(array, "shape", type(array).__name__)
    if shape != wanted:
        raise ValueError(f"warm_start: wanted {part} of shape {wanted}, got {shape}")
