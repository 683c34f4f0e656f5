"""Readers of labelled images: each original format as written, each malformation refused."""

import gzip
import io
import json
import os
import struct
import tarfile

import numpy as np
import pytest

from jaxfed.data import read_cifar10, read_femnist, read_mnist

# MNIST ------------------------------------------------------------------------------------------


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def digits():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (7, 5, 4), np.uint8), rng.integers(0, 10, 7).astype(np.uint8)


@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
@pytest.mark.parametrize("hyphen", ["-", "."])
@pytest.mark.parametrize("compress", [True, False])
def test_mnist(tmp_path, digits, split, prefix, hyphen, compress):
    for kind, array in zip(("images", "labels"), digits, strict=True):
        name = f"{prefix}-{kind}{hyphen}idx{array.ndim}-ubyte"
        content = gzip.compress(idx(array)) if compress else idx(array)
        (tmp_path / (name + ".gz" * compress)).write_bytes(content)
    (tmp_path / "readme.txt").write_text("ignored")
    found = read_mnist(tmp_path, split)
    np.testing.assert_array_equal(found.images, digits[0])
    np.testing.assert_array_equal(found.labels, digits[1])
    assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
    other = {"train": "test", "test": "train"}[split]
    with pytest.raises(FileNotFoundError, match=r"no file .*-images-idx3-ubyte"):
        read_mnist(tmp_path, other)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((3, 2)), np.zeros(3), r"images-idx3-ubyte: .* got uint8 of shape \(3, 2\)"),
        (np.zeros((0, 2, 2)), np.zeros(0), r"images-idx3-ubyte: .* shape \(0, 2, 2\)"),
        (np.zeros((3, 2, 2)), np.zeros(2), r"labels-idx1-ubyte: .* each of the 3 images"),
        (np.zeros((3, 2, 2)), np.zeros((3, 1)), r"labels-idx1-ubyte: .* shape \(3, 1\)"),
    ],
)
def test_files_that_are_no_mnist_are_refused(tmp_path, images, labels, message):
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / f"train-{name}-ubyte").write_bytes(idx(array.astype(np.uint8)))
    with pytest.raises(ValueError, match=message):
        read_mnist(tmp_path)


def test_damaged_mnist_is_refused(tmp_path, digits):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(digits[0])[:-1])
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(digits[1]))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte: truncated"):
        read_mnist(tmp_path)


# CIFAR-10 ---------------------------------------------------------------------------------------

NAMES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def cifar(seed=0, n=2):
    """Pixels as they are in the files, plane by plane, and labels, of all six batches."""
    rng = np.random.default_rng(seed)
    names = [*NAMES["train"], *NAMES["test"]]
    return {
        name: (rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, 10, n, np.uint8))
        for name in names
    }


def binary(batches):
    return {
        f"{name}.bin": np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        for name, (pixels, labels) in batches.items()
    }


def write(files, folder):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack(files, path, prefix="cifar-10-batches-bin/"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def check_cifar(path, batches):
    for split, names in NAMES.items():
        found = read_cifar10(path, split)
        pixels, labels = (np.concatenate([batches[name][k] for name in names]) for k in (0, 1))
        assert found.images.shape == (len(labels), 32, 32, 3)
        assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(found.labels, labels)
        for i, (row, column, channel) in enumerate([(0, 0, 0), (3, 31, 1)]):
            place = 1024 * channel + 32 * row + column
            assert (found.images[:, row, column, channel] == pixels[:, place]).all(), i


def test_cifar(tmp_path):
    batches = cifar()
    files = binary(batches) | {"batches.meta.txt": b"ignored", "readme.html": b"ignored"}
    check_cifar(write(files, tmp_path / "flat"), batches)
    check_cifar(pack(files, tmp_path / "cifar-10-binary.tar.gz"), batches)
    write(files, tmp_path / "cifar-10-batches-bin")
    check_cifar(tmp_path, batches)


def test_the_python_version_is_refused_and_never_read(tmp_path):
    files = dict.fromkeys([*NAMES["train"], *NAMES["test"]], b"no pickle")
    for path in (write(files, tmp_path / "data"), pack(files, tmp_path / "python.tar.gz")):
        with pytest.raises(
            ValueError, match=rf"{path.name}: wanted .* cifar-10-binary\.tar\.gz from"
        ):
            read_cifar10(path)
    write(binary(cifar()), tmp_path / "data")
    assert len(read_cifar10(tmp_path / "data").images) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "wanted 3073 bytes an image, got 0"),
        (bytes(3073 * 2 - 1), "truncated .* got 6145"),
        (bytes([10]) + bytes(3072), "labels from 0 to 9, got 10 to 10"),
    ],
)
def test_malformed_binary_batches_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=r"test_batch\.bin: .*" + message):
        read_cifar10(write({"test_batch.bin": content}, tmp_path), "test")


def test_incomplete_cifar_is_refused(tmp_path):
    files = binary(cifar())
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        read_cifar10(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="split: wanted one of train, test, got 'valid'"):
        read_cifar10(tmp_path, "valid")
    with pytest.raises(FileNotFoundError, match=r"no data_batch_1\.bin, .*, data_batch_5\.bin"):
        read_cifar10(tmp_path)
    some = {name: files[name] for name in ("data_batch_1.bin", "data_batch_4.bin")}
    with pytest.raises(FileNotFoundError, match=r"no data_batch_2\.bin, data_batch_3\.bin, data_"):
        read_cifar10(write(some, tmp_path))


def test_damaged_archives_are_refused(tmp_path):
    path = pack(binary(cifar(n=9)), tmp_path / "cifar.tar.gz")
    whole = path.read_bytes()
    for content in (b"", b"no archive", whole[:200], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar\.tar\.gz: (not a readable arch|damaged gz)"):
            read_cifar10(path)
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(FileNotFoundError, match=r"no test_batch\.bin"):
        read_cifar10(path, "test")


# FEMNIST ----------------------------------------------------------------------------------------


def writer(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.uniform(size=(n, 784)).round(4).tolist(), "y": rng.integers(0, 62, n).tolist()}


def leaf(data, **changes):
    counts = [len(own["x"]) for own in data.values()]
    return {"users": list(data), "num_samples": counts, "user_data": data} | changes


def check_femnist(found, data):
    assert found.names == list(data)
    for images, labels, own in zip(found.images, found.labels, data.values(), strict=True):
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        np.testing.assert_allclose(images.reshape(-1, 784), own["x"], rtol=1e-6)
        assert images[0, 2, 5] == np.float32(own["x"][0][2 * 28 + 5])
        np.testing.assert_array_equal(labels, own["y"])


def test_femnist_of_one_file_and_of_several(tmp_path):
    data = {f"f{i}_{i % 3}": writer(i + 2, seed=i) for i in range(5)}
    path = tmp_path / "all.json"
    path.write_text(json.dumps(leaf(data)))
    check_femnist(read_femnist(path), data)
    names = list(data)
    folder = tmp_path / "train"
    folder.mkdir()
    for name, chosen in (("all_data_10.json", names[3:]), ("all_data_9.json", names[:3])):
        content = leaf({name: data[name] for name in chosen})
        del content["num_samples"]
        (folder / name).write_text(json.dumps(content))
    (folder / "notes.txt").write_text("ignored")
    check_femnist(read_femnist(folder), data)
    (folder / "all_data_11.json").write_text(json.dumps(leaf({names[0]: writer(1)})))
    with pytest.raises(ValueError, match=rf"all_data_11\.json: writer '{names[0]}' comes twice"):
        read_femnist(folder)


ONE = {"a": writer(2)}
ROWS = ONE["a"]["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        (json.dumps(leaf(ONE))[:-9], "not JSON"),
        ("\udcff", "not JSON"),
        ("[" * 100_000, "not JSON in LEAF's format .*recursion"),
        ([1], "LEAF's format"),
        ({"users": ["a"]}, "LEAF's format .*user_data"),
        (leaf({}), "LEAF's format .no users"),
        (leaf(ONE, user_data=[1]), "LEAF's format"),
        (leaf(ONE, users=["a", "b"], num_samples=[2, 2]), "LEAF's format .'b'"),
        (leaf({"a": {"x": [], "y": []}}), r"writer 'a': wanted x .* \(0,\)"),
        (leaf({"a": {"x": ROWS}}), "writer 'a': malformed data .'y'"),
        (leaf(ONE, num_samples=[2, 2]), "LEAF's format"),
        (leaf(ONE, num_samples=[3]), "a has 2 images, not 3"),
        (leaf({"a": {"x": ROWS, "y": [1]}}), "has 2 images and 1 labels"),
        (leaf({"a": {"x": ROWS, "y": [1, 62]}}), "labels from 0 to 61, got 1 to 62"),
        (leaf({"a": {"x": ROWS, "y": [1, 2.5]}}), "labels as a list of whole numbers"),
        (leaf({"a": {"x": [ROWS[0], ROWS[1][1:]], "y": [1, 2]}}), "writer 'a': malformed data"),
        (leaf({"a": {"x": [[0.5] * 783], "y": [1]}}), r"of shape \(n, 784\), .* \(1, 783\)"),
        (leaf({"a": {"x": [["0.5"] * 784], "y": [1]}}), "wanted x as numbers"),
        (leaf({"a": {"x": [[None] * 784], "y": [1]}}), "wanted x as numbers"),
        (leaf({"a": {"x": {"b": 1}, "y": [1]}}), "wanted x as numbers"),
        (leaf({"a": {"x": [[float("nan")] * 784], "y": [1]}}), "pixels between 0 and 1"),
        (leaf({"a": {"x": [[255] * 784], "y": [1]}}), "pixels between 0 and 1"),
    ],
)
def test_malformed_femnist_is_refused(tmp_path, content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "bad.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"bad\.json: .*" + message):
        read_femnist(tmp_path)


def test_missing_files_are_not_found(tmp_path):
    for read in (read_mnist, read_cifar10, read_femnist):
        with pytest.raises(FileNotFoundError, match="nowhere: no such"):
            read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no file with suffix \.json"):
        read_femnist(tmp_path)
    with pytest.raises(ValueError, match="split: wanted one of train, test, got 'both'"):
        read_mnist(tmp_path, "both")


def test_bombs_are_refused_unless_more_is_allowed(tmp_path):
    pixels, labels = np.zeros((60, 28, 28), np.uint8), np.zeros(60, np.uint8)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    with pytest.raises(ValueError, match=r"idx3-ubyte\.gz: takes more than 20,000 bytes"):
        read_mnist(tmp_path, max_bytes=20_000)
    assert len(read_mnist(tmp_path, max_bytes=50_000).images) == 60
    path = pack({"test_batch.bin": bytes(3073 * 20)}, tmp_path / "cifar.tar.gz")
    with pytest.raises(ValueError, match=r"cifar\.tar\.gz: takes more than 60,000 bytes"):
        read_cifar10(path, "test", max_bytes=60_000)
    assert len(read_cifar10(path, "test", max_bytes=90_000).images) == 20
    # What is no member's content counts, too.
    path = pack({"x" * 50_000: b""}, tmp_path / "names.tar.gz")
    with pytest.raises(ValueError, match=r"names\.tar\.gz: takes more than 40,000 bytes"):
        read_cifar10(path, "test", max_bytes=40_000)


@pytest.mark.timeout(20)
def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "train-images-idx3-ubyte")
    os.mkfifo(tmp_path / "test_batch.bin")
    os.mkfifo(tmp_path / "writers.json")
    for read in (
        lambda: read_mnist(write({"train-labels-idx1-ubyte": b""}, tmp_path)),
        lambda: read_cifar10(tmp_path, "test"),
        lambda: read_cifar10(tmp_path / "test_batch.bin"),
        lambda: read_femnist(tmp_path),
        lambda: read_femnist(tmp_path / "writers.json"),
    ):
        with pytest.raises(ValueError, match="wanted a regular file, got a pipe"):
            read()
