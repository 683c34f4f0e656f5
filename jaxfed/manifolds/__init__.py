"""Stiefel and Grassmann manifolds as pure functions, with optimizers and solvers.

`stiefel` and `grassmann` are modules of functions on one point, a matrix with orthonormal columns;
`jax.vmap` gives batched versions. `minimise` finds minima of functions on these manifolds, on
products of them and on trees that hold other parameters too; `riemannian` makes any Optax
transformation stay on them.
"""

from typing import TYPE_CHECKING

from jaxfed import _names
from jaxfed.manifolds import grassmann, stiefel
from jaxfed.manifolds._surface import Ended
from jaxfed.manifolds.minimise import SOLVERS, Minimum, minimise

if TYPE_CHECKING:
    from jaxfed.manifolds._riemannian import riemannian as riemannian

__all__ = ["SOLVERS", "Ended", "Minimum", "grassmann", "minimise", "riemannian", "stiefel"]

__dir__ = _names.public_names(__name__)

if not TYPE_CHECKING:
    # Importing Optax takes a tenth of a second, and the PCA algorithms do not need it.
    __getattr__ = _names.lazy_names(__name__, {"riemannian": f"{__name__}._riemannian:riemannian"})
