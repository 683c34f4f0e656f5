"""Files with more clients than memory holds, opened one client at a time.

What these return is for `jaxfed.Clients.from_source`: a sequence whose members are one client's
samples each, read when they are asked for.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int

from jaxfed._checks import checked_path
from jaxfed._optional import require
from jaxfed.data._files import StrPath, existing, files_in
from jaxfed.data._tables import places_in

Table = Float[np.ndarray, "samples features"]


@final
class NpyFolder(Sequence[Table]):
    """The `.npy` files of a folder, one client each, in natural order of their names.

    Attributes:
        files: them.
    """

    def __init__(self, folder: StrPath):
        """List a folder.

        Args:
            folder: with a file `(samples, features)` for each client.

        Raises:
            FileNotFoundError: if there is no such folder.
            ValueError: if it is none, or holds no such file.
        """
        self.files = files_in(checked_path("folder", folder), (".npy",))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Any) -> Any:
        """One client's samples as a memory map, or some clients'."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        try:
            return np.load(self.files[place], mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{self.files[place]}: not an array of numbers ({error})") from error


@final
class ParquetGroups(Sequence[Table]):
    """The row groups of a `.parquet` file, one client each, features in columns.

    The index of a data frame is left out as by `read_table`.

    Attributes:
        counts: their numbers of rows, which are known without reading them.
        files: the file, for each of them.
    """

    def __init__(self, path: StrPath):
        """Look at a file's table of contents.

        Args:
            path: the file, all of whose columns are numbers of one type.

        Raises:
            FileNotFoundError: if there is no such file.
            ImportError: if pyarrow is not installed.
            ValueError: if it is no such file.
        """
        path = existing(checked_path("path", path))
        arrow = require("pyarrow", extra="data")
        parquet = require("pyarrow.parquet", extra="data")
        try:
            contents = parquet.ParquetFile(path)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a Parquet file ({error})") from error
        schema = contents.schema_arrow
        self._places = places_in(path, schema)
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
        self._contents = contents

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: Any) -> Any:
        """One client's samples, or some clients'."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        table = self._contents.read_row_group(range(len(self))[place], use_threads=False)
        return np.stack([table[place].to_numpy() for place in self._places], axis=1)
