"""PCA in one exchange: each client alone, all data pooled, and distributed estimates.

All of them need one round (`rounds=1`); further rounds change nothing.
"""

from typing import Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import OneExchange, check_count, check_name
from jaxfed.core.contract.reduction import Gather, Gram
from jaxfed.linalg import matmul
from jaxfed.linalg.geometric_median import median_weights
from jaxfed.pca.components import (
    Frame,
    beside,
    best_local,
    change_within,
    check_fits,
    common_local,
    moment_message,
    moment_of,
    moment_received,
    top_components,
    uncaptured,
    warn_of_few,
)
from jaxfed.pca.perpca import PerPCA

Overlaps = Float[Array, "m m"]
METHODS = ("projector", "median", "spectrum", "local_first")


class _OneRank(OneExchange):
    """Base of `Local` and `Pooled`, which learn one set of components."""

    quadratic_in_samples = True

    rank: int = eqx.field(static=True)

    def __init__(self, rank: int):
        """Set up the algorithm.

        Args:
            rank: number of components.

        Raises:
            ValueError: if `rank` is not a positive whole number.
        """
        check_count("rank", rank)
        self.rank = rank

    @property
    @final
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    @final
    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank does not fit."""
        check_fits("rank", self.rank, clients)

    @final
    def prepare(self, data, client_id, rounds):
        """Return the client's second moment."""
        return moment_of(data, rank=self.rank, rounds=1)


class Local(_OneRank):
    """PCA of each client alone, without any exchange ("indivPCA").

    Source: Shi & Kontar (2024), Section 7.1.5.
    """

    def server_init(self, key, first, like, warm_start):
        """Return None: nothing is shared."""

    def client_init(self, key, downlink, data, warm_start):
        """Return the top components."""
        return top_components(data, self.rank)

    def residual_variance(self, downlink, local, data):
        """Return the variance that the components leave."""
        return uncaptured(data, data.quadratic(local))


class Pooled(_OneRank):
    """PCA of all samples together ("CPCA"): the result if the data could be pooled.

    All samples count equally, so a client counts by its number of samples. The messages are exact:
    they are as good as the data or their second moments.

    Source: Shi & Kontar (2024), Section 7.1.5.
    """

    sums_moments = True

    def first_message(self, key, data, warm_start):
        """Return the exact sum of the samples' outer products."""
        return moment_message(data, data.count, total=True)

    def server_init(self, key, first, like, warm_start):
        """Return the top eigenvectors of the sum."""
        return moment_received(first).top(self.rank)[1]

    def client_init(self, key, downlink, data, warm_start):
        """Return None: nothing is local."""

    def residual_variance(self, downlink, local, data):
        """Return the variance that the components leave."""
        return uncaptured(data, data.quadratic(downlink))


class OneShot(OneExchange):
    """Shared and local components from one exchange.

    There are four estimates of the shared components. The local components are then the top
    eigenvectors of the client's second moment deflated by the shared ones.

    * `"projector"` (distPCA of Fan et al. 2019, with the personal second shot of Shi & Kontar
      2024, Section 7.1.2): top eigenvectors of the mean projector onto the clients' top
      `shared_rank + local_rank` components;
    * `"median"`: the same with the geometric median of the projectors, in which all clients count
      equally (the subspace median of Singh & Vaswani 2024, with all projectors at the server). It
      stays near the shared components if fewer than half of the clients are faulty or malicious;
    * `"spectrum"` (the start of Qu et al. in Shi & Kontar 2024, Section 5): the same as
      `"projector"` with components scaled by their standard deviations, i.e. the mean of the best
      rank `shared_rank + local_rank` approximations of the second moments;
    * `"local_first"`: top eigenvectors of the mean of the clients' second moments, each deflated
      by its own top `local_rank` eigenvectors. Use it if local variance is large and shared
      variance small. It sends exact deflated second moments, the largest of the messages.
    """

    quadratic_in_samples = True

    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)
    method: Literal["projector", "median", "spectrum", "local_first"] = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int,
        *,
        method: Literal["projector", "median", "spectrum", "local_first"] = "projector",
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.
            method: how to estimate the shared components; see the class.

        Raises:
            ValueError: if a rank is not a positive whole number, or the method is unknown.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        check_name("method", method, METHODS)
        self.shared_rank, self.local_rank, self.method = shared_rank, local_rank, method

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the ranks do not fit."""
        check_fits("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)
        warn_of_few(self.local_rank, clients)

    def prepare(self, data, client_id, rounds):
        """Return the client's second moment."""
        return moment_of(data, rank=self.shared_rank + self.local_rank, rounds=1)

    def first_message(self, key, data, warm_start):
        """Return what the server averages: the one shot."""
        if self.method == "local_first":
            return moment_message(data.deflate(top_components(data, self.local_rank)))
        values, vectors = data.top(self.shared_rank + self.local_rank)
        if self.method == "spectrum":
            # V K^(1/2) with K = VᵀSV, which is diagonal but whose derivative is not.
            root = jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(values, 0)))
            sums = root + root[:, None]
            change = change_within(data, vectors) / jnp.where(sums > 0, sums, 1)
            vectors = vectors @ (jnp.diag(root) + jnp.where(sums > 0, change, 0))
            return Gram(vectors, thin=True)
        # Ignore directions without variance, which complete the basis of a client with few samples.
        least = jnp.finfo(values.dtype).eps * data.dim * values[0]
        vectors = jnp.where(values > least, vectors, 0)
        return Gather(vectors) if self.method == "median" else Gram(vectors, thin=True)

    def server_init(self, key, first, like, warm_start) -> Frame:
        """Return the top eigenvectors of the mean or the median."""
        if self.method == "median":
            first = _median_factor(first)
        return moment_received(first).top(self.shared_rank)[1]

    @property
    def eigenvectors(self) -> int:
        """Shared and local components together."""
        return self.shared_rank + self.local_rank

    @property
    def energy_weighted(self) -> bool:
        """Whether components count by their variance; projectors ignore it."""
        return self.method in ("spectrum", "local_first")

    def client_init(self, key, downlink, data, warm_start):
        """Return the local components (the personal second shot)."""
        return best_local(data, downlink, self.local_rank)

    def residual_variance(self, downlink, local, data):
        """Return the variance that the components leave."""
        return uncaptured(data, data.quadratic(downlink) + data.quadratic(local))

    def remarks(self, result, history):
        """Warn if the local components are common to all clients."""
        return common_local(result)

    def client_result(self, downlink, local, data):
        """Return the local components, made orthogonal to the final shared ones."""
        return beside(downlink, local)


@final
class FirstShared(OneExchange):
    """The shared components that personalized PCA starts from."""

    algorithm: PerPCA

    def check(self, clients, warm_start) -> None:
        """Let the algorithm check the data."""
        self.algorithm.check(clients, warm_start)

    def prepare(self, data, client_id, rounds):
        """Return what the algorithm prepares."""
        return self.algorithm.prepare(data, client_id, rounds)

    def first_message(self, key, data, warm_start):
        """Return the algorithm's first message."""
        return self.algorithm.first_message(key, data, warm_start)

    def server_init(self, key, first, like, warm_start):
        """Return the algorithm's first shared components."""
        return self.algorithm.shared_result(
            self.algorithm.server_init(key, first, like, warm_start)
        )

    def client_init(self, key, downlink, data, warm_start):
        """Return None: nothing is local."""

    def residual_variance(self, downlink, local, data):
        """Return the variance that the shared components leave."""
        return uncaptured(data.observed, data.observed.quadratic(downlink))


def _median_factor(bases: Float[Array, "m d k"]) -> Float[Array, "d columns"]:
    """Compute a factor of the geometric median of projectors, from the overlaps of the bases."""
    clients, _, width = bases.shape
    wide = jnp.moveaxis(bases, 0, 1).reshape(bases.shape[1], -1)
    products = matmul(wide.T, wide).reshape(clients, width, clients, width)
    common = jnp.sum(products**2, axis=(1, 3))
    # Clients of weight 0 have sent zeros.
    sizes = jnp.diagonal(common)
    there = (sizes > 0).astype(sizes.dtype)

    # Squared distances are differences of numbers up to the width, and have its rounding errors.
    smooth = float(16 * width * jnp.finfo(sizes.dtype).eps)
    equal = there / there.sum()
    weights = median_weights(_gram, _squares, smooth, common, equal, equal)
    return (wide.reshape(-1, clients, width) * jnp.sqrt(weights)[:, None]).reshape(wide.shape)


# ⟨P_i, P_j⟩ = ‖V_iᵀV_j‖²: no d x d projector is formed.
def _gram(common: Overlaps, weights: Float[Array, " m"]) -> Overlaps:
    toward = common @ weights
    return common - toward - toward[:, None] + weights @ toward


def _squares(common: Overlaps, weights: Float[Array, " m"]) -> Float[Array, " m"]:
    toward = common @ weights
    return jnp.diagonal(common) + weights @ toward - 2 * toward
