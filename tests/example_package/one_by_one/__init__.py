"""One client after the other: an example of a backend for jaxfed in a package of its own."""

import jax
from jaxtyping import PyTree

import jaxfed as jf


class OneByOne(jf.backend.OneDevice):
    """Runs clients one after the other, in the memory of a single one.

    `jaxfed.backend.chunked` is faster if several clients fit into memory.
    """

    def map_clients(
        self, work: jf.backend.Work, shared: PyTree, own: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run each client's work in a loop, and reduce all messages."""
        # The backward pass stores only each client's inputs, and computes the rest again.
        work = jax.checkpoint(work)
        sent, kept = jax.lax.map(lambda one: work(shared, one), own)
        return jf.reduction.over_clients(sent), kept
