"""Integrative NMF of cells in AnnData."""

import sys

import jax
import numpy as np
import pytest
import scipy.sparse

import jaxfed as jf
from bench.oracles import inmf as oracle


def test_without_anndata_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "anndata", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxfed\[anndata\]'"):
        jf.data.read_anndata("cells.h5ad", "donor")


@pytest.mark.parametrize("sparse", [False, True])
def test_cells_come_in_and_go_out(sparse, tmp_path):
    anndata = pytest.importorskip("anndata")
    samples = [x.astype(np.float32) for x in oracle.draw(0).samples]
    rng = np.random.default_rng(0)
    order = rng.permutation(sum(map(len, samples)))
    donors = np.repeat(["donor10", "donor9", "donor1"], list(map(len, samples)))[order]
    table = np.concatenate(samples)[order]
    cells = anndata.AnnData(scipy.sparse.csr_matrix(table) if sparse else table)
    cells.obs["donor"] = donors
    cells.layers["double"] = 2 * table
    arrays, names, genes = jf.data.read_anndata(cells, "donor")
    assert names == ["donor1", "donor9", "donor10"] and genes == list(cells.var_names)
    for name, array in zip(names, arrays, strict=True):
        np.testing.assert_array_equal(array, table[donors == name])
    cells.write_h5ad(tmp_path / "cells.h5ad")
    again, _, _ = jf.data.read_anndata(tmp_path / "cells.h5ad", "donor", layer="double")
    for one, other in zip(again, arrays, strict=True):
        np.testing.assert_array_equal(one, 2 * other)

    clients = jf.Clients.from_samples(arrays)
    run = jf.fit(jf.nmf.INMF(3), clients, rounds=50, key=jax.random.key(0))
    jf.nmf.annotate(run, cells, "donor")
    np.testing.assert_array_equal(cells.varm["W"], run.result.shared)
    for i, (name, loadings) in enumerate(zip(names, jf.nmf.transform(run, arrays), strict=True)):
        np.testing.assert_array_equal(cells.varm[f"V_{name}"], run.result.local[i])
        np.testing.assert_array_equal(cells.obsm["H"][donors == name], loadings)

    with pytest.raises(ValueError, match=r"^batch_key: wanted one of donor"):
        jf.data.read_anndata(cells, "batch")
    with pytest.raises(ValueError, match=r"^layer: wanted one of double"):
        jf.data.read_anndata(cells, "donor", layer="counts")
    (tmp_path / "bad.h5ad").write_bytes(b"cells")
    with pytest.raises(ValueError, match="not an AnnData file"):
        jf.data.read_anndata(tmp_path / "bad.h5ad", "donor")
