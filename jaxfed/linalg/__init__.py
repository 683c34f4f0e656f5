"""Linear algebra of the rounds: polar factors, bases, singular values, second moments."""

from jaxfed import _names
from jaxfed.linalg._factor import matmul, thin_product, transposed_product
from jaxfed.linalg.basis import orthonormalize
from jaxfed.linalg.division import ratio
from jaxfed.linalg.eigen import top_eigenvectors
from jaxfed.linalg.lanczos import largest_eigenvalue
from jaxfed.linalg.moments import Moment, should_densify
from jaxfed.linalg.polar import polar
from jaxfed.linalg.svd import not_rounding, svd

__all__ = [
    "Moment",
    "largest_eigenvalue",
    "matmul",
    "not_rounding",
    "orthonormalize",
    "polar",
    "ratio",
    "should_densify",
    "svd",
    "thin_product",
    "top_eigenvectors",
    "transposed_product",
]

__dir__ = _names.public_names(__name__)
