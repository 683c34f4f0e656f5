"""Noise in the gradients of single samples, which protects each person in training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from jaxfed.contract import check_factor, check_instance, check_positive, hyperparameter, refuse
from jaxfed.core.clients.samples import at_least_single
from jaxfed.generative._prior import scaled_to_norm


class GradientNoise(eqx.Module):
    r"""Clip the gradient of each sample and add noise to their sum, in every local step (DP-SGD).

    A step draws `batch_size` of the client's \(n\) samples, uniformly without replacement and
    independently of all other steps. It clips the gradient of each one's own loss, all parameters
    together, to Euclidean norm \(C\), adds normal noise of standard deviation \(z C\) to each entry
    of their sum, and divides by `batch_size`:

    \[ \frac{1}{b} \Big[ \sum_{j \in S} g_j \min(1, C / |g_j|) + z C \xi \Big], \qquad
    \xi \sim N(0, I). \]

    Everything that is computed from such gradients protects each person to the same extent: the
    optimizer's steps, the messages, the shared model, and the personal models of
    `AdaptiveTraining`. `jaxfed.privacy.training_guarantee` computes how far, and
    `jaxfed.privacy.training_noise` finds \(z\) for an \(\varepsilon\). Nothing else that a run
    returns is protected; `jaxfed.privacy.statement` lists it.

    A gradient that is not finite, or is more than about 1e19 times as long as \(C\) in single
    precision, counts as zero, so that no sample moves the sum further than by \(C\).

    Batches have a fixed size, unlike the random sizes of the source, because arrays do. The
    guarantee is thus for data of one person that are replaced by others, while numbers of samples
    are public. A step stores `batch_size` gradients of each client. Noise and norms have at least
    single precision. The noise is only as secret as the run's key, and comes from JAX's generator,
    which is for simulations.

    Both numbers are traced leaves, to sweep over or differentiate.

    Attributes:
        clip: \(C\), in units of the loss over those of the parameters.
        noise_multiplier: \(z\); 0 clips only, without any guarantee.

    Source: Abadi et al. (2016), Deep learning with differential privacy, Algorithm 1; Balle, Barthe
    & Gaboardi (2018), Privacy amplification by subsampling, for batches without replacement.
    """

    clip: Float[Array, ""]
    noise_multiplier: Float[Array, ""]

    def __init__(self, clip: ArrayLike, noise_multiplier: ArrayLike):
        """Set the two numbers.

        Raises:
            ValueError: if the clip is not positive, or the noise multiplier is negative.
        """
        check_positive("clip", clip)
        check_factor("noise_multiplier", noise_multiplier)
        self.clip, self.noise_multiplier = hyperparameter(clip), hyperparameter(noise_multiplier)

    def mean_of(self, gradients: PyTree, key: Key[Array, ""]) -> PyTree:
        """The mean of clipped gradients with noise.

        Args:
            gradients: of single samples, along the first axis of all arrays, `(b, ...)`.
            key: randomness of the noise.

        Returns:
            Arrays `(...)` of the same types.
        """
        leaves, structure = jax.tree.flatten(gradients)
        wide = [x.astype(at_least_single(x.dtype)) for x in leaves]
        short = jax.vmap(_at_most_one, (0, None))(wide, self.clip)

        def noisy(number: int, x: Array) -> Array:
            noise = jax.random.normal(jax.random.fold_in(key, number), x.shape[1:], x.dtype)
            total = jnp.sum(x, axis=0) + self.noise_multiplier.astype(x.dtype) * noise
            return self.clip.astype(x.dtype) * (total / len(x))

        found = [noisy(*each) for each in enumerate(short)]
        found = [x.astype(leaf.dtype) for x, leaf in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(structure, found)


def check_noise(gradient_noise: object, batch_size: int | None) -> None:
    """Refuse what is no noise of gradients, or noise without a batch size.

    Raises:
        ValueError: says so.
    """
    if gradient_noise is None:
        return
    wanted = "a jaxfed.generative.GradientNoise, or None"
    check_instance("gradient_noise", gradient_noise, GradientNoise, wanted)
    if batch_size is None:
        raise refuse("batch_size", "a number of samples with gradient_noise", batch_size)


def _at_most_one(gradient: list[Array], clip: Float[Array, ""]) -> list[Array]:
    """ONE sample's gradient over the clip, scaled down to norm one; zero if it is not finite.

    Squares of very small or large gradients have no place in single precision, but by the clip.
    """
    known = jnp.isfinite(sum(jnp.sum(jnp.square(x / clip.astype(x.dtype))) for x in gradient))
    # Before the division, whose derivative would be NaN.
    finite = [jnp.where(known, x, 0) / clip.astype(x.dtype) for x in gradient]
    return scaled_to_norm(finite, jnp.ones(()))
