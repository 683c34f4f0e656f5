"""Sequences for `jaxfed.Clients.from_source` that read one client at a time from files.

Use them for more clients than fit in memory: each member is one client's samples, read on access.
"""

import json
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int

from jaxfed._checks import checked_path
from jaxfed._optional import require
from jaxfed.data._files import StrPath, existing, files_in, reading, stems
from jaxfed.data._tables import places_in

Table = Float[np.ndarray, "samples features"]


@final
class NpyFolder(Sequence[Table]):
    """The `.npy` files of a folder, one client each, in natural order of their names.

    Attributes:
        files: the paths.
        names: the clients' names, as `read_folder` gives them.
    """

    def __init__(self, folder: StrPath):
        """List the files.

        Args:
            folder: holds a file `(samples, features)` for each client.

        Raises:
            FileNotFoundError: if the folder does not exist.
            ValueError: if it is a file, or holds no `.npy` file.
        """
        self.files = files_in(checked_path("folder", folder), (".npy",))
        self.names = stems(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Any) -> Any:
        """One client's samples as a memory map, or a list of them for a slice."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        with reading(self.files[place], "not an array of numbers"):
            return np.load(self.files[place], mmap_mode="r", allow_pickle=False)


CLIENTS = b"jaxfed.clients"  # in the metadata of a Parquet file: a JSON list of texts


def _client_names(metadata: Any, clients: int) -> list[str] | None:
    if CLIENTS not in (metadata or {}):
        return None
    names = json.loads(metadata[CLIENTS])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("wanted a list of texts")
    # A file that another program has split or joined has other clients.
    return names if len(names) == clients else None


@final
class ParquetGroups(Sequence[Table]):
    """The row groups of a `.parquet` file, one client each, features in columns.

    The index of a data frame is dropped as in `read_table`.

    Attributes:
        counts: number of rows of each group, known without reading it.
        files: the path, repeated for each group.
        features: the columns' names.
        names: the clients' names, of a file that `group_parquet` wrote; None of others.
    """

    def __init__(self, path: StrPath):
        """Read a file's metadata.

        Args:
            path: the file; all of its columns must be float or all double.

        Raises:
            FileNotFoundError: if the file does not exist.
            ImportError: if pyarrow is not installed.
            ValueError: if it is not a Parquet file, or a column has another type.
        """
        path = existing(checked_path("path", path))
        parquet = require("pyarrow.parquet", extra="parquet")
        with reading(path, "not a Parquet file"):
            contents = parquet.ParquetFile(path)
        schema = contents.schema_arrow
        self._places = places_in(path, schema)
        self.features = [schema.names[place] for place in self._places]
        types = {str(schema.types[place]) for place in self._places}
        if len(types) != 1 or not types <= {"float", "double"}:
            raise ValueError(
                f"{path}: wanted columns of float or of double alone, got "
                f"{', '.join(sorted(types)) or 'none'}"
            )
        groups = range(contents.num_row_groups)
        self.counts: Int[np.ndarray, " clients"] = np.asarray(
            [contents.metadata.row_group(i).num_rows for i in groups], int
        )
        self.files = [path] * len(self.counts)
        with reading(path, "damaged names of clients"):
            self.names = _client_names(schema.metadata, len(self.counts))
        self._contents = contents

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: Any) -> Any:
        """One client's samples, or a list of them for a slice."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        table = self._contents.read_row_group(range(len(self))[place], use_threads=False)
        return np.stack([table[place].to_numpy() for place in self._places], axis=1)
