"""Building blocks of PCA algorithms: second moments, components, messages and checks.

Authors of algorithms import from here; users do not need it.
"""

import warnings
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxfed._names import caller
from jaxfed.contract import ClientsLike, Personalized, check_instance
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import SampleRows, Samples, other_data
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import finite
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.core.contract.remarks import ENERGIES
from jaxfed.linalg import Moment, orthonormalize, polar, thin_product
from jaxfed.linalg.basis import orthonormal_rows, orthonormalize_once
from jaxfed.linalg.derivatives import zero_with_derivative
from jaxfed.linalg.division import ratio
from jaxfed.linalg.moments import should_densify
from jaxfed.linalg.triangle import from_triangle, to_triangle

RandomKey = Key[Array, ""]
Frame = Float[Array, "features rank"]
# Components as rows, the transpose of U in the formulas: batches of such small matrices are
# multiplied two to four times as fast.
Rows = Float[Array, "rank features"]

# With fewer features, an eigendecomposition takes no longer than the steps of `first_components`.
FEW = 32
STEPS = 10  # of `first_components` by default; clients soon compute better ones

# Local components with a smaller misalignment count as common to all clients.
COMMON = 0.05

RETRACTIONS: dict[str, Callable[[Frame], Frame]] = {"polar": polar, "qr": orthonormalize}


def moment_of(data: Samples | Moment, *, rank: int, rounds: int) -> Moment:
    """Return one client's second moment, as a matrix or as samples, whichever is cheaper."""
    moment = moment_behind(data)
    if moment.samples is None:
        return moment
    samples, features = moment.samples.shape
    return moment.densified() if should_densify(samples, features, rank, rounds) else moment


def moment_behind(data: Samples | Moment) -> Moment:
    """Return one client's second moment in the form of its data, cheapest for eigenvalues."""
    return data if isinstance(data, Moment) else Moment.from_samples(data.values, data.count)


def check_data(clients: ClientsLike) -> None:
    """Raise a `ValueError` if the clients' data are neither samples nor second moments."""
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    part = clients.parts[0]
    if not isinstance(part, Samples | Moment):
        raise other_data("Clients.from_samples or Clients.from_moments", part)


def check_fits(names: str, total: int, clients: ClientsLike) -> None:
    """Raise a `ValueError` if PCA cannot use the data, or there are fewer features than `total`."""
    check_data(clients)
    check_room(names, total, clients)


def check_room(names: str, total: int, clients: ClientsLike) -> None:
    """Raise a `ValueError` if there are fewer features than components."""
    if total > clients.features:
        raise ValueError(
            f"{names}: {total} orthonormal components do not fit into {clients.features} features"
        )


def warn_of_few(local_rank: int, clients: ClientsLike) -> None:
    """Warn if the local components alone can reproduce all samples of a client.

    Such a client says nothing about shared components. Clients without samples, and those that hold
    moments, whose numbers of samples may be unknown, are passed over.
    """
    counts = [part.count for part in clients.parts if isinstance(part, SampleRows)]
    if not all(map(is_known, counts)):
        return
    present = np.concatenate([np.ravel(x) for x in map(np.asarray, counts)] or [np.zeros(0)])
    present = present[present > 0]
    if len(present) and (fewest := int(present.min())) <= local_rank:
        warnings.warn(
            f"clients: wanted more samples of each client than the {local_rank} local components, "
            f"got a client with {fewest}, which its local components reproduce whatever is shared. "
            "Learn fewer local components, or use an algorithm with a prior, such as "
            "jaxfed.pca.HierarchicalPCA",
            stacklevel=caller(),
        )


def check_warm_start(
    warm_start: Personalized | None,
    clients: ClientsLike,
    shared_rank: int | None,
    local_rank: int | None,
) -> None:
    """Raise a `ValueError` if a warm start has other shapes or is not finite.

    A rank is None if the algorithm does not use that part. Local components may be missing.
    """
    if warm_start is None:
        return
    features = clients.features
    for name, part, wanted, needed in (
        ("shared", warm_start.shared, (features, shared_rank), shared_rank is not None),
        ("local", warm_start.local, (len(clients.ids), features, local_rank), False),
    ):
        if wanted[-1] is None or (part is None and not needed):
            continue
        if getattr(part, "shape", None) != wanted:
            raise ValueError(
                f"warm_start: wanted {name} components of shape {wanted}, "
                f"got {None if part is None else jnp.shape(part)}"
            )
        if not isinstance(part, Tracer) and not finite(part):
            raise ValueError(f"warm_start: wanted finite {name} components, got NaN or infinity")


def retract(w: Rows, retraction: str, active: Float[Array, " rank"] | None = None) -> Rows:
    """Return orthonormal rows that span those of `w`; inactive rows stay zero.

    Source: the generalized retractions of Shi & Kontar (2024), Proposition 6.
    """
    if active is None:
        # The polar factor of a transpose is the transpose of the polar factor.
        return polar(w) if retraction == "polar" else RETRACTIONS[retraction](w.T).T
    # Each inactive row gets its own direction in extra features, where it is orthonormal to all
    # others and does not change them.
    used, extra = active[:, None], jnp.diag(1 - active)
    extended = jnp.concatenate([w * used, extra], axis=1)
    return retract(extended, retraction)[:, : w.shape[1]] * used


def positive(x: Array) -> Array:
    """Replace numbers that are not positive by one."""
    return jnp.where(x > 0, x, 1)


def frobenius_norm(x: Array) -> Float[Array, ""]:
    """Return the Frobenius norm, with derivative zero at zero."""
    # Both branches of `where` are differentiated. Without `positive`, the one not taken would
    # contribute 0 times infinity at zero, which is NaN.
    square = jnp.sum(x**2)
    return jnp.where(square > 0, jnp.sqrt(positive(square)), 0)


def deflate(w: Frame, basis: Float[Array, "features basis_rank"]) -> Frame:
    """Return the part of `w` orthogonal to `basis`."""
    return w - thin_product(basis, basis.T @ w)


def top_components(moment: Moment, rank: int, active: Float[Array, " rank"] | None = None) -> Frame:
    """Return the top eigenvectors of a second moment; inactive columns are zero."""
    return activated(moment, *moment.top(rank), active)


def activated(
    moment: Moment, values: Array, vectors: Frame, active: Float[Array, " rank"] | None
) -> Frame:
    """Return the top eigenvectors with inactive columns set to zero."""
    if active is None:
        return vectors
    # The derivative of `Moment.top` leaves out rotations among the eigenvectors, but active ones
    # rotate towards inactive ones: dv_j = sum_i v_i (v_iᵀ dS v_j) / (l_j - l_i).
    gaps = values - values[:, None]
    least = jnp.finfo(values.dtype).eps * len(values) * values[0]
    clear = (active > active[:, None]) & (gaps > least)
    turn = ratio(change_within(moment, vectors), jnp.where(clear, gaps, 0))
    # Columns of zeros stand for components that a client does not have: `jaxfed.metrics` and
    # `jaxfed.inference.membership` leave them out.
    return (vectors + vectors @ turn) * active


def beside(
    shared: Float[Array, "features shared_rank"],
    local: Frame,
    active: Float[Array, " rank"] | None = None,
) -> Frame:
    """Return orthonormal columns that span the part of `local` orthogonal to `shared`.

    If that part has too few dimensions, other directions orthogonal to `shared` complete it.
    """
    # The first columns of a QR factor do not depend on the last, so they stay the shared ones.
    joint = orthonormalize_once(jnp.concatenate([shared, local], axis=1))
    rest = joint[:, shared.shape[1] :]
    return rest if active is None else rest * active


def best_local(
    moment: Moment,
    shared: Float[Array, "features shared_rank"],
    rank: int,
    active: Float[Array, " local_rank"] | None = None,
) -> Float[Array, "features local_rank"]:
    """Return the best local components beside shared ones: top eigenvectors of the deflated moment.

    The shared directions are eigenvectors of the deflated moment too, with eigenvalue zero. If its
    rank is too low, they would count as local components, hence the call of `beside`.
    """
    values, vectors = moment.top(rank, beside=shared)
    if active is not None:
        vectors = deflate(vectors, shared)  # makes moment and deflated moment the same on them
    return beside(shared, activated(moment, values, vectors, active), active)


def first_components(
    moment: Moment,
    rank: int,
    active: Float[Array, " rank"] | None = None,
    beside: Float[Array, "beside_rank features"] | None = None,
    *,
    steps: int = STEPS,
) -> Rows:
    """Return orthonormal rows to start from, whose span is near that of the top eigenvectors.

    This is subspace iteration. It takes a few products, whereas `top_components` and `best_local`
    decompose a matrix. The first k rows are the result for rank k; inactive rows are zero.

    Args:
        moment: the second moment.
        rank: number of rows.
        active: 1 for rows in use; by default all.
        beside: orthonormal rows that deflate the moment first.
        steps: steps of subspace iteration, used with 32 features or more.

    Source: Golub & Van Loan, Matrix Computations, Section 8.2.4.
    """
    if moment.dim < FEW:
        if beside is None:
            return top_components(moment, rank, active).T
        return best_local(moment, beside.T, rank, active).T

    def step(_, w):
        w = multiplied(w, moment.row_products(w)[0])
        return orthonormal_rows(w if beside is None else deflate(w.T, beside.T).T)

    # The same for all clients, so that similar clients start at similar components.
    start = np.random.default_rng(0).standard_normal((rank, moment.dim))
    w = lax.fori_loop(0, steps, step, jnp.asarray(start, moment.trace.dtype))
    return w if active is None else w * active[:, None]


def multiplied(basis: Rows, product: Rows) -> Rows:
    """Take a step of orthogonal iteration, before orthonormalization.

    Args:
        basis: orthonormal rows.
        product: product of these with a positive semi-definite matrix.
    """
    energy = jnp.vdot(basis, product) / len(basis)
    # Directions without energy stay as they are, instead of becoming rounding noise.
    return ratio(product, energy) + float(jnp.finfo(basis.dtype).eps) ** 0.5 * basis


def change_within(moment: Moment, vectors: Frame) -> Float[Array, "rank rank"]:
    """Return zeros with the derivative VᵀdSV, the change of a moment in its eigenvectors' span.

    The derivative of `Moment.top` leaves it out, because no function of the span depends on it. A
    function that distinguishes the eigenvectors must add it. There is no second derivative.
    """
    return zero_with_derivative(vectors.T @ moment.mv(vectors))


def moment_message(
    moment: Moment, scale: Float[Array, ""] | float = 1.0, *, total: bool = False
) -> Gram | Symmetric:
    """Return the smaller of two messages that give the server the exact mean or total moment.

    It is a thin factor or the upper triangle of the matrix, times the scale. The total is the sum
    over clients, whatever their weights.
    """
    # A factor has n d numbers and a triangle d (d + 1) / 2.
    if moment.samples is not None and 2 * len(moment.samples) <= moment.dim:
        root = jnp.sqrt(scale / jnp.maximum(moment.count, 1))
        return Gram(moment.samples.T * root, weighted=not total, thin=True)
    return Symmetric(to_triangle(moment.matrix()) * scale, weighted=not total)


def moment_received(reduced: Array) -> Moment:
    """Return the mean or the total of the clients' moments, from their reduced messages."""
    if reduced.ndim == 1:  # secure aggregation sums the triangles as vectors
        reduced = from_triangle(reduced)
    if reduced.shape[0] != reduced.shape[1]:  # `Gram` may leave a factor
        return Moment.from_samples(reduced.T, 1)
    return Moment.from_dense(reduced)


def common_local(result: Personalized) -> tuple[str, ...]:
    """Return a warning if some direction lies in almost every client's local part.

    It compares the misalignment θ of `jaxfed.metrics.misalignment`. With one client, nothing
    distinguishes shared from local components.
    """
    from scipy.sparse.linalg import svds  # importing it takes longer than many runs

    if len(result.local) < 2:
        return ("With one client, nothing distinguishes shared from local components.",)
    if not is_known(result.local):
        return ()
    local = np.asarray(result.local, float)
    local = local[np.isfinite(local).all(axis=(1, 2))]  # in a robust run, clients may fail
    stacked = np.moveaxis(local, 0, 1).reshape(local.shape[1], -1)
    if not stacked.any():
        return ()
    # A fixed first vector, since SciPy would draw one and warnings might differ from run to run.
    first = np.random.default_rng(0).standard_normal(min(stacked.shape))
    (largest,) = np.asarray(svds(stacked, 1, v0=first, return_singular_vectors=False))
    # The largest eigenvalue of the mean local projector is 1 - θ: (11) of Shi & Kontar (2024).
    theta = max(0.0, 1 - largest**2 / len(local))
    if theta > COMMON:
        return ()
    return (
        f"The local components are common to all clients (misalignment {theta:.2g}) and so not "
        "local at all: learn more shared components, or fewer local ones.",
    )


def mean_energies(
    energies: Float[Array, " rank"], shared_rank: int, active: Float[Array, " local_rank"] | None
) -> dict[str, Float[Array, ""]]:
    """Return the mean variances along shared and local components, as diagnostics.

    Args:
        energies: variances along both, the shared ones first.
        shared_rank: number of shared components.
        active: 1 for local components in use; by default all.
    """
    own = energies[shared_rank:]
    count = len(own) if active is None else jnp.sum(active)
    means = jnp.mean(energies[:shared_rank]), ratio(jnp.sum(own), jnp.asarray(count, own.dtype))
    return dict(zip(ENERGIES, means, strict=True))


def uncaptured(moment: Moment, captured: Float[Array, ""]) -> Float[Array, ""]:
    """Return the variance not captured, at least zero despite rounding."""
    return jnp.maximum(moment.trace - captured, 0)
