"""The clients' samples that a command of `jaxfed fit` learns from, and those to test on."""

from typing import Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Float, Int

from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import replace_names
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.run.solution import Solution


class Split(NamedTuple):
    """The clients' samples, standardized as requested; NaN for missing entries."""

    names: list[str]  # of the clients
    train: list[Float[np.ndarray, "n_i d"]]  # to learn from
    # To test on; an empty list if none are held out.
    held_out: list[Float[np.ndarray, "k_i d"]]
    units: Standardization  # what was subtracted and divided by
    choices: tuple[str, str]  # `--center` and `--scale`
    features: list[str] | None = None  # names of the features
    persons: list[np.ndarray] | None = None  # whose training samples these are
    weighted: Clients | None = None  # the second moments of training samples that have weights
    imputed: Solution | None = None  # the run that imputed missing entries
    missing: float = 0.0  # share of the entries of training samples that were missing

    def clients(self, missing: Literal["refuse", "mask"] = "refuse") -> Clients:
        """Return the clients with their names, to learn from."""
        return Clients.from_samples(
            self.train, names=self.names, features=self.features, missing=missing
        )

    def only(self, kept: Int[np.ndarray, " kept"]) -> Self:
        """Return the clients at these positions; preprocessing remains that of all."""
        parts = {"names": self.names, "train": self.train, "held_out": self.held_out}
        return self._replace(**{k: [x[i] for i in kept] if x else x for k, x in parts.items()})

    def in_units(self, units: Standardization, *, own_means: bool) -> Self:
        """Return the samples in units for all clients.

        Args:
            units: the units.
            own_means: whether to subtract each client's own mean instead of the units' mean.
        """
        scales = np.broadcast_to(units.scale, (len(self.train), *units.scale.shape))
        if own_means:
            means = np.stack([table.mean(axis=0) for table in self.train])
        else:
            means = np.broadcast_to(units.mean, scales.shape)
        own = replace_names(Standardization(means, scales), self.clients().names)
        return self._replace(
            train=moved(self.train, own),
            held_out=moved(self.held_out, own),
            units=own,
            choices=("local" if own_means else "shared", "shared"),
        )


def moved(tables: list[np.ndarray], units: Standardization) -> list[np.ndarray]:
    """Standardize the samples of all clients, or of none."""
    # With NumPy, since JAX would compile a division for each number of samples.
    means, scales = np.asarray(units.mean), np.asarray(units.scale)
    return [(y - mean) / scale for y, mean, scale in zip(tables, means, scales, strict=False)]
