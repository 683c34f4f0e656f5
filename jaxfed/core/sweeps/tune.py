"""Tunes hyperparameters by gradient descent on a held-out loss: bilevel optimization."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key

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
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.derivatives.adjoint import implicit
from jaxfed.core.derivatives.implicit import Report
from jaxfed.core.run.adjoint import Adjoint
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution

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
    """

    algorithm: Algorithm
    solution: Solution
    path: dict[str, np.ndarray]
    loss: Float[np.ndarray, " steps"]
    rounds: Float[np.ndarray, " steps"]
    adjoint_rounds: Float[np.ndarray, " steps"]


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

    Args:
        algorithm: the algorithm to tune, with the initial hyperparameters.
        clients: the clients to run it on.
        held_out: `f(result) -> loss`, a function of subspaces, not of their bases.
        optimizer: optimizer of the logarithms; `optax.adam(0.3)` changes hyperparameters by a
            factor of about 1.35 per step.
        names: the algorithm's positive float fields to tune.
        rounds: rounds of the first solve; an upper limit for the others with `tol`.
        steps: largest number of steps.
        key: random key.
        tol: ends a solve, as in `rollout`. If it is too large, there is no fixed point to
            differentiate.
        patience: stop after this many steps without a lower loss; None never does.
        adjoint: how to differentiate; `jaxfed.adjoint.implicit()` by default.
        progress: show a progress bar with the loss.
        **arguments: passed on to `rollout`.

    Returns:
        The best hyperparameters, their solution, and the path to them.

    Raises:
        ValueError: if names are not positive floats of the algorithm, or other arguments are
            unsuitable.
        FloatingPointError: if the loss or its gradient is not finite.
        ImportError: if Lineax is missing, or tqdm if a progress bar is requested.

    Source: Pedregosa (2016), Hyperparameter optimization with approximate gradient; Lorraine, Vicol
    & Duvenaud (2020), Optimizing millions of hyperparameters by implicit differentiation.
    """
    taken = ("algorithm", "clients", "rounds", "key", "tol", "adjoint")
    check_options(arguments, rollout, without=taken)
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    check_callable("held_out", held_out, "a function of the result")
    wanted = "an optax.GradientTransformation"
    check_instance("optimizer", optimizer, optax.GradientTransformation, wanted)
    start = _logarithms(algorithm, names)
    check_count("steps", steps)
    if patience is not None:
        check_count("patience", patience)
    check_flag("progress", progress)
    adjoint = implicit() if adjoint is None else adjoint
    check_instance("adjoint", adjoint, Adjoint, "one of jaxfed.adjoint")

    def solved(clients, logarithms, warm_start, adjoint):
        tuned = _with(algorithm, logarithms)
        given = arguments | {"warm_start": warm_start, "adjoint": adjoint}
        return rollout(tuned, clients, rounds=rounds, key=key, tol=tol, **given)

    def loss(logarithms, report, clients, warm_start):
        solution = solved(clients, logarithms, warm_start, adjoint.with_report(report))
        return held_out(solution.result), solution

    @jax.jit
    def step(logarithms, state, clients, warm_start):
        derivative = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, solution), found = derivative(logarithms, Report(), clients, warm_start)
        gradient, report = found
        updates, state = optimizer.update(gradient, state, logarithms)
        moved = optax.apply_updates(logarithms, updates)
        return moved, state, value, optax.tree.norm(gradient), report.rounds, solution

    # Solve once before the steps, from the caller's warm start, if any: then each step starts from
    # a result, and all of them are one program.
    result = jax.jit(lambda clients: solved(clients, start, arguments.get("warm_start"), adjoint))(
        clients
    ).result
    logarithms, state = start, optimizer.init(start)
    path: list[dict[str, np.ndarray]] = []
    losses, run_rounds, adjoint_rounds = [], [], []
    best = logarithms, None
    bar = require("tqdm.auto", extra="cli").tqdm(total=steps, unit="step") if progress else None
    for number in range(steps):
        at = logarithms
        logarithms, state, value, slope, taken, solution = step(at, state, clients, result)
        result = solution.result
        if not (np.isfinite(value) and np.isfinite(slope)):
            raise FloatingPointError(
                f"the held-out loss is {float(value)} and its gradient's length {float(slope)} in "
                f"step {number + 1}; more rounds, or smaller steps, may help"
            )
        path.append({name: np.exp(np.asarray(x)) for name, x in at.items()})
        losses.append(float(value))
        run_rounds.append(float(solution.rounds))
        adjoint_rounds.append(float(taken))
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
        solution,
        {name: np.stack([one[name] for one in path]) for name in start},
        *map(np.asarray, (losses, run_rounds, adjoint_rounds)),
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
        found[name] = jnp.log(value)
    return found


def _with(algorithm: Algorithm, logarithms: dict[str, Array]) -> Algorithm:
    return eqx.tree_at(
        lambda a: [getattr(a, name) for name in logarithms],
        algorithm,
        [jnp.exp(x) for x in logarithms.values()],
    )
