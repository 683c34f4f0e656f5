"""Checks of the sizes that networks are made with."""

from collections.abc import Sequence

from jaxfed._checks import check_count, is_list, refuse


def checked_image(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Height, width and channels of an image.

    Raises:
        ValueError: unless they are three positive whole numbers.
    """
    if not is_list(shape) or len(shape) != 3:
        raise refuse(name, "height, width and channels", shape)
    for size in shape:
        check_count(name, size)
    height, width, channels = shape
    return height, width, channels


def check_sample(sample_shape: tuple[int, ...], image_shape: tuple[int, int, int]) -> None:
    """Refuse a sample that is no such image, flattened.

    Raises:
        ValueError: as said above.
    """
    height, width, channels = image_shape
    if sample_shape != (height * width * channels,):
        raise ValueError(
            f"sample: wanted shape ({height * width * channels},), an image of {height} x {width} "
            f"pixels and {channels} channels flattened, got {sample_shape}"
        )
