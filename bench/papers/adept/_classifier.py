"""A small classifier of images, whose last features generated images are compared by."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int, Key, Real

_SIZE, _STRIDE = 5, 2  # of both kernels
CHANNELS = 16, 32


class Classifier(eqx.Module):
    """Two convolutions of 5 x 5 pixels with stride 2 and two fully connected layers, all with ReLU.

    Images are shifted by `offset` and divided by `scale` first.
    """

    first: eqx.nn.Linear  # a kernel, as the matrix that takes the pixels under it
    second: eqx.nn.Linear
    hidden: eqx.nn.Linear
    last: eqx.nn.Linear
    offset: Float[Array, ""]
    scale: Float[Array, ""]

    def __init__(
        self,
        shape: tuple[int, int],
        classes: int,
        features: int,
        offset: Float[Array, ""],
        scale: Float[Array, ""],
        *,
        key: Key[Array, ""],
    ):
        """Draw the parameters for images of a height and width of at least 13 pixels."""
        rows, columns = (_positions(_positions(side)) for side in shape)
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(_SIZE**2, CHANNELS[0], key=keys[0])
        self.second = eqx.nn.Linear(_SIZE**2 * CHANNELS[0], CHANNELS[1], key=keys[1])
        self.hidden = eqx.nn.Linear(rows * columns * CHANNELS[1], features, key=keys[2])
        self.last = eqx.nn.Linear(features, classes, key=keys[3])
        self.offset, self.scale = offset, scale

    def features(self, image: Real[Array, "h w"]) -> Float[Array, " features"]:
        """The input of the last layer for ONE image."""
        offset, scale = jax.lax.stop_gradient((self.offset, self.scale))
        found = (image[..., None] - offset) / scale
        for kernel in (self.first, self.second):
            found = jax.nn.relu(jax.vmap(jax.vmap(kernel))(_unfolded(found)))
        return jax.nn.relu(self.hidden(found.reshape(-1)))

    def __call__(self, image: Real[Array, "h w"]) -> Float[Array, " classes"]:
        """Logarithms of the classes' odds for ONE image, up to a common constant."""
        return self.last(self.features(image))


class TrainedClassifier(NamedTuple):
    """A classifier, and how its training went."""

    model: Classifier
    losses: Float[Array, " epochs"]  # cross entropy, mean over each epoch
    size: Float[Array, ""]  # root of the mean square of the training images' features

    def features(self, images: Real[ArrayLike, "n h w"]) -> Float[Array, "n d"]:
        """Features of many images.

        Their mean square is 1 for the images of the training, which is about that of Inception's:
        distances by a kernel depend on it.
        """
        return _in_parts(self.model.features, images) / self.size

    def accuracy(
        self, images: Real[ArrayLike, "n h w"], labels: Int[ArrayLike, " n"]
    ) -> Float[Array, ""]:
        """Share of images whose class is found."""
        return jnp.mean(jnp.argmax(_in_parts(self.model, images), axis=-1) == jnp.asarray(labels))


@functools.partial(jax.jit, static_argnames=("classes", "features", "epochs", "batch_size"))
def train_classifier(
    key: Key[Array, ""],
    images: Float[Array, "n h w"],
    labels: Int[Array, " n"],
    *,
    classes: int,
    features: int = 64,
    epochs: int = 15,
    batch_size: int = 32,
) -> TrainedClassifier:
    """Train a classifier from random parameters, by Adam with a cosine schedule from 0.002 to 0.

    One compiled loop, a pure function of its arguments, so that keys can be mapped over.

    Args:
        key: random key of the first parameters and the minibatches.
        images: gray values of any range.
        labels: classes of the images, from 0.
        classes: how many there are.
        features: width of the layer before the last.
        epochs: how often each image is seen; the last incomplete batch of an epoch is left out.
        batch_size: images of a step.
    """
    start_key, order_key = jax.random.split(key)
    spread = jnp.std(images)
    scale = jnp.where(spread > 0, spread, 1)
    shape = images.shape[1:]
    model = Classifier(shape, classes, features, jnp.mean(images), scale, key=start_key)
    model = jax.tree.map(lambda leaf: leaf.astype(images.dtype), model)
    steps = len(images) // batch_size
    optimizer = optax.adam(1.0)

    def loss(model, batch, wanted):
        scores = jax.vmap(model)(batch)
        return optax.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()

    def step(carry, rows):
        model, state, done = carry
        value, gradient = jax.value_and_grad(loss)(model, images[rows], labels[rows])
        updates, state = optimizer.update(gradient, state)
        rate = jnp.asarray(2e-3) * (1 + jnp.cos(jnp.pi * done / (steps * epochs))) / 2
        updates = jax.tree.map(lambda u: rate.astype(u.dtype) * u, updates)
        return (optax.apply_updates(model, updates), state, done + 1), value

    def epoch(carry, key):
        order = jax.random.permutation(key, len(images))[: steps * batch_size]
        carry, values = jax.lax.scan(step, carry, order.reshape(steps, batch_size))
        return carry, jnp.mean(values)

    start = model, optimizer.init(model), jnp.zeros((), jnp.int32)
    (model, *_), losses = jax.lax.scan(epoch, start, jax.random.split(order_key, epochs))
    size = jnp.sqrt(jnp.mean(_in_parts(model.features, images) ** 2))
    return TrainedClassifier(model, losses, jnp.where(size > 0, size, 1))


def _in_parts(function: Callable[[Array], Array], images: Real[ArrayLike, "n h w"]) -> Array:
    """Map over images, some hundred at a time, because unfolded ones need much memory."""
    return jax.lax.map(function, jnp.asarray(images), batch_size=500)


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
    """The number of positions of a kernel along one side."""
    return (pixels - _SIZE) // _STRIDE + 1
