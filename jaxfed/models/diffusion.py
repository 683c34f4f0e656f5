r"""Diffusion: samples mixed with noise, the loss of undoing it, and samples made from noise alone.

At the amount a, from 0 for none to 1 for nothing else, a corrupted sample is
\(s(a)\,x + n(a)\,\varepsilon\). A network learns to find x in it. A sample is made from noise by
looking for x and mixing it with the noise that is left, in ever smaller amounts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxfed._checks import (
    check_callable,
    check_count,
    check_flag,
    check_instance,
    check_number,
    checked_dtype,
    checked_key,
    is_list,
    refuse,
)

Denoiser = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Corruption:
    r"""How samples are mixed with noise: \(s(a)\,x + n(a)\,\varepsilon\).

    Attributes:
        amounts: the least and the largest amount to learn from, drawn uniformly between them.
        uniform: whether the noise is uniform from 0 to 1 rather than standard normal.
        linear: whether shares add up to one, s = 1 - a and n = a, rather than their squares.
    """

    amounts: tuple[float, float]
    uniform: bool
    linear: bool

    def shares(self, amount: Float[Array, "..."]) -> tuple[Array, Array]:
        """What the sample and what the noise is multiplied by."""
        if self.linear:
            return 1 - amount, amount
        return jnp.sqrt(1 - amount), jnp.sqrt(amount)

    def noise(self, key: Key[Array, ""], shape: tuple[int, ...], dtype) -> Array:
        """Noise of this shape."""
        draw = jax.random.uniform if self.uniform else jax.random.normal
        return draw(key, shape, dtype)

    def __call__(
        self, key: Key[Array, ""], batch: Float[Array, "b d"]
    ) -> tuple[Float[Array, "b d"], Float[Array, " b"]]:
        """Corrupt the samples of a batch, each by an amount of its own.

        Returns:
            The corrupted samples, and the amounts.
        """
        noise_key, amount_key = jax.random.split(key)
        low, high = self.amounts
        amount = jax.random.uniform(amount_key, batch.shape[:1], batch.dtype, low, high)
        signal, noise = (share[:, None] for share in self.shares(amount))
        return signal * batch + noise * self.noise(noise_key, batch.shape, batch.dtype), amount


def variance_preserving(low: float = 0.0, high: float = 1.0) -> Corruption:
    r"""\(\sqrt{1-a}\,x + \sqrt{a}\,\varepsilon\) with standard normal noise.

    Features of unit variance keep it, whatever the amount, which is the share of the noise in it.

    Source: Ozkara, Huang, Zhou & Diggavi, ADEPT, Algorithm 3, in whose preprint's text the formula
    is lost; the variance-preserving process is that of Song et al. (2021), Score-based generative
    modeling through stochastic differential equations.

    Args:
        low: the least amount.
        high: the largest.

    Raises:
        ValueError: unless 0 <= low <= high <= 1 and high > 0.
    """
    return Corruption(_checked(low, high), uniform=False, linear=False)


def interpolation(low: float = 0.0, high: float = 1.0) -> Corruption:
    r"""\((1-a)\,x + a\,\varepsilon\) with noise uniform from 0 to 1.

    Source: the program published with ADEPT.

    Args:
        low: the least amount.
        high: the largest.

    Raises:
        ValueError: unless 0 <= low <= high <= 1 and high > 0.
    """
    return Corruption(_checked(low, high), uniform=True, linear=True)


@dataclass(frozen=True)
class DenoisingLoss:
    r"""Mean squared length of what a network misses of samples that it is shown corrupted.

    \(\frac1b \sum_x \|f(s(a) x + n(a) \varepsilon) - x\|^2\), amounts and noise drawn anew in each
    step. It is a weighted evidence bound of the samples, up to a constant.

    Source: ADEPT, Algorithm 3; Kingma & Gao (2023), Understanding diffusion objectives as the ELBO
    with simple data augmentation, for what it bounds.

    Attributes:
        corruption: of the samples.
        conditional: whether the network is called with the amount after the sample.
    """

    corruption: Corruption
    conditional: bool = False

    def __call__(
        self, model: Callable[..., Array], batch: Float[Array, "b d"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """The loss of a batch.

        Args:
            model: maps one corrupted sample, or that and the amount, to the clean sample.
            batch: clean samples as rows.
            key: of amounts and noise.

        Raises:
            ValueError: if what the network gives has not the sample's shape.
        """
        corrupted, amounts = self.corruption(key, batch)
        found = jax.vmap(denoiser(model, conditional=self.conditional))(corrupted, amounts)
        if found.shape != batch.shape:
            # Shapes such as (b, 1) would be broadcast.
            raise ValueError(
                f"model: wanted samples of the batch's shape {batch.shape}, got {found.shape}"
            )
        return jnp.mean(jnp.sum((found - batch) ** 2, axis=-1))


def denoiser(model: Callable[..., Array], *, conditional: bool = False) -> Denoiser:
    """A network as function of ONE corrupted sample and its amount of noise.

    Args:
        model: the network.
        conditional: whether it takes the amount, or the sample alone.

    Raises:
        ValueError: if `model` is no function or `conditional` no boolean.
    """
    check_callable("model", model)
    check_flag("conditional", conditional)
    return model if conditional else lambda sample, amount: model(sample)


def generate(
    denoise: Denoiser,
    corruption: Corruption,
    key: Key[Array, ""],
    shape: tuple[int, int],
    *,
    steps: int = 500,
    dtype=jnp.float32,
) -> Float[Array, "n d"]:
    r"""Samples from noise alone.

    From a = 1 down to 0 in equal steps, the clean sample x is looked for, and of the rest, which
    is taken for the noise, less is kept: \(y \leftarrow s(a') x + \frac{n(a')}{n(a)} (y - s(a)x)\).
    With `interpolation` step j of N is \(y \leftarrow y + (x - y) / (N - j)\), what the program
    published with ADEPT does. With the true mean of x given y and many steps, samples have the law
    of the data.

    Source: Song, Meng & Ermon (2021), Denoising diffusion implicit models, equation 12 without
    randomness.

    Args:
        denoise: finds ONE clean sample, given the corrupted one and the amount.
        corruption: what it was trained with.
        key: of the noise, the only thing drawn.
        shape: how many samples, and features of each.
        steps: how many.
        dtype: of the samples.

    Raises:
        ValueError: if `shape` is not of two positive numbers or `steps` is not positive.
    """
    check_callable("denoise", denoise)
    check_instance("corruption", corruption, Corruption, "a Corruption, such as interpolation()")
    if not is_list(shape) or len(shape) != 2:
        raise refuse("shape", "numbers of samples and features", shape)
    samples, features = shape
    check_count("shape", samples)
    check_count("shape", features)
    check_count("steps", steps)
    key, dtype = checked_key("key", key), checked_dtype("dtype", dtype)

    def step(samples, index):
        amount, smaller = ((steps - index - i).astype(dtype) / steps for i in (0, 1))
        (signal, noise), (more, less) = map(corruption.shares, (amount, smaller))
        found = jax.vmap(denoise, (0, None))(samples, amount)
        return more * found + less / noise * (samples - signal * found), None

    start = corruption.noise(key, (samples, features), dtype)
    return jax.lax.scan(step, start, jnp.arange(steps))[0]


def _checked(low: float, high: float) -> tuple[float, float]:
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, Tracer):
            raise refuse(name, "a number that is not traced", value)
        check_number(name, value, "a number from 0 to 1", lambda x: (x >= 0) & (x <= 1))
    if not 0 <= low <= high <= 1 or high == 0:
        raise ValueError(
            f"low, high: wanted 0 <= low <= high <= 1, high above 0, got {low}, {high}"
        )
    return float(low), float(high)
