"""Linear algebra of the rounds: polar factors, orthonormal bases, second moments."""

from jaxfed.linalg._factor import matmul, thin_product
from jaxfed.linalg.basis import orthonormalize, top_eigenvectors
from jaxfed.linalg.moments import Moment, should_densify
from jaxfed.linalg.polar import polar

__all__ = [
    "Moment",
    "matmul",
    "orthonormalize",
    "polar",
    "should_densify",
    "thin_product",
    "top_eigenvectors",
]
