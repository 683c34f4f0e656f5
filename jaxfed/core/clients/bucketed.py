"""The layout of clients of very different sizes: a few rectangular arrays."""

from dataclasses import dataclass
from typing import final

from jaxfed.core.clients.layout import OfOneProcess
from jaxfed.core.common.buckets import Buckets, take
from jaxfed.core.common.checks import refuse


@final
@dataclass(frozen=True)
class Bucketed(OfOneProcess):
    """Several rectangular trees in memory, each of clients of similar size."""

    data: Buckets
    length: int
    in_memory = True

    def sketch(self):
        return self.data

    def identity(self):
        return self.data

    def take(self, indices):
        return take(self.data, indices)

    def check_backend(self, backend):
        if backend.apart:
            raise refuse(
                "clients", "none in buckets, as of clients.unbucketed(), for separate()", self.data
            )

    def check_in_memory(self, what):
        pass
