"""Federated subspace iteration: the block power method, with one product per round.

    client:  Y_i = A_i A_iᵀ Z            server:  Z = orth(sum_i Y_i)

Source: Rutishauser (1970); the federated form is (2) of Wang, Liu & Zhang (2022), Seeking consensus
on subspaces in federated principal component analysis.
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp

from jaxfed.contract import Bases, Diagnostics, check_name
from jaxfed.core.contract.reduction import Sum
from jaxfed.pca._consensus import (
    ConsensusMember,
    ConsensusServer,
    HoldsBasis,
    residual_variance,
)
from jaxfed.pca.components import RETRACTIONS, Frame


class SubspaceIteration(HoldsBasis):
    r"""Principal components of all samples together by simultaneous subspace iteration ("SSI").

    A round sends `features × rank` numbers each way, and the server needs only the sum. Each round
    shrinks the error by \(\lambda_{p+1} / \lambda_p\), however the samples are spread over clients.
    The messages are linear in the data, so `features / rank` of them reveal a client's second
    moment.

    All samples count equally: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    retraction: Literal["qr", "polar"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        stop: Literal["objective", "kkt"] | None = None,
        retraction: Literal["qr", "polar"] = "qr",
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            stop: what `tol` applies to: by default the stopping measure of other
                algorithms. `"objective"`: the relative change of the captured energy
                \(f(Z) = \sum_i |A_i^\top Z|_F^2\) from round to round, rule (27). `"kkt"`: the
                scaled KKT violation \(|(I - ZZ^\top) A A^\top Z|_F / |A|_F^2\), which costs one
                number at the start; the former costs nothing.
            retraction: which basis of the sum comes next. With `"qr"` the components converge to
                the eigenvectors in order, each at its own rate. `"polar"` takes the basis nearest
                to the previous one, which converges as soon as the subspace does.

        Raises:
            ValueError: if `rank` is not a positive whole number, or a name is unknown.
        """
        self._set(rank, stop)
        check_name("retraction", retraction, tuple(RETRACTIONS))
        self.retraction = retraction

    def _products(self, rounds: int) -> int:
        return rounds

    def client_init(self, key, downlink: Frame, data: ConsensusMember, warm_start) -> None:
        """Return None: clients keep no state."""

    def client_step(self, key, downlink: Frame, local: None, data: ConsensusMember):
        """Multiply the components by the client's matrix."""
        product = data.moment.mv(downlink)
        captured = jnp.vdot(downlink, product)
        return Sum(product), local, {"objective": residual_variance(data, captured)}

    def server_step(
        self, key, server: ConsensusServer, uplink: Frame
    ) -> tuple[ConsensusServer, Diagnostics]:
        """Orthonormalize the sum."""
        # f(Z) = tr Zᵀ A Aᵀ Z is known from the sum, so rule (27) needs no extra number.
        captured = jnp.vdot(server.shared, uplink)
        measured = self._measures(server, captured, uplink)
        shared = RETRACTIONS[self.retraction](uplink)
        return ConsensusServer(shared, captured, server.energy), measured

    def through(self) -> "SubspaceIteration":
        """Return subspace iteration with polar factors, whose bases converge with the subspace."""
        if self.retraction == "polar":
            return self
        return SubspaceIteration(self.rank, stop=self.stop, retraction="polar")

    def bases(self, server: ConsensusServer, local: None) -> Bases:
        """Return the components."""
        return Bases(shared=(server.shared,))
