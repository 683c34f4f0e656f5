"""How the solvers of hierarchical PCA update components; see `hierarchical`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxfed.core.contract.reduction import Gram
from jaxfed.linalg import polar
from jaxfed.pca import likelihood
from jaxfed.pca._prior_variance import Learning, Spread
from jaxfed.pca._quasi_newton import Evaluation, Memory, climb, initial_memory
from jaxfed.pca.components import Rows, moment_received
from jaxfed.pca.likelihood import LikelihoodMember, Scalar, Variances, aligned


class Downlink(NamedTuple):
    """What clients receive."""

    shared: Rows
    prior_variance: Scalar | None  # if it is learned
    variances: Variances | None  # of noise and scores, if they were estimated
    share: Scalar | None  # 1 - 1/m for m clients, if it is learned without ξ


class Message(NamedTuple):
    """Uplink."""

    shared: PyTree  # the message about the shared components
    distance: Scalar | None  # d², if the prior variance is learned
    objective: Scalar | None  # for the quasi-Newton solver


class HierarchicalServer(NamedTuple):
    """The server's state."""

    shared: Rows
    prior_variance: Scalar | None = None  # if it is learned
    variances: Variances | None = None  # of noise and scores, if they were estimated
    spread: Spread | None = None  # if the prior variance is learned without ξ
    memory: Memory | None = None  # for the quasi-Newton solver


class Solver(NamedTuple):
    """How components are updated; a step size of None is automatic."""

    # (data, local components, shared components, prior variance, step size) -> local components
    local_step: Callable[[LikelihoodMember, Rows, Rows, Scalar, Array | None], Rows]
    # (shared components, local components, prior variance, global step size) -> uplink
    message: Callable[[Rows, Rows, Scalar, Array | None], PyTree]
    # (shared components, reduced uplink) -> shared components
    shared_step: Callable[[Rows, Array], Rows]


def _descend(data, local, shared, variance, step_size):
    # d² enters the objective as d²/(2 σ²), so half its gradient, divided by σ², is the prior's
    # part.
    gradient = likelihood.likelihood_gradient(data.moment, local, data.precision)
    gradient = gradient + likelihood.distance_gradients(shared, local)[1] / variance
    curvature = None if data.curvature is None else data.curvature + 1 / variance
    return likelihood.stepped(local, gradient, step_size, curvature)


def _descended_copy(shared, local, variance, step_size):
    # The automatic step size σ² cancels the 1/σ² of the gradient. The copy is not retracted here:
    # for polar factors, the server's retraction of mean V_i - V at V is the polar factor of mean
    # V_i.
    ratio = 1 if step_size is None else step_size.astype(variance.dtype) / variance
    return shared - ratio * likelihood.distance_gradients(shared, local)[0]


def _best_local(data, local, shared, variance, step_size):
    # For an aligned basis the objective is -tr Uᵀ(c S + VVᵀ/σ²)U / 2 plus a constant.
    joint = likelihood.joint_moment(data.moment, data.precision, shared.T, variance)
    return aligned(joint.top(len(local))[1].T, shared)


def _best_shared(shared, received):
    # The basis nearest to the previous one spares clients from following a rotation.
    return aligned(moment_received(received).top(len(shared))[1].T, shared)


def _attraction(shared, local, variance, step_size):
    # Minus the derivative of d²/(2 σ²) by V for aligned bases, up to its part along V.
    return likelihood.overlap(local, shared).T @ local / variance


SOLVERS = {
    "gradient": Solver(_descend, _descended_copy, lambda shared, received: polar(received)),
    # The server receives mean U_iU_iᵀ, whose top eigenvectors minimize the mean of r - ‖VᵀU_i‖²,
    # which is d² for aligned bases.
    "eigenvectors": Solver(_best_local, lambda shared, local, *_: Gram(local.T), _best_shared),
    # The shared step uses earlier rounds: see `_quasi_newton`.
    "quasi_newton": Solver(_best_local, _attraction, lambda shared, received: received),
}


def predicted_gain(
    data: LikelihoodMember, local: Rows, moved: Rows, variance: Scalar, step_size: Array | None
) -> Scalar:
    """Return what the step to `moved` is predicted to lower ONE client's objective by.

    It is half the squared length of the step times the curvature; without a step size, that of the
    prior and of the likelihood along the components.
    """
    if step_size is not None:
        curvature = 1 / step_size.astype(local.dtype)
    elif data.curvature is not None:
        curvature = data.curvature + 1 / variance
    else:
        held = jnp.vdot(local, data.moment.row_products(local)[0]) / len(local)
        curvature = data.precision * held + 1 / variance
    return curvature / 2 * jnp.sum((moved - local) ** 2)


def first_memory(shared: Rows, variance: Scalar | None, learning: Learning | None) -> Memory:
    """Return the quasi-Newton server's state before the first step."""
    if variance is None or learning is None:
        return initial_memory(shared.T)
    # The hyperprior's curvature is D/2 along log σ², that of the distances 1/σ² along V.
    curvature = learning.degrees(shared.shape[1]) / 2 * variance
    return initial_memory(shared.T, jnp.log(variance)[None], curvature[None])


def climbed(
    server: HierarchicalServer, uplink: Message, learning: Learning | None
) -> tuple[HierarchicalServer, dict[str, Array]]:
    """Take a quasi-Newton step in the shared components, and in log σ² if it is learned."""
    assert server.memory is not None and uplink.objective is not None
    value, slope, least, most = -uplink.objective, None, None, None
    variance, memory = server.prior_variance, server.memory
    if learning is not None:
        assert variance is not None and uplink.distance is not None
        place = memory.numbers[0], server.shared.shape[1]
        more, by_logarithm = learning.slope(variance, uplink.distance, *place)
        value, slope = value + more, by_logarithm[None]
        most = jnp.full(1, jnp.inf, slope.dtype)
        least = -most
        if server.spread is not None:
            least = jnp.log(jax.lax.stop_gradient(server.spread.least))[None]
    memory, _, left = climb(memory, Evaluation(uplink.shared.T, value, slope), least, most)
    diagnostics = {"gap": left}
    if variance is not None:
        variance = jnp.exp(memory.numbers[0])
        diagnostics = {"prior_variance": variance} | diagnostics
    server = server._replace(shared=memory.shared, prior_variance=variance, memory=memory)
    return server, diagnostics
