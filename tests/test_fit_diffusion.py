"""`jaxfed fit diffusion`: which files it reads, what it trains and writes, what it refuses."""

import argparse
import gzip
import json
import re

import numpy as np
import pytest

from jaxfed.cli import main
from jaxfed.cli.fit import _images
from jaxfed.core.store.checkpoint import Checkpoint

SIDE = 4


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE), np.uint8)


def idx(folder, prefix="t10k", classes=3, each=8):
    pixels = images(classes * each)
    labels = np.repeat(np.arange(classes, dtype=np.uint8), each)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        path = folder / f"{prefix}-{name}-ubyte.gz"
        path.write_bytes(gzip.compress(header + array.tobytes()))
    return pixels.reshape(-1, SIDE**2) / np.float32(255)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for i in range(3):
        np.save(folder / f"client{i}.npy", images(5 + i, i).reshape(-1, SIDE**2) / np.float32(255))
    return folder


QUICK = (
    "--widths", "2", "2", "2", "--rounds", "3", "--local-steps", "2", "--samples", "3",
    "--sampling-steps", "2", "--held-out", "0.25",
)  # fmt: skip


def fit(data, out, *options):
    folders = ("--data", str(data), "--out", str(out))
    return main(["fit", "diffusion", *folders, *QUICK, *map(str, options)])


def loaded(folder):
    with np.load(folder / "result.npz") as arrays:
        summary = json.loads((folder / "result.json").read_text())
        return dict(arrays), {row["quantity"]: row["value"] for row in summary["table"]}


# --- which files ---------------------------------------------------------------------------------


def read(path, **options):
    defaults = {
        "image_shape": None, "held_out": 0.25, "clients": 3, "classes_per_client": 1,
        "images": None, "seed": 0, "max_bytes": 2**30,
    }  # fmt: skip
    return _images.read(argparse.Namespace(data=path, **defaults | options))


def whole(found):
    return [np.concatenate(parts) for parts in zip(found.train, found.held_out, strict=True)]


def sorted_rows(array):
    return array[np.lexsort(array.T)]


@pytest.mark.parametrize("prefix", ["t10k", "train"])
def test_files_of_mnist_are_dealt_out_by_class(prefix, tmp_path):
    rows = idx(tmp_path, prefix)
    found = read(tmp_path)
    assert found.shape == (SIDE, SIDE, 1)
    assert [(len(a), len(b)) for a, b in zip(found.train, found.held_out, strict=True)] == [
        (6, 2)
    ] * 3
    digits = [int(name.split("(")[1][:-1]) for name in found.names]
    assert sorted(digits) == [0, 1, 2]
    for digit, array in zip(digits, whole(found), strict=True):
        wanted = rows[8 * digit : 8 * digit + 8]
        np.testing.assert_allclose(sorted_rows(array), sorted_rows(wanted), rtol=1e-6)
    few = read(tmp_path, images=4, clients=6, held_out=0.0)
    assert [len(array) for array in few.train] == [4] * 6
    assert [len(array) for array in few.held_out] == [0] * 6


def test_arrays_may_be_bytes_or_from_0_to_1(tmp_path):
    for name, scale in (("small", 1), ("large", 255)):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(2):
            rows = images(4, i).reshape(4, -1)
            np.save(folder / f"c{i}.npy", rows if scale == 255 else rows / np.float32(255))
    small, large = (read(tmp_path / name, image_shape=(2, 8, 1)) for name in ("small", "large"))
    assert small.shape == (2, 8, 1)
    assert small.names == ["c0", "c1"]
    for a, b in zip(whole(small), whole(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == np.float32 and a.max() <= 1


def test_colours_of_cifar(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), np.uint8)
    for i in range(1, 6):
        labels = np.arange(10, dtype=np.uint8)[:, None]
        rows = np.concatenate([labels, pixels.reshape(10, -1)], axis=1)
        (tmp_path / f"data_batch_{i}.bin").write_bytes(rows.tobytes())
    found = read(tmp_path, clients=10, held_out=0.0)
    assert found.shape == (32, 32, 3)
    own = found.train[[name.split("(")[1] for name in found.names].index("4)")]
    wanted = pixels[4].transpose(1, 2, 0).reshape(-1) / np.float32(255)
    np.testing.assert_allclose(own, np.tile(wanted, (5, 1)), rtol=1e-6)


def test_writers_of_femnist_are_clients(tmp_path):
    pixels = np.round(np.random.default_rng(0).uniform(size=(2, 3, 784)), 3)
    users = ["f1", "f2"]
    own = [{"x": rows.tolist(), "y": [0, 1, 2]} for rows in pixels]
    content = {
        "users": users,
        "num_samples": [3, 3],
        "user_data": dict(zip(users, own, strict=True)),
    }
    (tmp_path / "all.json").write_text(json.dumps(content))
    found = read(tmp_path, held_out=0.0)
    assert found.names == users and found.shape == (28, 28, 1)
    np.testing.assert_allclose(found.train, 1 - pixels, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.full((3, 4), -0.5, np.float32), {}, "--data: wanted values .* c0 has values from -0.5"),
        (np.full((3, 4), 1.5, np.float32), {}, "--data: wanted values from 0 to 1"),
        (np.full((3, 4), 300, np.int32), {}, "--data: wanted values from 0 to 1"),
        (np.zeros((3, 5), np.float32), {}, "--image-shape: wanted that of .* 5 values"),
        (np.zeros((3, 4), np.float32), {"image_shape": (3, 2, 1)}, "--image-shape: 3x2x1 has 6"),
        (np.zeros((3, 4), np.float32), {"held_out": 1.0}, "--held-out: .* got 1.0"),
        (np.zeros((1, 4), np.float32), {}, "--held-out: c0 has one image"),
    ],
)
def test_other_images_are_refused(rows, options, message, tmp_path):
    np.save(tmp_path / "c0.npy", rows)
    with pytest.raises(ValueError, match=f"^{message}"):
        read(tmp_path, **options)


# --- what it does --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "models"),
    [
        ((), 3),
        (("--published", "--hyper-prior", 1e-4), 3),
        (("--training", "local", "--participation", 2), 3),
        (("--training", "fedavg"), 1),
        (("--training", "fedavg", "--fine-tuning", 1, "--held-out", 0), 3),
    ],
    ids=["personalized", "published", "local", "fedavg", "fine-tuned"],
)
def test_models_are_trained_and_drawn_from(options, models, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert fit(data, out, *options) == 0
    arrays, table = loaded(out)
    weights = 50 * (2 + 4 + 4) + 11
    assert f"a U-Net of {weights:,} weights" in capsys.readouterr().out
    assert arrays["samples"].shape == (models, 3, SIDE**2)
    assert (arrays["samples"] >= 0).all() and (arrays["samples"] <= 1).all()
    local = [name for name in arrays if name.startswith("local")]
    assert len(local) == (12 if models == 3 else 0)
    assert arrays["shared.down[0].kernel"].shape == (5, 5, 1, 2)
    assert table["rounds"] == 3 and np.isfinite(table["objective"])
    assert ("loss of held-out images" in table) == (0 not in options)
    assert ("mean spread" in table) == (not options or options[0] == "--published")
    assert np.isfinite(arrays["history_objective"]).all()
    for picture in ("samples.png", "convergence.png"):
        assert (out / picture).stat().st_size > 1000


@pytest.mark.slow
def test_an_interrupted_run_is_taken_up_again(data, tmp_path, monkeypatch, capsys):
    """What is drawn and measured is, bit for bit, that of the uninterrupted run."""
    options = ("--checkpoint-every", 1)
    save, done = Checkpoint.save, []

    def interrupting(self, *arguments):
        save(self, *arguments)
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupting)
        assert fit(data, tmp_path / "stopped", *options) != 0
    assert len(done) == 2
    assert not (tmp_path / "stopped" / "result.json").exists()
    capsys.readouterr()
    assert fit(data, tmp_path / "stopped", *options) == 0
    assert "Taking up the run that was interrupted" in capsys.readouterr().out
    assert fit(data, tmp_path / "whole", *options) == 0
    stopped, whole = (loaded(tmp_path / name)[0] for name in ("stopped", "whole"))
    assert stopped.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(stopped[name], whole[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--training", "local", "--initial-spread", 0.1), "--initial-spread: is for"),
        (("--training", "fedavg", "--published"), "--published: is for --training personalized"),
        (("--fine-tuning", 2), "--fine-tuning: is for --training fedavg, got personalized"),
        (("--training", "fedavg", "--fine-tuning", -1), "--fine-tuning: wanted at least 0"),
        (("--rounds", 0), "--rounds: wanted at least 1"),
        (("--samples", 0), "--samples: wanted at least 1"),
        (("--local-steps", 0), "local_steps: wanted a whole number of at least 1"),
        (("--batch-size", 9), "batch_size: wanted at most the smallest client's"),
        (("--initial-spread", 0), "initial_spread: wanted a positive finite number"),
        (("--widths", 2, 0, 2), "widths: wanted a whole number of at least 1, got 0"),
        (("--image-shape", "2x8"), "image_shape: .* halved twice"),
        (("--chunk-size", 2), "--chunk-size: is for"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    options, message, data, tmp_path, capsys
):
    assert fit(data, tmp_path / "out", *options) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "out").exists()
