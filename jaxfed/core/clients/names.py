"""Names of clients, features and entities, which stay on the host beside the arrays.

They are static: a program that took them would be compiled again for other names. So functions that
compile take clients `without_names`, and put the names on what they return.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxfed._checks import is_list, refuse
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.labelled import (
    LabelledArray,
    Texts,
    check_dimension,
    labels_of,
    labels_together,
    names_of_arrays,
    variables_of,
)
from jaxfed.core.clients.samples import SampleRows
from jaxfed.linalg import Moment

T = TypeVar("T")


@runtime_checkable
class DataFrame(Protocol):
    """A data frame of pandas, or what works as one."""

    @property
    def columns(self) -> Any:
        """The columns' names."""
        ...

    @property
    def dtypes(self) -> Any:
        """The columns' types."""
        ...


class Names(NamedTuple):
    """Names by which people know clients and features; None where there are none.

    Attributes:
        clients: of the clients, in their order.
        features: of the features; of views, those of each view.
        entities: of the entities of views, in the order of their rows.
    """

    clients: Texts | None = None
    features: tuple[Any, ...] | None = None
    entities: Texts | None = None

    @property
    def of_views(self) -> bool:
        """Whether each client has its own features."""
        return bool(self.features) and not isinstance(self.features[0], str)

    @classmethod
    def of_lists(cls, *names: Any) -> "Names":
        """Names that JSON turned into lists."""

        def fixed(given: Any) -> Any:
            return given if given is None or isinstance(given, str) else tuple(map(fixed, given))

        return cls(*map(fixed, names))

    def take(self, places: Any) -> "Names":
        """The names of the clients at these positions; unknown if the positions are traced."""
        if is_traced(places):
            return self._replace(clients=None, features=None if self.of_views else self.features)

        def chosen(names: Any) -> Any:
            return None if names is None else tuple(names[int(place)] for place in places)

        features = chosen(self.features) if self.of_views else self.features
        return self._replace(clients=chosen(self.clients), features=features)

    def with_others(self, newer: "Names", known: np.ndarray, places: np.ndarray) -> "Names":
        """The names of all clients of two sets, of one set's features.

        Args:
            newer: names of the second set.
            known: each client's position in the first set, -1 if it is not there.
            places: each client's position in the second set, -1 if it is not there.
        """
        clients = None
        if self.clients is not None and newer.clients is not None:
            clients = tuple(
                self.clients[i] if i >= 0 else newer.clients[j]
                for i, j in zip(known.tolist(), places.tolist(), strict=True)
            )
        features = newer.features if self.features is None else self.features
        return self._replace(clients=clients, features=features)


NAMELESS = Names()


def texts_of(names: Names) -> Iterator[Any]:
    """All names, of clients and of whatever else has some."""
    for part in names:
        for each in part or ():
            yield from (each,) if isinstance(each, str) else each


def checked_names(argument: str, given: Any, number: int, owner: str) -> Texts | None:
    """Distinct names as texts; None if none are given.

    Args:
        argument: its name.
        given: a list of texts; or an array or an index of a data frame, also of numbers.
        number: how many are wanted.
        owner: what each belongs to, such as a client.

    Raises:
        ValueError: if there are more or fewer, two are equal, or one cannot be printed.
    """
    if given is None:
        return None
    wanted = f"{number} distinct texts that can be printed, one per {owner}"
    listed = listed_texts(given)
    kinds = str if listed is given else str | int | float
    if not is_list(listed) or not all(isinstance(name, kinds) for name in listed):
        raise refuse(argument, wanted, given)
    names = tuple(map(str, listed))
    if len(names) != number:
        raise ValueError(f"{argument}: wanted {wanted}, got {len(names)}: {listing(names)}")
    seen: set[str] = set()
    for name in names:
        if name in seen or not name.isprintable():
            raise refuse(argument, wanted, f"{name}{' twice' if name in seen else ''}")
        seen.add(name)
    return names


def listed_texts(given: Any) -> Any:
    """The members of an array or an index of a data frame; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def listing(names: Sequence[str], limit: int = 6) -> str:
    """The first few names in one line."""
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def order_of(wanted: Sequence[str], got: Sequence[str], argument: str = "features") -> np.ndarray:
    """The positions of the wanted names among others.

    Raises:
        ValueError: if some are missing, or there are others.
    """
    places = {name: place for place, name in enumerate(got)}
    missing = [name for name in wanted if name not in places]
    known = set(wanted)
    more = [name for name in got if name not in known]
    if missing or more or len(places) != len(got):
        parts = [f"without {listing(missing)}"] * bool(missing)
        parts += [f"with {listing(more)} besides"] * bool(more)
        raise ValueError(
            f"{argument}: wanted {listing(wanted)}, got {listing(got)} "
            f"({', '.join(parts) or 'some twice'})"
        )
    return np.asarray([places[name] for name in wanted], int)


def check_same_names(argument: str, wanted: Any, got: Any) -> None:
    """Check that two lists of names, where both are known, are one.

    Raises:
        ValueError: if names are missing, there are others, or their order is another.
    """
    if wanted is not None and got is not None and wanted != got:
        order_of(wanted, got, argument)
        raise ValueError(f"{argument}: wanted the order {listing(wanted)}, got {listing(got)}")


def columns_of(table: Any, *, counted: bool = False) -> Texts | None:
    """The names of the columns of a data frame or of an array of xarray, its last dimension.

    None of other tables, and where they only count, unless `counted`.
    """
    if isinstance(table, LabelledArray):
        return labels_of(table, -1, counted=counted)
    if not isinstance(table, DataFrame):
        return None
    columns = list(table.columns)
    only = columns == list(range(len(columns))) and not counted
    return None if only else tuple(map(str, columns))


def in_columns(table: Any, features: Any, argument: str = "features") -> Any:
    """A table with its columns in the order of features; one without names as it is.

    Raises:
        ValueError: if the columns are others.
    """
    columns = columns_of(table, counted=True)
    if columns is None:
        return table
    numbers = tuple(map(str, range(len(columns))))
    # Numbers that only count are names where others are the same in another order.
    if features is None and set(columns) == set(numbers):
        features = numbers
    if features is None or columns == tuple(features):
        return table
    if columns == numbers and set(features) != set(numbers):
        return table
    order = order_of(features, columns, argument)
    return table[..., order] if isinstance(table, LabelledArray) else table.iloc[:, order]


def named_tables(arrays: Any, names: Any, features: Any) -> tuple[Any, Any, Any]:
    """Tables with the names that they bring, unless others are given.

    Args:
        arrays: arrays, data frames, arrays or a dataset of xarray, or what a reader of
            `jaxfed.data` returned.
        names: of the clients, or None.
        features: of the features, or None.

    Returns:
        The tables, with their columns in the order of the features, and both names.

    Raises:
        ValueError: if tables have other columns, or dimensions in another order.
    """
    if isinstance(arrays, tuple) and hasattr(arrays, "samples"):
        read: Any = arrays
        names = read.names if names is None else names
        features = read.features if features is None else features
        arrays = read.samples
    arrays = variables_of(arrays)
    of_all = isinstance(arrays, LabelledArray)  # one array of all clients' samples
    if not of_all and (not is_list(arrays) or not len(arrays)):
        return arrays, names, features
    tables = {"arrays": arrays} if of_all else {f"arrays[{i}]": x for i, x in enumerate(arrays)}
    if of_all:
        check_dimension(tables, 0, "client")
    check_dimension(tables, -1, "feature")
    if names is None:
        names = labels_of(arrays, 0) if of_all else names_of_arrays(arrays)
    columns = labels_together(list(tables.values()), columns_of)
    if None not in columns:
        features = columns[0] if features is None else tuple(map(str, features))
        tables = {x: in_columns(own, features, f"{x}, columns") for x, own in tables.items()}
    return np.asarray(tables["arrays"]) if of_all else list(tables.values()), names, features


def together(names: Sequence[Names], argument: str) -> Names:
    """The names of the clients of all processes, in their order.

    Raises:
        ValueError: if the processes' features or entities differ, or a client is in several.
    """
    first = names[0]
    for place, own in enumerate(names):
        pairs: list[tuple[str, Any, Any]] = [("entities", first.entities, own.entities)]
        if not (first.of_views or own.of_views):
            pairs.append(("features", first.features, own.features))
        for kind, wanted, got in pairs:
            check_same_names(f"{argument}: {kind} of process {place}", wanted, got)

    def joined(parts: list[Any]) -> Any:
        return None if None in parts else tuple(name for part in parts for name in part)

    clients = joined([own.clients for own in names])
    if clients is not None:
        checked_names(argument, clients, len(clients), "client")
    features = first.features
    if first.of_views:
        features = joined([own.features for own in names])
    return Names(clients, features, first.entities)


def views_in_order(arrays: Any, entities: Any, aligned: Any) -> tuple[Any, Any]:
    """Views with their entities in the order of the first, and the entities' names.

    Args:
        arrays: of the views; a dataset of xarray has a view for each variable.
        entities: the entities' names, or None for those along the first dimension of all views, if
            they are arrays of xarray.
        aligned: the alignment of the views' ids, which orders them, or None.

    Raises:
        ValueError: if views have other entities, or those of the alignment in another order.
    """
    arrays = variables_of(arrays)
    if not is_list(arrays) or not len(arrays):
        return arrays, entities
    tables = {f"arrays[{j}]": x for j, x in enumerate(arrays)}
    check_dimension(tables, 0, "entity")
    known: list[Any] = labels_together(arrays, _rows_of)
    if aligned is not None:
        # What is no alignment is refused elsewhere, like one of other views.
        places = getattr(aligned, "places", ())
        for at, own, got in zip(tables, places, known, strict=False):
            check_same_names(f"{at}, rows", tuple(map(str, aligned.ids[own].tolist())), got)
    elif None not in known:
        try:
            orders = [
                order_of(known[0], own, f"{at}, rows")
                for at, own in zip(tables, known, strict=True)
            ]
        except ValueError as error:
            hint = "jaxfed.gcca.align matches views of which some lack entities"
            raise ValueError(f"{error}; {hint}") from error
        arrays = [x[order] for x, order in zip(arrays, orders, strict=True)]
        entities = known[0] if entities is None else entities
    return arrays, entities


def _rows_of(table: Any, *, counted: bool = False) -> Texts | None:
    return labels_of(table, 0, counted=counted) if isinstance(table, LabelledArray) else None


def names_of_views(
    tables: Sequence[Any], names: Any, features: Any, entities: Any, rows: int
) -> Names:
    """The checked names of views, of which tables with names bring those of their columns.

    Args:
        tables: of the views.
        names: of the views, or None.
        features: of each view's features, or None.
        entities: of the entities, or None.
        rows: number of entities.

    Raises:
        ValueError: if they do not fit the tables.
    """
    if features is None and None not in (columns := [columns_of(table) for table in tables]):
        features = columns
    if features is not None:
        if not is_list(features) or len(features) != len(tables):
            raise refuse("features", f"{len(tables)} lists of texts, one per view", features)
        features = tuple(
            checked_names(f"features[{j}]", own, np.shape(table)[1], "feature")
            for j, (own, table) in enumerate(zip(features, tables, strict=True))
        )
    names = names_of_arrays(tables) if names is None else names
    clients = checked_names("names", names, len(tables), "view")
    return Names(clients, features, checked_names("entities", entities, rows, "entity"))


def _is_named(x: Any) -> bool:
    return isinstance(x, eqx.Module) and isinstance(getattr(x, "names", None), Names)


def without_names(tree: T) -> T:
    """The same tree, whose clients, solutions and models are nameless, to compile or stack it."""

    def bare(x: Any) -> Any:
        if not _is_named(x):
            return x
        inside = jax.tree.map(bare, x, is_leaf=lambda y: y is not x and _is_named(y))
        return replace_names(inside, NAMELESS)

    return jax.tree.map(bare, tree, is_leaf=_is_named)


def with_names(tree: T, names: Names) -> T:
    """The same tree, whose models, where they keep names, have those of the clients behind them."""

    def named(x: Any) -> Any:
        return replace_names(x, names) if _is_named(x) else x

    return jax.tree.map(named, tree, is_leaf=_is_named)


def replace_names(named: T, names: Names) -> T:
    """Clients, a solution or a model with other names; the same object if they are its own."""
    if named.names == names:  # pyright: ignore[reportAttributeAccessIssue]
        return named
    # Not by the constructor, which refuses clients that were taken twice.
    found = object.__new__(type(named))
    for name, value in (vars(named) | {"names": names}).items():
        object.__setattr__(found, name, value)
    return found


def learned_by(fitted: Any) -> Any:
    """What an estimator learned; anything else as it is."""
    return getattr(fitted, "saved_", fitted)


def like(clients: Any, earlier: Any) -> Any:
    """These clients with the features in the order of an earlier run's, and its clients' ids.

    Clients are known by their names: those of the earlier run get its ids, by which runs match
    them. Without names on both sides, nothing changes. Traced ids, and those of several data sets,
    stay: such clients are matched by position.

    Args:
        clients: clients; anything else stays as it is.
        earlier: clients, a solution, a saved one or an estimator; nothing else has names.

    Raises:
        ValueError: if the features are others, or clients whose local models are matched by
            position have other names.
    """
    earlier = learned_by(earlier)
    names = getattr(earlier, "names", None)
    if not isinstance(names, Names) or not isinstance(getattr(clients, "names", None), Names):
        return clients  # what is no clients is refused elsewhere
    _check_views(names, clients.names)
    clients = in_order(clients, names)
    known = getattr(earlier, "ids", None)
    if names.clients is None or clients.names.clients is None or known is None:
        return clients
    if any(is_traced(ids) or ids.ndim > 1 for ids in (known, clients.ids)):
        # Of a run without local models, nothing is matched.
        has_local = not hasattr(earlier, "result") or jax.tree.leaves(earlier.result.local)
        if has_local and names.clients != clients.names.clients:
            wanted = f"{listing(names.clients)} in this order, where ids are traced or stacked"
            raise refuse("clients", wanted, listing(clients.names.clients))
        return clients
    if len(known) != len(names.clients) or len(clients) != len(clients.ids):
        return clients  # padded, over several processes
    own = np.asarray(clients.ids)
    place = dict(zip(names.clients, np.asarray(known).tolist(), strict=True))
    taken, free, ids = set(place.values()), max(*place.values(), *own.tolist()) + 1, []
    for name, number in zip(clients.names.clients, own.tolist(), strict=True):
        if name in place:
            number = place[name]
        elif number in taken:
            number, free = free, free + 1
        taken.add(number)
        ids.append(number)
    if ids == own.tolist():
        return clients
    with jax.ensure_compile_time_eval():  # within `jit`, ids would be traced, and match nothing
        found = jnp.asarray(np.asarray(ids, own.dtype))
    return eqx.tree_at(lambda c: c.ids, clients, found)


def _check_views(known: Names, names: Names) -> None:
    """Refuse views whose entities, or features of one view, are others or in another order."""
    pairs: list[tuple[str, Any, Any]] = [("entities", known.entities, names.entities)]
    if known.of_views and names.of_views and known.clients and names.clients:
        features = dict(zip(known.clients, known.features or (), strict=True))
        pairs += [
            (f"features of {name}", features.get(name), own)
            for name, own in zip(names.clients, names.features or (), strict=True)
        ]
    for argument, wanted, got in pairs:
        check_same_names(argument, wanted, got)


def in_order(clients: Any, names: Names) -> Any:
    """Clients with their features in the order of these names, where both are known.

    Raises:
        ValueError: if the features are others.
    """
    if names.features is None or clients.names.features is None:
        return clients
    if names.features == clients.names.features:
        return clients
    if names.of_views or clients.names.of_views:
        return clients  # `_check_views` has compared them
    order = order_of(names.features, clients.names.features)
    part = clients.parts[0]
    if isinstance(part, Moment):
        data = clients.layout.over_parts(lambda part: _moment_in_order(part, order))
    elif isinstance(part, SampleRows):
        data = clients.layout.mapped(lambda values, _: values[..., order])
    else:
        raise refuse("clients", "samples or moments, whose features can be put in order", clients)
    moved = eqx.tree_at(lambda c: c.data, clients, data)
    return replace_names(moved, clients.names._replace(features=names.features))


def _moment_in_order(moment: Moment, order: np.ndarray) -> Moment:
    if moment.dense is None:
        return eqx.tree_at(lambda x: x.samples, moment, moment.samples[..., order])  # pyright: ignore[reportOptionalSubscript]
    return eqx.tree_at(lambda x: x.dense, moment, moment.dense[..., order, :][..., order])
