"""Linear algebra of the rounds: polar factors, bases, singular values, second moments.

Users find all they need among the names here. Authors of algorithms, channels and backends also
import the modules `derivatives` (values with a derivative rule of their own), `division`,
`platforms` (another implementation for a platform) and `precision` (products as precise as a run
asks for).
"""

from jaxfed import _names
from jaxfed.linalg._factor import matmul, thin_product, transposed_product
from jaxfed.linalg.basis import orthonormalize
from jaxfed.linalg.eigen import top_eigenvectors
from jaxfed.linalg.lanczos import largest_eigenvalue
from jaxfed.linalg.moments import Moment
from jaxfed.linalg.polar import polar
from jaxfed.linalg.svd import svd

__all__ = [
    "Moment",
    "largest_eigenvalue",
    "matmul",
    "orthonormalize",
    "polar",
    "svd",
    "thin_product",
    "top_eigenvectors",
    "transposed_product",
]

__dir__ = _names.public_names(__name__)
