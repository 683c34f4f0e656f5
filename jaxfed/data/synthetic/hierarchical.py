"""Clients of Ozkara, Huang & Diggavi (2023), whose components scatter around common ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxfed._checks import check_whole, checked_dtype, checked_key
from jaxfed.data.synthetic._common import Law, draw, scale_of, sizes_of
from jaxfed.linalg import orthonormalize, polar


class HierarchicalData(NamedTuple):
    """Samples of clients whose principal components scatter around common ones, and the truth.

    A named tuple, so it is a pytree.

    Attributes:
        samples: one `(m, n, d)` array, or a list of `(n_i, d)` arrays if sizes were given per
            client.
        shared: the common components V, orthonormal.
        local: the clients' components U_i, orthonormal.
        noise_variance: variance of the noise in each feature; scores have variance one.
    """

    samples: Any
    shared: Float[Array, "d r"]
    local: Float[Array, "m d r"]
    noise_variance: Float[Array, ""]

    @property
    def law(self) -> Law:
        """The distribution of samples, with scores of variance one and nothing shared."""
        one = jnp.ones((), self.local.dtype)
        return Law(self.shared[:, :0], self.local, one, one, self.noise_variance)

    draw = draw


def hierarchical_synthetic(
    *,
    key: PRNGKeyArray,
    clients: int,
    features: int,
    rank: int,
    samples: int | Sequence[int],
    prior_variance: float | Float[Array, ""],
    noise_variance: float | Float[Array, ""] = 0.5,
    dtype: Any = jnp.float32,
) -> HierarchicalData:
    r"""Draw clients whose components scatter around common ones.

    Client i draws U~, whose entries are normal around those of a random V with variance
    \(\sigma^2\). Its components are the retraction of the part in the tangent space at V,
    \(U_i = \mathrm{polar}(V + P_V(\tilde U - V))\), and its samples are \(y = U_i x + e\) with
    standard normal x. Large variances saturate: frames far from V are nearly uniform.

    `prior_variance` and `noise_variance` may be arrays under a transformation. A `vmap` over them
    is a sweep; with the same key, the clients differ in nothing else.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        rank: number of components r.
        samples: samples per client, one number or one per client.
        prior_variance: variance of the entries of U~.
        noise_variance: variance of the noise in each feature.
        dtype: type of the samples; `float64` needs double precision to be enabled.

    Returns:
        The samples and the truth behind them.

    Raises:
        ValueError: if a size is impossible or a variance is negative or not finite.

    Source:
        Ozkara, Huang & Diggavi (2023), Section V.
    """
    for name, value in (("clients", clients), ("features", features), ("rank", rank)):
        check_whole(name, value)
    key, dtype = checked_key("key", key), checked_dtype("dtype", dtype)
    if rank >= features:
        raise ValueError(f"rank: wanted less than the features = {features}, got {rank}")
    sizes_of(samples, clients)
    spread = jnp.sqrt(scale_of("prior_variance", prior_variance, None, dtype))
    noise = scale_of("noise_variance", noise_variance, None, dtype)
    key_frames, key_samples = jax.random.split(key)
    shape = (clients, features, rank)
    shared, local = _scattered_frames(key_frames, spread, shape=shape)
    data = HierarchicalData((), shared, local, noise)
    return data._replace(samples=data.draw(key_samples, samples))


@partial(jax.jit, static_argnames="shape")
def _scattered_frames(key, spread, *, shape):
    key_shared, key_local = jax.random.split(key)
    clients, features, rank = shape
    shared = orthonormalize(jax.random.normal(key_shared, (features, rank), spread.dtype))

    def one(client):
        normal = jax.random.normal(
            jax.random.fold_in(key_local, client), (features, rank), spread.dtype
        )
        overlap = shared.T @ normal
        # P_V(U~ - V) with U~ - V = σ times a normal matrix.
        return polar(shared + spread * (normal - shared @ (overlap + overlap.T) / 2))

    return shared, jax.vmap(one)(jnp.arange(clients))
