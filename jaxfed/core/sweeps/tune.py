"""Tunes hyperparameters by gradient descent on a held-out loss: bilevel optimization."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key

from jaxfed._checks import (
    check_callable,
    check_count,
    check_flag,
    check_instance,
    check_options,
    check_texts,
    refuse,
)
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like, replace_names, without_names
from jaxfed.core.clients.units import warn_of_units
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.derivatives.implicit import TURNING, TURNS, Report
from jaxfed.core.run.adjoint import Adjoint, checkpointed
from jaxfed.core.run.new_clients import in_order_of
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.linalg.sums import unit_of

# How often a solve goes on, by as many rounds again, until it is a solution.
TRIES = 4

HeldOut = Callable[[Personalized], Float[Array, ""]]


class Tuned(NamedTuple):
    """The result of `tune`.

    Attributes:
        algorithm: the algorithm with the best hyperparameters found.
        solution: its solution.
        path: by name, the hyperparameters at each step, `(steps,)` and their own shape.
        loss: the held-out loss at each step.
        rounds: rounds of each step's solve.
        adjoint_rounds: rounds of each step's linear system; zero if derivatives are unrolled.
        truncated: whether each step follows the derivative of its last rounds alone, because its
            solve did not converge (see `tune`).
    """

    algorithm: Algorithm
    solution: Solution
    path: dict[str, np.ndarray]
    loss: Float[np.ndarray, " steps"]
    rounds: Float[np.ndarray, " steps"]
    adjoint_rounds: Float[np.ndarray, " steps"]
    truncated: Bool[np.ndarray, " steps"]


def tune(
    algorithm: Algorithm,
    clients: Clients,
    held_out: HeldOut,
    optimizer: optax.GradientTransformation,
    *,
    names: Sequence[str],
    rounds: int,
    steps: int,
    key: Key[Array, ""],
    tol: float | None = None,
    patience: int | None = None,
    adjoint: Adjoint | None = None,
    progress: bool = False,
    **arguments: Any,
) -> Tuned:
    """Minimise a held-out loss over hyperparameters by its gradient.

    Each step solves the problem from the previous solution and moves the logarithms of the
    hyperparameters along the gradient of the held-out loss, which is differentiated implicitly at
    the solution. Tuning several hyperparameters costs as much as tuning one.

    By default, a solve whose result a round still moves, by more than 1e-4 of its norm in single
    and 1e-6 in double precision, goes on without `tol`, by as many rounds again, up to four times.
    If that does not suffice, or the linear system is not solved, the step follows the derivative of
    the last `rounds` rounds instead. It ignores how earlier rounds depend on the hyperparameters,
    so it is too short but usually points the same way. `Tuned.truncated` says in which steps.

    Args:
        algorithm: the algorithm to tune, with the initial hyperparameters.
        clients: the clients to run it on.
        held_out: `f(result) -> loss`, a function of subspaces, not of their bases.
        optimizer: optimizer of the logarithms; `optax.adam(0.3)` changes hyperparameters by a
            factor of about 1.35 per step. Its gradients are those of the loss divided by the power
            of two just above the loss at the start, so that the data's unit does not matter.
        names: the algorithm's positive float fields to tune.
        rounds: rounds of the first solve; an upper limit for the others with `tol`.
        steps: largest number of steps.
        key: random key.
        tol: ends a solve, as in `rollout`.
        patience: stop after this many steps without a lower loss; None never does.
        adjoint: how to differentiate, without a second try; None is described above.
        progress: show a progress bar with the loss.
        **arguments: passed on to `rollout`.

    Returns:
        The best hyperparameters, their solution, and the path to them.

    Raises:
        ValueError: if names are not positive floats of the algorithm, the loss depends on how bases
            of subspaces are turned, or other arguments are unsuitable.
        FloatingPointError: if the loss or its gradient is not finite.
        ImportError: if Lineax is missing, or tqdm if a progress bar is requested.

    Source: Pedregosa (2016), Hyperparameter optimization with approximate gradient; Lorraine, Vicol
    & Duvenaud (2020), Optimizing millions of hyperparameters by implicit differentiation; for the
    last rounds alone, Shaban et al. (2019), Truncated back-propagation for bilevel optimization.
    """
    taken = ("algorithm", "clients", "rounds", "key", "tol", "adjoint")
    check_options(arguments, rollout, without=taken)
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    warn_of_units(algorithm, clients)
    earlier = arguments.get("warm_start")
    clients = like(clients, earlier)
    given = without_names(in_order_of(clients.ids, earlier))
    known, clients = clients.names, without_names(clients)
    check_callable("held_out", held_out, "a function of the result")
    wanted = "an optax.GradientTransformation"
    check_instance("optimizer", optimizer, optax.GradientTransformation, wanted)
    start = _logarithms(algorithm, names)
    check_count("steps", steps)
    if patience is not None:
        check_count("patience", patience)
    check_flag("progress", progress)
    if adjoint is not None:
        check_instance("adjoint", adjoint, Adjoint, "one of jaxfed.adjoint")
    first = implicit(throw=False) if adjoint is None else adjoint
    ways = [(first, tol), (first, None), (checkpointed(), None)]
    # Each try solves from the result of the one before, until one has a derivative.
    longer, last = 0 if tol is None else 1, 2
    tries = [0] if adjoint is not None else [0, *[longer] * TRIES, last]

    def solved(way, clients, logarithms, warm_start):
        tuned = _with(algorithm, logarithms)
        given = arguments | {"warm_start": warm_start, "adjoint": way[0], "tol": way[1]}
        return rollout(tuned, clients, rounds=rounds, key=key, **given)

    def loss(logarithms, report, way, clients, warm_start, unit):
        solution = solved((way[0].with_report(report), way[1]), clients, logarithms, warm_start)
        value = held_out(solution.result)
        return value / unit, (value, solution)

    @partial(jax.jit, static_argnums=0)
    def step(way, logarithms, state, clients, warm_start, unit):
        derivative = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (value, solution)), (gradient, report) = derivative(
            logarithms, Report(), ways[way], clients, warm_start, unit
        )
        updates, state = optimizer.update(gradient, state, logarithms)
        moved = optax.apply_updates(logarithms, updates)
        return moved, state, value, optax.tree.norm(gradient), report, solution

    # Solve once before the steps, from the caller's warm start, if any: then each step starts from
    # a result, and all of them are one program.
    @jax.jit
    def solved_once(clients):
        result = solved(ways[0], clients, start, given).result
        return result, unit_of(held_out(result))

    result, unit = solved_once(clients)
    logarithms, state = start, optimizer.init(start)
    path: list[dict[str, np.ndarray]] = []
    losses, run_rounds, adjoint_rounds, truncated = [], [], [], []
    best = logarithms, None
    bar = require("tqdm.auto", extra="cli").tqdm(total=steps, unit="step") if progress else None
    for number in range(steps):
        at = logarithms
        taken, left = 0.0, list(tries)
        while True:
            way = left.pop(0)
            moved, moved_state, value, slope, report, solution = step(
                way, at, state, clients, result, unit
            )
            result, taken = solution.result, taken + float(solution.rounds)
            if adjoint is None and report.turning > TURNING:
                raise ValueError(TURNS)
            if not left or np.isfinite(slope) or not np.isfinite(value):
                break
        logarithms, state = moved, moved_state
        if not (np.isfinite(value) and np.isfinite(slope)):
            raise FloatingPointError(
                f"the held-out loss is {float(value)} and its gradient's length {float(slope)} in "
                f"step {number + 1}; more rounds, or smaller steps, may help"
            )
        path.append({name: np.exp(np.asarray(x)) for name, x in at.items()})
        losses.append(float(value))
        run_rounds.append(taken)
        adjoint_rounds.append(float(report.rounds))
        truncated.append(way == last)
        # `losses` contains this one, so this holds for the lowest so far.
        if losses[-1] <= min(losses):
            best = at, solution
        if bar is not None:
            bar.update()
            bar.set_postfix(loss=f"{losses[-1]:.6g}")
        if patience is not None and number - int(np.argmin(losses)) >= patience:
            break
    if bar is not None:
        bar.close()
    found, solution = best
    assert solution is not None  # there is at least one step
    return Tuned(
        _with(algorithm, found),
        replace_names(solution, known),
        {name: np.stack([one[name] for one in path]) for name in start},
        *map(np.asarray, (losses, run_rounds, adjoint_rounds, truncated)),
    )


def _logarithms(algorithm: Algorithm, names: Sequence[str]) -> dict[str, Array]:
    """The logarithms of the named fields.

    Raises:
        ValueError: if names are not positive floats of the algorithm.
    """
    check_texts("names", names)
    if not names:
        raise refuse("names", "at least one field to tune", names)
    found = {}
    for name in names:
        value: Any = getattr(algorithm, name, None)
        if not eqx.is_inexact_array(value) or not (value > 0).all():
            kind = type(algorithm).__name__
            raise refuse("names", f"positive floats of {kind}, which {name} is not", value)
        # Not of a weak type, which updates do not have: the first step would be compiled alone.
        found[name] = jnp.asarray(jnp.log(value), value.dtype)
    return found


def _with(algorithm: Algorithm, logarithms: dict[str, Array]) -> Algorithm:
    return eqx.tree_at(
        lambda a: [getattr(a, name) for name in logarithms],
        algorithm,
        [jnp.exp(x) for x in logarithms.values()],
    )
