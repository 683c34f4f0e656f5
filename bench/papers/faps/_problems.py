"""Problems and runs of Wang, Liu & Zhang (2022): consensus on subspaces in federated PCA.

What is called the reference is an independent implementation in NumPy, in double precision. How
many rounds a method takes depends strongly on its random start: one component of the slowest
error is a ratio of two normal numbers. So medians and quartiles over starts are compared with
those of the reference, and a number that the paper prints, which is of one start, with the range.

Two facts make small problems exactly the printed ones. Subspace iteration sees the sum of the
clients' matrices only, so neither the number of samples nor their split matters, nor does a
rotation. And singular values of 1.01^-500 contribute nothing, so 500 features do for more.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float, Key

from jaxfed import Algorithm, Clients, Personalized, metrics
from jaxfed.pca import FAPS, LocalPower, SubspaceIteration
from papers.communication import rounds_to
from papers.intervals import at_least
from papers.report import Cell, Labels
from papers.runs import Seeds, runs

STARTS = 20  # of subspace iteration, at least
NEGLIGIBLE = 1e-3  # an eigenvalue of the pooled matrix beside the largest one
TOLERANCE = 1e-10  # of rule (27)
ACCURATE = 2e-6  # the scaled KKT violation that the paper reports

SSI, POWER = "subspace iteration", "LocalPower, Procrustes"
PRINTED, FIVE, TEN = "FAPS as printed", "FAPS, 5 local steps", "FAPS, 10 local steps"
ROUNDS, TO_KKT = "rounds by rule (27)", f"rounds to KKT {ACCURATE:g}"
KKT, ERROR = "scaled KKT violation", "relative error"
SHARE = "rounds, subspace iteration = 1"  # by rule (27), from the same start
PRODUCTS = "products with a client's matrix"  # which take most of the time


def geometric(features: int, ratio: float) -> Float[Array, " n"]:
    return jnp.asarray(ratio) ** -jnp.arange(features, dtype=float)


def arithmetic(features: int, condition: float) -> Float[Array, " n"]:
    return jnp.linspace(1.0, 1 / condition, features)


def kept_of(values: Float[Array, " n"]) -> Float[Array, " k"]:
    """The singular values whose square is not negligible."""
    return values[values**2 > NEGLIGIBLE * values[0] ** 2]


def shortened(values: Float[Array, " n"], rank: int) -> Float[Array, " k"]:
    """The singular values of a smaller problem, alike for all methods but FAPS as printed.

    Singular values of negligible square become zeros. All methods leave that space at once, but for
    what their start has there: as many directions as the rank hold that, see `starts_in`.
    """
    kept = kept_of(values)
    return jnp.concatenate([kept, jnp.zeros(min(rank, len(values) - len(kept)))])


def starts_in(
    keys: Key[Array, " runs"], features: int, values: Float[Array, " k"], rank: int
) -> Personalized:
    """The printed random starts in so many features, in the axes of a shortened problem."""

    def start(key):
        drawn = jax.random.uniform(key, (features, rank), values.dtype, -1, 1)
        if len(values) == features:
            return drawn
        kept = len(values) - rank
        # The others turned into the first of them: they have the same inner products.
        return jnp.concatenate([drawn[:kept], jnp.linalg.qr(drawn[kept:], "r")])

    return Personalized(jax.vmap(start)(keys), None)


@partial(jax.jit, static_argnames="sizes")
def matrices_of(
    key: Key[Array, ""], sizes: tuple[int, ...], values: Float[Array, " n"]
) -> Float[Array, "d n n"]:
    """The clients' A_i A_iᵀ of the printed random problem (23) with U = I, never forming A.

    With G of uniform entries and GᵀG = R Rᵀ, V = G R⁻ᵀ has orthonormal columns.
    """

    def gram(client):
        key, size = client
        drawn = jax.random.uniform(key, (max(sizes), len(values)), values.dtype, -1, 1)
        drawn = jnp.where(jnp.arange(max(sizes))[:, None] < size, drawn, 0)
        return drawn.T @ drawn

    grams = jax.lax.map(gram, (jax.random.split(key, len(sizes)), jnp.asarray(sizes)))
    root = jnp.linalg.cholesky(grams.sum(0))
    inverse = jax.scipy.linalg.solve_triangular(root, jnp.eye(len(values)), lower=True)
    scaled = values[:, None] * inverse
    return scaled @ grams @ scaled.T


class Outcomes(NamedTuple):
    """Outcomes, one per run."""

    rounds: np.ndarray  # by rule (27); as many as were allowed if it was not met
    accurate: np.ndarray  # after which the KKT violation is small enough; allowed ones if never
    kkt: np.ndarray  # at the end
    error: np.ndarray  # relative, of the singular values at the end
    curve: np.ndarray  # KKT violation, (runs, rounds)
    products: np.ndarray  # of a client's matrix with a basis, a mean over clients


def _violation(whole, result):
    return {"kkt": metrics.scaled_kkt_violation(result, whole)}


@jax.jit
def _errors(whole, shared, values):
    kkt = jax.vmap(lambda z: metrics.scaled_kkt_violation(Personalized(z, None), whole))(shared)
    error = jax.vmap(
        lambda z: metrics.relative_singular_value_error(Personalized(z, None), whole, values)
    )(shared)
    return kkt, error


def solved(
    algorithm: Algorithm,
    matrices: Float[Array, "*runs clients n n"],
    pooled: Float[Array, "n n"],
    values: Float[Array, " n"],
    keys: Key[Array, " runs"],
    rounds: int,
    tol: float | None = TOLERANCE,
    warm_start: Personalized | None = None,
    *,
    in_turn: bool = False,
) -> Outcomes:
    """Run an algorithm for all keys in one compiled call, on one problem or on one for each key."""
    alike = matrices.ndim == 3
    clients = partial(Clients.from_moments, counts=[1] * matrices.shape[-3])
    whole = Clients.from_moments(pooled[None]).data
    solution = runs(
        algorithm,
        clients(matrices) if alike else jax.vmap(clients)(matrices),
        keys,
        rounds,
        warm_start,
        tol=tol,
        measure=Partial(_violation, whole),
        one_for_all=alike,
        in_turn=in_turn,
    )
    rank = algorithm.rank  # pyright: ignore[reportAttributeAccessIssue]
    kkt, error = _errors(whole, solution.result.shared, values[:rank])
    curve, steps = solution.history["kkt"], solution.history.get("local_steps")
    first = rounds_to(curve, ACCURATE)
    return Outcomes(
        # The round that tells the objective of Z^(k) is the one after round k.
        rounds=np.asarray(solution.rounds) - 1,
        accurate=np.where(first < 0, rounds, first),
        kkt=np.asarray(kkt),
        error=np.asarray(error),
        curve=np.asarray(curve),
        products=np.asarray(solution.rounds) + (0 if steps is None else np.nansum(steps, axis=1)),
    )


def starts_of(seeds: Seeds) -> Seeds:
    """The seeds that subspace iteration starts from, `STARTS` at least."""
    return seeds.first(max(len(seeds), STARTS))


def started(seeds: Seeds) -> str:
    """Say in a note how many starts there are."""
    return f"{SSI.capitalize()}: {len(starts_of(seeds))} starts"


def few_of(seeds: Seeds) -> Seeds:
    """A third of the seeds, for experiments that take long."""
    return seeds.first(max(1, len(seeds) // 3))


def alone(
    rank: int,
    values: Float[Array, " n"],
    seeds: Seeds,
    rounds: int,
    tol: float | None = TOLERANCE,
    *,
    in_turn: bool = False,
) -> Outcomes:
    """Subspace iteration on the equivalent problem of one client and no rotation."""
    pooled = jnp.diag(values**2)
    keys = starts_of(seeds).keys(0)
    return solved(
        SubspaceIteration(rank, stop="objective"),
        pooled[None],
        pooled,
        values,
        keys,
        rounds,
        tol,
        in_turn=in_turn,
    )


def drawn(
    seeds: Seeds, sizes: tuple[int, ...], values: Float[Array, " n"]
) -> Float[Array, "runs d n n"]:
    """Data of which the split matters: another draw for each seed."""
    return jnp.stack([matrices_of(key, sizes, values) for key in seeds.keys(1)])


def on(
    matrices: Float[Array, "runs d n n"],
    algorithm: Algorithm,
    values: Float[Array, " n"],
    seeds: Seeds,
    rounds: int,
    tol: float | None = TOLERANCE,
    *,
    in_turn: bool = False,
) -> Outcomes:
    """An algorithm on drawn data."""
    pooled, keys = jnp.diag(values**2), seeds.keys(0)
    return solved(algorithm, matrices, pooled, values, keys, rounds, tol, in_turn=in_turn)


def together(
    algorithm: Algorithm,
    values: Float[Array, " n"],
    sizes: tuple[int, ...],
    seeds: Seeds,
    rounds: int,
) -> Outcomes:
    """An algorithm on data that are drawn for it."""
    return on(drawn(seeds, sizes, values), algorithm, values, seeds, rounds)


class Large(NamedTuple):
    """A problem of printed size without what is negligible, and random starts."""

    values: Float[Array, " k"]
    starts: Personalized
    keys: Key[Array, " runs"]


def large(seeds: Seeds, values: Float[Array, " n"], rank: int, part: int = 0) -> Large:
    """A problem of these singular values with as many starts as subspace iteration takes."""
    keys, kept = starts_of(seeds).keys(part), shortened(values, rank)
    return Large(kept, starts_in(keys, len(values), kept, rank), keys)


def parts_of(
    seeds: Seeds, clients: int, samples: int, values: Float[Array, " n"]
) -> Float[Array, "runs d k k"]:
    """Clients of equally many samples for each of few seeds, without negligible features."""
    sizes = (samples // clients,) * clients
    return drawn(few_of(seeds), sizes, kept_of(values))


def as_printed(
    algorithm: Algorithm,
    problem: Large,
    rounds: int,
    parts: Float[Array, "runs d k k"] | None = None,
) -> Outcomes:
    """An algorithm from every start on all samples together, or from the first ones on parts."""
    pooled = jnp.diag(problem.values**2)
    matrices, count = pooled[None], len(problem.keys)
    if parts is not None:
        width = [(0, 0), (0, 0), *[(0, len(pooled) - parts.shape[-1])] * 2]
        matrices, count = jnp.pad(parts, width), len(parts)
    first = Personalized(problem.starts.shared[:count], None)
    return solved(
        algorithm,
        matrices,
        pooled,
        problem.values,
        problem.keys[:count],
        rounds,
        warm_start=first,
        in_turn=True,
    )


def fewer(rounds: Any, rival: Any, printed: float, rival_printed: float) -> Cell:
    """The paper's claim of fewer rounds, from the same starts, by half the margin it prints."""
    margin = at_least((rival_printed - printed) / 2)
    return Cell((np.asarray(rival) - rounds).tolist(), paper=margin, by="claim")


def power(rank: int) -> LocalPower:
    return LocalPower(rank, alignment="procrustes", stop="objective")


def printed(rank: int) -> FAPS:
    return FAPS(rank, local_solver="relative_change", stop="objective")


PAPERS = {POWER: power, PRINTED: printed}  # the methods to which the split matters


def put(measured: dict[Labels, Any], runs: Outcomes, *labels: Any, beside: Any = None) -> None:
    """Record outcomes, and rounds relative to those of subspace iteration."""
    if beside is not None:
        measured[(*labels, SHARE)] = runs.rounds / beside
    for quantity, values in (
        (ROUNDS, runs.rounds),
        (TO_KKT, runs.accurate),
        (KKT, runs.kkt),
        (ERROR, runs.error),
    ):
        measured[(*labels, quantity)] = values
