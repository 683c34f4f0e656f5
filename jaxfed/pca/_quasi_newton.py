"""Limited-memory BFGS at the server, for functions of shared components and a few numbers.

A round is one evaluation: clients report the function's value and gradient at a trial point. These
also decide whether the server accepts it, so no line search asks the clients twice.

Source: the two-loop recursion is Algorithm 7.4 of Nocedal & Wright (2006), Numerical optimization;
on manifolds, with pairs moved by a vector transport, it is that of Huang, Gallivan & Absil (2015),
A Broyden class of quasi-Newton methods for Riemannian optimization. Pairs are kept by the cautious
rule of Li & Fukushima (2001), On the global convergence of the BFGS method for nonconvex
unconstrained optimization problems. The heavy-ball steps for changing participants are those of
Polyak (1964), Some methods of speeding up the convergence of iteration methods.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import Algorithm
from jaxfed.linalg import polar
from jaxfed.linalg.division import ratio
from jaxfed.pca.components import Frame, Rows, deflate, frobenius_norm, positive

# Armijo's condition: the share of the predicted gain that a trial must achieve.
SUFFICIENT = 1e-4
# Bounds on the factor by which the step shrinks after a rejected trial.
SHORTEST, LONGEST = 0.1, 0.5
# After this many rejections in a row, the next trial is accepted in any case. By then the value at
# the base is wrong, for example after a coarse channel.
PATIENCE = 3
# A pair needs a curvature above CAUTION times the gradient norm and NOISE times rounding error.
CAUTION, NOISE = 1e-6, 16
# Longest step: for the components as the tangent of an angle, and for a number.
REACH, LEAP = 0.5, 2.0
# If participants change: the share of the last direction kept in the next one, and the number of
# such rounds after which steps have half the length.
MOMENTUM, HALVED = 0.8, 10

Scalar = Float[Array, ""]
Numbers = Float[Array, " numbers"]
# A tangent vector: the components' part, flattened, then the numbers' part, times the weights.
Vector = Float[Array, " coordinates"]
Pairs = Float[Array, "pairs coordinates"]


class Point(NamedTuple):
    """Where the function is evaluated."""

    frame: Frame
    numbers: Numbers | None  # None without numbers


class Memory(NamedTuple):
    """The last accepted point, the trial under evaluation, and what is known of F."""

    base: Point
    gradient: Vector  # of F at the base
    value: Scalar  # F at the base
    direction: Vector  # uphill
    step: Scalar  # the trial is at this multiple of the direction
    trial: Point
    moves: Pairs  # steps, the latest first; zero for missing ones
    changes: Pairs  # changes of the gradient of -F along them
    weights: Numbers | None  # the unit of length of each number
    rejected: Int[Array, ""]  # rejected trials since the base
    changed: Int[Array, ""]  # number of rounds whose participants differed from those of the base
    rounds: Int[Array, ""]

    @property
    def shared(self) -> Rows:
        """The components of the trial, as rows."""
        return self.trial.frame.T

    @property
    def numbers(self) -> Numbers:
        """The numbers of the trial, which must exist."""
        assert self.trial.numbers is not None
        return self.trial.numbers


class Evaluation(NamedTuple):
    """F at the trial."""

    product: Frame  # its derivative by the components; only the tangent part counts
    value: Scalar
    slopes: Numbers | None = None  # its derivatives by the numbers
    curvature: Scalar | None = None  # upper bound of F's curvature; by default the product's norm


def initial_memory(
    frame: Frame,
    numbers: Numbers | None = None,
    curvatures: Numbers | None = None,
    *,
    pairs: int = 20,
) -> Memory:
    """Return the state before the first step; the first trial is the start itself.

    Args:
        frame: the components.
        numbers: the numbers, if there are any.
        curvatures: rough curvature of F along each number, relative to its curvature along the
            components.
        pairs: number of pairs of steps and gradient changes to keep.
    """
    zero, point = jnp.zeros((), frame.dtype), Point(frame, numbers)
    none = jnp.zeros(frame.size + (0 if numbers is None else len(numbers)), frame.dtype)
    empty, count = jnp.zeros((pairs, len(none)), frame.dtype), jnp.zeros((), jnp.int32)
    return Memory(
        base=point,
        gradient=none,
        value=zero,
        direction=none,
        step=zero,
        trial=point,
        moves=empty,
        changes=empty,
        weights=None if curvatures is None else jnp.sqrt(curvatures),
        rejected=count,
        changed=count,
        rounds=count,
    )


def for_other_data(memory: Memory) -> Memory:
    """Return the state before the first step on other data, whose first trial is the last trial.

    Pairs stay, since they only say how the gradient changes; the first trial is accepted whatever
    its value, which cannot be compared with the base's.
    """
    zero = jnp.zeros_like(memory.rounds)
    return memory._replace(rejected=zero, changed=zero, rounds=zero)


class Climbed(NamedTuple):
    """The outcome of a round."""

    memory: Memory
    accepted: Bool[Array, ""]  # whether the trial has become the base
    left: Scalar  # twice the gain that the quadratic model still predicts


def climb(
    memory: Memory,
    found: Evaluation,
    least: Numbers | None = None,
    most: Numbers | None = None,
    *,
    same: Bool[Array, ""] | bool = True,
    remembered: Bool[Array, ""] | bool = False,
) -> Climbed:
    """Accept or reject the trial, learn from it in either case, and take the next step.

    A trial that other clients evaluated cannot be compared with the base: it is accepted, and gives
    no pair. Without pairs, the next step is one of gradient ascent with momentum, which is shorter
    the more such rounds there have been.

    Args:
        memory: the state before the round.
        found: F at the trial.
        least: lower limits of the numbers, if there are any.
        most: upper limits of the numbers, if there are any.
        same: whether the same clients evaluated the trial and the base.
        remembered: whether, if not, the gradient is that of all clients, some at earlier trials. It
            settles by itself, so steps are as long as ever, without momentum.
    """
    first, same, trial = memory.rounds == 0, jnp.asarray(same), memory.trial
    dtype = trial.frame.dtype
    weights, slopes, least, most, place, last = (
        jnp.zeros(0, dtype) if x is None else x.astype(dtype)
        for x in (memory.weights, found.slopes, least, most, trial.numbers, memory.base.numbers)
    )
    # At a limit, a slope that points beyond it does not count.
    beyond = jnp.where(slopes > 0, place >= most, place <= least)
    slopes = jnp.where(beyond, 0, slopes) / weights
    at_trial = _joined(deflate(found.product, trial.frame), slopes)
    eps = jnp.finfo(at_trial.dtype).eps
    bound = frobenius_norm(found.product) if found.curvature is None else found.curvature
    curvature_bound = positive(bound)

    before = memory.base
    by_frame, _ = _parts(memory.direction, before.frame)
    # The tangent vector that was retracted, not the difference of the frames. Numbers may have
    # stopped at a limit, so their move is measured.
    moved = _joined(memory.step * by_frame, (place - last) * weights)
    predicted = jnp.vdot(memory.gradient, moved)
    gain = found.value - memory.value
    # A decrease within rounding error does not count.
    slack = 8 * eps * jnp.abs(found.value)
    sufficient = gain >= SUFFICIENT * predicted - slack
    accepted = first | ~same | sufficient | (memory.rejected >= PATIENCE)
    base = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), trial, before)

    # A rejected trial also shows how the gradient changes on the way to it. Both are projected to
    # the tangent space where the next step starts.
    move = _carried(moved, base.frame)
    change = _carried(memory.gradient, base.frame) - _carried(at_trial, base.frame)
    size, curvature = frobenius_norm(move), jnp.vdot(move, change)
    useful = ~first & same & (curvature > CAUTION * frobenius_norm(at_trial) * size**2)
    useful = useful & (curvature > NOISE * eps * curvature_bound * size)
    moves = _updated(memory.moves, base.frame, move, useful)
    changes = _updated(memory.changes, base.frame, change, useful)

    gradient = jnp.where(accepted, at_trial, memory.gradient)
    newton = _newton(moves, changes, gradient, curvature_bound)
    comparable = first | same
    by_newton = comparable | (jnp.vdot(moves[0], moves[0]) > 0)
    share = jnp.where(remembered, 0, MOMENTUM)
    momentum = share * _carried(memory.direction, base.frame)
    uphill = jnp.where(by_newton, newton, momentum + gradient / curvature_bound)
    # A rejected trial without a pair leaves the direction unchanged and requires a shorter step: to
    # the top of the parabola through the value and slope at the base and the value at the trial.
    turn = accepted | useful
    direction = jnp.where(turn, uphill, memory.direction)
    by_frame, by_numbers = _parts(direction, base.frame)
    excess = jnp.max(
        jnp.append(jnp.abs(by_numbers) / weights / LEAP, frobenius_norm(by_frame) / REACH)
    )
    top = ratio(predicted, 2 * (predicted - gain))
    shorter = jnp.clip(top, SHORTEST, LONGEST) * memory.step
    passing = ~(comparable | remembered)
    changed = memory.changed + passing
    full = 1 / jnp.maximum(excess, 1) / jnp.where(passing, 1 + changed / HALVED, 1)
    step = jnp.where(turn, full, shorter)

    # Near a solution, all uphill directions lead to the same point, but pairs are differences
    # within rounding error. Derivatives through them would grow without bound, and those along an
    # approximate inverse of the Hessian need not shrink. So derivatives are those of the gradient
    # step, which does contract.
    rounding = step * jnp.vdot(direction, gradient) <= slack
    by_gradient = gradient - jax.lax.stop_gradient(gradient)
    by_gradient = by_gradient / jax.lax.stop_gradient(curvature_bound)
    direction = jnp.where(rounding, jax.lax.stop_gradient(direction) + by_gradient, direction)
    moves, changes, step = jax.tree.map(
        lambda x: jnp.where(rounding, jax.lax.stop_gradient(x), x), (moves, changes, step)
    )
    by_frame, by_numbers = _parts(direction, base.frame)
    numbers = None
    if base.numbers is not None:
        numbers = jnp.clip(base.numbers + step * by_numbers / weights, least, most)
    after = Memory(
        base=base,
        gradient=gradient,
        value=jnp.where(accepted, found.value, memory.value),
        direction=direction,
        step=step,
        trial=Point(polar(base.frame + step * by_frame), numbers),
        moves=moves,
        changes=changes,
        weights=memory.weights,
        rejected=jnp.where(accepted, 0, memory.rejected + 1),
        changed=changed,
        rounds=memory.rounds + 1,
    )
    # The Newton decrement: twice the gain that the quadratic model predicts.
    return Climbed(after, accepted, jnp.abs(jnp.vdot(newton, gradient)))


def refuse_implicit(algorithm: Algorithm, refused: bool) -> Algorithm:
    """Return the algorithm itself for `through`, unless its server is a quasi-Newton one.

    A result does not contain the numbers, so no other algorithm could start at the solution.

    Raises:
        ValueError: if `refused`.
    """
    if refused:
        raise ValueError(
            f"adjoint: wanted {type(algorithm).__name__} with another solver for an implicit "
            "derivative, since a quasi-Newton server also keeps steps, got 'quasi_newton'"
        )
    return algorithm


def _joined(by_frame: Frame, by_numbers: Numbers) -> Vector:
    return jnp.concatenate([by_frame.ravel(), by_numbers])


def _parts(vector: Vector, frame: Frame) -> tuple[Frame, Numbers]:
    return vector[: frame.size].reshape(frame.shape), vector[frame.size :]


def _carried(vector: Vector, frame: Frame) -> Vector:
    """Project a vector onto the tangent space at a frame."""
    by_frame, by_numbers = _parts(vector, frame)
    return _joined(deflate(by_frame, frame), by_numbers)


def _updated(pairs: Pairs, base: Frame, new: Vector, useful: Bool[Array, ""]) -> Pairs:
    """Project pairs to a base, and replace the oldest by a useful new one."""
    # The vector transport is projection, which does not preserve inner products: a carried pair may
    # lose its positive curvature, and `_newton` then gives it the weight zero.
    pairs = jax.vmap(lambda x: _carried(x, base))(pairs)
    return jnp.where(useful, jnp.roll(pairs, 1, axis=0).at[0].set(new), pairs)


def _newton(moves: Pairs, changes: Pairs, gradient: Vector, curvature_bound: Scalar) -> Vector:
    """Return the uphill direction of limited-memory BFGS: approximately (-∇²F)⁻¹ times the
    gradient.

    Without pairs it is the gradient divided by the bound. Pairs that are zero, or that lost their
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
    # The usual first guess of the inverse Hessian, a multiple of the identity from the latest pair.
    square = jnp.vdot(changes[0], changes[0])
    known = (square > 0) & (curvatures[0] > 0)
    inverse = jnp.where(known, ratio(curvatures[0], square), 1 / curvature_bound)
    pairs = moves, changes, weights, shares
    return jax.lax.scan(from_oldest, inverse * vector, pairs, reverse=True)[0]
