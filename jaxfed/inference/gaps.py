"""Resamples of samples with missing entries: rows are drawn, then imputed by a model of their own.

Source: Efron (1994), Missing data, imputation, and the bootstrap, Section 3: the bootstrap of the
incomplete rows, with the imputation as a part of the estimator.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import refuse
from jaxfed.contract import Algorithm, Personalized
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.imputation import Imputation
from jaxfed.core.clients.samples import IncompleteSamples, check_rows
from jaxfed.core.run.compiling import options_for_linear_algebra
from jaxfed.core.run.result import check_run, clients_of_run
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.inference.resampled import Resampled, resample
from jaxfed.inference.weights import Drawn
from jaxfed.linalg import Moment


class Drawing(NamedTuple):
    """What was drawn for a block of resamples."""

    clients: Clients  # whose data are the moments of all resamples
    unfinished: Float[Array, ""]  # of the imputation, as in `Bootstrap`


def check_impute(impute: object, clients: Clients) -> None:
    """Refuse what is not the solution of `Impute` on these clients.

    Raises:
        ValueError: names the argument.
    """
    check_run(impute, "impute")
    assert isinstance(impute, Solution)
    if not isinstance(impute.result.local, Imputation):
        wanted = "the solution of jaxfed.preprocess.Impute on the clients"
        raise refuse("impute", wanted, type(impute.algorithm).__name__)
    check_rows(clients)
    clients_of_run(impute, clients)


def draw(
    impute: Solution, draws: Resampled, clients: Clients, rounds: int, key: Key[Array, ""]
) -> Drawing:
    """Draw the rows or clients of a block again, impute them, and return their second moments.

    Each resample starts from the model of the samples, with a mean of its own. One resample runs
    after the other, so that only one has the covariances of its scores in memory.

    Args:
        impute: the solution of `Impute` on the clients.
        draws: the resamples.
        clients: the clients, with rows that may have gaps.
        rounds: rounds of each run.
        key: random key.
    """
    given = impute.algorithm, impute.result, draws, clients, key, rounds
    return _compiled(**options_for_linear_algebra(given))(*given)


@cache
def _compiled(**options: bool | int) -> Callable[..., Drawing]:
    more: Any = {"compiler_options": options}
    return eqx.filter_jit(_drawn, **more)


def _drawn(
    algorithm: Algorithm,
    models: Personalized,
    draws: Resampled,
    clients: Clients,
    key: Key[Array, ""],
    rounds: int,
) -> Drawing:
    rows = IncompleteSamples(clients.data.values, clients.data.count)
    clients = eqx.tree_at(lambda x: x.data, clients, rows)

    def one(place: Int[Array, ""]) -> tuple[Moment, Float[Array, " rounds"]]:
        own = resample(draws, clients, place)
        # A run from a model keeps its mean, so a first one finds that of the resample.
        mean = rollout(algorithm, own, rounds=1, key=key).result.shared.mean
        start = eqx.tree_at(lambda x: x.shared.mean, models, mean)
        run = rollout(algorithm, own, rounds=rounds, key=key, warm_start=start)
        return run.result.local.moments(own).data, run.history["objective"]

    moments, objective = jax.lax.map(one, jnp.arange(draws.resamples))
    data = Drawn(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), moments))
    return Drawing(eqx.tree_at(lambda x: x.data, clients, data), _left(objective.mean(axis=0)))


def _left(objective: Float[Array, " rounds"]) -> Float[Array, ""]:
    """Return what is left to gain as a share of the gain, if gains fall by equal factors."""
    if len(objective) < 4:
        return jnp.ones(())
    # The first round still has the noise of the start.
    first, half, last = objective[1], objective[len(objective) // 2], objective[-1]
    factor = jnp.clip((half - last) / (first - half), 0, 1)
    return jnp.where(jnp.isfinite(factor), factor**2 / (1 - factor**2), 0).clip(0, 1)
