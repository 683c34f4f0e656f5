"""Valid files for every reader, and ways to damage them."""

import gzip
import io
import json
import random
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas
import PIL.Image
import scipy.sparse


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _sparse(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    scipy.sparse.save_npz(file, scipy.sparse.csr_array(array))
    return file.getvalue()


def _image(array: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray((255 * array).astype(np.uint8)).save(file, kind)
    return file.getvalue()


def _idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@cache
def sound() -> dict[tuple[str, str], dict[str, bytes]]:
    """Contents by file name, for each reader and format; the reader gets their folder.

    A name that begins with `alone/` is of a file that the reader gets itself.
    """
    rng = np.random.default_rng(0)
    table = rng.uniform(size=(6, 4)).astype(np.float32)
    frame = pandas.DataFrame(table, columns=list("abcd"))
    parquet, csv = io.BytesIO(), frame.to_csv(index=False).encode()
    frame.to_parquet(parquet)
    images = rng.integers(0, 255, (3, 5, 5))
    idx = {"train-images-idx3-ubyte": _idx(images), "train-labels-idx1-ubyte": _idx(np.arange(3))}
    batches = [f"data_batch_{i}" for i in range(1, 6)]
    pixels = rng.integers(0, 255, (2, 3072)).astype(np.uint8)
    user = {"x": rng.uniform(size=(2, 784)).tolist(), "y": [1, 2]}
    leaf = {"users": ["a"], "num_samples": [2], "user_data": {"a": user}}
    two = {"a.npy": _npy(table), "b.npy": _npy(table[:3])}
    return {
        ("read_arrays", ".npy"): two,
        ("read_arrays", ".npz"): {"alone/all.npz": _npz(a=table, b=table[:2])},
        ("read_arrays", "one .npy"): {"alone/all.npy": _npy(table.reshape(2, 3, 4))},
        ("read_folder", ".npy"): two,
        ("read_folder", ".csv"): {"a.csv": csv, "b.csv": csv},
        ("read_table", ".csv"): {"a.csv": csv, "b.csv": csv},
        ("read_table", ".parquet"): {"a.parquet": parquet.getvalue()},
        ("read_folder", ".parquet"): {"a.parquet": parquet.getvalue()},
        ("read_views", ".csv"): {"a.csv": csv, "b.csv": csv},
        ("read_views", ".npz"): {"alone/all.npz": _npz(a=table, b=table)},
        ("read_views", "sparse .npz"): {"a.npz": _sparse(table), "b.npz": _sparse(table)},
        ("read_images", ".png"): {"a.png": _image(table, "png"), "b.png": _image(table, "png")},
        ("read_images", ".bmp"): {"a.bmp": _image(table, "bmp")},
        ("read_images", ".tif"): {"a.tif": _image(table, "tiff")},
        ("read_images", ".jpg"): {"a.jpg": _image(table, "jpeg")},
        ("read_images", ".webp"): {"a.webp": _image(table, "webp")},
        ("read_images", ".ppm"): {"a.ppm": _image(np.stack([table] * 3, -1), "ppm")},
        ("read_folder", ".png"): {"a.png": _image(table, "png"), "b.png": _image(table, "png")},
        ("read_idx", "idx"): {"alone/images": _idx(images)},
        ("read_idx", "idx.gz"): {"alone/images.gz": gzip.compress(_idx(images), mtime=0)},
        ("read_mnist", "idx"): idx,
        ("read_mnist", "idx.gz"): {f"{n}.gz": gzip.compress(x, mtime=0) for n, x in idx.items()},
        ("read_cifar10", "binary"): {
            f"{name}.bin": (np.concatenate([[1], pixels[0]])).astype(np.uint8).tobytes()
            for name in batches
        },
        ("read_femnist", ".json"): {"a.json": json.dumps(leaf).encode()},
    }


def _flipped(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _overwritten(rng: random.Random, content: bytes) -> bytes:
    start, length = rng.randrange(len(content)), rng.choice([1, 2, 4, 8, 32])
    filling = rng.choice([b"\0", b"\xff", b"\x7f", b"9", b"-", b",", b"\n", b'"'])
    return content[:start] + filling * length + content[start + length :]


def _without(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.choice([1, 2, 16, 200]) :]


def _inserted(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + rng.randbytes(rng.choice([1, 4, 64])) + content[start:]


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut off": lambda rng, content: content[: rng.randrange(len(content))],
    "bits flipped": _flipped,
    "overwritten": _overwritten,
    "bytes lost": _without,
    "bytes inserted": _inserted,
    "empty": lambda rng, content: b"",
    "noise": lambda rng, content: rng.randbytes(rng.choice([1, 3, 10, 1000])),
    "twice": lambda rng, content: content + content,
    "of another format": lambda rng, content: next(
        iter(rng.choice(sorted(sound().values(), key=str)).values())
    ),
}


def written(rng: random.Random, folder: Path) -> tuple[str, str, Path]:
    """Write valid files, one of them damaged.

    Args:
        rng: what decides.
        folder: where; it must not be there yet.

    Returns:
        The reader, what is damaged and how, and the path to read.
    """
    reader, form = rng.choice(sorted(sound()))
    contents = sound()[reader, form]
    chosen, how = rng.choice(sorted(contents)), rng.choice(sorted(DAMAGE))
    folder.mkdir()
    for name, content in contents.items():
        path = folder / Path(name).name
        path.write_bytes(DAMAGE[how](rng, content) if name == chosen else content)
    alone = next((name for name in contents if name.startswith("alone/")), None)
    target = folder if alone is None else folder / Path(alone).name
    return reader, f"{form}, {how}", target
