"""Clients of images: read from files of any of the usual forms, values from 0 to 1."""

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PyTree

from jaxfed import data, plot
from jaxfed.cli.fit import _common, _signature
from jaxfed.core.run.solution import Solution
from jaxfed.generative import AdaptiveTraining

SHAPES = "HxW or HxWxC, e.g. 28x28"


class Images(NamedTuple):
    """Every client's images, flattened, values from 0 to 1."""

    names: list[str]
    train: list[Float[np.ndarray, "n_i d"]]
    held_out: list[Float[np.ndarray, "k_i d"]]  # empty where nothing is held out
    shape: tuple[int, int, int]  # height, width and channels


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the options of which images are whose."""
    parser.add_argument(
        "--image-shape",
        type=_shape,
        metavar="HxW[xC]",
        help="of images that are read as arrays; default: square gray ones",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of each client's images, to measure the loss of; 0 for none; default: %(default)s",
    )
    group = parser.add_argument_group("labelled images (MNIST and its kin, CIFAR-10)")
    group.add_argument(
        "--clients",
        type=int,
        default=50,
        metavar="M",
        help="among how many the images are dealt out; default: %(default)s",
    )
    group.add_argument(
        "--classes-per-client",
        type=int,
        default=1,
        metavar="K",
        help="of how many classes a client has images; default: %(default)s",
    )
    group.add_argument(
        "--images", type=int, metavar="N", help="of each client; default: as many as there are"
    )


def add_training(parser: argparse.ArgumentParser, method: str) -> None:
    """Add how models are trained; `method` is the personalized one's name."""
    parser.add_argument(
        "--training",
        choices=("personalized", "fedavg", "local"),
        default="personalized",
        help=f"{method}, federated averaging, or every client alone; default: %(default)s",
    )


def add_rounds(parser: argparse.ArgumentParser, rounds: int) -> Any:
    """Add the options of the rounds, `rounds` of them by default; return their group."""
    group = parser.add_argument_group("rounds")
    _common.add_rounds(group, rounds)
    _common.add_participation(group)
    group.add_argument(
        "--local-steps", type=int, default=20, metavar="N", help="how many a round; default: 20"
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images of a local step; default: so that a round is an epoch",
    )
    return group


def add_prior(parser: argparse.ArgumentParser, defaults: Mapping[str, str]) -> None:
    """Add the options of the prior; `defaults` are what is said of theirs, by name."""
    group = parser.add_argument_group("prior, with --training personalized")
    group.add_argument(
        "--published", action="store_true", help="what the authors' code does, not their text"
    )
    _signature.add_optional(group, AdaptiveTraining, defaults)


DATA = (
    "folder of MNIST's files (or Fashion-MNIST's) or CIFAR-10's, dealt out by class; of FEMNIST's "
    "(.json), a client a writer; or with one file a client (.npy, .npz, .csv, .parquet), or one "
    "such file for all, a flattened image a row"
)


def read(arguments: argparse.Namespace) -> Images:
    """Read what `--data` names.

    Raises:
        ValueError: for arguments or files that do not fit.
        FileNotFoundError: if there are no files.
    """
    share = _common.held_out_share(arguments)
    names, arrays, shape = _read(arguments)
    if arguments.image_shape is not None:
        shape = arguments.image_shape
    features = arrays[0].shape[1]
    if shape is None:
        side = round(features**0.5)
        if side**2 != features:
            raise ValueError(
                f"--image-shape: wanted that of the images of {features} values, which are no "
                "square gray ones"
            )
        shape = (side, side, 1)
    if np.prod(shape) != features:
        given = "x".join(map(str, shape))
        raise ValueError(f"--image-shape: {given} has {np.prod(shape)} values, images {features}")
    for name, array in zip(names, arrays, strict=True):
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"--data: wanted values from 0 to 1, or bytes, {name} has values from "
                f"{array.min():.4g} to {array.max():.4g}"
            )
    held_out = [array[:0] for array in arrays]
    if share:
        for name, array in zip(names, arrays, strict=True):
            if len(array) < 2:
                raise ValueError(f"--held-out: {name} has one image, of which none can be held out")
        key = jax.random.key(arguments.seed)
        arrays, held_out = data.train_test_split(arrays, share, key=key)
    return Images(names, arrays, held_out, shape)


def prior_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the prior's options that were given.

    Raises:
        ValueError: if one was, and nothing is personalized.
    """
    options = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in options.items() if value is not None}
    training = arguments.training
    if training != "personalized" and (given or arguments.published):
        name = "--" + (next(iter(given)) if given else "published").replace("_", "-")
        raise ValueError(f"{name}: is for --training personalized, got {training}")
    return given


def batch_size(arguments: argparse.Namespace, images: Images) -> int:
    """The one that was asked for, or so many that a round is an epoch of the smallest client."""
    if arguments.batch_size is not None:
        return arguments.batch_size
    return max(1, min(map(len, images.train)) // max(arguments.local_steps, 1))


def said(images: Images, models: str, arrays: PyTree) -> str:
    """What is trained on how much."""
    counts = [len(part) for part in images.train]
    weights = sum(leaf.size for leaf in jax.tree.leaves(arrays))
    return (
        f"{len(counts)} clients of {min(counts)} to {max(counts)} images to learn from and "
        f"{sum(map(len, images.held_out))} held out in all; {models} of {weights:,} weights."
    )


def convergence(solution: Solution) -> Any:
    """The picture of the losses round by round."""
    curves = [name for name in ("loss", "objective", "held_out_loss") if name in solution.history]
    if "loss" in curves:
        curves.remove("objective")  # the prior's part is of another size
    return plot.convergence(solution.history, curves, label="squared error of an image")


def named(prefix: str, tree: PyTree) -> dict[str, Any]:
    """A tree's arrays by their paths, for a file."""
    return {
        prefix + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _read(
    arguments: argparse.Namespace,
) -> tuple[list[str], list[Float[np.ndarray, "n d"]], tuple[int, int, int] | None]:
    path: Path = arguments.data
    limit = arguments.max_bytes
    files = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    idx = [name for name in files if re.search(r"images[-.]idx3-ubyte(\.gz)?$", name)]
    cifar = [n for n in files if re.fullmatch(r"(cifar-10-.*\.tar\.gz|data_batch_1(\.bin)?)", n)]
    if idx:
        split = "train" if any(name.startswith("train") for name in idx) else "test"
        return _dealt(arguments, data.read_mnist(path, split, max_bytes=limit))
    if cifar:
        source = path if path.is_file() or cifar[0].startswith("data") else path / cifar[0]
        return _dealt(arguments, data.read_cifar10(source, max_bytes=limit))
    if any(name.endswith(".json") for name in files):
        found = data.read_femnist(path)
        # Ink is 1 here as in the other data.
        arrays = [1 - images.reshape(len(images), -1) for images in found.images]
        return found.names, arrays, _shape_of(found.images[0])
    arrays, names = data.read_folder(path, max_bytes=limit)
    if max(array.max() for array in arrays) > 1 and all(_bytes(array) for array in arrays):
        arrays = [array / 255 for array in arrays]
    return names, [array.astype(np.float32) for array in arrays], None


def _dealt(arguments: argparse.Namespace, found: data.LabelledImages):
    images = found.images.reshape(len(found.images), -1).astype(np.float32) / 255
    parts = data.partition_by_class(
        images, found.labels, arguments.clients, arguments.classes_per_client,
        sizes=arguments.images, key=jax.random.key(arguments.seed),
    )  # fmt: skip
    arrays = [np.asarray(part) for part in parts.samples]
    names = [
        f"client {i + 1} ({', '.join(map(str, np.unique(labels)))})"
        for i, labels in enumerate(parts.labels)
    ]
    return names, arrays, _shape_of(found.images)


def _shape_of(images: np.ndarray) -> tuple[int, int, int]:
    height, width, *channels = images.shape[1:]
    return height, width, channels[0] if channels else 1


def _bytes(array: np.ndarray) -> bool:
    return array.min() >= 0 and array.max() <= 255 and bool((array == np.round(array)).all())


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted {SHAPES}, got {text!r}")
    return int(match[1]), int(match[2]), int(match[3] or 1)
