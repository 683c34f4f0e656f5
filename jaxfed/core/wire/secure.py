"""Secure aggregation: messages under masks that only cancel in the sum over all clients."""

import itertools
from dataclasses import replace
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key, PyTree, UInt8, UInt32

from jaxfed.core.common.checks import check_count, check_number, is_whole, refuse
from jaxfed.core.contract.reduction import Additive, each, is_linear, wrapped
from jaxfed.core.wire.channel import Channel, Context, lossless, straight_through
from jaxfed.core.wire.noise import refuse_whole_numbers
from jaxfed.core.wire.packing import pack_wide, unpack_wide
from jaxfed.core.wire.quantization import chances


class _Masked(eqx.Module):
    """One array's payload; shape and type are known to both ends."""

    packed: UInt8[Array, " bytes"]
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)


class _Residues(eqx.Module):
    """Whole numbers of which only the remainders modulo a power of two count."""

    values: Array
    exact: Array | None  # what they stand for: only its derivative is used
    dtype: np.dtype = eqx.field(static=True)


@final
class _Everyone(Additive):
    """The sum of what all clients send: whoever was left out would take its masks along."""

    value: PyTree

    def contribution(self, weight):
        del weight
        return self

    def over_clients(self):
        return jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), self)


class _SecureSum(Channel):
    inner: Channel
    clients: int = eqx.field(static=True)
    bits: int = eqx.field(static=True)
    bound: float = eqx.field(static=True)
    neighbours: int | None = eqx.field(static=True)
    place: Context | None = None  # of one client
    masked: bool = eqx.field(static=True, default=True)

    private = True
    one_time = True

    @property
    def levels(self) -> int:
        """The largest whole number of one client: that many of them do not overflow the sum."""
        return (2 ** (self.bits - 1) - 1) // self.clients

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
        if not is_linear(message):
            raise ValueError(
                "channel: masked messages can be added up and in no other way reduced, as this "
                "algorithm needs it"
            )
        self.inner.check(clients, participants, message)

    def noise(self):
        return self.inner.noise()

    def bind(self, context):
        return replace(self, inner=self.inner.bind(context), place=context)

    def memory(self, message):
        return self.inner.memory(message)

    def encode(self, key, message, memory):
        refuse_whole_numbers(message)
        assert self.place is not None
        place = self.place
        inner_key, key = jax.random.split(key)
        payload, inner = self.inner.encode(inner_key, message, memory)
        secret = jax.random.bits(place.secret, (2,), jnp.uint32)
        pairs = jax.random.wrap_key_data(secret, impl="threefry2x32")
        pairs = jax.random.fold_in(pairs, place.round)
        numbers = itertools.count()

        def masked(term):
            i = next(numbers)
            number = self._rounded(jax.random.fold_in(key, i), lax.stop_gradient(term))
            if self.masked:
                number += self._mask(jax.random.fold_in(pairs, i), place.position, term.size)
            # Who only fills up a device sends nothing, and nobody has a mask against it.
            number = jnp.where(place.position < self.clients, number, 0)
            return _Masked(pack_wide(number, self.bits), term.shape, np.dtype(term.dtype))

        shares = self._shares(self.inner.decode(payload))
        return jax.tree.map(masked, shares), inner

    def decode(self, payload):
        def residues(x):
            values = unpack_wide(x.packed, int(np.prod(x.shape)), self.bits)
            return _Residues(values.reshape(x.shape), None, x.dtype)

        return jax.tree.map(residues, payload, is_leaf=_is(_Masked))

    def differentiable(self, decoded, message, memory):
        # Any draw will do: noise is added, and has no derivative.
        payload, _ = self.inner.encode(jax.random.key(0), message, memory)
        exact = self._shares(self.inner.differentiable(self.inner.decode(payload), message, memory))
        return jax.tree.map(
            lambda x, e: replace(x, exact=jnp.clip(e, -self.bound, self.bound)),
            decoded, exact,
            is_leaf=_is(_Residues),
        )  # fmt: skip

    def receive(self, decoded, last):
        unit = self.bound / self.levels

        def told(x):
            # Remainders above the half stand for negative numbers; x.values may be of 64 bits.
            left = 32 - self.bits
            top = x.values.astype(jnp.uint32) << left
            signed = lax.bitcast_convert_type(top, jnp.int32) >> left
            wide = jnp.promote_types(x.dtype, jnp.float32)
            value = (signed.astype(wide) * jnp.asarray(unit, wide)).astype(x.dtype)
            return value if x.exact is None else straight_through(value, x.exact)

        return self.inner.receive(jax.tree.map(told, decoded, is_leaf=_is(_Residues)), last)

    def _shares(self, message: PyTree) -> PyTree:
        """A client's part of the sum."""
        assert self.place is not None
        weight = self.place.weight
        # As everywhere, who has no weight adds nothing, whatever it made.
        return each(lambda part: _Everyone(part.contribution(weight).value), wrapped(message))

    def _rounded(self, key: Key[Array, ""], term: Array) -> UInt32[Array, " n"]:
        """A client's part of the sum in whole numbers up to `levels`, unbiased."""
        # In half precision there are fewer numbers than levels.
        flat = term.reshape(-1).astype(jnp.promote_types(term.dtype, jnp.float32))
        flat = jnp.clip(flat, -self.bound, self.bound)
        scaled = flat * jnp.asarray(self.levels / self.bound, flat.dtype)
        number = jnp.floor(scaled + chances(key, flat.size)).astype(jnp.int32)
        # Large numbers of single precision round, and must not exceed what the sum has room for.
        number = jnp.clip(number, -self.levels, self.levels)
        return lax.bitcast_convert_type(number, jnp.uint32)

    def _mask(
        self, key: Key[Array, ""], position: Int[Array, ""], size: int
    ) -> UInt32[Array, " n"]:
        """The sum of this client's masks: what it adds, its partner subtracts."""
        reach = (self.neighbours or self.clients) // 2

        def pair(first, second):
            own = jax.random.fold_in(jax.random.fold_in(key, first), second)
            return jax.random.bits(own, (size,), jnp.uint32)

        def step(mask, distance):
            after = (position + distance) % self.clients
            before = (position - distance) % self.clients
            return mask + pair(position, after) - pair(before, position), None

        return lax.scan(step, jnp.zeros(size, jnp.uint32), jnp.arange(1, reach + 1))[0]


def _is(kind: type):
    return lambda x: isinstance(x, kind)


def masks_apart(channel: Channel) -> Channel:
    """The channel without its masks, for who adds masks of another origin to its payloads."""
    return replace(channel, masked=False) if isinstance(channel, _SecureSum) else channel


def adds_masks(channel: Channel) -> bool:
    """Whether a channel hides messages under masks that cancel in a sum."""
    return isinstance(channel, _SecureSum)


def numbers_of(channel: Channel, payload: PyTree) -> UInt32[np.ndarray, " n"]:
    """All numbers of a payload, which add up modulo 2^32."""
    assert isinstance(channel, _SecureSum)
    parts = jax.tree.leaves(payload, is_leaf=_is(_Masked))
    sizes = [int(np.prod(x.shape)) for x in parts]
    found = [
        unpack_wide(jnp.asarray(x.packed), n, channel.bits)
        for x, n in zip(parts, sizes, strict=True)
    ]
    return np.concatenate([np.asarray(x, np.uint32) for x in found])


def with_numbers(channel: Channel, payload: PyTree, numbers: UInt32[np.ndarray, " n"]) -> PyTree:
    """A payload like this one with other numbers; inverse of `numbers_of`."""
    assert isinstance(channel, _SecureSum)
    place = 0

    def one(x):
        nonlocal place
        count = int(np.prod(x.shape))
        own = jnp.asarray(numbers[place : place + count])
        place += count
        return replace(x, packed=pack_wide(own, channel.bits))

    return jax.tree.map(one, payload, is_leaf=_is(_Masked))


def secure_sum(
    clients: int,
    *,
    bits: int,
    bound: float,
    neighbours: int | None = None,
    inner: Channel | None = None,
) -> Channel:
    r"""Pairwise masks: the server can tell the sum of all messages, and nothing else.

    A client's part of the aggregate, its message times its share of a mean or once for a sum, is
    rounded at random, without bias, to multiples of \(B / L\), and becomes a whole number modulo
    \(2^b\). To it each client adds, for each of its partners, random numbers that it shares with
    that partner alone and that the partner subtracts. A masked message is uniformly distributed;
    in the sum all masks cancel exactly, whatever the backend. With
    \(L = \lfloor (2^{b-1} - 1) / m \rfloor\) for m clients no sum overflows.

    An uplink only, for sums and means. All clients must take part in every round: who drops out
    takes its masks along. What clients send before the rounds goes through the same channel, unless
    the start has one of its own; algorithms whose first messages are no sums or means want that, or
    a warm start. Derivatives are straight through, those of the exact sum of the clipped parts. A
    message that is not finite ends the run and is not hidden in the sum. The history's diagnostics
    are the experimenter's; no server has them.

    The run's key is the whole secrecy of the masks. All pairs' seeds come from it, so that whoever
    knows it, here any one client, can unmask all; and masks that are used twice cancel in the
    difference of two messages, so that each run needs a key of its own (`jaxfed.sweep` refuses to
    share one). JAX's generator is one for simulations. On separate machines (`jaxfed.deploy`) the
    seeds come from a key agreement between each two clients and masks from a generator for
    cryptography, all clients are partners, and some may drop out.

    Args:
        clients: m, how many there are.
        bits: b, of each number, 2 to 32.
        bound: B, the largest magnitude of an entry of a client's part of the aggregate, known to
            all; entries beyond are clipped. For a mean over m clients of equal weights, that is a
            bound on the messages over m.
        neighbours: how many partners a client has, an even number; the clients stand in a ring,
            half the partners on either side. Each costs as many random numbers as a message has
            entries. All others by default. A client's message is safe as long as one of its
            partners does not collude with the server.
        inner: what a message goes through before it is masked, such as `gaussian(...,
            clients=clients)`; nothing by default.

    Returns:
        The channel; a payload is the masked numbers, packed at b bits.

    Raises:
        ValueError: for fewer than two clients, bits outside their range or too few for that many
            clients, a bound that is not a positive number, an unfit number of neighbours, or an
            inner channel with memory at both ends.

    Source: Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine
    learning, Section 4; with few neighbours, Bell, Bonawitz, Gascon, Lepoint & Raykova (2020).
    """
    check_count("clients", clients, least=2)
    check_count("bits", bits, least=2)
    if bits > 32:
        raise ValueError(f"bits: wanted at most 32, got {bits}")
    if 2 ** (bits - 1) - 1 < clients:
        raise ValueError(
            f"bits: a sum over {clients} clients may overflow {bits} bits; "
            f"wanted at least {int(clients).bit_length() + 1}"
        )
    check_number("bound", bound, "a positive number", lambda x: x > 0)
    if neighbours is not None and (
        not is_whole(neighbours) or neighbours % 2 or not 2 <= neighbours < clients
    ):
        raise refuse("neighbours", f"an even number of at least 2 and below {clients}", neighbours)
    neighbours = None if neighbours is None else int(neighbours)
    inner = lossless() if inner is None else inner
    if not isinstance(inner, Channel) or inner.cumulative or isinstance(inner, _SecureSum):
        raise refuse("inner", "a channel without memory at both ends, such as gaussian", inner)
    return _SecureSum(inner, clients, bits, float(bound), neighbours)
