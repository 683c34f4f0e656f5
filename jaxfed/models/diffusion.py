r"""Diffusion models: the corruption of samples, the denoising loss, and the sampler.

A corrupted sample is \(s(a)\,x + n(a)\,\varepsilon\), where the amount a runs from 0 (no noise) to
1 (only noise). A network learns to predict x. The sampler starts from noise, predicts x, and mixes
it with ever smaller amounts of the remaining noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxfed._checks import check_count, check_list, check_number, checked_dtype, refuse

Denoiser = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Corruption:
    r"""How samples are mixed with noise: \(s(a)\,x + n(a)\,\varepsilon\).

    Attributes:
        amounts: the smallest and largest amount; training draws uniformly between them.
        uniform: whether the noise is uniform on [0, 1] instead of standard normal.
        linear: whether s = 1 - a and n = a instead of their square roots.
    """

    amounts: tuple[float, float]
    uniform: bool
    linear: bool

    def shares(self, amount: Float[Array, "..."]) -> tuple[Array, Array]:
        """The factors s of the sample and n of the noise."""
        if self.linear:
            return 1 - amount, amount
        # Compilers round an amount of 500 / 500 up: they multiply by 1 / 500.
        return jnp.sqrt(jnp.maximum(1 - amount, 0)), jnp.sqrt(amount)

    def noise(self, key: Key[Array, ""], shape: tuple[int, ...], dtype) -> Array:
        """Draw noise of this shape."""
        draw = jax.random.uniform if self.uniform else jax.random.normal
        return draw(key, shape, dtype)

    def __call__(
        self, key: Key[Array, ""], batch: Float[Array, "b d"]
    ) -> tuple[Float[Array, "b d"], Float[Array, " b"]]:
        """Corrupt each sample of a batch by a random amount.

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

    Features of unit variance keep it: the amount is the share of the noise in the variance.

    Source: Ozkara, Huang, Zhou & Diggavi, ADEPT, Algorithm 3, whose preprint lost the formula; the
    variance-preserving process is that of Song et al. (2021), Score-based generative modeling
    through stochastic differential equations.

    Args:
        low: the smallest amount.
        high: the largest amount.

    Raises:
        ValueError: unless 0 <= low <= high <= 1 and high > 0.
    """
    return Corruption(_checked(low, high), uniform=False, linear=False)


def interpolation(low: float = 0.0, high: float = 1.0) -> Corruption:
    r"""\((1-a)\,x + a\,\varepsilon\) with noise uniform from 0 to 1.

    Source: the code published with ADEPT.

    Args:
        low: the smallest amount.
        high: the largest amount.

    Raises:
        ValueError: unless 0 <= low <= high <= 1 and high > 0.
    """
    return Corruption(_checked(low, high), uniform=True, linear=True)


@dataclass(frozen=True)
class DenoisingLoss:
    r"""Mean squared error of a network that restores corrupted samples.

    \(\frac1b \sum_x \|f(s(a) x + n(a) \varepsilon) - x\|^2\), with new amounts and noise in every
    step. Up to a constant, it is a weighted evidence bound of the samples.

    Source: ADEPT, Algorithm 3; Kingma & Gao (2023), Understanding diffusion objectives as the ELBO
    with simple data augmentation, for the bound.

    Attributes:
        corruption: corruption of the samples.
        conditional: whether the network takes the amount as a second argument.
    """

    corruption: Corruption
    conditional: bool = False

    def __call__(
        self, model: Callable[..., Array], batch: Float[Array, "b d"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """The loss of a batch.

        Args:
            model: maps one corrupted sample (and the amount) to the clean sample.
            batch: clean samples as rows.
            key: random key of the amounts and the noise.

        Raises:
            ValueError: if the network's output does not have the sample's shape.
        """
        corrupted, amounts = self.corruption(key, batch)
        found = jax.vmap(denoiser(model, conditional=self.conditional))(corrupted, amounts)
        if found.shape != batch.shape:
            # Without this check a shape such as (b, 1) would be broadcast.
            raise ValueError(
                f"model: wanted samples of the batch's shape {batch.shape}, got {found.shape}"
            )
        return jnp.mean(jnp.sum((found - batch) ** 2, axis=-1))


def denoiser(model: Callable[..., Array], *, conditional: bool = False) -> Denoiser:
    """View a network as a function of ONE corrupted sample and the amount of noise in it.

    Args:
        model: the network.
        conditional: whether the network takes the amount as well as the sample.
    """
    return model if conditional else lambda sample, amount: model(sample)


def generate(
    denoise: Denoiser,
    corruption: Corruption,
    shape: tuple[int, int],
    *,
    key: Key[Array, ""],
    steps: int = 500,
    dtype=jnp.float32,
) -> Float[Array, "n d"]:
    r"""Generate samples, starting from noise.

    The amount a falls from 1 to 0 in equal steps. Each step predicts the clean sample x, treats
    the rest of y as noise, and keeps less of it:
    \(y \leftarrow s(a') x + \frac{n(a')}{n(a)} (y - s(a)x)\). With `interpolation`, step j of N is
    \(y \leftarrow y + (x - y) / (N - j)\), as in the code published with ADEPT. If the network
    predicts the mean of x given y, samples have the data's distribution in the limit of many steps.

    Source: Song, Meng & Ermon (2021), Denoising diffusion implicit models, equation 12 without
    randomness.

    Args:
        denoise: predicts ONE clean sample from the corrupted one and the amount.
        corruption: the corruption it was trained with.
        key: random key of the initial noise, the only random draw.
        shape: number of samples and features.
        steps: number of steps.
        dtype: floating type of the samples.

    Raises:
        ValueError: if a number is not positive or `dtype` is not a floating type.
    """
    check_list("shape", shape, "a number of samples and one of features")
    for number in shape:
        check_count("shape", number)
    check_count("steps", steps)
    dtype = checked_dtype("dtype", dtype)

    def step(samples, index):
        amount, smaller = ((steps - index - i).astype(dtype) / steps for i in (0, 1))
        (signal, noise), (more, less) = map(corruption.shares, (amount, smaller))
        # `amount` is at least 1/steps, so `noise` is never zero.
        found = jax.vmap(denoise, (0, None))(samples, amount)
        # The rest of the sample is noise; keep as much of it as the smaller amount allows.
        return more * found + less / noise * (samples - signal * found), None

    start = corruption.noise(key, shape, dtype)
    return jax.lax.scan(step, start, jnp.arange(steps))[0]


def _checked(low: float, high: float) -> tuple[float, float]:
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, Tracer):
            # The bounds are part of a static field.
            raise refuse(name, "a number that is not traced", value)
        check_number(name, value, "a number from 0 to 1", lambda x: (x >= 0) & (x <= 1))
    if not 0 <= low <= high <= 1 or high == 0:
        raise ValueError(
            f"low, high: wanted 0 <= low <= high <= 1, high above 0, got {low}, {high}"
        )
    return float(low), float(high)
