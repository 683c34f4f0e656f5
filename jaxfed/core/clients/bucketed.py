"""The layout of clients of very different sizes: a few rectangular arrays."""

from dataclasses import dataclass
from typing import final

from jaxfed._checks import refuse
from jaxfed.core.clients.layout import InMemory, OfOneProcess
from jaxfed.core.common.buckets import Buckets, take


@final
@dataclass(frozen=True)
class Bucketed(InMemory, OfOneProcess):
    """Several rectangular trees in memory, each for clients of similar size."""

    data: Buckets
    length: int

    def take(self, indices):
        return take(self.data, indices)

    def check_backend(self, backend):
        if backend.apart:
            raise refuse(
                "clients", "none in buckets, as of clients.unbucketed(), for separate()", self.data
            )
