"""Read the clients' images from files of the usual formats."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxfed import data
from jaxfed.cli._common import share_of

DARK = 1 / 255  # below which values are 0 as bytes


class Images(NamedTuple):
    """Every client's images, flattened, with values from 0 to 1."""

    names: list[str]  # of the clients
    train: list[Float[np.ndarray, "n_i d"]]  # to learn from
    # To test on; empty arrays if nothing is held out.
    held_out: list[Float[np.ndarray, "k_i d"]]
    shape: tuple[int, int, int]  # height, width and channels


def read(arguments: SimpleNamespace) -> Images:
    """Read and split the images in `--data`."""
    share = share_of(arguments)
    names, arrays, shape = _read(arguments)
    if arguments.image_shape is not None:
        shape = arguments.image_shape
    features = arrays[0].shape[1]
    if shape is None:
        side = round(features**0.5)
        if side**2 != features:
            raise ValueError(
                f"--image-shape: wanted that of the images, which have {features} values and so "
                "are not square and gray"
            )
        shape = (side, side, 1)
    if np.prod(shape) != features:
        words = "x".join(map(str, shape))
        raise ValueError(f"--image-shape: {words} has {np.prod(shape)} values, images {features}")
    for name, array in zip(names, arrays, strict=True):
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"--data: wanted values from 0 to 1, or bytes, {name} has values from "
                f"{array.min():.4g} to {array.max():.4g}"
            )
    brightest = max(array.max() for array in arrays)
    if 0 < brightest < DARK:
        raise ValueError(
            "--data: wanted values from 0 to 1, or bytes, got none above "
            f"{brightest:.4g}, which is black; divide them by the largest"
        )
    held_out = [array[:0] for array in arrays]
    if share:
        for name, array in zip(names, arrays, strict=True):
            if len(array) < 2:
                raise ValueError(f"--held-out: {name} has one image, of which none can be held out")
        key = jax.random.key(arguments.seed)
        arrays, held_out = data.train_test_split(arrays, share, key=key)
    return Images(names, arrays, held_out, shape)


def _read(
    arguments: SimpleNamespace,
) -> tuple[list[str], list[Float[np.ndarray, "n d"]], tuple[int, int, int] | None]:
    """Read the clients' names and images, and their shape if the format specifies it."""
    path: Path = arguments.data
    limit = arguments.max_bytes
    files = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    idx = [name for name in files if re.search(r"images[-.]idx3-ubyte(\.gz)?$", name)]
    cifar = [n for n in files if re.fullmatch(r"(cifar-10-.*\.tar\.gz|data_batch_1(\.bin)?)", n)]
    if idx:
        split = "train" if any(name.startswith("train") for name in idx) else "test"
        return _deal(arguments, data.read_mnist(path, split, max_bytes=limit))
    if cifar:
        source = path if path.is_file() or cifar[0].startswith("data") else path / cifar[0]
        return _deal(arguments, data.read_cifar10(source, max_bytes=limit))
    if any(name.endswith(".json") for name in files):
        writers = data.read_femnist(path)
        # In FEMNIST white is 1, in the other data sets ink is 1.
        arrays = [1 - images.reshape(len(images), -1) for images in writers.images]
        return writers.names, arrays, _shape_of(writers.images[0])
    arrays, names, _ = data.read_folder(path, max_bytes=limit)
    if max(array.max() for array in arrays) > 1 and all(_are_bytes(array) for array in arrays):
        arrays = [array / 255 for array in arrays]
    return names, [array.astype(np.float32) for array in arrays], None


def _deal(arguments: SimpleNamespace, labelled: data.LabelledImages):
    """Distribute labelled images over clients of few classes each."""
    images = labelled.images.reshape(len(labelled.images), -1).astype(np.float32) / 255
    parts = data.partition_by_class(
        images,
        labelled.labels,
        arguments.clients,
        arguments.classes_per_client,
        sizes=arguments.images,
        key=jax.random.key(arguments.seed),
    )
    arrays = [np.asarray(part) for part in parts.samples]
    names = [
        f"client {i + 1} ({', '.join(map(str, np.unique(labels)))})"
        for i, labels in enumerate(parts.labels)
    ]
    return names, arrays, _shape_of(labelled.images)


def _shape_of(images: np.ndarray) -> tuple[int, int, int]:
    height, width, *channels = images.shape[1:]
    return height, width, channels[0] if channels else 1


def _are_bytes(array: np.ndarray) -> bool:
    return bool(array.min() >= 0 and array.max() <= 255 and (array == np.round(array)).all())
