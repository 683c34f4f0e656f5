"""The precision of matrix products, on machines that offer a choice.

A TPU's matrix unit multiplies numbers of eight bits. By default JAX uses one pass, which rounds
single precision to bfloat16; three passes give about 21 bits, six single precision. So that results
do not depend on the machine, a run uses `highest`, unless the user has chosen otherwise with
`jax.default_matmul_precision`.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg.platforms import Maps, in_one_row, mapped_sizes, per_platform


def _chosen() -> str | None:
    return jax.default_matmul_precision.value


@contextlib.contextmanager
def precise() -> Iterator[None]:
    """Full precision for all products that set none themselves, unless the user has chosen one."""
    if _chosen() is None:
        # Use a context instead of arguments, to include products within users' functions.
        with jax.default_matmul_precision("highest"):
            yield
    else:
        yield


def chosen_precision() -> lax.Precision:
    """The precision of products with data: the user's choice, or full precision."""
    chosen = _chosen()
    if chosen in ("high", "bfloat16_3x", "tensorfloat32"):
        return lax.Precision.HIGH
    if chosen in ("default", "fastest", "bfloat16"):
        return lax.Precision.DEFAULT
    return lax.Precision.HIGHEST


def data_matmul(
    a: Float[Array, "m k"], b: Float[Array, "k n"], *, once: bool = False
) -> Float[Array, "m n"]:
    """The product of two matrices, one of them data, in the precision of the user's choice."""
    return client_matmul(a, b, chosen_precision(), once=once)


def client_matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    precision: lax.Precision = lax.Precision.HIGHEST,
    *,
    once: bool = False,
) -> Float[Array, "m n"]:
    """The product of two matrices of one client, mapped over many clients by `jax.vmap`.

    If only one operation uses the product, set `once`: a CPU then adds outer products of small
    matrices, in a quarter to two thirds of the time. The compiler repeats that sum in every
    operation that uses it.
    """
    k, n = b.shape
    if once and (k <= 5 or (k <= 16 and n <= 512)):
        return _summed(a, b, precision=precision)
    if _jacobi.are_small(a, b):
        return _chosen_product(a, b, precision=precision)
    return jnp.matmul(a, b, precision=precision)


def _plain(a: Array, b: Array, *, precision: lax.Precision) -> Array:
    return jnp.matmul(a, b, precision=precision)


def _without_the_matrix_unit(a: Array, b: Array, *, precision: lax.Precision) -> Array:
    return _jacobi.product(a, b) if _jacobi.are_small(a, b) else _plain(a, b, precision=precision)


def _by_outer_products(
    maps: Maps, a: Float[Array, "... m k"], b: Float[Array, "... k n"], *, precision: lax.Precision
) -> Float[Array, "... m n"] | None:
    if not maps or not all(any(which) for which in zip(*maps, strict=True)):
        return None  # if clients share one side, one large product is faster
    sizes = mapped_sizes(maps, [a, b])
    a, b = in_one_row(maps, [a, b])
    first, *rest = (a[:, :, i : i + 1] * b[:, i : i + 1] for i in range(a.shape[2]))
    return sum(rest, first).reshape(*sizes, a.shape[1], b.shape[2])


_chosen_product = per_platform(_plain, tpu=_without_the_matrix_unit)
_summed = per_platform(_plain, None, {"cpu": _by_outer_products}, tpu=_without_the_matrix_unit)


def in_single(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function in at least single precision, with its result in the type of its arguments.

    JAX's solvers and decompositions refuse half precision.
    """

    def single(*given: Array) -> Array:
        dtype = jnp.result_type(*given)
        least = jnp.promote_types(dtype, jnp.float32)
        return function(*(x.astype(least) for x in given)).astype(dtype)

    return single
