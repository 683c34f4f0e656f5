"""Reads samples of single cells, as of scanpy and LIGER, from AnnData."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import scipy.sparse

from jaxfed._checks import check_list, check_name, check_text, checked_path, is_list, refuse
from jaxfed._names import natural
from jaxfed._optional import require
from jaxfed._rows import rows_by_name
from jaxfed.data._arrays import ClientTables, as_samples, of_one_type
from jaxfed.data._files import existing, reading


def read_anndata(
    source: Any,
    batch_key: str | None = None,
    *,
    layer: str | None = None,
    genes: Literal["common", "all"] = "common",
) -> ClientTables:
    """Read cells from AnnData: each batch or donor is a client, each gene a feature.

    Sparse matrices become dense. `source[:, genes]` chooses genes.

    Args:
        source: an `anndata.AnnData`, the path of an `.h5ad` file, or a list of these, whose genes
            are matched by name and cells of one batch put together.
        batch_key: the column of `obs` that names each cell's client; None if each source is one
            client, named after its file.
        layer: the layer to read; `X` by default.
        genes: of several sources: `"common"` reads those that all have; `"all"` those that any
            has, with NaN, for missing entries, where a source lacks one. `anndata.concat` with
            `join="outer"` would put zeros there, which count as measured.

    Returns:
        Samples and name of each client, in natural order of the names, and the genes' names.
        `jaxfed.Clients.from_samples` takes them together.

    Raises:
        FileNotFoundError: if a file does not exist.
        ImportError: if anndata is not installed.
        ValueError: if a file is damaged, there is no such column or layer, a cell has no batch,
            values are not finite, or several sources name genes twice or have none in common.
    """
    require("anndata", extra="anndata")
    if batch_key is not None:
        check_text("batch_key", batch_key)
    check_name("genes", genes, ("common", "all"))
    if not is_list(source):
        return _read_one(source, "source", batch_key, layer)
    check_list("source", source, "AnnData or paths")
    parts = [_read_one(each, f"source[{i}]", batch_key, layer) for i, each in enumerate(source)]
    chosen = _together([part.features or [] for part in parts], genes)
    found: dict[str, list[np.ndarray]] = {}
    for samples, names, features in parts:
        place = {gene: k for k, gene in enumerate(features or [])}
        own = [k for k, gene in enumerate(chosen) if gene in place]
        columns = [place[chosen[k]] for k in own]
        for name, table in zip(names, samples, strict=True):
            whole = np.full((len(table), len(chosen)), np.nan, table.dtype)
            whole[:, own] = table[:, columns]
            found.setdefault(name, []).append(whole)
    arrays = {name: np.concatenate(found[name]) for name in sorted(found, key=natural)}
    return ClientTables(of_one_type(arrays), list(arrays), chosen)


def _together(genes: Sequence[list[str]], which: str) -> list[str]:
    """The genes to read of several sources, in the order of the first that has them."""
    for i, own in enumerate(genes):
        if len(set(own)) < len(own):
            twice = next(gene for gene in own if own.count(gene) > 1)
            wanted = "each gene once; call var_names_make_unique() before"
            raise ValueError(f"source[{i}]: wanted {wanted}, got {twice} twice")
    if which == "all":
        return list(dict.fromkeys(gene for own in genes for gene in own))
    common = set(genes[0]).intersection(*genes[1:])
    if not common:
        raise ValueError("source: wanted genes that all sources have, got none")
    return [gene for gene in genes[0] if gene in common]


def _read_one(source: Any, where: str, batch_key: str | None, layer: str | None) -> ClientTables:
    """Read one AnnData or file."""
    anndata = require("anndata", extra="anndata")
    cells, whole = source, where
    if not isinstance(source, anndata.AnnData):
        path = existing(checked_path(where, source))
        where, whole = str(path), path.stem
        with reading(path, "not an AnnData file"):
            cells = anndata.read_h5ad(path)
    if batch_key is not None:
        check_name("batch_key", batch_key, list(cells.obs))
    if layer is not None:
        check_name("layer", layer, [name for name in cells.layers if name])  # None is of X
    if batch_key is None:
        of_cells = np.full(cells.n_obs, whole)
    elif cells.obs[batch_key].isna().any():
        raise refuse("batch_key", "a column without missing values", batch_key)
    else:
        of_cells = cells.obs[batch_key].astype(str).to_numpy()
    table, arrays = cells.X if layer is None else cells.layers[layer], {}
    for name, rows in rows_by_name(of_cells).items():
        own = table[rows]
        dense = own.toarray() if scipy.sparse.issparse(own) else np.asarray(own)
        arrays[name] = as_samples(dense, f"{where}: {name}")
    return ClientTables(of_one_type(arrays), list(arrays), cells.var_names.astype(str).tolist())
