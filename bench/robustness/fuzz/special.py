"""Predicates for parameters that neither annotations nor names describe.

The sizes are those in `given.py`: 3 clients with 4 samples of 5 features, and rank 2.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse

import jaxfed as jf
from jaxfed.core.wire.compressor import Compressor

from .kinds import (
    LARGEST,
    Kind,
    array,
    count,
    either,
    instance,
    known,
    listed,
    number,
    one_of,
    path,
    real,
    texts,
    whole,
)

CLIENTS, FEATURES, RANK = 3, 5, 2

adjoint = instance(jf.adjoint.Adjoint)
backend = instance(jf.backend.Backend)
clients = instance(jf.Clients)
compressor = instance(Compressor)
dictionary = instance(dict)
moment = instance(jf.linalg.Moment)
optimizer = instance(optax.GradientTransformation)
participation = instance(jf.participation.Participation)
sparse = scipy.sparse.issparse


def never(value) -> bool:
    """No value is right, such as the path of a file that does not exist."""
    return False


def nothing(value) -> bool:
    """None alone."""
    return value is None


def empty(value) -> bool:
    return isinstance(value, tuple | list) and len(value) == 0


def empty_dictionary(value) -> bool:
    return value == {}


def names(length: int) -> Kind:
    """As many texts."""
    return lambda value: texts(value) and len(value) == length


def folder(value) -> bool:
    return path(value) and Path(value).is_dir()


def file(value) -> bool:
    return path(value) and Path(value).is_file()


# --- numbers -------------------------------------------------------------------------------------


def as_many_as_clients(value) -> bool:
    return value == CLIENTS


def ranks_of_modes(value) -> bool:
    """Of tensors of size (5, 1)."""
    return listed(count(), 2)(value) and value[0] <= 5 and value[1] <= 1


def lower_end(value) -> bool:
    """Of the ranges of five features, whose upper end is 9."""
    ends = real(finite=True)(value) or real(5, finite=True)(value)
    return bool(ends and (np.asarray(value, float) < 9).all())


def upper_end(value) -> bool:
    """Of ranges whose lower end is -9."""
    ends = real(finite=True)(value) or real(5, finite=True)(value)
    return bool(ends and (np.asarray(value, float) > -9).all())


def below_one(value) -> bool:
    return number(least=0)(value) and value < 1


def between_zero_and_one(value) -> bool:
    return number(above=0)(value) and value < 1


def share_above_zero(value) -> bool:
    return number(least=0, most=1)(value) and value > 0


def held_out_share(value) -> bool:
    return isinstance(value, float | np.floating) and number(above=0)(value) and value < 1


def fraction(value) -> bool:
    return number(above=0, most=1)(value) and not isinstance(value, np.number)


def few_or_share(value) -> bool:
    """One or two components, or a share of the variance."""
    return whole(1, 2)(value) or (
        isinstance(value, float | np.floating) and number(above=0)(value) and value < 1
    )


def rank_or_share(value) -> bool:
    return whole(0, 5)(value) or between_zero_and_one(value)


def rank_share_or_none(value) -> bool:
    return value is None or rank_or_share(value)


def devices(value) -> bool:
    return value is None or whole(1, len(jax.local_devices()))(value)


def part(most: int) -> Kind:
    """A whole number, in an array too."""

    def fits(value) -> bool:
        return whole(1, most)(value) or (
            array(kinds="iu")(value) and bool(1 <= np.asarray(value) <= most)
        )

    return fits


def whole_of_jax(value) -> bool:
    """A whole number that may be traced."""
    return isinstance(value, jax.Array) and array(kinds="iu")(value)


def ranks_of_clients(value) -> bool:
    """A rank for each client, not all of them zero."""
    several = listed(count(0), least=2)(value) and any(value)
    return isinstance(value, tuple | list) and (several or listed(count(), 1)(value))


def bounds(value) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(number(above=0)(x) and not isinstance(x, np.generic) for x in value)
        and value[0] < value[1]
        and value[0] <= 1 <= value[1]
    )


def six_pixels(value) -> bool:
    return listed(count())(value) and len(value) in (2, 3) and int(np.prod(value)) == 6


# --- what runs take ------------------------------------------------------------------------------


def channels(value) -> bool:
    """One channel for all messages, or a wire of several."""
    return isinstance(value, jf.channel.Channel | jf.Wire)


def keys(value) -> bool:
    """One key or several, of the new style."""
    new = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return new and value.ndim <= 1


def function_of_a_point(value) -> bool:
    return callable(value) and value is not int


def channel_dtype(value) -> bool:
    if not isinstance(value, str | type | np.dtype):
        return False
    try:
        return jnp.dtype(value) in map(jnp.dtype, ("float16", "bfloat16", "float32"))
    except TypeError:
        return False


def model(value) -> bool:
    """A tree with numbers to train, all of them finite."""
    kinds = np.ndarray | np.generic | jax.Array
    leaves = [x for x in jax.tree.leaves(value) if isinstance(x, kinds)]
    return any(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves) and all(
        x.dtype.kind != "O"
        and not isinstance(x, np.ma.MaskedArray)
        and (not jnp.issubdtype(x.dtype, jnp.inexact) or np.isfinite(x).all())
        for x in leaves
    )


# --- clients -------------------------------------------------------------------------------------


def weights(value) -> bool:
    return one_of("equal", "samples")(value) or (
        real(CLIENTS, finite=True)(value)
        and (np.asarray(value) >= 0).all()
        and np.asarray(value).sum() > 0
    )


def weights_without_counts(value) -> bool:
    return weights(value) and not one_of("samples")(value)


def positive_counts(value) -> bool:
    return real(CLIENTS, finite=True)(value) and (np.asarray(value) > 0).all()


def ids(value) -> bool:
    found = known(value, "iu")
    fits = found is not None and found.shape == (CLIENTS,) and len(set(found.tolist())) == CLIENTS
    return fits and found.min() >= 0 and found.max() <= LARGEST


def indices(value) -> bool:
    found = known(value, "iu")
    return found is not None and found.ndim == 1 and bool((abs(found + 0.5) < CLIENTS).all())


def _finite_tables(value) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            array(None, None, finite=True)(x) and np.asarray(x).dtype.itemsize >= 4 for x in value
        )
    )


def tables(value) -> bool:
    return (
        _finite_tables(value)
        and all(isinstance(x, np.ndarray | jax.Array) for x in value)
        and len({(np.shape(x)[1], np.asarray(x).dtype) for x in value}) == 1
    )


def tables_of_features(value) -> bool:
    return tables(value) and np.shape(value[0])[1] == FEATURES


def views(value) -> bool:
    return _finite_tables(value) and len({len(x) for x in value}) == 1


def _entities(value) -> str | None:
    """The kind of ids of entities that differ, or None."""
    if isinstance(value, list | tuple | range) and all(isinstance(x, str) for x in value):
        kind = "U"
    else:
        found = known(value, "iuUO")
        if found is None or found.ndim != 1 or not found.size:
            return None
        kind = found.dtype.kind
        if kind in "UO":
            texts = value if isinstance(value, list | tuple) else found.tolist()
            kind = "U" if all(isinstance(x, str) for x in texts) else None
    return kind if len(value) and len(set(np.asarray(value).tolist())) == len(value) else None


def lists_of_entities(value) -> bool:
    """Lists of ids of one kind, each at most once in a list."""
    if not isinstance(value, list | tuple | range) or not len(value):
        return False
    kinds = {_entities(each) for each in value}
    return len(kinds) == 1 and None not in kinds


def entities(value) -> bool:
    """Ids of one kind, each once and none empty."""
    return _entities(value) is not None and all(str(x).strip() for x in np.asarray(value).tolist())


def long_secret(value) -> bool:
    """Bytes or a text of at least 32."""
    return isinstance(value, bytes | str) and len(value) >= 32


def order_of_entities(value) -> bool:
    """Which has the ids 0, 1 and 2."""
    return _entities(value) == "i" and {0, 1, 2} <= set(np.asarray(value).tolist())


def moments(value) -> bool:
    return (
        array(None, None, None, finite=True)(value)
        and np.shape(value)[1] == np.shape(value)[2]
        and np.asarray(value).dtype.itemsize >= 4
        and np.allclose(value, np.swapaxes(value, 1, 2))
    )


# --- arrays --------------------------------------------------------------------------------------


def square(value) -> bool:
    return array(None, None)(value) and len(value) == np.shape(value)[1]


def tall(value) -> bool:
    return array(None, None)(value) and len(value) >= np.shape(value)[1]


def with_tangents(more: bool) -> Kind:
    """A point of a manifold of dimension above zero; of the Grassmannian with `more` rows."""

    def fits(value) -> bool:
        rows, columns = np.shape(value)
        return real(None, None)(value) and rows >= columns and rows > (columns if more else 1)

    return fits


def one_real(value) -> bool:
    single = isinstance(value, float | np.number) or whole(-(2**63), 2**64 - 1)(value)
    return single and real()(np.asarray(value))


reals = either(real(...), one_real)


def several_rows(least: int) -> Kind:
    return lambda value: real(None, FEATURES)(value) and len(value) >= least


def images(value) -> bool:
    return real(..., None, None)(value) and min(np.shape(value)[-2:]) >= 3


def scores_of_views(value) -> bool:
    return real(None, None, None)(value) and len(value) >= 2


def two_scales(value) -> bool:
    return real(2, finite=True)(value) and (np.asarray(value) >= 0).all()


def twelve_rows(value) -> bool:
    return (
        isinstance(value, np.ndarray | jax.Array)
        and value.ndim >= 1
        and len(value) == 12
        and value.dtype.kind != "O"
    )


def classes(value) -> bool:
    chosen = set(np.asarray(value)) if real(None)(value) else {None}
    return chosen <= {0, 1, 2} and len(chosen) == len(value)


def arrays_of_two_rows(value) -> bool:
    return (
        isinstance(value, np.ndarray | jax.Array | list | tuple)
        and len(value) > 0
        and all(
            isinstance(x, np.ndarray | jax.Array)
            and np.ndim(x) >= 1
            and len(x) >= 2
            and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
            and np.asarray(x).dtype.kind != "O"
            for x in value
        )
    )


def mapped_clients(value) -> bool:
    kind = either(real(None, 2, finite=True), real(None, None, None, finite=True))
    return kind(value) and len(value) > 1
