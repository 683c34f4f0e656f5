"""Reads pictures as matrices of gray values or colours."""

from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxfed._optional import require
from jaxfed.data._files import allowed, check_size, existing, reading

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
# By default Pillow ignores a file's suffix and tries every format it knows, one of which starts a
# program.
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")


def read_pictures(files: list[Path], *, color: bool, max_bytes: int) -> list[np.ndarray]:
    """Pictures of one size, with values from 0 to 1.

    Raises:
        ValueError: if a picture cannot be read or the sizes differ.
    """
    images = [_read_image(file, color, max_bytes) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"{file}: is {image.shape[0]} x {image.shape[1]} pixels, but {files[0].name} is "
                f"{images[0].shape[0]} x {images[0].shape[1]}"
            )
    return images


def _read_image(path: Path, color: bool, max_bytes: int) -> Float[np.ndarray, "h w ..."]:
    pillow = require("PIL.Image", extra="data")
    limit = allowed(existing(path), max_bytes)
    with reading(path, "not a readable image"), pillow.open(path, formats=_FORMATS) as image:
        # At most 16 bytes per pixel: decoded, converted, and in single precision.
        check_size(path, 16 * image.height * image.width, limit)
        if image.mode == "F":
            raise ValueError("floating-point pixels have no known range")
        if image.mode.startswith("I"):
            # Already gray. Pillow's own conversion would clip 16-bit pixels to 8 bits.
            pixels = np.asarray(image).astype(np.float32) / 65535
        else:
            pixels = np.asarray(image.convert("RGB" if color else "L"), np.float32) / 255
    if color and pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError(f"{path}: pixels are beyond 16 bits")
    return pixels
