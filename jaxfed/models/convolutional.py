"""A convolutional autoencoder for small colour images."""

from collections.abc import Sequence
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from jaxfed._checks import check_count, check_name, refuse
from jaxfed.models._convolution import Convolution, TransposedConvolution
from jaxfed.models._sizes import check_sample, checked_image

KERNEL, STRIDE = 3, 2


class ConvolutionalAutoencoder(eqx.Module):
    r"""A convolution, two fully connected layers, and a transposed convolution.

    Both convolutions have 16 channels, a kernel of 3 x 3 and a stride of 2, without padding. An
    image of 32 x 32 x 3 thus becomes 15 x 15 x 16 = 3,600 numbers, then a code, and back. The
    transposed convolution would give 31 x 31 pixels; the last row and column hold only its bias.
    The reconstruction passes through a sigmoid.

    With k hidden numbers, g channels and a latent size of r it has (9g + 1)·16 + 2kr + k + r +
    144g + g parameters, 76,493 for 32 x 32 x 3 and r = 10.

    Source: Ozkara, Huang, Zhou & Diggavi, ADEPT, Section 5, with ReLU after the first layer; the
    authors' code has none (`hidden="linear"`).
    """

    encoder: Convolution
    to_code: eqx.nn.Linear
    from_code: eqx.nn.Linear
    decoder: TransposedConvolution
    image_shape: tuple[int, int, int] = eqx.field(static=True)
    hidden: Literal["relu", "linear"] = eqx.field(static=True)

    def __init__(
        self,
        latent: int,
        image_shape: Sequence[int] = (32, 32, 3),
        *,
        channels: int = 16,
        hidden: Literal["relu", "linear"] = "relu",
        key: Key[Array, ""],
    ):
        """Draw the layers.

        Args:
            latent: features of a code.
            image_shape: height, width and channels. A sample is an image flattened in this order,
                channels last, with values from 0 to 1.
            channels: channels of the convolution.
            hidden: activation after the first layer.
            key: random key of the initial parameters.

        Raises:
            ValueError: if a size is not positive, the image is smaller than the kernel, or the
                activation is unknown.
        """
        self.image_shape = checked_image("image_shape", image_shape)
        height, width, colours = self.image_shape
        if min(height, width) < KERNEL:
            raise refuse("image_shape", f"at least {KERNEL} x {KERNEL} pixels", self.image_shape)
        check_count("latent", latent)
        check_count("channels", channels)
        check_name("hidden", hidden, ("relu", "linear"))
        self.hidden = hidden
        k = jax.random.split(key, 4)
        # Positions of the kernel, and thus pixels after the convolution.
        rows, columns = ((side - KERNEL) // STRIDE + 1 for side in (height, width))
        numbers = rows * columns * channels
        self.encoder = Convolution(colours, channels, KERNEL, stride=STRIDE, key=k[0])
        self.to_code = eqx.nn.Linear(numbers, latent, key=k[1])
        self.from_code = eqx.nn.Linear(latent, numbers, key=k[2])
        # Add what the stride cuts off at the end of the image.
        extra = (height - KERNEL) % STRIDE, (width - KERNEL) % STRIDE
        self.decoder = TransposedConvolution(
            channels, colours, KERNEL, stride=STRIDE, extra=extra, key=k[3]
        )

    def encode(self, sample: Float[Array, " features"]) -> Float[Array, " latent"]:
        """The code of ONE flattened image.

        Raises:
            ValueError: if the sample does not have the size of an image.
        """
        check_sample(sample.shape, self.image_shape)
        found = self.encoder(sample.reshape(self.image_shape))
        if self.hidden == "relu":
            found = jax.nn.relu(found)
        return self.to_code(found.reshape(-1))

    def __call__(self, sample: Float[Array, " features"]) -> Float[Array, " features"]:
        """The reconstruction of ONE flattened image."""
        code = self.encode(sample)
        height, width = ((side - KERNEL) // STRIDE + 1 for side in self.image_shape[:2])
        found = self.from_code(code).reshape(height, width, -1)
        return jax.nn.sigmoid(self.decoder(found)).reshape(-1)
