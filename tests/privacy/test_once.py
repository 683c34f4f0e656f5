"""A release that is kept: the same data are released once."""

import json
import multiprocessing
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy

SAMPLES = np.random.default_rng(0).normal(size=(3, 20, 6)).astype(np.float32)
CLIENTS = jf.Clients.from_samples(SAMPLES)
OPTIONS = {"epsilon": 1.0, "delta": 1e-5}


def leaves(clients):
    return [np.asarray(x) for x in jax.tree.leaves(clients.data)]


def test_the_same_data_are_released_once(tmp_path):
    path = tmp_path / "release.npz"
    ledger = privacy.Ledger(tmp_path / "ledger.jsonl", **OPTIONS)
    first = privacy.release_once(path, CLIENTS, ledger=ledger, **OPTIONS)
    again = privacy.release_once(str(path), CLIENTS, ledger=ledger, **OPTIONS)
    for pair in zip(leaves(first), leaves(again), strict=True):
        np.testing.assert_array_equal(*pair)
    assert again.guarantee == first.guarantee
    assert again.names == CLIENTS.names
    assert ledger.spent() == pytest.approx(1.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_what_release_moments_returns(tmp_path):
    key = jax.random.key(3)
    wanted = privacy.release_moments(CLIENTS, key=key, **OPTIONS)
    for _ in range(2):
        found = privacy.release_once(tmp_path / "release.npz", CLIENTS, key=key, **OPTIONS)
        for pair in zip(leaves(found), leaves(wanted), strict=True):
            np.testing.assert_array_equal(*pair)
        assert found.guarantee == wanted.guarantee
        np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 2.0},
        {"rows": "directions"},
        {"person": [np.arange(20) // 2] * 3},
        {"semidefinite": True},
    ],
)
def test_other_options_are_another_release(tmp_path, change):
    path = tmp_path / "release.npz"
    ledger = privacy.Ledger(tmp_path / "ledger.jsonl", epsilon=9.0, delta=1e-5)
    privacy.release_once(path, CLIENTS, **OPTIONS)
    before = path.read_bytes()
    other = privacy.release_once(path, CLIENTS, ledger=ledger, **(OPTIONS | change))
    assert ledger.spent() == pytest.approx(other.guarantee.epsilon)
    assert path.read_bytes() != before


def test_other_data_are_refused_by_the_budget(tmp_path):
    path = tmp_path / "release.npz"
    ledger = privacy.Ledger(tmp_path / "ledger.jsonl", **OPTIONS)
    first = privacy.release_once(path, CLIENTS, ledger=ledger, **OPTIONS)
    newer = jf.Clients.from_samples(2 * np.asarray(CLIENTS.data.values) + 1)
    with pytest.raises(ValueError, match="epsilon: wanted at most 1 for all releases"):
        privacy.release_once(path, newer, ledger=ledger, **OPTIONS)
    kept = privacy.release_once(path, CLIENTS, ledger=ledger, **OPTIONS)
    np.testing.assert_array_equal(leaves(kept)[0], leaves(first)[0])


def test_persons_may_be_given_in_any_form(tmp_path):
    path = tmp_path / "release.npz"
    ledger = privacy.Ledger(tmp_path / "ledger.jsonl", **OPTIONS)
    labels = [np.arange(20) // 2] * 3
    for person in (labels, [own.tolist() for own in labels], tuple(labels)):
        privacy.release_once(path, CLIENTS, person=person, ledger=ledger, **OPTIONS)
    assert ledger.spent() == pytest.approx(1.0)


def test_options_that_mean_the_same_are_the_same(tmp_path):
    path = tmp_path / "release.npz"
    ledger = privacy.Ledger(tmp_path / "ledger.jsonl", **OPTIONS)
    first = privacy.release_once(path, CLIENTS, ledger=ledger, **OPTIONS)
    for more in (
        {"epsilon": 1},
        {"epsilon": np.float64(1), "delta": np.float64(1e-5)},
        {"rows": "pairs", "bound": None, "neighbours": "replace", "person": None},
        {"semidefinite": False, "noise": "jax", "key": None},
    ):
        again = privacy.release_once(path, CLIENTS, ledger=ledger, **(OPTIONS | more))
        np.testing.assert_array_equal(leaves(again)[0], leaves(first)[0])
    persons = [np.arange(20) // 2] * 3
    path = tmp_path / "persons.npz"
    first = privacy.release_once(path, CLIENTS, person=persons, **OPTIONS)
    renamed = [own + 5.0 for own in persons]
    again = privacy.release_once(path, CLIENTS, person=renamed, **OPTIONS)
    np.testing.assert_array_equal(leaves(again)[0], leaves(first)[0])


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: wanted a file in an existing folder"):
        privacy.release_once(tmp_path / "missing" / "release.npz", CLIENTS, **OPTIONS)


def release_in_process(folder):
    ledger = privacy.Ledger(f"{folder}/ledger.jsonl", **OPTIONS)
    found = privacy.release_once(f"{folder}/release.npz", CLIENTS, ledger=ledger, **OPTIONS)
    return leaves(found)[0].tobytes()


@pytest.mark.slow
def test_processes_that_share_a_file_release_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.map(release_in_process, [str(tmp_path)] * 2)
    assert one == other
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert len([line for line in lines if "budget" not in json.loads(line)]) == 1


def test_wrong_arguments(tmp_path):
    path = tmp_path / "release.npz"
    with pytest.raises(ValueError, match="epsilon_: no such option"):
        privacy.release_once(path, CLIENTS, epsilon_=1.0)
    with pytest.raises(ValueError, match="clients: wanted"):
        privacy.release_once(path, leaves(CLIENTS)[0], **OPTIONS)

    def traced(x):
        clients = jf.Clients.from_samples(x)
        return leaves(privacy.release_once(path, clients, **OPTIONS))[0]

    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(traced)(jnp.ones((2, 6, 3)))
    assert not path.exists()
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="path: wanted a release in"):
        privacy.release_once(path, CLIENTS, **OPTIONS)
    assert path.read_bytes() == b"something else"
