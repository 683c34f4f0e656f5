"""Use learned components: loadings of samples, and values for missing entries.

Samples are an array `(clients, samples, features)`, a list of `(samples_i, features)` arrays, one
per client, or one array `(samples, features)` of the client `client`. Columns of data frames
and of arrays of xarray are put in the order of the features that were learned. NaN marks missing
entries.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jaxfed._optional import require
from jaxfed._rows import rows_by_name
from jaxfed.contract import Personalized, check_factor, check_instance, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.names import DataFrame, order_of
from jaxfed.core.clients.samples import IncompleteSamples
from jaxfed.core.run.result import (
    Fitted,
    in_learned_order,
    names_of,
    not_learned,
    place_of,
    result_of,
)
from jaxfed.core.run.runner import call_compiled
from jaxfed.data.single_cell import read_anndata
from jaxfed.nmf._nonnegative import loadings_of
from jaxfed.nmf.inmf import INMF

Tables: TypeAlias = (
    Float[ArrayLike, "clients samples features"]
    | Float[ArrayLike, "samples features"]
    | DataFrame
    | LabelledArray
    | Sequence[Float[ArrayLike, "samples_i features"] | DataFrame | LabelledArray]
)
Found: TypeAlias = Float[Array, "..."] | list[Float[Array, "samples_i ..."]]


def transform(
    fitted: Fitted,
    samples: Tables,
    *,
    penalty: float | Array | None = None,
    client: int | str | None = None,
) -> Found:
    """Compute loadings of samples by non-negative least squares, from their observed entries.

    Args:
        fitted: a solution of `INMF`, its result, or what `jaxfed.load` returned.
        samples: `(m, n, d)`, a list of `(n_i, d)`, or `(n, d)` with `client`.
        penalty: λ of the run; by default that of the solution's algorithm.
        client: name or id of the client that all samples belong to.

    Returns:
        Loadings in the form of the samples, with the rank in place of d.

    Raises:
        ValueError: if `fitted` is not a result of `INMF`, its penalty is not known, or the samples
            have other clients or features, infinite values or no observed entry.
    """
    return _mapped(_loadings, fitted, samples, penalty, client)


def complete(
    fitted: Fitted,
    samples: Tables,
    *,
    penalty: float | Array | None = None,
    client: int | str | None = None,
) -> Found:
    """Fill in missing entries of samples by their fitted values.

    Their errors on entries that were held out choose the rank and the penalty.

    Args:
        fitted: a solution of `INMF`, its result, or what `jaxfed.load` returned.
        samples: as for `transform`.
        penalty: as for `transform`.
        client: as for `transform`.

    Returns:
        Samples in the same form; observed entries do not change.

    Raises:
        ValueError: as `transform`.
    """
    return _mapped(_completed, fitted, samples, penalty, client)


def annotate(
    fitted: Fitted,
    cells: Any,
    batch_key: str,
    *,
    layer: str | None = None,
    penalty: float | Array | None = None,
) -> None:
    """Write components and loadings to AnnData with cells of the clients.

    As in LIGER: `obsm["H"]` has loadings, `varm["W"]` shared parts, and `varm["V_" + name]` the own
    parts of each batch. Batches and genes are those of the run by name, in any order.

    Args:
        fitted: a solution of `INMF` whose clients had names, as of
            `jaxfed.Clients.from_samples(jaxfed.data.read_anndata(...))`, or what `jaxfed.load`
            returned.
        cells: an `anndata.AnnData`, which is changed.
        batch_key: as of `jaxfed.data.read_anndata`.
        layer: as of `jaxfed.data.read_anndata`.
        penalty: as for `transform`.

    Raises:
        ImportError: if anndata is not installed.
        ValueError: if there are no names, or the cells have other batches or genes than the run; or
            as `transform` and `jaxfed.data.read_anndata`.
    """
    shared, local = _result(fitted)
    anndata = require("anndata", extra="anndata")
    check_instance("cells", cells, anndata.AnnData, "an anndata.AnnData")
    donors, genes, _ = names_of(fitted)
    if donors is None or genes is None:
        wanted = "a run of clients with names, Clients.from_samples(arrays, names=, features=)"
        raise refuse("fitted", wanted, "one without")
    arrays, names, features = read_anndata(cells, batch_key, layer=layer)
    of_batch = order_of(donors, names, f"cells, {batch_key}")
    of_gene = order_of(genes, features or [], "cells, genes")
    loadings = transform(fitted, [arrays[i][:, of_gene] for i in of_batch], penalty=penalty)
    batches = cells.obs[batch_key].astype(str).to_numpy()
    found = np.empty((len(batches), shared.shape[1]), shared.dtype)
    rows = rows_by_name(batches)
    for name, own in zip(donors, loadings, strict=True):
        found[rows[name]] = own
    place = np.argsort(of_gene)  # of the cells' genes among those of the run
    cells.obsm["H"], cells.varm["W"] = found, np.asarray(shared)[place]
    for name, own in zip(donors, local, strict=True):
        cells.varm[f"V_{name}"] = np.asarray(own)[place]


def _mapped(
    function: Callable[[Array, Array, Array], Array],
    fitted: Fitted,
    samples: Tables,
    penalty: float | Array | None,
    client: int | str | None,
) -> Found:
    """Apply a function to each client's samples, components and loadings."""
    shared, local = _result(fitted)
    tables: Any = in_learned_order(fitted, samples, "samples")
    if penalty is None:
        algorithm = getattr(fitted, "algorithm", None)
        if not isinstance(algorithm, INMF):
            raise refuse("penalty", "the λ of the run, since `fitted` does not have it", penalty)
        penalty = algorithm.penalty
    check_factor("penalty", penalty, single=True)
    weight = jnp.asarray(penalty, shared.dtype)
    if client is not None:
        place = place_of(fitted, client, len(local))
        local = local[place : place + 1]
    clients = Clients.from_samples(tables if client is None else [tables], missing="mask")
    if len(clients) != len(local) or clients.features != len(shared):
        raise refuse("samples", f"{len(local)} clients with {len(shared)} features", clients)
    arguments = shared, local, clients.data, weight
    found = call_compiled(_of_all, function, *arguments, static_argnums=(0,))
    if client is not None:
        return found[0]
    if isinstance(tables, Sequence):
        return [rows[: np.shape(x)[0]] for rows, x in zip(found, tables, strict=True)]
    return found


def _loadings(x: Array, components: Array, loadings: Array) -> Array:
    return loadings


def _completed(x: Array, components: Array, loadings: Array) -> Array:
    return jnp.where(jnp.isnan(x), loadings @ components.T, x)


def _of_all(
    function: Callable[[Array, Array, Array], Array],
    shared: Float[Array, "features rank"],
    local: Float[Array, "clients features rank"],
    data: IncompleteSamples,
    weight: Float[Array, ""],
) -> Array:
    """Apply a function to each client's samples, components and loadings, in one program."""

    def of_one(own: Array, data: IncompleteSamples) -> Array:
        values = jnp.where(data.observed, data.values, 0)
        found = loadings_of(shared.T, own.T, weight, values, data.observed).values
        return function(data.values, shared + own, found)

    return jax.vmap(of_one)(local, data)


def _result(fitted: Fitted) -> Personalized:
    """Return the shared and the clients' own parts.

    Raises:
        ValueError: if `fitted` is not a result of `INMF`.
    """
    result = result_of(fitted, "INMF")
    if getattr(result.shared, "ndim", 0) != 2 or getattr(result.local, "ndim", 0) != 3:
        raise not_learned(fitted, "INMF")
    return Personalized(jnp.asarray(result.shared), jnp.asarray(result.local))
