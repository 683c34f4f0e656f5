"""Synthetic clients of the papers' experiments, with their truth."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxfed.data import PerPCAData
from jaxfed.linalg import orthonormalize

_TABLE_2 = {"clients": 100, "features": 15, "shared_rank": 2, "noise_variance": 0.5}
_UNEVEN = (100,) * 50 + (1000,) * 50

#: Arguments of `jaxfed.data.perpca_synthetic` for the experiments of Shi & Kontar (2024), section
#: 7.1. In `"table2"` and `"figure4"` the model can be identified from the samples: half of the
#: clients have a tenth of the samples. `"table2_published"` holds the parameters of the published
#: experiment; its test samples have another law, with both scales 0.5.
PERPCA_SETTINGS: dict[str, dict[str, Any]] = {
    "table2": _TABLE_2
    | {"local_rank": 3, "shared_scale": 2.0, "local_scale": 3.0, "window": 6}
    | {"samples": (10,) * 50 + (100,) * 50},
    "table2_published": _TABLE_2
    | {"local_rank": 10, "shared_scale": 0.01, "local_scale": 0.99, "samples": _UNEVEN},
    "figure4": _TABLE_2
    | {"local_rank": 4, "shared_scale": 1.0, "local_scale": 2.0, "samples": _UNEVEN},
    "figure7": {
        "clients": 20,
        "features": 30,
        "shared_rank": 1,
        "local_rank": 1,
        "samples": 1000,
        "window": 10,
    },
    "figure9": _TABLE_2
    | {"local_rank": 3, "shared_scale": 0.5, "local_scale": 0.5, "window": 10, "samples": 1000},
}


def misalignment_pair(
    key: Key[Array, ""],
    theta: float | Float[Array, ""],
    *,
    samples: int = 1000,
    noise_variance: float = 0.0,
    dtype: Any = jnp.float32,
) -> PerPCAData:
    """Draw two clients in three dimensions whose local components differ by a given amount.

    theta = sin²(arccos(v₁'v₂) / 2) is the misalignment 1 - λ_max((P₁ + P₂) / 2): the local
    components are (cos, ±sin, 0) of half the angle between them, the shared one is the third axis.
    Local scores have a standard deviation of 2, shared ones of 1.

    Args:
        key: random key.
        theta: misalignment, from 0 (the same component) to 1/2 (orthogonal ones); a `vmap` over it
            is a sweep over heterogeneity.
        samples: samples per client.
        noise_variance: variance of the noise in each feature.
        dtype: type of the samples.

    Source:
        Shi & Kontar (2024), section 7.1.1, figures 1 and 3.
    """
    theta = jnp.asarray(theta, dtype)
    cos, sin = jnp.sqrt(1 - theta), jnp.sqrt(theta)
    v = jnp.stack([jnp.stack([cos, sin, 0 * sin]), jnp.stack([cos, -sin, 0 * sin])])
    data = PerPCAData(
        samples=[],
        shared=jnp.eye(3, dtype=dtype)[:, 2:],
        local=v[..., None],
        labels=jnp.arange(2),
        shared_scale=jnp.asarray(1, dtype),
        local_scale=jnp.asarray(2, dtype),
        noise_variance=jnp.asarray(noise_variance, dtype),
    )
    return data._replace(samples=data.draw(key, samples))


class SpectrumData(NamedTuple):
    """Samples whose pooled matrix has a given spectrum.

    Attributes:
        samples: each client's samples.
        basis: left singular vectors of the pooled matrix, samples as columns; the first r are the
            exact r components of all samples together.
        singular_values: its singular values, in descending order, the first of them one.
    """

    samples: Float[Array, "m n d"]
    basis: Float[Array, "d d"]
    singular_values: Float[Array, " d"]


def spectrum_synthetic(
    key: Key[Array, ""],
    *,
    clients: int,
    features: int,
    samples: int,
    spectrum: Literal["geometric", "arithmetic"] = "geometric",
    decay: float | Float[Array, ""] = 1.01,
    condition: float | Float[Array, ""] = 100.0,
    rotate: bool = True,
    dtype: Any = jnp.float32,
) -> SpectrumData:
    """Draw clients whose samples together have a known singular value decomposition.

    All samples as columns form U diag(s) V' with random orthonormal U and V (of uniform entries
    that are orthonormalized), and each client gets some of the columns. The singular values are
    `s_j = decay^(1 - j)`, or `s_j = 1 - (j - 1) / (d - 1) (1 - 1 / condition)`.

    Args:
        key: random key.
        clients: number of clients m.
        features: number of features d.
        samples: samples per client; together at least `features`.
        spectrum: how the singular values fall.
        decay: ratio of one singular value to the next in the geometric spectrum.
        condition: ratio of the first singular value to the last in the arithmetic spectrum.
        rotate: draw U; otherwise it is the identity, an equivalent problem for every method that
            does not look at single features.
        dtype: type of the samples.

    Source:
        Wang, Liu & Zhang (2022), (23), (24) and section 5.6.
    """
    place = jnp.arange(features, dtype=dtype)
    if spectrum == "geometric":
        values = jnp.asarray(decay, dtype) ** -place
    else:
        values = 1 - place / max(features - 1, 1) * (1 - 1 / jnp.asarray(condition, dtype))
    rows, basis = _spectrum(key, values, samples=samples * clients, rotate=rotate)
    return SpectrumData(rows.reshape(clients, samples, features), basis, values)


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


class GCCAData(NamedTuple):
    """Views of the same entities, and what they have in common.

    Attributes:
        views: one `(entities, features)` array per view.
        latent: the common scores `Z`.
        mixing: each view's mixing matrix `A_j`.
    """

    views: list[Float[Array, "entities features"]]
    latent: Float[Array, "entities latent"]
    mixing: list[Float[Array, "latent features"]]


def gcca_synthetic(
    key: Key[Array, ""],
    *,
    views: int = 3,
    entities: int = 500,
    features: int = 25,
    latent: int = 20,
    noise: float = 0.1,
    densities: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> GCCAData:
    r"""Draw views with a common latent factor, \(X_j = Z A_j + \sigma E_j\).

    All of `Z`, `A_j` and `E_j` are Gaussian, or sparse with Gaussian entries. The defaults are the
    small setting of the paper.

    Args:
        key: random key.
        views: number of views.
        entities: number of entities.
        features: number of features.
        latent: number of latent dimensions.
        noise: standard deviation of the noise (the paper's programs take the 0.1 that it calls
            a variance as one).
        densities: shares of the entries of `Z`, `A_j` and `E_j` that are not zero. The paper's
            large setting has 0.01, 0.0005 and 0.001.

    Source: Shrestha & Fu (2023), Section V-A1; Fu, Huang, Hong, Sidiropoulos & So (2017).
    """

    def gaussian(key, density, *shape):
        if density == 1:
            return jax.random.normal(key, shape)
        present, value = jax.random.split(key)
        kept = jax.random.bernoulli(present, density, shape)
        return kept * jax.random.normal(value, shape)

    of_latent, of_mixing, of_noise = densities
    latent_key, *keys = jax.random.split(key, views + 1)
    scores = gaussian(latent_key, of_latent, entities, latent)
    arrays, mixing = [], []
    for view_key in keys:
        mixing_key, noise_key = jax.random.split(view_key)
        matrix = gaussian(mixing_key, of_mixing, latent, features)
        arrays.append(scores @ matrix + noise * gaussian(noise_key, of_noise, entities, features))
        mixing.append(matrix)
    return GCCAData(arrays, scores, mixing)
