"""Use of learned components: scores, reconstructions, variances, anomalies, new clients.

A client's components are the shared ones followed by its local ones, where these are orthogonal to
each other. Where they are not, as in `HierarchicalPCA`, whose local components scatter around the
shared ones, a client's components are its local ones alone. Scores are in the same order.

Samples are an array `(m, n, d)` or a list of `(n_i, d)`, one for each client, centred as those that
the components were learned from. With `client=i`, or where nothing is local, they may be one table
`(n, d)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import checked_array, is_list, is_whole
from jaxfed.contract import Personalized, check_count, check_instance, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved
from jaxfed.linalg import Moment
from jaxfed.metrics.reconstruction import moments
from jaxfed.pca.components import Frame, best_local, check_fits, moment_behind

Fitted: TypeAlias = Solution | Saved | Personalized
Tables: TypeAlias = (
    Float[ArrayLike, "m n d"] | Float[ArrayLike, "n d"] | Sequence[Float[ArrayLike, "n_i d"]]
)
Found: TypeAlias = Float[Array, "..."] | list[Float[Array, "n_i ..."]]

# The largest overlap of shared and local components that still count as orthogonal.
OVERLAP = 0.01


class ExplainedVariance(NamedTuple):
    """The clients' second moments along components: variances, if samples are centred.

    Attributes:
        shared: along each shared component, the mean over the clients, `(r1,)`; None where a
            client's components are its local ones alone.
        local: along each client's local components, `(m, r2)`; None where nothing is local.
        total: the trace of each client's second moment, `(m,)`.
    """

    shared: Float[Array, " r1"] | None
    local: Float[Array, "m r2"] | None
    total: Float[Array, " m"]


def transform(fitted: Fitted, samples: Tables, *, client: int | None = None) -> Found:
    """The scores of samples, their coordinates in their client's components.

    Args:
        fitted: a solution, its result, or what `jaxfed.load` read.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or with `client` one `(n, d)`.
        client: the position of the client that all samples are of.

    Returns:
        Scores in the form of the samples, r in place of d: `(m, n, r)`, `(n_i, r)`, `(n, r)`.

    Raises:
        ValueError: if `fitted` is no result of PCA, for samples of other clients or features, NaN
            and infinite numbers unless they are traced, and one table without its client.
    """
    return _mapped("samples", lambda x, basis: x @ basis, fitted, samples, client, 0)


def inverse_transform(fitted: Fitted, scores: Tables, *, client: int | None = None) -> Found:
    """The samples with these scores, in the span of their client's components.

    Args:
        fitted: a solution, its result, or what `jaxfed.load` read.
        scores: as `transform` returns them: `(m, n, r)`, a list of `(n_i, r)`, or `(n, r)`.
        client: the position of the client that all scores are of.

    Returns:
        Samples in the form of the scores, d in place of r.

    Raises:
        ValueError: as `transform`.
    """
    return _mapped("scores", lambda z, basis: z @ basis.T, fitted, scores, client, 1)


def anomaly_score(fitted: Fitted, samples: Tables, *, client: int | None = None) -> Found:
    """How far samples are from their client's components: the squared distance to their span.

    Source: the Q statistic of Jackson & Mudholkar (1979), Control procedures for residuals
    associated with principal component analysis, Technometrics 21 (3).

    Args:
        fitted: a solution, its result, or what `jaxfed.load` read.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or with `client` one `(n, d)`.
        client: the position of the client that all samples are of.

    Returns:
        A number of at least 0 for each sample: `(m, n)`, a list of `(n_i,)`, or `(n,)`.

    Raises:
        ValueError: as `transform`.
    """

    def distance(x, basis):
        return jnp.sum((x - (x @ basis) @ basis.T) ** 2, axis=-1)

    return _mapped("samples", distance, fitted, samples, client, 0)


def complete(fitted: Fitted, samples: Tables, *, client: int | None = None) -> Found:
    """Samples with what their client's components say in place of missing entries.

    The scores of a sample are those of least squares on its observed entries, the shortest where
    there are several. For samples that were learned from, `HMF` has the same at a solution.

    Args:
        fitted: a solution, its result, or what `jaxfed.load` read.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or with `client` one `(n, d)`; NaN stands for an
            entry that is missing.
        client: the position of the client that all samples are of.

    Returns:
        Samples in the same form; what was observed is not changed.

    Raises:
        ValueError: as `transform`, but for NaN.
    """

    def of_one(x: Float[Array, " d"], basis: Frame) -> Float[Array, " d"]:
        missing = jnp.isnan(x)
        known, kept = jnp.where(missing, 0, x), jnp.where(missing[:, None], 0, basis)
        scores = jnp.linalg.pinv(kept.T @ kept, hermitian=True) @ (kept.T @ known)
        return jnp.where(missing, basis @ scores, x)

    def of_all(x, basis):
        return jax.vmap(of_one, (0, None))(x, basis)

    return _mapped("samples", of_all, fitted, samples, client, 0, gaps=True)


def explained_variance(fitted: Fitted, samples: Tables | Moment) -> ExplainedVariance:
    """What each component explains of each client's second moment.

    Shares of the whole are `jaxfed.metrics.separation`.

    Args:
        fitted: a solution, its result, or what `jaxfed.load` read.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `jaxfed.linalg.Moment`.

    Returns:
        Variances along the shared and the local components, and in all.

    Raises:
        ValueError: if `fitted` is no result of PCA, for samples of other clients or features, and
            NaN and infinite numbers unless they are traced.
    """
    shared, local = side_by_side(fitted)
    data = moments(samples, None)
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


def personalize(fitted: Fitted, samples: Tables, rank: int) -> Personalized:
    """Components of new clients: the shared ones as they are, and local ones from their samples.

    The local components are the best ones beside the shared ones, top eigenvectors of the deflated
    second moment, as in Shi & Kontar (2024), (14).

    Args:
        fitted: a solution with shared components, its result, or what `jaxfed.load` read.
        samples: of the new clients: `(m, n, d)`, or a list of `(n_i, d)`.
        rank: number of local components of each.

    Returns:
        The same shared components, and the new clients' local ones, `(m, d, rank)`.

    Raises:
        ValueError: if `fitted` is no result of PCA, or has no shared components orthogonal to local
            ones, and for samples or a rank that do not fit.
    """
    shared, _ = side_by_side(fitted)
    check_count("rank", rank)
    if shared is None:
        raise refuse("fitted", "shared components with local ones beside them", fitted)
    clients = Clients.from_samples(samples)  # pyright: ignore[reportArgumentType]
    if clients.features != len(shared):
        raise refuse("samples", f"{len(shared)} features", clients.data.values)
    check_fits("shared components + rank", shared.shape[1] + rank, clients)

    def of_one(data: Samples) -> Frame:
        moment = moment_behind(data)
        return best_local(moment, shared.astype(moment.trace.dtype), rank)

    return Personalized(shared, jax.jit(jax.vmap(of_one))(clients.data))


def principal_axes(
    basis: Float[ArrayLike, "d r"], samples: Sequence[Float[ArrayLike, "n_i d"]]
) -> Float[np.ndarray, "d r"]:
    """The basis of principal axes for components: uncorrelated scores, the largest variance first.

    Algorithms learn a subspace, in an arbitrary basis. Pictures need the basis whose components
    have a meaning one by one. Each client counts the same. The largest entry of each axis is
    positive.

    Args:
        basis: orthonormal components, such as `solution.result.shared`.
        samples: of all clients for shared components, of one client for its local ones; centred as
            those that the components were learned from.

    Returns:
        The axes, in columns.

    Raises:
        ValueError: for components or samples that are not tables, or differ in their features.
    """
    checked_array("basis", basis, "features rank", finite=True)
    axes = np.asarray(basis)  # in its own precision
    if not is_list(samples) or len(samples) == 0:
        raise refuse("samples", "a list of tables, one for each client", samples)
    for i, table in enumerate(samples):
        checked_array(f"samples[{i}]", table, f"rows {len(axes)}", finite=True)
    scores = [np.asarray(table) @ axes / np.sqrt(len(table)) for table in samples]
    scores = np.concatenate(scores)
    axes = axes @ np.linalg.eigh(scores.T @ scores)[1][:, ::-1]
    largest = np.take_along_axis(axes, np.argmax(np.abs(axes), axis=0)[None], axis=0)
    return axes * np.sign(largest)


def side_by_side(fitted: Fitted) -> tuple[Frame | None, Float[Array, "m d r2"] | None]:
    """A client's components: shared and local ones, or local ones alone if the two overlap.

    Raises:
        ValueError: if `fitted` is no result of PCA.
    """
    result = fitted if isinstance(fitted, Personalized) else getattr(fitted, "result", None)
    wanted = "what PCA learned: a jaxfed.Solution, its result, or what jaxfed.load returned"
    check_instance("fitted", result, Personalized, wanted)
    assert isinstance(result, Personalized)
    parts = [(result.shared, 2), (result.local, 3)]
    if not any(part is not None for part, _ in parts) or not all(
        part is None or getattr(part, "ndim", None) == axes for part, axes in parts
    ):
        raise refuse("fitted", wanted, fitted)
    shared, local = (None if part is None else jnp.asarray(part) for part, _ in parts)
    if shared is None or local is None:
        return shared, local
    if len(shared) != local.shape[1]:
        raise refuse("fitted", wanted, fitted)
    overlap = jnp.max(jnp.abs(shared.T @ local))
    # A traced overlap is not known: they count as orthogonal.
    if not isinstance(overlap, Tracer) and overlap > OVERLAP:
        return None, local
    return shared, local


def _mapped(
    argument: str,
    function: Callable[[Array, Frame], Array],
    fitted: Fitted,
    tables: Tables,
    client: int | None,
    axis: int,
    *,
    gaps: bool = False,
) -> Found:
    """Apply a function to each client's table and basis; the basis's `axis` is the table's last.

    With `gaps`, tables may hold NaN.
    """
    shared, local = side_by_side(fitted)

    def basis(i: int | Array) -> Frame:
        parts = [shared, None if local is None else local[i]]
        return jnp.concatenate([part for part in parts if part is not None], axis=1)

    width = basis(0).shape[axis]
    if client is not None or (local is None and getattr(tables, "ndim", 3) == 2):
        if client is not None and local is None:
            raise refuse("client", "None where nothing is local", client)
        if local is not None and not (is_whole(client) and 0 <= client < len(local)):
            raise refuse("client", f"a position from 0 to {len(local) - 1}", client)
        table = _checked(argument, tables, f"rows {width}", gaps)
        return function(table, basis(client or 0))
    if is_list(tables):
        owners = len(tables) if local is None else len(local)
        if len(tables) != owners:
            raise refuse(argument, f"{owners} tables, one for each client", tables)
        checked = [
            _checked(f"{argument}[{i}]", x, f"rows {width}", gaps) for i, x in enumerate(tables)
        ]
        return [function(x, basis(i)) for i, x in enumerate(checked)]
    if isinstance(tables, np.ndarray | jax.Array) and tables.ndim == 2:
        raise refuse("client", "the position of the client whose these are", client)
    shape = f"{'m' if local is None else len(local)} n {width}"
    array = _checked(argument, tables, shape, gaps)
    if local is None:
        return jax.vmap(function, (0, None))(array, basis(0))
    return jax.vmap(lambda x, i: function(x, basis(i)))(array, jnp.arange(len(local)))


def _checked(argument: str, table: Any, axes: str, gaps: bool) -> Array:
    """Finite numbers, or NaN too where there may be gaps."""
    array = checked_array(argument, table, axes, finite=not gaps)
    if gaps and not isinstance(array, Tracer) and np.isinf(np.asarray(array)).any():
        raise ValueError(f"{argument}: wanted finite numbers or NaN, got infinity")
    return array
