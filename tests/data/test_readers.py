"""Readers: each format as written, and each malformation refused with the file's name."""

import gzip
import os
import struct

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import scipy.sparse
from PIL import Image
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from jaxfed.data import (
    ParquetGroups,
    read_arrays,
    read_client,
    read_folder,
    read_idx,
    read_images,
    read_table,
    read_views,
)
from papers.perpca._transcripts import (
    SPOKEN_FILLERS,
    paragraphs,
    repair_mojibake,
    strip_transcript,
    word_counts,
)

A = np.arange(6, dtype=np.float32).reshape(3, 2)
B = A[:2] + 0.5


def test_the_features_of_a_table_have_names(tmp_path):
    (tmp_path / "t.csv").write_text("site,age,weight\na,1,2\nb,3,4\n")
    found = read_table(tmp_path / "t.csv", client_column="site")
    assert (found.names, found.features) == (["a", "b"], ["age", "weight"])
    (tmp_path / "t.csv").write_text("1,2\n3,4\n")
    assert read_table(tmp_path).features is None
    assert read_folder(tmp_path).features is None


def check(read, arrays, names, dtype: type = np.float32):
    got, got_names = read[:2]
    assert got_names == names
    assert len(got) == len(arrays)
    for x, y in zip(got, arrays, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, y)


# Arrays -----------------------------------------------------------------------------------------


def test_npy_folder_in_natural_order(tmp_path):
    for name, array in (("client10", B), ("client2", A), ("client1", B)):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "notes.md").write_text("ignored")
    check(read_arrays(tmp_path), [B, A, B], ["client1", "client2", "client10"])
    check(read_folder(tmp_path), [B, A, B], ["client1", "client2", "client10"])


def test_npz_folder(tmp_path):
    np.savez(tmp_path / "a.npz", x=A)
    np.savez(tmp_path / "b.npz", x=B)
    check(read_folder(tmp_path), [A, B], ["a", "b"])


def test_names_stay_distinct(tmp_path):
    np.save(tmp_path / "a.npy", A)
    np.savez(tmp_path / "a.npz", x=B)
    check(read_arrays(tmp_path), [A, B], ["a.npy", "a.npz"])


def test_one_npz_holds_the_clients(tmp_path):
    path = tmp_path / "all.npz"
    np.savez(path, site10=A, site9=B, labels=np.zeros(3))
    check(read_arrays(path, names=["site9", "site10"]), [B, A], ["site9", "site10"])
    with pytest.raises(ValueError, match=r"all.npz: labels: wanted shape"):
        read_arrays(path)


def test_one_array_of_three_axes_holds_the_clients(tmp_path):
    np.save(tmp_path / "all.npy", np.stack([A, A + 1]))
    check(read_folder(tmp_path / "all.npy"), [A, A + 1], ["all[0]", "all[1]"])
    np.savez(tmp_path / "all.npz", x=np.stack([A, A + 1]))
    check(read_folder(tmp_path / "all.npz"), [A, A + 1], ["x[0]", "x[1]"])


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool", "float16", ">f4"])
def test_other_numbers_become_float32(tmp_path, dtype):
    np.save(tmp_path / "a.npy", A.astype(dtype))
    check(read_arrays(tmp_path), [A.astype(dtype).astype(np.float32)], ["a"])


def test_one_float64_makes_all_float64(tmp_path):
    np.save(tmp_path / "a.npy", A)
    np.save(tmp_path / "b.npy", B.astype(np.float64))
    check(read_arrays(tmp_path), [A, B], ["a", "b"], dtype=np.float64)


def test_views_may_differ_in_features(tmp_path):
    path = tmp_path / "views.npz"
    np.savez(path, one=A, two=np.ones((3, 5)))
    with pytest.raises(ValueError, match="one has 2 and two has 5"):
        read_arrays(path)
    arrays, _, _ = read_arrays(path, same_features=False)
    assert [x.shape for x in arrays] == [(3, 2), (3, 5)]


def write_truncated(path):
    np.save(path, A)
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: np.save(p, np.array([[1, None]])), "Object arrays cannot be loaded"),
        (lambda p: np.save(p, np.array([["a", "b"]])), "wanted real numbers"),
        (lambda p: np.save(p, A * 1j), "wanted real numbers, got complex"),
        (lambda p: np.save(p, np.zeros((2, 2), [("x", "f4")])), "wanted real numbers"),
        (lambda p: np.save(p, A[0]), r"wanted shape \(samples, features\), got \(2,\)"),
        (lambda p: np.save(p, A[:0]), "is empty"),
        (lambda p: np.save(p, np.array([[1.0, 2.0], [3.0, np.nan]])), "row 1, column 1.* is nan"),
        (lambda p: np.save(p, np.array([[np.inf, 2.0]])), "row 0, column 0.* is inf"),
        (lambda p: np.save(p, np.ones((3, 4))), "bad.npy has 4"),
        (lambda p: p.write_bytes(b""), "bad.npy"),
        (lambda p: p.write_text("not an array"), "bad.npy"),
        (write_truncated, "bad.npy"),
    ],
)
def test_malformed_arrays_are_refused(tmp_path, write, message):
    np.save(tmp_path / "another.npy", A)
    write(tmp_path / "bad.npy")
    with pytest.raises(ValueError, match=message) as caught:
        read_arrays(tmp_path)
    assert "bad.npy" in str(caught.value)


def test_malformed_archives_are_refused(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, x=A, y=B)
    with pytest.raises(ValueError, match=r"bad.npz: holds the arrays x, y"):
        read_arrays(tmp_path)
    with pytest.raises(ValueError, match=r"bad.npz: cannot be read \(holds x, y, not z\)"):
        read_arrays(path, names=["z"])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"bad.npz"):
        read_arrays(path)
    np.savez(path)
    with pytest.raises(ValueError, match=r"bad.npz: wanted an archive of arrays"):
        read_arrays(path)
    np.save(tmp_path / "flat.npy", A)
    with pytest.raises(ValueError, match=r"flat.npy: holds one array of shape \(3, 2\)"):
        read_arrays(tmp_path / "flat.npy")
    with pytest.raises(ValueError, match=r"names choose arrays of an .npz"):
        read_arrays(tmp_path / "flat.npy", names=["x"])


# Tables -----------------------------------------------------------------------------------------


def test_csv_folder_with_and_without_header(tmp_path):
    (tmp_path / "b.csv").write_text("x,y\n0.5,1.5\n\n2.5,3.5\n")
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"x","y"\r\n0,1\r\n2,3\r\n4,5\r\n')
    check(read_folder(tmp_path), [A, B], ["a", "b"], dtype=np.float64)
    (tmp_path / "a.csv").write_text("0,1\n2,3\n4,5\n")
    (tmp_path / "b.csv").write_text("0.5, 1.5\n2.5, 3.5\n")
    check(read_table(tmp_path), [A, B], ["a", "b"], np.float64)


def test_csv_header_that_counts_is_a_header(tmp_path):
    wide = np.hstack([A, A])
    pd.DataFrame(wide).to_csv(tmp_path / "a.csv", index=False)
    check(read_table(tmp_path), [wide], ["a"], dtype=np.float64)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("table", "index"),
    [
        (pd.DataFrame(A, ["u", "v", "w"], ["x", "y"]), "'__index_level_0__'|''"),
        (pd.DataFrame(A, [2, 0, 5], ["x", "y"]), "'__index_level_0__'|''"),
        (pd.DataFrame(A, [[1, 1, 2], [3, 4, None]], ["x", "y"]), "'__.*1__'|'', ''"),
        (
            pd.DataFrame({"Unnamed: 0": [0, 1, 2], "x": A[:, 0], "y": A[:, 1]}),
            "'', '.*|'Unnamed: 0'",
        ),
    ],
    ids=["names", "numbers", "levels", "read before"],
)
def test_the_index_of_a_data_frame_is_no_feature(tmp_path, suffix, table, index):
    path = tmp_path / f"a.{suffix}"
    table.to_csv(path) if suffix == "csv" else table.to_parquet(path)
    with pytest.warns(UserWarning, match=f"{tmp_path.name}: left out ({index})") as caught:
        read = read_folder(tmp_path)
    check(read, [A], ["a"], np.float64 if suffix == "csv" else np.float32)
    assert caught[0].filename == __file__ and "index=False" in str(caught[0].message)
    (tmp_path / f"b.{suffix}").write_bytes(path.read_bytes())
    with pytest.warns(UserWarning, match=index):
        views, _ = read_views(tmp_path)
    assert [view.shape for view in views] == [(3, 2)] * 2


def test_an_index_may_tell_whose_a_row_is_and_an_unnamed_one_stands_above_numbers(tmp_path):
    pd.DataFrame(A, pd.Index(["s2", "s1", "s2"], name="site")).rename(columns=str).to_parquet(
        tmp_path / "a.parquet"
    )
    read = read_table(tmp_path / "a.parquet", client_column="site")
    check(read, [A[1:2], A[[0, 2]]], ["s1", "s2"])
    with pytest.warns(UserWarning, match="left out 'site', the index"):
        check(read_table(tmp_path), [A], ["a"])
    wide = np.hstack([A, A])
    pd.DataFrame(wide).to_csv(tmp_path / "b.csv")
    (tmp_path / "a.parquet").unlink()
    with pytest.warns(UserWarning, match="left out '', the index"):
        check(read_table(tmp_path), [wide], ["b"], dtype=np.float64)
    pd.DataFrame(A, [0.5, 1.5, 2.5]).rename(columns=str).to_parquet(tmp_path / "c.parquet")
    with pytest.warns(UserWarning, match="left out '__index_level_0__'"):
        np.testing.assert_array_equal(ParquetGroups(tmp_path / "c.parquet")[0], A)
    (tmp_path / "c.parquet").unlink()
    (tmp_path / "b.csv").write_text("Unnamed: 0\n0\n1\n")
    with pytest.raises(ValueError, match=r"b\.csv: has no column besides the index"):
        read_table(tmp_path)


@pytest.mark.parametrize("said", ["[5]", "{", '{"index_columns": 5}'])
def test_what_pandas_says_of_columns_may_be_damaged(tmp_path, said):
    table = pyarrow.table({"x": A[:, 0]}).replace_schema_metadata({"pandas": said})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: damaged metadata of pandas"):
        read_table(tmp_path)


@pytest.mark.parametrize(("row", "cell"), [("NA,NA", "NA"), (",", ""), ("null, N/A", "null")])
def test_missing_values_are_no_header(tmp_path, row, cell):
    (tmp_path / "a.csv").write_text(f"{row}\n1,2\n")
    with pytest.raises(ValueError, match=rf"a\.csv: column '0', row 0 .* is '{cell}', a missing"):
        read_table(tmp_path)


def test_columns_may_be_called_what_looks_like_a_missing_value(tmp_path):
    (tmp_path / "a.csv").write_text("Na,K\n0,1\n2,3\n4,5\n")
    check(read_table(tmp_path), [A], ["a"], dtype=np.float64)
    (tmp_path / "a.csv").write_text("NA,K\n0,1\n2,3\n4,5\n")
    check(read_table(tmp_path), [A], ["a"], dtype=np.float64)


GAPS = np.array([[np.nan, 1], [2, np.nan], [4, 5]])


def write_gaps(folder, suffix):
    """A client's samples in which two entries are missing."""
    path = folder / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, GAPS)
    elif suffix == "npz":
        np.savez(path, x=GAPS)
    elif suffix == "parquet":
        pd.DataFrame({"x": pd.array([None, 2, 4], "Int64"), "y": GAPS[:, 1]}).to_parquet(path)
    else:
        path.write_text("x,y\n,1\n2, NA\n4,5\n")
    return path


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv", "parquet"])
def test_missing_entries_are_kept_if_that_is_asked_for(tmp_path, suffix):
    write_gaps(tmp_path, suffix)
    check(read_folder(tmp_path, missing="mask"), [GAPS], ["a"], np.float64)
    read = read_table if suffix in ("csv", "parquet") else read_arrays
    check(read(tmp_path, missing="mask"), [GAPS], ["a"], np.float64)
    with pytest.raises(ValueError, match=rf'a\.{suffix}: .*; missing="mask" .* takes NaN and'):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match=r"^missing: wanted"):
        read_folder(tmp_path, missing="drop")
    # Views have no such choice.
    write_gaps(tmp_path, suffix).rename(tmp_path / f"b.{suffix}")
    write_gaps(tmp_path, suffix)
    with pytest.raises(ValueError, match=rf"a\.{suffix}: ") as caught:
        read_views(tmp_path)
    assert "missing=" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_missing_entry_is_no_missing_client(tmp_path, suffix):
    path = tmp_path / f"all.{suffix}"
    table = pd.DataFrame({"site": ["t", "s", "t"], "x": [1.0, np.nan, 3.0], "y": 2.0})

    def write():
        table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)

    write()
    wanted = [np.array([[np.nan, 2]]), np.array([[1, 2], [3, 2]])]
    read = read_folder(path, client_column="site", missing="mask")
    check(read, wanted, ["s", "t"], np.float64)
    table.loc[0, "site"] = None
    write()
    with pytest.raises(ValueError, match=r"column 'site' has (empty cells|1 missing values)$"):
        read_folder(path, client_column="site", missing="mask")


@pytest.mark.parametrize("cell", ["inf", "four"])
def test_what_is_no_number_is_not_missing(tmp_path, cell):
    (tmp_path / "a.csv").write_text(f"x,y\n1,2\n,{cell}\n")
    with pytest.raises(ValueError, match=rf"a\.csv: .*{cell}") as caught:
        read_folder(tmp_path, missing="mask")
    assert "missing=" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_one_table_with_a_client_column(tmp_path, suffix):
    table = pd.DataFrame({"x": A[:, 0], "site": ["s10", "s9", "s10"], "y": A[:, 1]})
    path = tmp_path / f"all.{suffix}"
    if suffix == "csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    dtype = np.float64 if suffix == "csv" else np.float32
    expected = [A[1:2], A[[0, 2]]]
    check(read_folder(path, client_column="site"), expected, ["s9", "s10"], dtype)
    check(read_folder(tmp_path, client_column="site"), expected, ["s9", "s10"], dtype)
    with pytest.raises(ValueError, match=f"all.{suffix}: wanted one column 'who'.* x, site, y"):
        read_folder(path, client_column="who")
    with pytest.raises(ValueError, match=f"all.{suffix}: one table holds all clients"):
        read_folder(path)
    with pytest.raises(ValueError, match=f"all.{suffix}: column 'site' holds|row 0.*'s10'"):
        read_folder(tmp_path)


def test_numbered_clients_of_a_table(tmp_path):
    (tmp_path / "t.csv").write_text("site,x\n10,1\n9,2\n")
    arrays, names, _ = read_table(tmp_path / "t.csv", client_column="site")
    assert names == ["9", "10"]
    np.testing.assert_array_equal(np.concatenate(arrays), [[2], [1]])


def test_clients_of_a_parquet_column(tmp_path):
    path, x = tmp_path / "t.parquet", np.arange(8.0) ** 2
    pd.DataFrame({"site": ["x", " x", "x ", "y"] * 2, "x": x}).to_parquet(path)
    arrays, names, _ = read_table(path, client_column="site")
    assert names == ["x", "y"] and [len(own) for own in arrays] == [6, 2]
    column = pyarrow.array([1.0, float("nan")] * 4)  # which pandas would write as a null
    pyarrow.parquet.write_table(pyarrow.table({"site": column, "x": x}), path)
    with pytest.raises(ValueError, match="column 'site' has 4 missing values"):
        read_table(path, client_column="site")


def test_parquet_folder(tmp_path):
    pd.DataFrame({"x": [1, 2], "y": [True, False]}).to_parquet(tmp_path / "a.parquet")
    check(read_folder(tmp_path), [np.array([[1, 1], [2, 0]])], ["a"], dtype=np.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,y\n1,2\n3\n", "ragged, line 3 has 1 cells and line 1 has 2"),
        ("x,y\n1,2\n3,four\n", "column 'y', row 1 .* is 'four', not a number"),
        ("x,y\n1,\n", "column 'y', row 0 .* is '', a missing value; missing=\"mask\""),
        ("site,1,2\n1,2,3\n", "whether line 1 is a header, since it has names and numbers"),
        ("x,y\n1,nan\n", "row 0, column 1 .* is nan"),
        ("x,y\n1,inf\n", "is inf"),
        ("x,y\n", "has a header and no rows"),
        ("", "is empty"),
        ('x,y\n1,"2\n', "bad.csv"),
        ("x,y,z\n1,2,3\n", "another.csv has 2 and bad.csv has 3"),
        ("y,x\n1,2\n", "another.csv and bad.csv have different columns, x, y against y, x"),
    ],
)
def test_malformed_csv_is_refused(tmp_path, content, message):
    (tmp_path / "another.csv").write_text("x,y\n1,2\n")
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_table(tmp_path)
    assert "bad.csv" in str(caught.value)


def test_other_malformed_tables_are_refused(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(b"x\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"bad.csv: not a CSV file in UTF-8"):
        read_table(tmp_path)
    path.write_text("site\na\n")
    with pytest.raises(ValueError, match=r"bad.csv: has no column besides 'site'"):
        read_table(path, client_column="site")
    path.write_text("site,x\n,1\n")
    with pytest.raises(ValueError, match=r"bad.csv: column 'site' has empty cells"):
        read_table(path, client_column="site")
    path.rename(tmp_path / "table.txt")
    with pytest.raises(ValueError, match=r"table.txt: wanted a .csv or .parquet"):
        read_table(tmp_path / "table.txt", client_column="site")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": [1.0, None]}, "column 'x' has 1 missing"),
        ({"x": ["a", "b"]}, "column 'x' holds object, not numbers"),
        ({"x": pd.to_datetime(["2020-01-01"])}, "column 'x' holds datetime64"),
        ({"x": [1.0, np.inf]}, "is inf"),
    ],
)
def test_malformed_parquet_is_refused(tmp_path, table, message):
    pd.DataFrame(table).to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=message) as caught:
        read_table(tmp_path)
    assert "bad.parquet" in str(caught.value)


def test_damaged_parquet_is_refused(tmp_path):
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"bad.parquet: not a Parquet file"):
        read_table(tmp_path)


# One client -------------------------------------------------------------------------------------


def test_one_client_is_a_file_or_a_folder(tmp_path):
    (tmp_path / "site_a.csv").write_text("age;weight\n1,5;2\n3;4\n")
    found = read_client(tmp_path / "site_a.csv")
    assert (found.names, found.features) == (["site_a"], ["age", "weight"])
    np.testing.assert_array_equal(found.samples, [[[1.5, 2], [3, 4]]])
    assert read_client(tmp_path / "site_a.csv", columns=["weight"]).features == ["weight"]
    np.save(tmp_path / "site.npy", A)
    np.testing.assert_array_equal(read_client(tmp_path / "site.npy").samples, [A])
    with pytest.raises(ValueError, match=r"sep=';' is for tables"):
        read_client(tmp_path / "site.npy", sep=";")
    with pytest.raises(ValueError, match="formats are mixed"):
        read_client(tmp_path)
    # The parts of a folder follow each other; a file with another header is refused.
    (tmp_path / "site.npy").unlink()
    (tmp_path / "site_b.csv").write_text("age;weight\n5;6\n")
    found = read_client(tmp_path)
    assert (found.names, found.features) == ([tmp_path.stem], ["age", "weight"])
    np.testing.assert_array_equal(found.samples, [[[1.5, 2], [3, 4], [5, 6]]])
    (tmp_path / "site_b.csv").write_text("weight;age\n5;6\n")
    with pytest.raises(ValueError, match=r"site_a.csv and site_b.csv have different columns"):
        read_client(tmp_path)


def test_an_image_is_no_client(tmp_path):
    Image.fromarray(np.zeros((4, 3), np.uint8)).save(tmp_path / "a.png")
    assert read_client(tmp_path).samples[0].shape == (4, 3)
    with pytest.raises(ValueError, match="wanted a table, an array, or a folder, got an image"):
        read_client(tmp_path / "a.png")


# Any format -------------------------------------------------------------------------------------


def test_folder_without_known_files_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no file"):
        read_folder(tmp_path)
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(ValueError, match=r"no file with a recognised suffix.*found notes.md"):
        read_folder(tmp_path)


def test_mixed_formats_and_misplaced_columns_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", A)
    with pytest.raises(ValueError, match="client_column='site' is for tables"):
        read_folder(tmp_path, client_column="site")
    (tmp_path / "b.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match=r"formats are mixed, e.g. a.npy and b.csv"):
        read_folder(tmp_path)
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"holds .csv and .parquet"):
        read_table(tmp_path)
    (tmp_path / "c.parquet").rename(tmp_path / "c.csv")
    with pytest.raises(ValueError, match="is for one table, but the folder holds 2"):
        read_table(tmp_path, client_column="site")


@pytest.mark.parametrize("read", [read_arrays, read_table, read_images, read_idx])
def test_missing_path_is_not_found(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="nowhere: no such"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("read", [read_arrays, read_table, read_images])
def test_empty_folder_is_refused(tmp_path, read):
    with pytest.raises(ValueError, match="holds no file with suffix"):
        read(tmp_path)


def test_file_for_folder_and_folder_for_file_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a.txt: is a file, wanted a folder"):
        read_images(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="is a folder, wanted a file"):
        read_idx(tmp_path)
    with pytest.raises(ValueError, match=r"a.txt: wanted a .npy or .npz"):
        read_arrays(tmp_path / "a.txt")


# IDX --------------------------------------------------------------------------------------------


def idx(array, code):
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("code", "dtype"),
    [(0x08, "u1"), (0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8")],
)
def test_idx_of_every_type(tmp_path, code, dtype, compress):
    array = (np.arange(24).reshape(2, 3, 4) - (0 if dtype == "u1" else 7)).astype(dtype)
    content = idx(array, code)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if compress else content)
    got = read_idx(path)
    assert got.dtype == np.dtype(dtype)
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array)


GOOD_IDX = idx(np.arange(6, dtype="u1").reshape(2, 3), 0x08)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file, it begins with nothing"),
        (b"\1" + GOOD_IDX[1:], "not an IDX file, it begins with 01 00 08 02"),
        (GOOD_IDX[:2] + b"\x0a" + GOOD_IDX[3:], "not an IDX file, it begins with 00 00 0a 02"),
        (GOOD_IDX[:7], "truncated inside the header of 2 dimensions"),
        (GOOD_IDX[:-1], r"truncated, shape \(2, 3\) of uint8 needs 18 bytes, got 17"),
        (GOOD_IDX + b"\0", "too long"),
        (b"\0\0\x08\2" + b"\xff" * 8, "truncated"),
        (gzip.compress(GOOD_IDX, mtime=0)[:-9], "damaged gzip"),
        (b"\x1f\x8b rubbish", "damaged gzip"),
    ],
)
def test_malformed_idx_is_refused(tmp_path, content, message):
    (tmp_path / "digits").write_bytes(content)
    with pytest.raises(ValueError, match="digits: .*" + message):
        read_idx(tmp_path / "digits")


# Images -----------------------------------------------------------------------------------------


def test_images_are_gray_in_the_unit_interval(tmp_path):
    pixels = np.array([[0, 51, 255], [102, 153, 204]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "frame10.png")
    Image.fromarray(255 - pixels).save(tmp_path / "frame9.PNG")
    (tmp_path / "readme.txt").write_text("ignored")
    images = read_images(tmp_path)
    assert images.dtype == np.float32
    np.testing.assert_allclose(images, np.stack([255 - pixels, pixels]) / 255, rtol=1e-6)
    check(read_folder(tmp_path), list(images), ["frame9", "frame10"])


def test_images_in_colour_and_of_sixteen_bits(tmp_path):
    colour = np.zeros((2, 3, 3), np.uint8)
    colour[..., 0] = 255
    Image.fromarray(colour).save(tmp_path / "a.png")
    Image.fromarray(np.full((2, 3), 13107, np.uint16)).save(tmp_path / "b.png")
    images = read_images(tmp_path, color=True)
    assert images.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(images[0], colour / 255)
    np.testing.assert_allclose(images[1], np.full((2, 3, 3), 0.2), rtol=1e-6)
    assert read_images(tmp_path).shape == (2, 2, 3)


def test_malformed_images_are_refused(tmp_path):
    Image.fromarray(np.zeros((2, 3), np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(np.zeros((3, 2), np.uint8)).save(tmp_path / "bad.png")
    with pytest.raises(ValueError, match=r"bad.png: is 3 x 2 pixels, but a.png is 2 x 3"):
        read_images(tmp_path)
    whole = (tmp_path / "a.png").read_bytes()
    for content in (b"no image", b"", whole[:45]):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.png: not a readable image"):
            read_images(tmp_path)
    (tmp_path / "bad.png").unlink()
    Image.fromarray(np.zeros((2, 3), np.float32)).save(tmp_path / "bad.tif")
    with pytest.raises(ValueError, match=r"bad.tif: .*floating-point"):
        read_images(tmp_path)
    Image.fromarray(np.full((2, 3), 70_000, np.int32)).save(tmp_path / "bad.tif")
    with pytest.raises(ValueError, match=r"bad.tif: pixels are beyond 16 bits"):
        read_images(tmp_path)


@pytest.mark.parametrize("name", ["bad.png", "bad.tiff"])
def test_what_a_picture_holds_and_not_its_name_decides(tmp_path, name):
    # Pillow has Ghostscript run this one.
    (tmp_path / name).write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    )
    with pytest.raises(ValueError, match=r"bad\.\w+: not a readable image \(cannot identify"):
        read_images(tmp_path)


# Limits -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_that_take_too_much_are_refused(tmp_path):
    path = tmp_path / "large.png"
    Image.new("L", (12_000, 12_000)).save(path)
    assert path.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"large\.png: takes more than 1,073,741,824 bytes"):
        read_images(tmp_path)
    Image.new("L", (60, 50)).save(path)
    for read in (read_images, read_folder):
        with pytest.raises(ValueError, match=r"large\.png: takes more than 47,999 .* max_bytes"):
            read(tmp_path, max_bytes=47_999)
        read(tmp_path, max_bytes=48_000)


def test_archives_that_take_too_much_are_refused(tmp_path):
    zeros = np.zeros((100, 100), np.float32)
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, a=zeros, b=zeros)
    for read in (read_arrays, read_folder, read_views):
        with pytest.raises(ValueError, match=r"zeros\.npz: takes more than 80,000 bytes"):
            read(path, max_bytes=80_000)
        assert len(read(path, max_bytes=90_000)[0]) == 2
    np.savez(path, a=zeros, b=zeros)  # not compressed: no larger than the file
    assert len(read_arrays(path, max_bytes=1)[0]) == 2


def test_arrays_larger_than_any_memory_are_refused(tmp_path):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 2), }"
    for rows in (10**9, 10**17, 10**30):
        text = (header % rows).ljust(117) + "\n"
        (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\0v\0" + text.encode() + bytes(80))
        with pytest.raises(ValueError, match=r"a\.npy: "):
            read_arrays(tmp_path)


def test_other_compressed_files_that_take_too_much_are_refused(tmp_path):
    (tmp_path / "zeros").write_bytes(gzip.compress(idx(np.zeros(50_000, "u1"), 0x08)))
    with pytest.raises(ValueError, match="zeros: takes more than 50,000 bytes"):
        read_idx(tmp_path / "zeros", max_bytes=50_000)
    assert len(read_idx(tmp_path / "zeros", max_bytes=50_008)) == 50_000
    pd.DataFrame({"x": np.zeros(50_000)}).to_parquet(tmp_path / "zeros.parquet")
    with pytest.raises(ValueError, match=r"zeros\.parquet: takes more than 399,999 bytes"):
        read_table(tmp_path, max_bytes=399_999)
    assert len(read_table(tmp_path, max_bytes=410_000)[0][0]) == 50_000
    with pytest.raises(ValueError, match=r"^max_bytes: wanted a whole number .* got 'all'"):
        read_table(tmp_path, max_bytes="all")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.npy", read_arrays),
        ("a.npz", read_views),
        ("a.csv", read_table),
        ("a.parquet", read_folder),
        ("a.png", read_images),
    ],
)
def test_pipes_are_refused(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: wanted a regular file, got a pipe"):
        read(tmp_path)
    if read is not read_images:
        with pytest.raises(ValueError, match=rf"{name}: wanted a regular file, got a pipe"):
            read(tmp_path / name)


# Text -------------------------------------------------------------------------------------------


def test_paragraphs():
    assert paragraphs("\none\ntwo\n\n \n three \n\n") == ["one\ntwo", "three"]


@pytest.mark.parametrize("text", ["don’t – “quote” … naïve Zürich é ≥ π €", "日本 𝄞", "café”"])
def test_mojibake_is_repaired_once_and_twice(text):
    def damage(text):
        # The five bytes that Windows-1252 leaves free read as control characters.
        return "".join(
            bytes([byte]).decode("cp1252", errors="ignore") or chr(byte)
            for byte in text.encode("utf-8")
        )

    assert damage(text) != text
    assert repair_mojibake(damage(text)) == text
    assert repair_mojibake(damage(damage(text))) == text
    assert repair_mojibake(text) == text


def test_transcript_keeps_what_was_said():
    text = (
        "Jim Lehrer: Good evening.\n\n"
        "Norma-Jean O'Brien: My view is: no. [crosstalk 01:07] Really (LAUGHTER) no.\n\n"
        "Audience questioner: Why?"
    )
    said = [" ".join(turn.split()) for turn in paragraphs(strip_transcript(text))]
    assert said == ["Good evening.", "My view is: no. Really no.", "Why?"]


def test_word_counts_by_hand():
    groups = [["Tax cut, tax CUT!", "a x."], ["The war and the tax", "War_2 war"]]
    counts, words = word_counts(groups, {"the"}, min_count=2, drop_empty=False)
    assert words == ["cut", "tax", "war"]
    np.testing.assert_array_equal(counts[0], [[2, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(counts[1], [[0, 1, 1], [0, 0, 1]])
    assert counts[0].dtype == np.float32
    dropped, _ = word_counts(groups, {"the"}, min_count=2)
    np.testing.assert_array_equal(dropped[0], [[2, 2, 0]])


def test_stop_words_complete_each_other():
    assert {"going", "think", "know"} <= SPOKEN_FILLERS
    assert len(SPOKEN_FILLERS - ENGLISH_STOP_WORDS) >= 60
    groups = [["the economy is going well I think", "economy economy"]]
    _, words = word_counts(groups, ENGLISH_STOP_WORDS | SPOKEN_FILLERS, min_count=1)
    assert words == ["economy"]


# Views ------------------------------------------------------------------------------------------


def test_an_archive_holds_all_views_and_what_is_not_a_view_is_passed_over(tmp_path):
    wide, narrow = np.arange(12.0).reshape(4, 3), np.arange(4, dtype=np.uint8).reshape(4, 1)
    np.savez(tmp_path / "all.npz", wide=wide, narrow=narrow, labels=np.arange(4))
    for path in (tmp_path, tmp_path / "all.npz"):
        views, names = read_views(path)
        assert names == ["narrow", "wide"] and {view.dtype for view in views} == {np.dtype(float)}
        np.testing.assert_array_equal(views[0], narrow)
        np.testing.assert_array_equal(views[1], wide)
    assert read_views(tmp_path, names=["wide", "narrow"])[1] == ["wide", "narrow"]


def test_a_folder_holds_one_view_in_each_file(tmp_path):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(4, 3)), rng.normal(size=(4, 2)).astype(np.float32)
    np.savetxt(tmp_path / "view10.csv", first, delimiter=",", header="a,b,c", comments="")
    np.save(tmp_path / "view9.npy", second)
    (tmp_path / "notes.txt").write_text("not a view")
    views, names = read_views(tmp_path)
    assert names == ["view9", "view10"]
    np.testing.assert_array_equal(views[0], second)
    np.testing.assert_allclose(views[1], first, rtol=1e-15)


def test_sparse_views_stay_sparse(tmp_path):
    matrices = [scipy.sparse.random_array((6, d), density=0.3, rng=d) for d in (4, 5)]
    scipy.sparse.save_npz(tmp_path / "a.npz", matrices[0].tocsc())
    scipy.sparse.save_npz(tmp_path / "b.npz", (9 * matrices[1]).astype(int).tocsr())
    views, names = read_views(tmp_path)
    assert names == ["a", "b"] and all(map(scipy.sparse.issparse, views))
    np.testing.assert_array_equal(views[0].toarray(), matrices[0].toarray())
    assert views[1].dtype == np.float64
    scipy.sparse.save_npz(tmp_path / "b.npz", np.nan * matrices[1].tocsr())
    with pytest.raises(ValueError, match=r"b\.npz, its non-zero values: .* nan"):
        read_views(tmp_path)
    np.save(tmp_path / "c.npy", np.ones((6, 2)))
    with pytest.raises(ValueError, match="of a and c only one is sparse"):
        read_views(tmp_path, names=["a", "c"])


def stored(kind, shape, **arrays):
    """As `scipy.sparse.save_npz` writes it, whatever the arrays."""
    return {"format": np.array(kind.encode()), "shape": np.array(shape), "_is_array": True} | {
        name: np.asarray(values) for name, values in arrays.items()
    }


ONES = np.ones(3)


@pytest.mark.parametrize(
    "arrays",
    [
        stored("csr", (3, 4), data=ONES, indices=[0, 1, 10**8], indptr=[0, 1, 2, 3]),
        stored("csr", (3, 4), data=ONES, indices=[0, 1, -(10**8)], indptr=[0, 1, 2, 3]),
        stored("csr", (3, 4), data=ONES, indices=[0, 1, 2], indptr=[0, 10**8, 2, 3]),
        stored("csr", (3, 4), data=ONES, indices=[0, 1, 2], indptr=[0, 10**8, 10**8, 0]),
        stored("csr", (3, 4), data=ONES, indices=[0, 1, 2], indptr=[0, 2**63 - 1, -(2**62), 0]),
        stored("csc", (4, 3), data=ONES, indices=[0, 1, 10**8], indptr=[0, 1, 2, 3]),
        stored("csc", (4, 3), data=ONES, indices=[0, 1, 2], indptr=[0, 10**8, 10**8, 0]),
        stored("bsr", (3, 3), data=np.ones((3, 1, 1)), indices=[0, 1, 10**8], indptr=[0, 1, 2, 3]),
        stored("coo", (3, 4), data=ONES, row=[0, 1, 10**8], col=[0, 1, 2]),
        stored("coo", (3, 4), data=ONES, row=[0, 1, -1], col=[0, 1, 2]),
        stored("dia", (3, 4), data=np.ones((1, 4)), offsets=[10**8]),
    ],
    ids=lambda arrays: arrays["format"].item().decode(),
)
def test_sparse_indices_outside_are_refused(tmp_path, arrays):
    np.savez(tmp_path / "bad.npz", **arrays)
    scipy.sparse.save_npz(tmp_path / "good.npz", scipy.sparse.csr_array(np.eye(3)))
    with pytest.raises(ValueError, match=r"bad\.npz: not a readable archive"):
        read_views(tmp_path)


def test_sparse_views_with_endless_axes_are_refused(tmp_path):
    for name, rows in (("a", 10**9), ("b", 3)):
        scipy.sparse.save_npz(tmp_path / f"{name}.npz", scipy.sparse.coo_array((rows, 3)))
    with pytest.raises(ValueError, match=r"a\.npz: takes more than 1,073,741,824 bytes"):
        read_views(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": np.ones((4, 2)), "b": np.ones((5, 2))}, "a has 4 and b has 5"),
        ({"a": np.ones((4, 2))}, "two views or more, found a"),
        ({"a": np.ones((4, 2)), "b": np.ones(4)}, r"b\.npy: wanted shape"),
        ({"a": np.ones((4, 2)), "b": np.full((4, 2), np.inf)}, r"b\.npy: the value in row 0"),
        ({"a": np.ones((4, 2)), "b": np.ones((0, 2))}, r"b\.npy: is empty"),
    ],
)
def test_unfit_views_are_refused(tmp_path, files, message):
    for name, array in files.items():
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(ValueError, match=message):
        read_views(tmp_path)


def test_views_that_are_not_there_are_told(tmp_path):
    np.savez(tmp_path / "all.npz", a=np.ones((4, 2)), b=np.ones((4, 3)))
    with pytest.raises(ValueError, match="holds a, b, not c"):
        read_views(tmp_path, names=["a", "c"])
    np.save(tmp_path / "b.npy", np.ones((4, 2)))
    with pytest.raises(ValueError, match="holds all, b, not c"):
        read_views(tmp_path, names=["c"])
    with pytest.raises(ValueError, match="holds the arrays a, b"):
        read_views(tmp_path)
    (tmp_path / "all.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match="not a readable archive"):
        read_views(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_views(tmp_path / "nowhere")


def test_views_are_tables_as_people_write_them(tmp_path):
    (tmp_path / "a.csv").write_text("nr;âge;x\n1;0,5;2\n2;1,5;3\n3;2;4\n", encoding="cp1252")
    (tmp_path / "b.csv").write_text("nr;y;z\n1;5;6\n2;7;8\n3;9;1\n", encoding="cp1252")
    options = {"sep": ";", "decimal": ",", "encoding": "cp1252"}
    with pytest.raises(ValueError, match=r"a\.csv: column 'nr' counts the rows and is no feature"):
        read_views(tmp_path, **options)
    first, second = [[0.5, 2], [1.5, 3], [2, 4]], [[5.0, 6], [7, 8], [9, 1]]
    for given in ({"drop": ["nr"]}, {"id_column": "nr"}):
        views, names = read_views(tmp_path, **options, **given)
        assert names == ["a", "b"]
        np.testing.assert_array_equal(views[0], first)
        np.testing.assert_array_equal(views[1], second)
    # Views have other columns: each takes those that it has.
    views, _ = read_views(tmp_path, **options, columns=["z", "âge"])
    np.testing.assert_array_equal(views[0], np.asarray(first)[:, :1])
    np.testing.assert_array_equal(views[1], np.asarray(second)[:, 1:])
    views, _ = read_views(tmp_path, **options, drop=["nr", "x"])
    assert [x.shape for x in views] == [(3, 1), (3, 2)]
    assert read_views(tmp_path, **options, header=True, names=["b", "a"], drop=["nr"])[1][0] == "b"


def test_rows_of_views_go_by_their_ids(tmp_path):
    (tmp_path / "a.csv").write_text("id,x,y\np1,1,2\np2,3,4\np3,5,7\n")
    (tmp_path / "b.csv").write_text("z,w,id\n9,1,p3\n8,2,p1\n7,5,p2\n")
    views, _ = read_views(tmp_path, id_column="id")
    np.testing.assert_array_equal(views[0], [[1, 2], [3, 4], [5, 7]])
    np.testing.assert_array_equal(views[1], [[8, 2], [7, 5], [9, 1]])
    for rows, refused in (
        ("9,1,p3\n8,2,p1\n7,5,p4\n", r"b\.csv: .*of a in column 'id', it lacks p2; jaxfed.*align"),
        ("9,1,p3\n8,2,p1\n7,5,p2\n6,6,p5\n", r"b\.csv: .*it has besides p5"),
        ("9,1,p3\n8,2,p1\n7,5,p1\n", r"b\.csv: column 'id' has 'p1' twice"),
    ):
        (tmp_path / "b.csv").write_text("z,w,id\n" + rows)
        with pytest.raises(ValueError, match=refused):
            read_views(tmp_path, id_column="id")


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"id_column": "nr"}, r"b\.csv: has no column 'nr'"),
        ({"drop": ["zz"]}, r"no view has a column 'zz'"),
        ({"columns": ["x", "zz"]}, r"no view has a column 'zz'"),
        ({"columns": ["x"]}, r"b\.csv: wanted some of the columns x, it has z"),
        ({"drop": ["z"]}, r"b\.csv: has no column besides those that are left out"),
        ({"header": False}, r"a\.csv: column '0', row 0 .* is 'nr', not a number"),
        ({"decimal": ";"}, r"^decimal: wanted"),
        ({"client_column": "x"}, r"^client_column: no such option"),
        ({"missing": "mask"}, r"^missing: no such option"),
    ],
)
def test_unsuitable_options_of_views_are_refused(tmp_path, given, refused):
    (tmp_path / "a.csv").write_text("nr,x\n1,2\n5,4\n")
    (tmp_path / "b.csv").write_text("z\n2\n4\n")
    with pytest.raises(ValueError, match=refused):
        read_views(tmp_path, **given)


def test_options_of_tables_are_for_tables(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    np.save(tmp_path / "b.npy", np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"a\.npy: sep=';' is for tables"):
        read_views(tmp_path, sep=";")
    (tmp_path / "b.npy").unlink()
    (tmp_path / "b.csv").write_text("id;y;z\np1;2;3\np2;4;9\n")
    assert read_views(tmp_path, sep=";", drop=["id"])[0][1].shape == (2, 2)
    with pytest.raises(ValueError, match=r"a\.npy: id_column='id' is for tables"):
        read_views(tmp_path, id_column="id")
    assert len(read_views(tmp_path, sep=None, drop=["id"])[0]) == 2


# How tables are written --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "site;x;y\nBern;0,5;1\nBern;2;-3e2\nOslo;4;5\n",
        "site\tx\ty\nBern\t0.5\t1\nBern\t2\t-3e2\nOslo\t4\t5\n",
        "site|x|y\nBern|0.5|1\nBern|2|-3e2\nOslo|4|5\n",
        "site x   y\nBern 0.5 1\nBern 2   -3e2\nOslo 4 5\n",
        "# of 2024\n#\nsite,x,y\nBern,0.5,1\n# late\nBern,2,-3e2\nOslo,4,5\n",
        'site,"x",y\n"Bern","0.5",1\n"Bern",2,-3e2\nOslo,4,5\n',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_table_tells_how_it_is_written(tmp_path, content, encoding):
    """These were one column of text, or refused as ragged."""
    (tmp_path / "t.csv").write_text(content, encoding=encoding)
    found = read_folder(tmp_path / "t.csv", client_column="site")
    wanted = [np.array([[0.5, 1], [2, -300]]), np.array([[4.0, 5]])]
    check(found, wanted, ["Bern", "Oslo"], np.float64)
    assert found.features == ["x", "y"]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16-le", "utf-16-be", "mac-roman"])
def test_encodings_without_a_mark_are_given(tmp_path, encoding):
    (tmp_path / "t.csv").write_text("hôpital,âge,µ\nZoë,1,2\nRenée,3,4\n", encoding=encoding)
    found = read_folder(tmp_path / "t.csv", client_column="hôpital", encoding=encoding)
    check(found, [np.array([[3.0, 4]]), np.array([[1.0, 2]])], ["Renée", "Zoë"], np.float64)
    assert found.features == ["âge", "µ"]
    assert read_client(tmp_path, drop=["hôpital"], encoding=encoding).features == ["âge", "µ"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_mark_counts_more_than_an_encoding(tmp_path, encoding):
    (tmp_path / "t.csv").write_text("âge,y\n1,2\n", encoding=encoding)
    assert read_table(tmp_path, encoding="cp1252").features == ["âge", "y"]
    # Without a header, no mark is left in the first number either.
    (tmp_path / "t.csv").write_text("1,2\n3,4\n", encoding=encoding)
    check(read_table(tmp_path), [np.array([[1.0, 2], [3, 4]])], ["t"], np.float64)


@pytest.mark.parametrize(
    ("content", "given", "refused"),
    [
        ("x,y\n1,2\né,3\n".encode("latin-1"), None, r"UTF-8, line 3 has the byte 0xe9; .*cp1252"),
        ("x,y\r1,2\ré,3\r".encode("latin-1"), None, r"UTF-8, line 3 has the byte 0xe9; pass enc"),
        (b"x,y\n\x81,3\n", "cp1252", r"CP1252, line 2 has the byte 0x81; .*such as utf-8"),
        ("x,y\n1,é\n".encode(), "ascii", r"ASCII, line 2 has the byte 0xc3"),
        ("x,y\n1,2\n".encode("utf-16-le"), None, r"UTF-8, line 1 has a zero byte; .*utf-16-le"),
        ("x,y\n1,2\n".encode("utf-16")[:-1], None, r"UTF-16, line 2 has the byte .*mark says so"),
        (b"\xef\xbb\xbfx,y\n1,\xe9\n", "cp1252", r"UTF-8, line 2 has the byte 0xe9; its mark"),
    ],
)
def test_bytes_of_other_encodings_are_refused_by_line(tmp_path, content, given, refused):
    (tmp_path / "t.csv").write_bytes(content)
    for read in (read_table, read_client):
        with pytest.raises(ValueError, match=rf"t\.csv: not a CSV file in {refused}") as caught:
            read(tmp_path, encoding=given)
        assert type(caught.value) is ValueError


def test_marks_of_lines_in_cells_do_not_end_rows(tmp_path):
    (tmp_path / "t.csv").write_text('x,"a\u2028b"\n1,2\n3,4\n', encoding="utf-8")
    assert read_table(tmp_path).features == ["x", "a\u2028b"]


def test_a_dialect_may_be_given(tmp_path):
    (tmp_path / "t.csv").write_text("% one\n1;2,5\n3;4\n")
    check(
        read_table(tmp_path, sep=";", decimal=",", comment="%", header=False),
        [np.array([[1, 2.5], [3, 4]])],
        ["t"],
        np.float64,
    )
    for given, refused in (
        ({"sep": ";", "decimal": "."}, r"is '2,5', not a number; its decimal sign seems to be a"),
        ({"sep": "|"}, r"is '3;4', not a number; cells seem to be separated by ;"),
    ):
        with pytest.raises(ValueError, match=refused):
            read_table(tmp_path, comment="%", header="|" in given.values(), **given)
    for given, refused in (
        ({"sep": ";;"}, r"^sep: wanted one character"),
        ({"decimal": "'"}, r"^decimal: wanted '\.' or ','"),
        ({"sep": ",", "decimal": ","}, r"^decimal: .*other than sep"),
        ({"header": "yes"}, r"^header: wanted True or False"),
        ({"drop": "x"}, r"^drop: wanted a list of texts"),
        ({"encoding": "utf-9"}, r"^encoding: wanted a name that Python has for an encoding"),
        ({"encoding": "base64"}, r"^encoding: wanted a name"),
        ({"encoding": "a\0"}, r"^encoding: wanted a name"),
        ({"encoding": 8}, r"^encoding: wanted a text"),
        ({"separator": ";"}, r"^separator: no such option"),
    ):
        with pytest.raises(ValueError, match=refused):
            read_folder(tmp_path, **given)
    np.save(tmp_path / "a.npy", A)
    with pytest.raises(ValueError, match=r"a\.npy: sep=';' is for tables"):
        read_folder(tmp_path / "a.npy", sep=";")


@pytest.mark.parametrize("width", [1, 2])
def test_few_columns_need_no_header(tmp_path, width):
    x = np.random.default_rng(0).normal(size=(5, width))
    np.savetxt(tmp_path / "a.csv", x, delimiter=",")
    np.testing.assert_allclose(read_client(tmp_path / "a.csv").samples[0], x)


def test_wavelengths_are_a_header_and_not_a_sample(tmp_path):
    rng, waves = np.random.default_rng(0), np.arange(400, 500, 10)
    spectra = rng.random((5, 10))

    def write(first, rows):
        lines = [first, *rows]
        text = "\n".join(",".join(map(str, np.asarray(line).tolist())) for line in lines)
        (tmp_path / "t.csv").write_text(text)

    write(waves, spectra)
    found = read_table(tmp_path)
    np.testing.assert_allclose(found.samples[0], spectra)
    assert found.features == [str(each) for each in waves]
    assert len(read_table(tmp_path, header=False).samples[0]) == 6
    # Samples that rise are samples.
    write(waves, np.sort(spectra, axis=1))
    assert len(read_table(tmp_path).samples[0]) == 6
    write(waves**2, spectra)
    with pytest.raises(
        ValueError, match=r"whether line 1 is a header.*got 160000, 168100, .*--hea"
    ):
        read_table(tmp_path)
    assert len(read_table(tmp_path, header=True).samples[0]) == 5
    write(["id", *waves], [[f"a{i}", *row] for i, row in enumerate(spectra)])
    found = read_table(tmp_path, id_column="id")
    assert found.features == [str(each) for each in waves]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_that_are_no_features_are_refused_or_left_out(tmp_path, suffix):
    """A column that counts rows used to be learned from."""
    table = pd.DataFrame({"id": [1, 2, 3], "x": [0.5, 2, 1], "y": [3.0, 1, 2]})
    table["sex"], table["day"] = ["f", "m", "f"], pd.to_datetime(["2020-01-01"] * 3)
    path = tmp_path / f"t.{suffix}"

    def write(columns):
        part = table[columns]
        part.to_csv(path, index=False) if suffix == "csv" else part.to_parquet(path)

    write(["id", "x", "y"])
    with pytest.raises(
        ValueError, match=r"column 'id' counts the rows .* drop=\['id'\] \(--drop id"
    ):
        read_table(tmp_path)
    xy = table[["x", "y"]].to_numpy()
    for given in ({"drop": ["id"]}, {"id_column": "id"}, {"columns": ["x", "y"]}):
        check(read_table(tmp_path, **given), [xy], ["t"], np.float64)
    assert read_table(tmp_path, columns=["id", "y"]).features == ["id", "y"]
    with pytest.raises(
        ValueError, match=r"has no column 'ids'; did you mean id\?; it has id, x, y"
    ):
        read_table(tmp_path, drop=["ids"])
    for other in ("sex", "day"):
        write(["x", other])
        with pytest.raises(ValueError, match=rf"column '{other}'.* leave the column out by drop="):
            read_table(tmp_path)


# Numbers that reading would change ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("missing", ["refuse", "mask"])
def test_whole_numbers_are_not_rounded_beside_other_columns(tmp_path, kind, missing):
    """A column of doubles, or a gap, made doubles of them: 2**60 + 1 was 2**60."""
    gap = None if missing == "mask" else 2**60 + 3
    columns = {"x": [0.5, 1.5, 2.5], "k": [2**60 + 1, gap, 2**60]}
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    else:
        rows = zip(*columns.values(), strict=True)
        text = "".join(f"{x},{'' if k is None else k}\n" for x, k in rows)
        (tmp_path / "t.csv").write_text("x,k\n" + text)
    with pytest.raises(ValueError, match=r"column 'k': wanted whole numbers .* subtract"):
        read_table(tmp_path, missing=missing)


def test_large_whole_numbers_that_doubles_hold_are_read(tmp_path):
    (tmp_path / "t.csv").write_text(f"x,y\n1,{10**20:.0f}\n2,{2**60}\n")
    np.testing.assert_array_equal(read_table(tmp_path).samples[0], [[1, 1e20], [2, 2.0**60]])


@pytest.mark.parametrize("cell", ["2020_01_31", "12_3"])
def test_marks_between_digits_make_no_number(tmp_path, cell):
    """Python reads 2020_01_31 as 20200131."""
    (tmp_path / "t.csv").write_text(f"x,y\n{cell},1.5\n{cell},2.5\n")
    with pytest.raises(ValueError, match=rf"column 'x', row 0 .* is '{cell}', not a number"):
        read_table(tmp_path)


@pytest.mark.parametrize("given", [{}, {"decimal": ","}])
def test_points_that_may_group_thousands_are_no_decimal_sign(tmp_path, given):
    """1.234 in a table with decimal commas was read as a little more than one."""
    text = "site.1;x;y;z;w\n1.5;1.234;0,5;4,5;0,1\n2.5;2.468;1,5;2,5;0,2\n"
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=r"column 'x', row 0 .* its decimal sign is a comma; "):
        read_table(tmp_path, drop=["site.1"], **given)
    # Names of clients are not numbers.
    found = read_table(tmp_path / "t.csv", client_column="site.1", drop=["x"], **given)
    assert found.names == ["1.5", "2.5"]


@pytest.mark.parametrize(
    "given",
    [{"sep": ";"}, {"decimal": ","}, {"comment": "%"}, {"header": False}, {"encoding": "cp1252"}],
)
def test_how_text_is_written_is_not_for_parquet(tmp_path, given):
    """These options were ignored."""
    (name,) = given
    for part in "ab":
        pyarrow.parquet.write_table(
            pyarrow.table({"x": [1.5, 2.5], "y": [0.5, 2.0]}), tmp_path / f"{part}.parquet"
        )
    for read in (read_table, read_folder, read_client, read_views):
        with pytest.raises(ValueError, match=rf"a\.parquet: {name}=.* is for \.csv files"):
            read(tmp_path, **given)
    (tmp_path / "c.csv").write_text("z\n3\n4.5\n")
    assert len(read_views(tmp_path, **{"sep": ";"} | {"columns": ["x", "z", "y"]})[0]) == 3
