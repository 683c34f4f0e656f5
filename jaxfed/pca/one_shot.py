"""PCA in one exchange: each client alone, all data pooled, and distributed estimates.

All of them need a single round (`rounds=1`); more change nothing.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxfed.core.aggregation import Gram
from jaxfed.core.algorithm import OneExchange, Personalized
from jaxfed.core.checks import check_count, check_name
from jaxfed.core.clients import Clients
from jaxfed.linalg import Moment
from jaxfed.pca._components import (
    MEAN_MOMENT,
    SUM_MOMENT,
    Frame,
    MomentMessage,
    captured,
    change_within,
    check_data,
    check_fits,
    moment_message,
    moment_of,
    moment_received,
    top_components,
)


class Local(OneExchange):
    """PCA of each client alone, without any exchange ("indivPCA").

    Source: Shi & Kontar (2024), Section 7.1.5.
    """

    rank: int = eqx.field(static=True)

    def __init__(self, rank: int):
        """Set up the algorithm.

        Args:
            rank: number of components of each client.

        Raises:
            ValueError: if `rank` is not a positive whole number.
        """
        check_count("rank", rank)
        self.rank = rank

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse a rank that does not fit.

        Raises:
            ValueError: as said above.
        """
        del start
        check_data(clients)
        check_fits("rank", self.rank, clients)

    def prepare(self, data, client_id, rounds):
        """The client's second moment."""
        del client_id, rounds
        return moment_of(data, rank=self.rank, rounds=1)

    def client_init(self, key, data, start):
        """Top components; nothing is sent but the empty shared frame that tells the features."""
        del key, start
        return jnp.zeros((data.dim, 0), data.trace.dtype), top_components(data, self.rank)

    def server_init(self, key, uplink, start):
        """Nothing shared."""
        del key, start
        return uplink

    def left_over(self, downlink, local, data):
        """The variance left over."""
        del downlink
        return data.trace - captured(data, local)


class Pooled(OneExchange):
    """PCA of all samples together ("CPCA"): what could be had if data might be moved.

    Every sample counts the same, so a client counts by its number of samples. The messages are
    exact: they amount to the data or their second moments.

    Source: Shi & Kontar (2024), Section 7.1.5.
    """

    rank: int = eqx.field(static=True)

    def __init__(self, rank: int):
        """Set up the algorithm.

        Args:
            rank: number of shared components.

        Raises:
            ValueError: if `rank` is not a positive whole number.
        """
        check_count("rank", rank)
        self.rank = rank

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse a rank that does not fit.

        Raises:
            ValueError: as said above.
        """
        del start
        check_data(clients)
        check_fits("rank", self.rank, clients)

    def prepare(self, data, client_id, rounds):
        """The client's second moment."""
        del client_id, rounds
        return moment_of(data, rank=self.rank, rounds=1)

    @property
    def start_aggregation(self):
        """Plain sums: weights are the numbers of samples."""
        return SUM_MOMENT

    def client_init(self, key, data, start):
        """Send the sum of the samples' products, exactly."""
        del key, start
        message = moment_message(data)
        if message.factor is not None:
            # The server multiplies it with itself: the square root of the count.
            return MomentMessage(factor=message.factor * jnp.sqrt(data.count)), ()
        return MomentMessage(triangle=message.triangle * data.count), ()

    def server_init(self, key, uplink, start):
        """Top eigenvectors of the sum."""
        del key, start
        return moment_received(uplink).top(self.rank)[1]

    def left_over(self, downlink, local, data):
        """The variance left over."""
        del local
        return data.trace - captured(data, downlink)

    def client_result(self, downlink, local, data):
        """No own components."""
        del local, data
        return downlink[:, :0]


class OneShot(OneExchange):
    """Shared and own components from one exchange.

    Three estimates of the shared components, each followed by own components as the top
    eigenvectors of the client's second moment deflated by them:

    * `"projector"` (distPCA of Fan et al. 2019, with the personal second shot of Shi & Kontar
      2024, Section 7.1.2): top eigenvectors of the mean projector onto the clients' top
      `shared_rank + local_rank` components;
    * `"spectrum"` (the start of Qu et al. in Shi & Kontar 2024, Section 5): the same with the
      components scaled by their standard deviations, i.e. of the mean of best rank
      `shared_rank + local_rank` approximations of the second moments;
    * `"local_first"`: top eigenvectors of the mean of the clients' second moments, each deflated
      by its own top `local_rank` eigenvectors. Right
      where own variance is large and shared variance small. Its messages are exact deflated
      second moments, the largest of the three.
    """

    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)
    method: Literal["projector", "spectrum", "local_first"] = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int,
        *,
        method: Literal["projector", "spectrum", "local_first"] = "projector",
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's own components.
            method: how the shared components are estimated; see the class.

        Raises:
            ValueError: for ranks that are not positive whole numbers or an unknown method.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        check_name("method", method, ("projector", "spectrum", "local_first"))
        self.shared_rank, self.local_rank, self.method = shared_rank, local_rank, method

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse ranks that do not fit.

        Raises:
            ValueError: as said above.
        """
        del start
        check_data(clients)
        check_fits("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)

    def prepare(self, data, client_id, rounds):
        """The client's second moment."""
        del client_id, rounds
        return moment_of(data, rank=self.shared_rank + self.local_rank, rounds=1)

    @property
    def start_aggregation(self):
        """The mean of the products of the factors that clients send."""
        return MEAN_MOMENT if self.method == "local_first" else Gram()

    def client_init(self, key, data, start):
        """The one shot."""
        del key, start
        own = jnp.zeros((data.dim, self.local_rank), data.trace.dtype)
        if self.method == "local_first":
            return moment_message(data.deflate(top_components(data, self.local_rank))), own
        values, vectors = data.top(self.shared_rank + self.local_rank)
        if self.method == "spectrum":
            # V K^(1/2) with K = VᵀSV, which is diagonal but for its derivative.
            root = jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(values, 0)))
            sums = root + root[:, None]
            change = change_within(data, vectors) / jnp.where(sums > 0, sums, 1)
            vectors = vectors @ (jnp.diag(root) + jnp.where(sums > 0, change, 0))
        return vectors, own

    def server_init(self, key, uplink, start) -> Frame:
        """Top eigenvectors of the mean."""
        del key, start
        local_first = self.method == "local_first"
        mean = moment_received(uplink) if local_first else Moment.from_dense(uplink)
        return mean.top(self.shared_rank)[1]

    def client_begin(self, downlink, local, data):
        """The personal second shot."""
        del local
        return top_components(data.deflate(downlink), self.local_rank)

    def left_over(self, downlink, local, data):
        """The variance left over."""
        return data.trace - captured(data, downlink) - captured(data, local)
