"""Readers of labelled images in their original formats: MNIST and its variants, CIFAR-10, FEMNIST.

Nothing is downloaded. Malformed files are refused with their name and the reason.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxfed._checks import check_name, checked_path
from jaxfed.data._files import (
    MAX_BYTES,
    StrPath,
    checked_source,
    content,
    existing,
    files_in,
    files_of,
    reading,
)
from jaxfed.data.readers import read_idx

SplitName = Literal["train", "test"]


class LabelledImages(NamedTuple):
    """Images and their classes.

    Attributes:
        images: bytes, `(n, height, width)`, with a last axis for the channels of colour images.
        labels: the class of each image, from 0.
    """

    images: Shaped[np.ndarray, "n h w ..."]
    labels: Int[np.ndarray, " n"]


class LabelledClients(NamedTuple):
    """Clients' images and their classes.

    Attributes:
        images: each client's images.
        labels: the class of each image, from 0.
        names: the clients' names.
    """

    images: list[Float[np.ndarray, "n_i h w"]]
    labels: list[Int[np.ndarray, " n_i"]]
    names: list[str]


def read_mnist(
    folder: StrPath, split: SplitName = "train", *, max_bytes: int = MAX_BYTES
) -> LabelledImages:
    """Read MNIST, or a data set in the same format such as Fashion-MNIST or KMNIST.

    Args:
        folder: holds `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` for training and
            `t10k-...` for testing, compressed by gzip or not.
        split: which of the two to read.
        max_bytes: memory limit of a compressed file once unpacked.

    Returns:
        Images `(n, height, width)` and labels.

    Raises:
        FileNotFoundError: if the folder or a file does not exist.
        ValueError: if a file is malformed or the numbers of images and labels differ.

    Source:
        LeCun, Bottou, Bengio & Haffner (1998), Gradient-based learning applied to document
        recognition; Xiao, Rasul & Vollgraf (2017), Fashion-MNIST.
    """
    folder = checked_source("folder", folder, max_bytes)
    check_name("split", split, ("train", "test"))
    prefix = {"train": "train", "test": "t10k"}[split]
    files = files_in(folder)
    paths = []
    for kind in ("images-idx3", "labels-idx1"):
        # Some copies have a dot instead of the hyphen.
        stems = [f"{prefix}-{kind}-ubyte", f"{prefix}-{kind.replace('-', '.')}-ubyte"]
        names = [stem + suffix for stem in stems for suffix in ("", ".gz")]
        found = [file for file in files if file.name in names]
        if not found:
            raise FileNotFoundError(f"{folder}: no file {names[0]}, nor {names[1]}")
        paths.append(found[0])
    images, labels = (read_idx(path, max_bytes=max_bytes) for path in paths)
    if images.ndim != 3 or images.dtype != np.uint8 or 0 in images.shape:
        raise ValueError(
            f"{paths[0]}: wanted images (n, height, width) of bytes, got {images.dtype} of shape "
            f"{images.shape}"
        )
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{paths[1]}: wanted a byte for each of the {len(images)} images of {paths[0].name}, "
            f"got {labels.dtype} of shape {labels.shape}"
        )
    return LabelledImages(images, labels.astype(np.int32))


_CIFAR_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
#: Bytes of a CIFAR-10 image: its label, then three planes of 32 x 32 pixels.
_CIFAR_BYTES = 1 + 3 * 32 * 32


def read_cifar10(
    path: StrPath, split: SplitName = "train", *, max_bytes: int = MAX_BYTES
) -> LabelledImages:
    """Read the binary version of CIFAR-10.

    The Python version is refused: it consists of pickles, which can run any code when read.

    Args:
        path: the archive `cifar-10-binary.tar.gz`, the folder that it unpacks to, or the parent of
            that folder.
        split: `data_batch_1.bin` to `data_batch_5.bin` for training, `test_batch.bin` for testing.
        max_bytes: memory limit of the archive once unpacked.

    Returns:
        Images `(n, 32, 32, 3)` and labels.

    Raises:
        FileNotFoundError: if there is nothing at `path`, or a batch is missing.
        ValueError: if a file is malformed, or only the Python version is there.

    Source:
        Krizhevsky (2009), Learning multiple layers of features from tiny images.
    """
    path = checked_source("path", path, max_bytes)
    check_name("split", split, ("train", "test"))
    names = _CIFAR_FILES[split]
    batches = _cifar_batches(path, max_bytes)
    missing = [name for name in names if name not in batches]
    if missing and all(Path(name).stem in batches for name in missing):
        raise ValueError(
            f"{path}: wanted the binary version of CIFAR-10, cifar-10-binary.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html, got the Python version, whose pickles "
            "could run any code"
        )
    if missing:
        raise FileNotFoundError(f"{path}: no {', '.join(missing)}")
    for name in names:
        if not batches[name] or len(batches[name]) % _CIFAR_BYTES:
            raise ValueError(
                f"{path}: {name}: truncated or of another format, wanted {_CIFAR_BYTES} bytes an "
                f"image, got {len(batches[name])}"
            )
    stored = b"".join(batches[name] for name in names)
    records = np.frombuffer(stored, np.uint8).reshape(-1, _CIFAR_BYTES)
    # Stored plane by plane; all images here have channels last.
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = _checked_labels(records[:, 0], 10, f"{path}: {', '.join(names)}")
    return LabelledImages(np.ascontiguousarray(images), labels)


def _cifar_batches(path: Path, max_bytes: int) -> dict[str, bytes]:
    """The batches of either version by file name, from an archive or a folder."""
    names = [name for split in _CIFAR_FILES.values() for name in split]
    names += [Path(name).stem for name in names]
    if path.is_dir():
        inner = path / "cifar-10-batches-bin"
        folder = inner if inner.is_dir() else path
        return {
            name: existing(folder / name).read_bytes() for name in names if (folder / name).exists()
        }
    found = {}
    stored = io.BytesIO(content(path, max_bytes))
    with (
        reading(path, "not a readable archive"),
        tarfile.open(fileobj=stored, mode="r:") as archive,
    ):
        # Nothing is written to disk, so members with malicious paths do no harm.
        for member in archive:
            name = Path(member.name).name
            if name in names and member.isreg() and (file := archive.extractfile(member)):
                found[name] = file.read()
    return found


def read_femnist(path: StrPath) -> LabelledClients:
    """Read FEMNIST, handwriting with one client per writer, as written by LEAF's scripts.

    Args:
        path: a `.json` file or a folder of them, such as LEAF's `data/train`.

    Returns:
        Images `(n_i, 28, 28)` as float32 from 0 to 1 with white paper as 1, labels from 0 to 61
        (digits, capitals, small letters), and the writers' names, in the order of the files.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if a file is not in this format, a writer occurs twice, or a writer's images
            and labels are malformed or differ in number.

    Source:
        Caldas et al. (2018), LEAF: a benchmark for federated settings.
    """
    clients = LabelledClients([], [], [])
    for file in files_of(checked_path("path", path), (".json",)):
        for name, written in _writers(file):
            where = f"{file}: writer {name!r}"
            if name in clients.names:
                raise ValueError(f"{where} comes twice")
            with reading(where, "malformed data"):
                images, labels = np.asarray(written["x"]), written["y"]
            if images.shape[1:] != (28 * 28,) or not len(images) or images.dtype.kind not in "iuf":
                raise ValueError(
                    f"{where}: wanted x as numbers of shape (n, 784), got {images.dtype} of shape "
                    f"{images.shape}"
                )
            if not ((images >= 0) & (images <= 1)).all():  # NaN fails both comparisons
                raise ValueError(f"{where}: wanted pixels between 0 and 1, got others or NaN")
            labels = _checked_labels(labels, 62, where)
            if len(images) != len(labels):
                raise ValueError(f"{where} has {len(images)} images and {len(labels)} labels")
            clients.images.append(images.astype(np.float32).reshape(-1, 28, 28))
            clients.labels.append(labels)
            clients.names.append(name)
    return clients


def _writers(file: Path) -> Iterator[tuple[str, Any]]:
    """The writers of a file and their unchecked data."""
    existing(file)
    with reading(file, "not JSON in LEAF's format"):
        stored = json.loads(file.read_bytes())
        users = [str(user) for user in stored["users"]]
        if not users:
            raise ValueError("no users")
        counts = stored.get("num_samples", [None] * len(users))
        data = [stored["user_data"][user] for user in users]
        writers = list(zip(users, data, counts, strict=True))
        for user, written, count in writers:
            if count not in (None, len(written["x"])):
                raise ValueError(f"{user} has {len(written['x'])} images, not {count}")
    return ((user, written) for user, written, _ in writers)


def _checked_labels(labels: object, classes: int, where: str) -> Int[np.ndarray, " n"]:
    with reading(where, "malformed labels"):
        array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: wanted labels as a list of whole numbers, got {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.size and not 0 <= array.min() <= array.max() < classes:
        raise ValueError(
            f"{where}: wanted labels from 0 to {classes - 1}, got {array.min()} to {array.max()}"
        )
    return array.astype(np.int32)
