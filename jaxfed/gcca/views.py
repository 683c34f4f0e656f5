"""Views: clients that hold the same entities and each its own features of them."""

from collections.abc import Sequence
from typing import Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxfed.core.clients import Clients, checked_array


class View(eqx.Module):
    """One client's view: entities as rows, padded with zero columns up to the widest view.

    With a leading client axis on both fields it holds all views.
    """

    values: Float[Array, "*clients entities features"]
    count: Float[Array, "*clients"]  # of features

    @property
    def mask(self) -> Float[Array, "*clients features"]:
        """1 for a real feature, 0 for padding."""
        columns = jnp.arange(self.values.shape[-1], dtype=self.count.dtype)
        return (columns < self.count[..., None]).astype(self.values.dtype)


class Views(Clients):
    """Clients that hold different features of the same entities, in the same order.

    Each view counts the same. `features` is the number of features of the widest.
    """

    @classmethod
    def from_arrays(cls, arrays: Sequence[ArrayLike], *, center: bool = False) -> Self:
        """Clients from their views.

        Args:
            arrays: one `(entities, features_j)` array per client.
            center: subtract each feature's mean over the entities, which needs no exchange.

        Returns:
            The clients, in single precision unless the arrays are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: for an empty list, views that are not two-dimensional, without entities or
                features or with different numbers of entities, and data that are not real
                floating point numbers of one type or not finite. The message names the view.
        """
        if not isinstance(arrays, Sequence):
            raise ValueError(
                "arrays: wanted a list of (entities, features) arrays, one per view, "
                f"got {type(arrays).__name__}"
            )
        if len(arrays) == 0:
            raise ValueError("arrays: at least one view is needed, got an empty list")
        views = [checked_array(array, f"arrays[{j}]") for j, array in enumerate(arrays)]
        for j, view in enumerate(views):
            if view.ndim != 2:
                raise ValueError(
                    f"arrays[{j}]: wanted shape (entities, features), got {view.shape}"
                )
            if view.shape[0] == 0:
                raise ValueError(f"arrays[{j}]: at least one entity is needed, got none")
            if view.shape[1] == 0:
                raise ValueError(f"arrays[{j}]: a view needs at least one feature, got none")
            if view.shape[0] != views[0].shape[0]:
                raise ValueError(
                    f"arrays[{j}]: has {view.shape[0]} entities where arrays[0] has "
                    f"{views[0].shape[0]}; all views need the same entities"
                )
            if view.dtype != views[0].dtype:
                raise ValueError(
                    f"arrays[{j}]: is {view.dtype} where arrays[0] is {views[0].dtype}"
                )
        if center:
            views = [view - view.mean(0) for view in views]
        sizes = [view.shape[1] for view in views]
        padded = [jnp.pad(view, ((0, 0), (0, max(sizes) - view.shape[1]))) for view in views]
        dtype = views[0].dtype
        return cls(
            View(jnp.stack(padded), jnp.asarray(sizes, dtype)),
            jnp.arange(len(views), dtype=jnp.int32),
            jnp.full(len(views), 1 / len(views), dtype),
        )


def check_views(clients: Clients, rank: int) -> None:
    """Refuse clients without views, and more components than there are entities.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(clients.data, View):
        raise ValueError(
            f"clients: GCCA needs Views.from_arrays, got data of type {type(clients.data).__name__}"
        )
    entities = clients.data.values.shape[-2]
    if rank > entities:
        raise ValueError(f"rank: {rank} orthonormal components do not fit {entities} entities")


def check_count(name: str, value: object) -> None:
    """Refuse what is not a positive whole number.

    Raises:
        ValueError: as said above.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: wanted a positive whole number, got {value!r}")
