"""Samples of Wang, Liu & Zhang (2022): a pooled matrix of known spectrum, dealt out to clients."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxfed._checks import (
    check_flag,
    check_name,
    check_number,
    check_whole,
    checked_dtype,
    checked_key,
)
from jaxfed.data.synthetic._common import sizes_of
from jaxfed.linalg import orthonormalize


class SpectrumData(NamedTuple):
    """Samples whose pooled matrix has a given spectrum, dealt out to clients.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays where sizes were given
            per client.
        basis: left singular vectors of the pooled matrix, samples as columns; the first r are
            the exact r components of all samples together.
        singular_values: its singular values, in descending order, the first of them one.
    """

    samples: Any
    basis: Float[Array, "d d"]
    singular_values: Float[Array, " d"]


def spectrum_synthetic(
    key: PRNGKeyArray,
    *,
    clients: int,
    features: int,
    samples: int | Sequence[int],
    spectrum: Literal["geometric", "arithmetic"] = "geometric",
    decay: float | Float[Array, ""] = 1.01,
    condition: float | Float[Array, ""] = 100.0,
    rotate: bool = True,
    dtype: Any = jnp.float32,
) -> SpectrumData:
    """Draw clients whose samples together have a known singular value decomposition.

    All samples as columns form U diag(s) V' with random orthonormal U and V (of uniform entries
    that are orthonormalized), and each client is given some of the columns. The singular values
    are `s_j = decay^(1 - j)`, or `s_j = 1 - (j - 1) / (d - 1) (1 - 1 / condition)`.

    `decay` and `condition` may be arrays under a transformation: a `vmap` over them is a sweep.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        samples: samples per client, one number or one per client; together at least `features`.
        spectrum: how the singular values fall, `"geometric"` or `"arithmetic"`.
        decay: ratio of one singular value to the next of the geometric spectrum, at least 1.
        condition: ratio of the first singular value to the last of the arithmetic spectrum, at
            least 1.
        rotate: draw U; otherwise it is the identity, an equivalent problem for every method that
            does not look at single features.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples and the exact components.

    Raises:
        ValueError: if a size is impossible, there are fewer samples than features, or a ratio is
            less than 1.

    Source:
        Wang, Liu & Zhang (2022), (23), (24) and section 5.6.
    """
    check_whole("clients", clients)
    check_whole("features", features)
    check_name("spectrum", spectrum, ("geometric", "arithmetic"))
    check_flag("rotate", rotate)
    key, dtype = checked_key("key", key), checked_dtype("dtype", dtype)
    sizes = sizes_of(samples, clients)
    each = (sizes,) * clients if isinstance(sizes, int) else sizes
    if sum(each) < features:
        raise ValueError(
            f"samples: wanted at least the features = {features} in all, got {sum(each)}"
        )
    for name, ratio in (("decay", decay), ("condition", condition)):
        check_number(name, ratio, "a finite number of at least 1", lambda x: x >= 1)
    place = jnp.arange(features, dtype=dtype)
    if spectrum == "geometric":
        values = jnp.asarray(decay, dtype) ** -place
    else:
        values = 1 - place / max(features - 1, 1) * (1 - 1 / jnp.asarray(condition, dtype))
    rows, basis = _spectrum(key, values, samples=sum(each), rotate=rotate)
    if isinstance(sizes, int):
        dealt: Any = rows.reshape(clients, sizes, features)
    else:
        dealt = jnp.split(rows, np.cumsum(each)[:-1])
    return SpectrumData(dealt, basis, values)


@partial(jax.jit, static_argnames=("samples", "rotate"))
def _spectrum(key, values, *, samples, rotate):
    key_basis, key_rows = jax.random.split(key)
    d, dtype = len(values), values.dtype
    right = orthonormalize(jax.random.uniform(key_rows, (samples, d), dtype, -1, 1))
    basis = jnp.eye(d, dtype=dtype)
    if rotate:
        basis = orthonormalize(jax.random.uniform(key_basis, (d, d), dtype, -1, 1))
        return (right * values) @ basis.T, basis
    return right * values, basis
