"""Synthetic videos of blobs that move over a still background, as in Shi & Kontar (2024)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxfed._checks import (
    check_positive,
    check_probability,
    check_whole,
    checked_dtype,
    checked_key,
)
from jaxfed.data.synthetic._common import scale_of


class ImageSequence(NamedTuple):
    """A sequence of grayscale images, and the two parts that add up to it.

    Attributes:
        frames: background + foreground (+ noise).
        background: the part shared by all frames, a matrix of low rank.
        foreground: the moving blobs, exactly zero elsewhere.
    """

    frames: Float[Array, "m h w"]
    background: Float[Array, "h w"]
    foreground: Float[Array, "m h w"]


def image_sequence_synthetic(
    *,
    key: PRNGKeyArray,
    frames: int = 20,
    height: int = 32,
    width: int = 48,
    blobs: int = 2,
    radius: float = 4.0,
    brightness: float = 0.5,
    background_rank: int = 3,
    noise_variance: float = 0.0,
    dtype: Any = jnp.float32,
) -> ImageSequence:
    """Draw a short video: a smooth still background and bright blobs that move over it.

    The background is a constant plus `background_rank - 1` products of a wave in each direction,
    in [0, 1 - brightness]. A blob is `brightness * max(0, 1 - distance^2 / radius^2)`; it moves on
    a straight line and is reflected at the border. Where blobs overlap, the brighter one is seen.
    Without noise, frames are in [0, 1].

    Args:
        key: random key.
        frames: number of frames m.
        height: rows h of a frame.
        width: columns w of a frame.
        blobs: number of blobs.
        radius: radius of a blob in pixels.
        brightness: peak of a blob above the background, in (0, 1).
        background_rank: bound on the rank of the background, at least 2.
        noise_variance: variance of the noise in each pixel.
        dtype: type of the images.

    Returns:
        The frames and their parts. With rows as samples, each frame is one client.

    Raises:
        ValueError: if a size is impossible or a blob does not fit into a frame.
    """
    sizes = {"frames": frames, "height": height, "width": width, "blobs": blobs}
    for name, value in sizes.items():
        check_whole(name, value)
    key, dtype = checked_key("key", key), checked_dtype("dtype", dtype)
    check_whole("background_rank", background_rank, least=2)
    check_probability("brightness", brightness)
    check_positive("radius", radius, single=True)
    if not 0 < 2 * radius < min(height, width) - 1:
        raise ValueError(
            f"radius: wanted 2 * radius less than height - 1 and width - 1, "
            f"got {radius} in frames of {height} x {width}"
        )
    variance = scale_of("noise_variance", noise_variance, None, dtype)
    shape = frames, height, width
    return _draw(key, radius, brightness, variance, shape, blobs, background_rank - 1, dtype)


@partial(jax.jit, static_argnames=("shape", "blobs", "waves", "dtype"))
def _draw(key, radius, brightness, variance, shape, blobs, waves, dtype):
    frames, height, width = shape
    key_wave, key_phase, key_start, key_angle, key_speed, key_noise = jax.random.split(key, 6)

    frequency = jax.random.uniform(key_wave, (2, waves, 1), dtype, 0.5, 2.0)
    phase = jax.random.uniform(key_phase, (2, waves, 1), dtype, 0.0, 2 * jnp.pi)
    rows, columns = jnp.arange(height, dtype=dtype), jnp.arange(width, dtype=dtype)
    vertical = jnp.cos(jnp.pi * frequency[0] * rows / height + phase[0])
    horizontal = jnp.cos(jnp.pi * frequency[1] * columns / width + phase[1])
    background = vertical.T @ horizontal
    low, high = background.min(), background.max()
    background = (1 - brightness) * (background - low) / (high - low)

    # A triangle wave of the free path is a straight line reflected at both ends.
    path = jnp.asarray([height, width], dtype) - 1 - 2 * radius
    start = jax.random.uniform(key_start, (blobs, 2), dtype) * path
    angle = jax.random.uniform(key_angle, (blobs,), dtype, 0.0, 2 * jnp.pi)
    speed = radius * jax.random.uniform(key_speed, (blobs, 1), dtype, 0.5, 1.0)
    velocity = speed * jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1)
    time = jnp.arange(frames, dtype=dtype)[:, None, None]
    folded = jnp.mod(start + time * velocity, 2 * path)
    centre = radius + jnp.where(folded > path, 2 * path - folded, folded)
    squared = (rows[:, None] - centre[..., 0, None, None]) ** 2 + (
        columns - centre[..., 1, None, None]
    ) ** 2
    foreground = brightness * jnp.maximum(0, 1 - squared / radius**2).max(axis=1)

    noise = jnp.sqrt(variance) * jax.random.normal(key_noise, foreground.shape, dtype)
    return ImageSequence(background + foreground + noise, background, foreground)
