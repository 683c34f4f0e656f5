"""Features of Inception-v3, the basis of published distances of generated images."""

import hashlib
import io
import os
import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Shaped

from jaxfed._checks import check_count, checked_path, refuse
from jaxfed._optional import require

#: SHA-256 of `inception-2015-12-05.pt` as published.
_INCEPTION = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"


def inception_features(
    path: str | os.PathLike[str], *, batch_size: int = 50, sha256: str = _INCEPTION
) -> Callable[[Shaped[np.ndarray, "n h w ..."]], Float[np.ndarray, "n d"]]:
    """Load Inception-v3, whose features are the basis of published FID and KID.

    The network is not part of this library and never downloaded. The default is the TorchScript
    file `inception-2015-12-05.pt` of StyleGAN2-ADA, a copy of the TensorFlow network of the first
    FID. It takes images `(n, 3, h, w)` of bytes, scales them to 299 x 299 itself, and returns 2048
    numbers for each if called with `return_features=True`. Any other network with this interface
    works too. Since such a file is a program, it is opened only if its SHA-256 is the given one.

    Args:
        path: the file.
        batch_size: images at a time.
        sha256: the file's SHA-256 in hexadecimal digits.

    Returns:
        A function of images `(n, h, w)`, `(n, h, w, 1)` or `(n, h, w, 3)`, bytes or numbers from 0
        to 1 (others are clipped). It runs on the host and cannot be traced.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if PyTorch is not installed.
        ValueError: if the file has another SHA-256 or is not TorchScript. The returned function
            raises it if images have another shape, NaN or infinity, or the network does not return
            one row per image.
    Source:
        Heusel et al. (2017), GANs trained by a two time-scale update rule converge to a local Nash
        equilibrium; Karras et al. (2020), Training generative adversarial networks with limited
        data, for the file.
    """
    check_count("batch_size", batch_size)
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise refuse("sha256", "64 hexadecimal digits", sha256)
    path = checked_path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    stored = path.read_bytes()
    if (found := hashlib.sha256(stored).hexdigest()) != sha256.lower():
        raise ValueError(f"{path}: wanted a file of SHA-256 {sha256.lower()}, got {found}")
    torch = require("torch", extra="inception")
    try:
        # Load the bytes that were checked, since the file may have changed since.
        network = torch.jit.load(io.BytesIO(stored), map_location="cpu").eval()
    except RuntimeError as error:
        raise ValueError(f"{path}: not a TorchScript file ({error})") from error

    def features(images):
        images = np.asarray(images)
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
            raise ValueError(
                f"images: wanted shape (n, h, w), (n, h, w, 1) or (n, h, w, 3), got {images.shape}"
            )
        if images.dtype != np.uint8:
            if not np.isfinite(images).all():
                raise ValueError("images: wanted finite gray values, got NaN or infinite ones")
            images = np.rint(np.clip(images, 0, 1) * 255).astype(np.uint8)
        images = np.broadcast_to(images, (*images.shape[:3], 3)).transpose(0, 3, 1, 2)
        parts = []
        with torch.no_grad():
            for i in range(0, len(images), batch_size):
                batch = np.ascontiguousarray(images[i : i + batch_size])
                found = network(torch.from_numpy(batch), return_features=True).numpy()
                if found.ndim != 2 or len(found) != len(batch):
                    raise ValueError(
                        f"{path}: wanted one row of features for each of {len(batch)} images, got "
                        f"shape {found.shape}"
                    )
                parts.append(found)
        return np.concatenate(parts)

    return features
