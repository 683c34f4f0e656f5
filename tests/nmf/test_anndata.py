"""Integrative NMF of cells in AnnData."""

import sys

import jax
import numpy as np
import pytest
import scipy.sparse

import jaxfed as jf
from bench.oracles import inmf as oracle


def write(cells, path):
    settings = pytest.importorskip("anndata").settings
    # Some versions write the strings of pandas 3 only if they are told to.
    if hasattr(settings, "allow_write_nullable_strings"):
        settings.allow_write_nullable_strings = True
    cells.write_h5ad(path)


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
    write(cells, tmp_path / "cells.h5ad")
    again, _, _ = jf.data.read_anndata(tmp_path / "cells.h5ad", "donor", layer="double")
    for one, other in zip(again, arrays, strict=True):
        np.testing.assert_array_equal(one, 2 * other)

    clients = jf.Clients.from_samples(jf.data.read_anndata(cells, "donor"))
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


def drawn(names=("a", "b", "c"), genes=30, seed=0):
    """AnnData with 20 cells of each of these donors."""
    anndata = pytest.importorskip("anndata")
    rng = np.random.default_rng(seed)
    cells = anndata.AnnData(rng.gamma(1.0, size=(20 * len(names), genes)).astype(np.float32))
    cells.obs["donor"] = np.repeat(names, 20)
    cells.var_names = [f"gene{i}" for i in range(genes)]
    return cells


def learned(cells):
    clients = jf.Clients.from_samples(jf.data.read_anndata(cells, "donor"))
    return jf.fit(jf.nmf.INMF(2), clients, rounds=5, key=jax.random.key(0))


def test_loadings_are_written_to_their_genes_and_factors_to_their_donors():
    """Both used to go by position."""
    cells = drawn()
    run = learned(cells)
    jf.nmf.annotate(run, cells, "donor")
    moved = drawn()[::-1, ::-1].copy()
    jf.nmf.annotate(run, moved, "donor")
    for name in ("W", "V_a", "V_b", "V_c"):
        np.testing.assert_array_equal(moved.varm[name], cells.varm[name][::-1])
    np.testing.assert_allclose(moved.obsm["H"], cells.obsm["H"][::-1], atol=1e-5)
    with pytest.raises(
        ValueError, match=r"^cells, donor: wanted a, b, c, got a, b, d \(without c, with d besides"
    ):
        jf.nmf.annotate(run, drawn(("a", "b", "d")), "donor")
    with pytest.raises(ValueError, match=r"^cells, genes: wanted gene0, .*without gene29\)$"):
        jf.nmf.annotate(run, drawn(genes=29), "donor")
    with pytest.raises(ValueError, match=r"^fitted: wanted a run of clients with names"):
        jf.nmf.annotate(run.result, cells, "donor")


def test_folders_and_files_of_cells_are_read_as_others(tmp_path):
    one, other = drawn(("a", "b"), 4), drawn(("b", "c"), 5, seed=1)[:, [4, 3, 1, 0]].copy()
    write(one, tmp_path / "plate1.h5ad")
    found = jf.data.read_folder(tmp_path / "plate1.h5ad", client_column="donor")
    assert found.names == ["a", "b"] and found.features == list(one.var_names)
    np.testing.assert_array_equal(np.concatenate(found.samples), one.X)
    with pytest.raises(ValueError, match="one file holds all clients, name their client_column"):
        jf.data.read_folder(tmp_path / "plate1.h5ad")
    np.testing.assert_array_equal(jf.data.read_client(tmp_path / "plate1.h5ad").samples, [one.X])
    write(other, tmp_path / "plate2.h5ad")
    by_donor = jf.data.read_folder(tmp_path, client_column="donor")
    assert (by_donor.names, by_donor.features) == (["a", "b", "c"], ["gene0", "gene1", "gene3"])
    by_file = jf.data.read_folder(tmp_path, missing="mask")
    assert by_file.names == ["plate1", "plate2"] and len(by_file.features or ()) == 5
    assert np.isnan(by_file.samples[1][:, by_file.features.index("gene2")]).all()
    with pytest.raises(ValueError, match=r"sep=',' is for tables"):
        jf.data.read_folder(tmp_path, sep=",")


def test_genes_that_a_file_lacks_are_missing_and_not_zero(tmp_path):
    one, other = drawn(("a", "b"), 4), drawn(("b", "c"), 5, seed=1)[:, [4, 3, 1, 0]].copy()
    write(other, tmp_path / "other.h5ad")
    sources = [one, tmp_path / "other.h5ad"]
    tables, names, genes = jf.data.read_anndata(sources, "donor")
    assert names == ["a", "b", "c"] and genes == ["gene0", "gene1", "gene3"]
    np.testing.assert_array_equal(tables[0], one.X[:20, [0, 1, 3]])
    both = np.concatenate([one.X[20:, [0, 1, 3]], other.X[:20, [3, 2, 1]]])
    np.testing.assert_array_equal(tables[1], both)
    whole = jf.data.read_anndata(sources, "donor", genes="all")
    assert whole.features == ["gene0", "gene1", "gene2", "gene3", "gene4"]
    assert np.isnan(whole.samples[0][:, 4]).all() and np.isnan(whole.samples[2][:, 2]).all()
    clients = jf.Clients.from_samples(whole, missing="mask")
    assert clients.names.clients == ("a", "b", "c")
    other.var_names = ["x", "x", "y", "z"]
    with pytest.raises(ValueError, match=r"^source\[1\]: wanted each gene once.* got x twice$"):
        jf.data.read_anndata([one, other], "donor")
    other.var_names = ["v", "x", "y", "z"]
    with pytest.raises(ValueError, match=r"^source: wanted genes that all sources have"):
        jf.data.read_anndata([one, other], "donor")
