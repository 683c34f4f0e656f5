"""Secure aggregation: the server learns the sum of the clients' messages and nothing else.

Each client rounds its part of the sum to integers, adds its masks modulo a power of two, and packs
the lowest bits. The server adds what it receives, which cancels the masks, and converts the sum
back to floating-point numbers.
"""

from dataclasses import replace
from functools import partial
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Key, PyTree, UInt8, UInt32

from jaxfed._checks import check_count, check_positive, is_whole, refuse, threefry
from jaxfed.core.contract.reduction import Additive, each, is_summed, wrapped
from jaxfed.core.wire import calls
from jaxfed.core.wire.channel import Channel, Context, lossless, straight_through
from jaxfed.core.wire.compressor import Payload
from jaxfed.core.wire.masks import MaskedChannel, pairwise_mask
from jaxfed.core.wire.noise import refuse_whole_numbers
from jaxfed.core.wire.packing import pack_wide, unpack_wide
from jaxfed.core.wire.quantization import chances


@final
class _Packed(Payload):
    packed: UInt8[Array, " bytes"]


class _Residues(eqx.Module):
    """An array as integers modulo a power of two, or a sum of such arrays."""

    values: Array
    exact: Array | None  # the array itself, which only the derivative needs
    dtype: np.dtype = eqx.field(static=True)


@final
class _SumOfAll(Additive):
    """The sum over all clients, even absent ones, since masks cancel only in the whole sum."""

    value: PyTree

    def contribution(self, weight):
        del weight
        return self

    def over_clients(self):
        # Not widened to 64 bits: the masks cancel because the sum wraps around.
        return jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), self)


@final
class _SecureSum(MaskedChannel):
    factory = "secure_sum"
    inner: Channel
    clients: int = eqx.field(static=True)
    bits: int = eqx.field(static=True)
    bound: float = eqx.field(static=True)
    neighbours: int | None = eqx.field(static=True)
    context: Context | None = None  # None until the channel is bound to a client
    masked: bool = eqx.field(static=True, default=True)

    private = True
    one_time = True
    needs_sum = True

    @property
    def levels(self) -> int:
        """The largest integer of one client for which the sum over all does not overflow."""
        return (2 ** (self.bits - 1) - 1) // self.clients

    @property
    def largest(self):
        return self.bound

    @property
    def step(self):
        return self._step if self.inner == lossless() else None

    @property
    def _step(self) -> float:
        return self.bound / self.levels

    def check(self, clients, participants, message):
        if len(clients) != self.clients:
            raise ValueError(
                f"channel: its masks are for {self.clients} clients, there are {len(clients)}"
            )
        if participants != self.clients:
            raise ValueError(
                "participation: masks only cancel if every client takes part in each round; "
                "use everybody()"
            )
        if not is_summed(message):
            raise ValueError(
                "channel: masked messages can be added up and in no other way reduced, as this "
                "algorithm needs it (sums by groups can: jaxfed.aggregation.Robust(masked=True))"
            )

    def noise(self):
        return self.inner.noise()

    def bind(self, context):
        return replace(self, inner=calls.bind(self.inner, context), context=context)

    def memory(self, message):
        return calls.memory(self.inner, message)

    def encode(self, key, message, memory):
        refuse_whole_numbers(message)
        inner_key, rounding_key = jax.random.split(key)
        payload, after = calls.encode(self.inner, inner_key, message, memory)
        # Only for the checks, whose messages must name the inner channel's own functions.
        jax.eval_shape(partial(calls.decode, self.inner), payload, message, memory)
        arrays, structure = jax.tree.flatten(self._shares(self.inner.decode(payload)))
        mask_key = self._mask_key()
        packed = [
            self._pack(x, jax.random.fold_in(rounding_key, i), jax.random.fold_in(mask_key, i))
            for i, x in enumerate(arrays)
        ]
        return jax.tree.unflatten(structure, packed), after

    def decode(self, payload):
        def unpack(x):
            numbers = unpack_wide(x.packed, x.size, self.bits)
            return _Residues(numbers.reshape(x.shape), None, x.dtype)

        return jax.tree.map(unpack, payload, is_leaf=_is_packed)

    def differentiable(self, decoded, message, memory):
        # Any draw will do, since noise has no derivative. Compilers remove the rest.
        payload, _ = self.inner.encode(jax.random.key(0), message, memory)
        exact = self._shares(self.inner.differentiable(self.inner.decode(payload), message, memory))

        def with_exact(residues, array):
            return replace(residues, exact=jnp.clip(array, -self.bound, self.bound))

        return jax.tree.map(with_exact, decoded, exact, is_leaf=_is_residues)

    def receive(self, decoded, last):
        arrays = jax.tree.map(self._to_array, decoded, is_leaf=_is_residues)
        return self.inner.receive(arrays, last)

    # --- for `jaxfed.deploy`, which adds its own masks -------------------------------------------

    def unmasked(self):
        return replace(self, masked=False)

    def numbers(self, payload):
        parts = jax.tree.leaves(payload, is_leaf=_is_packed)
        found = [unpack_wide(jnp.asarray(x.packed), x.size, self.bits) for x in parts]
        return np.concatenate([np.asarray(x, np.uint32) for x in found])

    def clipped(self, payload):
        # Shifting up and down extends the sign of numbers of `bits` bits.
        left = np.uint32(32 - self.bits)
        whole = (self.numbers(payload) << left).view(np.int32) >> left.astype(np.int32)
        return int(np.count_nonzero(np.abs(whole) >= self.levels))

    def with_numbers(self, payload, numbers):
        parts, structure = jax.tree.flatten(payload, is_leaf=_is_packed)
        ends = np.cumsum([part.size for part in parts])
        new = [
            replace(part, packed=pack_wide(jnp.asarray(own), self.bits))
            for part, own in zip(parts, np.split(numbers, ends[:-1]), strict=True)
        ]
        return jax.tree.unflatten(structure, new)

    # --- the steps ------------------------------------------------------------------------------

    def _shares(self, message: PyTree) -> PyTree:
        """This client's part of the sum; zeros if its weight is zero."""
        # The client weighs its message, before it is rounded: the server sees only sums, which it
        # cannot weigh.
        weight = self._bound().weight
        return each(lambda part: _SumOfAll(part.contribution(weight).value), wrapped(message))

    def _mask_key(self) -> Key[Array, ""]:
        """The key of this round's masks, known to the clients and not to the server."""
        context = self._bound()
        # Two clients must draw the same numbers however they are mapped; of a batch of `rbg` keys,
        # `jax.vmap` would use only one.
        return jax.random.fold_in(threefry(context.secret), context.round)

    def _pack(
        self, array: Array, rounding_key: Key[Array, ""], mask_key: Key[Array, ""]
    ) -> _Packed:
        position, size, clients = self._bound().position, array.size, self.clients
        numbers = self._to_whole(rounding_key, lax.stop_gradient(array))
        # In a deployment, masks come from keys that clients agree on (`deploy.masked`).
        if self.masked:
            # Half of the partners on either side, by default everybody.
            reach = (self.neighbours or clients) // 2
            numbers += pairwise_mask(mask_key, position, size, clients=clients, reach=reach)
        # Padding sends nothing, and shares masks with no client.
        numbers = jnp.where(position < clients, numbers, 0)
        return _Packed(array.shape, np.dtype(array.dtype), pack_wide(numbers, self.bits))

    def _to_whole(self, key: Key[Array, ""], array: Array) -> UInt32[Array, " n"]:
        """Round to integers of magnitude at most `levels`, at random without bias."""
        # Half precision has fewer numbers than there are levels.
        flat = array.reshape(-1).astype(jnp.promote_types(array.dtype, jnp.float32))
        flat = jnp.clip(flat, -self.bound, self.bound)
        scaled = flat * jnp.asarray(self.levels / self.bound, flat.dtype)
        number = jnp.floor(scaled + chances(key, flat.size)).astype(jnp.int32)
        # Single precision may round large numbers up, which could overflow the sum.
        number = jnp.clip(number, -self.levels, self.levels)
        return lax.bitcast_convert_type(number, jnp.uint32)

    def _to_array(self, residues: _Residues) -> Array:
        """Convert a sum of integers back to an array."""
        # Shifting up and down again turns residues in the upper half into negative numbers. JAX may
        # have summed them in 64 bits.
        left = 32 - self.bits
        top = residues.values.astype(jnp.uint32) << left
        signed = lax.bitcast_convert_type(top, jnp.int32) >> left
        wide = jnp.promote_types(residues.dtype, jnp.float32)
        unit = jnp.asarray(self._step, wide)
        value = (signed.astype(wide) * unit).astype(residues.dtype)
        return value if residues.exact is None else straight_through(value, residues.exact)

    def _bound(self) -> Context:
        assert self.context is not None
        return self.context


def _is_packed(node: object) -> bool:
    return isinstance(node, _Packed)


def _is_residues(node: object) -> bool:
    return isinstance(node, _Residues)


def secure_sum(
    clients: int,
    *,
    bits: int,
    bound: float,
    neighbours: int | None = None,
    inner: Channel | None = None,
) -> Channel:
    r"""Hide messages under pairwise masks: the server learns only the sum of all messages.

    A client's part of the aggregate is its message for a sum, and its message times its weight for
    a mean. It is rounded at random, without bias, to multiples of \(B / L\), and becomes an
    integer modulo \(2^b\). For each of its partners, a client adds random numbers that only the two
    of them know and that the partner subtracts. A masked message is uniformly distributed; in the
    sum all masks cancel exactly, on every backend. With
    \(L = \lfloor (2^{b-1} - 1) / m \rfloor\) for m clients no sum overflows.

    For uplinks of sums and means only. All clients must take part in every round, because the masks
    of an absent one do not cancel. First messages, before the rounds, use the same channel unless
    `jaxfed.Wire` names another; an algorithm whose first messages are not sums or means needs that,
    or a warm start. Derivatives are straight through: those of the exact sum of the clipped parts.
    A message that is not finite ends the run instead of being hidden in the sum. The history's
    diagnostics are for whoever runs the experiment; the server of a deployment has none.

    The masks are only as secret as the run's key: anyone who knows it, in a simulation every
    client, can remove them all. Masks that are used twice cancel in the difference of two messages,
    so each run needs its own key (`jaxfed.sweep` refuses to share one). JAX's random numbers are
    made for simulations. On separate machines (`jaxfed.deploy`), each two clients agree on a seed
    by key agreement, masks come from a cryptographic generator, all clients are partners, and some
    may drop out.

    Args:
        clients: m, the number of clients.
        bits: b, bits per number, 2 to 32.
        bound: B, the largest magnitude of an entry of a client's part of the aggregate, known to
            all; larger entries are clipped. For a mean over m clients of equal weights, it bounds
            messages divided by m.
        neighbours: number of partners of a client, even, half of them on either side in a ring of
            all clients; by default all others. Each partner costs as many random numbers as a
            message has entries. A client's message is safe as long as one of its partners does not
            collude with the server.
        inner: the channel before the masks, such as `gaussian(..., clients=clients)`; by default
            `lossless()`.

    Returns:
        The channel, whose payload is the masked numbers, packed at b bits.

    Raises:
        ValueError: if there are fewer than two clients, bits are out of range or too few for the
            number of clients, the bound is not positive, the number of neighbours is unsuitable, or
            the inner channel has memory at both ends.

    Source: Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine
    learning, Section 4; with few neighbours, Bell, Bonawitz, Gascon, Lepoint & Raykova (2020).
    """
    check_count("clients", clients, least=2)
    check_count("bits", bits, least=2, most=32)
    if 2 ** (bits - 1) - 1 < clients:
        raise ValueError(
            f"bits: a sum over {clients} clients may overflow {bits} bits; "
            f"wanted at least {int(clients).bit_length() + 1}"
        )
    check_positive("bound", bound, single=True)
    if neighbours is not None and (
        not is_whole(neighbours) or neighbours % 2 or not 2 <= neighbours < clients
    ):
        raise refuse("neighbours", f"an even number of at least 2 and below {clients}", neighbours)
    neighbours = None if neighbours is None else int(neighbours)
    inner = lossless() if inner is None else inner
    if not isinstance(inner, Channel) or inner.cumulative or isinstance(inner, MaskedChannel):
        raise refuse("inner", "a channel without memory at both ends, such as gaussian", inner)
    return _SecureSum(inner, clients, bits, float(bound), neighbours)
