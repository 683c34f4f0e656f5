"""A small classifier of images whose last features are what generated samples are compared by."""

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int, Key, Shaped

from jaxfed._checks import (
    check_count,
    check_number,
    check_positive,
    checked_key,
    checked_path,
    host_array,
    is_list,
    is_real,
    refuse,
    shown,
)
from jaxfed._optional import require
from jaxfed.models._sizes import checked_image

#: What the distances of `jaxfed.metrics` take features from: images `(n, ...)` to `(n, d)`.
FeatureExtractor = Callable[[Shaped[Array, "n ..."]], Float[Array, "n d"]]

_SIZE, _STRIDE, _LEAST = 5, 2, 13  # of both kernels, and the pixels that two of them need


class Classifier(eqx.Module):
    """Two convolutions of 5 x 5 pixels with stride 2 and two fully connected layers, all with ReLU.

    Samples are images, flattened or not, of any range: they are shifted and scaled first as the
    images were that it was trained with.
    """

    first: eqx.nn.Linear  # a kernel, as the matrix that takes the pixels under it
    second: eqx.nn.Linear
    hidden: eqx.nn.Linear
    last: eqx.nn.Linear
    offset: Float[Array, ""]
    scale: Float[Array, ""]
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self,
        image_shape: Sequence[int],
        classes: int,
        *,
        features: int = 64,
        channels: tuple[int, int] = (16, 32),
        offset: float | Array = 0.0,
        scale: float | Array = 1.0,
        key: Key[Array, ""],
    ):
        """Draw the parameters.

        Args:
            image_shape: height, width and channels of an image, at least 13 pixels each way.
            classes: how many there are.
            features: width of the layer before the last.
            channels: of the two convolutions.
            offset: gray value that becomes zero.
            scale: gray values above it that become one.
            key: random key of the first parameters.

        Raises:
            ValueError: for sizes that are not positive whole numbers, and smaller images.
        """
        self.image_shape = checked_image("image_shape", image_shape)
        if min(self.image_shape[:2]) < _LEAST:
            raise ValueError(
                f"image_shape: wanted {_LEAST} x {_LEAST} pixels at least, got {shown(image_shape)}"
            )
        if not is_list(channels) or len(channels) != 2:
            raise refuse("channels", "two whole numbers", channels)
        sizes = ("classes", classes), ("features", features), *(("channels", c) for c in channels)
        for name, size in sizes:
            check_count(name, size)
        check_number("offset", offset, "a number")
        check_positive("scale", scale, single=True)
        key = checked_key("key", key)
        height, width, inputs = self.image_shape
        area = _positions(_positions(height)) * _positions(_positions(width))
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(_SIZE**2 * inputs, channels[0], key=keys[0])
        self.second = eqx.nn.Linear(_SIZE**2 * channels[0], channels[1], key=keys[1])
        self.hidden = eqx.nn.Linear(area * channels[1], features, key=keys[2])
        self.last = eqx.nn.Linear(features, classes, key=keys[3])
        self.offset, self.scale = jnp.asarray(offset, float), jnp.asarray(scale, float)

    def features(self, sample: Shaped[Array, "..."]) -> Float[Array, " features"]:
        """What the last layer sees of ONE image, `(height, width, channels)` in any shape.

        Raises:
            ValueError: if the sample has not as many numbers as the image.
        """
        if np.size(sample) != np.prod(self.image_shape):
            raise ValueError(
                f"sample: wanted an image of shape {self.image_shape}, flattened or not, got "
                f"{np.shape(sample)}"
            )
        offset, scale = jax.lax.stop_gradient((self.offset, self.scale))
        image = (jnp.reshape(sample, self.image_shape) - offset) / scale
        for kernel in (self.first, self.second):
            image = jax.nn.relu(jax.vmap(jax.vmap(kernel))(_unfolded(image)))
        return jax.nn.relu(self.hidden(image.reshape(-1)))

    def __call__(self, sample: Shaped[Array, "..."]) -> Float[Array, " classes"]:
        """Logarithms of the classes' odds for ONE image, up to a common constant.

        Raises:
            ValueError: as `features`.
        """
        return self.last(self.features(sample))


class TrainedClassifier(NamedTuple):
    """A classifier, and how its training went."""

    model: Classifier
    losses: Float[Array, " epochs"]  # cross entropy, mean over each epoch
    size: Float[Array, ""]  # root of the mean square of the training images' features

    def features(self, images: Shaped[ArrayLike, "n ..."]) -> Float[Array, "n d"]:
        """Features of many images: what the distances of `jaxfed.metrics` are for.

        Of mean square 1 for the images of the training, which is about the size of Inception's:
        distances by a kernel depend on it.
        """
        return _in_parts(self.model.features, images) / self.size

    def accuracy(
        self, images: Shaped[ArrayLike, "n ..."], labels: Int[ArrayLike, " n"]
    ) -> Float[Array, ""]:
        """Share of images whose class is found."""
        return jnp.mean(jnp.argmax(_in_parts(self.model, images), axis=-1) == jnp.asarray(labels))


def train_classifier(
    key: Key[Array, ""],
    images: Shaped[ArrayLike, "n ..."],
    labels: Int[ArrayLike, " n"],
    *,
    classes: int | None = None,
    image_shape: Sequence[int] | None = None,
    features: int = 64,
    epochs: int = 15,
    batch_size: int = 32,
    learning_rate: float | Array = 2e-3,
) -> TrainedClassifier:
    """Train a classifier from nothing, by Adam with a learning rate that falls like a cosine.

    One compiled loop, a pure function of its arguments, so that keys, label noise or learning rates
    can be mapped over.

    Args:
        key: random key of the first parameters and the minibatches.
        images: `(n, height, width)`, `(n, height, width, channels)`, or flattened with
            `image_shape`; of any range.
        labels: classes of the images, from 0.
        classes: how many there are. Default: one more than the largest label.
        image_shape: height, width and channels of an image, where images are flattened.
        features: width of the layer before the last, the features.
        epochs: how often each image is seen, but for those that are too few for one more batch.
        batch_size: images of a step.
        learning_rate: at the beginning.

    Returns:
        The classifier and the losses of its training.

    Raises:
        ValueError: for images that are none or not finite, labels that do not fit them or are no
            classes, a class without images, and numbers out of their range.
    """
    key = checked_key("key", key)
    images, shape = _checked_images(images, image_shape)
    labels = _array("labels", labels)
    classes = _checked_classes(labels, len(images), classes)
    check_count("features", features)
    check_count("epochs", epochs)
    check_count("batch_size", batch_size)
    if batch_size > len(images):
        raise ValueError(f"batch_size: wanted at most the {len(images)} images, got {batch_size}")
    check_positive("learning_rate", learning_rate, single=True)
    rate = jnp.asarray(learning_rate, float)
    return _train(key, images, labels, rate, shape, classes, features, epochs, batch_size)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _train(key, images, labels, rate, shape, classes, features, epochs, batch_size):
    start_key, order_key = jax.random.split(key)
    spread = jnp.std(images)
    model = Classifier(
        shape, classes, features=features, key=start_key,
        offset=jnp.mean(images), scale=jnp.where(spread > 0, spread, 1),
    )  # fmt: skip
    model = jax.tree.map(lambda leaf: leaf.astype(images.dtype), model)
    labels, steps = jnp.asarray(labels), len(images) // batch_size
    optimizer = optax.adam(1.0)

    def loss(model, batch, wanted):
        scores = jax.vmap(model)(batch)
        return optax.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()

    def step(carry, rows):
        model, state, done = carry
        value, gradient = jax.value_and_grad(loss)(model, images[rows], labels[rows])
        updates, state = optimizer.update(gradient, state)
        left = rate * (1 + jnp.cos(jnp.pi * done / (steps * epochs))) / 2
        updates = jax.tree.map(lambda u: left.astype(u.dtype) * u, updates)
        return (optax.apply_updates(model, updates), state, done + 1), value

    def epoch(carry, key):
        order = jax.random.permutation(key, len(images))[: steps * batch_size]
        carry, values = jax.lax.scan(step, carry, order.reshape(steps, batch_size))
        return carry, jnp.mean(values)

    start = model, optimizer.init(model), jnp.zeros((), jnp.int32)
    (model, *_), losses = jax.lax.scan(epoch, start, jax.random.split(order_key, epochs))
    size = jnp.sqrt(jnp.mean(_in_parts(model.features, images) ** 2))
    return TrainedClassifier(model, losses, jnp.where(size > 0, size, 1))


def _in_parts(function: Callable[[Array], Array], images: Shaped[ArrayLike, "n ..."]) -> Array:
    """Of each image, some hundred at a time, as unfolded ones need much memory."""
    return jax.lax.map(function, jnp.asarray(images), batch_size=500)


#: SHA-256 of `inception-2015-12-05.pt` as it is published.
_INCEPTION = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"


def inception_features(
    path: str | os.PathLike[str], *, batch_size: int = 50, sha256: str = _INCEPTION
) -> Callable[[Shaped[Array, "n h w ..."]], Float[np.ndarray, "n d"]]:
    """Features of Inception-v3, by which published FID and KID are measured.

    The network is not part of this library and never downloaded. Wanted is the TorchScript file
    `inception-2015-12-05.pt` that belongs to StyleGAN2-ADA, a copy of the TensorFlow network of the
    first FID: it takes images `(n, 3, h, w)` of bytes, scales them to 299 x 299 itself, and called
    with `return_features=True` gives 2048 numbers each. A file of another network will do if it is
    called in this way, and its SHA-256 is given: such a file is a program, which PyTorch runs, and
    is not opened unless it is the one that was meant.

    Args:
        path: of the file.
        batch_size: images at a time.
        sha256: of the file, in hexadecimal digits; by default that of the file above.

    Returns:
        A function of images `(n, h, w)`, `(n, h, w, 1)` or `(n, h, w, 3)`, bytes or between 0 and 1
        (what is beyond is clipped), on the host: not to be traced.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if PyTorch is not installed.
        ValueError: if the file has another SHA-256, or is no TorchScript; and, by the function, for
            images of other shapes, not finite ones, and a network that does not give one row an
            image.

    Source:
        Heusel et al. (2017), GANs trained by a two time-scale update rule converge to a local Nash
        equilibrium; Karras et al. (2020), Training generative adversarial networks with limited
        data, for the file.
    """
    check_count("batch_size", batch_size)
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise refuse("sha256", "64 hexadecimal digits", sha256)
    path = checked_path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    stored = path.read_bytes()
    if (found := hashlib.sha256(stored).hexdigest()) != sha256.lower():
        raise ValueError(f"{path}: wanted a file of SHA-256 {sha256.lower()}, got {found}")
    torch = require("torch", extra="inception")
    try:
        # What was checked, and not what the file may hold by now.
        network = torch.jit.load(io.BytesIO(stored), map_location="cpu").eval()
    except RuntimeError as error:
        raise ValueError(f"{path}: not a TorchScript file ({error})") from error

    def features(images):
        images = np.asarray(images)
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
            raise ValueError(
                f"images: wanted shape (n, h, w), (n, h, w, 1) or (n, h, w, 3), got {images.shape}"
            )
        if images.dtype != np.uint8:
            _check_finite(images)
            images = np.rint(np.clip(images, 0, 1) * 255).astype(np.uint8)
        images = np.broadcast_to(images, (*images.shape[:3], 3)).transpose(0, 3, 1, 2)
        parts = []
        with torch.no_grad():
            for i in range(0, len(images), batch_size):
                batch = np.ascontiguousarray(images[i : i + batch_size])
                found = network(torch.from_numpy(batch), return_features=True).numpy()
                if found.ndim != 2 or len(found) != len(batch):
                    raise ValueError(
                        f"{path}: wanted one row of features an image, got shape {found.shape} for "
                        f"{len(batch)} images"
                    )
                parts.append(found)
        return np.concatenate(parts)

    return features


def _array(name: str, values: ArrayLike) -> Array:
    """As an array whose values can be asked for while other arguments are traced."""
    known = isinstance(values, Array)
    return cast(Array, values if known else host_array(name, values, "an array of numbers"))


def _checked_images(
    images: Shaped[ArrayLike, "n ..."], image_shape: Sequence[int] | None
) -> tuple[Float[Array, "n ..."], tuple[int, int, int]]:
    images = _array("images", images)
    if not is_real(images.dtype):
        raise refuse("images", "real gray values", images)
    if image_shape is None:
        if images.ndim not in (3, 4):
            raise ValueError(
                "images: wanted shape (n, height, width) or (n, height, width, channels), got "
                f"{images.shape}; for flattened ones give image_shape"
            )
        image_shape = (*images.shape[1:], 1)[:3]
    shape = checked_image("image_shape", image_shape)
    if not len(images) or np.prod(images.shape[1:]) != np.prod(shape):
        raise ValueError(
            f"images: wanted some of shape {shape}, flattened or not, got {images.shape}"
        )
    _check_finite(images)
    images = jnp.asarray(images)
    return images if jnp.issubdtype(images.dtype, jnp.floating) else images.astype(float), shape


def _check_finite(images) -> None:
    if not isinstance(images, Tracer) and not np.isfinite(np.asarray(images)).all():
        raise ValueError("images: wanted finite gray values, got NaN or infinite ones")


def _checked_classes(labels: Int[Array, " n"], images: int, classes: int | None) -> int:
    if labels.shape != (images,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels: wanted {images} whole numbers, one an image, got {labels.dtype} of shape "
            f"{labels.shape}"
        )
    if isinstance(labels, Tracer):
        if classes is None:
            raise ValueError("classes: wanted their number where labels are traced, got None")
        check_count("classes", classes)
        return classes
    present = np.unique(np.asarray(labels))
    classes = int(present[-1]) + 1 if classes is None else classes
    check_count("classes", classes)
    if present[0] < 0 or present[-1] >= classes:
        raise ValueError(
            f"labels: wanted classes from 0 to {classes - 1}, got {present[0]} to {present[-1]}"
        )
    if len(present) < classes:
        empty = min(set(range(classes)) - set(present.tolist()))
        raise ValueError(f"labels: wanted images of each of {classes} classes, got none of {empty}")
    return classes


def _unfolded(image: Float[Array, "h w c"]) -> Float[Array, "h2 w2 p"]:
    """The pixels under each position of a kernel, so that a convolution is one matrix product.

    On processors this is many times faster than `lax.conv_general_dilated` and its derivative.
    """
    rows, columns = (_positions(n) for n in image.shape[:2])
    starts = [(i, j) for i in range(_SIZE) for j in range(_SIZE)]
    below, right = _STRIDE * rows, _STRIDE * columns
    parts = [image[i : i + below : _STRIDE, j : j + right : _STRIDE] for i, j in starts]
    return jnp.concatenate(parts, axis=-1)


def _positions(pixels: int) -> int:
    """Of a kernel along one side."""
    return (pixels - _SIZE) // _STRIDE + 1
