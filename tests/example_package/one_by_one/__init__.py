"""One client after the other: an example of a backend for jaxfed in a package of its own."""

import jax
from jaxtyping import PyTree

import jaxfed as jf


class OneByOne(jf.backend.OneDevice):
    """Clients one after the other, in the memory that a single one needs.

    `jaxfed.backend.chunked` is faster where several clients fit.
    """

    def map_clients(
        self, work: jf.backend.Work, shared: PyTree, own: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run one client's work in a loop, and reduce what all of them sent."""
        # The backward pass keeps each client's data alone, and computes the rest again.
        work = jax.checkpoint(work)
        sent, kept = jax.lax.map(lambda one: work(shared, one), own)
        return jf.reduction.over_clients(sent), kept
