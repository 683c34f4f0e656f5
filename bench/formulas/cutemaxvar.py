r"""When the quantizer of the messages is a contraction, by two facts in the paper.

A random compressor C is a \(\delta\)-compressor if its mean squared error on a message V is at most
\(E\|C(V) - V\|^2 \le (1 - \delta) \|V\|^2\). Error feedback requires this. The quantizer of
`jaxfed.channel.quantize`, with s levels above zero and the contraction \(\tau\), rounds V at random
to multiples of \(\max|V|/s\) and divides by \(\tau\).

Source: Shrestha & Fu (2023), Section III-C.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

Scalar = Float[Array, ""]


def safe_contraction(entries: int, levels: int) -> float:
    r"""The contraction \(1 + n/(4s^2)\), with which any message whatever is compressed.

    It makes a \(1/\tau\)-compressor. For long messages it is far larger than what is best.

    Args:
        entries: n, of a message.
        levels: s, above zero: `2^(bits - 1) - 1`.

    Source: Shrestha & Fu (2023), Fact 1.
    """
    return 1 + entries / (4 * levels**2)


def error_bound(message: Float[ArrayLike, "..."], levels: int) -> Scalar:
    r"""What rounding misses at most, relative: \(n \max|V|^2 / (4 s^2 \|V\|^2)\).

    Where it is below one, the quantizer is a compressor without any contraction, one of
    \(\delta = 1\) less this bound. The expected square of one entry's error is at most a quarter of
    the squared distance of two levels.

    Args:
        message: V, not zero.
        levels: s, above zero.

    Source: Shrestha & Fu (2023), Fact 2 and its proof.
    """
    values = jnp.asarray(message)
    return values.size * jnp.max(jnp.abs(values)) ** 2 / (4 * levels**2 * jnp.sum(values**2))


def expected_error(
    message: Float[ArrayLike, "..."], levels: int, contraction: ArrayLike = 1.0
) -> Scalar:
    r"""What is missed on average, \(E\|C(V) - V\|^2 / \|V\|^2\), exactly.

    Args:
        message: V, not zero.
        levels: s, above zero.
        contraction: \(\tau\).
    """
    values, tau = jnp.asarray(message), jnp.asarray(contraction)
    distance = jnp.max(jnp.abs(values)) / levels
    above = jnp.abs(values) / distance
    share = above - jnp.floor(above)  # the probability of the upper one of the two levels
    variance = jnp.sum(distance**2 * share * (1 - share)) / jnp.sum(values**2)
    return (1 - 1 / tau) ** 2 + variance / tau**2
