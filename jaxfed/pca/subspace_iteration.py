"""Federated subspace iteration: the power method on a block, one product of the data a round.

    client:  Y_i = A_i A_iᵀ Z            server:  Z = orth(sum_i Y_i)

Source: Rutishauser (1970); the federated form is (2) of Wang, Liu & Zhang (2022), Seeking
consensus on subspaces in federated principal component analysis.
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxfed.core.common.checks import check_name
from jaxfed.core.contract.algorithm import Diagnostics, Personalized
from jaxfed.core.contract.bases import Bases
from jaxfed.core.contract.fixed_point import HasBases
from jaxfed.core.contract.reduction import Sum
from jaxfed.pca._components import RETRACTIONS, Frame
from jaxfed.pca._consensus import (
    Eigensolver,
    Member,
    Server,
    check_arguments,
    energy_message,
    first_state,
    kkt_violation,
    measures,
    residual_variance,
)


class SubspaceIteration(Eigensolver, HasBases):
    r"""Principal components of all samples together by simultaneous subspace iteration ("SSI").

    Up and down the wire go `features × rank` numbers a round, and the server needs only the sum.
    The error shrinks by \(\lambda_{p+1} / \lambda_p\) a round, whatever the split over clients.
    The messages are linear in the data, so `features / rank` of them give a client's second
    moment away.

    Every sample counts the same: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    retraction: Literal["qr", "polar"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        stop: Literal["objective", "kkt"] = "objective",
        retraction: Literal["qr", "polar"] = "qr",
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            stop: what `tol` is compared with: `"objective"`, the relative change of the captured
                energy \(f(Z) = \sum_i |A_i^\top Z|_F^2\) from round to round, rule (27); or
                `"kkt"`, the scaled KKT violation
                \(|(I - ZZ^\top) A A^\top Z|_F / |A|_F^2\). Both cost no message but, for the
                second, one number at the start.
            retraction: which basis of the sum comes next: `"qr"`, by which the components come to
                be the eigenvectors in order, each at its own rate; or `"polar"`, the one nearest
                to the basis before, which comes to rest as soon as the subspace does.

        Raises:
            ValueError: if `rank` is not a positive whole number, or a name is unknown.
        """
        check_arguments(rank, stop)
        check_name("retraction", retraction, tuple(RETRACTIONS))
        self.rank, self.stop, self.retraction = rank, stop, retraction

    def _products(self, rounds: int) -> int:
        return rounds

    def first_message(
        self, key: Key[Array, ""], data: Member, start: Personalized | None
    ) -> Sum | None:
        """The samples' energy if a tolerance needs it."""
        del key, start
        return energy_message(data, self.stop)

    def server_init(
        self, key: Key[Array, ""], first: Array | None, like: Member, start: Personalized | None
    ) -> Server:
        """The first components."""
        return first_state(key, first, like, self.rank, start)

    def downlink(self, server: Server) -> Frame:
        """The components."""
        return server.shared

    def client_init(
        self, key: Key[Array, ""], downlink: Frame, data: Member, start: Personalized | None
    ) -> None:
        """Nothing of the client's own."""

    def client_step(
        self, key: Key[Array, ""], downlink: Frame, local: None, data: Member
    ) -> tuple[Sum, None, Diagnostics]:
        """One product with the client's matrix."""
        del key
        product = data.moment.mv(downlink)
        captured = jnp.vdot(downlink, product)
        return Sum(product), local, {"objective": residual_variance(data, captured)}

    def server_step(
        self, key: Key[Array, ""], server: Server, uplink: Frame
    ) -> tuple[Server, Diagnostics]:
        """An orthonormal basis of the sum."""
        del key
        captured = jnp.vdot(server.shared, uplink)
        measured = measures(server, captured, kkt_violation(server, uplink))
        shared = RETRACTIONS[self.retraction](uplink)
        return Server(shared, captured, server.energy), measured

    def through(self) -> "SubspaceIteration":
        """The one whose bases come to rest with the subspace."""
        if self.retraction == "polar":
            return self
        return SubspaceIteration(self.rank, stop=self.stop, retraction="polar")

    def bases(self, server: Server, local: None) -> Bases:
        """The components."""
        del local
        return Bases(shared=(server.shared,))
