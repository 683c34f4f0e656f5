"""Finds files, reads them within a memory limit, and names the file if reading fails."""

import gzip
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxfed._checks import check_whole, checked_path
from jaxfed._names import natural

StrPath = str | os.PathLike[str]

#: Default memory limit of a compressed file or a picture. Without a limit, a few kilobytes of
#: compressed zeros could fill any memory.
MAX_BYTES = 2**30


class TooLarge(ValueError):
    """A file takes more memory than is allowed."""


@contextmanager
def reading(path: Path | str, fault: str) -> Iterator[None]:
    """Turn any exception into a `ValueError` that names the file: "path: fault (reason)".

    Parsers raise nearly every kind of exception on damaged files.
    """
    try:
        yield
    except TooLarge:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path}: {fault} ({reason})") from error


def existing(path: Path) -> Path:
    """The path of a regular file; anything else is refused, because a pipe may never end."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, wanted a file")
    if not path.is_file():
        raise ValueError(f"{path}: wanted a regular file, got a pipe, a socket or a device")
    return path


def files_in(folder: Path, suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """The visible files of a folder in natural order of their names, at least one."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ValueError(f"{folder}: is a file, wanted a folder")
    visible = [file for file in folder.iterdir() if file.name[0] != "." and not file.is_dir()]
    found = [file for file in visible if suffixes is None or file.suffix.lower() in suffixes]
    if not found:
        kinds = "" if suffixes is None else f" with suffix {', '.join(suffixes)}"
        raise ValueError(f"{folder}: holds no file{kinds}")
    return sorted(found, key=lambda file: natural(file.name))


def files_of(path: Path, suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """The files of a folder, as in `files_in`, or the one file itself."""
    return files_in(path, suffixes) if path.is_dir() else [existing(path)]


def stems(files: list[Path]) -> list[str]:
    """The files' names, without suffixes if they stay distinct."""
    names = [file.stem for file in files]
    return names if len(set(names)) == len(names) else [file.name for file in files]


def listing(names: Iterable[object], limit: int = 5) -> str:
    """The first few names in one line."""
    shown = [getattr(name, "name", name) for name in names]
    return ", ".join(map(str, shown[:limit])) + (", ..." if len(shown) > limit else "")


def checked_source(argument: str, path: StrPath, max_bytes: int) -> Path:
    """The path to read from; it and the memory limit are checked."""
    check_whole("max_bytes", max_bytes, most=2**63 - 1)
    return checked_path(argument, path)


def content(path: Path, max_bytes: int) -> bytes | bytearray:
    """The content of a file, unpacked if it is compressed with gzip."""
    limit = allowed(existing(path), max_bytes)
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not compressed:
            return file.read()
        found = bytearray()
        # Read in parts, to stop as soon as the limit is exceeded.
        with reading(path, "damaged gzip file"), gzip.GzipFile(fileobj=file) as stream:
            while len(found) <= limit and (part := stream.read(2**20)):
                found += part
    check_size(path, len(found), limit)
    return found


def check_archive(path: Path, max_bytes: int) -> None:
    """Refuse a zip archive that cannot be read or unpacks to more than is allowed."""
    with reading(path, "not a readable archive"), zipfile.ZipFile(path) as archive:
        # The sizes may be forged, but zipfile never unpacks more of a member than its size.
        size = sum(part.file_size for part in archive.infolist())
    check_size(path, size, allowed(path, max_bytes))


def allowed(path: Path, max_bytes: int) -> int:
    """The memory that a file may take: the limit, but never less than the file's own size."""
    return max(max_bytes, path.stat().st_size)


def check_size(path: Path, size: int, limit: int) -> None:
    """Refuse a file that takes more memory than is allowed."""
    if size > limit:
        raise TooLarge(
            f"{path}: takes more than {limit:,} bytes once unpacked; if you trust it, raise "
            "max_bytes"
        )
