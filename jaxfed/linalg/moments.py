"""Second moments, stored as a matrix or, where products are cheaper, as samples."""

from typing import Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_factor, check_whole, checked_array
from jaxfed.linalg._dispatch import second_moment_product
from jaxfed.linalg._factor import matmul, squared_norm
from jaxfed.linalg._few import top_of_few
from jaxfed.linalg.eigen import checked_square, top_eigenvalue, top_eigenvectors
from jaxfed.linalg.precision import client_matmul, data_matmul


def should_densify(samples: int, features: int, rank: int, rounds: int) -> bool:
    """Whether forming the d x d moment once is cheaper than products with the samples.

    Forming it takes 2 n d² operations, once; a product with a d x r matrix then takes 2 d² r
    instead of 4 n d r. With fewer than d / 2 samples it never pays. The large product runs about
    twice as fast as the thin ones, which halves the number of rounds to break even. In each round,
    the moment is multiplied by matrices of `rank` columns.
    """
    saved = 2 * samples - features
    return saved > 0 and 2 * rank * rounds * saved > samples * features


class Moment(eqx.Module):
    """Second moment `S = Yᵀ Y / n` of one client: the matrix, or the samples.

    Either `dense` or `samples` is None. Rows of zeros in `samples` are padding and change nothing.
    Samples may be bfloat16: they are stored and read as such, and computations are in single
    precision. Create and use batches of moments under `jax.vmap`.
    """

    dense: Float[Array, "d d"] | None
    samples: Float[Array, "n d"] | None
    count: Float[Array, ""]
    trace: Float[Array, ""]

    @classmethod
    def from_samples(cls, samples: Float[Array, "n d"], count: ArrayLike | None = None) -> Self:
        """The second moment of samples, stored as samples.

        Args:
            samples: one sample per row; padding rows are zero.
            count: number of real samples; the number of rows by default.

        Raises:
            ValueError: if `samples` is not one real floating-point matrix, or `count` is not a
                number.
        """
        samples = checked_array("samples", samples, "n d", whole=False, half=True)
        check_factor("count", count, optional=True, single=True)
        dtype = jnp.promote_types(samples.dtype, jnp.float32)
        count = jnp.asarray(len(samples) if count is None else count, dtype)
        trace = squared_norm(samples.astype(dtype)) / jnp.maximum(count, 1)
        return cls(None, samples, count, trace)

    @classmethod
    def from_dense(cls, matrix: Float[Array, "d d"], count: ArrayLike = 1.0) -> Self:
        """A second moment given as a matrix.

        Args:
            matrix: the symmetric positive semi-definite matrix.
            count: number of samples behind the mean, where that matters.

        Raises:
            ValueError: if `matrix` is not one square, real floating-point matrix, or `count` is not
                a number.
        """
        matrix = checked_square("matrix", matrix)
        check_factor("count", count, single=True)
        return cls(matrix, None, jnp.asarray(count, matrix.dtype), jnp.trace(matrix))

    @property
    def dim(self) -> int:
        """Number of features."""
        matrix = self.samples if self.dense is None else self.dense
        assert matrix is not None
        return matrix.shape[-1]

    @property
    def energy(self) -> Float[Array, "*clients"]:
        """The mean squared norm of a sample, which is the trace."""
        return self.trace

    def mv(self, w: Float[Array, "d r"]) -> Float[Array, "d r"]:
        """The product `S W`, in `jax.default_matmul_precision` if set, else in full precision."""
        if self.dense is not None:
            return data_matmul(self.dense, w)
        return second_moment_product(self._kept, w, wide=False) / self._divisor

    def row_products(
        self, w: Float[Array, "r d"]
    ) -> tuple[Float[Array, "r d"], Float[Array, "r r"]]:
        """`W S` and `W S Wᵀ` for a wide matrix."""
        if self.dense is not None:
            product = data_matmul(w, self.dense, once=True)
        else:
            product = second_moment_product(self._kept, w, wide=True) / self._divisor
        return product, client_matmul(product, w.T)

    def quadratic(self, w: Float[Array, "d r"]) -> Float[Array, ""]:
        """The energy `tr(Wᵀ S W)` in the columns of `w`."""
        if self.dense is not None:
            return jnp.sum(w * data_matmul(self.dense, w))
        # A sum of squares, which rounding cannot make negative.
        return squared_norm(data_matmul(self._rows, w)) / self._divisor

    def matrix(self) -> Float[Array, "d d"]:
        """The d x d matrix."""
        if self.dense is not None:
            return self.dense
        return matmul(self._rows.T, self._rows) / self._divisor

    def densified(self) -> Self:
        """The same moment as a matrix."""
        return type(self)(self.matrix(), None, self.count, self.trace)

    def deflate(self, basis: Float[Array, "d r"]) -> Self:
        """The moment deflated by an orthonormal basis, `(I - B Bᵀ) S (I - B Bᵀ)`."""
        if self.dense is not None:
            product = matmul(self.dense, basis)
            # With P = I - B Bᵀ, P S P = S - H - Hᵀ and H = (S B - B Bᵀ S B / 2) Bᵀ: thin products,
            # and symmetric to the last bit.
            half = matmul(product - matmul(basis, matmul(basis.T, product)) / 2, basis.T)
            rest = self.dense - half - half.T
            return type(self)(rest, None, self.count, jnp.trace(rest))
        rest = self._rows - client_matmul(client_matmul(self._rows, basis), basis.T)
        return type(self)(None, rest, self.count, squared_norm(rest) / self._divisor)

    def top(
        self, rank: int, beside: Float[Array, "d b"] | None = None
    ) -> tuple[Float[Array, " rank"], Float[Array, "d rank"]]:
        """The largest eigenvalues, descending, and their eigenvectors.

        With fewer samples than features, it uses the n x n Gram matrix of the samples. Eigenvectors
        of zero eigenvalues complete the basis. As differentiable as `top_eigenvectors`.

        Args:
            rank: number of eigenvalues, from 1 to d.
            beside: an orthonormal basis by which the moment is deflated first.

        Raises:
            ValueError: if `rank` is not from 1 to d, or `beside` is not a matrix with d rows.
        """
        check_whole("rank", rank, most=self.dim)
        if beside is not None:
            beside = checked_array("beside", beside, f"{self.dim} b", half=True)
        # Whichever of the two Gram matrices is smaller has all nonzero eigenvalues.
        if self.dense is not None or len(self._rows) >= self.dim:
            moment = self if beside is None else self.deflate(beside)
            return top_eigenvectors(moment.matrix(), rank)
        if beside is None:
            beside = jnp.zeros((self.dim, 0), self._rows.dtype)
        values, vectors = top_of_few(self._rows, beside, rank)
        return values / self._divisor, vectors

    def largest_eigenvalue(self) -> Float[Array, ""]:
        """The largest eigenvalue, as differentiable as `top_eigenvectors`."""
        if self.dense is not None or len(self._rows) >= self.dim:
            return top_eigenvalue(self.matrix())
        return top_eigenvalue(matmul(self._rows, self._rows.T)) / self._divisor

    @property
    def _kept(self) -> Float[Array, "n d"]:
        assert self.samples is not None
        return self.samples

    @property
    def _rows(self) -> Float[Array, "n d"]:
        """The samples in the precision of computations."""
        return self._kept.astype(self.count.dtype)

    @property
    def _divisor(self) -> Float[Array, ""]:
        # A client without samples, such as padding, has the moment zero.
        return jnp.maximum(self.count, 1)
