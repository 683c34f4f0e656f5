"""Clients of Shi & Kontar (2024): shared and local principal components.

The model of personalized PCA (equation 1) is, for a sample of client i,

    y = U diag(s_g) phi + V_i diag(s_i) psi + epsilon,     U'U = I, V_i'V_i = I, U'V_i = 0,

with standard normal scores phi, psi and noise of variance sigma^2 in every feature.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxfed._checks import (
    check_name,
    check_whole,
    checked_dtype,
    checked_key,
    shown,
)
from jaxfed.data.synthetic._common import Law, draw, scale_of, sizes_of
from jaxfed.linalg import orthonormalize


class PerPCAData(NamedTuple):
    """Samples of clients that share some principal components, and the truth behind them.

    A named tuple, so it is a pytree, and `data._replace(shared_scale=...).draw(key, n)` draws
    from another distribution with the same components.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays if sizes were given per
            client.
        shared: the shared components U, orthonormal.
        local: the local components V_i, orthonormal and orthogonal to `shared`.
        labels: the client's group; clients of one group have the same local components.
        shared_scale: standard deviation of the shared scores, one or one per component.
        local_scale: standard deviation of the local scores, one or one per component.
        noise_variance: variance of the noise in each feature.
    """

    samples: Any
    shared: Float[Array, "d r1"]
    local: Float[Array, "m d r2"]
    labels: Int[Array, " m"]
    shared_scale: Float[Array, "..."]
    local_scale: Float[Array, "..."]
    noise_variance: Float[Array, ""]

    @property
    def law(self) -> Law:
        """The distribution of samples."""
        return Law(
            self.shared, self.local, self.shared_scale, self.local_scale, self.noise_variance
        )

    draw = draw


@partial(jax.jit, static_argnames=("groups", "free", "rank", "dtype"))
def _random_subspaces(key, *, groups, free, rank, dtype):
    return jax.vmap(orthonormalize)(jax.random.normal(key, (groups, free, rank), dtype))


@jax.jit
def _rotate(key, u, v):
    d = u.shape[0]
    q = orthonormalize(jax.random.normal(key, (d, d), u.dtype))
    return q @ u, q @ v


def perpca_synthetic(
    *,
    key: PRNGKeyArray,
    clients: int,
    features: int,
    shared_rank: int,
    local_rank: int,
    samples: int | Sequence[int],
    shared_scale: float | Sequence[float] | Float[Array, "..."] = 1.0,
    local_scale: float | Sequence[float] | Float[Array, "..."] = 1.0,
    noise_variance: float | Float[Array, ""] = 0.0,
    local: Literal["window", "random"] = "window",
    window: int | None = None,
    groups: int | None = None,
    rotate: bool = False,
    dtype: Any = jnp.float32,
) -> PerPCAData:
    """Draw clients with shared and local principal components.

    The shared components are the first `shared_rank` coordinate axes; the local components lie in
    the other coordinates. `"window"` gives client i the axes i, i + 1, ... modulo `window`, so that
    client i and client i + window agree; if `window` divides `clients`, the mean of their
    projections has largest eigenvalue local_rank / window. `"random"` gives each group of clients
    its own random subspace.

    Scales may be arrays under a transformation, so a `vmap` over them (or over `key`) is a sweep.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        shared_rank: number of shared components r1.
        local_rank: number of local components r2 of each client.
        samples: samples per client, one number or one per client.
        shared_scale: standard deviation of the shared scores, one or one per component.
        local_scale: standard deviation of the local scores, one or one per component.
        noise_variance: variance of the noise in each feature.
        local: how the local components differ between clients.
        window: with `"window"`, the number of coordinates the local axes cycle through, from
            `local_rank` to `features - shared_rank` (the default).
        groups: with `"random"`, the number of distinct local subspaces; client i belongs to group
            i modulo `groups`. Default: one per client.
        rotate: rotate everything by one random rotation, so that no axis is special.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples with the truth behind them.

    Raises:
        ValueError: if a size, rank or scale is impossible.

    Source:
        Shi & Kontar (2024), equation 1 and section 7.1.
    """
    ranks = {"shared_rank": shared_rank, "local_rank": local_rank}
    for name, value in ({"clients": clients, "features": features} | ranks).items():
        check_whole(name, value)
    key, dtype = checked_key("key", key), checked_dtype("dtype", dtype)
    free = features - shared_rank
    if local_rank > free:
        raise ValueError(
            f"shared_rank + local_rank: wanted at most the features = {features}, "
            f"got {shared_rank} + {local_rank}"
        )
    check_name("local", local, ("window", "random"))
    if window is not None and local != "window":
        raise ValueError(f"window: wanted None with local='random', got {shown(window)}")
    if groups is not None and local != "random":
        raise ValueError(f"groups: wanted None with local='window', got {shown(groups)}")
    sizes = sizes_of(samples, clients)

    key_local, key_rotation, key_samples = jax.random.split(key, 3)
    if local == "window":
        window = free if window is None else window
        check_whole("window", window, least=local_rank, most=free)
        # With window == local_rank every shift spans the same subspace: one group.
        labels = np.arange(clients) % (window if window > local_rank else 1)
        axes = (np.arange(clients)[:, None] + np.arange(local_rank)) % window
        basis = jnp.asarray(np.eye(free)[axes].transpose(0, 2, 1), dtype)
    else:
        groups = clients if groups is None else groups
        check_whole("groups", groups, most=clients)
        labels = np.arange(clients) % groups
        basis = _random_subspaces(
            key_local, groups=groups, free=free, rank=local_rank, dtype=jnp.dtype(dtype)
        )[labels]

    # Zeros in the shared coordinates make them orthogonal to the shared components to the last bit.
    v = jnp.concatenate([jnp.zeros((clients, shared_rank, local_rank), dtype), basis], axis=1)
    u = jnp.asarray(np.eye(features, shared_rank), dtype)
    if rotate:
        u, v = _rotate(key_rotation, u, v)
    data = PerPCAData(
        samples=[],
        shared=u,
        local=v,
        labels=jnp.asarray(labels),
        shared_scale=scale_of("shared_scale", shared_scale, shared_rank, dtype),
        local_scale=scale_of("local_scale", local_scale, local_rank, dtype),
        noise_variance=scale_of("noise_variance", noise_variance, None, dtype),
    )
    return data._replace(samples=data.draw(key_samples, sizes))
