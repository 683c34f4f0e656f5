"""Federated subspace iteration: the power method on a block, one product of the data a round.

    client:  Y_i = A_i A_iᵀ Z            server:  Z = orth(sum_i Y_i)

Source: Rutishauser (1970); the federated form is (2) of Wang, Liu & Zhang (2022), Seeking
consensus on subspaces in federated principal component analysis.
"""

from typing import Literal

import jax.numpy as jnp

from jaxfed.pca._consensus import Eigensolver, left_over


class SubspaceIteration(Eigensolver):
    r"""Principal components of all samples together by simultaneous subspace iteration ("SSI").

    Up and down the wire go `features × rank` numbers a round, and the server needs only the sum.
    The error shrinks by \(\lambda_{p+1} / \lambda_p\) a round, whatever the split over clients.
    The messages are linear in the data, so `features / rank` of them give a client's second
    moment away.

    Every sample counts the same: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    def __init__(self, rank: int, *, stop: Literal["objective", "kkt"] = "objective"):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            stop: what `tol` is compared with: `"objective"`, the relative change of the captured
                energy \(f(Z) = \sum_i |A_i^\top Z|_F^2\) from round to round, rule (27); or
                `"kkt"`, the scaled KKT violation
                \(|(I - ZZ^\top) A A^\top Z|_F / |A|_F^2\). Both cost no message but, for the
                second, one number at the start.

        Raises:
            ValueError: if `rank` is not a positive whole number or `stop` is unknown.
        """
        super().__init__(rank, stop)

    @property
    def _products(self):
        return 1

    def client_step(self, key, downlink, local, data):
        """One product with the client's matrix."""
        del key
        product = data.moment.mv(downlink)
        captured = jnp.vdot(downlink, product)
        return product, local, {"objective": left_over(data, captured)}

    def server_step(self, key, server, uplink):
        """An orthonormal basis of the sum."""
        del key
        return self._renewed(server, uplink, jnp.vdot(server.shared, uplink), uplink)
