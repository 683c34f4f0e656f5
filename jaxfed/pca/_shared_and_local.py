"""What algorithms with shared and local components have in common."""

from typing import Any, Self, final

import equinox as eqx
import numpy as np

from jaxfed.contract import Algorithm, OneExchange
from jaxfed.pca._starts import StartName, with_starts
from jaxfed.pca.components import common_local, uncaptured


class SharedAndLocal(Algorithm):
    """Base class of algorithms that start as `start` says from shared and local components."""

    shared_rank: eqx.AbstractVar[int]
    local_rank: eqx.AbstractVar[Any]
    start: eqx.AbstractVar[StartName]

    @property
    @final
    def eigenvectors(self) -> int:
        """Shared and local components together."""
        return self.shared_rank + int(np.max(self.local_rank))

    @final
    def different_starts(self, count: int) -> list[Self]:
        """Return copies with different starts; all but a few are random."""
        return with_starts(self, count)

    @property
    @final
    def energy_weighted(self) -> bool:
        """True: means of second moments and of squared errors weight clients by their variance."""
        return True

    @final
    def remarks(self, result, history) -> tuple[str, ...]:
        """Warn if the local components are common to all clients."""
        return common_local(result)


@final
class FirstShared(OneExchange):
    """The shared components that an algorithm of shared and local components starts from."""

    algorithm: SharedAndLocal

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
