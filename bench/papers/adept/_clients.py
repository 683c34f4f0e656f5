"""One-digit clients of MNIST: how large runs are, how images are dealt, and features of images."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxfed import data as datasets
from papers._files import MNIST_FILES, data_folder
from papers.adept._classifier import train_classifier

DIGITS, SIDE = 10, 28


class Size(NamedTuple):
    """How large a run is."""

    side: int  # pixels of an image's height and width
    clients_per_digit: int
    samples: int  # of a client
    batch: int
    rounds: int
    widths: tuple[int, int, int]
    drawn: int  # images of each client's model
    steps: int  # of the sampler
    validation: int  # of a client
    reference: int  # of a digit


def size_at(scale: float, available: int) -> Size:
    """What is run at a share of the published training's arithmetic.

    The share is divided among the widths of the net, the batches, the clients and, below a tenth
    and below 1/500, the images' pixels. Images and steps of the sampler become fewer, too.

    Args:
        scale: the share.
        available: images of the rarest digit.

    Raises:
        ValueError: if there are too few images.
    """
    clients = max(1, round(5 * scale**0.108))
    reference = min(200, available // 4)
    # Some are left for the classifier.
    room = (available - reference - min(250, available // 4)) // clients
    samples = min(max(10, round(1200 * scale**0.562)), room - min(40, room // 3))
    if samples < 10:
        raise ValueError(f"--data: wanted more images of each digit than {available}")
    a, b, c = (max(4, 4 * round(width * scale**0.163 / 4)) for width in (32, 64, 64))
    return Size(
        side=SIDE if scale >= 0.1 else 16 if scale >= 0.002 else 8,
        clients_per_digit=clients,
        samples=samples,
        batch=min(max(2, round(60 * scale**0.292)), samples),
        rounds=100,
        widths=(a, b, c),
        drawn=200,
        steps=max(20, round(500 * scale**0.27)),
        validation=min(40, room - samples),
        reference=reference,
    )


class Images(NamedTuple):
    """Images from 0 to 1, each in one place only."""

    train: Float[np.ndarray, "m n p"]
    validation: Float[np.ndarray, "m k p"]
    reference: Float[np.ndarray, "10 r p"]
    others: Float[np.ndarray, "l p"]  # for the classifier
    labels: Int[np.ndarray, " l"]  # of the others


def mnist(data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Images from 0 to 1 and digits of all files there are."""
    more = ", and, for more than a tenth of the published images, the files of the training set"
    folder = data_folder(data, "mnist", MNIST_FILES[0] + more, MNIST_FILES[1])
    found = []
    for split in ("train", "test"):
        try:
            found.append(datasets.read_mnist(folder, split))
        except FileNotFoundError:
            continue
    if not found:
        raise ValueError(f"--data: no images in {folder}")
    images = np.concatenate([part.images for part in found]).astype(np.float32) / 255
    return images, np.concatenate([part.labels for part in found])


def resized(images: Float[np.ndarray, "n 28 28"], side: int) -> Float[np.ndarray, "n p"]:
    """Flattened; to 16 and 8 pixels a side as means of 2 x 2 and 3 x 3 ones.

    For 16 a margin of 2 pixels is added before, for 8 one of 2 is left out, where digits are not.
    """
    if side == 16:
        images = np.pad(images, [(0, 0), (2, 2), (2, 2)])
    elif side == 8:
        images = images[:, 2:-2, 2:-2]
    if side != SIDE:
        times = images.shape[1] // side
        images = images.reshape(-1, side, times, side, times).mean(axis=(2, 4))
    return images.reshape(len(images), -1)


def dealt(
    images: Float[np.ndarray, "n 28 28"], digits: Int[np.ndarray, " n"], size: Size, seed: int
) -> Images:
    """Deal images to clients, to the reference and to the classifier, none twice."""
    rng = np.random.default_rng(seed)
    images = resized(images, size.side)
    parts = {name: [] for name in Images._fields}
    for digit in range(DIGITS):
        order = rng.permutation(np.flatnonzero(digits == digit))
        each = size.samples + size.validation
        ends = [*np.arange(1, size.clients_per_digit + 1) * each]
        *own, rest = np.split(order, ends)
        for rows in own:
            parts["train"].append(images[rows[: size.samples]])
            parts["validation"].append(images[rows[size.samples :]])
        parts["reference"].append(images[rest[: size.reference]])
        parts["others"].append(images[rest[size.reference :]])
        parts["labels"].append(np.full(len(rest) - size.reference, digit, np.int32))
    together = {
        name: (np.concatenate if name in ("others", "labels") else np.stack)(rows)
        for name, rows in parts.items()
    }
    return Images(**together)


def features_of(images: Images, side: int, seed: int) -> Callable[[np.ndarray], Array]:
    """Features by a classifier of the images that are nobody's, of mean square 1."""
    # Its convolutions have no padding, so that small images are shown to it twice as large.
    times = 2 if side < 16 else 1

    def shown(flat: np.ndarray) -> np.ndarray:
        return flat.reshape(-1, side, side).repeat(times, 1).repeat(times, 2)

    key = jax.random.key(seed)
    classifier = train_classifier(key, shown(images.others), images.labels, classes=DIGITS)
    features = jax.jit(classifier.features)
    return lambda flat: features(shown(flat))
