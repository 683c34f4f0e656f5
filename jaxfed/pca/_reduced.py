"""Personalized PCA as a problem in the shared components alone, for derivatives and `VarProPerPCA`.

    F(U) = mean_i max_V [ tr UᵀS_iU + (1 - τ) tr VᵀS_iV ] / 2   over orthonormal V orthogonal to U,

where τ is the local penalty. The gradient on the Grassmannian is
(I - UUᵀ) mean_i (I - (1 - τ) V_iV_iᵀ) S_i U.

Source: the objective is (7) of Shi & Kontar (2024); eliminating the local components is variable
projection (Golub & Pereyra 1973).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import Algorithm, Bases, HasBases
from jaxfed.linalg import Moment, polar, thin_product
from jaxfed.linalg.division import ratio
from jaxfed.pca.components import Frame, best_local, deflate, uncaptured

Active = Float[Array, " local_rank"] | None


class Uplink(NamedTuple):
    """Uplink: a client's part of the gradient and of the objective."""

    product: Frame  # (I - (1 - τ) V Vᵀ) S U
    value: Float[Array, ""]


def evaluate(
    moment: Moment, shared: Frame, rank: int, active: Active, penalty: Float[Array, ""]
) -> tuple[Uplink, Float[Array, ""]]:
    """Return ONE client's part of gradient and value at U, and the variance it leaves."""
    # By the envelope theorem the derivative by U is S U minus V times (1 - τ) VᵀS U, the multiplier
    # of the constraint VᵀU = 0; how V changes with U does not count.
    keep = 1 - penalty.astype(shared.dtype)
    local = best_local(moment, shared, rank, active)
    product = moment.mv(jnp.concatenate([shared, local], axis=1))
    by_shared, by_local = jnp.split(product, [shared.shape[1]], axis=1)
    by_shared_part, by_local_part = jnp.vdot(shared, by_shared), jnp.vdot(local, by_local)
    uplink = Uplink(
        by_shared - keep * thin_product(local, local.T @ by_shared),
        (by_shared_part + keep * by_local_part) / 2,
    )
    return uplink, uncaptured(moment, by_shared_part + by_local_part)


class Reduced(Algorithm, HasBases):
    """Gradient ascent of F from a solution, whose round gives the solution's implicit derivative.

    The Jacobian of the round is I + t ∇²F at the solution, for any step size t. The local state
    does not change; it only fixes the basis of the best local components.
    """

    model: Algorithm  # prepares the data: `PerPCA`
    penalty: Float[Array, ""]  # of the local components
    rank: int = eqx.field(static=True)  # of the local components

    def prepare(self, data, client_id, rounds):
        """Return the client's second moment, with a mask if ranks differ."""
        return self.model.prepare(data, client_id, rounds)

    def server_init(self, key, first, like, warm_start):
        """Return the shared components of the solution."""
        assert warm_start is not None
        return warm_start.shared

    def downlink(self, server):
        """Return the shared components."""
        return server

    def client_init(self, key, downlink, data, warm_start):
        """Return the local components of the solution."""
        assert warm_start is not None
        return warm_start.local

    def client_step(self, key, downlink, local, data):
        """Evaluate the gradient and the objective with the best local components."""
        uplink, rest = evaluate(data.moment, downlink, self.rank, data.active, self.penalty)
        return uplink.product, local, {"objective": rest}

    def server_step(self, key, server, uplink):
        """Take a gradient step of length one over the gradient's norm."""
        # Any step size gives the same implicit derivative as long as it is a constant: see the
        # class.
        size = jax.lax.stop_gradient(jnp.linalg.norm(uplink, 2))
        scale = ratio(jnp.ones_like(size), size)
        return polar(server + scale * deflate(uplink, server)), {}

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

    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Return the shared components and each client's local ones."""
        return Bases(shared=(server,), own=(local,))
