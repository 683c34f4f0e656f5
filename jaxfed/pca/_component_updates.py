"""How the solvers of hierarchical PCA update components; see `_personalized`."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxfed.core.contract.reduction import Gram
from jaxfed.linalg import polar
from jaxfed.pca import likelihood
from jaxfed.pca.components import Rows, moment_received
from jaxfed.pca.likelihood import Member, Scalar, aligned


class Solver(NamedTuple):
    """How components are updated; a step size of None is automatic."""

    # (data, local components, shared components, prior variance, step size) -> local components
    local_step: Callable[[Member, Rows, Rows, Scalar, Array | None], Rows]
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
    data: Member, local: Rows, moved: Rows, variance: Scalar, step_size: Array | None
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
