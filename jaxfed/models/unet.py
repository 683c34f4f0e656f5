"""A small U-Net for images."""

from collections.abc import Sequence
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxfed._checks import check_count, checked_key, refuse
from jaxfed.models._convolution import Convolution
from jaxfed.models._sizes import check_sample, checked_image


class UNet(eqx.Module):
    r"""Six convolutions, three down and three up, with two skips by addition.

    Every convolution, including the last, has a kernel of 5 x 5 with a padding of 2 and is followed
    by SiLU. On the way down the image is halved twice, by maxima over 2 x 2 pixels. On the way up
    it is doubled twice, by repeating pixels, and each time the image before the halving is added.

    With g channels and widths (a, b, c) it has 50·(ga + ab + bc) + 2a + 2b + c + g parameters,
    309,057 for the published size, one channel and (32, 64, 64).

    Source: the basic U-Net of unit 1 of Hugging Face's course on diffusion models; Ozkara, Huang,
    Zhou & Diggavi, ADEPT, Section 5, take it for ADEPT-DGM.
    """

    down: tuple[Convolution, ...]
    up: tuple[Convolution, ...]
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self,
        image_shape: Sequence[int] = (28, 28, 1),
        *,
        widths: Sequence[int] = (32, 64, 64),
        key: Key[Array, ""],
    ):
        """Draw the layers.

        Args:
            image_shape: height, width and channels. A sample is an image flattened in this order,
                channels last.
            widths: channels after each of the three convolutions down.
            key: random key of the initial parameters.

        Raises:
            ValueError: if `image_shape` or `widths` is not three positive numbers, or the height or
                width cannot be halved twice.
        """
        key = checked_key("key", key)
        self.image_shape = checked_image("image_shape", image_shape)
        if any(side % 4 for side in self.image_shape[:2]):
            wanted = "a height and width that can be halved twice"
            raise refuse("image_shape", wanted, self.image_shape)
        if len(widths) != 3:
            raise refuse("widths", "three numbers", widths)
        for width in widths:
            check_count("widths", width)
        # The way up mirrors the way down, so that skips have the right number of channels.
        sizes = (self.image_shape[-1], *widths)
        first, second = (jax.random.split(k, 3) for k in jax.random.split(key))

        def layers(sizes, keys):
            pairs = zip(pairwise(sizes), keys, strict=True)
            return tuple(Convolution(i, o, 5, padding=2, key=k) for (i, o), k in pairs)

        self.down, self.up = layers(sizes, first), layers(sizes[::-1], second)

    def __call__(self, sample: Float[Array, " features"]) -> Float[Array, " features"]:
        """Apply the network to ONE flattened image.

        Raises:
            ValueError: if the sample does not have the size of an image.
        """
        check_sample(sample.shape, self.image_shape)
        image, skips = sample.reshape(self.image_shape), []
        for layer in self.down[:-1]:
            skips.append(jax.nn.silu(layer(image)))
            image = _halved(skips[-1])
        image = jax.nn.silu(self.up[0](jax.nn.silu(self.down[-1](image))))
        for layer, skip in zip(self.up[1:], skips[::-1], strict=True):
            image = jax.nn.silu(layer(_doubled(image) + skip))
        return image.reshape(-1)


def _halved(image: Float[Array, "h w c"]) -> Float[Array, "h/2 w/2 c"]:
    height, width, channels = image.shape
    return image.reshape(height // 2, 2, width // 2, 2, channels).max(axis=(1, 3))


def _doubled(image: Float[Array, "h w c"]) -> Float[Array, "2*h 2*w c"]:
    return jnp.repeat(jnp.repeat(image, 2, axis=0), 2, axis=1)
