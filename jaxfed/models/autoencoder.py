"""A two-layer autoencoder and its reconstruction loss."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed._checks import check_count, check_name

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}


class Autoencoder(eqx.Module):
    r"""Two fully connected layers, \(x \mapsto g(W_2 h(W_1 x + b_1) + b_2)\).

    It has 2·features·latent + latent + features parameters. Without activations its best fit is
    the span of the top principal components.

    Source: Ozkara, Huang, Zhou & Diggavi, ADEPT, Section 5, which has ReLU after the first layer
    and a sigmoid after the last; the authors' code has neither.
    """

    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear
    hidden: Literal["linear", "relu"] = eqx.field(static=True)
    output: Literal["linear", "sigmoid"] = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        latent: int,
        *,
        hidden: Literal["linear", "relu"] = "linear",
        output: Literal["linear", "sigmoid"] = "linear",
        key: Key[Array, ""],
    ):
        """Draw the layers as `equinox.nn.Linear` does.

        Args:
            features: features of a sample.
            latent: features of its code.
            hidden: activation of the code.
            output: activation of the reconstruction; use a sigmoid for samples from 0 to 1.
            key: random key of the initial parameters.

        Raises:
            ValueError: if a size is not positive or an activation is unknown.
        """
        check_count("features", features)
        check_count("latent", latent)
        check_name("hidden", hidden, ("linear", "relu"))
        check_name("output", output, ("linear", "sigmoid"))
        first, second = jax.random.split(key)
        self.encoder = eqx.nn.Linear(features, latent, key=first)
        self.decoder = eqx.nn.Linear(latent, features, key=second)
        self.hidden, self.output = hidden, output

    def encode(self, sample: Float[Array, " features"]) -> Float[Array, " latent"]:
        """The code of ONE sample."""
        return _ACTIVATIONS[self.hidden](self.encoder(sample))

    def __call__(self, sample: Float[Array, " features"]) -> Float[Array, " features"]:
        """The reconstruction of ONE sample."""
        return _ACTIVATIONS[self.output](self.decoder(self.encode(sample)))


def reconstruction_loss(
    model: Callable[[Array], Array], batch: Float[ArrayLike, "b d"], key: Key[Array, ""]
) -> Float[Array, ""]:
    """Mean squared error of a batch's reconstructions, summed over the features.

    Args:
        model: maps one sample to its reconstruction.
        batch: samples as rows.
        key: unused; losses of `jaxfed.generative` take one.

    Raises:
        ValueError: if the reconstructions have another shape than the samples.
    """
    del key
    batch = jnp.asarray(batch)
    reconstructions = jax.vmap(model)(batch)
    if reconstructions.shape != batch.shape:
        # Without this check a shape such as (b, 1) would be broadcast.
        raise ValueError(
            f"model: wanted reconstructions of the batch's shape {batch.shape}, "
            f"got {reconstructions.shape}"
        )
    return jnp.mean(jnp.sum((batch - reconstructions) ** 2, axis=-1))
