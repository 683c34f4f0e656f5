"""Use learned components: scores, reconstructions, variances, anomalies, new clients.

A client's components are the shared ones followed by its local ones if the two are orthogonal.
If they are not, as in `HierarchicalPCA`, whose local components scatter around the shared ones, a
client's components are only its local ones. Scores have the same order.

Samples are an array `(m, n, d)` or a list of `(n_i, d)` arrays, one per client, centred like the
samples that the components were learned from. With `client=i`, or without local components, they
may be one array `(n, d)`. In place of an array, there may be a data frame or an array of xarray,
whose columns are put in the order of the features that were learned. A client is named by its name,
if it has one, or by its id, as in `solution.ids`; by its position among those of `result.local`
where only a result or an estimator is given.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int

from jaxfed._checks import checked_array, is_list
from jaxfed._numbers import checked_rows
from jaxfed.contract import Personalized, check_count, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.names import DataFrame, like
from jaxfed.core.clients.samples import Samples
from jaxfed.core.clients.units import lose_single_precision, widened
from jaxfed.core.common.printing import is_known
from jaxfed.core.run.result import Fitted, in_learned_order, place_of
from jaxfed.linalg import Moment, matmul
from jaxfed.linalg.sums import sum_of_squares
from jaxfed.metrics.components import side_by_side
from jaxfed.metrics.reconstruction import moments
from jaxfed.pca.components import Frame, best_local, check_fits, moment_behind

Tables: TypeAlias = (
    Float[ArrayLike, "m n d"]
    | Float[ArrayLike, "n d"]
    | DataFrame
    | LabelledArray
    | Sequence[Float[ArrayLike, "n_i d"] | DataFrame | LabelledArray]
)
Found: TypeAlias = Float[Array, "..."] | list[Float[Array, "n_i ..."]]


class ExplainedVariance(NamedTuple):
    """The clients' second moments along components: variances if the samples are centred.

    Attributes:
        shared: along each shared component, the mean over clients, `(r1,)`; None if a client's
            components are only its local ones.
        local: along each client's local components, `(m, r2)`; None without local components.
        total: the trace of each client's second moment, `(m,)`.
    """

    shared: Float[Array, " r1"] | None
    local: Float[Array, "m r2"] | None
    total: Float[Array, " m"]


def transform(fitted: Fitted, samples: Tables, *, client: int | str | None = None) -> Found:
    """Compute scores: the coordinates of samples in their client's components.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or `(n, d)` with `client`.
        client: name or id of the client that all samples belong to.

    Returns:
        Scores in the form of the samples, with r in place of d: `(m, n, r)`, `(n_i, r)`, `(n, r)`.

    Raises:
        ValueError: if `fitted` is not a result of PCA, the samples have other clients or features,
            values are not finite (unless traced), or one array is given without its client.
    """
    return _mapped("samples", lambda x, basis: x @ basis, fitted, samples, client, 0)


def inverse_transform(fitted: Fitted, scores: Tables, *, client: int | str | None = None) -> Found:
    """Reconstruct samples from scores, in the span of their client's components.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        scores: as `transform` returns them: `(m, n, r)`, a list of `(n_i, r)`, or `(n, r)`.
        client: name or id of the client that all scores belong to.

    Returns:
        Samples in the form of the scores, with d in place of r.

    Raises:
        ValueError: as `transform`.
    """
    return _mapped("scores", lambda z, basis: z @ basis.T, fitted, scores, client, 1)


def anomaly_score(fitted: Fitted, samples: Tables, *, client: int | str | None = None) -> Found:
    """Compute the squared distance of samples to the span of their client's components.

    Source: the Q statistic of Jackson & Mudholkar (1979), Control procedures for residuals
    associated with principal component analysis, Technometrics 21 (3).

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or `(n, d)` with `client`.
        client: name or id of the client that all samples belong to.

    Returns:
        One distance per sample, at least 0: `(m, n)`, a list of `(n_i,)`, or `(n,)`.

    Raises:
        ValueError: as `transform`.
    """

    def distance(x, basis):
        return sum_of_squares(x - (x @ basis) @ basis.T, -1)

    return _mapped("samples", distance, fitted, samples, client, 0)


def complete(fitted: Fitted, samples: Tables, *, client: int | str | None = None) -> Found:
    """Fill in missing entries of samples from their client's components.

    The scores of a sample are the least-squares solution on its observed entries, the shortest one
    if there are several. Directions in which observed entries of components have less than about
    1e-5 of their largest length count as not observed (1e-14 in double precision). For the samples
    it was fitted to, a converged `HMF` has the same values.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or `(n, d)` with `client`; NaN marks missing
            entries.
        client: name or id of the client that all samples belong to.

    Returns:
        Samples in the same form; observed entries do not change, but for the precision in use.

    Raises:
        ValueError: as `transform`, but NaN is allowed.
    """

    def of_one(x: Float[Array, " d"], basis: Frame) -> Float[Array, " d"]:
        missing = jnp.isnan(x)
        known, kept = jnp.where(missing, 0, x), jnp.where(missing[:, None], 0, basis)
        # Of the rows, not of their Gram matrix, whose condition number is the square.
        least = float(jnp.finfo(basis.dtype).eps) * max(basis.shape[1], 64)
        scores = matmul(jnp.linalg.pinv(kept, rtol=least), known)
        return jnp.where(missing, matmul(basis, scores), x)

    def of_all(x, basis):
        return jax.vmap(of_one, (0, None))(x, basis)

    return _mapped("samples", of_all, fitted, samples, client, 0, gaps=True)


def explained_variance(fitted: Fitted, samples: Tables | Moment) -> ExplainedVariance:
    """Compute how much of each client's second moment every component explains.

    `jaxfed.metrics.separation` returns shares of the whole.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `jaxfed.linalg.Moment`.

    Returns:
        Variances along the shared and the local components, and in total.

    Raises:
        ValueError: if `fitted` is not a result of PCA, the samples have other clients or features,
            or values are not finite (unless traced).
    """
    shared, local = side_by_side(fitted)
    tables: Any = in_learned_order(fitted, samples, "samples")
    data = moments(tables, None)
    features = [len(shared)] if shared is not None else []
    clients = []
    if local is not None:
        clients, features = [len(local)], [local.shape[1]]
    if [data.dim] != features or clients not in ([], [len(data.count)]):
        wanted = f"samples of {features[0]} features{f', of {clients[0]} clients' * len(clients)}"
        raise refuse("samples", wanted, f"{len(data.count)} clients, {data.dim} features")
    checked_array("samples", data.trace, "m", finite=True)

    def along(basis):
        return jnp.sum(basis * jax.vmap(Moment.mv)(data, basis), axis=-2)

    by_shared, by_local = None, None if local is None else along(local)
    if shared is not None:
        by_shared = along(jnp.broadcast_to(shared, (len(data.count), *shared.shape))).mean(axis=0)
    return ExplainedVariance(by_shared, by_local, data.trace)


def fit_local(fitted: Fitted, samples: Tables | Clients, rank: int | None = None) -> Personalized:
    """Compute components of new clients: the same shared ones, and local ones from their samples.

    Nothing is sent. Where the shared components were learned from `jaxfed.privacy.release_moments`,
    clients compute their local ones at home from the samples themselves, in place of local ones
    that noise spoils.

    The local components are the best ones orthogonal to the shared ones: top eigenvectors of the
    deflated second moment, as in Shi & Kontar (2024), (14).

    Args:
        fitted: a solution with shared components, its result, or what `jaxfed.load` returned.
        samples: the new clients' samples: `(m, n, d)`, a list of `(n_i, d)`, or `jaxfed.Clients`.
        rank: number of local components of each client, by default as many as in `fitted`.

    Returns:
        The same shared components, and the new clients' local components, `(m, d, rank)`.

    Raises:
        ValueError: if `fitted` is not a result of PCA, it has no shared components orthogonal to
            local ones, or the samples or the rank do not fit.
    """
    shared, local = side_by_side(fitted)
    if rank is None and local is not None:
        rank = local.shape[-1]
    check_count("rank", rank)
    assert rank is not None
    if shared is None:
        raise refuse("fitted", "shared components with local ones beside them", fitted)
    tables: Any = samples
    clients = samples if isinstance(samples, Clients) else Clients.from_samples(tables)
    clients = like(clients, fitted)
    clients.layout.check_in_memory("fit_local")
    if clients.features != len(shared):
        raise refuse("samples", f"{len(shared)} features", clients.parts[0])
    check_fits("shared components + rank", shared.shape[1] + rank, clients)
    local = _best_local(clients.unbucketed().data, shared, rank)
    return Personalized(shared, local)


@partial(jax.jit, static_argnames="rank")
def _best_local(data: Samples | Moment, shared: Frame, rank: int) -> Float[Array, "m d r2"]:
    def of_one(own: Samples | Moment) -> Frame:
        moment = moment_behind(own)
        return best_local(moment, shared.astype(moment.trace.dtype), rank)

    return jax.vmap(of_one)(data)


def principal_axes(
    basis: Float[ArrayLike, "d r"], samples: Sequence[Float[ArrayLike, "n_i d"]]
) -> Float[np.ndarray, "d r"]:
    """Rotate components to principal axes: uncorrelated scores, in order of decreasing variance.

    Algorithms learn a subspace, in an arbitrary basis. Plots need a basis in which each component
    has a meaning. Every client counts equally. The entry of largest magnitude of each axis is
    positive.

    Args:
        basis: orthonormal components, such as `solution.result.shared`.
        samples: all clients' samples for shared components, one client's for its local ones;
            centred like the samples that the components were learned from.

    Returns:
        The axes, as columns.

    Raises:
        ValueError: if components or samples are not matrices, or their numbers of features differ.
    """
    checked_array("basis", basis, "features rank", finite=True)
    axes = np.asarray(basis)  # keeps the precision
    if not is_list(samples) or len(samples) == 0:
        raise refuse("samples", "a list of tables, one for each client", samples)
    for i, table in enumerate(samples):
        checked_array(f"samples[{i}]", table, f"rows {len(axes)}", finite=True)
    scores = [np.asarray(table) @ axes / np.sqrt(len(table)) for table in samples]
    scores = np.concatenate(scores)
    axes = axes @ np.linalg.eigh(scores.T @ scores)[1][:, ::-1]
    largest = np.take_along_axis(axes, np.argmax(np.abs(axes), axis=0)[None], axis=0)
    return axes * np.sign(largest)


def finite_clients(
    local: Float[ArrayLike, "m d r2"] | None, samples: Sequence[Float[np.ndarray, "n_i d"]]
) -> Int[np.ndarray, " finite"]:
    """Return the positions of clients whose local components and energies are finite.

    A robust run goes on without the others, which pictures and measures then leave out.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.asarray([np.isfinite(np.sum(table * table)) for table in samples])
    if local is not None:
        finite &= np.isfinite(np.asarray(local)).all(axis=(1, 2))
    return np.flatnonzero(finite)


def _mapped(
    argument: str,
    function: Callable[[Array, Frame], Array],
    fitted: Fitted,
    tables: Tables,
    client: int | str | None,
    axis: int,
    *,
    gaps: bool = False,
) -> Found:
    """Apply a function to each client's table and basis, and check the tables first.

    The basis has as many entries along `axis` as tables have columns. With `gaps`, tables may hold
    NaN. Features in unlike units are taken in double precision: rounding errors of components,
    times the largest feature, would exceed the others.
    """
    shared, local = side_by_side(fitted)
    if axis == 0:  # tables of features
        tables = in_learned_order(fitted, tables, argument)

    def basis(i: int | Array) -> Frame:
        parts = [shared, None if local is None else local[i]]
        return jnp.concatenate([part for part in parts if part is not None], axis=1)

    def run(mapped: Callable[[Any, Array], Array], array: Array) -> Array:
        if axis or not all(part is None or is_known(part) for part in (shared, local, array)):
            return mapped(function, array)
        # Within `jit`, which closes over all of them, they are computed before it runs.
        with jax.ensure_compile_time_eval():
            each = array.reshape(-1, *array.shape[-2:])
            rank = basis(0).shape[1]
        if not lose_single_precision(each, rank):
            return mapped(function, array)
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            array = array.astype(np.float64)
            found = mapped(lambda x, frame: function(x, widened(frame)), array)
            return found.astype(np.float32)

    width = basis(0).shape[axis]
    if client is not None or (local is None and getattr(tables, "ndim", 3) == 2):
        if client is not None and local is None:
            raise refuse("client", "None where nothing is local", client)
        place = 0 if local is None else place_of(fitted, client, len(local))
        array = _checked(argument, tables, f"rows {width}", gaps)
        return run(lambda one, x: one(x, basis(place)), array)
    if is_list(tables):
        owners = len(tables) if local is None else len(local)
        if len(tables) != owners:
            raise refuse(argument, f"{owners} tables, one for each client", tables)
        checked = [
            _checked(f"{argument}[{i}]", x, f"rows {width}", gaps) for i, x in enumerate(tables)
        ]
        return [run(lambda one, x, i=i: one(x, basis(i)), x) for i, x in enumerate(checked)]
    if isinstance(tables, np.ndarray | jax.Array) and tables.ndim == 2:
        raise refuse("client", "the client whose these are", client)
    shape = f"{'m' if local is None else len(local)} n {width}"
    array = _checked(argument, tables, shape, gaps)
    if local is None:
        return run(lambda one, x: jax.vmap(one, (0, None))(x, basis(0)), array)
    clients = jnp.arange(len(local))
    return run(lambda one, x: jax.vmap(lambda x, i: one(x, basis(i)))(x, clients), array)


def _checked(argument: str, table: Any, axes: str, gaps: bool) -> Array:
    """Check that a table holds finite numbers, or also NaN with `gaps`."""
    # Within `jit`, a host array that it closes over would be traced, and its units unknown.
    concrete = isinstance(table, np.ndarray)
    with jax.ensure_compile_time_eval() if concrete else contextlib.nullcontext():
        array = checked_rows(argument, table, axes, finite=not gaps)
    if gaps and not isinstance(array, Tracer) and np.isinf(np.asarray(array)).any():
        raise ValueError(f"{argument}: wanted finite numbers or NaN, got infinity")
    return array
