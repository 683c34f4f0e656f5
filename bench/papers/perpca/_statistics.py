"""Clients of Shi & Kontar (2024), sections 7.1.2 to 7.1.4: statistical errors by size.

Half of the clients have n samples, half a tenth of that. Their second moments are drawn from the
Wishart law, which is that of the samples.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed import Clients, Personalized, stack
from jaxfed.data import PerPCAData, perpca_synthetic
from papers.perpca._synthetic import Keys
from papers.synthetic import PERPCA_SETTINGS


def wishart_moments(
    key: Array, covariance: Float[Array, "m d d"], counts: Float[Array, " m"]
) -> Float[Array, "m d d"]:
    """Second moments of Gaussian samples without the samples (Bartlett's decomposition).

    n S = L A A'L' with L L' the covariance, A lower triangular, chi-distributed on its diagonal
    (n, n - 1, ... degrees of freedom) and standard normal below it. Needs n >= d.
    """
    m, d, _ = covariance.shape
    key_diagonal, key_below = jax.random.split(key)
    freedom = counts[:, None] - jnp.arange(d)
    diagonal = jnp.sqrt(2 * jax.random.gamma(key_diagonal, freedom / 2))
    below = jnp.tril(jax.random.normal(key_below, (m, d, d)), -1)
    factor = jnp.linalg.cholesky(covariance) @ (below + jax.vmap(jnp.diag)(diagonal))
    return factor @ factor.mT / counts[:, None, None]


def covariance_of(data: PerPCAData) -> Float[Array, "m d d"]:
    """The clients' second moments of the law."""
    shared, local = data.shared * data.shared_scale, data.local * data.local_scale
    noise = data.noise_variance * jnp.eye(len(shared))
    return shared @ shared.T + local @ local.mT + noise


def drawn_moments(
    setting: str, keys: Keys, sizes: Any, **changes: Any
) -> tuple[Clients, Personalized, Float[Array, "runs d d"]]:
    """Clients of every size and seed (in this order on the leading axis), truth, pooled moments."""
    arguments: dict[str, Any] = dict(PERPCA_SETTINGS[setting]) | changes | {"samples": 1}
    moments, pooled, truths = [], [], []
    for n in sizes:
        counts = jnp.repeat(jnp.asarray([n / 10, n]), arguments["clients"] // 2)
        for key in keys:
            law = perpca_synthetic(key=key, **arguments)
            sample_key = jax.random.fold_in(key, n)
            moments.append(wishart_moments(sample_key, covariance_of(law), counts))
            pooled.append(jnp.einsum("m,mij->ij", counts / counts.sum(), moments[-1]))
            truths.append(Personalized(law.shared, law.local))
    return stack([Clients.from_moments(s) for s in moments]), stack(truths), jnp.stack(pooled)
