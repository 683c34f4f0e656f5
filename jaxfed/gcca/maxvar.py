r"""MAX-VAR generalized canonical correlation analysis: one representation of many views.

.. math:: \min_{G^T G = I,\; Q_j} \tfrac12 \sum_j \|X_j Q_j / \sqrt L - G\|_F^2

over a common representation `G` of the L entities and one linear map `Q_j` per view.

Source: Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized
canonical correlation analysis, IEEE Transactions on Signal Processing. The module
`_memory` adds a block Krylov method, and `shares` treats entities that some clients have not seen.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed._names import caller
from jaxfed.contract import (
    Algorithm,
    Bases,
    Personalized,
    check_count,
    check_factor,
    check_name,
    hyperparameter,
    without_batches,
)
from jaxfed.core.clients.units import ratio_of_features
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.shuffle import shuffled
from jaxfed.gcca._chance import chance_agreement
from jaxfed.gcca._memory import Memory, within_span
from jaxfed.gcca.factors import Factors, factorize
from jaxfed.gcca.shares import Root, divided, root_of, seen_rows
from jaxfed.gcca.views import (
    FactoredView,
    First,
    RandomKey,
    Scores,
    SparseView,
    View,
    Weights,
    check_all_seen,
    check_shape,
    check_views,
)
from jaxfed.linalg import (
    Moment,
    largest_eigenvalue,
    matmul,
    polar,
    thin_product,
)
from jaxfed.linalg.division import ratio
from jaxfed.linalg.moments import should_densify

# The authors' number of gradient steps in a round.
STEPS = 10
# Four blocks bring nearly all that more would bring.
BLOCKS = 4
# Of features of a view: sizes beside which gradient steps stand still.
UNLIKE = 1000.0


class MaxVarMember(NamedTuple):
    """One client's prepared view."""

    view: Any  # View or SparseView; Factors if the inner problem is solved exactly
    mask: Float[Array, " features"]
    unit: Float[Array, ""]  # largest singular value of X / sqrt(L)
    moment: Float[Array, "features features"] | None  # X'X / L, if that is cheaper
    curvature: Float[Array, ""] | None  # one over the step size


class MaxVarServer(NamedTuple):
    """The server's state."""

    shared: Scores  # orthonormal: the representation times the root
    root: Root  # of the share of clients that have seen each entity
    memory: Memory | None


class Map(NamedTuple):
    """One client's state: its map, and the scores it gives."""

    weights: Weights  # Q
    scores: Scores  # M = X Q / sqrt(L)


class MaxVar(Algorithm):
    r"""MAX-VAR GCCA by alternating optimization.

    Each round, a client moves its map to the received representation and sends the scores `M_j` of
    its view. The server takes the orthonormal matrix closest to the mean score. By default, clients
    compute least-squares maps, and the server finds the best representation within the span of
    those of the last rounds and their scores: each round is a step of a block Krylov method instead
    of the power method, with messages of the same size. The server checks that what it remembers
    agrees with each new mean score, and forgets what does not: if messages are lossy, or clients
    are absent, it takes as many rounds as without a memory.

    The authors' AltMaxVar (Fu et al. 2017) is `solver="gradient"` or `solver="exact", memory=0`;
    with a warm start (`jf.gcca.MVLSA`) and ::

        channel=jf.channel.difference(jf.channel.quantize(3))

    these are CuteMaxVar (Shrestha & Fu 2023), with 8 bits before the first round instead of the
    paper's 32; for these, use `jf.Wire(coarse, coarse, jf.channel.lossless())`.

    If clients have seen different entities (`jf.gcca.align`), a view's term of the objective is the
    sum over those that it has seen, and \(G^T W G = I\), where W holds the shares of clients that
    have seen each entity: a row of `G` is drawn to the mean of the available scores. Which entities
    a client has seen is part of its message before the rounds; messages of rounds do not change.
    With a positive `proximal`, an entity keeps its row in a round in which no participant has seen
    it.

    The solution's `shared` is `G`, `(entities, rank)`; `local` holds the `Q_j`,
    `(clients, features, rank)`, with zero rows where a view has fewer features than the widest.
    The objective is half the squared distance between the scores and the received `G`, plus the
    ridge term, averaged over the views; `jf.gcca.cost` is the sum, with the server's own `G`.

    Source: Shrestha & Fu (2023), equations (8) to (17).
    """

    ridge: Float[Array, ""]
    proximal: Float[Array, ""]
    rank: int = eqx.field(static=True)
    solver: Literal["gradient", "exact"] | None = eqx.field(static=True)
    inner_steps: int | None = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    memory: int | None = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        solver: Literal["gradient", "exact"] | None = None,
        inner_steps: int | None = None,
        batch_size: int | None = None,
        memory: int | None = None,
        ridge: float | Array = 0.0,
        proximal: float | Array = 0.0,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of the common representation.
            solver: what a client does in each round. `"exact"` computes the least-squares map, from
                a singular value decomposition of the view that is computed once. Exact maps do not
                depend on their start; their derivatives need distinct singular values, and are zero
                in the directions of equal ones. `"gradient"` takes `inner_steps` steps, of size one
                over the largest eigenvalue of the view's second moment. By default `"gradient"` for
                sparse views or if `inner_steps` or `batch_size` is given, and `"exact"` otherwise.
            inner_steps: gradient steps of a client in each round, for `solver="gradient"`; by
                default 10.
            batch_size: entities in each gradient step, drawn without replacement; by default all
                of them.
            memory: blocks of `rank` columns that the server keeps of earlier rounds, for
                `solver="exact"`; it keeps as many for their products. By default 4; 0 is the
                authors' iteration.
            ridge: weight of `1/2 ||Q_j||^2` in each view's objective. Views with as many features
                as entities fit any representation and so need a positive one.
            proximal: weight of the server's own last representation relative to the mean score.
                Positive values slow the iteration down; the authors use zero.

        Raises:
            ValueError: if the rank, steps or batch size is not a positive whole number, the solver
                is unknown or an option belongs to the other one, the memory is not a whole number
                of at least 0, or a weight is negative or not finite.
        """
        check_count("rank", rank)
        steps = {"inner_steps": inner_steps, "batch_size": batch_size}
        for name, value in steps.items():
            check_count(name, 1 if value is None else value)
        check_count("memory", 0 if memory is None else memory, least=0)
        if solver is None and any(value is not None for value in steps.values()):
            solver = "gradient"
        elif solver is None and memory:
            solver = "exact"
        check_name("solver", "exact" if solver is None else solver, ("gradient", "exact"))
        for name, value in steps.items():
            if solver == "exact" and value is not None:
                raise ValueError(f"{name}: wanted None with solver='exact', got {value}")
        if solver == "gradient" and memory:
            raise ValueError(f"memory: wanted 0 with solver='gradient', got {memory}")
        check_factor("ridge", ridge)
        check_factor("proximal", proximal)
        self.rank, self.solver = rank, solver
        self.inner_steps, self.batch_size, self.memory = inner_steps, batch_size, memory
        self.ridge, self.proximal = hyperparameter(ridge), hyperparameter(proximal)

    @property
    def _steps(self) -> int:
        return STEPS if self.inner_steps is None else self.inner_steps

    def _exact(self, sparse: bool) -> bool:
        return not sparse if self.solver is None else self.solver == "exact"

    @property
    def stochastic(self) -> bool:
        """Whether steps use random entities."""
        return self.batch_size is not None

    @property
    def eigenvectors(self) -> int:
        """The rank, where views are factored."""
        return 0 if self.solver == "gradient" else self.rank

    @property
    def quadratic_in_samples(self) -> bool:
        """Whether all entities take part in each step; two equal ones may be in other batches."""
        return self.batch_size is None

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data, batch size or warm start do not fit.

        Warns:
            UserWarning: if features are too unlike for gradient steps.
        """
        check_views(clients, self.rank)
        check_all_seen(clients, warm_start)
        views, (entities, features) = len(clients.ids), clients.data.shape
        if self.batch_size is not None and self.batch_size > entities:
            raise ValueError(f"batch_size: {self.batch_size} of {entities} entities")
        if isinstance(clients.data, SparseView) and self.solver == "exact":
            raise ValueError("solver: sparse views want 'gradient', got 'exact'")
        gradient = not self._exact(isinstance(clients.data, SparseView))
        if gradient and ratio_of_features(clients) > UNLIKE:
            warnings.warn(
                "clients: gradient steps want features of a view of similar sizes and means near "
                f"zero, got some more than {UNLIKE:.0f} times as large as others, beside which a "
                "run may end far from the optimum; centre views and give features one size",
                stacklevel=caller(),
            )
        if warm_start is not None:
            check_shape("shared", warm_start.shared, (entities, self.rank))
            if warm_start.local is not None:
                check_shape("local", warm_start.local, (views, features, self.rank))

    def prepare(self, data: View | FactoredView | SparseView, client_id, rounds) -> MaxVarMember:
        """Return the view's singular value decomposition, or what gradient steps need."""
        data = data.with_zeros()
        (entities, features), moment = data.shape, None
        if self._exact(isinstance(data, SparseView)):
            # All singular triples, computed once; every round then needs only products.
            factors = factorize(data, min(data.shape))
            return MaxVarMember(factors, data.mask, factors.singular[0] / entities**0.5, None, None)
        if isinstance(data, SparseView):
            largest = _largest_eigenvalue(data)
        else:
            assert isinstance(data, View)
            whole = Moment.from_samples(data.values)
            largest = whole.largest_eigenvalue()
            steps = rounds * self._steps
            if self.batch_size is None and should_densify(entities, features, self.rank, steps):
                moment = whole.matrix()
        unit = jnp.where(largest > 0, jnp.sqrt(jnp.where(largest > 0, largest, 1)), 0)
        curvature = largest + self.ridge.astype(largest.dtype)
        return MaxVarMember(data, data.mask, unit, moment, curvature)

    def first_message(self, key, data: MaxVarMember, warm_start) -> Scores | First:
        """Return the scores of the first map, and the seen entities if not all are seen."""
        scores, observed = self._first(key, data, warm_start).scores, data.view.observed
        # Differences continue from this message if it has the same structure as a round's.
        return scores if observed is None else First(scores, observed)

    def server_init(self, key, first: Scores | First, like, warm_start) -> MaxVarServer:
        """Return the representation closest to the scores, or that of the warm start."""
        first = first if isinstance(first, First) else First(first, None)
        root = root_of(first.observed)
        if warm_start is None:
            shared = polar(divided(first.scores, root))
        else:
            shared = warm_start.shared if root is None else warm_start.shared * root
        blocks = BLOCKS if self.memory is None else self.memory
        # More columns than entities would never be used.
        columns = min(blocks * self.rank, len(shared) - self.rank)
        if not isinstance(like.view, Factors):
            columns = 0
        if columns <= 0:
            return MaxVarServer(shared, root, None)
        none = jnp.zeros((len(shared), columns), shared.dtype)
        return MaxVarServer(shared, root, Memory(none, none))

    def downlink(self, server: MaxVarServer) -> Scores:
        """Return the representation."""
        return divided(server.shared, server.root)

    def client_init(self, key, downlink: Scores, data: MaxVarMember, warm_start) -> Map:
        """Return the map of the first message and its scores."""
        return self._first(key, data, warm_start)

    # First message and first state use the same key, so that both have the same map.
    def _first(self, key: RandomKey, data: MaxVarMember, warm_start: Personalized | None) -> Map:
        if warm_start is None or warm_start.local is None:
            weights = jax.random.normal(key, (len(data.mask), self.rank), data.mask.dtype)
            # Scores of the size of a representation, in whichever units the views are.
            size = data.unit * jnp.sqrt(jnp.sum(data.mask))
            weights = ratio(weights, jnp.where(size > 0, size, 1))
        else:
            weights = warm_start.local
        weights = weights * data.mask[:, None]
        return Map(weights, _scores(data, weights))

    def feasible(self, downlink: Scores, data: MaxVarMember) -> Scores:
        """Return an orthonormal representation.

        If clients have seen different entities, only the server knows its constraint: the objective
        is then that of the representation as it arrives.
        """
        return polar(downlink) if data.view.observed is None else downlink

    def client_step(self, key, downlink: Scores, local: Map, data: MaxVarMember):
        """Move the map towards the representation, and send its scores."""
        ridge = self.ridge.astype(downlink.dtype)
        misfit = seen_rows(data.view.observed, local.scores - downlink)
        distance = jnp.sum(misfit**2) / 2
        # Maps of tiny views are huge. In this order no square overflows if the ridge is zero.
        objective = distance + jnp.sum(ridge * local.weights * local.weights) / 2
        if isinstance(data.view, Factors):
            weights = data.view.solve(downlink, ridge)
        else:
            weights = self._gradient_steps(key, downlink, local.weights, data, ridge)
        scores = _scores(data, weights)
        # What a gradient step of the map gains: nothing is left of a least-squares map.
        gap = jnp.zeros_like(objective)
        if data.curvature is not None:
            move = jnp.sqrt(data.curvature) * (weights - local.weights)
            gap = jnp.sum(move**2) / self._steps
        return scores, Map(weights, scores), {"objective": objective, "gap": gap}

    def _gradient_steps(
        self,
        key: RandomKey,
        downlink: Scores,
        weights: Weights,
        data: MaxVarMember,
        ridge: Float[Array, ""],
    ) -> Weights:
        view, batch, length = data.view, self.batch_size, len(downlink)
        # X'G is the same in all steps of a round over all entities.
        target = view.rmv(downlink) / length**0.5 if batch is None else 0
        curvature = data.curvature
        assert curvature is not None

        def of_all(weights):
            if data.moment is not None:
                return matmul(data.moment, weights) - target
            return view.rmv(view.mv(weights)) / length - target

        def of_batch(weights, key):
            assert batch is not None
            # The beginning of a random permutation, without computing all of it.
            rows = shuffled(key[None], jnp.arange(batch)[None], jnp.asarray(length))[0]
            residual = view.mv(weights, rows) / length**0.5 - downlink[rows]
            # An unbiased estimate of the gradient over all entities.
            return view.rmv(residual, rows) * (length**0.5 / batch)

        def step(weights, key):
            gradient = of_all(weights) if batch is None else of_batch(weights, key)
            return weights - ratio(gradient + ridge * weights, curvature), None

        # Only if needed: splitting keys takes longer than small products.
        keys = None if batch is None else jax.random.split(key, self._steps)
        return jax.lax.scan(step, weights, keys, length=self._steps)[0]

    def server_step(self, key, server: MaxVarServer, uplink: Scores):
        """Take the orthonormal matrix closest to the mean score (the Procrustes problem)."""
        shared, root, memory = server
        product = divided(uplink, root)
        # The mean scores lie in the span of an optimal representation, whose part outside is what
        # the next one gains at most: eigenvalues of a mean of projections lie in [0, 1].
        outside = product - thin_product(shared, shared.T @ product)
        gap = {"gap": jnp.sum(outside**2) / 2}
        product = product + self.proximal.astype(shared.dtype) * shared
        if memory is None:
            return MaxVarServer(polar(product), root, None), gap
        best, memory = within_span(shared, memory, product)
        return MaxVarServer(best, root, memory), gap

    def client_result(self, downlink: Scores, local: Map, data: MaxVarMember) -> Weights:
        """Return the view's map."""
        return local.weights

    def through(self) -> Algorithm:
        """Return the algorithm without memory.

        Raises:
            ValueError: if steps use random batches.
        """
        return dataclasses.replace(without_batches(self, self.batch_size), memory=0)

    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Warn if views that have nothing in common would agree as much."""
        shared, maps = result
        agreed = 1 - 2 * np.asarray(history.get("objective", ()), float)[-1:] / self.rank
        if not agreed.size or maps is None or not all(map(is_known, (shared, maps, self.ridge))):
            return ()
        shared, maps = np.asarray(shared, float), np.asarray(maps)
        # A ridge fits noise less. Without it, a representation of entities that all views have seen
        # is orthonormal, and features that a view does not have are zero.
        complete = shared.ndim == 2 and np.allclose(shared.T @ shared, np.eye(self.rank), atol=1e-3)
        if not complete or self.ridge > 0 or len(maps) < 2:
            return ()
        features, entities = np.any(maps, axis=2).sum(axis=1), len(shared)
        chance = chance_agreement(features, entities)
        if not agreed[0] <= chance:  # also if it is not known
            return ()
        many = features.sum() / len(features)
        return (
            f"{len(features)} views of noise, of {many:.4g} features on average for {entities:,} "
            f"entities, agree as much as these ({chance:.2g} of 1): the representation may have "
            "nothing that the views have in common; set ridge=, or use fewer features.",
        )

    def bases(self, server: MaxVarServer, local: Map) -> Bases:
        """Return the representation, the maps and the scores, which all rotate together."""
        return Bases(shared=(server.shared,), along=tuple(local))


def _scores(data: MaxVarMember, weights: Weights) -> Scores:
    scores = data.view.mv(weights)
    return scores / len(scores) ** 0.5


def _largest_eigenvalue(view: SparseView) -> Float[Array, ""]:
    """Return the largest eigenvalue of X'X / L."""
    entities, features = view.shape

    def product(view, vector):
        return view.rmv(view.mv(vector[:, None]))[:, 0] / entities

    # A fixed key, because the step size should not differ between runs.
    start = jax.random.normal(jax.random.key(0), (features,), view.values.dtype) * view.mask
    return largest_eigenvalue(product, view, start, min(32, entities))
