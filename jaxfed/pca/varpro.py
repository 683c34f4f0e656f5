"""Personalized PCA with the local components eliminated, solved by a quasi-Newton server.

For given shared components the best local components are known: the top eigenvectors of the
client's second moment deflated by the shared ones. What is left is a function of the shared
subspace alone, F of `jaxfed.pca._reduced`. Its value and its gradient take one thin message per
client and round, of which the server needs only the mean. The server keeps the last few pairs of
steps and changes of the gradient, and climbs along the limited-memory BFGS direction. A round is
one evaluation: what the clients report of a trial point also decides whether the server accepts it,
so no line search asks them twice.

Source: the two-loop recursion is Algorithm 7.4 of Nocedal & Wright (2006), Numerical optimization;
on manifolds, with pairs carried along by a vector transport, it is that of Huang, Gallivan & Absil
(2015), A Broyden class of quasi-Newton methods for Riemannian optimization, and Sato (2021),
Riemannian optimization and its applications, chapter 6. Pairs are kept by the cautious rule of Li &
Fukushima (2001), On the global convergence of the BFGS method for nonconvex unconstrained
optimization problems. The heavy-ball steps for changing participants are those of Polyak (1964),
Some methods of speeding up the convergence of iteration methods.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import Algorithm, Diagnostics, DifferentiatedThrough, HasRemarks, check_count
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.division import ratio
from jaxfed.pca._reduced import evaluate
from jaxfed.pca.components import (
    Frame,
    best_local,
    check_start,
    common_local,
    deflate,
    moment_received,
)
from jaxfed.pca.perpca import Member as Prepared
from jaxfed.pca.perpca import PerPCA

# Armijo's condition: the share of the predicted gain that a trial must bring.
SUFFICIENT = 1e-4
# Bounds on the factor by which the step shrinks after a rejected trial.
SHORTEST, LONGEST = 0.1, 0.5
# Rejections in a row after which the next trial is accepted whatever it brings. By then it is the
# base's objective that is wrong, as behind a coarse channel, which garbles components on the way.
PATIENCE = 3
# A pair needs a curvature above CAUTION times the gradient's norm, and above NOISE times rounding.
CAUTION, NOISE = 1e-6, 16
# The longest step, as the tangent of an angle.
REACH = 0.5
# Where participants change: the share of the last direction that the next one keeps, and the number
# of such rounds after which steps have half the length.
MOMENTUM, HALVED = 0.8, 10

Pairs = Float[Array, "memory features rank"]
Scalar = Float[Array, ""]


class Member(NamedTuple):
    """One client's prepared data."""

    prepared: Prepared  # as for `PerPCA`
    fingerprint: Scalar  # pseudo-random, of the client's id


class Uplink(NamedTuple):
    """A client's part of the gradient and of the objective.

    The mean of the fingerprints tells the server whether two rounds had the same participants.
    """

    product: Frame  # (I - V Vᵀ) S U
    captured: Scalar
    fingerprint: Scalar


class Server(NamedTuple):
    """The last accepted point, the trial that is being evaluated, and what is known of F.

    Gradients and objectives are multiples of `unit`, so that squares neither overflow nor vanish.
    """

    base: Frame
    gradient: Frame  # of F at the base
    captured: Scalar  # F at the base
    direction: Frame  # uphill; horizontal at the base, as the pairs are
    step: Scalar  # the trial is this multiple of the direction away
    trial: Frame
    moves: Pairs  # steps, the latest first; zero where there is none yet
    changes: Pairs  # by how much the gradient of -F changed along them
    fingerprint: Scalar  # of the participants at the base; NaN before the first round
    rejected: Int[Array, ""]  # trials since the base
    changed: Int[Array, ""]  # rounds so far whose participants were not those of the base
    unit: Scalar  # a power of two near the first gradients


class VarProPerPCA(Algorithm, DifferentiatedThrough, HasRemarks):
    """The objective of personalized PCA by limited-memory BFGS, its local components eliminated.

    Its stationary points are those of `PerPCA(variant="tangent")`, there is no step size to choose,
    and it takes a small part of the rounds. Its messages are two numbers larger. Clients do more
    work: an eigendecomposition each round.

    Values and gradients are compared between rounds of the same participants only. A trial that
    other clients evaluate cannot be compared with the base and is accepted, and steps become
    shorter with the number of such rounds. If a few clients are absent now and then, the pairs of
    the rounds in between still give the direction. If participants are drawn anew each round, there
    are no pairs, and the steps are those of gradient ascent with momentum.
    """

    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    memory: int = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        memory: int = 20,
        shrinkage: bool = False,
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components, one for all or one per client
                (in the order of the clients' ids).
            memory: how many pairs of steps and gradient changes the server keeps, each as large as
                two messages.
            shrinkage: take the noise out of the second moments before the iteration, as in
                `PerPCA`.

        Raises:
            ValueError: for ranks and a memory that are not positive whole numbers (a local rank
                may be 0 for some clients), and a `shrinkage` that is neither True nor False.
        """
        check_count("memory", memory)
        model = PerPCA(shared_rank, local_rank, shrinkage=shrinkage)
        self.shared_rank, self.local_rank = model.shared_rank, model.local_rank
        self.memory, self.shrinkage = memory, shrinkage

    @property
    def _model(self) -> PerPCA:
        """Prepares the data; with a step size given, it does not ask clients for one."""
        return PerPCA(self.shared_rank, self.local_rank, step_size=1.0, shrinkage=self.shrinkage)

    @property
    def _width(self) -> int:
        return self.local_rank if isinstance(self.local_rank, int) else max(self.local_rank)

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for ranks or a warm start that do not fit."""
        self._model.check(clients, None)
        check_start(start, clients, self.shared_rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """The client's second moment, its mask where ranks differ, and its fingerprint."""
        prepared = self._model.prepare(data, client_id, rounds)
        fingerprint = jax.random.uniform(jax.random.fold_in(jax.random.key(0), client_id))
        return Member(prepared, fingerprint.astype(prepared.moment.trace.dtype))

    def first_message(self, key, data: Member, start) -> Gram | Symmetric | None:
        """The deflated second moment, for the local-first start of `OneShot`."""
        return self._model.first_message(key, data.prepared, start).get("moment")

    def server_init(self, key, first: Array | None, like, start) -> Server:
        """The first trial is the start itself."""
        if start is not None:
            shared = start.shared
        else:
            assert first is not None
            shared = moment_received(first).top(self.shared_rank)[1]
        zero, none = jnp.zeros((), shared.dtype), jnp.zeros_like(shared)
        pairs = jnp.zeros((self.memory, *shared.shape), shared.dtype)
        return Server(
            base=shared,
            gradient=none,
            captured=zero,
            direction=none,
            step=zero,
            trial=shared,
            moves=pairs,
            changes=pairs,
            fingerprint=jnp.full_like(zero, jnp.nan),
            rejected=jnp.zeros((), jnp.int32),
            changed=jnp.zeros((), jnp.int32),
            unit=jnp.ones_like(zero),
        )

    def downlink(self, server: Server) -> Frame:
        """The trial point, which as a result is one step beyond the last accepted one."""
        return server.trial

    def client_init(self, key, downlink: Frame, data: Member, start) -> None:
        """Nothing: the local components are found anew each round."""

    def client_step(self, key, downlink: Frame, local: None, data: Member):
        """Evaluate the gradient and the objective with the best local components."""
        moment, _, active = data.prepared
        part, rest = evaluate(moment, downlink, self._width, active)
        return Uplink(part.product, part.captured, data.fingerprint), local, {"objective": rest}

    def server_step(self, key, server: Server, uplink: Uplink) -> tuple[Server, Diagnostics]:
        """Accept the trial or reject it, learn from it either way, and step on."""
        first = jnp.isnan(server.fingerprint)
        same = uplink.fingerprint == server.fingerprint
        unit = jnp.where(first, _power_near(uplink.product), server.unit)
        product, captured = ratio(uplink.product, unit), ratio(uplink.captured, unit)
        at_trial = deflate(product, server.trial)
        eps = jnp.finfo(captured.dtype).eps
        # An upper bound of all curvatures that matter.
        curvature_bound = _positive(_norm(product))

        predicted = server.step * jnp.vdot(server.gradient, server.direction)
        gain = captured - server.captured
        # A fall within the rounding of the objective does not count.
        slack = 8 * eps * jnp.abs(captured)
        sufficient = gain >= SUFFICIENT * predicted - slack
        accepted = ~same | sufficient | (server.rejected >= PATIENCE)
        base = jnp.where(accepted, server.trial, server.base)

        # A rejected trial too tells how the gradient changes on the way to it. Both are carried by
        # projection to where the next step starts.
        move = deflate(server.step * server.direction, base)
        change = deflate(server.gradient, base) - deflate(at_trial, base)
        size, curvature = _norm(move), jnp.vdot(move, change)
        useful = same & (curvature > CAUTION * _norm(at_trial) * size**2)
        useful = useful & (curvature > NOISE * eps * curvature_bound * size)
        moves = _updated(server.moves, base, move, useful)
        changes = _updated(server.changes, base, change, useful)

        gradient = jnp.where(accepted, at_trial, server.gradient)
        newton = _newton(moves, changes, gradient, curvature_bound)
        changed = server.changed + (~first & ~same)
        by_newton = same | first | (jnp.vdot(moves[0], moves[0]) > 0)
        heavy_ball = MOMENTUM * deflate(server.direction, base) + gradient / curvature_bound
        # A rejected trial that gives no pair leaves the direction as it is and asks for a shorter
        # step: to the top of the parabola through the value and slope at the base and the value at
        # the trial.
        turn = accepted | useful
        direction = jnp.where(turn, jnp.where(by_newton, newton, heavy_ball), server.direction)
        length = _norm(direction)
        full = jnp.where(length > REACH, ratio(jnp.full_like(length, REACH), length), 1)
        full = full / jnp.where(same | first, 1, 1 + changed / HALVED)
        top = ratio(predicted, 2 * (predicted - gain))
        step = jnp.where(turn, full, jnp.clip(top, SHORTEST, LONGEST) * server.step)

        # Near a solution all directions uphill lead to the same point, but pairs are differences
        # within rounding. Derivatives through them would grow without bound, and those along an
        # approximate inverse of the Hessian need not shrink. So derivatives are those of the
        # gradient step, which does contract.
        rounding = step * jnp.vdot(direction, gradient) <= slack
        by_gradient = gradient - jax.lax.stop_gradient(gradient)
        by_gradient = by_gradient / jax.lax.stop_gradient(curvature_bound)
        direction = jnp.where(rounding, jax.lax.stop_gradient(direction) + by_gradient, direction)
        moves, changes, step = jax.tree.map(
            lambda x: jnp.where(rounding, jax.lax.stop_gradient(x), x), (moves, changes, step)
        )
        after = Server(
            base=base,
            gradient=gradient,
            captured=jnp.where(accepted, captured, server.captured),
            direction=direction,
            step=step,
            trial=polar(base + step * direction),
            moves=moves,
            changes=changes,
            fingerprint=jnp.where(accepted, uplink.fingerprint, server.fingerprint),
            rejected=jnp.where(accepted, 0, server.rejected + 1),
            changed=changed,
            unit=unit,
        )
        # The share of F that its quadratic model has yet to gain. Other participants evaluate
        # another function, of which there is no model.
        to_gain = ratio(jnp.abs(jnp.vdot(newton, gradient)), jnp.abs(captured))
        return after, {"stopping_measure": jnp.where(same | first, to_gain, jnp.inf)}

    def client_result(self, downlink: Frame, local: None, data: Member):
        """The best local components for the final shared ones, and for the observed moments."""
        moment, unshrunk, active = data.prepared
        return best_local(moment if unshrunk is None else unshrunk, downlink, self._width, active)

    @property
    def energy_weighted(self) -> bool:
        """Whether clients of large variance count more: yes, by a mean of second moments."""
        return True

    def remarks(self, result, history) -> tuple[str, ...]:
        """Whether the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Gradient ascent of the same function, whose state is a point alone."""
        return self._model.through()


def _updated(pairs: Pairs, base: Frame, new: Frame, useful: Bool[Array, ""]) -> Pairs:
    """The pairs carried to a base by projection, the oldest replaced by a useful new one."""
    pairs = jax.vmap(lambda x: deflate(x, base))(pairs)
    return jnp.where(useful, jnp.roll(pairs, 1, axis=0).at[0].set(new), pairs)


def _newton(moves: Pairs, changes: Pairs, gradient: Frame, curvature_bound: Scalar) -> Frame:
    """The limited-memory BFGS direction uphill: an approximate inverse of -∇²F times the gradient.

    Without pairs it is the gradient over the bound. Pairs of zeros, and those that lost their
    positive curvature in transport, do not count.
    """
    curvatures = jax.vmap(jnp.vdot)(moves, changes)
    weights = ratio(jnp.ones_like(curvatures), jnp.maximum(curvatures, 0))

    def from_latest(vector, pair):
        move, change, weight = pair
        share = weight * jnp.vdot(move, vector)
        return vector - share * change, share

    def from_oldest(vector, pair):
        move, change, weight, share = pair
        return vector + (share - weight * jnp.vdot(change, vector)) * move, None

    vector, shares = jax.lax.scan(from_latest, gradient, (moves, changes, weights))
    square = jnp.vdot(changes[0], changes[0])
    known = (square > 0) & (curvatures[0] > 0)
    inverse = jnp.where(known, ratio(curvatures[0], square), 1 / curvature_bound)
    pairs = moves, changes, weights, shares
    return jax.lax.scan(from_oldest, inverse * vector, pairs, reverse=True)[0]


def _norm(x: Frame) -> Scalar:
    """Frobenius norm, with a derivative of zero where it is zero."""
    square = jnp.vdot(x, x)
    return jnp.where(square > 0, jnp.sqrt(_positive(square)), 0)


def _positive(x: Scalar) -> Scalar:
    """The number, or one in place of zero."""
    return jnp.where(x > 0, x, 1)


def _power_near(matrix: Frame) -> Scalar:
    """A power of two near the largest entry, by which division is exact; one if all are zero."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(matrix)))
    normal = largest > jnp.finfo(largest.dtype).tiny
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(normal, jnp.frexp(largest)[1], 0))
