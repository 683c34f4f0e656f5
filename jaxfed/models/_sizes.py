"""Checks of the sizes of images."""

from collections.abc import Sequence

from jaxfed._checks import check_count, refuse


def checked_image(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Height, width and channels of an image, refused unless they are three positive numbers."""
    if len(shape) != 3:
        raise refuse(name, "height, width and channels", shape)
    for size in shape:
        check_count(name, size)
    height, width, channels = shape
    return height, width, channels


def check_sample(sample_shape: tuple[int, ...], image_shape: tuple[int, int, int]) -> None:
    """Refuse a sample that is not a flattened image of this shape."""
    height, width, channels = image_shape
    if sample_shape != (height * width * channels,):
        raise ValueError(
            f"sample: wanted shape ({height * width * channels},), an image of {height} x {width} "
            f"pixels and {channels} channels flattened, got {sample_shape}"
        )
