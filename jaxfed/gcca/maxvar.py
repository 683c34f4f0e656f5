r"""MAX-VAR generalized canonical correlation analysis: one representation of many views.

.. math:: \min_{G^T G = I,\; Q_j} \tfrac12 \sum_j \|X_j Q_j / \sqrt L - G\|_F^2

over a common representation `G` of the L entities and one linear map `Q_j` per view.

Source: Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized
canonical correlation analysis, IEEE Transactions on Signal Processing.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.clients import Clients
from jaxfed.gcca.views import check_count, check_views
from jaxfed.linalg import Moment, polar, should_densify

Scores = Float[Array, "entities rank"]


class Member(NamedTuple):
    """One client's prepared view."""

    values: Float[Array, "entities features"]
    mask: Float[Array, " features"]
    moment: Moment  # X'X / L
    step_size: Float[Array, ""]


class Map(NamedTuple):
    """One client's state: its map, and the scores it gives."""

    weights: Float[Array, "features rank"]  # Q
    scores: Scores  # M = X Q / sqrt(L)


class MaxVar(Algorithm):
    r"""MAX-VAR GCCA by alternating optimization.

    Each round a client takes a few gradient steps towards the received representation and sends
    the scores `M_j` of its view; the server takes the orthonormal matrix closest to their mean.
    With a lossless channel this is AltMaxVar (Fu et al. 2017); with

        channel=jf.channel.difference(jf.channel.quantize(3))

    it is CuteMaxVar (Shrestha & Fu 2023). A warm start (`jf.gcca.MVLSA`) saves many rounds.

    The solution's `shared` is `G`, `(entities, rank)`; `local` are the `Q_j`,
    `(clients, features, rank)`, with zero rows where a view has fewer features than the widest.
    The objective is the mean over the views of half the squared distance between the scores and
    the received `G`; `jf.gcca.cost` is the sum, at the server's own `G`.

    Source: Shrestha & Fu (2023), equations (8) to (17).
    """

    proximal: Float[Array, ""]
    rank: int = eqx.field(static=True)
    inner_steps: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        *,
        inner_steps: int = 10,
        batch_size: int | None = None,
        proximal: float | Array = 0.0,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of the common representation.
            inner_steps: gradient steps of a client in each round, with step size one over the
                largest eigenvalue of its second moment.
            batch_size: entities in each step, drawn without replacement; None for all of them.
            proximal: weight of the server's own last representation beside the mean of the
                scores. A positive one slows the iteration down; zero is what the authors run.

        Raises:
            ValueError: for a rank, steps or a batch that are not positive whole numbers, and a
                weight that is negative or not finite.
        """
        check_count("rank", rank)
        check_count("inner_steps", inner_steps)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        if not isinstance(proximal, Tracer):
            weight = np.asarray(proximal)
            if (
                weight.dtype.kind not in "fiu"
                or not np.isfinite(weight).all()
                or (weight < 0).any()
            ):
                raise ValueError(f"proximal: wanted a number of at least 0, got {proximal!r}")
        self.rank, self.inner_steps, self.batch_size = rank, inner_steps, batch_size
        self.proximal = jnp.asarray(proximal)

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse data, a batch or a warm start that do not fit.

        Raises:
            ValueError: as said above.
        """
        check_views(clients, self.rank)
        views, entities, features = clients.data.values.shape
        if self.batch_size is not None and self.batch_size > entities:
            raise ValueError(f"batch_size: {self.batch_size} of {entities} entities")
        if start is None:
            return
        for name, part, wanted in (
            ("shared", start.shared, (entities, self.rank)),
            ("local", start.local, (views, features, self.rank)),
        ):
            if part.shape != wanted:
                raise ValueError(f"warm_start: wanted {name} of shape {wanted}, got {part.shape}")

    def prepare(self, data, client_id, rounds):
        """The view's second moment, which the steps need, and their size."""
        del client_id
        moment = Moment.from_samples(data.values)
        largest = moment.largest_eigenvalue()
        (entities, features), steps = data.values.shape, rounds * self.inner_steps
        if self.batch_size is None and should_densify(entities, features, self.rank, steps):
            moment = moment.densified()
        tiny = jnp.finfo(largest.dtype).tiny
        return Member(data.values, data.mask, moment, 1 / jnp.maximum(largest, tiny))

    def client_init(self, key, data, start):
        """Send the scores of the first map."""
        if start is None:
            weights = jax.random.normal(key, (len(data.mask), self.rank), data.values.dtype)
        else:
            weights = start.local
        weights = weights * data.mask[:, None]
        scores = _scores(data, weights)
        return scores, Map(weights, scores)

    def server_init(self, key, uplink, start):
        """The representation closest to the scores, or the one given."""
        del key
        return polar(uplink) if start is None else start.shared

    def downlink(self, server):
        """The representation."""
        return server

    def client_step(self, key, downlink, local, data):
        """Gradient steps of the map towards the representation; send the scores."""
        difference = local.scores - downlink
        objective = jnp.sum(difference**2) / 2
        length = len(data.values)
        root = jnp.sqrt(jnp.asarray(length, data.values.dtype))
        batch, keys = self.batch_size, jax.random.split(key, self.inner_steps)
        target = data.values.T @ downlink / root if batch is None else None

        def step(weights, key):
            if batch is None:
                gradient = data.moment.mv(weights) - target
            else:
                rows = jax.random.choice(key, length, (batch,), replace=False)
                values = data.values[rows]
                residual = values @ weights / root - downlink[rows]
                gradient = values.T @ residual * (root / batch)
            return weights - data.step_size * gradient, None

        weights, _ = jax.lax.scan(step, local.weights, keys)
        scores = _scores(data, weights)
        return scores, Map(weights, scores), {"objective": objective}

    def server_step(self, key, server, uplink):
        """The orthonormal matrix closest to the scores' mean (the Procrustes problem)."""
        del key
        return polar(uplink + self.proximal.astype(server.dtype) * server)

    def client_result(self, downlink, local, data):
        """The view's map."""
        del downlink, data
        return local.weights


def _scores(data: Member, weights: Float[Array, "features rank"]) -> Scores:
    return data.values @ weights / jnp.sqrt(jnp.asarray(len(data.values), weights.dtype))
