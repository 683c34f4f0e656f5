"""Stiefel gradient descent of personalized PCA, and power iteration in its place.

Source: Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features, JMLR,
Algorithm 2.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import Diagnostics
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca.components import Rows, deflate, mean_energies, multiplied, retract, uncaptured

Variant = Literal["tangent", "polar", "power"]
Retraction = Literal["polar", "qr"]
Scalar = Float[Array, ""]
Active = Float[Array, " local_rank"] | None


class Message(NamedTuple):
    """Uplink and downlink: the shared components, as rows, and what the step rule needs."""

    shared: Rows
    scalar: Scalar | None  # up: the objective; down: the curvature


class DescentServer(NamedTuple):
    """The server's state."""

    shared: Rows
    curvature: Scalar | None  # one over the step size; None if that is constant
    objective: Scalar | None  # of the previous round, if the step size can decay


class Descent(NamedTuple):
    """The rounds of `PerPCA(solver="gradient")`, with its settings."""

    shared_rank: int
    variant: Variant
    retraction: Retraction
    step_size: Scalar | None
    decay: Scalar | None

    @property
    def needs_curvature(self) -> bool:
        """Whether the step size follows from the clients' largest eigenvalue."""
        return self.step_size is None and self.variant != "power"

    def first_state(self, shared: Rows, curvature: Scalar | None) -> DescentServer:
        """Return the server's state before the first round."""
        if curvature is not None:
            curvature = curvature.astype(shared.dtype)
        if self.decay is None:
            return DescentServer(shared, curvature, None)
        # Nothing is above infinity, so the first round keeps the step size. A given one becomes a
        # curvature, so that decay treats it like an automatic one.
        if self.step_size is not None:
            curvature = 1 / self.step_size.astype(shared.dtype)
        return DescentServer(shared, curvature, jnp.full((), jnp.inf, shared.dtype))

    def client_step(
        self, downlink: Message, local: Rows, moment: Moment, active: Active
    ) -> tuple[Message, Rows, Diagnostics]:
        """Deflate and retract the local components, take a step, send the shared copy."""
        shared, curvature = downlink

        # Algorithm 2: deflate then retract, so that [U, V] is feasible at the received U.
        deflated = local - client_matmul(client_matmul(local, shared.T), shared)
        local = retract(deflated, self.retraction, active)
        w = jnp.concatenate([shared, local])
        # Components are rows within rounds (see `Rows`): with W = [U, V], these are (S W)ᵀ and
        # WᵀSW.
        sw, wsw = moment.row_products(w)
        objective = uncaptured(moment, jnp.trace(wsw))
        if self.variant == "tangent":
            # (I - P_U - P_V) S W is the tangent projection, because WᵀSW is symmetric.
            # Choice 1, (58) for the shared copy, which is not retracted before it is averaged.
            moved = w + self._step(sw - data_matmul(wsw, w, once=True), curvature)
            gap = self._gap((moved - w)[self.shared_rank :], curvature)
            # The paper retracts the local part here and again, after deflation, at the start of the
            # next round. Only its span matters, so one retraction is enough.
        elif self.variant == "power":
            by_shared, by_local = jnp.split(sw, [self.shared_rank])
            inside = client_matmul(wsw[self.shared_rank :, : self.shared_rank], shared)
            before = local
            local = retract(multiplied(local, by_local - inside), self.retraction, active)
            turned = local - client_matmul(client_matmul(local, before.T), before)
            gap = 2 * jnp.sum(turned**2) * jnp.max(jnp.diagonal(wsw))
            # The part of S U orthogonal to the new local components, not normalized.
            moved = by_shared - client_matmul(client_matmul(by_shared, local.T), local)
            moved = jnp.concatenate([moved, local])
        else:
            used = active
            if active is not None:
                used = jnp.concatenate([jnp.ones(self.shared_rank, active.dtype), active])
            # Always the polar factor: QR would keep only the span of the shared copy, and the
            # average would drift to pooled PCA.
            moved = retract(w + self._step(sw, curvature), "polar", used)
            gap = self._gap((moved - w)[self.shared_rank :], curvature)
        copy, local = moved[: self.shared_rank], moved[self.shared_rank :]
        uplink = Message(copy, None if self.decay is None else objective)
        energies = mean_energies(jnp.diagonal(wsw), self.shared_rank, active)
        return uplink, local, {"objective": objective, "gap": gap, **energies}

    def server_step(
        self, server: DescentServer, uplink: Message
    ) -> tuple[DescentServer, Diagnostics]:
        """Retract the mean of the copies; shrink the step if the objective rose."""
        curvature, objective = server.curvature, uplink.scalar
        if self.decay is not None:
            assert curvature is not None and objective is not None and server.objective is not None
            raised = curvature / self.decay.astype(curvature.dtype)
            curvature = jnp.where(objective > server.objective, raised, curvature)
        if self.variant == "power":
            moved = multiplied(server.shared, uplink.shared)
            rest = deflate(uplink.shared.T, server.shared.T)
            energy = jnp.vdot(server.shared, uplink.shared) / self.shared_rank
            gap = 2 * ratio(jnp.sum(rest**2), energy)
        else:
            moved = uplink.shared
            gap = None
        # GR_U(mean U_i - U) in Algorithm 2: both retractions depend only on U plus their argument,
        # here the mean.
        shared = retract(moved, self.retraction)
        if gap is None:
            copy = moved if self.variant == "tangent" else shared
            gap = self._gap(copy - server.shared, server.curvature)
        server, found = DescentServer(shared, curvature, objective), {"gap": gap}
        if curvature is not None:
            found["step_size"] = ratio(jnp.ones_like(curvature), curvature)
        return server, found

    def _gap(self, move, curvature):
        """Return what a gradient step that moves so far lowers the objective by, at first order."""
        # The objective's gradient is twice that of the step.
        square = 2 * jnp.sum(move**2)
        if curvature is None:
            assert self.step_size is not None
            return square / self.step_size.astype(square.dtype)
        return square * curvature

    def _step(self, gradient, curvature):
        """Return a gradient times the step size."""
        if curvature is None:
            assert self.step_size is not None
            return self.step_size.astype(gradient.dtype) * gradient
        return ratio(gradient, curvature)
