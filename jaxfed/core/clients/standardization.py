"""`Standardization` subtracts means from clients' samples and divides by scales."""

from typing import Any, final

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_positive, checked_array, refuse
from jaxfed._numbers import checked_rows
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.learned import check_learned_from, of_client


@final
class Standardization(eqx.Module):
    """A mean and a scale for each client, or for all: samples become `(x - mean) / scale`.

    `jaxfed.preprocess.Standardize` learns them: `solution.result.local` has a row for each client;
    `solution.result.shared`, if it exists, is one for all. Works under `jit`, `vmap` and `grad`.
    """

    mean: Float[Array, "*clients features"]
    scale: Float[Array, "*clients features"]

    def __init__(
        self,
        mean: Float[ArrayLike, "*clients features"],
        scale: Float[ArrayLike, "*clients features"],
    ):
        """Create the map.

        Args:
            mean: `(clients, features)`, or `(features,)` for all clients.
            scale: an array of the same shape.

        Raises:
            ValueError: if means are not finite, scales are not positive, or shapes are others.
        """
        self.mean = checked_array("mean", mean, "... features", finite=True)
        if self.mean.ndim > 2:
            raise refuse("mean", "an array (features,) or (clients, features)", mean)
        self.scale = checked_array("scale", scale, "... features")
        if self.scale.shape != self.mean.shape:
            raise refuse("scale", f"as many numbers as means, {self.mean.shape}", scale)
        check_positive("scale", scale)

    def transform(
        self, samples: Clients | Float[ArrayLike, "... features"], *, client: int | None = None
    ) -> Any:
        """Standardize samples.

        Args:
            samples: `jaxfed.Clients` with samples in any layout, or rows `(..., features)`. Samples
                of `from_source` are still read only when needed. NaN, a missing entry, stays NaN.
            client: position of the client whose rows these are, if clients have their own means.

        Returns:
            Clients or rows of the same type.

        Raises:
            ValueError: if the clients hold no samples or differ in number or features, or `client`
                is missing.
        """
        return self._applied(samples, client, inverse=False)

    def inverse_transform(
        self, samples: Clients | Float[ArrayLike, "... features"], *, client: int | None = None
    ) -> Any:
        """Undo `transform`.

        Args:
            samples: as returned by `transform`.
            client: as in `transform`.

        Returns:
            Clients or rows.

        Raises:
            ValueError: as `transform`.
        """
        return self._applied(samples, client, inverse=True)

    def _applied(self, samples: Any, client: int | None, *, inverse: bool) -> Any:
        if isinstance(samples, Clients):
            return self._of_clients(samples, inverse)
        axes = f"... {self.mean.shape[-1]}"
        rows = checked_rows("samples", samples, axes, finite=True, missing=True)
        return of_client(self, self.mean, client)._moved(rows, inverse).astype(rows.dtype)

    def _of_clients(self, clients: Clients, inverse: bool) -> Clients:
        check_learned_from(self.mean, clients)
        # Samples that are read later are mapped on the host, in the thread that reads them: no
        # device is needed for that.
        own = self if clients.layout.in_memory else jax.tree.map(np.asarray, self)

        def moved(values: Any, places: Any) -> Any:
            of = own if own.mean.ndim == 1 else jax.tree.map(lambda x: x[places][:, None], own)
            return of._moved(values, inverse)

        return eqx.tree_at(lambda c: c.data, clients, clients.layout.mapped(moved))

    def _moved(self, values: Any, inverse: bool) -> Any:
        return values * self.scale + self.mean if inverse else (values - self.mean) / self.scale
