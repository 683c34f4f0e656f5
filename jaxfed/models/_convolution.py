"""Convolutions of ONE image as matrix products, which stay fast with a kernel for each client."""

import functools
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


class Convolution(eqx.Module):
    r"""Two-dimensional convolution with a square kernel and a bias.

    It has in·out·size² + out parameters, drawn uniformly from \(\pm 1/\sqrt{in·size^2}\), as
    `equinox.nn.Conv2d` and PyTorch draw them.

    Mapped over clients with a kernel each, `lax.conv_general_dilated` becomes a grouped
    convolution. This is a batched matrix product instead, of an image's columns under the kernel
    with all rows of the kernel at once; the rows' contributions are then added where they belong.
    Unfolding rows and columns alike would need `size` times the memory.
    """

    kernel: Float[Array, "size size in out"]
    bias: Float[Array, " out"]
    stride: int = eqx.field(static=True)
    padding: int = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        key: Key[Array, ""],
    ):
        """Draw the parameters.

        Args:
            inputs: channels of the image.
            outputs: channels of the result.
            size: height and width of the kernel.
            stride: pixels from one position of the kernel to the next.
            padding: rows and columns of zeros around the image.
            key: random key of the parameters.
        """
        self.kernel, self.bias = _drawn(key, inputs, outputs, size, inputs)
        self.stride, self.padding = stride, padding

    def __call__(self, image: Float[Array, "h w in"]) -> Float[Array, "h2 w2 out"]:
        """The result for ONE image."""
        size, _, inputs, outputs = self.kernel.shape
        border, step = (self.padding, self.padding), self.stride
        image = jnp.pad(image, (border, border, (0, 0)))
        height, width = ((n - size) // step + 1 for n in image.shape[:2])

        def positions(array, first, count, axis):
            last = first + step * (count - 1) + 1
            return jax.lax.slice_in_dim(array, first, last, step, axis)

        columns = [positions(image, j, width, 1) for j in range(size)]
        unfolded = jnp.concatenate(columns, axis=-1).reshape(-1, size * inputs)
        weights = self.kernel.transpose(1, 2, 0, 3).reshape(size * inputs, size * outputs)
        rows = (unfolded @ weights).reshape(-1, width, size, outputs)
        return _total(positions(rows[:, :, i], i, height, 0) for i in range(size)) + self.bias


class TransposedConvolution(eqx.Module):
    r"""Transposed convolution without padding: every pixel adds a kernel to the result.

    The result is stride·(n - 1) + size + extra pixels high for an image of n, likewise wide. It has
    in·out·size² + out parameters, drawn uniformly from \(\pm 1/\sqrt{out·size^2}\), as PyTorch
    draws them.
    """

    kernel: Float[Array, "size size in out"]
    bias: Float[Array, " out"]
    stride: int = eqx.field(static=True)
    extra: tuple[int, int] = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        extra: tuple[int, int] = (0, 0),
        key: Key[Array, ""],
    ):
        """Draw the parameters.

        Args:
            inputs: channels of the image.
            outputs: channels of the result.
            size: height and width of the kernel.
            stride: pixels of the result from one kernel to the next.
            extra: further rows and columns at the end.
            key: random key of the parameters.
        """
        self.kernel, self.bias = _drawn(key, inputs, outputs, size, outputs)
        self.stride, self.extra = stride, extra

    def __call__(self, image: Float[Array, "h w in"]) -> Float[Array, "h2 w2 out"]:
        """The result for ONE image."""
        height, width, inputs = image.shape
        size, _, _, outputs = self.kernel.shape
        weights = self.kernel.transpose(2, 0, 1, 3).reshape(inputs, -1)
        parts = image.reshape(-1, inputs) @ weights
        parts = parts.reshape(height, width, size, size, outputs)

        def spread(part, first, axis):
            config = [(0, 0, 0)] * part.ndim
            config[axis] = (first, size - 1 - first + self.extra[axis], self.stride - 1)
            return jax.lax.pad(part, jnp.zeros((), part.dtype), config)

        rows = _total(spread(parts[:, :, i], i, 0) for i in range(size))
        return _total(spread(rows[:, :, j], j, 1) for j in range(size)) + self.bias


def _total(parts: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def _drawn(
    key: Key[Array, ""], inputs: int, outputs: int, size: int, fan: int
) -> tuple[Float[Array, "size size in out"], Float[Array, " out"]]:
    first, second = jax.random.split(key)
    limit = 1 / (fan * size**2) ** 0.5
    return (
        jax.random.uniform(first, (size, size, inputs, outputs), minval=-limit, maxval=limit),
        jax.random.uniform(second, (outputs,), minval=-limit, maxval=limit),
    )
