"""Orthonormal polar factors."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def polar(w: Float[Array, "d r"], method=None) -> Float[Array, "d r"]:
    """Orthonormal polar factor of a tall matrix."""
    u, _, vt = jnp.linalg.svd(w, full_matrices=False)
    return u @ vt


def polar_smooth(w: Float[Array, "d r"], method=None) -> Float[Array, "d r"]:
    """Twin of `polar` for forward mode and second order."""
    return polar(w)
