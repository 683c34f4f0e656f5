"""Readers of labelled images in their original formats: MNIST and its kin, CIFAR-10, FEMNIST.

Nothing is downloaded. Malformed files are refused with their name and the reason.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

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
    listing,
)
from jaxfed.data._pickled import read_batch
from jaxfed.data.readers import read_idx

Split = Literal["train", "test"]


class LabelledImages(NamedTuple):
    """Images and what they show.

    Attributes:
        images: gray values as bytes, `(n, height, width)`, with a last axis where they are colours.
        labels: the class of each image, from 0.
    """

    images: Shaped[np.ndarray, "n h w ..."]
    labels: Int[np.ndarray, " n"]


class LabelledClients(NamedTuple):
    """Images of clients and what they show.

    Attributes:
        images: of each client.
        labels: the class of each image, from 0.
        names: of the clients.
    """

    images: list[Float[np.ndarray, "n_i h w"]]
    labels: list[Int[np.ndarray, " n_i"]]
    names: list[str]


def read_mnist(
    folder: StrPath, split: Split = "train", *, max_bytes: int = MAX_BYTES
) -> LabelledImages:
    """Read MNIST, or a data set in its form such as Fashion-MNIST or KMNIST.

    Args:
        folder: holds `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` for training,
            `t10k-...` for testing, compressed by gzip or not.
        split: which of the two.
        max_bytes: the most memory that a compressed file may take once unpacked.

    Returns:
        Images `(n, height, width)` and labels.

    Raises:
        FileNotFoundError: if the folder or a file does not exist.
        ValueError: if a file is malformed or the two do not belong together.

    Source:
        LeCun, Bottou, Bengio & Haffner (1998), Gradient-based learning applied to document
        recognition; Xiao, Rasul & Vollgraf (2017), Fashion-MNIST.
    """
    folder = checked_source("folder", folder, max_bytes)
    prefix = {"train": "train", "test": "t10k"}[_checked_split(split)]
    files = files_in(folder)
    paths = []
    for kind in ("images-idx3", "labels-idx1"):
        # Some copies have a point in the place of the hyphen.
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


#: Bytes of an image of CIFAR-10; in the binary version its label comes before them.
_PIXELS = 3 * 32 * 32
_CIFAR_FILES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(
    path: StrPath, split: Split = "train", *, max_bytes: int = MAX_BYTES
) -> LabelledImages:
    """Read CIFAR-10, its binary or its Python version.

    The Python version is made of pickles, which could run any code when they are read. They are
    not unpickled here: what the published files consist of is parsed, and all else refused, also
    batches that were pickled anew.

    Args:
        path: the archive `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz` as it was downloaded,
            or the folder of its files.
        split: `data_batch_1` to `data_batch_5` for training, `test_batch` for testing.
        max_bytes: the most memory that a compressed archive may take once unpacked.

    Returns:
        Images `(n, 32, 32, 3)` and labels.

    Raises:
        FileNotFoundError: if there is nothing at `path`, or a batch is missing.
        ValueError: if a file is malformed, or both versions are there.

    Source:
        Krizhevsky (2009), Learning multiple layers of features from tiny images.
    """
    path = checked_source("path", path, max_bytes)
    wanted = _CIFAR_FILES[_checked_split(split)]
    either = {name + suffix for name in wanted for suffix in ("", ".bin")}
    found = _cifar_files(path, either, max_bytes)
    binary = any(name.endswith(".bin") for name in found)
    if binary and not all(name.endswith(".bin") for name in found):
        raise ValueError(f"{path}: holds the binary and the Python version, wanted one of them")
    names = [name + ".bin" for name in wanted] if binary else wanted
    missing = [name for name in names if name not in found]
    if missing:
        raise FileNotFoundError(f"{path}: no {', '.join(missing)}")
    read = _binary_batch if binary else _python_batch
    batches = [read(found[name](), f"{path}: {name}") for name in names]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return LabelledImages(np.ascontiguousarray(images), labels)


def _cifar_files(path: Path, wanted: set[str], max_bytes: int) -> dict[str, Callable[[], bytes]]:
    """What reads the wanted files, by their names, from a folder, one below it, or an archive."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        files = [*path.glob("*"), *path.glob("cifar-10-batches-*/*")]
        files = [existing(file) for file in files if file.name in wanted]
        return _once(path, ((file.name, file.read_bytes) for file in files))
    found, unpacked = [], io.BytesIO(content(path, max_bytes))
    try:
        with tarfile.open(fileobj=unpacked, mode="r:") as archive:
            # Nothing is written to the disk, so that names may say what they will.
            for member in archive:
                name = Path(member.name).name
                if name in wanted and member.isreg() and (file := archive.extractfile(member)):
                    found.append((name, partial(bytes, file.read())))
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: not a readable archive ({error})") from error
    return _once(path, found)


def _once(path: Path, found: Iterable[tuple[str, Callable]]) -> dict[str, Callable[[], bytes]]:
    files = {}
    for name, read in found:
        if name in files:
            raise ValueError(f"{path}: holds {name} twice")
        files[name] = read
    return files


def _binary_batch(stored: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    size = 1 + _PIXELS
    if not stored or len(stored) % size:
        raise ValueError(
            f"{where}: truncated or of another format, wanted {size} bytes an image, got "
            f"{len(stored)}"
        )
    records = np.frombuffer(stored, np.uint8).reshape(-1, size)
    return records[:, 1:], _checked_labels(records[:, 0], 10, where)


def _python_batch(stored: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        entries = read_batch(stored)
    except ValueError as error:
        raise ValueError(f"{where}: not a batch of the Python version ({error})") from error
    missing = [name for name in ("data", "labels") if name not in entries]
    if missing:
        raise ValueError(f"{where}: wanted data and labels, it holds {listing(entries)}")
    pixels, labels = entries["data"], entries["labels"]
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"{where}: wanted data as an array, got {type(pixels).__name__}")
    if pixels.shape[1:] != (_PIXELS,) or not pixels.size:
        raise ValueError(f"{where}: wanted data of shape (n, {_PIXELS}), got {pixels.shape}")
    # A list may hold lists that hold one another, which together are larger than any memory.
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise ValueError(f"{where}: wanted labels as a list of whole numbers")
    labels = _checked_labels(labels, 10, where)
    if len(labels) != len(pixels):
        raise ValueError(f"{where}: holds {len(pixels)} images and {len(labels)} labels")
    return pixels, labels


def read_femnist(path: StrPath) -> LabelledClients:
    """Read FEMNIST, handwriting of many writers, as LEAF's scripts write it: a client a writer.

    Args:
        path: a `.json` file or a folder of them, such as LEAF's `data/train`.

    Returns:
        Images `(n_i, 28, 28)`, float32 between 0 and 1 with white paper as 1, labels from 0 to 61
        (digits, capitals, small letters), and the writers' names, in the order of the files.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if a file is no JSON or not of this form; if a writer comes twice, or has no
            images, not as many as labels or as said, images of another size, or pixels that are
            not numbers between 0 and 1.

    Source:
        Caldas et al. (2018), LEAF: a benchmark for federated settings.
    """
    path = checked_path("path", path)
    files = files_in(path, (".json",)) if path.is_dir() else [existing(path)]
    clients = LabelledClients([], [], [])
    for file in files:
        for name, images, labels in _writers(file):
            if name in clients.names:
                raise ValueError(f"{file}: writer {name!r} comes twice")
            clients.images.append(images)
            clients.labels.append(labels)
            clients.names.append(name)
    return clients


def _writers(file: Path) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
    try:
        stored = json.loads(existing(file).read_bytes())
    except ValueError as error:  # of the text or of its encoding
        raise ValueError(f"{file}: not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{file}: not LEAF's form, it is nested too deeply") from error
    users, data = (
        (stored.get("users"), stored.get("user_data")) if isinstance(stored, dict) else (0, 0)
    )
    if not isinstance(users, list) or not isinstance(data, dict) or not users:
        raise ValueError(f"{file}: not LEAF's form, wanted a list users and an object user_data")
    counts = stored.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users):
        raise ValueError(f"{file}: wanted num_samples for each of the {len(users)} users")
    for name, count in zip(users, counts, strict=True):
        where = f"{file}: writer {name!r}"
        own = data.get(name) if isinstance(name, str) else None
        if not isinstance(own, dict) or not own.get("x") or "y" not in own:
            raise ValueError(f"{where} has no data, wanted x and y")
        try:
            images = np.asarray(own["x"])
        except ValueError as error:
            raise ValueError(f"{where}: x is ragged ({error})") from error
        if images.ndim != 2 or images.shape[1] != 28 * 28 or images.dtype.kind not in "iuf":
            raise ValueError(
                f"{where}: wanted x as numbers of shape (n, 784), got {images.dtype} of shape "
                f"{images.shape}"
            )
        # NaN is in no range.
        if not ((images >= 0) & (images <= 1)).all():
            raise ValueError(f"{where}: wanted pixels between 0 and 1, got others or NaN")
        labels = _checked_labels(own["y"], 62, where)
        if not len(images) == len(labels) == (len(images) if count is None else count):
            said = "" if count is None else f", and {count} are said"
            raise ValueError(f"{where} has {len(images)} images and {len(labels)} labels{said}")
        yield name, images.astype(np.float32).reshape(-1, 28, 28), labels


def _checked_split(split: object) -> str:
    check_name("split", split, ("train", "test"))
    return str(split)


def _checked_labels(labels: object, classes: int, where: str) -> np.ndarray:
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise ValueError(f"{where}: labels are ragged ({error})") from error
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
