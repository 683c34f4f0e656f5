"""Remarks on a result, and the warning about clients of another scale."""

import sys
import warnings

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import main
from jaxfed.core.clients.energies import warn_of_large

KEY = jax.random.key(0)
COMMON, LEFT = "common to all clients", "stopping measure is still"


def samples(clients, seed=0, *, alike=False, size=30):
    """Clients of six features: one strong shared direction, one of their own or the same again."""
    rng = np.random.default_rng(seed)
    frame = np.linalg.qr(rng.normal(size=(6, 6)))[0]

    def one(i):
        own = frame[1] if alike else frame[1 + i % 5]
        scores = rng.normal(size=(size, 2)) * [2.0, 3.0]
        return scores @ np.stack([frame[0], own]) + 0.1 * rng.normal(size=(size, 6))

    return [one(i).astype(np.float32) for i in range(clients)]


def fitted(arrays, algorithm=None, rounds=60, **options):
    algorithm = jf.pca.PerPCA(1, 1) if algorithm is None else algorithm
    return jf.fit(algorithm, jf.Clients.from_samples(arrays), rounds=rounds, key=KEY, **options)


# --- remarks on a result --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [jf.pca.PerPCA(1, 1, solver="gradient"), jf.pca.PerPCA(1, 1), jf.pca.OneShot(1, 1)]
)
def test_local_components_that_all_clients_have_are_told(algorithm):
    rounds = 1 if isinstance(algorithm, jf.pca.OneShot) else 200
    solution = fitted(samples(5, alike=True), algorithm, rounds)
    theta = float(jf.metrics.misalignment(solution.result.local))
    assert theta < 0.05
    (remark,) = solution.remarks()
    assert COMMON in remark and f"{theta:.2g}" in remark
    assert remark in solution.summary()
    other = fitted(samples(5), algorithm, rounds)
    assert float(jf.metrics.misalignment(other.result.local)) > 0.1
    assert not any(COMMON in remark for remark in other.remarks())


def test_one_client_has_nothing_to_share():
    (remark,) = fitted(samples(1, alike=True)).remarks()
    assert "nothing distinguishes shared from local" in remark


@pytest.mark.slow
def test_local_components_that_are_missing_are_passed_over():
    assert fitted(samples(3, alike=True), jf.pca.Pooled(1), 1).remarks() == ()
    still = [np.ones((4, 6), np.float32)] * 3  # of rank one: all local components complete a basis
    assert not any("nan" in remark for remark in fitted(still, rounds=3).remarks())


@pytest.mark.slow
def test_remarks_are_saved_printed_and_in_the_report(tmp_path, capsys):
    arrays = samples(5, alike=True)
    solution = fitted(
        arrays, jf.pca.PerPCA(1, 1, solver="gradient", step_size=1e-3, start="random"), 20
    )
    assert len(solution.remarks()) == 1
    solution.save(tmp_path / "result.npz")
    saved = jf.load(tmp_path / "result.npz")
    assert saved.remarks == solution.remarks() and saved.summary() == solution.summary()
    page = jf.report.html(solution, jf.Clients.from_samples(arrays))
    assert LEFT in page

    (data := tmp_path / "data").mkdir()
    for i, own in enumerate(arrays):
        np.save(data / f"{i}.npy", own)
    command = ["fit", "perpca", "--data", str(data), "--out", str(tmp_path / "out")]
    command += ["--shared-rank", "1", "--local-rank", "1", "--rounds", "2"]
    assert main([*command, "--held-out", "0"]) == 0
    assert COMMON in capsys.readouterr().out
    assert main(["info", str(tmp_path / "out")]) == 0
    assert COMMON in capsys.readouterr().out


# --- clients of another scale ---------------------------------------------------------------------


def of_another_scale(factor=10.0, place=7):
    arrays = samples(20)
    arrays[place] = arrays[place] * np.float32(factor)
    return arrays


SENSITIVE = [
    jf.pca.PerPCA(1, 1, solver="gradient"),
    jf.pca.PerPCA(1, 1),
    *(jf.pca.OneShot(1, 1, method=method) for method in ("spectrum", "local_first")),
]


@pytest.mark.parametrize("algorithm", SENSITIVE, ids=repr)
def test_a_client_of_another_scale_is_told_by_its_id(algorithm):
    clients = jf.Clients.from_samples(of_another_scale()).take(np.arange(20)[::-1])
    with pytest.warns(
        jf.EnergyWarning, match=r"client id, 7 \(\d+\.\d times the median\);"
    ) as told:
        jf.fit(algorithm, clients, rounds=1, key=KEY)
    assert len(told) == 1 and told[0].filename == __file__
    assert "OneShot(method='projector')" in str(told[0].message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda arrays: jf.Clients.from_samples(
            [x[: 5 + i] for i, x in enumerate(arrays)], bucket=1.5
        ),
        lambda arrays: jf.Clients.from_source(arrays, block_bytes=5000),
        lambda arrays: jf.Clients.from_moments(np.stack([x.T @ x / len(x) for x in arrays])),
        lambda arrays: jf.Clients.from_samples([jax.numpy.bfloat16(x) for x in arrays]),
    ],
    ids=["buckets", "source", "moments", "bfloat16"],
)
def test_a_client_of_another_scale_is_told_however_the_data_lie(make):
    with pytest.warns(jf.EnergyWarning, match=r"client id, 7 \(") as told:
        jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), make(of_another_scale()), rounds=1, key=KEY)
    assert len(told) == 1


def test_a_missing_entry_silences_no_warning():
    arrays = list(of_another_scale())
    arrays[2] = arrays[2].copy()
    arrays[2][0, 0] = np.nan
    clients = jf.Clients.from_source(arrays, missing="mask")
    with pytest.warns(jf.EnergyWarning, match=r"client id, 7 \("):
        jf.fit(jf.pca.HMF(1, 1), clients, rounds=1, key=KEY)


def test_an_energy_that_is_no_number_silences_no_warning():
    energies = np.ones(20)
    energies[[3, 7]] = np.nan, 99
    with pytest.warns(jf.EnergyWarning, match=r"client id, 7 \(99 times the median\);"):
        warn_of_large(energies, jf.Clients.from_samples(of_another_scale()))


def test_who_does_not_dominate_is_not_told_of():
    weights = np.ones(20)
    weights[7] = 0
    clients = jf.Clients.from_samples(of_another_scale(), weights=weights)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(of_another_scale(), jf.pca.OneShot(1, 1), 1)  # by projectors, which have no scale
        fitted(of_another_scale(3.0), jf.pca.PerPCA(1, 1, solver="gradient"), 1)
        fitted(of_another_scale(0.01), jf.pca.PerPCA(1, 1, solver="gradient"), 1)
        fitted([np.zeros((4, 6), np.float32)] * 3, jf.pca.PerPCA(1, 1, solver="gradient"), 1)
        jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), clients, rounds=1, key=KEY)
        assert told == []
        warnings.simplefilter("ignore", jf.EnergyWarning)
        fitted(of_another_scale(), jf.pca.PerPCA(1, 1, solver="gradient"), 1)
    assert told == []


@pytest.mark.slow
def test_the_command_line_tells_in_one_line(tmp_path, capsys):
    (data := tmp_path / "data").mkdir()
    for i, own in enumerate(of_another_scale()):
        np.save(data / f"{i:02}.npy", own)
    command = ["fit", "oneshot", "--data", str(data), "--out", str(tmp_path / "out")]
    command += ["--shared-rank", "1", "--local-rank", "1", "--method", "spectrum"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # As it is printed, and not as the tests' own recorder takes it.
        warnings.showwarning = lambda *told, **_: sys.stderr.write(
            warnings.formatwarning(*told[:4])
        )
        assert main(command) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxfed: clients: wanted") and "client name, 07 (" in line


def test_many_clients_of_another_scale_are_counted():
    arrays = [x * np.float32(10 if i < 7 else 1) for i, x in enumerate(samples(20))]
    with pytest.warns(jf.EnergyWarning, match=r"median\) and 2 more;"):
        fitted(arrays, jf.pca.PerPCA(1, 1, solver="gradient"), 1)
