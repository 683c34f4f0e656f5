"""Personalized PCA with the local components eliminated, which takes a fraction of the rounds.

For given shared components the best local components are known: the top eigenvectors of the
client's second moment deflated by the shared ones. What is left is a function of the shared
subspace alone, F of `jaxfed.pca._reduced`. Its gradient takes one thin message per client and
round, of which the server needs only the mean. The server takes Barzilai-Borwein steps uphill,
safeguarded by a non-monotone line search; a round is one evaluation.

Source: the steps are those of Wen & Yin (2013), A feasible method for optimization with
orthogonality constraints, Algorithm 1 and equation 18; for the rest see `jaxfed.pca._reduced`.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed.contract import Algorithm, Diagnostics, DifferentiatedThrough, HasRemarks, check_count
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.division import ratio
from jaxfed.pca._reduced import Evaluation, evaluate
from jaxfed.pca.components import (
    Frame,
    best_local,
    check_fits,
    check_start,
    common_local,
    deflate,
    moment_message,
    moment_of,
    moment_received,
    top_components,
)
from jaxfed.pca.perpca import PerPCA

# Accepted objectives that a new one is compared with, and how the step changes.
WINDOW = 5
SUFFICIENT, SHRINK = 1e-4, 0.25


class Server(NamedTuple):
    """The last accepted point, and the trial that is being evaluated.

    Gradients and objectives are multiples of `unit`, so that squares neither overflow nor vanish.
    """

    base: Frame
    gradient: Frame  # at the base
    trial: Frame
    step: Float[Array, ""]
    captured: Float[Array, " window"]  # of the last accepted points, infinite while unknown
    accepted: Int[Array, ""]
    unit: Float[Array, ""]  # a power of two near the first gradients


class VarProPerPCA(Algorithm, DifferentiatedThrough, HasRemarks):
    """The objective of personalized PCA, its local components eliminated by variable projection.

    Its stationary points are those of `PerPCA(variant="tangent")`, and there is no step size to
    choose. Clients do more work, an eigendecomposition each round. Objectives of different
    rounds are compared, so everybody should take part in each; with few participants `PerPCA`
    is the method.
    """

    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)

    def __init__(self, shared_rank: int, local_rank: int):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.

        Raises:
            ValueError: for ranks that are not positive whole numbers.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        self.shared_rank, self.local_rank = shared_rank, local_rank

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for ranks or a warm start that do not fit."""
        check_fits("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)
        check_start(start, clients, self.shared_rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Moment:
        """The client's second moment."""
        return moment_of(data, rank=self.shared_rank + self.local_rank, rounds=rounds)

    def first_message(self, key, data: Moment, start) -> Gram | Symmetric | None:
        """The deflated second moment, for the local-first start of `OneShot`."""
        if start is not None:
            return None
        return moment_message(data.deflate(top_components(data, self.local_rank)))

    def server_init(self, key, first: Array | None, like, start) -> Server:
        """The first trial is the start itself."""
        if start is not None:
            shared = start.shared
        else:
            assert first is not None
            shared = moment_received(first).top(self.shared_rank)[1]
        return Server(
            base=shared,
            gradient=jnp.zeros_like(shared),
            trial=shared,
            step=jnp.zeros((), shared.dtype),
            captured=jnp.full(WINDOW, jnp.inf, shared.dtype),
            accepted=jnp.zeros((), jnp.int32),
            unit=jnp.ones((), shared.dtype),
        )

    def downlink(self, server: Server) -> Frame:
        """The trial point, which as a result is one step beyond the last accepted one."""
        return server.trial

    def client_init(self, key, downlink: Frame, data: Moment, start) -> None:
        """Nothing: the local components are found anew each round."""

    def client_step(self, key, downlink: Frame, local: None, data: Moment):
        """Evaluate the gradient and the objective with the best local components."""
        uplink, rest = evaluate(data, downlink, self.local_rank)
        return uplink, local, {"objective": rest}

    def server_step(self, key, server: Server, uplink: Evaluation) -> tuple[Server, Diagnostics]:
        """Accept the trial and step on from it, or try a shorter step from the base."""
        base, old_gradient, trial, step, captured, accepted, unit = server
        first = accepted == 0
        unit = jnp.where(first, _power_near(uplink.product), unit)
        uplink = jax.tree.map(lambda x: ratio(x, unit), uplink)
        gradient = deflate(uplink.product, trial)
        square = jnp.sum(uplink.product**2)
        scale = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 1)
        # A fall within the rounding of the objective does not count.
        slack = 8 * jnp.finfo(captured.dtype).eps * jnp.abs(uplink.captured)
        wanted = jnp.min(captured) + SUFFICIENT * step * jnp.sum(old_gradient**2) - slack
        good = first | (uplink.captured >= wanted)

        s = deflate(trial - base, trial)
        y = deflate(old_gradient, trial) - gradient
        ss, sy, yy = jnp.vdot(s, s), jnp.abs(jnp.vdot(s, y)), jnp.vdot(y, y)
        # The two step lengths of Barzilai & Borwein in turn.
        long = jnp.where(sy > 0, ratio(ss, sy), 1 / scale)
        short = jnp.where(yy > 0, ratio(sy, yy), 1 / scale)
        # A curvature beyond the scale is one of differences that are rounding.
        spectral = jnp.clip(jnp.where(accepted % 2 == 1, long, short), 1 / scale, 1e4 / scale)
        step = jnp.where(good, jnp.where(first, 1 / scale, spectral), SHRINK * step)
        base, gradient = jnp.where(good, trial, base), jnp.where(good, gradient, old_gradient)
        captured = jnp.where(good, jnp.roll(captured, 1).at[0].set(uplink.captured), captured)
        # Near a solution every length leads to the same point, but lengths come from differences
        # that are rounding. Derivatives through them would grow without bound, round by round.
        rounding = step * jnp.sum(gradient**2) <= slack
        step = jnp.where(rounding, jax.lax.stop_gradient(step), step)
        trial = polar(base + step * gradient)
        return Server(base, gradient, trial, step, captured, accepted + good, unit), {}

    def client_result(self, downlink: Frame, local: None, data: Moment):
        """The best local components for the final shared ones."""
        return best_local(data, downlink, self.local_rank)

    @property
    def energy_weighted(self) -> bool:
        """Whether clients of large variance count more: yes, by a mean of second moments."""
        return True

    def remarks(self, result, history) -> tuple[str, ...]:
        """Whether the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Gradient ascent of the same function, whose state is a point alone."""
        return PerPCA(self.shared_rank, self.local_rank).through()


def _power_near(matrix: Frame) -> Float[Array, ""]:
    """A power of two near the largest entry, by which division is exact; one if all are zero."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(matrix)))
    normal = largest > jnp.finfo(largest.dtype).tiny
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(normal, jnp.frexp(largest)[1], 0))
