"""LocalPower: subspace iteration with several products at each client before a message.

Source: Li, Wang, Chen & Zhang (2021), Communication-efficient distributed SVD via local power
iterations; with the decay that Wang, Liu & Zhang (2022), section 5.3, compare with.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed._checks import check_count, check_name
from jaxfed.core.contract.reduction import Gather, Sum
from jaxfed.linalg import orthonormalize, polar
from jaxfed.pca._consensus import Measured, Member, Server, residual_variance
from jaxfed.pca.components import Frame
from jaxfed.pca.subspace_iteration import Accelerated


class Broadcast(NamedTuple):
    """Downlink."""

    shared: Frame
    steps: Int[Array, ""]  # products each client is to make this round


class Aligned(NamedTuple):
    """A product `A_i A_iᵀ Q_i` with what the server needs to align it."""

    product: Frame
    basis: Frame  # Q_i
    number: Int[Array, ""]  # 1 + the client's id


class PowerServer(NamedTuple):
    """The server's state."""

    common: Server
    steps: Int[Array, ""]


class LocalPower(Accelerated, Measured):
    r"""Principal components of all samples together by local power iterations.

    In a round with q local steps client i starts at the common Z, makes q products with
    \(A_i A_i^\top\), orthonormalizes between them, and sends the last product as it is; the
    server sums and orthonormalizes. q starts at `local_steps` and is halved every round until it
    is one. From then on this is subspace iteration, which converges as fast and reveals as much.

    Every sample counts the same: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    local_steps: int = eqx.field(static=True)
    alignment: Literal["none", "sign", "procrustes"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        local_steps: int = 8,
        alignment: Literal["none", "sign", "procrustes"] = "none",
        stop: Literal["objective", "kkt"] = "objective",
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            local_steps: products of the first round.
            alignment: whether the server aligns the clients' bases with that of the client of
                smallest id before it sums: `"none"`; `"sign"`, column by column; or
                `"procrustes"`, \(\min_O |Q_i O - Q_0|_F\). The signs of bases here agree
                already, so `"sign"` rarely differs from `"none"`. Aligning needs every client's
                own message, with its basis beside the product: twice the numbers, and no sum.
                (They are counted in every round, though rounds with one local step do not need
                them.)
            stop: what `tol` is compared with: `"objective"`, the relative change of the captured
                energy, rule (27) of Wang, Liu & Zhang (2022); or `"kkt"`, the scaled KKT
                violation, which is known once there is one local step and infinite before.

        Raises:
            ValueError: if `rank` or `local_steps` is not a positive whole number, or a name is
                unknown.
        """
        self._set(rank, stop)
        check_count("local_steps", local_steps)
        check_name("alignment", alignment, ("none", "sign", "procrustes"))
        self.local_steps, self.alignment = local_steps, alignment

    def _products(self, rounds: int) -> int:
        return rounds

    def server_init(self, key, first: Array | None, like, start) -> PowerServer:
        """The first components, and the most local steps."""
        steps = jnp.asarray(self.local_steps, jnp.int32)
        return PowerServer(self._first(key, first, like, start), steps)

    def client_init(self, key, downlink: Broadcast, data: Member, start) -> None:
        """Clients keep nothing."""

    def downlink(self, server: PowerServer) -> Broadcast:
        """The components, and how many products to make."""
        return Broadcast(server.common.shared, server.steps)

    def client_step(self, key, downlink: Broadcast, local: None, data: Member):
        """As many products with the client's matrix as the server asks for."""
        z, steps = downlink
        first = data.moment.mv(z)

        def another(pair, step):
            basis = orthonormalize(pair[1])
            # A loop of fixed length has a reverse derivative; a while loop has none.
            new = basis, data.moment.mv(basis)
            return jax.tree.map(lambda new, old: jnp.where(step < steps, new, old), new, pair), None

        basis, product = jax.lax.cond(
            steps > 1,
            lambda pair: jax.lax.scan(another, pair, jnp.arange(1, self.local_steps))[0],
            lambda pair: pair,
            (z, first),
        )
        captured = jnp.vdot(z, first)
        if self.alignment == "none":
            message = Sum(product)
        else:
            message = Gather(Aligned(product, basis, data.client_id + 1))
        return (message, Sum(captured)), local, {"objective": residual_variance(data, captured)}

    def server_step(
        self, key, server: PowerServer, uplink: tuple[Frame | Aligned, Float[Array, ""]]
    ):
        """An orthonormal basis of the aligned sum; half the local steps."""
        (common, steps), (product, captured) = server, uplink
        if isinstance(product, Aligned):
            product = self._aligned_sum(product)
        # A sum of repeated local products is not A Aᵀ Z.
        measured = self._measures(common, captured, product, exact=steps <= 1)
        common = Server(orthonormalize(product), captured, common.energy)
        return PowerServer(common, jnp.maximum(steps // 2, 1)), measured

    def _aligned_sum(self, clients: Aligned) -> Frame:
        """The sum of all clients' products, each turned towards one client's basis."""
        # Absent clients have the number zero and products of zeros.
        order = jnp.where(clients.number > 0, clients.number, jnp.iinfo(jnp.int32).max)
        reference = clients.basis[jnp.argmin(order)]

        def aligned(product, basis):
            overlap = basis.T @ reference
            if self.alignment == "sign":
                return product * jnp.where(jnp.diagonal(overlap) < 0, -1, 1)
            return product @ polar(overlap)

        return jax.vmap(aligned)(clients.product, clients.basis).sum(0)

    def shared_result(self, server: PowerServer) -> Frame:
        """The components."""
        return server.common.shared
