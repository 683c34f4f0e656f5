"""Options that several commands share, and functions that read their values."""

import argparse
from pathlib import Path

import numpy as np

from jaxfed import backend, channel, data
from jaxfed._checks import check_whole
from jaxfed.cli._options import Option, option
from jaxfed.data.readers import MAX_BYTES

EARLIER_RESULT = option(
    "result", Path, "folder with a result, or its file result.npz", metavar="RESULT"
)
FORCE = option("--force", bool, "overwrite earlier results", False)
OUTPUT = [option("--out", Path, "folder for the results"), FORCE]
SAMPLES = (
    "folder with one file for each client (.npy, .csv, .parquet, or images whose rows are "
    "samples), or one file with the samples of all clients"
)
COLUMN = option("--client-column", str, "column of one table that names the client", None)
UNITS = [
    option(
        "--center",
        ("none", "local", "shared"),
        "subtract each client's own mean (also without a value), or the mean of all training "
        "samples",
        "none",
        nargs="?",
        const="local",
    ),
    option(
        "--scale",
        ("none", "local", "shared", "energy"),
        "divide each feature by its standard deviation, of each client or of all training samples, "
        "or each client's samples by one number so that their mean square is one",
        "none",
    ),
]
IMPUTE = option(
    "--impute",
    [int],
    "impute missing entries (NaN, empty cells, NA) by a model with this many shared and local "
    "components; if in doubt, give more than needed; default: refuse them",
    None,
    nargs=2,
    metavar=("SHARED", "LOCAL"),
)
BITS = option(
    "--bits", int, "bits for each entry of a message, 2 to 8; default: all", None, metavar="B"
)
BACKEND = [
    option(
        "--backend",
        ("auto", "vmap", "chunked", "pmap", "shard"),
        "map all clients at once (vmap), in blocks (chunked), over devices (pmap, shard), or in "
        "blocks if the CPU cache is too small for all (auto)",
        "vmap",
    ),
    option("--chunk-size", int, "clients in a block; not for vmap and auto", None, metavar="K"),
]


def files(about: str, *default: None) -> list[Option]:
    """Describe the options of data files; `about` is their help."""
    limit = "memory limit of a compressed file or an image, in bytes"
    return [option("--data", Path, about, *default), option("--max-bytes", int, limit, MAX_BYTES)]


def rounds(default: int) -> Option:
    """Describe the option for the number of rounds."""
    return option("--rounds", int, "number of rounds", default)


def held_out(about: str, default: float) -> Option:
    """Describe the option for the held-out share."""
    return option("--held-out", float, about, default, metavar="SHARE")


def share_of(arguments: argparse.Namespace) -> float:
    """Return the held-out share of the data.

    Raises:
        ValueError: if it is not from 0 to below 1.
    """
    share = arguments.held_out
    if not 0 <= share < 1:
        raise ValueError(f"--held-out: wanted a share from 0 to below 1, got {share}")
    return share


def read_samples(arguments: argparse.Namespace, *, incomplete: bool = False) -> data.ClientTables:
    """Read the samples of each client, and the names of clients and features.

    Args:
        arguments: values of the options.
        incomplete: whether entries may be missing (NaN).

    Raises:
        ValueError: if entries are missing without `incomplete`, or a sample has no entry.
    """
    found = data.read_folder(
        arguments.data,
        client_column=arguments.client_column,
        missing="mask" if incomplete else "refuse",
        max_bytes=arguments.max_bytes,
    )
    for name, table in zip(found.names, found.samples, strict=True):
        empty = np.isnan(table).all(axis=1)
        if empty.any():
            raise ValueError(
                f"--data: wanted some entry of each sample, {name} has none in row "
                f"{np.argmax(empty)} (from 0)"
            )
    return found


def channel_of(arguments: argparse.Namespace) -> channel.Channel:
    """Make the channel for `--bits`: quantized differences."""
    if arguments.bits is None:
        return channel.lossless()
    return channel.difference(channel.quantize(arguments.bits))


def backend_of(arguments: argparse.Namespace) -> backend.Backend:
    """Make the backend for `--backend` and `--chunk-size`.

    Raises:
        ValueError: if a chunk size is given for a backend without chunks.
    """
    name, size = arguments.backend, arguments.chunk_size
    if name in ("auto", "vmap") and size is not None:
        raise ValueError(f"--chunk-size: is for --backend chunked, pmap and shard, got {name}")
    if size is not None:
        check_whole("--chunk-size", size)
    if name == "chunked":
        return backend.chunked(256 if size is None else size)
    blocks = {} if size is None else {"inner": backend.chunked(size)}
    return getattr(backend, name)(**blocks)
