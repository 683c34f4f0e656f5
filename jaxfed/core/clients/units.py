"""Second moments of features in unlike units, which single precision cannot hold."""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, DTypeLike, Float, PyTree

from jaxfed._names import caller
from jaxfed._numbers import UnitsWarning as UnitsWarning
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Ragged, SampleRows, Samples, at_least_single
from jaxfed.core.clients.source import SOME_ROWS, FromSource
from jaxfed.core.common.processes import on_host
from jaxfed.core.contract.algorithm import ClientsLike, Personalized
from jaxfed.linalg import Moment

Function = TypeVar("Function", bound=Callable[..., Any])

# Rounding errors of squares are 6e-8 of the largest. Beyond this ratio of magnitudes, of features
# or along principal axes, they exceed 5e-5 of the squares that matter.
RATIO = 30.0
# Beyond this one along principal axes, a second moment in single precision has lost too much.
LOST = 100.0
# Beyond this one, rounding errors of double precision exceed 2e-6 of the squares that matter, and
# those of components, along which an objective is flat at its optimum, the root of that.
RATIO_OF_DOUBLES = 1e5
# Below these ratios along principal axes, there are rounding errors of samples alone. In a moment,
# nothing tells them from directions that it has lost.
RANKS = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-13}
# Whose principal axes are looked at, and of a moment, in how many features.
SOME_CLIENTS, FEW_ROWS, FEW_FEATURES = 8, 32, 128
# Columns are orthonormal up to rounding if their products differ by less from the identity.
ROUNDING = 1e-5
SINGLE, DOUBLE = (jnp.float32, jnp.bfloat16), (jnp.float64,)  # bfloat16 is read as single
# Squares of smaller numbers vanish. Those of large ones overflow, which the run notices.
LEAST = 1e-12


def in_enough_precision(run: Function) -> Function:
    """Wrap a function of an algorithm, or a solution, and clients to compute in double precision.

    It does so where single precision would lose components. Algorithm and clients are the first two
    arguments; others and the result keep single precision. It warns where it cannot: if samples
    are read in the precision of the source, what is differentiated keeps its own, or double
    precision is not enough either.
    """
    signature = inspect.signature(run)
    first, second = list(signature.parameters)[:2]

    @functools.wraps(run)
    def wrapped(*given: Any, **options: Any) -> Any:
        try:
            bound = signature.bind(*given, **options)
        except TypeError:
            return run(*given, **options)  # which says what is missing
        others = {name: x for name, x in bound.arguments.items() if name != second}
        algorithm, clients = others[first], bound.arguments[second]
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(others))
        if traced or (isinstance(clients, Clients) and not clients.layout.in_memory):
            warn_of_units(algorithm, clients)
            return run(*given, **options)
        exceeds = exceed_single_precision(algorithm, clients)
        _warn_of_doubles(algorithm, clients, exceeds)
        if not exceeds:
            return run(*given, **options)
        if any(
            _is_steep(part, _eigenvectors(algorithm), LOST)
            for part in clients.parts
            if _is_dense(part)
        ):
            warnings.warn(
                "clients: wanted second moments that keep enough digits in single precision, got a "
                f"direction more than {LOST:.0f} times as strong as others; subtract means before "
                "you compute moments, or set JAX_ENABLE_X64=1",
                UnitsWarning,
                stacklevel=caller(),
            )
        with jax.enable_x64(True):
            others, clients = widened(others), _converted(clients, SINGLE, np.float64)
            data = jax.tree.map(_with_exact_trace, clients.data, is_leaf=_is_dense)
            clients = eqx.tree_at(lambda c: c.data, clients, data)
            total = clients.weights.sum(axis=-1, keepdims=True)
            clients = eqx.tree_at(lambda c: c.weights, clients, clients.weights / total)
            bound.arguments.update(others | {second: clients})
            return _converted(run(*bound.args, **bound.kwargs), DOUBLE, np.float32)

    return cast(Function, wrapped)


INSTEAD = "call jaxfed.fit, which computes in double precision where clients are in memory"


def warn_of_units(algorithm: Any, clients: Clients, instead: str = INSTEAD) -> None:
    """Warn if the precision in use loses components of the result.

    Args:
        algorithm: as in `exceed_single_precision`.
        clients: the clients.
        instead: what else there is to do than to standardize or to enable 64 bits.
    """
    exceeds = exceed_single_precision(algorithm, clients)
    _warn_of_doubles(algorithm, clients, exceeds)
    if exceeds:
        warnings.warn(
            "clients: wanted features of similar and moderate magnitude, got some, or means of "
            f"some, or a direction, more than {RATIO:.0f} times as large as others, or numbers "
            f"below {LEAST:.0e}, whose squares single precision loses; standardize unlike features "
            f"with jaxfed.preprocess.Standardize, set JAX_ENABLE_X64=1, or {instead}",
            UnitsWarning,
            stacklevel=caller(),
        )


def _warn_of_doubles(algorithm: Any, clients: Any, exceed_single: bool) -> None:
    """Warn if double precision loses components of the result."""
    eigenvectors, parts = _eigenvectors(algorithm), _known_parts(algorithm, clients)
    # What single precision holds, double precision holds.
    parts = [part for part in parts if exceed_single or not _is_single(part)]
    parts = [part for part in parts if isinstance(part, SampleRows | Moment)]
    found = [_magnitudes(part) for part in parts] if eigenvectors else []
    if found and _exceed(parts, found, eigenvectors, RATIO_OF_DOUBLES):
        warnings.warn(
            "clients: wanted features that double precision tells apart, got some, or means of "
            f"some, or a direction, more than {RATIO_OF_DOUBLES:.0e} times as large as others; "
            "subtract means, or standardize unlike features with jaxfed.preprocess.Standardize",
            UnitsWarning,
            stacklevel=caller(),
        )


def exceed_single_precision(algorithm: Any, clients: Any) -> bool:
    """Whether single precision loses squares of samples, or eigenvectors of a second moment.

    It does if squares of the largest numbers vanish, or if a feature, its mean, or the samples of
    some clients along a principal axis, are far larger than others that the result depends on. Of
    clients that are read block by block, the first one is looked at. Data are taken to be well
    scaled if they are unknown, no samples, or on TPUs, which have no double precision.

    Args:
        algorithm: the algorithm, which says how many eigenvectors it needs.
        clients: the clients.
    """
    eigenvectors, parts = _eigenvectors(algorithm), _known_parts(algorithm, clients)
    if not all(map(_is_single, parts)):
        return False
    found = [_magnitudes(part) for part in parts]
    largest = max((squares.max(initial=0) for squares, _ in found), default=0)
    if 0 < largest < LEAST**2:
        return True
    return eigenvectors > 0 and _exceed(parts, found, eigenvectors, RATIO)


def _known_parts(algorithm: Any, clients: Any) -> Sequence[Any]:
    """Parts of clients' data whose magnitudes are known; of those in a source, its first client.

    It is empty if some are unknown, and for unsuitable arguments, which are refused elsewhere.
    """
    if not isinstance(clients, Clients):
        return ()
    parts = clients.parts
    if isinstance(clients.layout, FromSource):
        rows = jnp.asarray(clients.layout.data.reader.some_rows)
        parts = (Samples(rows[None], jnp.full(1, len(rows), rows.dtype)),)

    def is_known(part: Any) -> bool:
        views = isinstance(part, Ragged) and part.factored and _eigenvectors(algorithm)
        return bool(isinstance(part, SampleRows | Moment) or views) and _is_known(part)

    return parts if all(map(is_known, parts)) else ()


def _exceed(
    parts: Sequence[Any],
    magnitudes: Sequence[tuple[np.ndarray, np.ndarray]],
    eigenvectors: int,
    ratio: float,
) -> bool:
    """Whether some features, their means, or directions are larger than others by this ratio."""
    return any(
        _are_unlike(squares, variances, part, eigenvectors, ratio)
        or (
            (isinstance(part, SampleRows) or _is_dense(part))
            and _is_steep(part, eigenvectors, ratio)
        )
        for (squares, variances), part in zip(magnitudes, parts, strict=True)
    )


def _eigenvectors(algorithm: Any) -> int:
    found = getattr(getattr(algorithm, "algorithm", algorithm), "eigenvectors", 0)
    return found if isinstance(found, int) else 0


def _is_dense(part: Any) -> bool:
    return isinstance(part, Moment) and part.dense is not None


def _with_exact_trace(part: Any) -> Any:
    """A moment whose trace is the sum of its diagonal in double precision, if it is a matrix."""
    if not _is_dense(part):
        return part
    trace = jnp.trace(part.dense, axis1=-2, axis2=-1)  # which stays on its devices
    return eqx.tree_at(lambda x: x.trace, part, trace)


def widened(tree: PyTree) -> PyTree:
    """Arrays of single precision in double precision, in which orthonormal ones remain orthonormal.

    Otherwise rounding errors of components, times squares of features in unlike units, exceed what
    the components leave of the samples.
    """

    def one(x: Any) -> Any:
        single = isinstance(x, jax.Array | np.ndarray) and x.dtype == np.float32
        return _widened(x) if single else x

    return jax.tree.map(one, tree)


def as_precise_as(clients: Any, learned: PyTree) -> PyTree:
    """What was learned earlier, in double precision if that of these clients' data is double.

    Models of other kinds than arrays, such as networks, have a precision of their own.
    """
    double = isinstance(clients, Clients) and clients.weights.dtype == np.float64
    result = getattr(learned, "result", learned)
    if not double or not isinstance(result, Personalized):
        return learned
    arrays = all(part is None or isinstance(part, jax.Array | np.ndarray) for part in result)
    return widened(learned) if arrays else learned


@jax.jit
def _widened(x: Array) -> Array:
    x = x.astype(np.float64)
    if x.ndim < 2 or x.shape[-2] <= x.shape[-1]:  # no frame; a square one leaves nothing
        return x
    for _ in range(2):  # each squares the error
        error = jnp.eye(x.shape[-1]) - x.mT @ x
        small = jnp.abs(error).max(axis=(-2, -1), keepdims=True, initial=0) < ROUNDING
        x = jnp.where(small, x + x @ error / 2, x)
    return x


def _converted(tree: PyTree, old: Collection[DTypeLike], new: type[np.floating]) -> PyTree:
    def one(x: Any) -> Any:
        return x.astype(new) if isinstance(x, jax.Array) and x.dtype in old else x

    return jax.tree.map(one, tree)


def _is_known(part: Any) -> bool:
    return all(
        isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in jax.tree.leaves(part)
    )


def _is_single(part: Any) -> bool:
    return all(
        x.dtype.itemsize <= 4 and "tpu" not in {d.platform for d in x.devices()}
        for x in jax.tree.leaves(part)
        if jnp.issubdtype(x.dtype, jnp.floating)
    )


def _magnitudes(part: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each client's mean squares and variances of features, `(clients, features)`."""
    if hasattr(part, "magnitudes"):
        return part.magnitudes()
    if _is_dense(part):
        squares = np.diagonal(on_host(part.dense), axis1=1, axis2=2).astype(np.float64)
        return squares, squares
    values = part.samples if isinstance(part, Moment) else part.values
    assert values is not None
    some = _rows(values, slice(None), SOME_ROWS)
    # Neither padding, which is zero, nor a missing entry counts.
    there = np.isfinite(some) & np.any(some != 0, axis=2, keepdims=True)
    some = np.where(there, some, 0)
    count = np.maximum(there.sum(axis=1), 1)
    mean = some.sum(axis=1) / count
    squares = np.einsum("mnd,mnd->md", some, some) / count
    some -= np.where(there, mean[:, None], 0)
    return squares, np.einsum("mnd,mnd->md", some, some) / count


def _rows(values: jax.Array, clients: slice, number: int) -> np.ndarray:
    """An even selection of these clients' rows, in double precision."""
    rows = slice(None, None, -(-values.shape[1] // number))
    # On the host, since compiling would take longer; within `jit`, which closes over the data, too.
    # There, a slice by JAX would be a program of its own.
    with jax.ensure_compile_time_eval():
        some = (
            on_host(values)[clients, rows] if _is_host(values) else on_host(values[clients, rows])
        )
    return some.astype(np.float64)


def size_of(clients: ClientsLike) -> float:
    """The root mean square of some samples; 1 if they are traced or unknown, or all zero."""
    parts = [part for part in clients.parts if isinstance(part, SampleRows) and _is_known(part)]
    squares = np.concatenate([_magnitudes(part)[0].ravel() for part in parts] or [np.ones(1)])
    return float(np.sqrt(np.mean(squares))) or 1.0


def ratio_of_axes(clients: ClientsLike, number: int) -> float:
    """How many times stronger the first principal axis is than the last of so many.

    Standard deviations of some rows of some clients; 1 if the data are traced or unknown.

    Args:
        clients: the clients.
        number: of principal axes.
    """
    known = [
        part
        for part in clients.parts
        if (isinstance(part, SampleRows) or _is_dense(part)) and _is_known(part)
    ]
    return max((_ratio_of_axes(part, number, scaled=False) for part in known), default=1.0)


def ratio_of_features(clients: ClientsLike) -> float:
    """How many times larger a feature is than another one of its client varies.

    It is 1 if the data are traced or unknown.
    """
    known = [part for part in clients.parts if isinstance(part, Ragged) and _is_known(part)]
    most = 1.0
    for squares, variances in map(_magnitudes, known):
        least = np.min(variances, axis=1, where=variances > 0, initial=np.inf)
        most = max(most, float(np.sqrt(np.max(squares.max(axis=1) / least, initial=1))))
    return most


def lose_single_precision(tables: Float[Array, "m n d"], eigenvectors: int) -> bool:
    """Whether single precision loses components of these samples, in which NaN is missing.

    It is false if they are traced.
    """
    if isinstance(tables, Tracer):
        return False
    with jax.ensure_compile_time_eval():  # within `jit`, which closes over the samples, too
        part = Samples(tables, jnp.zeros(len(tables), tables.dtype))
    return _is_single(part) and _exceed([part], [_magnitudes(part)], eigenvectors, RATIO)


def _is_steep(part: Any, eigenvectors: int, most: float) -> bool:
    """Whether deviations along the principal axes of some clients differ by more than a factor."""
    return _ratio_of_axes(part, eigenvectors, scaled=True) > most


def _ratio_of_axes(part: Any, eigenvectors: int, *, scaled: bool) -> float:
    """The largest ratio of deviations; of moments, if `scaled`, of features of one size."""
    if _is_dense(part):
        step = slice(None, None, -(-len(part.dense) // SOME_CLIENTS))
        some = slice(None, None, -(-part.dense.shape[-1] // FEW_FEATURES))
        with jax.ensure_compile_time_eval():
            gram = np.nan_to_num(on_host(part.dense)[step, some, some].astype(np.float64))
        if scaled:  # since each entry is rounded by its own size
            sizes = np.sqrt(np.abs(np.diagonal(gram, axis1=1, axis2=2)))
            sizes[sizes == 0] = 1
            gram = gram / sizes[:, :, None] / sizes[:, None, :]
        number, rank = min(eigenvectors, gram.shape[-1]), 0.0
        sizes = _sizes(gram)
    else:
        step = slice(None, None, -(-len(part.values) // SOME_CLIENTS))
        rows = np.nan_to_num(_rows(part.values, step, FEW_ROWS), posinf=0, neginf=0)
        # In a unit in which no square overflows.
        rows = rows / (np.abs(rows).max(initial=0) or 1)
        wide = rows.shape[1] < rows.shape[2]
        sizes = _sizes(rows @ rows.mT if wide else rows.mT @ rows)
        # Of so few rows, the last principal axes have less than their share.
        number = max(1, min(eigenvectors, rows.shape[1] // 2, rows.shape[2]))
        dtype = at_least_single(part.values.dtype)
        rank = RANKS[dtype]
        if dtype == np.float64 and (sizes[:, number - 1] < 1e-6 * sizes[:, 0]).any():
            # Squares do not hold such ratios; for all samples, this would take too long.
            sizes = np.linalg.svd(rows, compute_uv=False)
    matter = sizes[:, :number]
    if _is_dense(part):  # a few samples have no more directions; one is the count of moments alone
        counts = np.maximum(on_host(part.count)[step], 1)
        few = (counts > 1)[:, None] & (np.arange(number) >= counts[:, None])
        matter = np.where(few, 0, matter)
    least = np.min(matter, axis=1, where=matter > rank * sizes[:, :1], initial=np.inf)
    return float(np.max(sizes[:, 0] / least, initial=1))


def _sizes(gram: np.ndarray) -> np.ndarray:
    """The roots of eigenvalues, in decreasing order."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[:, ::-1], 0))


def _is_host(values: jax.Array) -> bool:
    """Whether NumPy can read an array without a copy."""
    return [device.platform for device in values.devices()] == ["cpu"]


def _are_unlike(
    squares: Float[np.ndarray, "m d"],
    variances: Float[np.ndarray, "m d"],
    part: Any,
    eigenvectors: int,
    ratio: float,
) -> bool:
    factored = isinstance(part, Ragged) and part.factored
    # The weakest eigenvalue that matters is about the variance of the feature at its place; of a
    # view, everything matters.
    matter = variances if factored else -np.sort(-variances, axis=1)[:, : eigenvectors + 1]
    # A constant feature has no direction of its own.
    least = np.min(matter, axis=1, where=matter > 0, initial=np.inf)
    return bool(np.any(squares.max(axis=1) > ratio ** (4 if factored else 2) * least))
