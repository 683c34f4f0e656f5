"""Stiefel and Grassmann manifolds as pure functions, and Riemannian Optax optimizers.

`stiefel` and `grassmann` are modules of functions on one point, a matrix with orthonormal
columns; `jax.vmap` gives the batched versions. `riemannian` makes any Optax transformation stay
on them.
"""

from jaxfed.manifolds import grassmann, stiefel
from jaxfed.manifolds.riemannian import riemannian

__all__ = ["grassmann", "riemannian", "stiefel"]
