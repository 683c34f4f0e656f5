"""How much of the clients' samples shared and local components explain.

`samples` may be any of

* an array `(m, n, d)`; with `counts`, only the first `counts[i]` rows of client i are used;
* a list of arrays `(n_i, d)`;
* a `jaxfed.linalg.Moment` with a leading client axis, from samples or from matrices.

Errors are sums of squared residuals. For moments that were given as matrices they are differences,
which lose digits near zero. Components are those of `jaxfed.pca.transform`: where shared and local
ones overlap, as in `HierarchicalPCA`, only the local ones. Inside `jax.jit`, where overlaps are
unknown, pass `jaxfed.Personalized(None, local)` for such algorithms.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Real

from jaxfed._checks import checked_array, is_list, refuse
from jaxfed._numbers import checked_rows
from jaxfed.core.clients.units import lose_single_precision, widened
from jaxfed.core.run.result import Fitted, place_of
from jaxfed.linalg import Moment
from jaxfed.linalg.sums import scaled_norm, scaled_sum_of_squares, sum_of_squares, unit_of
from jaxfed.metrics.components import side_by_side

Data: TypeAlias = Real[ArrayLike, "m n d"] | Sequence[Real[ArrayLike, "_n d"]] | Moment


class EnergyShares(NamedTuple):
    """Shares of the energy `||Y_i||_F^2 / n_i`: in the shared part, the local part, and neither."""

    shared: Array
    local: Array
    residual: Array


class _Decomposed(NamedTuple):
    """Clients' second moments, and the components that should explain them."""

    data: Moment
    shared: Float[Array, "d r1"] | None
    local: Float[Array, "m d r2"] | None

    @property
    def basis(self) -> Float[Array, "m d r"]:
        """All components of every client, shared ones first."""
        parts = _repeated(self.shared, len(self.data.count)), self.local
        return jnp.concatenate([part for part in parts if part is not None], axis=-1)


def _repeated(shared: Float[Array, "d r1"] | None, clients: int) -> Float[Array, "m d r1"] | None:
    """The shared components, once for every client."""
    return None if shared is None else jnp.broadcast_to(shared, (clients, *shared.shape))


def reconstruction_error(
    fitted: Fitted,
    samples: Data | Real[ArrayLike, "n d"],
    *,
    client: int | None = None,
    counts: Real[ArrayLike, " m"] | None = None,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Reconstruction error, `mean_i ||Y_i - Y_i (P_U + P_Vi)||_F^2 / n_i`.

    Every client has the same weight, whatever its number of samples.

    Source: Shi & Kontar (2024), (29).

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned; arrays as
            `jaxfed.Personalized(shared, local)`.
        samples: `(m, n, d)`, a list of `(n_i, d)`, a batched `Moment`, or `(n, d)` with `client`.
        client: id of the client that all samples belong to.
        counts: number of valid rows of each client, `(m,)`, if `samples` is an array.
        per_client: return each client's error instead of the mean.

    Returns:
        The mean error, a scalar; or the clients' errors, `(m,)`.

    Raises:
        ValueError: if `fitted` has no components, shapes do not match, or counts are negative or
            exceed the rows.
    """
    return _of(partial(_error, per_client=per_client), _checked(fitted, samples, counts, client))


# Compile each metric as one program; otherwise, every operation would be compiled separately.
@partial(jax.jit, static_argnames="per_client")
def _error(given: _Decomposed, per_client: bool):
    return _mean(_outside(given.data, given.basis), per_client)


def captured_energy(
    fitted: Fitted,
    samples: Data | Real[ArrayLike, "n d"],
    *,
    client: int | None = None,
    counts: Real[ArrayLike, " m"] | None = None,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Share of the energy that shared and local components capture together.

    `mean_i ||Y_i [U, V_i]||_F^2 / n_i` over `mean_i ||Y_i||_F^2 / n_i`: twice the objective (7) of
    Shi & Kontar (2024) relative to the clients' mean energy.

    Args:
        fitted: as in `reconstruction_error`, like `samples`, `client` and `counts`.
        samples: the clients' samples.
        client: the client that all samples belong to.
        counts: number of valid rows of each client.
        per_client: return each client's share instead.

    Returns:
        The share, between 0 and 1; 0 if all samples are zero.

    Raises:
        ValueError: as in `reconstruction_error`.
    """
    shares = separation(fitted, samples, client=client, counts=counts, per_client=per_client)
    return shares.shared + shares.local


def separation(
    fitted: Fitted,
    samples: Data | Real[ArrayLike, "n d"],
    *,
    client: int | None = None,
    counts: Real[ArrayLike, " m"] | None = None,
    per_client: bool = False,
) -> EnergyShares:
    """How the energy splits into the shared part, the local part, and the rest.

    Shares of `mean_i ||Y_i||_F^2 / n_i`. They add up to one if U is orthogonal to every V_i.

    Args:
        fitted: as in `reconstruction_error`, like `samples`, `client` and `counts`.
        samples: the clients' samples.
        client: the client that all samples belong to.
        counts: number of valid rows of each client.
        per_client: return each client's shares instead, three arrays `(m,)`.

    Returns:
        The three shares; zeros if all samples are zero.

    Raises:
        ValueError: as in `reconstruction_error`.
    """
    return _of(partial(_shares, per_client=per_client), _checked(fitted, samples, counts, client))


@partial(jax.jit, static_argnames="per_client")
def _shares(given: _Decomposed, per_client: bool) -> EnergyShares:
    data = _of_unit_size(given.data)
    parts = (
        _inside(data, _repeated(given.shared, len(data.count))),
        _inside(data, given.local),
        _outside(data, given.basis),
    )
    total = _mean(data.trace, per_client)
    scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    return EnergyShares(*(_mean(part, per_client) * scale for part in parts))


def reconstructed_energy(
    samples: Real[ArrayLike, "m n d"],
    reconstructions: Real[ArrayLike, "m n d"],
    counts: Real[ArrayLike, " m"] | None = None,
    *,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Mean share of a sample's energy that its reconstruction by any model captures.

    `mean_i mean_j (1 - ||y_ij - f_i(y_ij)||^2 / ||y_ij||^2)`, which is negative if reconstructions
    are worse than zeros. Samples that are zero do not count.

    Source: the captured energy of Ozkara, Huang, Zhou & Diggavi, ADEPT.

    Args:
        samples: `(m, n, d)`.
        reconstructions: of the samples, `(m, n, d)`.
        counts: number of valid rows of each client, `(m,)`.
        per_client: return each client's mean instead, `(m,)`.

    Returns:
        The mean share, a scalar; or the clients' shares, `(m,)`.

    Raises:
        ValueError: if shapes do not match, or counts are negative or exceed the rows.
    """
    samples = checked_rows("samples", samples, "m n d")
    shape = " ".join(map(str, samples.shape))
    reconstructions = checked_rows("reconstructions", reconstructions, shape)
    valid = moments(samples, counts).samples  # with zeros beyond a client's count
    assert valid is not None
    return _captured_shares(valid, samples, reconstructions, per_client)


@partial(jax.jit, static_argnums=3)
def _captured_shares(valid, samples, reconstructions, per_client):
    unit = unit_of(valid)
    energy = scaled_sum_of_squares(valid, unit, -1)
    error = scaled_sum_of_squares(samples - reconstructions, unit, -1)
    shares = jnp.where(energy > 0, 1 - error / jnp.where(energy > 0, energy, 1), 0)
    return _mean(shares.sum(axis=1) / jnp.maximum((energy > 0).sum(axis=1), 1), per_client)


def kkt_violation(
    fitted: Fitted, samples: Data, *, counts: Real[ArrayLike, " m"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Violation of the first-order conditions of personalized PCA.

    The parallel gradients are `G_i = (I - P_U - P_Vi) S_i [U, V_i]`, whose first r1 columns belong
    to U. The conditions are that `mean_i G_i,U` and every `G_i,V` are zero.

    Source: Shi & Kontar (2024), (24), where the slice in the second line should end at r1.

    Args:
        fitted: as in `reconstruction_error`; components are orthonormal, a client's local ones
            orthogonal to the shared ones.
        samples: the clients' samples.
        counts: number of valid rows of each client.

    Returns:
        `||mean_i G_i,U||_F` and `sqrt(mean_i ||G_i,V||_F^2)`.

    Raises:
        ValueError: as in `reconstruction_error`.
    """
    return _of(_violation, _checked(fitted, samples, counts, None))


@jax.jit
def _violation(given: _Decomposed):
    basis = given.basis
    product = jax.vmap(Moment.mv)(given.data, basis)
    gradient = product - basis @ (basis.mT @ product)
    # Zero columns, of clients with fewer components, have zero gradients: S_i 0 = 0.
    r1 = 0 if given.shared is None else given.shared.shape[1]
    mean = jnp.mean(gradient[..., :r1], axis=0)
    return scaled_norm(mean), scaled_norm(gradient[..., r1:]) / len(gradient) ** 0.5


def _outside(data, basis: Float[Array, "m d r"]) -> Float[Array, " m"]:
    """`||Y_i - Y_i W_i W_i^T||_F^2 / n_i` for every client."""
    if data.samples is not None:
        return _per_sample(data.samples - (data.samples @ basis) @ basis.mT, data)
    half = data.dense - basis @ (basis.mT @ data.dense)
    rest = half - (half @ basis) @ basis.mT
    return jnp.maximum(jnp.trace(rest, axis1=-2, axis2=-1), 0)


def _of_unit_size(data: Moment) -> Moment:
    """Return moments of samples in a unit in which their squares are normal numbers."""
    if data.samples is None:
        return data
    samples = data.samples / unit_of(data.samples)
    return jax.vmap(Moment.from_samples)(samples, data.count)


def _inside(data, basis: Float[Array, "m d r"] | None) -> Float[Array, " m"]:
    """`||Y_i W_i||_F^2 / n_i` for every client."""
    if basis is None:
        return jnp.zeros_like(data.trace)
    if data.samples is not None:
        return _per_sample(data.samples @ basis, data)
    return jnp.sum(basis * (data.dense @ basis), axis=(-2, -1))


def _per_sample(rows: Float[Array, "m n r"], data: Moment) -> Float[Array, " m"]:
    return sum_of_squares(rows, (-2, -1)) / jnp.maximum(data.count, 1)


def _mean(values: Float[Array, " m"], per_client: bool) -> Float[Array, "..."]:
    return values if per_client else jnp.mean(values)


def _checked(
    fitted: Fitted, samples: Any, counts: ArrayLike | None, client: int | None
) -> _Decomposed:
    shared, local = side_by_side(fitted)
    if client is not None:
        # Without local components, clients do not differ.
        place = None if local is None else place_of(fitted, client, len(local))
        local = None if local is None else local[place][None]
        samples = checked_rows("samples", samples, "n d")[None]
    data = moments(samples, counts)
    m, d = data.count.shape[0], data.dim
    if local is not None and (m, d) != local.shape[:2]:
        raise ValueError(
            f"samples of {m} clients with {d} features do not fit local components {local.shape}"
        )
    if shared is not None and d != len(shared):
        raise ValueError(f"samples with {d} features do not fit shared components {shared.shape}")
    return _Decomposed(data, shared, local)


def _of(function: Callable[[_Decomposed], Any], given: _Decomposed) -> Any:
    return in_enough_precision(lambda *parts: function(_Decomposed(*parts)), *given)


def in_enough_precision(
    function: Callable[..., Any], data: Moment, *frames: Float[Array, "..."] | None
) -> Any:
    """Compute of clients' second moments and orthonormal frames, and return in their precision.

    Samples with features in unlike units are taken in double precision: rounding errors of frames,
    times the largest feature, would exceed what the frames leave.
    """
    rows, rank = data.samples, sum(x.shape[-1] for x in frames if x is not None)
    known = not any(isinstance(x, Tracer) for x in jax.tree.leaves((data, frames)))
    if rows is None or not known or not lose_single_precision(rows, rank):
        return function(data, *frames)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        exact = _moments(rows.astype(np.float64), data.count)
        found = function(exact, *widened(frames))
        return jax.tree.map(lambda x: x.astype(np.float32), found)


def moments(samples: Data, counts: ArrayLike | None) -> Moment:
    """The second moments of all clients, in factored form if given as samples."""
    if isinstance(samples, Moment):
        if counts is not None:
            raise ValueError("counts: wanted None with a Moment, which has its own")
        if samples.count.ndim != 1:
            raise ValueError("samples: wanted a Moment with a leading client axis")
        return samples
    if is_list(samples):
        if counts is not None:
            raise ValueError("counts: wanted None with a list, whose arrays have their own lengths")
        samples, counts = _padded(samples)
    samples = checked_rows("samples", samples, "m n d")
    m, n, _ = samples.shape
    rows = np.full(m, n) if counts is None else checked_array("counts", counts, f"{m}")
    if not isinstance(rows, Tracer):
        known = np.asarray(rows)
        if not ((known >= 0) & (known <= n)).all():
            raise ValueError(f"counts: wanted 0 to the {n} rows of samples, got {counts}")
    return _moments(samples, rows)


@jax.jit
def _moments(samples: Float[Array, "m n d"], counts: Array | np.ndarray) -> Moment:
    # `where` instead of a product, because rows beyond a client's count may hold NaN.
    valid = jnp.arange(samples.shape[1]) < counts[:, None]
    samples = jnp.where(valid[..., None], samples, 0)
    precise = samples.astype(jnp.promote_types(samples.dtype, jnp.float32))
    return jax.vmap(Moment.from_samples)(precise, counts)


def _padded(tables: Sequence[Any]) -> tuple[Array | np.ndarray, np.ndarray]:
    """A list of `(n_i, d)` as one array with rows of zeros at the end, and the lengths."""
    if not len(tables):
        raise refuse("samples", "a list of arrays (n_i, d), at least one", tables)
    arrays = [checked_rows(f"samples[{i}]", y, "n_i d") for i, y in enumerate(tables)]
    if len({y.shape[1] for y in arrays}) > 1:
        raise ValueError(
            f"samples: wanted arrays of the same features, got {[y.shape for y in arrays]}"
        )
    rows = max(len(y) for y in arrays)
    counts = np.array([len(y) for y in arrays])
    if any(isinstance(y, Tracer) for y in arrays):
        return jnp.stack([jnp.pad(y, ((0, rows - len(y)), (0, 0))) for y in arrays]), counts
    # On the host, because JAX would compile a program for every combination of lengths.
    padded = np.zeros((len(arrays), rows, arrays[0].shape[1]), jnp.result_type(*arrays))
    for row, y in zip(padded, arrays, strict=True):
        row[: len(y)] = y
    return padded, counts
