"""Backends that map clients on one device: all at once, one by one, or in blocks."""

import abc
import math
from functools import cache, partial, reduce
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, PyTree

from jaxfed._checks import check_whole
from jaxfed.core.backends.backend import Backend, Work, length, pair
from jaxfed.core.common.buckets import shapes_differ, split
from jaxfed.core.contract.reduction import (
    Reduction,
    combined,
    each,
    neutral,
    over_clients,
    to_combine,
)
from jaxfed.linalg.platforms import per_platform


class OneDevice(Backend):
    """A backend whose clients are all on one device.

    The shortest one runs client after client::

        class OneByOne(jf.backend.OneDevice):
            def map_clients(self, work, shared, own):
                sent, kept = jax.lax.map(lambda one: work(shared, one), own)
                return jf.reduction.over_clients(sent), kept
    """

    @abc.abstractmethod
    def map_clients(
        self, work: Work, shared: PyTree, own: PyTree
    ) -> tuple[PyTree[Reduction], PyTree]:
        """Run `work` for each client of a rectangular tree.

        Args:
            work: one client's work, `(shared, own) -> (sent, kept)`.
            shared: passed unchanged to each client.
            own: leading axis = clients, at least one.

        Returns:
            The reduction of what all clients sent, and what they keep, leading axis = clients.
            `jaxfed.reduction.over_clients` reduces contributions along a leading axis, and
            `jaxfed.reduction.combined` combines two such results.
        """

    @final
    def over_parts(self, work, shared, parts):
        """Map one part after another, and combine their results."""
        results = []
        for own in parts:
            results.append(pair(self, "map_clients", self.map_clients(work, shared, own)))
        sent, kept = zip(*results, strict=True)
        if len(sent) == 1:
            return sent[0], kept
        sent = tuple(map(to_combine, sent))
        if any(_described(one) != _described(sent[0]) for one in sent):
            raise shapes_differ("sent")
        return reduce(combined, sent), kept

    @property
    @final
    def multiple(self):
        """1: the number of clients is arbitrary."""
        return 1

    @property
    @final
    def sharding(self):
        """None."""
        return None

    @property
    @final
    def gathers(self):
        """True."""
        return True


def _described(tree: PyTree) -> tuple:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


class _AtOnce(OneDevice):
    @final
    def map_clients(self, work, shared, own):
        sent, kept = _for_all(work, length(own))(shared, own)
        return over_clients(sent), kept

    @final
    def in_blocks(self, size, remembered):
        return _Chunked(size, remembered)


@final
class _Vmap(_AtOnce):
    factory = "vmap"
    pass


@final
class _Separate(_AtOnce):
    factory = "separate"
    apart = True


def _for_all(work: Work, clients: int) -> Work:
    """One client's work as a function of so many clients."""
    return jax.vmap(work, in_axes=(None, 0)) if clients > 1 else partial(_alone, work)


def _alone(work: Work, shared: PyTree, own: PyTree) -> tuple[PyTree[Reduction], PyTree]:
    # A batch of one takes longer.
    found = work(shared, jax.tree.map(lambda x: x[0], own))
    return jax.tree.map(lambda x: jnp.asarray(x)[None], found)


def _counted(part: Reduction, which: Bool[Array, " clients"]) -> Reduction:
    """Contributions, with neutral ones in place of those that do not count."""

    def chosen(x, nothing):
        return jnp.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, nothing)

    return jax.tree.map(chosen, part, neutral(part))


class _Chunked(OneDevice):
    factory = "chunked"
    clients_per_block: int = eqx.field(static=True)
    remembered: tuple[str, ...] = eqx.field(static=True, default=())  # for derivatives, by name

    def in_blocks(self, size, remembered):
        return _Chunked(min(size, self.clients_per_block), remembered)

    def map_clients(self, work, shared, own):
        clients = length(own)
        if clients <= self.clients_per_block:
            return _Vmap().map_clients(work, shared, own)
        size = _block(clients, self.clients_per_block)
        own = jax.tree.map(_dense, own)
        one = jax.tree.map(lambda x: x[:1], own)
        # One client is enough: partial results that can be combined have shapes that do not depend
        # on the number of clients (`reduction.combined`).
        sent = jax.eval_shape(
            lambda *given: to_combine(_Vmap().map_clients(work, *given)[0]), shared, one
        )

        # For derivatives: without it, the scan would store the intermediate values of every block,
        # which is what blocks are to avoid.
        @partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*self.remembered)
        )
        def step(total, first):
            # Slice here rather than scan over blocks, since a TPU would keep a copy of everything
            # in another layout. If need be, the last block overlaps the one before, since all turns
            # of a scan have equal shapes.
            start = jnp.minimum(first, clients - size)
            block = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), own)
            parts, kept = _for_all(work, size)(shared, block)
            if clients % size:
                # Clients of the block before are computed again, but what they send must count
                # once.
                which = start + jnp.arange(size) >= first
                parts = each(lambda part: _counted(part, which), parts)
            # Set the layout before the scan stacks them, or it would stack padded tiles.
            return combined(total, over_clients(parts)), jax.tree.map(_dense, kept)

        # A scan over blocks that combines as it goes, so that only one block's messages exist.
        firsts = jnp.arange(0, clients, size)
        total, kept = jax.lax.scan(step, neutral(sent), firsts)

        def in_order(x):
            whole = _dense(x.reshape(-1, *x.shape[2:]))
            # What they keep is there twice as well: of the last block, take the new clients only.
            twice = len(whole) - clients
            return jnp.concatenate([whole[:-size], whole[twice - size :]]) if twice else whole

        return total, jax.tree.map(in_order, kept)


# A TPU stores the last two axes in tiles of 8 x 128, where small ones take up to 64 times their
# size; with clients along a tile's rows nothing is lost. The compiler chooses this layout for
# arguments by itself, but for what a loop carries only if told to.
_clients_last = per_platform(
    lambda x: x, tpu=lambda x: with_layout_constraint(x, Layout((*range(1, x.ndim), 0)))
)


def _dense(x: Array) -> Array:
    """Set a TPU layout of many clients' arrays in which small ones are not padded."""
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    rows, columns = x.shape[-2:]
    tiled = math.ceil(rows / 8) * 8 * math.ceil(columns / 128) * 128
    return _clients_last(x) if tiled > 2 * rows * columns else x


# Measured on a CPU with 2 MiB of cache per core: bytes of clients' data in a block, the smallest
# number of clients worth a block, and the smallest number of blocks.
BLOCK_BYTES, BLOCK_CLIENTS, BLOCKS = 2**20, 64, 4
LANES = 128  # columns of a TPU tile


class _Auto(OneDevice):
    factory = "auto"

    def in_blocks(self, size, remembered):
        return _Chunked(size, remembered)

    def map_clients(self, work, shared, own):
        clients = length(own)
        each = sum(x.size // clients * x.dtype.itemsize for x in jax.tree.leaves(own))
        size = BLOCK_BYTES // max(each, 1)
        few = size < BLOCK_CLIENTS or clients < BLOCKS * size
        if few or jax.default_backend() != "cpu":
            return _Vmap().map_clients(work, shared, own)
        return _Chunked(size).map_clients(work, shared, own)


@cache
def _block(clients: int, most: int) -> int:
    """The block size, more than half of `most`, for which the last two blocks overlap least.

    Blocks of whole TPU tiles are worth an overlap of a hundredth of all clients.
    """

    def cost(size: int) -> tuple:
        shared = -clients % size
        return max(shared, clients // 100), size % LANES > 0, shared > 0

    return min(range(most, most // 2, -1), key=cost)


def in_blocks(backend: Backend, own: PyTree, *remembered: str) -> Backend:
    """A backend with the same numbers that maps a tenth of the clients at a time.

    It saves memory in derivatives. A block has at least a megabyte of data. Each backend's
    `in_blocks` decides how to do it; those that spread clients over devices do not.

    Args:
        backend: maps the clients.
        own: the clients' data, leading axis = clients, or in buckets.
        remembered: names, as given to `jax.ad_checkpoint.checkpoint_name`, of values to store; all
            others are recomputed.
    """
    sizes = [length(part) for part in split(own)]
    each = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own)) / sum(sizes)
    size = max(math.ceil(max(sizes) / 10), int(BLOCK_BYTES / max(each, 1)))
    return backend.in_blocks(size, remembered)


def vmap() -> Backend:
    """Map all clients at once on one device."""
    return _Vmap()


def separate() -> Backend:
    """Run each client and the server as separate compiled programs, one after another.

    In `fit`, the numbers are bit for bit those of `jaxfed.deploy` on separate machines of one kind,
    because programs of many clients round differently from those of one. It is slower than `vmap`.
    Within `rollout` and `grid` it behaves like `vmap`.
    """
    return _Separate()


def chunked(clients_per_block: int) -> Backend:
    """Map clients in blocks, one block after another, in bounded memory.

    All blocks have the same size, from half of the given one up. If no such size divides the number
    of clients, the last block overlaps the one before; clients in both are computed twice and
    counted once.

    Args:
        clients_per_block: the largest number of clients in a block.

    Raises:
        ValueError: if it is not a positive integer.
    """
    check_whole("clients_per_block", clients_per_block)
    return _Chunked(int(clients_per_block))


def auto() -> Backend:
    """Map all clients at once, or on a CPU in blocks that fit into its cache.

    It uses blocks for many small clients: if a block of a megabyte holds at least 64 clients and
    there are at least four blocks. Numbers differ from those of `vmap` only by the order of sums.
    On accelerators, and in small federations, it is `vmap`.
    """
    return _Auto()
