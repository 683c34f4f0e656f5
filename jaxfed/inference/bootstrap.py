"""The bootstrap: how a statistic of a solution varies over resamples of its data.

Source: Efron & Tibshirani (1993), An introduction to the bootstrap. The one-step version replaces
the solution on a resample by its first-order expansion in the weights: Jaeckel (1972), The
infinitesimal jackknife; Giordano et al. (2019), A Swiss army infinitesimal jackknife.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from jaxfed import adjoint
from jaxfed._checks import (
    check_callable,
    check_count,
    check_name,
    check_probability,
    checked_key,
    refuse,
)
from jaxfed._optional import require
from jaxfed.contract import Personalized
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import without_names
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.contract.algorithm import OneExchange
from jaxfed.core.run.compiling import options_for_linear_algebra
from jaxfed.core.run.fit import fit
from jaxfed.core.run.result import check_run, clients_of_run
from jaxfed.core.run.rollout import rollout
from jaxfed.core.run.solution import Solution
from jaxfed.inference.gaps import check_impute, draw
from jaxfed.inference.resampled import Of, Resampled, resample
from jaxfed.inference.weights import (
    check_enough,
    check_observed,
    check_resampled,
    reweighted,
    rows_of,
)
from jaxfed.linalg import polar
from jaxfed.linalg.precision import precise
from jaxfed.multi_start import MultiStart

Statistic = Callable[[Personalized, Clients], PyTree]
Method = Literal["refit", "one_step"]

# Bases that deviate by less from orthonormal ones stay orthonormal in the one-step version.
ORTHONORMAL = 1e-3
# Tolerance of the derivative, as a share of a standard error.
TOL = 1e-3
# GMRES takes at least this many steps for each resample. So with no more unknowns than this times
# the resamples of a block, the system's matrix takes fewer rounds.
STEPS = 10
# Rounds of a resample at first; further ones while more than this share of their gain is left.
ROUNDS, ENOUGH, MOST_ROUNDS = 10, 1e-4, 320
# Rounds before the one-step version, from the solution, so that it is at its optimum.
POLISH = 10


class Interval(NamedTuple):
    """A confidence interval for each number of a statistic, with its estimate."""

    estimate: PyTree
    lower: PyTree
    upper: PyTree


class Bootstrap(eqx.Module):
    """A statistic of a solution and of resamples of its data.

    Attributes:
        estimate: the statistic of the solution and its data.
        replicates: the statistic of every resample, along a leading axis.
        unfinished: what the slowest resample would still gain with more rounds, by its stopping
            measure, as a share of what resamples have gained on average: the largest of all
            blocks; of imputations, the share that the last rounds gained. If it is not small, more
            rounds would change the replicates. 0 for the one-step version, and 1 if there are too
            few rounds to tell.
        of: what was drawn again, "samples" or "clients".
        method: "refit" or "one_step".
        drawn: the least number that was drawn again: samples of a client, or clients.
    """

    estimate: PyTree[np.ndarray]
    replicates: PyTree[np.ndarray]
    unfinished: float = eqx.field(static=True)
    of: Of = eqx.field(static=True)
    method: Method = eqx.field(static=True)
    drawn: int = eqx.field(static=True)

    @property
    def standard_error(self) -> PyTree[ArrayLike]:
        """The standard deviation over resamples, of each number of the statistic."""
        return jax.tree.map(lambda x: x.std(axis=0, ddof=1), self.replicates)

    def map(self, function: Callable[[PyTree], PyTree]) -> "Bootstrap":
        """Return the bootstrap of a function of the statistic."""
        estimate = jax.tree.map(jnp.asarray, self.estimate)
        found = function(estimate), jax.vmap(function)(self.replicates)
        estimate, replicates = jax.device_get(found)
        return replace(self, estimate=estimate, replicates=replicates)

    def interval(
        self, level: float = 0.95, kind: Literal["normal", "percentile", "logit"] = "normal"
    ) -> Interval:
        """Return confidence intervals for the numbers of the statistic.

        Args:
            level: share of data sets whose interval should contain the truth.
            kind: `"normal"`, the estimate minus its bias over resamples, plus or minus the standard
                error times a quantile of Student's t; its degrees of freedom are the number of
                samples (or clients) that were resampled, minus 1. `"logit"` is the same for the
                logarithm of the odds of shares between 0 and 1. `"percentile"` takes quantiles of
                the resamples; it counts bias twice, but suits statistics that are not normal.

        Raises:
            ValueError: if the level is not between 0 and 1 or the kind is unknown.
        """
        check_probability("level", level)
        check_name("kind", kind, ("normal", "percentile", "logit"))
        ends = jax.tree.map(
            partial(_ends, level, kind, self.drawn - 1), self.estimate, self.replicates
        )
        outer, inner = jax.tree.structure(self.estimate), jax.tree.structure((0, 0))
        return Interval(self.estimate, *jax.tree.transpose(outer, inner, ends))


def _ends(
    level: float, kind: str, freedom: int, estimate: ArrayLike, replicates: np.ndarray
) -> tuple[ArrayLike, ArrayLike]:
    from scipy import special, stats

    if kind == "percentile":
        lower, upper = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return lower, upper
    if kind == "logit":
        # Rounding may lead beyond 0 and 1, and a share of exactly 0 or 1 has no odds.
        eps = np.finfo(replicates.dtype).eps
        logits = (special.logit(np.clip(x, eps, 1 - eps)) for x in (estimate, replicates))
        lower, upper = _ends(level, "normal", freedom, *logits)
        return special.expit(lower), special.expit(upper)
    # In double precision, which holds the squares of all numbers in single.
    estimate, precise = np.asarray(estimate, float), np.asarray(replicates, float)
    # The estimate minus its bias, which is estimated as mean replicate minus estimate.
    center = 2 * estimate - precise.mean(axis=0)
    reach = stats.t.ppf((1 + level) / 2, freedom) * precise.std(axis=0, ddof=1)
    return tuple(x.astype(replicates.dtype) for x in (center - reach, center + reach))


@precise()
@in_enough_precision
def bootstrap(
    solution: Solution,
    clients: Clients,
    statistic: Statistic,
    *,
    key: Key[Array, ""],
    resamples: int = 200,
    impute: Solution | None = None,
    of: Of = "samples",
    method: Method = "refit",
    rounds: int | None = None,
    runs_at_once: int = 25,
    progress: bool = False,
) -> Bootstrap:
    """Compute a statistic of a solution and of resamples of its data.

    A resample weights samples, or clients, at random; see `Resampled`. All resamples of a block run
    at once and start from the solution, so a few rounds are enough. All blocks are one compiled
    program.

    Args:
        solution: the solution, of an algorithm whose data are second moments or cross products of
            samples, such as those of `jf.pca` and `jf.gcca.MaxVar`.
        clients: the clients of the solution, in memory.
        statistic: function of a result and clients that returns a tree of arrays. It is called
            once with the solution and, while traced, with resamples: the clients' samples are
            multiplied by the roots of their weights, or, of clients, `clients.weights` differ.
        key: random key.
        resamples: number of resamples, at least 2; 200 are enough for standard errors and 95 %
            intervals.
        impute: the solution of `jaxfed.preprocess.Impute` on the clients, whose samples may then
            lack entries; `solution` is one on their second moments,
            `impute.result.local.moments(clients)`. Rows are drawn again with their gaps, and each
            resample is imputed by a model of its own, which starts from this one. `statistic` is
            called with clients that have second moments.
        of: `"samples"` draws samples again within each client: what would other samples of these
            clients give? `"clients"` draws clients again, with their samples: what would other
            clients give?
        method: `"refit"` runs the algorithm on each resample; `"one_step"` takes the derivative of
            the solution with respect to the weights, which is cheaper, and as good where errors are
            small.
        rounds: rounds of each run; by default 10, and 10 more until what is unfinished is at most
            1e-4, or there are 320. Of each imputation, by default 25, and 25 more until the last
            ones gained at most 1 % of all, or there are 300.
        runs_at_once: largest number of resamples at once, a block. Memory grows with it.
        progress: show a progress bar.

    Returns:
        The statistic's estimate and its replicates.

    Raises:
        ValueError: if an argument does not fit; the clients are not those of the solution, hold no
            samples, are not in the memory of one process or have fewer than 3 samples; samples to
            draw again were imputed, or lack entries without `impute`; the algorithm sees samples
            otherwise or has no such derivative; or its rounds do not change what it has learned
            from the clients.
        DivergenceError: if a run diverges.
        ImportError: if Lineax is missing, for `"one_step"`.
    """
    check_run(solution)
    clients = without_names(clients_of_run(solution, clients))
    check_callable("statistic", statistic, "a function of a result and clients")
    check_count("runs_at_once", runs_at_once, least=2)
    check_count("resamples", resamples, least=2)
    if rounds is not None:
        check_count("rounds", rounds)
    check_name("of", of, ("samples", "clients"))
    check_name("method", method, ("refit", "one_step"))
    if isinstance(solution.algorithm, MultiStart):
        raise refuse(
            "solution",
            "that of one start; run `algorithm` of the MultiStart from it, with warm_start",
            solution.algorithm,
        )
    check_observed(clients, "bootstrap", of, impute is not None)
    key = checked_key("key", key)
    clients.layout.check_in_memory("bootstrap")
    if not clients.layout.in_one_process:
        raise refuse("clients", "clients of one process", clients)
    check_resampled(clients.parts[0])
    if impute is not None:
        check_impute(impute, clients)
        if method != "refit":
            raise refuse("method", "'refit' with impute", method)
    rows = clients = clients.unbucketed()
    drawn = len(clients) if of == "clients" else int(np.asarray(rows_of(clients.data)).min())
    blocks = range(-(-resamples // runs_at_once))
    # Blocks of one size need one compiled program; surplus resamples are dropped at the end.
    size = -(-resamples // len(blocks))
    state = solution.algorithm.for_other_data(solution.server)
    draws = Resampled(
        solution.algorithm,
        size,
        seed=jax.random.randint(key, (), 0, jnp.iinfo(jnp.int32).max),
        states=jax.tree.map(partial(_repeated, size, 0), state),
        clients=len(clients) if of == "clients" else None,
    )
    if impute is None:
        draws.check(clients, None)
    else:
        clients = impute.result.local.moments(rows)
        solution.algorithm.check(clients, None)
        if of == "samples":
            check_enough(rows.data)
    estimate = eqx.filter_jit(statistic)(solution.result, clients)
    if impute is not None:
        run = partial(_imputed, draws, impute, solution, rows, rounds, key)
    elif method == "refit":
        run = partial(_refitted, draws, solution, clients, rounds, key)
    else:
        run = _expansion(draws, solution, clients, key, len(blocks))
    if progress:
        blocks = require("tqdm.auto", extra="cli").tqdm(blocks, unit="block")
    parts = []
    for number in blocks:
        part = run(number)
        given = statistic, part.draws, part.results, part.clients
        values = _evaluation(**options_for_linear_algebra(given))(*given)
        parts.append(jax.device_get((values, part.unfinished)))
    replicates = jax.tree.map(
        lambda *each: np.concatenate(each)[:resamples], *(part[0] for part in parts)
    )
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(replicates)):
        raise ValueError(
            "statistic: wanted finite numbers, got NaN or infinity"
            + ", as without a derivative; use method='refit'" * (method == "one_step")
        )
    unfinished = max(float(part[1]) for part in parts)
    return Bootstrap(jax.device_get(estimate), replicates, unfinished, of, method, drawn)


class _Block(NamedTuple):
    """Results of some resamples."""

    draws: Resampled
    results: Personalized  # with an axis of resamples, after that of clients
    clients: Clients
    unfinished: float


def _numbered(draws: Resampled, number: int | Int[Array, ""]) -> Resampled:
    """Return the resamples of a block, counted from 0."""
    first = jnp.asarray(number * draws.resamples, jnp.int32)
    return eqx.tree_at(lambda x: x.first, draws, first)


def _imputed(
    draws: Resampled,
    impute: Solution,
    solution: Solution,
    rows: Clients,
    rounds: int | None,
    key: Key[Array, ""],
    number: int,
) -> _Block:
    """Draw rows of a block, impute them, and run the algorithm on their moments."""
    own = _numbered(draws, number)
    drawing = draw(impute, own, rows, rounds, key)
    block = _refitted(draws, solution, drawing.clients, rounds, key, number)
    return block._replace(unfinished=max(block.unfinished, float(drawing.unfinished)))


def _refitted(
    draws: Resampled,
    solution: Solution,
    clients: Clients,
    rounds: int | None,
    key: Key[Array, ""],
    number: int,
) -> _Block:
    """Run the algorithm on each resample of a block."""
    own = _numbered(draws, number)
    run = partial(fit, clients=clients, rounds=rounds or ROUNDS, key=key)
    start = _start(own, solution)
    found = run(own, warm_start=start)
    shared = solution.result.shared
    pairs = zip(*map(jax.tree.leaves, jax.device_get((found.result.shared, shared))), strict=True)
    if all(np.all(x == y) for x, y in pairs):
        raise ValueError(
            "solution: wanted one that changes with the samples, got one that every resample "
            "leaves as it is: all samples of a client are the same, or zero, or the algorithm "
            "learns nothing in its rounds"
        )
    first, ran = float(found.history["objective"][0]), ROUNDS
    if rounds is None and start is not None:
        while _unfinished(first, found.history) > ENOUGH and ran < MOST_ROUNDS:
            if own.state is not None:
                own = eqx.tree_at(lambda x: x.state, own, found.server)
            found, ran = run(own, warm_start=found.result), ran + ROUNDS
    return _Block(own, found.result, clients, _unfinished(first, found.history))


def _start(draws: Resampled, solution: Solution) -> Personalized | None:
    """Return where the resamples start: at the solution, unless there are no rounds."""
    if isinstance(solution.algorithm, OneExchange):
        return None
    repeated = partial(_repeated, draws.resamples)
    return Personalized(
        *(jax.tree.map(partial(repeated, i), part) for i, part in enumerate(solution.result))
    )


def _repeated(resamples: int, axis: int, x: ArrayLike) -> np.ndarray:
    # On the host, or each shape would be a program to compile.
    return np.repeat(np.expand_dims(x, axis), resamples, axis)


def _unfinished(first: float, history: Mapping[str, np.ndarray]) -> float:
    """Return what the slowest resample has left, as a share of what resamples gain on average.

    Args:
        first: the mean objective of the resamples' first round.
        history: of their last rounds.
    """
    last, left = float(history["objective"][-1]), float(history["stopping_measure"][-1])
    # What rounding does to the objective is no gain.
    rounding = 100 * float(np.finfo(history["objective"].dtype).eps * abs(last))
    share = left * abs(last) / max(first - last, rounding)
    return min(share, 1.0) if np.isfinite(share) else 1.0


@cache
def _evaluation(**options: bool | int) -> Callable[..., PyTree]:
    """The statistics of a block, compiled with these options."""
    given: Any = {"compiler_options": options}
    return eqx.filter_jit(_evaluated, **given)


def _evaluated(
    statistic: Statistic, draws: Resampled, results: Personalized, clients: Clients
) -> PyTree:
    """Return the statistic of each resample of a block."""

    def one(result: Personalized, place: Int[Array, ""]) -> PyTree:
        return statistic(result, resample(draws, clients, place))

    return jax.vmap(one, (Personalized(0, 1), 0))(results, jnp.arange(draws.resamples))


def _weights(
    draws: Resampled, clients: Clients, number: Int[Array, ""]
) -> Float[Array, "clients ..."]:
    return jax.vmap(draws.weights, (0, 0, None))(clients.data, clients.ids, number)


def _expansion(
    draws: Resampled, solution: Solution, clients: Clients, key: Key[Array, ""], blocks: int
) -> Callable[[int], _Block]:
    """Return a function that expands the solution in the weights of each resample of a block."""
    result, changes = _expanded(draws, solution.result, clients, key, blocks)

    def run(number: int) -> _Block:
        change = jax.tree.map(lambda x: x[number], changes)
        parts = (jax.tree.map(partial(_moved, i), result[i], change[i]) for i in (0, 1))
        return _Block(_numbered(draws, number), Personalized(*parts), clients, 0.0)

    return run


@eqx.filter_jit
def _expanded(
    draws: Resampled, result: Personalized, clients: Clients, key: Key[Array, ""], blocks: int
) -> tuple[Personalized, Personalized]:
    """Return a solution, and its derivatives along the weights of the resamples of all blocks."""

    def solved(weights: Float[Array, "clients ..."]) -> Personalized:
        data = jax.vmap(reweighted)(clients.data, weights)
        return rollout(
            draws.algorithm,
            eqx.tree_at(lambda x: x.data, clients, data),
            rounds=POLISH,
            key=key,
            warm_start=result,
            # Without an error, since `bootstrap` finds NaN in the replicates and says what to do.
            adjoint=adjoint.implicit(tol=TOL, throw=False, direct=STEPS * draws.resamples),
        ).result

    def changes(number: Int[Array, ""]) -> Personalized:
        own = _numbered(draws, number)
        weights = jax.vmap(partial(_weights, own, clients))(own.numbers)
        return jax.vmap(tangent, out_axes=Personalized(0, 1))(weights - 1)

    shapes = jax.eval_shape(partial(_weights, draws, clients), draws.first)
    # Weights of one give the solution itself. A resample is the derivative along its weights minus
    # one, so the run is linearized once for all of them.
    found, tangent = jax.linearize(solved, jnp.ones(shapes.shape, shapes.dtype))
    return found, jax.lax.map(changes, jnp.arange(blocks))


def _moved(axis: int, leaf: Array, changes: Array) -> Array:
    """Return an array after each of small changes, which are along an axis of theirs.

    Orthonormal bases stay orthonormal.
    """
    moved = jnp.expand_dims(leaf, axis) + changes
    basis = np.asarray(leaf)
    if basis.ndim >= 2 and basis.shape[-2] >= basis.shape[-1]:
        gram = np.swapaxes(basis, -1, -2) @ basis
        if np.abs(gram - np.eye(basis.shape[-1])).max() < ORTHONORMAL:
            return jnp.vectorize(polar, signature="(d,r)->(d,r)")(moved)
    return moved
