"""Files as they lie on the disk: which there are, and how much they may unpack to."""

import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxfed._checks import check_whole, checked_path

StrPath = str | os.PathLike[str]

#: What a compressed file or a picture may take in memory unless more is allowed. A few kilobytes of
#: zeros, well compressed, would fill any memory.
MAX_BYTES = 2**30


class TooLarge(ValueError):
    """A file takes more memory than is allowed."""


def existing(path: Path) -> Path:
    """The path, refused if no regular file is there: to read a pipe may never end."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, wanted a file")
    if not path.is_file():
        raise ValueError(f"{path}: wanted a regular file, got a pipe, a socket or a device")
    return path


def files_in(folder: Path, suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """Whatever is visible in a folder and no folder itself, in natural order, at least one."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ValueError(f"{folder}: is a file, wanted a folder")
    visible = [file for file in folder.iterdir() if file.name[0] != "." and not file.is_dir()]
    wanted = [file for file in visible if suffixes is None or file.suffix.lower() in suffixes]
    if not wanted:
        kinds = "" if suffixes is None else f" with suffix {', '.join(suffixes)}"
        raise ValueError(f"{folder}: holds no file{kinds}")
    return sorted(wanted, key=lambda file: natural(file.name))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that compares runs of digits as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part) if k % 2 else -1, part) for k, part in enumerate(parts)]


def stems(files: list[Path]) -> list[str]:
    """Names without suffix where that keeps them distinct."""
    names = [file.stem for file in files]
    return names if len(set(names)) == len(names) else [file.name for file in files]


def listing(names: Iterable[object], limit: int = 5) -> str:
    """The first few names in one line."""
    shown = [getattr(name, "name", name) for name in names]
    return ", ".join(map(str, shown[:limit])) + (", ..." if len(shown) > limit else "")


def checked_source(argument: str, path: StrPath, max_bytes: int) -> Path:
    """A path to read from, and how much it may unpack to, once both can be."""
    check_whole("max_bytes", max_bytes, most=2**63 - 1)
    return checked_path(argument, path)


def content(path: Path, max_bytes: int) -> bytes | bytearray:
    """What a file holds, unpacked if it is compressed by gzip."""
    limit = allowed(existing(path), max_bytes)
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not compressed:
            return file.read()
        found = bytearray()
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                while len(found) <= limit and (part := stream.read(2**20)):
                    found += part
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from error
    check_size(path, len(found), limit)
    return found


def check_archive(path: Path, max_bytes: int) -> None:
    """Refuse a zip archive that unpacks to more than is allowed, or cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            # No more than it says is ever unpacked of a part.
            size = sum(part.file_size for part in archive.infolist())
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: not a readable archive ({error})") from error
    check_size(path, size, allowed(path, max_bytes))


def allowed(path: Path, max_bytes: int) -> int:
    """How much a file may unpack to: what was said, and never less than its own size."""
    return max(max_bytes, path.stat().st_size)


def check_size(path: Path, size: int, limit: int) -> None:
    """Refuse a file that takes more than is allowed."""
    if size > limit:
        raise TooLarge(
            f"{path}: takes more than {limit:,} bytes once unpacked; if it is to be trusted, "
            "raise max_bytes"
        )
