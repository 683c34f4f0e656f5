"""Clipping and Gaussian noise, for differential privacy of clients' messages."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxfed._checks import check_count, check_positive
from jaxfed.core.contract.reduction import is_summed
from jaxfed.core.wire.channel import Channel
from jaxfed.linalg.sums import norm_of


class _Gaussian(Channel):
    factory = "gaussian"
    clip: float = eqx.field(static=True)
    noise_multiplier: float = eqx.field(static=True)
    clients: int = eqx.field(static=True)

    private = True

    @property
    def needs_sum(self) -> bool:
        """Whether clients share the noise, which only their sum contains in full."""
        return self.clients > 1

    @property
    def sharers(self) -> int:
        """The clients that share the noise: the sum over fewer has less of it."""
        return self.clients

    def check(self, clients, participants, message):
        if self.clients == 1:
            return
        if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(message)):
            raise ValueError(
                "channel: noise that clients share needs messages in single precision at least: "
                "each one's rounding to half precision would show in the sum; use clients=1"
            )
        if participants is None or participants < self.clients:
            taking_part = "a varying number" if participants is None else participants
            raise ValueError(
                f"channel: its noise is shared by {self.clients} clients, and {taking_part} take "
                "part in each round"
            )
        weights = clients.weights
        if not is_summed(message) or not (isinstance(weights, Tracer) or _equal(weights)):
            raise ValueError(
                "channel: noise that clients share needs a sum, or a mean with equal weights "
                "(Clients with weights='equal'); use clients=1"
            )

    def noise(self):
        return self.noise_multiplier

    def encode(self, key, message, memory):
        refuse_whole_numbers(message)
        leaves, structure = jax.tree.flatten(message)
        # The norm is that of all arrays together, since accounts are of whole messages.
        wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
        norm = norm_of(wide)
        # A message of zeros stays zero.
        long = norm > self.clip
        factor = jnp.where(long, self.clip / jnp.where(long, norm, 1), 1)
        hidden = [self._hidden(jax.random.fold_in(key, i), x, factor) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, hidden), memory

    def _hidden(self, key, array, factor):
        # In half precision the noise would have too few values to hide anything.
        wide = jnp.promote_types(array.dtype, jnp.float32)
        deviation = self.clip * self.noise_multiplier / self.clients**0.5
        noise = deviation * jax.random.normal(key, array.shape, wide)
        return (array * factor.astype(wide) + noise).astype(array.dtype)

    def decode(self, payload):
        return payload


def _equal(weights: Array) -> bool:
    # Use NumPy, since within a traced function JAX would trace this too.
    known = np.asarray(weights)
    return bool(np.ptp(known) <= 1e-5 * np.max(known))


def gaussian(clip: float, noise_multiplier: float, *, clients: int = 1) -> Channel:
    r"""Clip each message to a norm and add Gaussian noise, at the client.

    A message, all its arrays together, is scaled down to Euclidean norm \(c\) if it is longer, and
    each entry gets noise of standard deviation \(z c / \sqrt k\). With \(k = 1\) every message is
    protected against everybody. With larger k, only the sum of k messages carries noise of
    \(z c\). This is far less noise, but it does not protect single messages from those who see
    them: use it as the `inner` of `secure_sum`, or with a server that is trusted to see only sums.
    `jaxfed.privacy.epsilon` computes the guarantee of \(z\) over the rounds, and
    `jaxfed.privacy.spent` the privacy cost of the messages recorded in a solution.

    For uplinks only. First messages, before the rounds, use the same channel unless `jaxfed.Wire`
    names another, and count as one more message. The noise consists of floating-point numbers. The
    derivative is that of the clipped message.

    The noise is only as secret as the run's key: anyone who knows the key can subtract the noise,
    and two runs with the same key have the same noise, so the difference of their messages reveals
    the difference of their data. Use a new secret key for each run. On separate machines
    (`jaxfed.deploy`) every client has its own key. JAX's random generator is made for simulations;
    real protection needs a cryptographic one, and noise that is safe to its last bits.

    Args:
        clip: \(c\), for the message before it is weighted.
        noise_multiplier: \(z\), per round.
        clients: k, the number of clients that share the noise, at most the number of participants
            in each round; the sum over m of them has noise of \(z c \sqrt{m / k}\). Their weights
            must be equal, which is checked only outside of compiled functions.

    Raises:
        ValueError: if an argument is not positive, or the number of clients is not an integer.

    Source: Dwork & Roth (2014), Appendix A; McMahan, Ramage, Talwar & Zhang (2018), Learning
    differentially private recurrent language models.
    """
    check_positive("clip", clip, single=True)
    check_positive("noise_multiplier", noise_multiplier, single=True)
    check_count("clients", clients)
    return _Gaussian(float(clip), float(noise_multiplier), clients)


def refuse_whole_numbers(message: PyTree) -> None:
    """Refuse a message that cannot be hidden because it has numbers that are not floating-point.

    Raises:
        ValueError: if it has such numbers.
    """
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"channel: it hides floating-point numbers only, the message has {leaf.dtype}"
            )
