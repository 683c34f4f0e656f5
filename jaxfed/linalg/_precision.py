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
from jaxtyping import Array


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


def data_matmul(a: Array, b: Array) -> Array:
    """The product of two matrices, one of them data, as precisely as the user has chosen."""
    return jnp.matmul(a, b, precision=chosen_precision())
