"""Personalized PCA as a problem in the shared components alone.

    F(U) = mean_i max_V [ tr UᵀS_iU + tr g(VᵀS_iV) ] / 2   over orthonormal V orthogonal to U,

where g(K) = K without a penalty on local variance. The gradient on the Grassmannian is
(I - UUᵀ) mean_i (I - V_i g'(V_iᵀS_iV_i) V_iᵀ) S_i U.

Source: the objective is (7) of Shi & Kontar (2024); eliminating the local components is variable
projection (Golub & Pereyra 1973).
"""

from typing import NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.linalg import Moment, polar, thin_product
from jaxfed.linalg.division import ratio
from jaxfed.pca._ascent import SolutionAscent
from jaxfed.pca.components import Frame, Rows, best_local, mean_energies, uncaptured

Active = Float[Array, " local_rank"] | None
Scalar = Float[Array, ""]
Inner = Float[Array, "local_rank local_rank"]

# The limit of the penalty, relative to the weakest of a client's components.
LIMIT = 10.0


class Penalty(NamedTuple):
    """What local variance counts less, in ONE client: g(λ) = λ - τ c (1 - (1 + λ / 2c)⁻²).

    A weak component counts the fraction τ less. A strong one, of a variance far above c, counts τ c
    less whatever its variance: g' is then one, and no client pulls the shared components to its own
    strong ones.
    """

    share: Scalar  # τ
    limit: Scalar  # c, or 0 for no penalty

    def counted(self, inner: Inner) -> tuple[Scalar, Inner]:
        """Return tr g(K) and g'(K), where K is the second moment between the local components.

        Functions of the matrix, not of its eigenvalues, do not depend on the basis, as derivatives
        of `Moment.top` need it.
        """
        eye = jnp.eye(len(inner), dtype=inner.dtype)
        share = jnp.where(self.limit > 0, self.share.astype(inner.dtype), 0)
        kept = jnp.linalg.inv(eye + ratio(inner, 2 * self.limit))
        square = kept @ kept
        lost = share * self.limit * jnp.trace(eye - square)
        return jnp.trace(inner) - lost, eye - share * square @ kept


def limit_of(moment: Moment, rows: Rows, active: Active) -> Scalar:
    """Return ONE client's limit c of the penalty, from its top components, which `rows` hold.

    Args:
        moment: the client's second moment.
        rows: its top components, as many as are shared and local.
        active: as in `evaluate`.
    """
    variances = jnp.diagonal(moment.row_products(rows)[1])
    if active is not None:
        shared = jnp.ones(len(rows) - len(active), bool)
        variances = jnp.where(jnp.append(shared, active > 0), variances, variances[0])
    # Rounding alone is no variance.
    least = jnp.finfo(variances.dtype).eps * moment.dim * variances.max()
    weakest = variances.min()
    return LIMIT * jnp.where(weakest > least, weakest, 0)


class Uplink(NamedTuple):
    """Uplink: a client's part of the gradient and of the objective."""

    product: Frame  # (I - V g'(VᵀSV) Vᵀ) S U
    value: Scalar


def evaluate(
    moment: Moment, shared: Frame, rank: int, active: Active = None, penalty: Penalty | None = None
) -> tuple[Uplink, dict[str, Scalar]]:
    """Return ONE client's part of gradient and value at U, and what goes into the history."""
    # By the envelope theorem the derivative by U is S U minus V times g'(VᵀSV) VᵀS U, the
    # multiplier of the constraint VᵀU = 0; how V changes with U does not count.
    local = best_local(moment, shared, rank, active)
    together = jnp.concatenate([shared, local], axis=1)
    product = moment.mv(together)
    by_shared, by_local = jnp.split(product, [shared.shape[1]], axis=1)
    energies = jnp.sum(together * product, axis=0)
    captured, own = jnp.sum(energies[: shared.shape[1]]), jnp.sum(energies[shared.shape[1] :])
    counted, inside = own, local.T @ by_shared
    if penalty is not None:
        counted, slopes = penalty.counted(local.T @ by_local)
        inside = slopes @ inside
    rest = by_shared - thin_product(local, inside)
    found = {"objective": uncaptured(moment, captured + own)}
    found |= mean_energies(energies, shared.shape[1], active)
    return Uplink(rest, (captured + counted) / 2), found


@final
class Reduced(SolutionAscent):
    """Gradient ascent of F from a solution.

    The local state does not change; it only fixes the basis of the best local components.
    """

    penalty: Scalar | None  # τ, if local variance counts less
    rank: int = eqx.field(static=True)  # of the local components

    def client_step(self, key, downlink, local, data):
        """Evaluate the gradient and the objective with the best local components."""
        penalty = None if self.penalty is None else Penalty(self.penalty, data.limit)
        uplink, found = evaluate(data.moment, downlink, self.rank, data.active, penalty)
        return uplink.product, local, found

    def client_result(self, downlink, local, data):
        """Return the best local components, in the basis nearest to that of the solution."""
        moment = data.moment if data.unshrunk is None else data.unshrunk
        best = best_local(moment, downlink, self.rank, data.active)
        overlap = best.T @ local
        if data.active is not None:
            # Columns not in use are zero. Ones in their place keep the overlap regular and leave
            # the other columns alone.
            overlap = overlap + jnp.diag(1 - data.active)
        return best @ polar(overlap)
