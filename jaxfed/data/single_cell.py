"""Reads samples of single cells, as of scanpy and LIGER, from AnnData."""

from typing import Any

import numpy as np
import scipy.sparse

from jaxfed._checks import check_name, check_text, checked_path, refuse
from jaxfed._names import natural
from jaxfed._optional import require
from jaxfed.data._arrays import as_samples, of_one_type
from jaxfed.data._files import existing, reading
from jaxfed.data.readers import ClientTables


def read_anndata(source: Any, batch_key: str, *, layer: str | None = None) -> ClientTables:
    """Read cells from AnnData: each batch or donor is a client, each gene a feature.

    Sparse matrices become dense. `source[:, genes]` chooses genes.

    Args:
        source: an `anndata.AnnData`, or the path of an `.h5ad` file.
        batch_key: the column of `obs` that names each cell's client.
        layer: the layer to read; `X` by default.

    Returns:
        Samples and name of each client, in natural order of the names, and the genes' names.

    Raises:
        FileNotFoundError: if the file does not exist.
        ImportError: if anndata is not installed.
        ValueError: if the file is damaged, there is no such column or layer, a cell has no batch,
            or values are not finite.
    """
    anndata = require("anndata", extra="anndata")
    check_text("batch_key", batch_key)
    cells, where = source, "source"
    if not isinstance(source, anndata.AnnData):
        path = existing(checked_path("source", source))
        where = str(path)
        with reading(path, "not an AnnData file"):
            cells = anndata.read_h5ad(path)
    check_name("batch_key", batch_key, list(cells.obs))
    if layer is not None:
        check_name("layer", layer, list(cells.layers))
    batches = cells.obs[batch_key]
    if batches.isna().any():
        raise refuse("batch_key", "a column without missing values", batch_key)
    table = cells.X if layer is None else cells.layers[layer]
    of_cells, arrays = batches.astype(str).to_numpy(), {}
    for name in sorted(set(of_cells), key=natural):
        rows = table[of_cells == name]
        dense = rows.toarray() if scipy.sparse.issparse(rows) else np.asarray(rows)
        arrays[name] = as_samples(dense, f"{where}: {name}")
    return ClientTables(of_one_type(arrays), list(arrays), cells.var_names.astype(str).tolist())
