"""Stiefel and Grassmann manifolds as pure functions, with optimizers and solvers on them.

`stiefel` and `grassmann` are modules of functions on one point, a matrix with orthonormal
columns; `jax.vmap` gives the batched versions. `minimise` finds minima of functions on them, on
products of them and on trees that hold other parameters too; `riemannian` makes any Optax
transformation stay on them.
"""

from jaxfed import _names
from jaxfed.manifolds import grassmann, stiefel
from jaxfed.manifolds._surface import Ended
from jaxfed.manifolds.minimise import SOLVERS, Minimum, minimise
from jaxfed.manifolds.riemannian import riemannian

__all__ = ["SOLVERS", "Ended", "Minimum", "grassmann", "minimise", "riemannian", "stiefel"]

__dir__ = _names.public_names(__name__)
