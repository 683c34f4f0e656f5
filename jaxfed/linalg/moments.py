"""Second moments."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.linalg.basis import top_eigenvectors


def should_densify(samples: int, features: int, rank: int, rounds: int) -> bool:
    """Whether forming the d x d moment once is cheaper than keeping the samples."""
    saved = 2 * rank * (2 * samples - features)
    return 2 * samples > features and rounds * saved > samples * features


class Moment(eqx.Module):
    """Second moment S = Y^T Y / count of one client."""

    dense: Float[Array, "d d"] | None
    samples: Float[Array, "n d"] | None
    count: Float[Array, ""]
    trace: Float[Array, ""]

    @classmethod
    def from_samples(cls, samples, count=None):
        n = samples.shape[0]
        count = jnp.asarray(n if count is None else count, samples.dtype)
        return cls(None, samples, count, jnp.sum(samples**2) / jnp.maximum(count, 1))

    @classmethod
    def from_dense(cls, matrix, count=1.0):
        return cls(matrix, None, jnp.asarray(count, matrix.dtype), jnp.trace(matrix))

    @property
    def dim(self):
        return (self.dense if self.samples is None else self.samples).shape[-1]

    def mv(self, w):
        if self.dense is not None:
            return self.dense @ w
        return self.samples.T @ (self.samples @ w) / jnp.maximum(self.count, 1)

    def quadratic(self, w):
        return jnp.sum(w * self.mv(w))

    def matrix(self):
        if self.dense is not None:
            return self.dense
        return self.samples.T @ self.samples / jnp.maximum(self.count, 1)

    def densified(self):
        return Moment(self.matrix(), None, self.count, self.trace)

    def deflate(self, basis):
        if self.dense is not None:
            half = self.dense - basis @ (basis.T @ self.dense)
            dense = half - (half @ basis) @ basis.T
            return Moment(dense, None, self.count, jnp.trace(dense))
        samples = self.samples - (self.samples @ basis) @ basis.T
        return Moment(None, samples, self.count, jnp.sum(samples**2) / jnp.maximum(self.count, 1))

    def top(self, rank):
        return top_eigenvectors(self.matrix(), rank)

    def largest_eigenvalue(self):
        return self.top(1)[0][0]
