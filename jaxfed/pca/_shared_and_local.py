"""What algorithms with shared and local components have in common."""

from typing import Any, Self, final

import equinox as eqx
import numpy as np

from jaxfed.contract import Algorithm
from jaxfed.pca._starts import StartName, with_starts
from jaxfed.pca.components import common_local


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
