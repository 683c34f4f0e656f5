"""How precisely products are computed where a machine has a choice.

The matrix unit of a TPU multiplies numbers of eight bits: JAX's default there is one pass, single
precision rounded to bfloat16. Three passes are about 21 bits, six are single precision. What a
program does not say is then an accident of the machine it runs on, so a run says `highest`, unless
the user has said otherwise by `jax.default_matmul_precision`.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._platform import per_platform


def _chosen() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def precise() -> Iterator[None]:
    """Full precision for all products that say nothing themselves, unless the user has chosen."""
    if _chosen() is None:
        with jax.default_matmul_precision("highest"):
            yield
    else:
        yield


def chosen_precision() -> lax.Precision:
    """That of products with data: what the user has chosen, or full."""
    chosen = _chosen()
    if chosen in ("high", "bfloat16_3x", "tensorfloat32"):
        return lax.Precision.HIGH
    if chosen in ("default", "fastest", "bfloat16"):
        return lax.Precision.DEFAULT
    return lax.Precision.HIGHEST


def data_matmul(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """The product of two matrices, one of them data, as precisely as the user has chosen."""
    return client_matmul(a, b, chosen_precision())


def client_matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> Float[Array, "m n"]:
    """The product of two matrices of one client, small ones of many without the matrix unit."""
    if not _jacobi.are_small(a, b):
        return jnp.matmul(a, b, precision=precision)
    return _chosen_product(a, b, precision=precision)


_chosen_product = per_platform(jnp.matmul, tpu=lambda a, b, precision: _jacobi.product(a, b))
