"""A Parquet file with a column of clients, rewritten with a row group for each."""

import jax
import numpy as np
import pandas as pd
import pytest

import jaxfed as jf
from jaxfed.data import grouping

pytest.importorskip("pyarrow")
FEATURES = ["iron", "zinc", "copper"]


def frame(rows=90, dtype=np.float32):
    rng = np.random.default_rng(0)
    found = pd.DataFrame(rng.normal(size=(rows, 3)).astype(dtype), columns=FEATURES)
    found.insert(1, "site", rng.choice(["site10", "site2", "site1"], rows))
    return found


def written(tmp_path, table, **options):
    table.to_parquet(tmp_path / "all.parquet", **options)
    return tmp_path / "all.parquet", tmp_path / "grouped.parquet"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cells", [2**20, 20])
def test_clients_have_their_rows_in_order(dtype, cells, tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "CELLS", cells)
    table = frame(dtype=dtype)
    found = jf.data.group_parquet(*written(tmp_path, table, row_group_size=7), by="site")
    assert found.names == ["site1", "site2", "site10"] and found.features == FEATURES
    for name, rows in zip(found.names, found, strict=True):
        np.testing.assert_array_equal(rows, table[table.site == name][FEATURES])
        assert rows.dtype == dtype
    again = jf.data.ParquetGroups(tmp_path / "grouped.parquet")
    assert again.names == found.names and again.counts.tolist() == found.counts.tolist()
    assert {path.name for path in tmp_path.iterdir()} == {"all.parquet", "grouped.parquet"}


@pytest.mark.parametrize("kind", ["category", "int", "blanks"])
def test_clients_are_named_as_in_other_tables(kind, tmp_path):
    table = frame()
    if kind == "category":
        table["site"] = table["site"].astype("category")
    elif kind == "int":
        table["site"] = table["site"].str.removeprefix("site").astype(int)
    else:
        table.loc[::2, "site"] = " " + table["site"]
    paths = written(tmp_path, table)
    found = jf.data.group_parquet(*paths, by="site")
    wanted = jf.data.read_table(paths[0], client_column="site")
    assert found.names == wanted.names
    for one, other in zip(found, wanted.samples, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_on_the_file_is_that_on_the_table(tmp_path):
    table, key = frame(), jax.random.key(0)
    table["note"] = "some text"
    grouped = jf.data.group_parquet(*written(tmp_path, table), by="site")
    runs = [
        jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=20, key=key)
        for clients in (
            jf.Clients.from_source(grouped, bucket=None),
            jf.Clients.from_frame(table.drop(columns="note"), by="site"),
        )
    ]
    assert runs[0].names == runs[1].names
    np.testing.assert_allclose(runs[0].result.shared, runs[1].result.shared, atol=1e-4)


def test_whole_numbers_become_doubles(tmp_path):
    table = frame().assign(zinc=np.arange(90) + 2**40, copper=np.arange(90))
    paths = written(tmp_path, table)
    found = jf.data.group_parquet(*paths, by="site", features=["zinc", "copper"])
    assert found.features == ["zinc", "copper"]
    rows = sorted(np.concatenate(list(found)).tolist())
    assert rows == [[x + 2**40, x] for x in range(90)]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, {"by": "sites"}, r"wanted one column 'sites'.*did you mean site\?"),
        ({}, {"features": []}, r"^features: wanted at least one column"),
        ({}, {"features": ["lead"]}, r"wanted one column 'lead'"),
        ({"note": "x"}, {"features": ["note"]}, r"wanted columns of numbers.*'note'"),
        ({}, {"features": ["site"]}, r"wanted columns of numbers.*'site'"),
        ({"zinc": np.where(np.arange(90) == 5, None, 1.0)}, {}, r"column 'zinc' has 1 missing"),
        ({"site": np.where(np.arange(90) == 5, None, "a")}, {}, r"client of each row in 'site'"),
        ({"site": np.where(np.arange(90) == 5, np.nan, 1.0)}, {}, r"client of each row in 'site'"),
        ({"site": " "}, {}, r"client of each row in 'site'"),
        ({"zinc": 2**53 + np.arange(90)}, {}, r"column 'zinc': wanted whole numbers up to 2\*\*53"),
        ({"zinc": np.arange(90)}, {}, r"column 'zinc' counts the rows and is no feature"),
        ({"zinc": 1.0 + np.arange(90)}, {}, r"column 'zinc' counts the rows and is no feature"),
    ],
)
def test_bad_files_are_refused_and_leave_nothing(change, options, said, tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "CELLS", 40)
    paths = written(tmp_path, frame().assign(**change))
    with pytest.raises(ValueError, match=said):
        jf.data.group_parquet(*paths, **({"by": "site"} | options))
    assert [path.name for path in tmp_path.iterdir()] == ["all.parquet"]


def test_other_files_are_left_alone(tmp_path):
    path, out = written(tmp_path, frame())
    out.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"exists already"):
        jf.data.group_parquet(path, out, by="site")
    assert out.read_bytes() == b"mine"
    with pytest.raises(FileNotFoundError):
        jf.data.group_parquet(path, tmp_path / "absent" / "out.parquet", by="site")
    with pytest.raises(ValueError, match=r"not a Parquet file"):
        jf.data.group_parquet(out, tmp_path / "other.parquet", by="site")


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    paths = written(tmp_path, frame())
    monkeypatch.setattr(grouping.os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jf.data.group_parquet(*paths, by="site")
    assert [path.name for path in tmp_path.iterdir()] == ["all.parquet"]
