"""Leading eigenvectors of the second moment of few samples, and of what is left of it.

Nothing of the size of the samples is kept for the derivative but the samples themselves.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxfed.linalg._factor import DECOMPOSITION, matmul, one_by_one
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.linalg.eigen import Eigen, descending, top_eigenvectors, with_sign


def top_of_few(rows: Float[Array, "n d"], basis: Float[Array, "d b"], rank: int) -> Eigen:
    """The largest eigenvalues of `(I - B Bᵀ) Yᵀ Y (I - B Bᵀ)`, descending, and eigenvectors.

    Through the n x n Gram matrix. Eigenvectors of zero eigenvalues complete the basis, and have no
    derivative. Otherwise differentiable as `top_eigenvectors` is; by the basis, along changes that
    leave it orthonormal.

    Args:
        rows: the samples Y, fewer than features.
        basis: orthonormal columns B, perhaps none.
        rank: how many.
    """
    return _top(rows, basis, rank)


# A processor makes what is left of one client's samples at a time.
_kernel = one_by_one(lambda given: (_of_rest(*given),))


def _of_rest(rows, basis):
    rest = rows - matmul(matmul(rows, basis), basis.T)
    return matmul(rest, rest.T)


def _gram(rows, basis):
    return _kernel((rows, basis))[0] if basis.shape[1] else matmul(rows, rows.T)


def _beyond(basis, vectors):
    return vectors - matmul(basis, matmul(basis.T, vectors)) if basis.shape[1] else vectors


def _completed(rows, basis, values, scores, rank):
    """Eigenvalues and eigenvectors of the features' side from those of the samples'."""
    missing = rank - scores.shape[1]
    vectors = jnp.pad(_beyond(basis, _back(rows, scores)), ((0, 0), (0, missing)))
    return jnp.pad(values, (0, missing)), with_sign(orthonormalize_once(vectors))


def _back(rows, scores):
    """`Yᵀ C`; the samples as they lie, which a processor would copy to transpose them."""
    return matmul(scores.T, rows).T


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _top(rows: Float[Array, "n d"], basis: Float[Array, "d b"], rank: int) -> Eigen:
    values, scores = top_eigenvectors(_gram(rows, basis), min(rank, len(rows)))
    return _completed(rows, basis, values, scores, rank)


# First-order perturbation theory, as in `top_eigenvectors`. With P = I - B Bᵀ, M = P YᵀY P and an
# eigenvector v, beyond both B and all eigenvectors kept
#     (lambda - M) dv = dM v = dYᵀ Y v + Yᵀ (dY v - Y B dBᵀ v) - dB Bᵀ YᵀY v =: z,
# and along B it is -B dBᵀ v, so that it stays orthogonal to B. From the samples' side, with P Yᵀ k
# the eigenvectors left out and mu their eigenvalues,
#     1 / (lambda - M) = 1 / lambda + sum  P Yᵀ k (1 / lambda (lambda - mu)) kᵀ Y P.
@_top.defjvp
def _(rank, primals, tangents):
    (rows, basis), (change, turn) = primals, tangents
    known = min(rank, len(rows))
    found = descending(_gram(rows, basis))
    spectrum, scores = checkpoint_name(found, DECOMPOSITION)
    values, vectors = _completed(rows, basis, spectrum[:known], scores[:, :known], rank)
    info = jnp.finfo(rows.dtype)
    least = jnp.maximum(info.eps * len(rows) * spectrum[0], 1e5 * float(info.tiny))
    inverse = jnp.where(values > least, 1 / jnp.where(values > least, values, 1), 0)

    images, of_basis = matmul(rows, vectors), matmul(rows, basis)
    z = _back(change, images)
    z += _back(rows, matmul(change, vectors) - matmul(of_basis, matmul(turn.T, vectors)))
    z -= matmul(turn, matmul(of_basis.T, images))
    along = jnp.where(inverse > 0, jnp.sum(vectors * z, axis=0), 0)

    def beyond(x):
        return _beyond(vectors, _beyond(basis, x))

    z = beyond(z) * inverse
    dropped, others = scores[:, known:], spectrum[known:, None]
    gaps = values - others
    clear = gaps > least
    # Where it is not, nothing is to be left: 1 / lambda - 1 / mu is.
    reciprocals = jnp.where(
        clear, 1 / jnp.where(clear, gaps, 1), -1 / jnp.where(others > least, others, 1)
    )
    z += beyond(_back(rows, matmul(dropped, reciprocals * matmul(dropped.T, matmul(rows, z)))))
    return (values, vectors), (along, z - matmul(basis, matmul(turn.T, vectors)) * (inverse > 0))
