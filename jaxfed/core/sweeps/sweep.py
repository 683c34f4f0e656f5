"""Many runs in one compiled call, over algorithms, data sets and seeds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import Partial
from jaxtyping import Array, Key, PyTree

from jaxfed._checks import check_count, check_list, is_list, refuse
from jaxfed.core.backends.backend import Backend
from jaxfed.core.backends.one_device import chunked
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.arguments import check_passed_on, check_rounds
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire import channel
from jaxfed.core.wire.wire import checked_wire


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Stack algorithms, clients or solutions of one structure along a new leading axis.

    Raises:
        ValueError: if there are none, or their structures, static fields or shapes differ.
    """
    check_list("trees", trees, "algorithms, clients or solutions")
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1:
        raise ValueError(
            f"stack: ranks and other static fields must agree, got {sorted(map(str, structures))}"
        )
    shapes = {tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree)) for tree in trees}
    if len(shapes) > 1:
        raise ValueError(f"stack: shapes must agree, got {sorted(shapes)}")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def sweep(
    algorithms: Algorithm | Sequence[Algorithm],
    clients: Clients | Sequence[Clients],
    *,
    keys: Key[Array, "*seeds"],
    rounds: int,
    chunk_size: int | None = None,
    **arguments: Any,
) -> Solution:
    """Run every combination of algorithms, data sets and seeds in one compiled call.

    Runs with the same key draw the same random numbers, which makes them comparable but not
    private: the difference of two messages with the same Gaussian noise contains no noise. Sweep
    over noise in simulations only. Masks are refused if a key would serve twice; they change
    results only by rounding, so compare without them.

    Args:
        algorithms: one algorithm, a list of algorithms that differ only in floats, or one whose
            floats have a leading axis (`jax.vmap(lambda s: PerPCA(2, 3, step_size=s))(steps)`).
        clients: one data set, a list of data sets of equal shapes, or one with a leading axis.
        keys: one random key, or several along a leading axis.
        rounds: rounds of each run.
        chunk_size: number of runs at once; all by default. Fewer need less memory.
        **arguments: passed on to `rollout`.

    Returns:
        One solution whose leaves have a leading axis for each of algorithms, data sets and seeds of
        which there are several, in this order.

    Raises:
        ValueError: if algorithms, data sets or keys do not fit together, masks would use a key
            twice, or as in `rollout`.
    """
    algorithm = _one("algorithms", algorithms, Algorithm)
    data = _one("clients", clients, Clients)
    random = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not random or keys.ndim > 1 or keys.size == 0:
        raise refuse("keys", "one or several of jax.random.key", keys)
    check_rounds(rounds)
    check_passed_on(arguments)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)
    data.check_ids()
    several = (_several(algorithm), data.ids.ndim == 2, keys.ndim == 1)
    _check_masks(arguments, several[0] or several[1], keys)
    return _swept((algorithm, data, keys), several, rounds, chunk_size, arguments)


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
    return stack(given)


@eqx.filter_jit
def _swept(parts, several, rounds, chunk_size, arguments):
    sizes = [_length(part) for part, many in zip(parts, several, strict=True) if many]

    def run(parts, number):
        # The run's position on each axis; the last axis varies fastest.
        places = list(jnp.unravel_index(number, sizes)) if sizes else []
        algorithm, data, key = (
            _picked(part, places.pop(0)) if many else part
            for part, many in zip(parts, several, strict=True)
        )
        return rollout(algorithm, data, rounds=rounds, key=key, **arguments)

    if not sizes:
        return run(parts, 0)
    total = math.prod(sizes)
    runs = mapped(Partial(run, parts), jnp.arange(total), chunked(chunk_size or total))
    return jax.tree.map(lambda leaf: leaf.reshape(*sizes, *leaf.shape[1:]), runs)


def _picked(tree: PyTree, place: Array) -> PyTree:
    # Floats without an axis are common to all algorithms.
    return jax.tree.map(lambda leaf: leaf[place] if jnp.ndim(leaf) else leaf, tree)


def _several(algorithm: Algorithm) -> bool:
    return any(jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(algorithm))


def _length(tree: PyTree) -> int:
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf) > 0}
    if len(lengths) != 1:
        raise ValueError(f"algorithms: their floats need one common leading axis, got {lengths}")
    return lengths.pop()


def mapped(function: Callable[[PyTree], PyTree], points: PyTree, backend: Backend) -> PyTree:
    """Map a function over the leading axis of `points`; results have that axis too.

    Arrays within the function (of a `Partial`, say) are passed to every device.
    """
    arrays, others = eqx.partition(function, eqx.is_array)

    def one(arrays, point):
        return eqx.combine(arrays, others)(point)

    return backend.map(one, arrays, points)
