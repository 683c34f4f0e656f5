"""Personalized PCA as a problem in the shared components alone, for derivatives and `VarProPerPCA`.

    F(U) = mean_i max_V [ tr UᵀS_iU + Σ_j g(λ_j) ] / 2   over orthonormal V orthogonal to U,

where λ_j are the variances of the local components, the columns of V. Without a penalty, g(λ) = λ.
The gradient on the Grassmannian is (I - UUᵀ) mean_i (I - V_i g'(Λ_i) V_iᵀ) S_i U.

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
from jaxfed.pca.components import Frame, best_local, uncaptured

Active = Float[Array, " local_rank"] | None
Scalar = Float[Array, ""]
Variances = Float[Array, " local_rank"]


class Penalty(NamedTuple):
    """What local variance counts less, in ONE client: g(λ) = λ - τ c (1 - exp(-λ / c)).

    A weak component counts the fraction τ less. A strong one, of a variance far above c, counts τ c
    less whatever its variance, so that g' is one and no client pulls the shared components to its
    own.
    """

    share: Scalar  # τ
    limit: Scalar  # c

    def counted(self, variances: Variances) -> tuple[Scalar, Variances]:
        """Return the sum of g, and g' of each component."""
        decay = jnp.where(self.limit > 0, jnp.exp(-ratio(variances, self.limit)), 0)
        share = self.share.astype(variances.dtype)
        return jnp.sum(variances - share * self.limit * (1 - decay)), 1 - share * decay


class Uplink(NamedTuple):
    """Uplink: a client's part of the gradient and of the objective."""

    product: Frame  # (I - V g'(Λ) Vᵀ) S U
    value: Scalar


def evaluate(
    moment: Moment, shared: Frame, rank: int, active: Active = None, penalty: Penalty | None = None
) -> tuple[Uplink, Scalar]:
    """Return ONE client's part of gradient and value at U, and the variance it leaves."""
    # By the envelope theorem the derivative by U is S U minus V times g'(Λ) VᵀS U, the multiplier
    # of the constraint VᵀU = 0; how V changes with U does not count.
    local = best_local(moment, shared, rank, active)
    product = moment.mv(jnp.concatenate([shared, local], axis=1))
    by_shared, by_local = jnp.split(product, [shared.shape[1]], axis=1)
    captured = jnp.vdot(shared, by_shared)
    variances = jnp.sum(local * by_local, axis=0)
    own = jnp.sum(variances)
    counted, slopes = (own, 1) if penalty is None else penalty.counted(variances)
    rest = by_shared - thin_product(local * slopes, local.T @ by_shared)
    return Uplink(rest, (captured + counted) / 2), uncaptured(moment, captured + own)


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
        uplink, rest = evaluate(data.moment, downlink, self.rank, data.active, penalty)
        return uplink.product, local, {"objective": rest}

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
