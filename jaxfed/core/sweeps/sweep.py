"""Many runs in one compiled call, over algorithms, data sets and seeds."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import Partial
from jaxtyping import Array, Key, PyTree

from jaxfed._checks import check_count, check_list, check_options, is_list, is_whole, refuse
from jaxfed.core.backends.backend import Backend
from jaxfed.core.backends.one_device import chunked
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like, replace_names, without_names
from jaxfed.core.clients.units import warn_of_units
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.arguments import check_passed_on, check_rounds
from jaxfed.core.run.new_clients import in_order_of
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire import channel
from jaxfed.core.wire.wire import checked_wire

HYPERPARAMETERS = "hyperparameters"


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Stack algorithms, clients or solutions of one structure along a new leading axis.

    Names of clients and features stay if they are the same in all.

    Raises:
        ValueError: if there are none, or their structures, static fields or shapes differ.
    """
    return _stacked("trees", trees)


def _stacked(argument: str, trees: Sequence[PyTree]) -> PyTree:
    check_list(argument, trees, "algorithms, clients or solutions")
    if len({jax.tree.structure(tree) for tree in trees}) > 1:
        trees = [without_names(tree) for tree in trees]  # those of several data sets differ
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1:
        raise ValueError(
            f"{argument}: wanted equal ranks and other static fields, got "
            f"{sorted(map(str, structures))}"
        )
    shapes = {tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree)) for tree in trees}
    if len(shapes) > 1:
        raise ValueError(f"{argument}: wanted arrays of equal shapes, got {sorted(shapes)}")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def sweep(
    algorithms: Algorithm | Sequence[Algorithm],
    clients: Clients | Sequence[Clients],
    *,
    keys: Key[Array, "*seeds"],
    rounds: int,
    in_axes: PyTree = HYPERPARAMETERS,
    runs_at_once: int | None = None,
    **arguments: Any,
) -> Solution:
    """Run every combination of algorithms, data sets and seeds in one compiled call.

    Runs with the same key draw the same random numbers, which makes them comparable but not
    private: the difference of two messages with the same Gaussian noise contains no noise. Sweep
    over noise in simulations only. Masks are refused if a key would serve twice; they change
    results only by rounding, so compare without them.

    Args:
        algorithms: one algorithm, a list of algorithms that differ only in floats, or one with an
            axis of algorithms (`jax.vmap(lambda s: PerPCA(2, 3, local_penalty=s))(penalties)`).
        clients: one data set, a list of data sets of equal shapes, or one with a leading axis.
        keys: one random key, or several along a leading axis.
        rounds: rounds of each run.
        in_axes: which arrays of one algorithm have an axis of algorithms, and where, as in
            `equinox.filter_vmap`: an integer, None, a function from an array to one of these, or a
            pytree of them with the algorithm's structure or a prefix of it. By default, the
            hyperparameters that are not scalars have one in front, and other arrays, such as those
            of a model to train, have none. A hyperparameter is a field that the algorithm's class
            declares as a scalar, `step_size: Float[Array, ""]`.
        runs_at_once: number of runs at once; all by default. Fewer need less memory.
        **arguments: passed on to `rollout`.

    Returns:
        One solution whose leaves have a leading axis for each of algorithms, data sets and seeds of
        which there are several, in this order.

    Raises:
        ValueError: if algorithms, data sets or keys do not fit together, other arrays than
            hyperparameters might have an axis of algorithms too and `in_axes` does not say so,
            masks would use a key twice, or as in `rollout`.
    """
    algorithm = _one("algorithms", algorithms, Algorithm)
    earlier = arguments.get("warm_start")
    given = [like(each, earlier) for each in (clients if is_list(clients) else [clients])]
    data = _one("clients", given if is_list(clients) else given[0], Clients)
    for each in given:
        if isinstance(each, Clients) and jnp.ndim(each.ids) == 1:  # one data set
            warn_of_units(algorithm, each)
    random = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not random or keys.ndim > 1 or keys.size == 0:
        raise refuse("keys", "one or several of jax.random.key", keys)
    check_rounds(rounds)
    check_options(arguments, rollout, without=("algorithm", "clients", "rounds", "key"))
    check_passed_on(arguments)
    if runs_at_once is not None:
        check_count("runs_at_once", runs_at_once)
    data.check_ids()
    # Each run traces its clients' ids, and matches them by position.
    for ids in [data.ids] if data.ids.ndim == 1 or isinstance(data.ids, Tracer) else data.ids:
        earlier = in_order_of(ids, earlier)
    if isinstance(algorithms, Algorithm):
        axes, length = _axes(algorithm, in_axes)
    elif _is_default(in_axes):
        axes, length = (0,) * len(jax.tree.leaves(algorithm)), len(algorithms)
    else:
        raise refuse("in_axes", "nothing beside a list, whose algorithms get one", in_axes)
    sizes = (
        length,
        len(data.ids) if data.ids.ndim == 2 else None,
        len(keys) if keys.ndim else None,
    )
    _check_masks(arguments, sizes[:2] != (None, None), keys)
    arguments = without_names(arguments | {"warm_start": earlier})
    parts = algorithm, without_names(data), keys
    found = _swept(parts, axes, sizes, rounds, runs_at_once, arguments)
    return replace_names(found, data.names)


def _check_masks(arguments: dict[str, Any], shared: bool, keys: Key[Array, "*seeds"]) -> None:
    """Refuse one-time channels if several runs share a key, as far as keys are known."""
    wire = checked_wire(arguments.get("channel", channel.lossless()))
    if not any(way.one_time for way in wire.channels):
        return
    if not isinstance(keys, Tracer):
        # Equal keys in the list would serve several runs too.
        known = np.asarray(jax.random.key_data(keys)).reshape(keys.size, -1)
        shared = shared or len(np.unique(known, axis=0)) < keys.size
    if shared:
        raise ValueError(
            "keys: wanted one for each run under masks, which two runs with one key undo, got some "
            "that serve several; sweep without masks, or run one by one"
        )


def _one(name: str, given: Any, kind: type) -> Any:
    """One object of this kind, or a list of them stacked."""
    if isinstance(given, kind):
        return given
    if not is_list(given) or not given or not all(isinstance(each, kind) for each in given):
        raise refuse(name, f"one or a list of {kind.__name__}", given)
    return _stacked(name, given)


def _axes(algorithm: Algorithm, in_axes: PyTree) -> tuple[tuple[int | None, ...], int | None]:
    """The axis of algorithms of each leaf, and the number of algorithms, or None for one."""
    leaves = jax.tree.leaves(algorithm)
    axes = _declared(algorithm) if _is_default(in_axes) else _told(algorithm, in_axes)
    found = {leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None}
    if len(found) > 1:
        wanted = "arrays of one length along the axis of algorithms"
        raise refuse("algorithms", wanted, f"lengths {sorted(found)}")
    return axes, found.pop() if found else None


def _is_default(in_axes: PyTree) -> bool:
    return isinstance(in_axes, str) and in_axes == HYPERPARAMETERS


def _declared(algorithm: Algorithm) -> tuple[int | None, ...]:
    """The first axis of hyperparameters that have one, unless other arrays leave a doubt."""
    leaves = list(declared_scalars(algorithm))
    axes = tuple(0 if scalar and jnp.ndim(leaf) else None for leaf, scalar in leaves)
    lengths = {len(leaf) for (leaf, _), axis in zip(leaves, axes, strict=True) if axis == 0}
    others = [(jnp.shape(leaf), scalar) for leaf, scalar in leaves if not scalar]
    swept_too = others and all(shape and shape[0] in lengths for shape, _ in others)
    if swept_too or any(shape and scalar is None for shape, scalar in others):
        raise ValueError(
            f"in_axes: wanted which arrays of {type(algorithm).__name__} have an axis of "
            "algorithms, such as 0 if all have it in front, got nothing, and shapes do not tell; a "
            "list of algorithms needs no `in_axes`"
        )
    return axes


def declared_scalars(algorithm: Algorithm) -> Iterator[tuple[Any, bool | None]]:
    """Each leaf, in order, and whether its field is declared as a scalar; None if it says neither.

    Only scalar fields can be told from one algorithm to many by their shapes.
    """
    try:
        kinds = get_type_hints(type(algorithm))
    except NameError:  # a name that only a type checker imports
        kinds = {}
    for field in dataclasses.fields(algorithm):
        if field.metadata.get("static", False):
            continue
        value, scalar = getattr(algorithm, field.name), _is_scalar(kinds.get(field.name, Array))
        for part in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Algorithm)):
            if isinstance(part, Algorithm):
                yield from declared_scalars(part)
            else:
                yield part, scalar


def _is_scalar(kind: Any) -> bool | None:
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    if any(each is Array for each in kinds):
        return None
    return all(each is float or getattr(each, "dims", None) == () for each in kinds)


def _told(algorithm: Algorithm, in_axes: PyTree) -> tuple[int | None, ...]:
    """The axes that the caller named."""

    def of_part(axis: Any, part: PyTree) -> list:
        return [axis(leaf) if callable(axis) else axis for leaf in jax.tree.leaves(part)]

    def is_axis(tree: Any) -> bool:
        return tree is None or (callable(tree) and not isinstance(tree, eqx.Module))

    try:
        parts = jax.tree.map(of_part, in_axes, algorithm, is_leaf=is_axis)
    except ValueError as error:
        raise refuse(
            "in_axes", "axes in the algorithm's structure or a prefix of it", in_axes
        ) from error
    axes = tuple(jax.tree.leaves(parts, is_leaf=lambda x: x is None))
    for leaf, axis in zip(jax.tree.leaves(algorithm), axes, strict=True):
        if axis is not None and not (is_whole(axis) and -jnp.ndim(leaf) <= axis < jnp.ndim(leaf)):
            raise refuse("in_axes", f"None or an axis of an array of shape {jnp.shape(leaf)}", axis)
    return axes


@eqx.filter_jit
def _swept(parts, axes, sizes, rounds, runs_at_once, arguments):
    lengths = [size for size in sizes if size is not None]

    def run(parts, number):
        # The run's position on each axis; the last axis varies fastest.
        places = iter(jnp.unravel_index(number, lengths) if lengths else ())
        algorithm, data, key = parts
        many_algorithms, many_data, many_keys = (size is not None for size in sizes)
        if many_algorithms:
            algorithm = _picked(algorithm, axes, next(places))
        if many_data:
            place = next(places)
            data = jax.tree.map(lambda leaf: leaf[place], data)
        key = key[next(places)] if many_keys else key
        return rollout(algorithm, data, rounds=rounds, key=key, **arguments)

    if not lengths:
        return run(parts, 0)
    total = math.prod(lengths)
    runs = mapped(Partial(run, parts), jnp.arange(total), chunked(runs_at_once or total))
    return jax.tree.map(lambda leaf: leaf.reshape(*lengths, *leaf.shape[1:]), runs)


def _picked(tree: PyTree, axes: Sequence[int | None], place: Array) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    picked = [
        leaf if axis is None else jax.lax.dynamic_index_in_dim(leaf, place, axis, keepdims=False)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, picked)


def mapped(function: Callable[[PyTree], PyTree], points: PyTree, backend: Backend) -> PyTree:
    """Map a function over the leading axis of `points`; results have that axis too.

    Arrays within the function (of a `Partial`, say) are passed to every device.
    """
    arrays, others = eqx.partition(function, eqx.is_array)

    def one(arrays, point):
        return eqx.combine(arrays, others)(point)

    return backend.map(one, arrays, points)
