"""Linear algebra of the rounds: polar factors, orthonormal bases, second moments."""

from jaxfed.linalg.basis import orthonormalize, top_eigenvectors
from jaxfed.linalg.moments import Moment, should_densify
from jaxfed.linalg.polar import polar, polar_smooth

__all__ = [
    "Moment",
    "orthonormalize",
    "polar",
    "polar_smooth",
    "should_densify",
    "top_eigenvectors",
]
