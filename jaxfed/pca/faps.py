"""FAPS: federated principal components by a consensus of subspaces (projection splitting).

    min over Z, X_1..X_d  - sum_i |A_iᵀ X_i|_F² / 2   with orthonormal columns and X_i X_iᵀ = Z Zᵀ

by a method of multipliers. The multiplier of client i's constraint is
`Λ_i = X_i W_iᵀ + W_i X_iᵀ` with `W_i = -(I - X_i X_iᵀ) A_i A_iᵀ X_i`, two thin factors.

Source: Wang, Liu & Zhang (2022), Seeking consensus on subspaces in federated principal component
analysis, Algorithm 1; equation numbers below are those of the paper.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed._checks import shown
from jaxfed.contract import Diagnostics, check_count, check_name, check_positive, hyperparameter
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import orthonormalize
from jaxfed.linalg.sums import scaled_norm
from jaxfed.pca._consensus import (
    ConsensusMember,
    ConsensusServer,
    HoldsBasis,
    residual_variance,
)
from jaxfed.pca.components import Frame, deflate
from jaxfed.pca.subspace_iteration import SubspaceIteration

# Rule (25): every PERIOD rounds the penalty grows, unless the distance between the client's and the
# server's subspace has since fallen by the factor DECREASE.
PERIOD, DECREASE = 5, 1.01


class Consensus(NamedTuple):
    """A client's state."""

    x: Frame  # X_i
    image: Frame  # A_i A_iᵀ X_i, which gives W_i
    penalty: Float[Array, ""]  # beta_i
    distance: Float[Array, ""]  # |X_i X_iᵀ - Z Zᵀ|_F when rule (25) was last applied
    age: Int[Array, ""]  # number of rounds in which the client took part


class Masked(NamedTuple):
    """Uplink."""

    product: Frame  # Q_i Z
    captured: Float[Array, ""] | None  # |A_iᵀ Z|_F²
    gradient: Frame | None  # A_i A_iᵀ Z, for the KKT violation


class FAPS(HoldsBasis):
    r"""Principal components of all samples together by projection splitting.

    In each round, client i moves its own basis \(X_i\) towards the top eigenvectors of
    \(H_i = A_i A_i^\top + \Lambda_i + \beta_i ZZ^\top\) (12) by a few steps of subspace iteration,
    updates \(W_i\) (16), and sends \(Q_i Z\) with \(Q_i = \beta_i X_i X_i^\top - \Lambda_i\) (18).
    The server sums and orthonormalizes (19).

    The number of rounds depends on the local steps. One step is always slower than
    `SubspaceIteration`. With the printed tolerance, the relative-change rule takes only single
    steps after about ten rounds, because it measures how far a basis moves and not how well the
    problem is solved. Five steps take about a third of the rounds of subspace iteration if the
    spectrum decays slowly and the clients are alike; more steps can oscillate. With large ranks,
    few samples per client and many clients (\(\sum_i \beta_i > \lambda_{p+1}\)), every rule is
    slower than subspace iteration. The penalty is a multiple of the strongest direction's energy,
    so directions that are some twenty times weaker hardly move: a warning says so, since a run may
    end before it has found them.

    All samples count equally: \(A_i A_i^\top\) is the sum over a client's samples.
    """

    most_unlike = 20.0  # since penalties are multiples of the strongest direction's energy

    penalty: Float[Array, ""]
    penalty_growth: Float[Array, ""] | None
    local_tol: Float[Array, ""] | None
    local_solver: Literal["fixed", "relative_change", "sufficient_decrease"] = eqx.field(
        static=True
    )
    local_steps: int = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        penalty: float | Array = 0.15,
        penalty_growth: float | Array | None = 0.1,
        local_solver: Literal["fixed", "relative_change", "sufficient_decrease"] = "fixed",
        local_steps: int | None = None,
        local_tol: float | Array | None = None,
        stop: Literal["objective", "kkt"] | None = None,
    ):
        r"""Set up the algorithm.

        Args:
            rank: number of components p.
            penalty: the first \(\beta_i\), as a multiple of \(|A_i|_2^2\).
            penalty_growth: relative increase of \(\beta_i\) after any five rounds in which the
                client's and the server's subspaces have come no nearer (25); None for no
                increase.
            local_solver: when the local iteration stops. `"fixed"`: after `local_steps`.
                `"relative_change"` (26): once a step changes the basis by at most `local_tol` of
                its norm, as printed. `"sufficient_decrease"` (14): once the local KKT violation has
                fallen to `local_tol` of its first value. The last two have no reverse-mode
                derivative.
            local_steps: local steps per round: by default 5 with `"fixed"`, otherwise a maximum of
                500.
            local_tol: tolerance of the local rule: by default 0.01 for `"relative_change"`, 0.5 for
                `"sufficient_decrease"`.
            stop: what `tol` applies to: by default the stopping measure of other
                algorithms. `"objective"`: the relative change of the captured energy,
                rule (27), which costs one number per round. Because the iteration may oscillate, it
                can be met by chance far from a solution. `"kkt"`: the scaled KKT violation, which
                doubles the messages.

        Raises:
            ValueError: if `rank` or `local_steps` is not a positive whole number, a name is
                unknown, a penalty, its growth or a tolerance is not positive and finite, or the
                rule does not use the given tolerance.
        """
        self._set(rank, stop)
        rules = {"fixed": (5, None), "relative_change": (500, 1e-2)}
        rules["sufficient_decrease"] = (500, 0.5)
        check_name("local_solver", local_solver, tuple(rules))
        steps, tolerance = rules[local_solver]
        steps = steps if local_steps is None else local_steps
        check_count("local_steps", steps)
        if local_tol is not None and tolerance is None:
            raise ValueError(f"local_tol: local_solver='fixed' has none, got {shown(local_tol)}")
        check_positive("penalty", penalty)
        check_positive("penalty_growth", penalty_growth, optional=True)
        check_positive("local_tol", local_tol, optional=True)
        self.penalty = hyperparameter(penalty)
        self.penalty_growth = hyperparameter(penalty_growth)
        self.local_tol = hyperparameter(tolerance if local_tol is None else local_tol)
        self.local_solver, self.local_steps = local_solver, steps

    def through(self) -> SubspaceIteration:
        """Return subspace iteration, which has the same solution."""
        return SubspaceIteration(self.rank, retraction="polar")

    def _products(self, rounds: int) -> int:
        return rounds * (self.local_steps + 1 if self.local_solver == "fixed" else 2)

    def client_init(self, key, downlink: Frame, data: ConsensusMember, warm_start) -> Consensus:
        """Return X_i = Z with its multiplier."""
        # |A_i|_2². The paper's initial penalty is 0.15 times that (Section 5.2).
        norm = data.moment.largest_eigenvalue()
        return Consensus(
            x=downlink,
            image=data.moment.mv(downlink),
            penalty=self.penalty.astype(norm.dtype) * norm,
            # Zero, since X_i^(0) = Z^(0). So rule (25) raises every penalty at k = 5.
            distance=jnp.zeros_like(norm),
            age=jnp.zeros((), jnp.int32),
        )

    def client_step(self, key, downlink: Frame, local: Consensus, data: ConsensusMember):
        """Improve the local solution, update the multiplier, send Q_i Z."""
        # Lines 5 to 7 of Algorithm 1. The penalty that rule (25) gives below, β^(k+1), serves from
        # the next round on.
        z, moment, penalty = downlink, data.moment, local.penalty
        x, image, steps = self._solve(local, z, data)
        w = -deflate(image, x)  # (16)
        product = x @ (penalty * (x.T @ z) - w.T @ z) - w @ (x.T @ z)  # (18), (19)

        gradient = moment.mv(z) if self.stop == "kkt" else None
        captured = moment.quadratic(z) if gradient is None else jnp.vdot(z, gradient)
        diagnostics = {
            "objective": residual_variance(data, captured),
            "local_steps": steps.astype(z.dtype),
            "penalty": penalty,
        }
        uplink = Masked(product, captured if gradient is None else None, gradient)
        return (
            Sum(uplink),
            Consensus(x, image, *self._adapted(local, z), local.age + 1),
            diagnostics,
        )

    def server_step(
        self, key, server: ConsensusServer, uplink: Masked
    ) -> tuple[ConsensusServer, Diagnostics]:
        """Take one step of subspace iteration on the sum of the Q_i."""
        product, captured, gradient = uplink
        if gradient is not None:
            captured = jnp.vdot(server.shared, gradient)
        assert captured is not None
        measured = self._measures(server, captured, gradient)
        return ConsensusServer(orthonormalize(product), captured, server.energy), measured

    def _adapted(self, local: Consensus, z: Frame) -> tuple[Array, Array]:
        """Return the next penalty by rule (25), and the distance to compare with next."""
        if self.penalty_growth is None:
            return local.penalty, local.distance
        # The distance of X^(k) and Z^(k): `local.x` is the basis before this round's steps. From a
        # residual, since inner products lose all digits of a small distance. It needs no
        # derivative, and a norm has none at zero.
        distance = 2**0.5 * scaled_norm(jax.lax.stop_gradient(deflate(z, local.x)))
        due = local.age % PERIOD == 0
        grows = due & (local.age > 0) & (local.distance <= DECREASE * distance)
        grown = (1 + self.penalty_growth.astype(z.dtype)) * local.penalty
        return jnp.where(grows, grown, local.penalty), jnp.where(due, distance, local.distance)

    def _solve(
        self, local: Consensus, z: Frame, data: ConsensusMember
    ) -> tuple[Frame, Frame, Array]:
        """Run subspace iteration on H_i from the client's own basis X, by the local rule.

        Returns:
            The basis X, A_i A_iᵀ X, and the number of steps.
        """
        # H_i is fixed during the loop: W and the penalty are those of X^(k). Line 5 of Algorithm 1
        # wants (13) and (14); the experiments of the paper stop by (26) instead (Section 5.2).
        initial, image, penalty, *_ = local
        moment, w = data.moment, -deflate(image, initial)
        empty = moment.trace == 0

        def h(y, image):
            """Return H_i Y from A_i A_iᵀ Y, (12) with (15)."""
            product = image + initial @ (w.T @ y) + w @ (initial.T @ y)
            # A client whose samples are all zero keeps its basis.
            return jnp.where(empty, y, product + penalty * (z @ (z.T @ y)))

        if self.local_solver == "fixed":

            def improved(_, state):
                x = orthonormalize(h(*state))
                return x, moment.mv(x)

            x, image = jax.lax.fori_loop(0, self.local_steps, improved, (initial, image))
            return x, image, jnp.asarray(self.local_steps)

        assert self.local_tol is not None
        tol = self.local_tol.astype(z.dtype)
        eps = jnp.finfo(z.dtype).eps

        def residual(x, hx):
            return scaled_norm(deflate(hx, x))

        first = h(initial, image)
        wanted = tol * residual(initial, first)

        def step(state):
            _, x, _, hx, done = state
            new = orthonormalize(hx)
            image = moment.mv(new)
            hnew = h(new, image)
            if self.local_solver == "relative_change":
                met = scaled_norm(new - x) <= tol * scaled_norm(new)  # (26)
            else:
                # (14); the violation cannot fall below its rounding error.
                slack = 8 * eps * scaled_norm(hnew)
                met = residual(new, hnew) <= jnp.maximum(wanted, slack)
            return met, new, image, hnew, done + 1

        _, x, image, _, steps = jax.lax.while_loop(
            lambda state: ~state[0] & (state[4] < self.local_steps),
            step,
            (jnp.zeros((), bool), initial, image, first, jnp.zeros((), jnp.int32)),
        )
        return x, image, steps

    def client_result(self, downlink: Frame, local: Consensus, data: ConsensusMember) -> None:
        """Return None: there are no local components."""
