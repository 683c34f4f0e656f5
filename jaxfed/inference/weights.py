"""Random weights of samples or clients, which stand for drawing them again.

Source: Praestgaard & Wellner (1993), Exchangeably weighted bootstraps of the general empirical
process, with weights in place of the bootstrap's multinomial counts. The two values of a weight are
those of Mammen (1993), Bootstrap and wild bootstrap for high dimensional linear models: they are
positive and have the first three moments of a Poisson count. Rows of missing entries are drawn
again themselves: as many as there are minus one, so that means of them vary as between samples: Rao
& Wu (1988), Resampling inference with complex survey data.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from jaxfed._checks import refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import IncompleteSamples, SampleRows, other_data
from jaxfed.core.common.printing import is_known
from jaxfed.gcca.views import View
from jaxfed.linalg import Moment

# A weight is 1 + LOW or 1 + HIGH, where deviations have mean 0, variance 1 and third moment 1.
LOW, HIGH = (1 - 5**0.5) / 2, (1 + 5**0.5) / 2
# Fewer samples or clients have no spread to learn from.
FEWEST = 3


class Drawn(eqx.Module):
    """ONE client's second moment in each resample of a block."""

    moments: Moment  # with a leading axis of resamples

    @property
    def count(self) -> Float[Array, "*clients resamples"]:
        """Numbers of samples."""
        return self.moments.count


def row_weights(
    key: Key[Array, ""], number: Int[ArrayLike, ""], count: Float[Array, ""], rows: int
) -> Float[Array, " rows"]:
    """Return weights of one client's samples in one resample; their mean is 1.

    They do not depend on padding, whose weights are 1.

    Args:
        key: the client's random key.
        number: number of the resample.
        count: number of real rows.
        rows: number of rows.
    """
    real = jnp.arange(rows) < count
    drawn = _drawn(jax.random.fold_in(key, number), count, rows)
    # No weight is 0, where a root has no derivative.
    return jnp.where(real, drawn * count / jnp.sum(jnp.where(real, drawn, 0)), 1)


def client_weight(
    key: Key[Array, ""], number: Int[ArrayLike, ""], clients: int, dtype: Any
) -> Float[Array, ""]:
    """Return one client's weight in one resample of the clients; its expectation is 1."""
    return _drawn(jax.random.fold_in(key, number), jnp.asarray(clients, dtype), 1)[0]


def _drawn(key: Key[Array, ""], count: Float[Array, ""], size: int) -> Float[Array, " size"]:
    # LOW has the probability (√5 + 1) / (2 √5), which makes the mean of deviations zero.
    low = jax.random.uniform(key, (size,), count.dtype) < HIGH / 5**0.5
    # The mean of `count` samples then varies as it does between samples: the variance within them
    # is too small by a factor (count - 1) / count.
    return 1 + jnp.sqrt(count / (count - 1)) * jnp.where(low, LOW, HIGH)


def redrawn(key: Key[Array, ""], number: Int[ArrayLike, ""], data: SampleRows) -> SampleRows:
    """Return rows of ONE client in one resample, drawn with replacement; one fewer than it has.

    They do not depend on padding.

    Args:
        key: the client's random key.
        number: number of the resample.
        data: the client's samples.
    """
    shares = jax.random.uniform(
        jax.random.fold_in(key, number), data.values.shape[-2:-1], data.count.dtype
    )
    # Rounding may lead to the number of rows itself.
    places = jnp.minimum(shares * data.count, data.count - 1).astype(jnp.int32)
    rows = data.values[places]
    return type(data)(rows, data.count - 1).with_values(rows)


def reweighted(data: PyTree, weights: Float[Array, " rows"] | Float[Array, ""]) -> PyTree:
    """Return ONE client's data with every row times the root of its weight.

    Second moments and cross products of the rows then have these weights, and a moment that of its
    client.
    """
    if isinstance(data, Moment):
        return Moment(data.matrix() * weights, None, data.count, data.trace * weights)
    values = data.values * jnp.sqrt(weights)[..., None]
    return eqx.tree_at(lambda x: x.values, data, values.astype(data.values.dtype))


def rows_of(data: PyTree) -> Float[Array, "*clients"] | Float[np.ndarray, "*clients"]:
    """Return the number of real rows of ONE client's data, or of each client's."""
    if isinstance(data, View):
        return jnp.full(data.count.shape, data.values.shape[-2], data.values.dtype)
    return data.count


def check_observed(
    clients: Clients, caller: str, of: str = "samples", with_impute: bool = False
) -> None:
    """Refuse imputed samples, for a function of this name, and missing entries unless it imputes.

    Raises:
        ValueError: says why.
    """
    todo = (
        "; jaxfed.inference.confidence takes samples with their gaps, and imputes and fits each "
        "draw, with the solution of jaxfed.preprocess.Impute as impute"
    )
    if clients.imputed and (of == "samples" or with_impute):
        raise ValueError(
            f"clients: wanted observed samples for {caller}, got imputed ones, which vary less, so "
            f"that it would be far too sure{todo}"
        )
    if not with_impute and any(isinstance(part, IncompleteSamples) for part in clients.parts):
        raise ValueError(f"clients: wanted complete samples for {caller}, got some with gaps{todo}")


def check_resampled(data: PyTree) -> None:
    """Refuse data whose rows cannot be weighted.

    Raises:
        ValueError: names the data.
    """
    if not isinstance(data, SampleRows | View):
        raise other_data("samples or dense views, whose rows can be weighted", data)


def check_enough(data: PyTree) -> None:
    """Refuse all clients' data if a client has too few rows to draw again, unless unknown.

    Raises:
        ValueError: says how few.
    """
    rows = rows_of(data)
    fewest = int(np.asarray(rows).min()) if is_known(rows) else FEWEST
    if fewest < FEWEST:
        raise refuse("clients", f"at least {FEWEST} samples of each client to draw again", fewest)
