"""Linear algebra of the rounds: polar factors, bases, singular values, second moments.

Users need only these names. Authors of algorithms, channels and backends also import the modules
`derivatives` (values with custom derivative rules), `division`, `platforms` (implementations for
one platform) and `precision` (products at the run's precision).
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
