r"""Deep MAX-VAR generalized canonical correlation analysis: one neural network per view.

.. math:: \min_{G^T G = I,\; G^T 1 = 0,\; S_j} \tfrac12 \sum_j \|S_j(X_j) / \sqrt L - G\|_F^2

over a common representation `G` of the L entities and one network `S_j` per view.

Source: Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized
canonical correlation analysis, IEEE Transactions on Signal Processing; Lyu & Fu (2020), Nonlinear
multiview analysis.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.contract import (
    Algorithm,
    Diagnostics,
    Personalized,
    check_count,
    check_factor,
    check_instance,
    hyperparameter,
    without_batches,
)
from jaxfed.core.common.processes import finite
from jaxfed.core.common.returned import described
from jaxfed.gcca import _networks as networks
from jaxfed.gcca._networks import Maker
from jaxfed.gcca.views import RandomKey, Scores, View, Views, check_shape, check_views
from jaxfed.linalg import polar


class Learner(NamedTuple):
    """One client's state."""

    arrays: PyTree  # of its network, including running statistics
    optimizer: PyTree  # the optimizer's state
    order: Int[Array, " entities"] | None  # of the entities in batches
    scores: Scores  # M = S(X) / sqrt(L)


class DeepMaxVar(Algorithm):
    r"""MAX-VAR GCCA with one network per view, by alternating optimization.

    Each round, a client trains its network towards the received representation, in some passes over
    its view, and sends the scores \(M_j = S_j(X_j) / \sqrt L\). The server takes the orthonormal
    matrix with zero-mean columns that is closest to the mean score. Columns have zero mean because
    otherwise all networks, unlike linear maps of centred views, could return a constant.
    With a lossless channel this is the paper's AltMaxVar-Deep. With ::

        channel=jf.channel.difference(jf.channel.quantize(3))

    it is CuteMaxVar-Deep.

    The loss of a batch is half the mean squared distance between the network's outputs and
    \(\sqrt L\, G\), an unbiased estimate of the view's term of the objective. On this scale, which
    does not matter to Adam, good step sizes do not depend on L. The order of entities in
    batches is drawn once. Every round starts with the first batch of an epoch. If the batch size
    does not divide the number of entities, the last batch is filled up with the first entities.

    `network(features, mask=mask, key=key)` creates the network of a view, an Equinox module whose
    floating-point arrays are its parameters. `features` is the number of features of the widest
    view; `mask` is 1 for a view's real features and 0 for padding. All views' networks have the
    same layers. A module with a field `statistics`, such as those of
    `functools.partial(jf.models.Perceptron, outputs=rank)`, maps batches: `module(batch)` returns
    outputs computed with the running statistics, `module.in_training(batch)` returns outputs
    computed with the batch's statistics, and the next running statistics. A module without that
    field, such as an `equinox.nn.MLP`, maps one entity.

    The solution's `shared` is `G`, `(entities, rank)`; `local` holds the networks' arrays with a
    leading client axis. `represent` applies them to the same or other entities. A warm start
    continues with the networks and the representation, but a new order and a new optimizer state.
    The objective is half the squared distance between the scores and the received `G`, averaged
    over the views.

    The lowest cost is not the best representation: networks with many parameters for few entities
    learn to agree on what the views do not share. Use fewer units, passes or rounds.

    `step_size` and `proximal` are traced leaves, for sweeps and derivatives. Derivatives through
    Adam need a positive `eps_root`; otherwise they are not finite for parameters without a
    gradient. Each new optimizer or network function is compiled anew, so share one among runs.

    Source: Shrestha & Fu (2023), Algorithm 1, equations (8) to (17), Section V-B.
    """

    step_size: Float[Array, ""]
    proximal: Float[Array, ""]
    network: Maker = eqx.field(static=True)
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    rank: int = eqx.field(static=True)
    inner_epochs: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)

    def __init__(
        self,
        network: Maker,
        optimizer: optax.GradientTransformation,
        *,
        rank: int,
        inner_epochs: int = 10,
        batch_size: int | None = None,
        step_size: float | Array = 1.0,
        proximal: float | Array = 0.0,
    ):
        """Set up the algorithm.

        Args:
            network: function that creates the network of a view; see the class.
            optimizer: optimizer of the inner steps; clients keep its state from round to round.
            rank: number of components of the common representation, and of a network's outputs.
            inner_epochs: passes of a client over its view in each round.
            batch_size: entities in each step; by default all of them.
            step_size: factor on the optimizer's updates.
            proximal: weight of the server's own last representation relative to the mean score.
                Positive values slow the iteration down; the authors use zero.

        Raises:
            ValueError: if `network` is not a function or `optimizer` not an optimizer, the rank,
                epochs or batch size is not a positive whole number, or the step size or weight is
                negative or not finite.
        """
        if not callable(network) or isinstance(network, eqx.Module):
            raise ValueError(
                "network: wanted a function (features, *, mask, key) that makes a view's network, "
                f"got {type(network).__name__}"
            )
        wanted = "an optax.GradientTransformation"
        check_instance("optimizer", optimizer, optax.GradientTransformation, wanted)
        check_count("rank", rank)
        check_count("inner_epochs", inner_epochs)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        check_factor("step_size", step_size)
        check_factor("proximal", proximal)
        self.network, self.optimizer, self.rank = network, optimizer, rank
        self.inner_epochs, self.batch_size = inner_epochs, batch_size
        self.step_size, self.proximal = hyperparameter(step_size), hyperparameter(proximal)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data, network, batch size or warm start do not fit."""
        check_views(clients, self.rank, dense="networks need", complete="networks need")
        values = clients.data.values
        entities = clients.data.shape[0]
        if self.rank >= entities:
            raise ValueError(
                f"rank: {self.rank} orthonormal components of mean zero need more entities "
                f"than that, got {entities}"
            )
        if self.batch_size is not None and self.batch_size > entities:
            raise ValueError(f"batch_size: {self.batch_size} of {entities} entities")
        batch = entities if self.batch_size is None else self.batch_size
        arrays = networks.check_network(self.network, clients.data, batch, self.rank)
        if warm_start is None:
            return
        check_shape("shared", warm_start.shared, (entities, self.rank))
        wanted = jax.tree.map(lambda x: ((len(values), *x.shape), x.dtype), arrays)
        local = jax.tree.map(
            lambda x: (x.shape, x.dtype), eqx.filter(warm_start.local, eqx.is_array)
        )
        if warm_start.local is not None and local != wanted:
            raise ValueError(
                f"warm_start: wanted as local part the arrays of {len(values)} networks, "
                f"{described(wanted)}, got {described(local)}"
            )
        for leaf in jax.tree.leaves((warm_start.shared, warm_start.local)):
            # On the host, since JAX would trace it within a traced function.
            if not isinstance(leaf, Tracer) and not finite(leaf):
                raise ValueError("warm_start: NaN or infinite numbers")

    def first_message(self, key, data: View, warm_start) -> Scores:
        """Return the scores of the first network."""
        return self._first(key, data, warm_start)[1]

    def server_init(self, key, first: Scores, like, warm_start) -> Scores:
        """Return the representation closest to the scores, or that of the warm start."""
        return _closest(first) if warm_start is None else warm_start.shared

    def client_init(self, key, downlink: Scores, data: View, warm_start) -> Learner:
        """Return the network of the first message and the order of the entities."""
        # Half of the split key is for the network, as in `first_message`, the other for the order.
        network, scores = self._first(key, data, warm_start)
        order = None
        if self.batch_size is not None:
            entities = jnp.arange(len(scores), dtype=jnp.int32)
            order = jax.random.permutation(jax.random.split(key)[1], entities)
        state = self.optimizer.init(networks.partition(network)[0])
        return Learner(eqx.filter(network, eqx.is_array), state, order, scores)

    def _first(
        self, key: RandomKey, data: View, warm_start: Personalized | None
    ) -> tuple[Any, Scores]:
        features, dtype = data.shape[-1], data.values.dtype
        if warm_start is None or warm_start.local is None:
            arrays = networks.initial_arrays(
                self.network, jax.random.split(key)[0], data.mask, dtype
            )
        else:
            arrays = eqx.filter(warm_start.local, eqx.is_array)
        network = eqx.combine(arrays, networks.frame_of(self.network, features, dtype)[1])
        return network, networks.scores_of(network, data.values)

    def downlink(self, server: Scores) -> Scores:
        """Return the representation."""
        return server

    def client_step(self, key, downlink: Scores, local: Learner, data: View):
        """Train the network towards the representation, and send its scores."""
        values = data.values
        frame = networks.frame_of(self.network, values.shape[-1], values.dtype)[1]
        objective = jnp.sum((local.scores - downlink) ** 2) / 2
        batches = self._batches(local.order, values, downlink * len(values) ** 0.5)

        # Only arrays can be carried through a scan, so each step reassembles the network.
        def step(carry, batch):
            arrays, state = carry
            network = eqx.combine(arrays, frame)
            parameters, rest = networks.partition(network)
            gradient, statistics = jax.grad(networks.loss, has_aux=True)(parameters, rest, *batch)
            updates, state = self.optimizer.update(gradient, state, parameters)
            # The optimizer is static; this factor makes its step size a traced one.
            updates = jax.tree.map(lambda u: self.step_size.astype(u.dtype) * u, updates)
            parameters = optax.apply_updates(parameters, updates)
            network = networks.with_statistics(eqx.combine(parameters, rest), statistics)
            return (eqx.filter(network, eqx.is_array), state), None

        def epoch(carry, _):
            return jax.lax.scan(step, carry, batches)[0], None

        carry = local.arrays, local.optimizer
        arrays, state = jax.lax.scan(epoch, carry, length=self.inner_epochs)[0]
        scores = networks.scores_of(eqx.combine(arrays, frame), values)
        return scores, Learner(arrays, state, local.order, scores), {"objective": objective}

    def _batches(self, order: Int[Array, " entities"] | None, *tables: Array) -> tuple[Array, ...]:
        """Return the tables' rows, batch by batch."""
        if order is None:
            return tuple(table[None] for table in tables)
        assert self.batch_size is not None
        number = -(-len(order) // self.batch_size)
        # `resize` fills the last batch with the first rows. Rows are gathered once a round rather
        # than at every step.
        rows = jnp.resize(order, (number, self.batch_size))
        return tuple(table[rows] for table in tables)

    def server_step(self, key, server: Scores, uplink: Scores) -> tuple[Scores, Diagnostics]:
        """Take the orthonormal zero-mean matrix closest to the mean score."""
        return _closest(uplink, self.proximal.astype(server.dtype) * server), {}

    def client_result(self, downlink: Scores, local: Learner, data: View) -> PyTree:
        """Return the arrays of the view's network."""
        return local.arrays

    def through(self) -> Algorithm:
        """Return the algorithm itself.

        Raises:
            ValueError: if steps use random batches.
        """
        return without_batches(self, self.batch_size)

    def outputs(self, local: PyTree, views: Views) -> Float[Array, "views entities rank"]:
        """Return each network's outputs for the entities of its view, using running statistics.

        Args:
            local: the networks' arrays, `result.local`.
            views: the same views of the same or other entities.

        Returns:
            The outputs, which approximate `G` times the root of the number of entities.

        Raises:
            ValueError: if the clients do not hold dense views, or their number or width differs.
        """
        check_views(views, 1, "views", dense="networks need", complete="networks need")
        values = views.data.values
        owners = {len(leaf) for leaf in jax.tree.leaves(local)}
        if owners != {len(values)}:
            raise ValueError(f"local, views: {owners} networks and {len(values)} views")
        arrays, frame = networks.frame_of(self.network, values.shape[-1], values.dtype)
        shapes = jax.tree.map(lambda x: x.shape[1:], eqx.filter(local, eqx.is_array))
        if shapes != jax.tree.map(lambda x: x.shape, arrays):
            raise ValueError(
                f"views: the networks are not for a widest view of {values.shape[-1]} features"
            )

        def one(arrays, values):
            return networks.applied(eqx.combine(arrays, frame), values)

        return jax.vmap(one)(eqx.filter(local, eqx.is_array), values)

    def represent(self, local: PyTree, views: Views) -> Float[Array, "entities rank"]:
        """Compute the common representation of entities, seen in training or not.

        The server would compute the same from the networks' scores: an orthonormal matrix with
        zero-mean columns. Multiply by the root of the number of entities to compare representations
        of different numbers of entities.

        Args:
            local: the networks' arrays, `result.local`.
            views: the same views of the same or other entities.

        Returns:
            The representation.

        Raises:
            ValueError: as `outputs`.
        """
        return _closest(self.outputs(local, views).mean(0))


def _closest(scores: Scores, proximal: Scores | float = 0.0) -> Scores:
    """Return the orthonormal matrix with zero-mean columns closest to the scores.

    Source: Shrestha & Fu (2023), equations (9) and (15).
    """
    # Only the scores are centred: the server's own G, in the proximal term, is already.
    return polar(scores - scores.mean(0) + proximal)
