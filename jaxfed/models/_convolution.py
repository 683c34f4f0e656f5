"""Convolutions of ONE image as matrix products, which stay fast when clients' kernels differ."""

import functools
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


class Convolution(eqx.Module):
    r"""Two-dimensional convolution with a square kernel and a bias.

    Its in·out·size² + out parameters are drawn uniformly from \(\pm 1/\sqrt{in·size^2}\), as in
    `equinox.nn.Conv2d` and PyTorch. `stride` is the distance in pixels between positions of the
    kernel, and `padding` the number of rows and columns of zeros around the image.

    Mapped over clients with different kernels, `lax.conv_general_dilated` would become a slow
    grouped convolution. This is a batched matrix product instead: columns are unfolded and
    multiplied by all rows of the kernel at once, and then the rows are added with an offset.
    Unfolding rows as well would take `size` times the memory.
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
        """Draw the parameters for `inputs` and `outputs` channels."""
        self.kernel, self.bias = _draw(key, inputs, outputs, size, inputs)
        self.stride, self.padding = stride, padding

    def __call__(self, image: Float[Array, "h w in"]) -> Float[Array, "h2 w2 out"]:
        """Convolve ONE image."""
        size, _, inputs, outputs = self.kernel.shape
        border, step = (self.padding, self.padding), self.stride
        image = jnp.pad(image, (border, border, (0, 0)))
        height, width = ((n - size) // step + 1 for n in image.shape[:2])

        def positions(array, first, count, axis):
            last = first + step * (count - 1) + 1
            return jax.lax.slice_in_dim(array, first, last, step, axis)

        # Unfold the columns: for every pixel of every row, the `size` pixels under the kernel.
        columns = [positions(image, j, width, 1) for j in range(size)]
        unfolded = jnp.concatenate(columns, axis=-1).reshape(-1, size * inputs)
        weights = self.kernel.transpose(1, 2, 0, 3).reshape(size * inputs, size * outputs)
        # One product gives the contribution of every image row to every kernel row.
        rows = (unfolded @ weights).reshape(-1, width, size, outputs)
        return _total(positions(rows[:, :, i], i, height, 0) for i in range(size)) + self.bias


class TransposedConvolution(eqx.Module):
    r"""Transposed convolution without padding: every pixel adds a kernel to the result.

    For an image of n rows the result has stride·(n - 1) + size + extra rows, and likewise for its
    columns; `extra` holds one number for each. The in·out·size² + out parameters are drawn
    uniformly from \(\pm 1/\sqrt{out·size^2}\), as in PyTorch.
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
        """Draw the parameters for `inputs` and `outputs` channels."""
        self.kernel, self.bias = _draw(key, inputs, outputs, size, outputs)
        self.stride, self.extra = stride, extra

    def __call__(self, image: Float[Array, "h w in"]) -> Float[Array, "h2 w2 out"]:
        """Convolve ONE image."""
        height, width, inputs = image.shape
        size, _, _, outputs = self.kernel.shape
        weights = self.kernel.transpose(2, 0, 1, 3).reshape(inputs, -1)
        # Multiply every pixel by the whole kernel, then move each part to its place.
        parts = image.reshape(-1, inputs) @ weights
        parts = parts.reshape(height, width, size, size, outputs)

        # Pad with zeros around the image and, for the stride, between the pixels.
        def spread(part, first, axis):
            config = [(0, 0, 0)] * part.ndim
            config[axis] = (first, size - 1 - first + self.extra[axis], self.stride - 1)
            return jax.lax.pad(part, jnp.zeros((), part.dtype), config)

        # First along the rows, then along the columns, so that intermediate sums stay small.
        rows = _total(spread(parts[:, :, i], i, 0) for i in range(size))
        return _total(spread(rows[:, :, j], j, 1) for j in range(size)) + self.bias


def _total(parts: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def _draw(
    key: Key[Array, ""], inputs: int, outputs: int, size: int, fan: int
) -> tuple[Float[Array, "size size in out"], Float[Array, " out"]]:
    first, second = jax.random.split(key)
    limit = 1 / (fan * size**2) ** 0.5
    return (
        jax.random.uniform(first, (size, size, inputs, outputs), minval=-limit, maxval=limit),
        jax.random.uniform(second, (outputs,), minval=-limit, maxval=limit),
    )
