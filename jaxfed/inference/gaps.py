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
from jaxtyping import Array, Bool, Float, Int, Key

from jaxfed._checks import refuse
from jaxfed.contract import Algorithm, Personalized
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.imputation import Imputation
from jaxfed.core.clients.names import without_names
from jaxfed.core.clients.samples import IncompleteSamples, check_rows
from jaxfed.core.run.compiling import options_for_linear_algebra
from jaxfed.core.run.result import check_run, clients_of_run
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.inference.resampled import Resampled, resample
from jaxfed.inference.weights import Drawn
from jaxfed.linalg import Moment

# Rounds of an imputation at first, and further ones while the last run gained more than this share
# of all that was gained; and the number of runs. With fewer rounds nothing tells what is left.
ROUNDS, ENOUGH, MOST_RUNS = 25, 0.01, 12
LEAST_ROUNDS = 4


class Drawing(NamedTuple):
    """What was drawn for a block of resamples."""

    clients: Clients  # whose data are the moments of all resamples
    unfinished: Float[Array, ""]  # the largest share that the last rounds of an imputation gained


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
    impute: Solution, draws: Resampled, clients: Clients, rounds: int | None, key: Key[Array, ""]
) -> Drawing:
    """Draw the rows or clients of a block again, impute them, and return their second moments.

    Each resample starts from the model of the samples, with a mean of its own. One resample runs
    after the other, so that only one has the covariances of its scores in memory.

    Args:
        impute: the solution of `Impute` on the clients.
        draws: the resamples.
        clients: the clients, with rows that may have gaps.
        rounds: rounds of each imputation; by default 25, and 25 more until the last ones gained at
            most 1 % of all, or there are 300.
        key: random key.
    """
    # Nameless, so that models before and after a run are of one type, in a loop.
    bare = without_names((impute.result, clients))
    given = impute.algorithm, bare[0], draws, bare[1], key, rounds
    return _compiled(**options_for_linear_algebra(given))(*given)


@cache
def _compiled(**options: bool | int) -> Callable[..., Drawing]:
    more: Any = {"compiler_options": options}
    return eqx.filter_jit(_drawn, **more)


class _Imputed(NamedTuple):
    """Models of one resample."""

    models: Personalized
    first: Float[Array, ""]  # the objective in the second round: the first has the start's noise
    last: Float[Array, ""]  # the objective in the last round
    unfinished: Float[Array, ""]
    runs: Int[Array, ""]


def _drawn(
    algorithm: Algorithm,
    models: Personalized,
    draws: Resampled,
    clients: Clients,
    key: Key[Array, ""],
    rounds: int | None,
) -> Drawing:
    rows = IncompleteSamples(clients.data.values, clients.data.count)
    clients = eqx.tree_at(lambda x: x.data, clients, rows)
    dtype = clients.data.count.dtype
    models = jax.tree.map(lambda x: jnp.asarray(x, dtype), models)

    def one(place: Int[Array, ""]) -> tuple[Moment, Float[Array, ""]]:
        own = resample(draws, clients, place)
        # A run from a model keeps its mean, so a first one finds that of the resample.
        mean = rollout(algorithm, own, rounds=1, key=key).result.shared.mean
        start = eqx.tree_at(lambda x: x.shared.mean, models, mean)

        def is_unfinished(found: _Imputed) -> Bool[Array, ""]:
            return (found.runs < (MOST_RUNS if rounds is None else 1)) & (found.unfinished > ENOUGH)

        def run(found: _Imputed) -> _Imputed:
            after = rollout(
                algorithm, own, rounds=rounds or ROUNDS, key=key, warm_start=found.models
            )
            return _gains(found, after.result, after.history["objective"])

        zero = jnp.zeros((), dtype)
        found = _Imputed(start, zero, zero, jnp.full((), jnp.inf, dtype), jnp.zeros((), jnp.int32))
        found = jax.lax.while_loop(is_unfinished, run, found)
        return found.models.local.moments(own).data, found.unfinished

    moments, unfinished = jax.lax.map(one, jnp.arange(draws.resamples))
    data = Drawn(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), moments))
    return Drawing(eqx.tree_at(lambda x: x.data, clients, data), jnp.max(unfinished))


def _gains(found: _Imputed, models: Personalized, objective: Float[Array, " rounds"]) -> _Imputed:
    """Return what is known after one more run."""
    more, last = found.runs > 0, objective[-1]
    first = jnp.where(more, found.first, objective[min(1, len(objective) - 1)])
    gain = jnp.where(more, found.last, objective[len(objective) // 2]) - last
    share = (gain / (first - last)).clip(0, 1)
    unfinished = jnp.where(jnp.isfinite(share), share, 0)
    if len(objective) < LEAST_ROUNDS:
        unfinished = jnp.ones_like(share)
    return _Imputed(models, first, last, unfinished, found.runs + 1)
