"""Updates of the factors of personalized Tucker decompositions, and products of tensors.

Source: Hu, Shi, Al Kontar & Yan (2023), arXiv:2309.03439.
"""

from functools import reduce
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import Algorithm
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment, matmul, orthonormalize, polar, top_eigenvectors
from jaxfed.linalg.precision import chosen_precision
from jaxfed.pca.components import Frame, best_local

Scalar = Float[Array, ""]
Tensors = Float[Array, "samples ..."]
Factor = Float[Array, "size rank"]
LocalFactor = Float[Array, "size local_rank"]
ModeFactors = tuple[Float[Array, "_ _"], ...]  # (size, rank) of each mode, with orthonormal columns
Second = Float[Array, "size size"]  # second moment of a mode


class TuckerMember(NamedTuple):
    """ONE client's prepared samples."""

    values: Tensors  # divided by the root of their number
    energy: Scalar  # the mean squared norm of a sample


class Pair(NamedTuple):
    """Factors of both parts, orthogonal to each other in the orthogonal modes."""

    shared: ModeFactors
    local: ModeFactors


class Updated(NamedTuple):
    """A client's local factors after an update, and the energy of their products with samples."""

    local: ModeFactors
    captured: Scalar


class Updates(Algorithm):
    """The updates of single factors, of which rounds are made."""

    quadratic_in_samples = True

    proximal: eqx.AbstractVar[Float[Array, ""]]
    shape: eqx.AbstractVar[tuple[int, ...]]
    shared_ranks: eqx.AbstractVar[tuple[int, ...]]
    local_ranks: eqx.AbstractVar[tuple[int, ...]]
    orthogonal_modes: eqx.AbstractVar[tuple[int, ...]]

    def prepare(self, data: Samples, client_id, rounds) -> TuckerMember:
        """Return the samples as tensors whose squares add up to the mean energy."""
        scale = jax.lax.rsqrt(jnp.maximum(data.count, 1))
        values = data.values.astype(data.count.dtype) * scale
        return TuckerMember(values.reshape(-1, *self.shape), jnp.sum(values**2))

    @property
    def modes(self) -> range:
        """The modes, counted from 0."""
        return range(len(self.shape))

    def aligned(self, shared: ModeFactors, local: ModeFactors) -> Pair:
        """Make factors orthonormal, and local ones orthogonal to shared ones in orthogonal modes.

        A lossy channel changes shared factors, and a client may have missed updates.
        """
        for k in self.modes:
            if k in self.orthogonal_modes:
                # The first columns of a QR factor do not depend on the last: the shared span is
                # kept, and only the local factor is projected.
                joint = orthonormalize(jnp.concatenate([shared[k], local[k]], axis=1))
                local = replaced(local, k, joint[:, self.shared_ranks[k] :])
                shared = replaced(shared, k, joint[:, : self.shared_ranks[k]])
            else:
                shared = replaced(shared, k, orthonormalize(shared[k]))
        return Pair(shared, local)

    def shared_moment(self, k: int, data: TuckerMember, pair: Pair) -> Second:
        """Return a client's second moment in a mode, whose energy the shared factor captures."""
        rest = mode_products(data.values, pair.shared, but=k)
        if self.orthogonal_modes == (k,):
            # In all other cases the local part is orthogonal to other modes' shared factors.
            own = mode_products(data.values, pair.local)
            for m, (shared, local) in enumerate(zip(*pair, strict=True)):
                own = _times(own, local.T if m == k else matmul(local.T, shared), m)
            rest = rest - own
        return second(rest, k)

    def update_shared(self, k: int, moment: Second, before: Factor) -> Factor:
        """Return the best shared factor of a mode, near the one before."""
        return top_eigenvectors(moment + self._proximal(before), self.shared_ranks[k])[1]

    def first_local(self, shared: ModeFactors, data: TuckerMember) -> ModeFactors:
        """Return the best local factors of each mode by itself, beside the shared part."""
        rest = data.values
        for k in self.orthogonal_modes:
            factor = orthonormalize(shared[k])
            rest = rest - _times(rest, matmul(factor, factor.T), k)
        return tuple(self._best_local(k, second(rest, k), shared[k]) for k in self.modes)

    def update_local(self, k: int, data: TuckerMember, pair: Pair, before: LocalFactor) -> Updated:
        """Replace the local factor of a mode by the best one, near the one before."""
        # The shared part has no influence: it is orthogonal to the local factor of another mode,
        # or projected out in this one.
        moment = second(mode_products(data.values, pair.local, but=k), k)
        factor = self._best_local(k, moment + self._proximal(before), pair.shared[k])
        return Updated(replaced(pair.local, k, factor), energy(moment, factor))

    def update_all_local(
        self, shared: ModeFactors, local: ModeFactors, data: TuckerMember
    ) -> ModeFactors:
        """Update a client's local factors of all modes in turn."""
        pair = self.aligned(shared, local)
        for k in self.modes:
            pair = Pair(pair.shared, self.update_local(k, data, pair, local[k]).local)
        return pair.local

    def _best_local(self, k: int, moment: Second, shared: Factor) -> LocalFactor:
        if k in self.orthogonal_modes:
            return best_local(Moment.from_dense(moment), shared, self.local_ranks[k])
        return top_eigenvectors(moment, self.local_ranks[k])[1]

    def _proximal(self, before: Factor) -> Second:
        # ‖UUᵀ - U'U'ᵀ‖² = 2 (r - tr UᵀU'U'ᵀU), so the proximal term adds this to the matrix whose
        # top eigenvectors are the update.
        return 2 * self.proximal.astype(before.dtype) * matmul(before, before.T)


def kronecker_product(factors: ModeFactors) -> Frame:
    """Return the Kronecker product of factors: components of features in row-major order."""
    return reduce(jnp.kron, factors)


def factors_of(components: Frame, shape: tuple[int, ...], ranks: tuple[int, ...]) -> ModeFactors:
    """Return the best factor of each mode: exact for Kronecker products, up to rotations."""
    tensors = components.T.reshape(-1, *shape)
    return tuple(top_eigenvectors(second(tensors, k), rank)[1] for k, rank in enumerate(ranks))


def nearest(basis: Frame, other: Frame) -> Frame:
    """Return the orthonormal basis of the same span nearest to another."""
    return matmul(basis, polar(matmul(basis.T, other)))


def mode_products(values: Tensors, factors: ModeFactors, but: int | None = None) -> Tensors:
    """Multiply all modes of each tensor, but one, by factors."""
    for k, factor in enumerate(factors):
        if k != but:
            values = _times(values, factor, k)
    return values


def second(values: Tensors, mode: int) -> Second:
    """Return the sum of the products of unfoldings in a mode with their transposes."""
    unfolded = jnp.moveaxis(values, mode + 1, 0).reshape(values.shape[mode + 1], -1)
    return jnp.matmul(unfolded, unfolded.T, precision=chosen_precision())


def energy(moment: Second, factor: Factor) -> Scalar:
    """Return the energy that a factor captures."""
    return jnp.vdot(factor, matmul(moment, factor))


def replaced(factors: ModeFactors, mode: int, factor: Float[Array, "_ _"]) -> ModeFactors:
    """Replace the factor of a mode."""
    return (*factors[:mode], factor, *factors[mode + 1 :])


def _times(values: Tensors, matrix: Float[Array, "size other"], mode: int) -> Tensors:
    """Multiply a mode of each tensor by a matrix from the right."""
    product = jnp.tensordot(values, matrix, (mode + 1, 0), precision=chosen_precision())
    return jnp.moveaxis(product, -1, mode + 1)
