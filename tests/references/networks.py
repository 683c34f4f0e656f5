"""Convolutional networks by loops over pixels."""

import numpy as np


def convolution(image, kernel, bias, stride=1, padding=0):
    """Of an (h, w, in) image by a (size, size, in, out) kernel."""
    size = len(kernel)
    image = np.pad(image, [(padding, padding)] * 2 + [(0, 0)])
    height, width = ((n - size) // stride + 1 for n in image.shape[:2])
    out = np.empty((height, width, kernel.shape[-1]))
    for i, j in np.ndindex(height, width):
        window = image[i * stride : i * stride + size, j * stride : j * stride + size]
        out[i, j] = np.einsum("ijc,ijco->o", window, kernel) + bias
    return out


def transposed_convolution(image, kernel, bias, stride, extra):
    """What a convolution's derivative does to an image: a kernel added for every pixel."""
    size = len(kernel)
    shape = [stride * (n - 1) + size + e for n, e in zip(image.shape[:2], extra, strict=True)]
    out = np.tile(bias, (*shape, 1)).astype(np.float64)
    for i, j in np.ndindex(*image.shape[:2]):
        part = np.einsum("c,ijco->ijo", image[i, j], kernel)
        out[i * stride : i * stride + size, j * stride : j * stride + size] += part
    return out


def silu(x):
    return x / (1 + np.exp(-x))


def halved(image):
    """Maxima over 2 x 2 pixels."""
    corners = [image[i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return np.max(corners, axis=0)


def doubled(image):
    return np.kron(image, np.ones((2, 2, 1)))


def unet(layers, image):
    """`layers` are six pairs of kernel and bias."""

    def apply(layer, image):
        return silu(convolution(image, *layer, padding=2))

    first = apply(layers[0], image)
    second = apply(layers[1], halved(first))
    lowest = apply(layers[3], apply(layers[2], halved(second)))
    rising = apply(layers[4], doubled(lowest) + second)
    return apply(layers[5], doubled(rising) + first)
