"""The error on fresh samples, in closed form where the law of the samples is known."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed._checks import check_factor, check_flag, checked_array


def expected_reconstruction_error(
    local: Float[Array, "m d k"],
    truth: Float[Array, "m d r"],
    noise_variance: float | Float[Array, ""],
    *,
    relative: bool = False,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    r"""Expected squared error of reconstructing a fresh sample y = U_i x + e of each client.

    With standard normal x and noise of variance s this is
    \(r - \|\hat U_i^\top U_i\|_F^2 + s (d - k)\), for k estimated components: what
    `reconstruction_error` of ever more fresh samples tends to.

    Args:
        local: estimated components, orthonormal columns. Columns of zeros do not count.
        truth: the components of the law.
        noise_variance: s.
        relative: divide by the error of the truth, s (d - r).
        per_client: return the terms of the mean instead.

    Returns:
        The mean error, a scalar; or the clients' errors, `(m,)`.

    Raises:
        ValueError: if the shapes do not fit together.

    Source:
        Ozkara, Huang & Diggavi (2023), Section V, whose error it is in expectation.
    """
    local = checked_array("local", local, "m d k")
    truth = checked_array("truth", truth, f"{local.shape[0]} {local.shape[1]} r")
    check_factor("noise_variance", noise_variance, single=True)
    check_flag("relative", relative)
    check_flag("per_client", per_client)
    _, features, rank = truth.shape
    overlap = jnp.einsum("mdk,mdr->mkr", local, truth, precision="highest")
    kept = jnp.sum(local**2, axis=(1, 2))
    error = rank - jnp.sum(overlap**2, axis=(1, 2)) + noise_variance * (features - kept)
    if relative:
        error = error / (noise_variance * (features - rank))
    return error if per_client else jnp.mean(error)
