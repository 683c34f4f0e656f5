"""Clipping and Gaussian noise, for differential privacy of what clients send."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxfed.core.common.checks import check_count, check_number
from jaxfed.core.contract.reduction import is_linear
from jaxfed.core.wire.channel import Channel


class _Gaussian(Channel):
    clip: float = eqx.field(static=True)
    noise_multiplier: float = eqx.field(static=True)
    clients: int = eqx.field(static=True)

    private = True

    def check(self, clients, participants, message):
        if self.clients == 1:
            return
        if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(message)):
            raise ValueError(
                "channel: noise that clients share needs messages in single precision at least: "
                "each one's rounding to half precision would show in the sum; use clients=1"
            )
        if participants != self.clients:
            taking_part = "a varying number" if participants is None else participants
            raise ValueError(
                f"channel: its noise is shared by {self.clients} clients, and {taking_part} take "
                "part in each round"
            )
        weights = clients.weights
        if not is_linear(message) or not (isinstance(weights, Tracer) or _equal(weights)):
            raise ValueError(
                "channel: noise that clients share needs a sum, or a mean with equal weights "
                "(Clients with weights='equal'); use clients=1"
            )

    def noise(self):
        return self.noise_multiplier

    def memory(self, message):
        del message

    def encode(self, key, message, memory):
        refuse_whole_numbers(message)
        leaves, structure = jax.tree.flatten(message)
        square = sum((_square(leaf) for leaf in leaves), start=jnp.float32(0))
        tiny = jnp.finfo(square.dtype).tiny
        factor = jnp.minimum(1, self.clip / jnp.sqrt(jnp.maximum(square, tiny)))
        hidden = [self._hidden(jax.random.fold_in(key, i), x, factor) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, hidden), memory

    def _hidden(self, key, array, factor):
        # In half precision the noise itself would have few values, and give away what it hides.
        wide = jnp.promote_types(array.dtype, jnp.float32)
        deviation = self.clip * self.noise_multiplier / self.clients**0.5
        noise = deviation * jax.random.normal(key, array.shape, wide)
        return (array * factor.astype(wide) + noise).astype(array.dtype)

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        del message, memory
        return decoded

    def receive(self, decoded, last):
        del last
        return decoded


def _square(array: Array) -> Array:
    return jnp.sum(array.astype(jnp.promote_types(array.dtype, jnp.float32)) ** 2)


def _equal(weights: Array) -> bool:
    # On the host: within a traced function JAX would trace this too.
    known = np.asarray(weights)
    return bool(np.ptp(known) <= 1e-5 * np.max(known))


def gaussian(clip: float, noise_multiplier: float, *, clients: int = 1) -> Channel:
    r"""Clip each message to a norm and add Gaussian noise, at the client.

    A message, all its arrays together, is scaled down to Euclidean norm \(c\) if it is longer, and
    gets noise of standard deviation \(z c / \sqrt k\) in each entry. With \(k = 1\) every single
    message is protected, whoever sees it. With more, only the sum of k of them carries noise of
    \(z c\). That is less noise by far, but protects against nobody who sees single messages: use it
    as the `inner` of `secure_sum`, or with a server that is trusted to look at sums alone.
    `jaxfed.privacy.epsilon` says what \(z\) guarantees over the rounds.

    An uplink only. What clients send before the rounds goes through the same channel, one more
    message to count for those algorithms that send one, unless the start has a channel of its own.
    `jaxfed.privacy.spent` makes an account of what a solution says was sent. The noise is that of
    floating-point numbers. The derivative is that of the clipped message.

    The run's key is the whole secrecy of the noise. Who knows or guesses it draws the noise again
    and takes it off, and in two runs with one key the noise is the same, so that what they send
    differs by exactly what the data do: each run whose messages are to be private needs a key of
    its own that nobody else has. On separate machines (`jaxfed.deploy`) each draws with a key of
    its own. JAX's generator is one for simulations; what must be safe wants one for cryptography,
    and noise whose last bits are safe too.

    Args:
        clip: \(c\), for the message before it is weighted.
        noise_multiplier: \(z\), per round.
        clients: k, how many share the noise: the number of those who take part in each round.
            Their weights must be equal, which is only looked at outside of compiled functions.

    Raises:
        ValueError: for a clip or a multiplier that is not a positive number, or a number of clients
            that is not positive and whole.

    Source: Dwork & Roth (2014), Appendix A; McMahan, Ramage, Talwar & Zhang (2018), Learning
    differentially private recurrent language models.
    """
    for name, value in (("clip", clip), ("noise_multiplier", noise_multiplier)):
        check_number(name, value, "a positive number", lambda x: x > 0)
    check_count("clients", clients)
    return _Gaussian(float(clip), float(noise_multiplier), clients)


def refuse_whole_numbers(message: PyTree) -> None:
    """Refuse messages that could not be hidden entirely.

    Raises:
        ValueError: for arrays that are not of floating-point numbers.
    """
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"channel: it hides floating-point numbers only, the message has {leaf.dtype}"
            )
