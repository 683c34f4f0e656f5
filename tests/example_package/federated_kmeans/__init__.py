"""Federated k-means: an example of an algorithm for jaxfed in a package of its own."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

import jaxfed as jf

Centres = Float[Array, "clusters features"]


class Summary(NamedTuple):
    """A client's message: for each cluster, the sum and the number of its samples."""

    sums: Centres
    counts: Float[Array, " clusters"]


class KMeans(jf.Algorithm):
    """Lloyd's algorithm on samples that stay where they are.

    In each round, every client assigns its samples to the nearest of the shared centres and sends
    the sum and the number of its samples in each cluster. The server divides the sums by the
    numbers. This equals Lloyd's algorithm on the samples of all clients. `result.shared` are the
    centres, `(clusters, features)`; `result.local` is None.

    Source: Lloyd (1982), Least squares quantization in PCM.
    """

    clusters: int = eqx.field(static=True)

    def __init__(self, clusters: int):
        """Set up the algorithm.

        Args:
            clusters: number of clusters.

        Raises:
            ValueError: if `clusters` is not a positive whole number.
        """
        jf.contract.check_count("clusters", clusters)
        self.clusters = clusters

    def check(self, clients: jf.contract.ClientsLike, warm_start: jf.Personalized | None) -> None:
        """Raise a `ValueError` if data are not samples, or first centres have another shape."""
        if not isinstance(clients.parts[0], jf.Samples):  # in buckets there are several
            raise ValueError(f"clients: wanted samples, got {type(clients.data).__name__}")
        wanted = (self.clusters, clients.features)
        if warm_start is not None and jnp.shape(warm_start.shared) != wanted:
            raise ValueError(
                f"warm_start: wanted centres of shape {wanted}, got {jnp.shape(warm_start.shared)}"
            )

    def first_message(
        self, key: Key[Array, ""], data: jf.Samples, warm_start: jf.Personalized | None
    ) -> PyTree:
        """Assign samples to clusters at random, unless there are centres to start from."""
        if warm_start is not None:
            return None
        drawn = jax.random.randint(key, (len(data.values),), 0, self.clusters)
        return jf.reduction.Sum(self._summary(data, jax.nn.one_hot(drawn, self.clusters)))

    def server_init(
        self,
        key: Key[Array, ""],
        first: Summary | None,
        like: PyTree,
        warm_start: jf.Personalized | None,
    ) -> Centres:
        """Return the first centres."""
        del key, like
        return warm_start.shared if first is None else _centres(first, 0.0)

    def downlink(self, server: Centres) -> Centres:
        """Send the centres."""
        return server

    def client_init(
        self,
        key: Key[Array, ""],
        downlink: Centres,
        data: jf.Samples,
        warm_start: jf.Personalized | None,
    ) -> None:
        """Return None: a client keeps no state."""

    def client_step(
        self, key: Key[Array, ""], downlink: Centres, local: None, data: jf.Samples
    ) -> tuple[PyTree, None, dict[str, Array]]:
        """Assign the samples; the objective is their mean squared distance to their centres."""
        del key, local
        squares = ((data.values[:, None] - downlink) ** 2).sum(-1)
        nearest = jax.nn.one_hot(squares.argmin(1), self.clusters)
        objective = (squares.min(1) * data.mask).sum() / data.count
        return jf.reduction.Sum(self._summary(data, nearest)), None, {"objective": objective}

    def server_step(
        self, key: Key[Array, ""], server: Centres, uplink: Summary
    ) -> tuple[Centres, dict[str, Array]]:
        """Return the means of the clusters; one without samples keeps its centre."""
        del key
        return _centres(uplink, server), {}

    def _summary(self, data: jf.Samples, assigned: Float[Array, "samples clusters"]) -> Summary:
        assigned = assigned.astype(data.values.dtype) * data.mask[:, None]
        return Summary(assigned.T @ data.values, assigned.sum(0))


def _centres(summary: Summary, otherwise: Centres | float) -> Centres:
    counts = summary.counts[:, None]
    return jnp.where(counts > 0, summary.sums / jnp.where(counts > 0, counts, 1), otherwise)
