"""Options that several commands share, and functions that read their values."""

import inspect
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from cyclopts import CoercionError, Token

from jaxfed import backend, channel, data
from jaxfed._checks import check_whole
from jaxfed._numbers import precision_of
from jaxfed.cli._options import exactly, option
from jaxfed.data.readers import MAX_BYTES

EARLIER_RESULT = option(
    "result", Path, "folder with a result, or its file result.npz", metavar="RESULT"
)
FORCE = option("--force", bool, "replace earlier results", False)
OUTPUT = [option("--out", Path, "folder for the results"), FORCE]
SAMPLES = (
    "folder with one file for each client (.npy, .csv, .parquet, .h5ad, or images whose rows are "
    "samples), or one file with the samples of all clients"
)
COLUMN = option("--client-column", str, "column of one table that names the client", None)
WRITTEN = [
    option("--sep", str, "character between cells of a .csv file, or tab; default: found", None),
    option("--decimal", (".", ","), "decimal sign of a .csv file; default: found", None),
    option("--comment", str, "character with which comments in .csv files begin; default: #", None),
    option(
        "--header", ("yes", "no"), "whether the first row names the columns; default: found", None
    ),
    option(
        "--encoding",
        str,
        "encoding of .csv files, such as cp1252 or latin-1; default: as their mark says, or UTF-8",
        None,
    ),
    option("--columns", tuple[str, ...], "columns of features; default: all others", ()),
    option("--drop", tuple[str, ...], "columns that are no features", ()),
    option("--id-column", str, "column that names the rows, no feature", None),
]
TABLE = [COLUMN, *WRITTEN]
UNITS = [
    option(
        "--center",
        ("none", "local", "shared"),
        "subtract each client's own mean (local), or the mean of all training samples (shared)",
        "none",
    ),
    option(
        "--scale",
        ("none", "local", "shared", "energy"),
        "divide each feature by its standard deviation, of each client or of all training samples, "
        "or each client's samples by one number so that their mean square is one",
        "none",
    ),
]
DELTA = option("--delta", float, "probability that the guarantee fails, with --epsilon", 1e-5)
PERSON = option(
    "--person",
    str,
    "column with the number of the person whom a row is of, with --epsilon; default: each row is "
    "another person's",
    None,
)
SHARERS = option(
    "--sharers",
    int,
    "number of clients that share the noise of --epsilon: only sums over as many protect persons",
    1,
)


def _ranks_or_auto(kind: Any, words: Sequence[Token]) -> tuple[int, ...] | str:
    """Read two numbers of components, or auto."""
    if [word.value for word in words] == ["auto"]:
        return "auto"
    found = exactly(kind, words)
    if len(found) != 2:
        given = " ".join(word.value for word in words)
        wanted = f"wanted auto, or a number of shared and one of local components, got {given}"
        raise CoercionError(msg=wanted, token=words[0])  # with a word, which names the option
    return found


IMPUTE = option(
    "--impute",
    tuple[int, ...],
    "impute missing entries (NaN, empty cells, NA) by a model with this many shared and local "
    "components; auto is half of the number of features, at most 30, and 2; default: refuse them",
    None,
    metavar="SHARED LOCAL",
    converter=_ranks_or_auto,
)
BITS = option("--bits", int, "bits for each entry of a message, 2 to 8; default: all", None)
BACKEND = [
    option(
        "--backend",
        ("auto", "vmap", "chunked", "pmap", "shard"),
        "map all clients at once (vmap), in blocks (chunked), over devices (pmap, shard), or in "
        "blocks if the CPU cache is too small for all (auto)",
        "vmap",
    ),
    option("--clients-per-block", int, "clients in a block; not for vmap and auto", None),
]


def whole_or_share(_: Any, words: Sequence[Token]) -> float:
    """Read a number of components, or a share of the variance; one that is neither is refused."""
    text = words[0].value
    with suppress(ValueError):
        return int(text) if re.fullmatch("[+-]?[0-9]+", text) else float(text)
    raise ValueError(f"wanted a number, got {text!r}")


def files(about: str, *default: None) -> list[inspect.Parameter]:
    """Describe the options of data files; `about` is their help."""
    limit = "memory limit of a compressed file or an image, in bytes"
    return [option("--data", Path, about, *default), option("--max-bytes", int, limit, MAX_BYTES)]


def rounds(default: int) -> inspect.Parameter:
    """Describe the option for the number of rounds."""
    return option("--rounds", int, "number of rounds", default)


def held_out(about: str, default: float) -> inspect.Parameter:
    """Describe the option for the held-out share."""
    return option("--held-out", float, about, default, metavar="SHARE")


def share_of(arguments: SimpleNamespace) -> float:
    """Return the held-out share of the data.

    Raises:
        ValueError: if it is not from 0 to below 1.
    """
    share = arguments.held_out
    if not 0 <= share < 1:
        raise ValueError(f"--held-out: wanted a share from 0 to below 1, got {share}")
    return share


def read_samples(
    arguments: SimpleNamespace, precision: ExitStack, *, incomplete: bool = False
) -> data.ClientTables:
    """Read the samples of each client, and the names of clients and features.

    Args:
        arguments: values of the options.
        precision: what enters the precision of the tables, in which the command then computes.
        incomplete: whether entries may be missing (NaN).

    Raises:
        ValueError: if entries are missing without `incomplete`, or a sample has no entry.
    """
    how = how_written(arguments)
    if how["columns"] is not None:  # else all are read
        roles = (getattr(arguments, name, None) for name in ("weight_column", "person"))
        more = [x for x in roles if x is not None]
        how["columns"] = [*(x for x in how["columns"] if x not in more), *more]
    found = data.read_folder(
        arguments.data,
        client_column=arguments.client_column,
        missing="mask" if incomplete else "refuse",
        max_bytes=arguments.max_bytes,
        **how,
    )
    for name, table in zip(found.names, found.samples, strict=True):
        empty = np.isnan(table).all(axis=1)
        if empty.any():
            raise ValueError(
                f"--data: wanted some entry of each sample, {name} has none in row "
                f"{np.argmax(empty)} (from 0)"
            )
    precision.enter_context(precision_of(found.samples[0].dtype))
    return found


class TakenOut(NamedTuple):
    """A column of the clients' tables, and the tables without it."""

    column: list[np.ndarray]
    tables: list[np.ndarray]
    features: list[str]


def taken_out(
    option: str, name: str, tables: Sequence[np.ndarray], features: list[str] | None
) -> TakenOut:
    """Take a column that is no feature out of tables.

    Args:
        option: which names the column, without dashes.
        name: of the column.
        tables: of the clients.
        features: the names of their columns; None without a header.

    Raises:
        ValueError: if there is no such column.
    """
    if features is None or name not in features:
        known = "none, without a header" if features is None else ", ".join(features)
        raise ValueError(f"--{option}: wanted a column of the tables ({known}), got {name}")
    place = features.index(name)
    return TakenOut(
        [table[:, place] for table in tables],
        [np.delete(table, place, axis=1) for table in tables],
        [other for other in features if other != name],
    )


def how_written(arguments: SimpleNamespace) -> dict[str, Any]:
    """How tables are written, as options of the readers of `jaxfed.data`."""
    return {
        "sep": {"tab": "\t", "\\t": "\t"}.get(arguments.sep, arguments.sep),
        "header": None if arguments.header is None else arguments.header == "yes",
        "columns": arguments.columns or None,
        **{
            name: getattr(arguments, name)
            for name in ("decimal", "comment", "drop", "id_column", "encoding")
        },
    }


def channel_of(arguments: SimpleNamespace) -> channel.Channel:
    """Make the channel for `--bits`: quantized differences."""
    if arguments.bits is None:
        return channel.lossless()
    return channel.difference(channel.quantize(arguments.bits))


def backend_of(arguments: SimpleNamespace) -> backend.Backend:
    """Make the backend for `--backend` and `--clients-per-block`.

    Raises:
        ValueError: if a size is given for a backend without blocks.
    """
    name, size = arguments.backend, arguments.clients_per_block
    if name in ("auto", "vmap") and size is not None:
        raise ValueError(
            f"--clients-per-block: is for --backend chunked, pmap and shard, got {name}"
        )
    if size is not None:
        check_whole("--clients-per-block", size)
    if name == "chunked":
        return backend.chunked(256 if size is None else size)
    blocks = {} if size is None else {"inner": backend.chunked(size)}
    return getattr(backend, name)(**blocks)
