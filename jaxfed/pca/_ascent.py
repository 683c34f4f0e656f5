"""Quasi-Newton ascent of a mean of the clients' functions of the shared components.

A client reports its function's value and gradient at the components that the server sent. The
server compares values between rounds with the same participants alone: see
`jaxfed.pca._quasi_newton`.
"""

from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import Algorithm, Bases, Diagnostics
from jaxfed.core.contract.reduction import Mean
from jaxfed.linalg import polar
from jaxfed.linalg.division import ratio
from jaxfed.linalg.svd import singular_values
from jaxfed.pca import _quasi_newton
from jaxfed.pca._quasi_newton import Evaluation, Memory, climb, initial_memory
from jaxfed.pca.components import Frame, Rows, deflate, frobenius_norm

# Mean fingerprints that differ by less, in units of rounding error, are of the same participants.
ORDER = 32
# Its multiples are spread evenly modulo one.
GOLDEN = 0.6180339887

Scalar = Float[Array, ""]
Local = Float[Array, "features local_rank"]


class Uplink(NamedTuple):
    """A client's part of the gradient and of the value.

    The gradient is tangent at the shared components U: clients differ more in the part along U than
    in their gradients, so a robust aggregate could not tell small lies from it. The mean
    fingerprint tells the server whether two rounds had the same participants.
    """

    gradient: Frame
    curvature: Scalar  # an upper bound of the function's curvature
    value: Scalar
    fingerprint: Any  # wrapped in `Mean`, so that no robust aggregate replaces it
    drawn: Any  # the same for all clients of a round, and another one in other rounds


class AscentServer(NamedTuple):
    """The server's state, in multiples of `unit`, so that squares neither over- nor underflow."""

    memory: Memory
    fingerprint: Scalar  # of the participants at the last accepted point; NaN before the first
    fresh: Bool[Array, ""]  # whether all of their messages were evaluated there
    unit: Scalar  # a power of two near the first gradients

    @property
    def components(self) -> Rows:
        """The trial point, which as a result is one step beyond the last accepted point."""
        return self.memory.shared


def fingerprint(client_id: Int[Array, ""], energy: Scalar) -> Scalar:
    """Return a pseudo-random number of a client and its data.

    A state may go on with other data, on which the value at its base is another one.
    """
    energy = jax.lax.stop_gradient(energy)
    key = jax.random.fold_in(jax.random.key(0), client_id)
    bits = jax.lax.bitcast_convert_type(energy.astype(jnp.float32), jnp.uint32)
    return jax.random.uniform(jax.random.fold_in(key, bits)).astype(energy.dtype)


def _drawn(number: Int[Array, ""] | None, like: Scalar) -> Scalar:
    """Return a number between 0 and 1 that differs from that of other rounds."""
    return jnp.zeros_like(like) if number is None else (number * GOLDEN).astype(like.dtype) % 1


def message(
    product: Frame, shared: Frame, value: Scalar, mark: Scalar, number: Int[Array, ""] | None
) -> Uplink:
    """Return what ONE client sends.

    Args:
        product: the function's derivative by the shared components. Only the tangent part counts;
            the norm is an upper bound of the curvature.
        shared: the shared components.
        value: the function's value.
        mark: the client's fingerprint.
        number: the round.
    """
    unit = power_near(product)
    curvature = unit * frobenius_norm(product / unit)
    return Uplink(
        deflate(product, shared), curvature, value, Mean(mark), Mean(_drawn(number, mark))
    )


def first_state(shared: Rows, pairs: int) -> AscentServer:
    """Return a state whose first trial is the start, with room for pairs of steps and changes."""
    one = jnp.ones((), shared.dtype)
    fresh = jnp.zeros((), bool)
    return AscentServer(initial_memory(shared.T, pairs=pairs), jnp.nan * one, fresh, one)


def for_other_data(server: AscentServer) -> AscentServer:
    """Return the state as a start on other data, in the same unit, which the pairs have."""
    return server._replace(memory=_quasi_newton.for_other_data(server.memory))


def ascend(
    server: AscentServer, uplink: Uplink, number: Int[Array, ""] | None
) -> tuple[AscentServer, Diagnostics]:
    """Accept or reject the trial, and take the next step.

    Args:
        server: the state before the round.
        uplink: the participants' mean message.
        number: the round.
    """
    first = jnp.isnan(server.fingerprint)
    # The order of a sum over clients may change from round to round, for example with a source.
    rounding = ORDER * jnp.finfo(server.fingerprint.dtype).eps
    same = jnp.abs(uplink.fingerprint - server.fingerprint) <= rounding
    # What a channel remembers of absent clients is of earlier trials.
    fresh = jnp.abs(uplink.drawn - _drawn(number, uplink.drawn)) <= rounding
    unit = jnp.where(first, power_near(uplink.curvature), server.unit)
    gradient, curvature, value = (ratio(x, unit) for x in uplink[:3])
    found = Evaluation(gradient, value, curvature=curvature)
    memory, accepted, left = climb(
        server.memory, found, same=same & fresh & server.fresh, remembered=same
    )
    mark = jnp.where(accepted, uplink.fingerprint, server.fingerprint)
    fresh = jnp.where(accepted, fresh, server.fresh)
    return AscentServer(memory, mark, fresh, unit), {"gap": unit * left}


class SolutionAscent(Algorithm):
    """Gradient ascent from a solution, whose round gives the solution's implicit derivative.

    The Jacobian of the round is I + t ∇²F at the solution, for any step size t. A subclass
    evaluates the gradient; local states are bases of the clients' local components.
    """

    model: Algorithm  # prepares the data

    @final
    def prepare(self, data, client_id, rounds):
        """Return what the model prepares."""
        return self.model.prepare(data, client_id, rounds)

    @final
    def server_init(self, key, first, like, warm_start) -> Frame:
        """Return the shared components of the solution."""
        assert warm_start is not None
        return warm_start.shared

    @final
    def downlink(self, server: Frame) -> Frame:
        """Return the shared components."""
        return server

    @final
    def client_init(self, key, downlink: Frame, data, warm_start) -> Local:
        """Return the local components of the solution."""
        assert warm_start is not None
        return warm_start.local

    @final
    def server_step(self, key, server: Frame, uplink: Frame):
        """Take a gradient step of length one over the gradient's norm."""
        # Any step size gives the same implicit derivative as long as it is a constant: see the
        # class.
        size = jax.lax.stop_gradient(singular_values(uplink)[0])
        scale = ratio(jnp.ones_like(size), size)
        return polar(server + scale * deflate(uplink, server)), {}

    @final
    def bases(self, server: Frame, local: Local) -> Bases:
        """Return the shared components and each client's local ones."""
        return Bases(shared=(server,), own=(local,))


def power_near(numbers: Array) -> Scalar:
    """Return a power of two near the largest number; division by it is exact; one for zeros."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(numbers)))
    info = jnp.finfo(largest.dtype)
    normal = (largest > info.tiny) & (largest < jnp.inf)
    # Without the bits of its fraction, a number is the power of two below it. `jnp.frexp` and
    # `jnp.ldexp` say the same in six times as many operations.
    bits = jax.lax.bitcast_convert_type(largest, f"uint{info.bits}")
    power = jax.lax.bitcast_convert_type(bits >> info.nmant << info.nmant, largest.dtype)
    return jnp.where(normal, 2 * power, 1)
