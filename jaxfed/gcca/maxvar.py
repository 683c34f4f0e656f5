r"""MAX-VAR generalized canonical correlation analysis: one representation of many views.

.. math:: \min_{G^T G = I,\; Q_j} \tfrac12 \sum_j \|X_j Q_j / \sqrt L - G\|_F^2

over a common representation `G` of the L entities and one linear map `Q_j` per view.

Source: Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized
canonical correlation analysis, IEEE Transactions on Signal Processing. `memory` adds block Lanczos
iteration with the thick restarts of Wu & Simon (2000), Thick-restart Lanczos method for large
symmetric eigenvalue problems. The module `shares` treats entities that some clients have not seen.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import (
    Algorithm,
    Bases,
    DifferentiatedThrough,
    HasBases,
    Personalized,
    check_count,
    check_factor,
    check_name,
    hyperparameter,
    without_batches,
)
from jaxfed.core.common.shuffle import shuffled
from jaxfed.gcca.factors import factorize
from jaxfed.gcca.shares import Root, divided, root_of, seen_rows
from jaxfed.gcca.views import (
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
    top_eigenvectors,
)
from jaxfed.linalg.division import ratio
from jaxfed.linalg.moments import should_densify

# How long a column outside the memory's span must be to join it, in units of rounding error.
NOISE = 32


class Member(NamedTuple):
    """One client's prepared view."""

    view: Any  # View or SparseView; Factors if the inner problem is solved exactly
    mask: Float[Array, " features"]
    moment: Float[Array, "features features"] | None  # X'X / L, if that is cheaper
    curvature: Float[Array, ""] | None  # one over the step size


class Memory(NamedTuple):
    """Representations of earlier rounds, and their products with the operator.

    With exact maps, the mean score is a symmetric operator applied to the representation.
    """

    basis: Float[Array, "entities columns"]  # orthonormal; unused columns are zero
    products: Float[Array, "entities columns"]  # of the operator with the basis


class Server(NamedTuple):
    """The server's state."""

    shared: Scores  # orthonormal: the representation times the root
    root: Root  # of the share of clients that have seen each entity
    memory: Memory | None


class Map(NamedTuple):
    """One client's state: its map, and the scores it gives."""

    weights: Weights  # Q
    scores: Scores  # M = X Q / sqrt(L)


class MaxVar(Algorithm, DifferentiatedThrough, HasBases):
    r"""MAX-VAR GCCA by alternating optimization.

    Each round, a client moves its map towards the received representation, by a few gradient steps
    or all the way, and sends the scores `M_j` of its view. The server takes the orthonormal matrix
    closest to the mean score.
    With a lossless channel this is AltMaxVar (Fu et al. 2017). With ::

        channel=jf.channel.difference(jf.channel.quantize(3))

    it is CuteMaxVar (Shrestha & Fu 2023), with 8 bits before the first round instead of the paper's
    32; for these, use `jf.Wire(coarse, coarse, jf.channel.lossless())`. A warm start
    (`jf.gcca.MVLSA`) saves many rounds, and so does `solver="exact", memory=4`, with messages of
    the same size: each round of exact maps is then a step of a block Krylov method instead of the
    power method. A memory needs every client in each round and a lossless channel, since it
    combines products of different rounds: on six views of digits the cost stays 0.2 % above the
    minimum with differences of eight bits, 0.7 % with bfloat16, and 180 % with differences of three
    bits.

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
    solver: Literal["gradient", "exact"] = eqx.field(static=True)
    inner_steps: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    memory: int = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        solver: Literal["gradient", "exact"] = "gradient",
        inner_steps: int = 10,
        batch_size: int | None = None,
        memory: int = 0,
        ridge: float | Array = 0.0,
        proximal: float | Array = 0.0,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of the common representation.
            solver: what a client does in each round. `"gradient"` takes `inner_steps` steps, of
                size one over the largest eigenvalue of its second moment. `"exact"` computes the
                least-squares map, from a singular value decomposition of the view that is computed
                once. Exact maps do not depend on their start; their derivatives need distinct
                singular values, and are zero in the directions of equal ones.
            inner_steps: gradient steps of a client in each round.
            batch_size: entities in each step, drawn without replacement; by default all of them.
            memory: blocks of `rank` columns that the server keeps of earlier rounds, with exact
                maps, to find the best representation within their span; it keeps as many for their
                products. 0 is the authors' iteration; 4 brings nearly all of the gain.
            ridge: weight of `1/2 ||Q_j||^2` in each view's objective. Views with as many features
                as entities fit any representation and so need a positive one.
            proximal: weight of the server's own last representation relative to the mean score.
                Positive values slow the iteration down; the authors use zero.

        Raises:
            ValueError: if the rank, steps or batch size is not a positive whole number, the solver
                is unknown or does not support a batch size or a memory, the memory is not a whole
                number of at least 0, or a weight is negative or not finite.
        """
        check_count("rank", rank)
        check_count("inner_steps", inner_steps)
        check_name("solver", solver, ("gradient", "exact"))
        if batch_size is not None:
            check_count("batch_size", batch_size)
            if solver == "exact":
                raise ValueError(f"batch_size: solver='exact' needs all entities, got {batch_size}")
        check_count("memory", memory, least=0)
        if memory and solver != "exact":
            raise ValueError(f"memory: solver={solver!r} wants 0, got {memory}")
        check_factor("ridge", ridge)
        check_factor("proximal", proximal)
        self.rank, self.solver = rank, solver
        self.inner_steps, self.batch_size, self.memory = inner_steps, batch_size, memory
        self.ridge, self.proximal = hyperparameter(ridge), hyperparameter(proximal)

    @property
    def quadratic_in_samples(self) -> bool:
        """Whether all entities take part in each step; two equal ones may be in other batches."""
        return self.batch_size is None

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round, as a memory needs."""
        return self.memory > 0

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data, batch size or warm start do not fit."""
        check_views(clients, self.rank)
        check_all_seen(clients, warm_start)
        views, (entities, features) = len(clients.ids), clients.data.shape
        if self.batch_size is not None and self.batch_size > entities:
            raise ValueError(f"batch_size: {self.batch_size} of {entities} entities")
        if isinstance(clients.data, SparseView) and self.solver == "exact":
            raise ValueError("solver: sparse views want 'gradient', got 'exact'")
        if warm_start is not None:
            check_shape("shared", warm_start.shared, (entities, self.rank))
            if warm_start.local is not None:
                check_shape("local", warm_start.local, (views, features, self.rank))

    def prepare(self, data: View | SparseView, client_id, rounds) -> Member:
        """Return the view's singular value decomposition, or what gradient steps need."""
        data = data.with_zeros()
        if self.solver == "exact":
            # All singular triples, computed once; every round then needs only products.
            return Member(factorize(data, min(data.shape)), data.mask, None, None)
        (entities, features), moment = data.shape, None
        if isinstance(data, SparseView):
            largest = _largest_eigenvalue(data)
        else:
            whole = Moment.from_samples(data.values)
            largest = whole.largest_eigenvalue()
            steps = rounds * self.inner_steps
            if self.batch_size is None and should_densify(entities, features, self.rank, steps):
                moment = whole.matrix()
        return Member(data, data.mask, moment, largest + self.ridge.astype(largest.dtype))

    def first_message(self, key, data: Member, warm_start) -> Scores | First:
        """Return the scores of the first map, and the seen entities if not all are seen."""
        scores, observed = self._first(key, data, warm_start).scores, data.view.observed
        # Differences continue from this message if it has the same structure as a round's.
        return scores if observed is None else First(scores, observed)

    def server_init(self, key, first: Scores | First, like, warm_start) -> Server:
        """Return the representation closest to the scores, or that of the warm start."""
        first = first if isinstance(first, First) else First(first, None)
        root = root_of(first.observed)
        if warm_start is None:
            shared = polar(divided(first.scores, root))
        else:
            shared = warm_start.shared if root is None else warm_start.shared * root
        # More columns than entities would never be used.
        columns = min(self.memory * self.rank, len(shared) - self.rank)
        if columns <= 0:
            return Server(shared, root, None)
        none = jnp.zeros((len(shared), columns), shared.dtype)
        return Server(shared, root, Memory(none, none))

    def downlink(self, server: Server) -> Scores:
        """Return the representation."""
        return divided(server.shared, server.root)

    def client_init(self, key, downlink: Scores, data: Member, warm_start) -> Map:
        """Return the map of the first message and its scores."""
        return self._first(key, data, warm_start)

    # First message and first state use the same key, so that both have the same map.
    def _first(self, key: RandomKey, data: Member, warm_start: Personalized | None) -> Map:
        if warm_start is None or warm_start.local is None:
            weights = jax.random.normal(key, (len(data.mask), self.rank), data.mask.dtype)
        else:
            weights = warm_start.local
        weights = weights * data.mask[:, None]
        return Map(weights, _scores(data, weights))

    def client_step(self, key, downlink: Scores, local: Map, data: Member):
        """Move the map towards the representation, and send its scores."""
        ridge = self.ridge.astype(downlink.dtype)
        misfit = seen_rows(data.view.observed, local.scores - downlink)
        distance = jnp.sum(misfit**2) / 2
        # Maps of tiny views are huge. In this order no square overflows if the ridge is zero.
        objective = distance + jnp.sum(ridge * local.weights * local.weights) / 2
        if self.solver == "exact":
            weights = data.view.solve(downlink, ridge)
        else:
            weights = self._gradient_steps(key, downlink, local.weights, data, ridge)
        scores = _scores(data, weights)
        return scores, Map(weights, scores), {"objective": objective}

    def _gradient_steps(
        self,
        key: RandomKey,
        downlink: Scores,
        weights: Weights,
        data: Member,
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
        keys = None if batch is None else jax.random.split(key, self.inner_steps)
        return jax.lax.scan(step, weights, keys, length=self.inner_steps)[0]

    def server_step(self, key, server: Server, uplink: Scores):
        """Take the orthonormal matrix closest to the mean score (the Procrustes problem)."""
        shared, root, memory = server
        product = divided(uplink, root) + self.proximal.astype(shared.dtype) * shared
        if memory is None:
            return Server(polar(product), root, None), {}
        best, memory = _within_span(shared, memory, product)
        return Server(best, root, memory), {}

    def client_result(self, downlink: Scores, local: Map, data: Member) -> Weights:
        """Return the view's map."""
        return local.weights

    def through(self) -> Algorithm:
        """Return the algorithm without memory.

        Raises:
            ValueError: if steps use random batches.
        """
        return dataclasses.replace(without_batches(self, self.batch_size), memory=0)

    def bases(self, server: Server, local: Map) -> Bases:
        """Return the representation, the maps and the scores, which all rotate together."""
        return Bases(shared=(server.shared,), along=tuple(local))


def _within_span(shared: Scores, memory: Memory, product: Scores) -> tuple[Scores, Memory]:
    """Apply the operator to the best representation in the span of the memory and the received one.

    For the best one, a Rayleigh-Ritz approximation, this product is known without a message. It
    extends the span by the same directions as the residual would, but unlike the residual it
    converges, so that messages change less and less.
    """
    basis, products = memory
    rank, columns = shared.shape[1], basis.shape[1]
    new, images = shared, product

    def outside(new, images):
        inside = matmul(basis.T, new)
        return new - matmul(basis, inside), images - matmul(products, inside)

    new, images = outside(new, images)
    # Columns of rounding errors are left out. Rotating and scaling the others has no derivative,
    # because only their span matters.
    gram = jax.lax.stop_gradient(matmul(new.T, new))
    squares, turn = top_eigenvectors(gram, rank)
    clear = squares > NOISE * jnp.finfo(squares.dtype).eps
    turn = turn * jnp.where(clear, jax.lax.rsqrt(jnp.where(clear, squares, 1)), 0)
    new, images = outside(matmul(new, turn), matmul(images, turn))
    unused = jnp.diag(1 - clear.astype(new.dtype))
    for _ in range(2):
        # A Newton-Schulz step to orthonormal columns: values nearly are, but derivatives are not.
        half = 1.5 * jnp.eye(rank, dtype=new.dtype) - (matmul(new.T, new) + unused) / 2
        new, images = matmul(new, half), matmul(images, half)

    span = jnp.concatenate([basis, new], axis=1)
    images = jnp.concatenate([products, images], axis=1)
    projected = matmul(span.T, images)
    # The operator has no negative eigenvalue, so zero columns come last.
    empty = jnp.sum(jax.lax.stop_gradient(span) ** 2, axis=0) < 0.5
    projected = (projected + projected.T) / 2 - jnp.diag(empty.astype(span.dtype))
    # Computed twice, because the derivative of a span has no part within it.
    best = top_eigenvectors(projected, rank)[1]
    kept = top_eigenvectors(projected, columns)[1]
    # In the basis nearest to the received one; if all that is new is rounding, use its product.
    best = matmul(best, polar(matmul(matmul(span, best).T, shared)))
    image = jnp.where(jnp.any(clear), matmul(images, best), product)
    return polar(image), Memory(matmul(span, kept), matmul(images, kept))


def _scores(data: Member, weights: Weights) -> Scores:
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
