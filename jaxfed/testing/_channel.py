"""Check that a channel satisfies the contract of `jaxfed.channel.Channel`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed import channel as channels
from jaxfed._checks import check_factor, check_instance, check_whole, checked_key
from jaxfed.core.contract.reduction import contributions, joined, over_clients, plain, separated
from jaxfed.core.round.messages import send
from jaxfed.core.wire import calls
from jaxfed.core.wire.channel import Channel, Context
from jaxfed.testing import _compare
from jaxfed.testing._case import combination
from jaxfed.testing._report import Report, Skipped, chosen, reported

SETTLED = 60  # messages after which one that no longer changes arrives, where a channel settles


class _Round(NamedTuple):
    """What one message of all clients leaves behind."""

    payload: PyTree  # leading axis = clients, as `memory`
    memory: PyTree
    received: PyTree  # the server's, reduced


@dataclass(frozen=True)
class _Case:
    channel: Channel
    message: PyTree
    clients: int
    key: Key[Array, ""]
    rtol: float
    atol: float

    def messages(self, message: PyTree) -> PyTree:
        """The clients' messages, leading axis = clients: the first one's, and others like it."""
        factors = 1 + jnp.arange(self.clients) / 8

        def alike(x: Array) -> Array:
            each = jnp.repeat(x[None], self.clients, 0)
            if not eqx.is_inexact_array(x):
                return each
            return each * factors.reshape(-1, *[1] * x.ndim).astype(x.dtype)

        return jax.tree.map(alike, calls.carried(self.channel, message))

    def bound(self, key: Key[Array, ""], number: Array, place: Array) -> Channel:
        """The channel of one client in a round."""
        return calls.bind(self.channel, Context(place, jnp.asarray(1 / self.clients), key, number))

    def sent(self, message: PyTree, key: Key[Array, ""], rounds: int | Int[Array, ""]) -> _Round:
        """Send the same messages so many times."""
        messages, places = self.messages(message), jnp.arange(self.clients)

        def memory(place, own):
            zeros = jax.tree.map(jnp.zeros_like, own)
            return calls.memory(self.bound(key, jnp.zeros((), int), place), zeros)

        def one(place, own, memory, number):
            own_key = jax.random.fold_in(jax.random.fold_in(key, number), place)
            return send(self.bound(key, number, place), own_key, own, memory)

        def again(number, memories, last):
            sent = jax.vmap(one, (0, 0, 0, None))(places, messages, memories, number)
            received = self.channel.receive(self.reduced(sent.decoded), last)
            return _Round(sent.payload, sent.memory, received)

        def next_round(number, done: _Round) -> _Round:
            return again(number, done.memory, done.received if self.channel.cumulative else None)

        zeros = self.reduced(jax.tree.map(jnp.zeros_like, messages))
        last = zeros if self.channel.cumulative else None
        first = again(jnp.ones((), int), jax.vmap(memory)(places, messages), last)
        return jax.lax.fori_loop(2, rounds + 1, next_round, first)

    @functools.cached_property
    def run(self) -> Callable[..., _Round]:
        """`sent`, compiled once for each precision."""
        return jax.jit(lambda message, key=self.key, rounds=1: self.sent(message, key, rounds))

    def reduced(self, messages: PyTree) -> PyTree:
        """The server's message of all clients'."""
        weight = jnp.asarray(1 / self.clients)
        parts = jax.vmap(lambda x: contributions(x, weight))(messages)
        summands, gathered = separated(parts)
        return joined(over_clients(summands), gathered)

    def exact(self, message: PyTree) -> PyTree:
        """What the server would receive without loss."""
        return plain(self.reduced(self.messages(message)))


def _in_precisions(case: _Case) -> dict[str, PyTree]:
    return {
        name: _compare.floats_as(case.message, getattr(np, name)) for name in ("float32", "float64")
    }


def _check_shapes(case: _Case) -> None:
    for name, message in _in_precisions(case).items():
        # The engine checks what each function returns, the second time, too.
        given = jax.eval_shape(case.sent, message, case.key, 2)
        wanted = jax.eval_shape(case.exact, message)
        sentence = f"what is received has the shapes and types of what was sent, in {name}"
        _compare.check_same_shapes(plain(given.received), wanted, sentence)


def _check_bits(case: _Case) -> None:
    one, zero = jnp.ones((), int), jnp.zeros((), int)
    decode = jax.jit(lambda x: plain(case.bound(case.key, one, zero).decode(x)))
    for message in _in_precisions(case).values():
        payload = jax.tree.map(lambda x: x[0], case.run(message).payload)
        _compare.checked_length(payload)
        read = channels.from_bytes(channels.to_bytes(payload), payload)
        sentence = "a payload that is read from its bytes decodes to the same numbers"
        _compare.same(decode(read), decode(payload), sentence, 0, 0)


def _check_finite(case: _Case) -> None:
    def filled(value: float) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.full_like(x, value) if eqx.is_inexact_array(x) else x, case.message
        )

    def times(factor: float) -> PyTree:
        return jax.tree.map(
            lambda x: factor * x if eqx.is_inexact_array(x) else x,
            _compare.floats_as(case.message, np.float32),
        )

    given = {"the message": case.message, "zeros": filled(0.0), "equal entries": filled(0.7)}
    given |= {f"the message times {x:g} in float32": times(x) for x in (1e-12, 1e12)}
    for name, message in given.items():
        received = case.run(message).received
        _compare.check_finite(received, f"what is received is finite: of {name}")


def _check_random(case: _Case) -> None:
    one, same = case.run(case.message), case.run(case.message)
    _compare.same(same, one, "the same key gives the same payload and message", 0, 0)


def _check_settles(case: _Case) -> None:
    if not case.channel.settles:
        raise Skipped("the channel does not declare settles")
    received = plain(case.run(case.message, rounds=SETTLED).received)
    sentence = f"a message that stopped changing {SETTLED} messages ago arrives without loss"
    _compare.same(received, case.exact(case.message), sentence, case.rtol, case.atol)


def _check_private(case: _Case) -> None:
    if not case.channel.private:
        raise Skipped("the channel does not declare private")
    keys = case.key, jax.random.fold_in(case.key, 1)
    payload, other = (case.run(case.message, key).payload for key in keys)
    leaves = jax.tree_util.tree_leaves_with_path(payload)
    for (path, x), y in zip(leaves, jax.tree.leaves(other), strict=True):
        if x.size >= 8 * case.clients and np.mean(np.asarray(x) == np.asarray(y)) > 0.5:
            raise AssertionError(
                "a private channel's payload depends on the key: with another key, most numbers at "
                f"{jax.tree_util.keystr(path) or 'the only array'} are the same"
            )


def _check_derivatives(case: _Case) -> None:
    floats, rest = eqx.partition(case.message, eqx.is_inexact_array)

    def value(floats: PyTree) -> Float[Array, ""]:
        message = eqx.combine(floats, rest)
        return combination(plain(case.sent(message, case.key, 1).received))

    slopes = jax.jit(jax.grad(value))(floats)
    _compare.check_finite(slopes, "derivatives are finite")
    if not any(np.asarray(x).any() for x in jax.tree.leaves(slopes)):
        raise AssertionError("what is received depends on the message: all derivatives are zero")


_CHECKS = {
    "shapes": _check_shapes,
    "bits": _check_bits,
    "finite": _check_finite,
    "random": _check_random,
    "settles": _check_settles,
    "private": _check_private,
    "derivatives": _check_derivatives,
}


def check_channel(
    channel: Channel,
    message: PyTree | None = None,
    *,
    clients: int = 3,
    key: Key[Array, ""] | None = None,
    checks: Sequence[str] | None = None,
    progress: bool | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> Report:
    """Check that a channel satisfies the contract of `jaxfed.channel.Channel` as an uplink.

    Several clients send messages like the given one, and the server receives their reduction. In
    the order in which they run:

    * `"shapes"`: what is received has the shapes and types of what was sent, in single and double
      precision, and memories keep theirs;
    * `"bits"`: a payload has as many bytes as are counted, and decodes to the same numbers after
      it was written to bytes and read again;
    * `"finite"`: what is received is finite, of zeros, equal entries, very small and very large
      ones, too;
    * `"random"`: the same key gives the same payload;
    * `"settles"`: if it declares `settles`, a message that stops changing arrives without loss;
    * `"private"`: if it declares `private`, another key gives another payload;
    * `"derivatives"`: derivatives by the message are finite and not all zero.

    `check_algorithm(..., channels={"mine": channel})` runs an algorithm through it.

    Args:
        channel: the channel to check, such as `jaxfed.channel.difference(Mine())`.
        message: ONE client's message, in the classes of `jaxfed.reduction` or as bare arrays, which
            are means; by default a matrix, a vector and a number.
        clients: number of clients, such as the number that `secure_sum` is made for.
        key: random key.
        checks: names of the checks to run; all by default.
        progress: print each check's name and duration to standard error; by default if that is a
            terminal.
        rtol: relative tolerance of `"settles"`.
        atol: absolute tolerance of `"settles"`.

    Returns:
        The checks that passed, and reasons why others were skipped.

    Raises:
        AssertionError: names the violated property, with the values compared.
        ValueError: if an argument is invalid, or a function of the channel breaks its contract,
            which the message names.
    """
    check_instance("channel", channel, Channel, "one of jaxfed.channel")
    check_whole("clients", clients, least=1)
    names, progress = chosen(checks, tuple(_CHECKS), progress)
    check_factor("rtol", rtol, single=True)
    check_factor("atol", atol, single=True)
    with jax.enable_x64(True):
        if message is None:
            rng = np.random.default_rng(0)
            matrix, vector = rng.normal(size=(6, 2)), rng.normal(size=40)
            message = {"matrix": matrix, "vector": vector, "number": np.asarray(1.5)}
        message = _compare.arrays("message", message)
        key = jax.random.key(0) if key is None else checked_key("key", key)
        case = _Case(channel, message, int(clients), key, rtol, atol)
        return reported(
            "check_channel",
            {name: functools.partial(_CHECKS[name], case) for name in names},
            progress,
        )
