"""The expected reconstruction error on fresh samples, for samples of a known distribution."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from jaxfed._checks import check_factor, checked_array


def expected_reconstruction_error(
    local: Real[ArrayLike, "m d k"],
    truth: Real[ArrayLike, "m d r"],
    noise_variance: float | Float[ArrayLike, ""],
    *,
    relative: bool = False,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    r"""Expected squared error of reconstructing a fresh sample y = U_i x + e of each client.

    With standard normal x, noise of variance s and k estimated components, this is
    \(r - \|\hat U_i^\top U_i\|_F^2 + s (d - k)\), the limit of `reconstruction_error` for many
    fresh samples.

    Args:
        local: estimated components, `(m, d, k)`, with orthonormal columns. Zero columns do not
            count.
        truth: the true components, `(m, d, r)`.
        noise_variance: s.
        relative: divide by the error of the true components, s (d - r).
        per_client: return each client's error instead of the mean.

    Returns:
        The mean error, a scalar; or the clients' errors, `(m,)`.

    Raises:
        ValueError: if shapes do not match or the variance is negative.

    Source:
        Ozkara, Huang & Diggavi (2023), Section V.
    """
    local = checked_array("local", local, "m d k")
    truth = checked_array("truth", truth, f"{local.shape[0]} {local.shape[1]} r")
    check_factor("noise_variance", noise_variance, single=True)
    _, features, rank = truth.shape
    overlap = jnp.einsum("mdk,mdr->mkr", local, truth, precision="highest")
    ranks = jnp.sum(local**2, axis=(1, 2))  # of the clients: zero columns do not count
    error = rank - jnp.sum(overlap**2, axis=(1, 2)) + noise_variance * (features - ranks)
    if relative:
        error = error / (noise_variance * (features - rank))
    return error if per_client else jnp.mean(error)
