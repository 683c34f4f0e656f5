"""Numbers of components as shares of the variance, on the command line."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.decomposition import PCA

import jaxfed as jf
from jaxfed.cli.fit import _shares
from jaxfed.estimators import HierarchicalBayesPCA, PersonalizedPCA
from tests.cli.command_line import fit, loaded, refused, run, value, written

ALL = ("--held-out", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tables(data):
    return [np.load(data / f"client{i}.npy") for i in range(8)]


@pytest.mark.slow
def test_the_shares_are_those_of_estimators(data, tables, tmp_path, capsys):
    options = ("--shared-rank", "0.4", "--local-rank", "0.8", "--center", "shared", *ALL)
    assert fit("perpca", data, tmp_path, *options, "--rounds", 3, "--start", "several") in (0, 3)
    groups = np.repeat(np.arange(8), [len(table) for table in tables])
    model = PersonalizedPCA(0.4, 0.8, rounds=1, n_init=1, random_state=0)
    model.fit(np.concatenate(tables), groups=groups)
    arrays, summary = loaded(tmp_path)
    assert arrays["shared"].shape == (9, model.shared_rank_)
    assert arrays["local"].shape == (8, 9, model.local_rank_)
    assert value(summary, "shared components") == model.shared_rank_
    assert value(summary, "local components") == model.local_rank_
    words = f"takes {model.shared_rank_} shared components and {model.local_rank_} local components"
    assert words in capsys.readouterr().out
    saved = jf.load(tmp_path / "result.npz").algorithm
    assert f"shared_rank={model.shared_rank_}, local_rank={model.local_rank_}" in saved
    assert summary["settings"]["shared_rank"] == 0.4


@pytest.mark.parametrize("shared", [1, 0.4])
def test_a_share_beside_a_number_or_another(shared, data, tables, tmp_path, capsys):
    words = ("--shared-rank", shared, "--local-rank", "0.8")
    assert fit("oneshot", data, tmp_path, *words, *ALL) == 0
    found = jf.pca.ranks_for_variance(jf.Clients.from_samples(tables), shared, 0.8)
    arrays, summary = loaded(tmp_path)
    assert arrays["shared"].shape == (9, found.shared)
    assert arrays["local"].shape == (8, 9, found.local)
    assert value(summary, "shared components") == found.shared
    assert f"{found.local} local components" in capsys.readouterr().out


def test_one_subspace_is_that_of_sklearn(data, tables, tmp_path):
    assert fit("pooled", data, tmp_path, "--rank", "0.9", "--center", "shared", *ALL) == 0
    wanted = PCA(0.9).fit(np.concatenate(tables).astype(float))
    arrays, summary = loaded(tmp_path)
    assert value(summary, "components") == wanted.n_components_ == arrays["shared"].shape[1]
    cosines = np.linalg.svd(wanted.components_ @ arrays["shared"], compute_uv=False)
    np.testing.assert_allclose(cosines, 1, atol=1e-5)


@pytest.mark.parametrize(
    "command", ["local", pytest.param("hierarchicalpca", marks=pytest.mark.slow)]
)
def test_each_clients_components(command, data, tables, tmp_path):
    more = ("--rounds", 1, "--solver", "eigenvectors") * (command == "hierarchicalpca")
    options = ("--rank", "0.7", "--center", "shared", *ALL, *more)
    assert fit(command, data, tmp_path, *options) in (0, 3)
    groups = np.repeat(np.arange(8), [len(table) for table in tables])
    model = HierarchicalBayesPCA(0.7, rounds=1, random_state=0)
    model.fit(np.concatenate(tables), groups=groups)
    assert loaded(tmp_path)[0]["local"].shape == (8, 9, model.n_components_)


def test_a_share_of_imputed_samples(data, tables, tmp_path):
    folder = tmp_path / "gaps"
    folder.mkdir()
    for i, table in enumerate(tables):
        table = table.copy()
        table[::3, i] = np.nan
        np.save(folder / f"client{i}.npy", table)
    options = ("--rank", "0.9", "--center", "shared", "--impute", "2", "1", *ALL)
    assert fit("pooled", folder, tmp_path / "out", *options) == 0
    assert 2 <= value(loaded(tmp_path / "out")[1], "components") < 9


PERPCA, SHARES = "perpca", ("--shared-rank", "0.4", "--local-rank", "0.8")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("hmf", SHARES, "shared_rank: wanted a whole number of at least 1, got 0.4"),
        (
            PERPCA,
            ("--shared-rank", "0.8", "--local-rank", "0.4"),
            "local_rank: wanted at least the share of shared_rank, 0.8, got 0.4",
        ),
        (PERPCA, ("--shared-rank", "0.999999", "--local-rank", "1"), "shared_rank: wanted a small"),
        (PERPCA, ("--shared-rank", "2.0", "--local-rank", "1"), "shared_rank: wanted a number of"),
        (PERPCA, ("--shared-rank", "0", "--local-rank", "0.5"), "shared_rank: wanted a whole"),
        (PERPCA, (*SHARES, "--epsilon", "1"), "shared_rank: wanted a whole number with epsilon"),
        (PERPCA, ("--shared-rank", "few", "--local-rank", "1"), "wanted a number, got 'few'"),
        ("pooled", ("--rank", "1.5"), "rank: wanted a number of components, or a share of the var"),
        ("pooled", ("--rank", "nan"), "rank: wanted a number of components, or a share of the var"),
        ("hierarchicalpca", ("--rank", "0.999999"), "rank: wanted a smaller share"),
    ],
)
def test_what_is_refused(command, options, message, data, tmp_path, capsys):
    line = refused(capsys, fit(command, data, tmp_path / "out", *options))
    assert message in line
    assert not (tmp_path / "out").exists()


def test_processes_and_sweeps_take_no_shares(tmp_path, capsys, monkeypatch):
    words = ("--prior-variance", "1", "--rank", "0.5", "--out", tmp_path / "sweep")
    line = refused(capsys, run("sweep", "hierarchicalpca", *words))
    assert "--rank: wanted a whole number, since a share" in line
    monkeypatch.setattr("jax.process_count", lambda: 2)
    given = SimpleNamespace(shared_rank=0.4, local_rank=2)
    with pytest.raises(ValueError, match="--shared-rank: wanted a whole number with --processes"):
        _shares.given_in(given, _shares.shared_and_local)
