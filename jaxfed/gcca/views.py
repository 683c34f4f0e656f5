"""Views: clients that hold different features of the same entities, or of some of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_list
from jaxfed._numbers import is_lost
from jaxfed.contract import ClientsLike, Personalized, check_flag, check_instance
from jaxfed.core.clients.checks import check_tables, checked_floats
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.names import names_of_views, views_in_order
from jaxfed.core.clients.samples import Ragged, padded, widened
from jaxfed.core.clients.sparse import sparse_rows
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import on_host
from jaxfed.gcca.alignment import Alignment
from jaxfed.gcca.shares import seen_rows
from jaxfed.linalg import matmul, transposed_product

RandomKey = Key[Array, ""]
Scores = Float[Array, "rows rank"]
Weights = Float[Array, "features rank"]
RowNumbers = Int[Array, " rows"] | None  # None: all

MATRICES = "(entities, features) matrices, one per view"


@final
class View(Ragged):
    """One client's view: entities as rows, padded with zero columns up to the widest view.

    Rows of entities that the client has not seen are zero. With a leading client axis on all
    fields it holds all views.
    """

    values: Float[Array, "*clients entities features"]
    count: Float[Array, "*clients"]  # of features
    observed: Float[Array, "*clients entities"] | None = None  # 1 if seen; None: all are seen

    factored = True

    @property
    def shape(self) -> tuple[int, int]:
        """Number of entities, and of features of the widest view."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def mask(self) -> Float[Array, "*clients features"]:
        """1 for a real feature, 0 for padding."""
        return _mask(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of features of the widest view."""
        return (self.values.shape[-1],)

    def filled(self, lengths: tuple[int, ...]) -> Self:
        """Pad with more zero columns."""
        return type(self)(widened(self.values, {-1: lengths[0]}), self.count, self.observed)

    def with_zeros(self) -> Self:
        """Set the rows of unseen entities of ONE view to zero."""
        return type(self)(seen_rows(self.observed, self.values), self.count, self.observed)

    def mv(self, weights: Weights, rows: RowNumbers = None) -> Scores:
        """Return the product `X Q` of ONE view, or these rows of it."""
        return matmul(self.values if rows is None else self.values[rows], weights)

    def rmv(self, scores: Scores, rows: RowNumbers = None) -> Weights:
        """Return the product `X' Y` of ONE view, or of these rows, of which the scores are."""
        return transposed_product(self.values if rows is None else self.values[rows], scores)


@final
class FactoredView(eqx.Module):
    """One client's view by its singular value decomposition, or with a leading axis all views'."""

    mask: Float[Array, "*clients features"]  # 1 for a real feature, 0 for padding
    left: Float[Array, "*clients entities k"]
    singular: Float[Array, "*clients k"]  # rounding errors are zero
    right: Float[Array, "*clients features k"]
    observed: Float[Array, "*clients entities"] | None = None  # 1 if seen; None: all are seen

    @property
    def shape(self) -> tuple[int, int]:
        """Number of entities, and of features of the widest view."""
        return self.left.shape[-2], self.mask.shape[-1]

    def with_zeros(self) -> Self:
        """Return this view, whose unseen rows are zero."""
        return self


@final
class SparseView(Ragged):
    """One client's view as a list of its non-zero values, sorted by rows; never dense.

    Lists are padded with zeros up to the longest. With a leading client axis on all fields it
    holds all views.
    """

    values: Float[Array, "*clients nonzeros"]
    rows: Int[Array, "*clients nonzeros"]
    columns: Int[Array, "*clients nonzeros"]
    mean: Float[Array, "*clients features"]  # subtracted from each seen row
    count: Float[Array, "*clients"]  # of features
    shape: tuple[int, int] = eqx.field(static=True)
    observed: Float[Array, "*clients entities"] | None = None  # 1 if seen; None: all are seen

    summed_by_index, factored = True, True

    def magnitudes(self) -> tuple[np.ndarray, np.ndarray]:
        """Each view's mean squares and variances of features, of all views together."""
        entities, features = self.shape
        parts = map(on_host, (self.values, self.columns, self.mean))
        squares, variances = [], []
        for values, columns, mean in zip(*parts, strict=True):
            known = values.astype(np.float64), columns, entities
            own = np.bincount(columns, values, features) / entities
            squares.append(_mean_squares(*known, mean.astype(np.float64)))
            variances.append(_mean_squares(*known, own))
        return np.stack(squares), np.stack(variances)

    @property
    def mask(self) -> Float[Array, "*clients features"]:
        """1 for a real feature, 0 for padding."""
        return _mask(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest list's number of values, and the widest view's number of features."""
        return self.values.shape[-1], self.shape[1]

    def filled(self, lengths: tuple[int, ...]) -> Self:
        """Pad lists with zeros, and add columns without values."""
        longest, features = lengths
        # The new zeros are in the last row, so that the lists stay sorted by rows.
        values, columns = (widened(x, {-1: longest}) for x in (self.values, self.columns))
        more = longest - self.rows.shape[-1]
        rows = jnp.pad(self.rows, ((0, 0), (0, more)), constant_values=self.shape[0] - 1)
        mean, shape = widened(self.mean, {-1: features}), (self.shape[0], features)
        return type(self)(values, rows, columns, mean, self.count, shape, self.observed)

    def with_zeros(self) -> Self:
        """Return the view itself: its lists have no values of unseen entities."""
        return self

    def mv(self, weights: Weights, rows: RowNumbers = None) -> Scores:
        """Return the product `X Q` of ONE view, or these rows of it."""
        # As fast as products of BCOO arrays, but needs no second list of values for X'.
        terms = self.values[:, None] * weights[self.columns]
        # Centring subtracts the same row from all rows.
        products = jax.ops.segment_sum(terms, self.rows, self.shape[0])
        products = seen_rows(self.observed, products - matmul(self.mean, weights))
        return products if rows is None else products[rows]

    def rmv(self, scores: Scores, rows: RowNumbers = None) -> Weights:
        """Return the product `X' Y` of ONE view, or of these rows, of which the scores are."""
        if rows is not None:
            # A list of values has no rows to pick, and its products cost little.
            scores = jnp.zeros((self.shape[0], scores.shape[1]), scores.dtype).at[rows].set(scores)
        terms = self.values[:, None] * scores[self.rows]
        total = jax.ops.segment_sum(terms, self.columns, self.shape[1])
        ones = jnp.ones(len(scores), scores.dtype) if self.observed is None else self.observed
        return total - jnp.outer(self.mean, matmul(ones, scores))


class First(NamedTuple):
    """Messages before the first round."""

    scores: Any  # or bases of scores
    observed: Float[Array, " entities"] | None  # its mean is the share of clients; None: all


class Views(Clients):
    """Clients that hold different features of the same entities, in the same order.

    With an alignment they may have seen different entities. All views count equally. `features`
    is the number of features of the widest view.
    """

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[Any] | LabelledArray,
        *,
        names: Sequence[str] | None = None,
        features: Sequence[Sequence[str]] | None = None,
        entities: Sequence[str] | None = None,
        center: bool = False,
        alignment: Alignment | None = None,
    ) -> Self:
        """Create clients from their views.

        Args:
            arrays: one `(entities, features_j)` array per client; with an alignment
                `(entities_j, features_j)`. Also data frames, arrays of xarray, whose entities are
                put in the order of the first if their first dimension has coordinates, or a
                dataset, each variable a view.
            names: the views' names; by default those of arrays of xarray, if they differ.
            features: each view's names of features; by default the columns of data frames, or the
                coordinates of the last dimension.
            entities: the entities' names; by default the ids of the alignment, or the coordinates
                of the first dimension.
            center: subtract each feature's mean over the client's entities, which needs no
                exchange.
            alignment: `jf.gcca.align(ids)` of the ids of the arrays' rows, if clients have seen
                different entities or hold them in different orders.

        Returns:
            The clients, in single precision unless the arrays are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: if the list is empty; views are not two-dimensional, have no entities or
                features, or differ in their entities or from the alignment; or data are not finite
                real floating-point numbers of one type. The message names the view.
        """
        tables, entities = views_in_order(arrays, entities, alignment)
        check_list("arrays", tables, MATRICES)
        check_flag("center", center)
        views = [
            checked_floats(array, f"arrays[{j}]", center=center) for j, array in enumerate(tables)
        ]
        _check_aligned("arrays", views, alignment)
        if alignment is not None:
            views = [
                jnp.zeros((len(alignment.ids), view.shape[1]), view.dtype).at[own].set(view)
                for own, view in zip(alignment.places, views, strict=True)
            ]
        sizes = jnp.asarray([view.shape[1] for view in views], views[0].dtype)
        data = View(padded(views), sizes, _observed(alignment, views[0].dtype))
        return cls._of(data, tables, names, features, entities, alignment)

    @classmethod
    def from_sparse(
        cls,
        matrices: Sequence[Any],
        *,
        names: Sequence[str] | None = None,
        features: Sequence[Sequence[str]] | None = None,
        entities: Sequence[str] | None = None,
        center: bool = False,
        alignment: Alignment | None = None,
    ) -> Self:
        """Create clients from sparse views, which stay sparse, for `jf.gcca.MaxVar` and `MVLSA`.

        Args:
            matrices: one `(entities, features_j)` matrix per client: a `scipy.sparse` matrix in any
                format, or a `jax.experimental.sparse.BCOO`; with an alignment
                `(entities_j, features_j)`.
            names: as in `from_arrays`, like `features` and `entities`.
            features: names of each view's features.
            entities: names of the entities.
            center: subtract each feature's mean over the client's entities. Products subtract it,
                so zeros stay zeros.
            alignment: as in `from_arrays`.

        Returns:
            The clients, in single precision unless the values are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: if matrices are not sparse, indices are outside a matrix, or as
                `from_arrays`.
        """
        check_list("matrices", matrices, MATRICES)
        check_flag("center", center)
        lists = [_checked_list(matrix, f"matrices[{j}]") for j, matrix in enumerate(matrices)]
        _check_aligned("matrices", lists, alignment)
        means = [np.asarray(x.mean(axis=0, dtype=np.float64)).ravel() for x in lists]
        if alignment is not None:
            rows = len(alignment.ids)
            lists = [_moved(x, p, rows) for p, x in zip(alignment.places, lists, strict=True)]
        shape = (lists[0].shape[0], max(each.shape[1] for each in lists))
        longest = max(1, *(each.nnz for each in lists))
        dtype = lists[0].dtype
        values = np.zeros((len(lists), longest), dtype)
        rows = np.full((len(lists), longest), shape[0] - 1, np.int32)  # keeps the order
        columns = np.zeros((len(lists), longest), np.int32)
        mean = np.zeros((len(lists), shape[1]), dtype)
        for j, each in enumerate(lists):
            values[j, : each.nnz] = each.data
            rows[j, : each.nnz], columns[j, : each.nnz] = each.coords
            if center:
                mean[j, : each.shape[1]] = means[j]
        sizes = jnp.asarray([each.shape[1] for each in lists], dtype)
        values, rows, columns, mean = map(jnp.asarray, (values, rows, columns, mean))
        observed = _observed(alignment, dtype)
        data = SparseView(values, rows, columns, mean, sizes, shape, observed)
        return cls._of(data, matrices, names, features, entities, alignment)

    @classmethod
    def _of(
        cls, data: Any, tables: Any, names: Any, features: Any, entities: Any, aligned: Any
    ) -> Self:
        entities = getattr(aligned, "ids", None) if entities is None else entities
        found = names_of_views(tables, names, features, entities, data.shape[0])
        clients = len(data.count)
        # The objective, (7a) of Shrestha & Fu (2023), is a plain sum over views: no weights by
        # features or entities.
        shares = jnp.full(clients, 1 / clients, data.count.dtype)
        return cls(data, jnp.arange(clients, dtype=jnp.int32), shares, names=found)

    @property
    def features(self) -> int:
        """Number of features of the widest view."""
        return self.data.shape[1]


def _check_aligned(name: str, tables: list[Any], alignment: Alignment | None) -> None:
    """Check that tables have the same entities, or those of the alignment."""
    if alignment is None:
        return check_tables(name, tables, "view", 1, "entities", "features")
    check_instance("alignment", alignment, Alignment, "jaxfed.gcca.align(ids) or None")
    if len(tables) != len(alignment.places):
        raise ValueError(
            f"{name}: wanted the alignment's {len(alignment.places)} views, got {len(tables)}"
        )
    for j, (own, table) in enumerate(zip(alignment.places, tables, strict=True)):
        if table.ndim != 2 or len(own) != table.shape[0] or table.shape[1] == 0:
            raise ValueError(
                f"{name}[{j}]: wanted shape ({len(own)}, features), a row for each of the "
                f"alignment's ids, got {table.shape}"
            )
        if table.dtype != tables[0].dtype:
            raise ValueError(f"{name}[{j}]: is {table.dtype} where {name}[0] is {tables[0].dtype}")


def _observed(
    alignment: Alignment | None, dtype: DTypeLike
) -> Float[Array, "clients entities"] | None:
    """Return 1 for the entities that each client has seen; None if all have seen all."""
    if alignment is None or alignment.complete:
        return None
    seen = np.zeros((len(alignment.places), len(alignment.ids)), dtype)
    for own, places in zip(seen, alignment.places, strict=True):
        own[places] = 1
    return jnp.asarray(seen)


def _moved(matrix: Any, places: Int[np.ndarray, " rows"], entities: int) -> Any:
    """Move the rows of a matrix to these positions of a longer one, sorted by rows again."""
    rows, columns = matrix.coords
    shape = (entities, matrix.shape[1])
    return scipy.sparse.csr_array((matrix.data, (places[rows], columns)), shape).tocoo()


def _mean_squares(
    values: Float[np.ndarray, " nonzeros"],
    columns: Int[np.ndarray, " nonzeros"],
    entities: int,
    mean: Float[np.ndarray, " features"],
) -> Float[np.ndarray, " features"]:
    """Mean squares of deviations of features, most of whose entries are zero."""
    left = entities - np.bincount(columns, minlength=len(mean))
    squares = np.bincount(columns, (values - mean[columns]) ** 2, len(mean))
    return (squares + left * mean**2) / entities


def _checked_list(matrix: Any, name: str) -> Any:
    """A sparse matrix as a list of values, in the precision in use.

    Raises:
        ValueError: as `sparse_rows`; or names a feature whose deviations vanish beside its mean
            when values are rounded, or when a product subtracts it.
    """
    exact = sparse_rows(matrix, name, dense="Views.from_arrays", alone=False).tocoo()
    values = np.asarray(checked_floats(exact.data, f"{name}, its non-zero values"))
    if exact.shape[0]:
        _check_mean(exact, name, values.dtype)
    return scipy.sparse.coo_array((values, exact.coords), exact.shape)


def _check_mean(matrix: Any, name: str, precision: np.dtype) -> None:
    mean = np.asarray(matrix.mean(axis=0, dtype=np.float64)).ravel()
    values = matrix.data.astype(np.float64)
    spread = np.sqrt(_mean_squares(values, matrix.coords[1], matrix.shape[0], mean))
    lost = is_lost(spread, np.abs(mean), precision)
    if lost.any():
        place = int(np.flatnonzero(lost)[0])
        raise ValueError(
            f"{name}: wanted features near zero, as most entries of a sparse view are, got feature "
            f"{place} (from 0), which varies by {spread[place]:.3g} about {mean[place]:.10g}; "
            "Views.from_arrays centres dense views before it rounds them"
        )


def _mask(view: View | SparseView) -> Float[Array, "*clients features"]:
    columns = jnp.arange(view.shape[-1], dtype=view.count.dtype)
    return (columns < view.count[..., None]).astype(view.values.dtype)


def check_views(
    clients: ClientsLike,
    rank: int,
    name: str = "clients",
    *,
    dense: str | None = None,
    complete: str | None = None,
) -> None:
    """Raise a `ValueError` for clients without views, or more components than entities.

    Given `dense`, the beginning of a message such as "networks need", it refuses sparse views with
    that message; given `complete`, views that lack entities.
    """
    data = clients.data if isinstance(clients, Clients) else clients
    if isinstance(clients, Clients) and not clients.layout.in_memory:
        raise ValueError(
            f"{name}: wanted views in memory, as of Views.from_arrays or Views.from_sparse, since "
            "each is one table of all entities, got clients that are read block by block"
        )
    if not isinstance(data, View | FactoredView | SparseView):
        kind = type(data).__name__
        raise ValueError(f"{name}: GCCA needs Views.from_arrays, got data of type {kind}")
    if dense and isinstance(data, SparseView):
        raise ValueError(f"{name}: {dense} dense views, Views.from_arrays, got sparse ones")
    entities = data.shape[0]
    if rank > entities:
        raise ValueError(f"rank: {rank} orthonormal components do not fit {entities} entities")
    if data.observed is None:
        return
    if complete:
        raise ValueError(f"{name}: {complete} views of all entities, got some that lack entities")
    if is_known(data.observed):
        fewest = int(np.asarray(data.observed).sum(-1).min())
        if fewest < rank:
            raise ValueError(f"{name}: wanted views of at least {rank} entities, got {fewest}")


def check_all_seen(clients: ClientsLike, warm_start: Personalized | None) -> None:
    """Raise a `ValueError` if no client has seen some entity, unless all clients are new."""
    observed, new = clients.data.observed, warm_start is not None and warm_start.local is None
    if new or not is_known(observed):
        return
    seen = np.asarray(observed).any(axis=-2)
    if not seen.all():
        raise ValueError(
            "clients: wanted every entity seen by some client, got none for the entity at index "
            f"{np.argwhere(~seen)[0][-1]}"
        )


def check_shape(part: str, array: Any, wanted: tuple[int, ...]) -> None:
    """Raise a `ValueError` if a part of a warm start has another shape."""
    shape = getattr(array, "shape", type(array).__name__)
    if shape != wanted:
        raise ValueError(f"warm_start: wanted {part} of shape {wanted}, got {shape}")
