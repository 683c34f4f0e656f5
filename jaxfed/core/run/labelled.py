"""What was learned as arrays of xarray, whose entries are known by names."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed._optional import require
from jaxfed.core.clients.names import Names, learned_by
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.result import Fitted, check_run, ids_of, names_of, result_of
from jaxfed.core.run.solution import Solution

PLACES = ("client", "feature", "component")  # of local components


def to_xarray(fitted: Fitted) -> Personalized:
    """Return the learned models as labelled arrays: `found.local.sel(client="Oslo")`.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned.

    Returns:
        The result, with `xarray.DataArray` in place of arrays, on the host. Of components, `shared`
        has the dimensions `(feature, component)` and `local` `(client, feature, component)`; the
        k-th shared and the k-th local component belong together only where the algorithm says so.
        Of views, `shared` has `(entity, component)`. Coordinates are names, as far as they are
        known, and clients' ids without names. Features of views differ: `feature_name` names those
        of each client, with an empty text beyond its last one. In trees, such as networks, only
        the dimension `client` of local parts has a name. Views without names count as such if they
        have more entities than features, or fewer.

    Raises:
        ValueError: if `fitted` is something else, the solution of several runs, or traced.
        ImportError: if xarray is missing.
    """
    if isinstance(found := learned_by(fitted), Solution):
        check_run(found, "fitted")
    result, names, ids = result_of(fitted), names_of(fitted), ids_of(fitted)
    array = require("xarray", extra="sweep").DataArray
    known = {
        "client": ids if names.clients is None else names.clients,
        "entity": names.entities,
        "feature": None if names.of_views else names.features,
    }

    def labelled(part: str, dims: tuple[str, ...], leaf: Any) -> Any:
        if not eqx.is_array(leaf) or leaf.ndim < len(dims):
            return leaf
        whole = (*dims, *(f"dim_{k}" for k in range(len(dims), leaf.ndim)))
        coords: dict[str, Any] = {
            dim: list(own)
            for dim, size in zip(whole, leaf.shape, strict=True)
            if (own := known.get(dim)) is not None and len(own) == size
        }
        if names.of_views and whole[:2] == PLACES[:2] and len(names.features or ()) == len(leaf):
            padded = [(*own, *[""] * (leaf.shape[1] - len(own))) for own in names.features or ()]
            coords["feature_name"] = PLACES[:2], padded
        return array(np.asarray(leaf), coords, whole, name=part)

    rows = "entity" if _are_views(result, names) else "feature"
    shared = (rows, "component") if _axes(result.shared) == 2 else ()
    local = PLACES if _axes(result.local) == 3 else PLACES[:1]
    return Personalized(
        jax.tree.map(partial(labelled, "shared", shared), result.shared),
        jax.tree.map(partial(labelled, "local", local), result.local),
    )


def _axes(part: PyTree) -> int:
    """How many axes a part has that is one array; 0 of a tree."""
    return np.ndim(part) if eqx.is_array(part) else 0


def _are_views(result: Personalized, names: Names) -> bool:
    """Whether the rows of what is shared are entities."""
    both = _axes(result.shared) == 2 and _axes(result.local) == 3
    differ = both and result.shared.shape[0] != result.local.shape[1]
    return names.of_views or names.entities is not None or differ
