"""The targets of personalized PCA on files: how images are dealt, and small runs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
import papers
from jaxfed.data import image_sequence_synthetic
from papers.perpca import mnist
from papers.runs import Seeds
from tests.bench.targets import cells


def test_digits_are_dealt_without_repetition():
    digits = np.repeat(np.arange(10), 30)
    images = np.arange(300, dtype=np.float32)[:, None]
    split = mnist._SPLITS[0]._replace(clients=20, train=8, test=5)
    train, test, labels = mnist._deal(images, digits, split, seed=0)
    assert train.shape == (20, 8, 1)
    assert test.shape == (20, 5, 1)
    dealt = np.concatenate([train, test], axis=1)[..., 0].astype(int)
    assert len(np.unique(dealt)) == dealt.size
    assert (digits[dealt] == np.asarray(labels)[:, None]).all()
    other, _, _ = mnist._deal(images, digits, split, seed=1)
    assert (np.asarray(other) != np.asarray(train)).any()


@pytest.mark.slow
def test_thermal_reproduction_on_small_frames(tmp_path):
    video = image_sequence_synthetic(key=jax.random.key(1), frames=10, height=24, width=36, blobs=1)
    (tmp_path / "thermal").mkdir()
    frames = 1000 * np.asarray(video.frames)[:4, ::2, ::3]
    file = tmp_path / "thermal" / "ambench_layer361.npz"
    np.savez(file, frames=frames, frame_numbers=np.arange(4))
    report = papers.find("perpca/thermal")(Seeds(1), data=tmp_path)
    measured = {labels: cell.mean for labels, cell in cells(report).items()}
    expected = jf.fit(
        jf.pca.Local(10), jf.Clients.from_samples(frames / 1000), rounds=1, key=jax.random.key(0)
    ).result
    error = float(
        jf.metrics.reconstruction_error(jf.Personalized(*expected), jnp.asarray(frames / 1000))
    )
    assert measured["each client alone", "error"] == pytest.approx(error, rel=1e-3, abs=1e-6)
    shares = [measured["PerPCA", f"{part} energy"] for part in ("shared", "own")]
    assert 0.5 < shares[0] <= 1
    assert sum(shares) <= 1 + 1e-5
    total = sum(report.arrays[part] for part in ("background", "foreground", "residual"))
    chex.assert_trees_all_close(np.asarray(total), frames / 1000, atol=1e-5)
    assert set(report.figures) == {"separation", "shared", "own"}
    for draw in report.figures.values():
        draw().savefig(tmp_path / "picture.png")


@pytest.mark.slow
def test_debates_reproduction_on_small_texts(tmp_path):
    (tmp_path / "debates").mkdir()
    topics = {"1960": "castro africa", "1976": "carter ford", "1980": "oil coal"}
    for year, words in topics.items():
        first, second = words.split()
        turns = [
            "Mr Other: tax tax tax people",
            "Mr Other: people people tax",
            f"Some Speaker: {first} {first} {first} {second}",
            f"Some Speaker: {second} {second} {first}",
        ] * 6
        (tmp_path / "debates" / f"{year}-09-01.txt").write_text("\n\n".join(turns))
    report = papers.find("perpca/debates")(Seeds(1), data=tmp_path)
    rows = {row["year"]: row for row in report.rows if row["year"]}
    assert set(rows["common"]["heaviest words"].split()[:2]) == {"tax", "people"}
    for year, words in topics.items():
        assert set(rows[year]["heaviest words"].split()[:2]) == set(words.split())
    assert rows["common"]["of the reference's"] == "2 of 6"
    assert not {"speaker", "other"} & set(np.ravel(report.arrays["words"]))
