"""How much of the clients' samples shared and local components hold.

Wherever `samples` is asked for, one of these will do:

* an array `(m, n, d)`; with `counts` only the first `counts[i]` rows of client i are looked at;
* a list of arrays `(n_i, d)`;
* a `jaxfed.linalg.Moment` with a leading client axis, from samples or from matrices.

Errors are sums of squared residuals. Energies of moments that came as matrices have to be
differences and lose digits near zero; samples do not.

Where a method learns no shared or no local components, `shared` or `local` is None.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxfed._checks import check_flag, check_list, checked_array, is_list
from jaxfed.linalg import Moment
from jaxfed.metrics.subspaces import components

Data: TypeAlias = Float[Array, "m n d"] | Sequence[Float[Array, "n_i d"]] | Moment


class EnergyShares(NamedTuple):
    """Shares of the energy `||Y_i||_F^2 / n_i`: in the shared, in the local part, in neither."""

    shared: Array
    local: Array
    residual: Array


def reconstruction_error(
    samples: Data,
    shared: Float[Array, "d r1"] | None,
    local: Float[Array, "m d r2"] | None,
    counts: Float[Array, " m"] | None = None,
    *,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Reconstruction error, `mean_i ||Y_i - Y_i (P_U + P_Vi)||_F^2 / n_i`.

    Every client weighs the same, whatever its number of samples.

    Source: Shi & Kontar (2024), (29).

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: shared components, `(d, r1)`.
        local: local components, `(m, d, r2)`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.
        per_client: return the terms of the mean instead.

    Returns:
        The mean error, a scalar; or the clients' errors, `(m,)`.

    Raises:
        ValueError: if the shapes do not fit together, or counts are negative or exceed the rows.
    """
    check_flag("per_client", per_client)
    return _error(*_checked(samples, counts, shared, local), per_client)


# Each measure is one program: of operations one by one each is compiled by itself.
@partial(jax.jit, static_argnums=3)
def _error(data, shared, local, per_client):
    return _reduced(_left(data, _joined(data, shared, local)), per_client)


def captured_energy(
    samples: Data,
    shared: Float[Array, "d r1"] | None,
    local: Float[Array, "m d r2"] | None,
    counts: Float[Array, " m"] | None = None,
    *,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Share of the energy that shared and local components capture together.

    `mean_i ||Y_i [U, V_i]||_F^2 / n_i` over `mean_i ||Y_i||_F^2 / n_i`: twice the objective (7) of
    Shi & Kontar (2024) over the clients' mean energy.

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: shared components, `(d, r1)`.
        local: local components, `(m, d, r2)`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.
        per_client: return every client's own share instead.

    Returns:
        The share, between 0 and 1; 0 for data without energy.

    Raises:
        ValueError: as `reconstruction_error`.
    """
    shares = separation(samples, shared, local, counts, per_client=per_client)
    return shares.shared + shares.local


def separation(
    samples: Data,
    shared: Float[Array, "d r1"] | None,
    local: Float[Array, "m d r2"] | None,
    counts: Float[Array, " m"] | None = None,
    *,
    per_client: bool = False,
) -> EnergyShares:
    """How the energy splits: into the shared part, the local part, and what is left.

    Shares of `mean_i ||Y_i||_F^2 / n_i`. They add up to one where U is orthogonal to the V_i.

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: shared components, `(d, r1)`.
        local: local components, `(m, d, r2)`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.
        per_client: return every client's own shares instead, three arrays `(m,)`.

    Returns:
        The three shares; zeros for data without energy.

    Raises:
        ValueError: as `reconstruction_error`.
    """
    check_flag("per_client", per_client)
    return _shares(*_checked(samples, counts, shared, local), per_client)


@partial(jax.jit, static_argnums=3)
def _shares(data, shared, local, per_client):
    parts = (
        _held(data, None if shared is None else _joined(data, shared, None)),
        _held(data, local),
        _left(data, _joined(data, shared, local)),
    )
    total = _reduced(data.trace, per_client)
    scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    return EnergyShares(*(_reduced(part, per_client) * scale for part in parts))


def reconstructed_energy(
    samples: Float[Array, "m n d"],
    reconstructions: Float[Array, "m n d"],
    counts: Float[Array, " m"] | None = None,
    *,
    per_client: bool = False,
) -> Float[Array, ""] | Float[Array, " m"]:
    """Share of a sample's energy that its reconstruction by any model captures, on average.

    `mean_i mean_j (1 - ||y_ij - f_i(y_ij)||^2 / ||y_ij||^2)`; negative where a reconstruction is
    worse than none. Samples without energy are left out.

    Source: the captured energy of Ozkara, Huang, Zhou & Diggavi, ADEPT.

    Args:
        samples: `(m, n, d)`.
        reconstructions: of the samples, `(m, n, d)`.
        counts: number of real rows of each client, `(m,)`.
        per_client: return the clients' own means instead, `(m,)`.

    Returns:
        The mean share, a scalar; or the clients' shares, `(m,)`.

    Raises:
        ValueError: if the shapes do not fit together, or counts are negative or exceed the rows.
    """
    samples = checked_array("samples", samples, "m n d")
    shape = " ".join(map(str, samples.shape))
    reconstructions = checked_array("reconstructions", reconstructions, shape)
    check_flag("per_client", per_client)
    real = moments(samples, counts).samples  # rows beyond a client's count are zero
    assert real is not None
    return _captured_shares(real, samples, reconstructions, per_client)


@partial(jax.jit, static_argnums=3)
def _captured_shares(real, samples, reconstructions, per_client):
    energy = jnp.sum(real**2, axis=-1)
    missed = jnp.sum((samples - reconstructions) ** 2, axis=-1)
    shares = jnp.where(energy > 0, 1 - missed / jnp.where(energy > 0, energy, 1), 0)
    return _reduced(shares.sum(axis=1) / jnp.maximum((energy > 0).sum(axis=1), 1), per_client)


def kkt_violation(
    samples: Data,
    shared: Float[Array, "d r1"] | None,
    local: Float[Array, "m d r2"] | None,
    counts: Float[Array, " m"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How far the first-order conditions of personalized PCA are from being met.

    With the parallel gradients `G_i = (I - P_U - P_Vi) S_i [U, V_i]`, whose first r1 columns
    belong to U, the conditions are that `mean_i G_i,U` and every `G_i,V` vanish.

    Source: Shi & Kontar (2024), (24), where the slice of the second line should end at r1.

    Args:
        samples: `(m, n, d)`, a list of `(n_i, d)`, or a batched `Moment`.
        shared: shared components, `(d, r1)`, orthonormal.
        local: local components, `(m, d, r2)`, orthonormal and orthogonal to `shared`.
        counts: number of real rows of each client, `(m,)`, where `samples` is an array.

    Returns:
        `||mean_i G_i,U||_F` and `sqrt(mean_i ||G_i,V||_F^2)`.

    Raises:
        ValueError: as `reconstruction_error`.
    """
    return _violation(*_checked(samples, counts, shared, local))


@jax.jit
def _violation(data, shared, local):
    basis = _joined(data, shared, local)
    product = jax.vmap(Moment.mv)(data, basis)
    gradient = product - basis @ (basis.mT @ product)
    # A column of zeros has no gradient: S_i 0 = 0.
    r1 = 0 if shared is None else shared.shape[1]
    mean = jnp.mean(gradient[..., :r1], axis=0)
    return jnp.linalg.norm(mean), jnp.sqrt(jnp.mean(jnp.sum(gradient[..., r1:] ** 2, axis=(1, 2))))


def _joined(data: Moment, shared: Array | None, local: Array | None) -> Array:
    """All components of every client, side by side."""
    parts = [] if local is None else [local]
    if shared is not None:
        parts.insert(0, jnp.broadcast_to(shared, (len(data.count), *shared.shape)))
    return jnp.concatenate(parts, axis=-1)


def _left(data, basis):
    """`||Y_i - Y_i W_i W_i^T||_F^2 / n_i` for every client."""
    if data.samples is not None:
        residual = data.samples - (data.samples @ basis) @ basis.mT
        return _per_sample(residual, data)
    half = data.dense - basis @ (basis.mT @ data.dense)
    rest = half - (half @ basis) @ basis.mT
    return jnp.maximum(jnp.trace(rest, axis1=-2, axis2=-1), 0)


def _held(data, basis):
    """`||Y_i W_i||_F^2 / n_i` for every client."""
    if basis is None:
        return jnp.zeros_like(data.trace)
    if data.samples is not None:
        return _per_sample(data.samples @ basis, data)
    return jnp.sum(basis * (data.dense @ basis), axis=(-2, -1))


def _per_sample(rows, data):
    return jnp.sum(rows**2, axis=(-2, -1)) / jnp.maximum(data.count, 1)


def _reduced(values, per_client):
    return values if per_client else jnp.mean(values)


def _checked(
    samples: Data, counts: Array | None, shared: Array | None, local: Array | None
) -> tuple[Moment, Array | None, Array | None]:
    shared, local = components(shared, local)
    data = moments(samples, counts)
    m, d = data.count.shape[0], data.dim
    if local is not None and (m, d) != local.shape[:2]:
        raise ValueError(
            f"samples of {m} clients with {d} features do not fit local components {local.shape}"
        )
    if shared is not None and d != len(shared):
        raise ValueError(f"samples with {d} features do not fit shared components {shared.shape}")
    return data, shared, local


def moments(samples, counts) -> Moment:
    """The second moments of all clients, without forming them."""
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
    samples = checked_array("samples", samples, "m n d")
    m, n, _ = samples.shape
    counts = np.full(m, n) if counts is None else checked_array("counts", counts, f"{m}")
    if not isinstance(counts, Tracer):
        seen = np.asarray(counts)
        if not bool(((seen >= 0) & (seen <= n)).all()):
            raise ValueError(f"counts: wanted 0 to the {n} rows of samples, got {counts}")
    return _moments(samples, counts)


@jax.jit
def _moments(samples: Float[Array, "m n d"], counts: Array) -> Moment:
    # `where`, not a product: rows beyond a client's count may hold anything.
    real = jnp.arange(samples.shape[1]) < counts[:, None]
    samples = jnp.where(real[..., None], samples, 0)
    precise = samples.astype(jnp.promote_types(samples.dtype, jnp.float32))
    return jax.vmap(Moment.from_samples)(precise, counts)


def _padded(arrays):
    """A list of `(n_i, d)` as one array with rows of zeros at the end, and the lengths."""
    check_list("samples", arrays, "arrays (n_i, d)")
    arrays = [checked_array(f"samples[{i}]", y, "n_i d") for i, y in enumerate(arrays)]
    if len({y.shape[1] for y in arrays}) > 1:
        raise ValueError(
            f"samples: wanted arrays of the same features, got {[y.shape for y in arrays]}"
        )
    rows = max(len(y) for y in arrays)
    counts = np.array([len(y) for y in arrays])
    if any(isinstance(y, Tracer) for y in arrays):
        return jnp.stack([jnp.pad(y, ((0, rows - len(y)), (0, 0))) for y in arrays]), counts
    # On the host: a program would be compiled anew for other lengths.
    padded = np.zeros((len(arrays), rows, arrays[0].shape[1]), jnp.result_type(*arrays))
    for row, y in zip(padded, arrays, strict=True):
        row[: len(y)] = y
    return padded, counts
