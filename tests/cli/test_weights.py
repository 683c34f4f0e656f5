"""Weights of rows in a column, on the command line."""

import jax
import numpy as np
import pandas as pd
import pytest

import jaxfed as jf
from jaxfed.cli.fit import _weights
from jaxfed.estimators import FederatedPCA
from tests.cli.command_line import RANKS, fit, loaded, refused, value

RNG = np.random.default_rng(0)
FRAMES = [
    pd.DataFrame(
        RNG.normal(size=(20 + i, 5)) @ np.diag([3.0, 2.0, 1.0, 0.5, 0.4]) + 1 + i,
        columns=list("abcde"),
    ).assign(times=RNG.integers(0, 4, 20 + i))
    for i in range(3)
]
ALL = ("--held-out", "0")
WEIGHTS = ("--weight-column", "times")


def write(folder, frames, kind="csv"):
    folder.mkdir()
    for i, frame in enumerate(frames):
        path = folder / f"client{i}.{kind}"
        frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, index=False)
    return folder


def repeated(frames):
    return [frame.loc[frame.index.repeat(frame.times)].drop(columns="times") for frame in frames]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    tables = {kind: write(path / kind, FRAMES, kind) for kind in ("csv", "parquet")}
    return tables | {"repeated": write(path / "repeated", repeated(FRAMES))}


def columns_alike(found, wanted):
    np.testing.assert_allclose(
        np.linalg.svd(found.mT @ wanted, compute_uv=False), 1, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("center", ["shared", "local"])
def test_a_row_of_weight_two_is_two_rows(kind, center, folders, tmp_path):
    options = ("--rank", "2", "--center", center, "--scale", "shared", *ALL)
    assert fit("pooled", folders[kind], tmp_path / "a", *WEIGHTS, *options) == 0
    assert fit("pooled", folders["repeated"], tmp_path / "b", *options) == 0
    (found, told), (wanted, expected) = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    columns_alike(found["shared"], wanted["shared"])
    for name in ("preprocessing.mean", "preprocessing.scale"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-10)
    for name in ("error on training", "objective", "in shared"):
        assert value(told, name) == pytest.approx(value(expected, name), rel=1e-9)
    assert found["features"].tolist() == list("abcde")
    assert told["samples"]["client1"] == np.sum(FRAMES[1].times > 0)


def test_weights_are_those_of_estimators(folders, tmp_path):
    options = ("--rank", "0.9", "--center", "shared", *ALL, "--columns", *"dcba")
    assert fit("blocklanczos", folders["csv"], tmp_path, *WEIGHTS, *options, "--rounds", 9) == 0
    table = pd.concat(FRAMES)
    groups = np.repeat(range(3), [len(frame) for frame in FRAMES])
    model = FederatedPCA(0.9)
    model.fit(table[[*"dcba"]].to_numpy(), groups=groups, sample_weight=table.times)
    columns_alike(loaded(tmp_path)[0]["shared"], model.components_.T)


def test_one_table_with_a_column_of_clients_and_held_out_rows(tmp_path):
    table = pd.concat([frame.assign(who=f"c{i}") for i, frame in enumerate(FRAMES)])
    table.to_csv(tmp_path / "all.csv", index=False)
    words = ("--client-column", "who", *WEIGHTS, *RANKS, "--rounds", 3, "--report")
    assert fit("perpca", tmp_path / "all.csv", tmp_path / "out", *words) in (0, 3)
    arrays, summary = loaded(tmp_path / "out")
    assert arrays["names"].tolist() == ["c0", "c1", "c2"]
    assert 0 < value(summary, "error on held-out") < 100
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("center", ["none", "local", "shared"])
@pytest.mark.parametrize("scale", ["none", "local", "shared", "energy"])
def test_units_are_those_of_standardize(center, scale):
    tables = [frame.drop(columns="times").assign(f=7.0).to_numpy() for frame in FRAMES]
    times = [frame.times.to_numpy() for frame in FRAMES]
    some = [(x[n > 0], n[n > 0].astype(float)) for x, n in zip(tables, times, strict=True)]
    with jax.enable_x64(True):
        found = _weights.standardization(*zip(*some, strict=True), center, scale)
        twice = [np.repeat(x, n, axis=0) for x, n in zip(tables, times, strict=True)]
        clients = jf.Clients.from_samples(twice)
        algorithm = jf.preprocess.Standardize(center, scale)
        wanted = jf.fit(algorithm, clients, rounds=1, key=jax.random.key(0)).result.local
    np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-10)
    np.testing.assert_allclose(found.scale, wanted.scale, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weight-column", "who"), "--weight-column: wanted a column of the tables (a, b, c, d"),
        ((*WEIGHTS, "--impute", "1", "1"), "--impute: is not for --weight-column"),
        ((*WEIGHTS, "--bootstrap", "20"), "--bootstrap: is not for --weight-column"),
        ((*WEIGHTS, "--epsilon", "1"), "--epsilon: is not for --weight-column"),
        ((*WEIGHTS, "--groups", "3", "--center", "shared"), "--center: wanted none or local with"),
        ((*WEIGHTS, "--columns", "times"), "wanted columns of features besides times"),
    ],
)
def test_what_is_refused(options, message, folders, tmp_path, capsys):
    line = refused(capsys, fit("perpca", folders["csv"], tmp_path / "out", *RANKS, *options))
    assert message in line


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (-1.0, "wanted weights that are 0 or from 2e-247 to 4e+246, got -1 of client0 in row 3"),
        (np.inf, "client0"),
        (1e-300, "got 1e-300 of client0"),
        (None, "missing value"),
    ],
)
def test_wrong_weights(weights, message, tmp_path, capsys):
    frame = FRAMES[0].astype(float)
    frame.loc[3, "times"] = weights
    folder = write(tmp_path / "data", [frame, FRAMES[1]])
    line = refused(capsys, fit("perpca", folder, tmp_path / "out", *RANKS, *WEIGHTS))
    assert message in line
    zeros = write(tmp_path / "zeros", [FRAMES[0].assign(times=0.0), FRAMES[1]])
    line = refused(capsys, fit("perpca", zeros, tmp_path / "out", *RANKS, *WEIGHTS))
    assert "wanted some positive weight of client0, got zeros" in line
    assert fit("hmf", folder, tmp_path / "out", *RANKS, *WEIGHTS) == 2
