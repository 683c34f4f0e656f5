"""ADEPT-AE: a personal autoencoder for every client, under a prior that all of them learn.

Source: Ozkara, Huang, Zhou & Diggavi, Hierarchical Bayes approach to personalized federated
unsupervised learning (ADEPT), (6), Algorithm 2 and Section 5.1.
"""

from typing import Any, Self

import equinox as eqx
import optax
from jaxtyping import Array

from jaxfed.generative._adaptive import Adaptive, adopt
from jaxfed.generative._training import Loss
from jaxfed.generative.adaptive import AdaptiveTraining
from jaxfed.models import reconstruction_loss

MOMENTUM = optax.sgd(1.0, momentum=0.9)


class AdaptiveAutoencoder(Adaptive):
    """ADEPT-AE: `AdaptiveTraining` of models that reconstruct samples, by squared error.

    `AdaptiveAutoencoder(model, ...)` is what the paper's text says, with plain descent and the
    prior weighed by 1/n_i. `AdaptiveAutoencoder.published(model, ...)` is what the authors' code
    does: the `"published"` preset, momentum of 0.9 for the personal models, and the prior weighed
    by 1/10 whatever a client's number of samples. Step sizes, ξ and the first spread of 1 are the
    authors' for MNIST in both, as the text gives no numbers. The code's personal models start from
    weights of their own: give them as a warm start to have that, too.

    The text also names a momentum for all methods; `optimizer=optax.sgd(1.0, momentum=0.9)` has it
    for the personal models, and `jaxfed reproduce adept/table1` and `adept/table2`, which choose
    among these settings, always do. There, a `global_step_size` of 1 and an `initial_spread` of 0.1
    to 1 do well. By default the spread moves by less than 0.1 in 150 rounds.

    Source: ADEPT, (6), Algorithm 2 and Section 5.1.
    """

    def __init__(self, model: eqx.Module, loss: Loss = reconstruction_loss, **options: Any):
        """Set up the algorithm.

        Args:
            model: maps one sample to its reconstruction, such as `jaxfed.models.Autoencoder`.
            loss: of the reconstructions of a batch, see `AdaptiveTraining`.
            options: as those of `AdaptiveTraining`.

        Raises:
            ValueError: as `AdaptiveTraining`.
        """
        adopt(self, AdaptiveTraining(model, loss, **options))

    @classmethod
    def published(
        cls,
        model: eqx.Module,
        loss: Loss = reconstruction_loss,
        *,
        prior_weight: float | Array | None = 0.1,
        optimizer: optax.GradientTransformation = MOMENTUM,
        **options: Any,
    ) -> Self:
        """What the authors' code does.

        Args:
            model: maps one sample to its reconstruction.
            loss: of the reconstructions of a batch.
            prior_weight: w; the code's is 1/10 for all data.
            optimizer: of the personal models.
            options: as those of `AdaptiveTraining`, without `preset`.

        Raises:
            ValueError: as `AdaptiveTraining`.
        """
        return cls(
            model, loss, prior_weight=prior_weight, optimizer=optimizer, preset="published",
            **options,
        )  # fmt: skip
