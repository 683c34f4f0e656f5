"""Arrays whose dimensions and entries have names: those of xarray, which need not be installed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Texts = tuple[str, ...]


@runtime_checkable
class LabelledArray(Protocol):
    """An array of xarray, or what works as one."""

    @property
    def dims(self) -> Any:
        """The dimensions' names."""
        ...

    @property
    def coords(self) -> Any:
        """What belongs to entries along dimensions."""
        ...

    @property
    def indexes(self) -> Any:
        """The entries' names along a dimension, by its name."""
        ...

    def __getitem__(self, key: Any, /) -> Any: ...


def variables_of(arrays: Any) -> Any:
    """The variables of a dataset of xarray as a list; anything else as it is."""
    if isinstance(arrays, LabelledArray) and hasattr(arrays, "data_vars"):
        return list(arrays.data_vars.values())  # pyright: ignore[reportAttributeAccessIssue]
    return arrays


def labels_of(array: Any, axis: int, *, counted: bool = False) -> Texts | None:
    """The names of an array's entries along an axis; None where there are none.

    Those that only count are none, either, unless `counted`.

    If they have several levels, a name is that of all of them, as of the columns of a data frame.
    """
    index = array.indexes.get(array.dims[axis]) if array.dims else None
    if index is None:
        return None
    own = list(index)
    return None if own == list(range(len(own))) and not counted else tuple(map(str, own))


def labels_together(
    tables: Sequence[Any], labels: Callable[..., Texts | None]
) -> list[Texts | None]:
    """The labels of several tables, which belong together.

    Numbers that only count are names if those of another table do not: where one table has the
    numbers 0, 1, 2 and another 2, 0, 1, they tell what belongs together.

    Args:
        tables: the tables.
        labels: the labels of one table, also of one that only counts if `counted`.
    """
    found = [labels(table) for table in tables]
    whole = [labels(table, counted=True) for table in tables]
    numbers = all(own is not None and all(map(str.isdigit, own)) for own in whole)
    return whole if numbers and any(found) else found


def names_of_arrays(arrays: Sequence[Any]) -> Texts | None:
    """The arrays' own names; None unless all have one and they differ."""
    names = [x.name if isinstance(x, LabelledArray) else None for x in arrays]  # pyright: ignore[reportAttributeAccessIssue]
    known = all(isinstance(name, str) and name for name in names)
    return tuple(map(str, names)) if known and len(set(names)) == len(names) else None


def check_dimension(arrays: Mapping[str, Any], axis: int, usual: str) -> None:
    """Refuse arrays which have the dimension of the first, or the usual one, at another place.

    Args:
        arrays: by the caller's name for them; only those of xarray are looked at.
        axis: where the dimension is wanted, 0 or -1.
        usual: its usual name.

    Raises:
        ValueError: names the array and its dimensions.
    """
    labelled = {x: own for x, own in arrays.items() if isinstance(own, LabelledArray) and own.dims}
    first = [own.dims[axis] for own in labelled.values()][:1]
    for argument, own in labelled.items():
        for dim in (usual, *first):
            if dim in own.dims and own.dims[axis] != dim:
                raise ValueError(
                    f"{argument}: wanted {dim} as the {'last' if axis else 'first'} dimension, got "
                    f"{', '.join(map(str, own.dims))}; transpose the array"
                )
