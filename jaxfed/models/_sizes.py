"""Checks of the sizes that networks are made with."""

from collections.abc import Sequence


def check_size(name: str, size: object) -> None:
    """Refuse what is not a positive whole number.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"{name}: wanted a positive whole number, got {size!r}")


def checked_image(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Height, width and channels of an image.

    Raises:
        ValueError: unless they are three positive whole numbers.
    """
    given = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(given) != 3:
        raise ValueError(f"{name}: wanted height, width and channels, got {shape!r}")
    for size in given:
        check_size(name, size)
    height, width, channels = given
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
