"""`Standardization` subtracts means from clients' samples and divides by scales."""

from typing import Any, final

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_positive, checked_array, refuse
from jaxfed._numbers import checked_rows
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.learned import in_learned_columns, matched, of_client
from jaxfed.core.clients.names import NAMELESS, DataFrame, Names


@final
class Standardization(eqx.Module):
    """A mean and a scale for each client, or for all: samples become `(x - mean) / scale`.

    `jaxfed.preprocess.Standardize` learns them: `solution.result.local` has a row for each client;
    `solution.result.shared`, if it exists, is one for all. Works under `jit`, `vmap` and `grad`.

    What was learned from clients with names has them as `names`: clients with names may come in any
    order, and so may their named features. Without names on either side, as of a map made from
    arrays, clients and features count by position.
    """

    mean: Float[Array, "*clients features"]
    scale: Float[Array, "*clients features"]
    # Set on every instance: else two of them would differ as types of pytrees.
    names: Names = eqx.field(static=True, default_factory=Names, init=False)

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
        self.names = NAMELESS
        self.scale = checked_array("scale", scale, "... features")
        if self.scale.shape != self.mean.shape:
            raise refuse("scale", f"as many numbers as means, {self.mean.shape}", scale)
        check_positive("scale", scale)

    def transform(
        self,
        samples: Clients | Float[ArrayLike, "... features"] | DataFrame | LabelledArray,
        *,
        client: int | str | None = None,
    ) -> Any:
        """Standardize samples.

        Args:
            samples: `jaxfed.Clients` with samples in any layout, or rows `(..., features)`. Samples
                of `from_source` are still read only when needed. NaN, a missing entry, stays NaN.
                Rows may be a data frame, whose columns are put in the order of the features.
            client: name or position of the client whose rows these are, if clients have their own
                means.

        Returns:
            Clients or rows of the same type, with features in the order in which they were learned.

        Raises:
            ValueError: if the clients hold no samples or differ in number, names or features, or
                `client` is missing or unknown.
        """
        return self._applied(samples, client, inverse=False)

    def inverse_transform(
        self,
        samples: Clients | Float[ArrayLike, "... features"] | DataFrame | LabelledArray,
        *,
        client: int | str | None = None,
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

    def _applied(self, samples: Any, client: int | str | None, *, inverse: bool) -> Any:
        if isinstance(samples, Clients):
            known, clients = matched(self, samples)
            return known._of_clients(clients, inverse)
        samples = in_learned_columns(self, samples)
        axes = f"... {self.mean.shape[-1]}"
        rows = checked_rows("samples", samples, axes, finite=True, missing=True)
        return of_client(self, client)._moved(rows, inverse).astype(rows.dtype)

    def _of_clients(self, clients: Clients, inverse: bool) -> Clients:
        # Samples that are read later are mapped on the host, in the thread that reads them: no
        # device is needed for that.
        own = self if clients.layout.in_memory else jax.tree.map(np.asarray, self)

        def moved(values: Any, places: Any) -> Any:
            of = own if own.mean.ndim == 1 else jax.tree.map(lambda x: x[places][:, None], own)
            return of._moved(values, inverse)

        return eqx.tree_at(lambda c: c.data, clients, clients.layout.mapped(moved))

    def _moved(self, values: Any, inverse: bool) -> Any:
        return values * self.scale + self.mean if inverse else (values - self.mean) / self.scale
