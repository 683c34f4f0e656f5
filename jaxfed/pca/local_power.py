"""LocalPower: subspace iteration in which clients make several products between messages.

Source: Li, Wang, Chen & Zhang (2021), Communication-efficient distributed SVD via local power
iterations; with the decay that Wang, Liu & Zhang (2022), Section 5.3, use for comparison.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed._checks import check_count, check_name
from jaxfed.core.contract.reduction import Gather, Sum
from jaxfed.linalg import orthonormalize, polar
from jaxfed.pca._consensus import ConsensusMember, ConsensusServer, Measured, residual_variance
from jaxfed.pca.components import Frame
from jaxfed.pca.subspace_iteration import SubspaceIteration


class Downlink(NamedTuple):
    """Downlink."""

    shared: Frame
    steps: Int[Array, ""]  # products that each client makes this round


class Aligned(NamedTuple):
    """A product `A_i A_iᵀ Q_i`, with what the server needs to align it."""

    product: Frame
    basis: Frame  # Q_i
    number: Int[Array, ""]  # 1 + the client's id


class PowerServer(NamedTuple):
    """The server's state."""

    common: ConsensusServer
    steps: Int[Array, ""]


class LocalPower(Measured):
    r"""Principal components of all samples together by local power iterations.

    In a round with q local steps, client i starts at the common Z, makes q products with
    \(A_i A_i^\top\), orthonormalizes in between, and sends the last product as it is. The server
    sums the products and orthonormalizes. q starts at `local_steps` and is halved every round until
    it is one. From then on this is subspace iteration, with the same convergence and the same
    leakage of information.

    All samples count equally: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    local_steps: int = eqx.field(static=True)
    alignment: Literal["none", "sign", "procrustes"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        local_steps: int = 8,
        alignment: Literal["none", "sign", "procrustes"] = "none",
        stop: Literal["objective", "kkt"] | None = None,
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            local_steps: products in the first round.
            alignment: whether the server aligns the clients' bases with that of the client with the
                smallest id before it sums: `"none"`; `"sign"`, column by column; or
                `"procrustes"`, \(\min_O |Q_i O - Q_0|_F\). The signs of the bases already agree
                here, so `"sign"` rarely differs from `"none"`. Alignment needs every client's own
                message, with its basis beside the product: twice the numbers, and no sum. (They are
                counted in every round, although rounds with one local step do not need them.)
            stop: what `tol` applies to: by default the stopping measure of other
                algorithms. `"objective"`: the relative change of the captured energy,
                rule (27) of Wang, Liu & Zhang (2022). `"kkt"`: the scaled KKT violation, which is
                infinite until there is only one local step.

        Raises:
            ValueError: if `rank` or `local_steps` is not a positive whole number, or a name is
                unknown.
        """
        self._set(rank, stop)
        check_count("local_steps", local_steps)
        check_name("alignment", alignment, ("none", "sign", "procrustes"))
        self.local_steps, self.alignment = local_steps, alignment

    def through(self) -> SubspaceIteration:
        """Return subspace iteration, which has the same solution."""
        return SubspaceIteration(self.rank, retraction="polar")

    def _products(self, rounds: int) -> int:
        return rounds

    def server_init(self, key, first: Array | None, like, warm_start) -> PowerServer:
        """Return the first components and the first number of local steps."""
        steps = jnp.asarray(self.local_steps, jnp.int32)
        return PowerServer(self._first(key, first, like, warm_start), steps)

    def client_init(self, key, downlink: Downlink, data: ConsensusMember, warm_start) -> None:
        """Return None: clients keep no state."""

    def downlink(self, server: PowerServer) -> Downlink:
        """Return the components and the number of products to make."""
        return Downlink(server.common.shared, server.steps)

    def feasible(self, downlink: Downlink, data) -> Downlink:
        """Return the downlink with orthonormal components."""
        return downlink._replace(shared=orthonormalize(downlink.shared))

    def client_step(self, key, downlink: Downlink, local: None, data: ConsensusMember):
        """Make as many products with the client's matrix as the server asks for."""
        z, steps = downlink
        first = data.moment.mv(z)

        def another(pair, step):
            basis = orthonormalize(pair[1])
            # A loop of fixed length has a reverse-mode derivative; a while loop has none.
            new = basis, data.moment.mv(basis)
            return jax.tree.map(lambda new, old: jnp.where(step < steps, new, old), new, pair), None

        # `steps` is the same for all clients, so this stays a branch when mapped over them, and
        # rounds with one step, nearly all, skip the loop.
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
        """Orthonormalize the aligned sum, and halve the local steps."""
        (common, steps), (product, captured) = server, uplink
        if isinstance(product, Aligned):
            product = self._aligned_sum(product)
        # A sum of repeated local products is not A Aᵀ Z.
        measured = self._measures(common, captured, product, exact=steps <= 1)
        common = ConsensusServer(orthonormalize(product), captured, common.energy)
        return PowerServer(common, jnp.maximum(steps // 2, 1)), measured

    def _aligned_sum(self, clients: Aligned) -> Frame:
        """Return the sum of all clients' products, each aligned with one client's basis."""
        # Absent clients have number zero and zero products.
        order = jnp.where(clients.number > 0, clients.number, jnp.iinfo(jnp.int32).max)
        reference = clients.basis[jnp.argmin(order)]

        def aligned(product, basis):
            overlap = basis.T @ reference
            if self.alignment == "sign":
                return product * jnp.where(jnp.diagonal(overlap) < 0, -1, 1)
            return product @ polar(overlap)

        return jax.vmap(aligned)(clients.product, clients.basis).sum(0)

    def shared_result(self, server: PowerServer) -> Frame:
        """Return the components."""
        return server.common.shared
