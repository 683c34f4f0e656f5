"""How tables are written: what separates cells, which line is the header, what is no feature."""

import codecs
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfed._checks import check_flag, check_text, check_texts, refuse
from jaxfed._refusals import closest
from jaxfed.data._files import listing, reading

#: Pairs of separator and decimal sign; the first that fits best is taken.
_PAIRS = tuple((sep, sign) for sign in ".," for sep in (",", ";", "\t", "|", " ") if sep != sign)
#: Options that say how text is written.
_TEXT = ("sep", "decimal", "comment", "header", "encoding")
LINES = 50  # that are looked at
_WIDE = 8  # cells in a row that hardly happen to rise, or to be evenly spaced
_FEW = 4  # fewer cells are evenly spaced by chance
#: Marks at the beginning of a file, the longer ones first, and what they say.
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Dialect(NamedTuple):
    """How a table is written, and which of its columns are features; None is found."""

    sep: str | None = None
    decimal: str | None = None
    comment: str | None = None
    header: bool | None = None
    columns: Sequence[str] | None = None
    drop: Sequence[str] = ()
    id_column: str | None = None
    encoding: str | None = None

    def check(self, files: Sequence[Path] = ()) -> None:
        """Raise a `ValueError` for what no table can have, or none of these files."""
        if files and not any(file.suffix.lower() == ".csv" for file in files):
            check_no_tables(files[0], ".csv files", **{x: getattr(self, x) for x in _TEXT})
        for name, given in (("sep", self.sep), ("comment", self.comment)):
            if given is not None and not (isinstance(given, str) and len(given) == 1):
                raise refuse(name, "one character, or None to find it", given)
        if self.decimal not in (None, ".", ",") or (self.decimal and self.decimal == self.sep):
            raise refuse("decimal", "'.' or ',', other than sep, or None to find it", self.decimal)
        if self.header is not None:
            check_flag("header", self.header)
        if self.columns is not None:
            check_texts("columns", self.columns)
        check_texts("drop", self.drop)
        if self.id_column is not None:
            check_text("id_column", self.id_column)
        if self.encoding is not None:
            check_text("encoding", self.encoding)
            try:
                b"a".decode(self.encoding, "replace")
            except (LookupError, ValueError):
                wanted = "a name that Python has for an encoding, such as 'cp1252' or 'latin-1'"
                raise refuse("encoding", wanted, self.encoding) from None


def check_no_tables(path: Path, what: str = "tables", /, **options: Any) -> None:
    """Refuse options of tables, or of some of them, for what is none."""
    for name, given in options.items():
        if given is not None and given != () and given != []:
            raise ValueError(f"{path}: {name}={given!r} is for {what}")


def read_rows(path: Path, dialect: Dialect) -> tuple[list[tuple[int, list[str]]], str]:
    """The lines of a `.csv` file as cells, with their numbers, and the decimal sign."""
    text = _text(path, dialect.encoding)
    mark = dialect.comment or "#"
    # With their numbers; a quoted cell may go on in the next line.
    kept = [line if line[:1] != mark else "\n" for line in _lines(text)]
    sep, decimal = _found(kept, dialect)
    with reading(path, "not a CSV file"):
        reader = _cells(kept, sep)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    return rows, decimal


def _text(path: Path, encoding: str | None) -> str:
    """The text of a file; a mark at its beginning counts more than the encoding.

    Raises:
        ValueError: names the line with bytes that the encoding does not have.
    """
    with reading(path, "cannot be read"):
        content = path.read_bytes()
    marked = next((own for mark, own in _MARKS.items() if content.startswith(mark)), None)
    known = marked or encoding or "utf-8"
    other = "utf-8" if known.startswith("cp") else "cp1252 for older files of Windows"
    fault = ""
    try:
        text = content.decode(known)
    except UnicodeDecodeError as error:
        text = error.object[: error.start].decode(known, "replace") + "."
        fault = f"the byte 0x{error.object[error.start]:02x}"
    if not fault and "\0" in text:
        text, fault, other = text[: text.index("\0") + 1], "a zero byte", "utf-16-le"
    if not fault:
        return text.removeprefix("\ufeff")
    todo = "its mark says so" if marked else f"pass encoding= (--encoding), such as {other}"
    raise ValueError(
        f"{path}: not a CSV file in {known.upper()}, line {len(_lines(text))} has {fault}; {todo}"
    )


def _lines(text: str) -> list[str]:
    return list(io.StringIO(text, newline=""))


def _cells(lines: Iterable[str], sep: str) -> Any:
    if sep == " ":
        lines = (f"{line.strip()}\n" for line in lines)
    return csv.reader(lines, delimiter=sep, skipinitialspace=sep == " ", strict=True)


def _found(lines: list[str], dialect: Dialect) -> tuple[str, str]:
    """The separator and the decimal sign by which most cells are numbers, in rows of one width."""
    some = [line for line in lines if line.strip()][:LINES]
    best, share = (dialect.sep or ",", dialect.decimal or "."), 0.0
    for sep, decimal in _PAIRS:
        sep, decimal = dialect.sep or sep, dialect.decimal or decimal
        if sep == decimal:
            continue
        try:
            rows = [row for row in _cells(some, sep) if row]
        except csv.Error:
            continue
        if len({len(row) for row in rows}) != 1 or (len(rows[0]) == 1 and dialect.sep is None):
            continue
        cells = [number(cell, decimal) for row in rows[1:] or rows for cell in row]
        if (found := sum(map(is_number, cells)) / len(cells)) > share:
            best, share = (sep, decimal), found
    return best


def number(cell: str, decimal: str) -> str:
    """A cell as Python writes numbers."""
    # Points that group thousands make no number.
    return cell.strip() if decimal == "." else cell.strip().replace(".", "'").replace(decimal, ".")


def is_number(cell: str) -> bool:
    """Whether a cell is a number, as Python prints them."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # which Python reads over: 2020_01_31 is a date, 12_3 an id


def looks_like_header(path: Path, rows: list[tuple[int, list[str]]], decimal: str) -> bool:
    """Whether the first of rows of numbers is a header, as of wavelengths: 400, 410, 420, ...

    Raises:
        ValueError: if one cannot tell.
    """
    values = [[float(number(x, decimal)) for x in rows[0][1]]]
    for _, row in rows[1:LINES]:
        if all(is_number(number(cell, decimal)) for cell in row):
            values.append([float(number(cell, decimal)) for cell in row])
    width = len(values[0])
    rising = [is_rising(row) for row in values]
    if width < _FEW or len(values) < 2 or not rising[0] or any(rising[1:]):
        return False  # too few to tell, or nothing sets the first line apart
    even = _is_even(values[0])
    if even and width >= _WIDE:
        return True
    if even or width >= _WIDE:
        raise doubt(path, rows[0], "only its numbers rise or fall throughout")
    return False


def doubt(path: Path, row: tuple[int, list[str]], why: str) -> ValueError:
    """The error for a first line that may be a header or not; the caller raises it."""
    return ValueError(
        f"{path}: wanted to know whether line {row[0]} is a header, since {why}, got "
        f"{listing(row[1])}; pass header=True or header=False (--header yes or --header no)"
    )


def is_rising(row: Sequence[float]) -> bool:
    """Whether numbers rise throughout, or fall."""
    steps = np.diff(row)
    return bool(np.isfinite(steps).all() and ((steps > 0).all() or (steps < 0).all()))


def _is_even(row: Sequence[float]) -> bool:
    steps = np.diff(row)
    return bool(np.abs(steps - steps.mean()).max() <= 1e-6 * np.abs(row).max())


def chosen(
    path: Path, names: list[str], columns: list[Any], client_column: str | None, dialect: Dialect
) -> tuple[list[str], list[Any]]:
    """The column of clients and those of features.

    Raises:
        ValueError: if a column is not there, or one that just counts rows would be a feature.
    """
    out = [*dialect.drop, *([] if dialect.id_column is None else [dialect.id_column])]
    for name in (*out, *(dialect.columns or ())):
        if name not in names:
            hint = closest(name, names)
            raise ValueError(f"{path}: has no column {name!r}{hint}; it has {listing(names, 20)}")
    wanted = [name for name in names if name not in out]
    if dialect.columns is not None:
        own = [] if client_column is None or client_column not in names else [client_column]
        wanted = [*own, *dialect.columns]
    # Names may be there twice, which is refused elsewhere.
    taken = dialect.columns is not None
    places = [names.index(x) for x in wanted] if taken else _places(names, out)
    for place in places:
        if not taken and names[place] != client_column and _counts(columns[place]):
            name = names[place]
            raise ValueError(
                f"{path}: column {name!r} counts the rows and is no feature; leave it out by "
                f"drop=[{name!r}] (--drop {name}), or choose the features by columns= (--columns)"
            )
    return [names[place] for place in places], [columns[place] for place in places]


def _places(names: list[str], out: Sequence[str]) -> list[int]:
    return [place for place, name in enumerate(names) if name not in out]


def _counts(column: Any) -> bool:
    """Whether a column counts 0, 1, 2, ... or 1, 2, 3, ... over three rows or more."""
    values = np.asarray(column[:3])
    if len(column) < 3 or not all(is_number(str(x)) for x in values):
        return False
    first = [float(x) for x in values]
    if first not in ([0, 1, 2], [1, 2, 3]):
        return False
    try:
        whole = np.asarray(column).astype(np.float64)
    except ValueError:
        return False
    return bool((whole == np.arange(len(whole)) + first[0]).all())
