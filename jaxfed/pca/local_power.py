"""LocalPower: subspace iteration with several products at each client before a message.

Source: Li, Wang, Chen & Zhang (2021), Communication-efficient distributed SVD via local power
iterations; with the decay that Wang, Liu & Zhang (2022), section 5.3, compare with.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jaxfed.core.aggregation import Stack, Sum
from jaxfed.core.checks import check_count, check_name
from jaxfed.linalg import orthonormalize, polar
from jaxfed.pca._components import Frame
from jaxfed.pca._consensus import Eigensolver, Server, left_over


class Broadcast(NamedTuple):
    """Downlink."""

    shared: Frame
    steps: Int[Array, ""]  # products each client is to make this round


class Aligned(NamedTuple):
    """A product `A_i A_iᵀ Q_i` with what the server needs to align it."""

    product: Frame
    basis: Frame  # Q_i
    number: Int[Array, ""]  # 1 + the client's id


class Power(NamedTuple):
    """Uplink."""

    product: PyTree  # Frame, or Aligned
    captured: PyTree  # of one number


class PowerServer(NamedTuple):
    """The server's state."""

    common: Server
    steps: Int[Array, ""]


class LocalPower(Eigensolver):
    r"""Principal components of all samples together by local power iterations.

    In a round with q local steps client i starts at the common Z, makes q products with
    \(A_i A_i^\top\), orthonormalizes between them, and sends the last product as it is; the
    server sums and orthonormalizes. q starts at `local_steps` and is halved every round until it
    is one: from then on this is subspace iteration, at its rate and as open about the data.

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
            alignment: whether the server turns the clients' bases towards that of the client
                with the smallest id before it sums: `"none"`; `"sign"`, column by column; or
                `"procrustes"`, \(\min_O |Q_i O - Q_0|_F\). The bases here have signs that
                agree already, so that `"sign"` rarely differs from `"none"`. Aligning needs
                every client's own message and its basis beside the product, twice the numbers
                and no sum. (They are counted in every round, though rounds with one local step
                do not need them.)
            stop: what `tol` is compared with: `"objective"`, the relative change of the captured
                energy, rule (27) of Wang, Liu & Zhang (2022); or `"kkt"`, the scaled KKT
                violation, which is known once there is one local step and infinite before.

        Raises:
            ValueError: if `rank` or `local_steps` is not a positive whole number, or a name is
                unknown.
        """
        super().__init__(rank, stop)
        check_count("local_steps", local_steps)
        check_name("alignment", alignment, ("none", "sign", "procrustes"))
        self.local_steps, self.alignment = local_steps, alignment

    @property
    def _products(self):
        return 1

    def prepare(self, data, client_id, rounds):
        """The client's matrix, and its number, by which the server tells whom to align with."""
        return super().prepare(data, client_id, rounds), client_id + 1

    def client_init(self, key, data, start):
        """As every eigensolver."""
        return super().client_init(key, data[0], start)

    def server_init(self, key, uplink, start):
        """The first components, and the most local steps."""
        steps = jnp.asarray(self.local_steps, jnp.int32)
        return PowerServer(super().server_init(key, uplink, start), steps)

    def downlink(self, server):
        """The components, and how many products to make."""
        return Broadcast(server.common.shared, server.steps)

    @property
    def aggregation(self):
        """A sum; bases that are to be aligned come one by one."""
        return Power(Sum() if self.alignment == "none" else Stack(), Sum())

    def client_step(self, key, downlink, local, data):
        """As many products with the client's matrix as the server asks for."""
        del key
        (member, number), (z, steps) = data, downlink
        first = member.moment.mv(z)

        def another(pair, step):
            basis = orthonormalize(pair[1])
            # A loop of fixed length, unlike one that stops, has a reverse derivative.
            go_on = step < steps
            made = basis, member.moment.mv(basis)
            return jax.tree.map(lambda new, old: jnp.where(go_on, new, old), made, pair), None

        basis, product = jax.lax.cond(
            steps > 1,
            lambda pair: jax.lax.scan(another, pair, jnp.arange(1, self.local_steps))[0],
            lambda pair: pair,
            (z, first),
        )
        captured = jnp.vdot(z, first)
        message = product if self.alignment == "none" else Aligned(product, basis, number)
        return Power(message, captured), local, {"objective": left_over(member, captured)}

    def server_step(self, key, server, uplink):
        """An orthonormal basis of the aligned sum; half the local steps."""
        del key
        common, steps = server
        product = uplink.product
        if self.alignment != "none":
            product = self._aligned_sum(product)
        common = self._renewed(common, product, uplink.captured, product)
        if common.kkt is not None:
            # Of several local products the sum tells nothing about A Aᵀ Z.
            common = common._replace(kkt=jnp.where(steps > 1, jnp.inf, common.kkt))
        return PowerServer(common, jnp.maximum(steps // 2, 1))

    def _aligned_sum(self, clients: Aligned) -> Frame:
        # Who is absent has the number zero, and zeros for a product.
        order = jnp.where(clients.number > 0, clients.number, jnp.iinfo(jnp.int32).max)
        reference = clients.basis[jnp.argmin(order)]

        def aligned(product, basis):
            overlap = basis.T @ reference
            if self.alignment == "sign":
                return product * jnp.where(jnp.diagonal(overlap) < 0, -1, 1)
            return product @ polar(overlap)

        return jax.vmap(aligned)(clients.product, clients.basis).sum(0)

    def server_diagnostics(self, server):
        """As every eigensolver."""
        return super().server_diagnostics(server.common)

    def shared_result(self, server):
        """The components."""
        return server.common.shared

    def _components(self, downlink):
        return downlink.shared
