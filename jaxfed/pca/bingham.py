r"""The matrix Bingham distribution on subspaces: normalizing constant, mean projector and fit.

Its density on the Grassmannian is proportional to exp(½ tr UᵀAU). For A = κ VVᵀ, with two distinct
eigenvalues, the normalizing constant C is a hypergeometric function of κ, computed here by the
calibrated Laplace approximation of Butler & Wood. For other A, every pair of a kept and a dropped
eigenvalue contributes as it does there:

    log C(A) ≈ ½ Σ_j a_j + Σ_j Σ_k l(a_j - a_k),    j = 1..r, k = r+1..d,

which is exact for two distinct eigenvalues, to first order for small A, and as A grows.

Source: Chikuse (2003), Statistics on special manifolds; Butler & Wood (2002), Laplace
approximations for hypergeometric functions with matrix argument, equation 16.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxfed.linalg.division import ratio

Concentrations = float | Float[Array, "*batch"]


def log_normalizer(
    concentration: Concentrations, features: int, rank: int
) -> Float[Array, "*batch"]:
    r"""Logarithm of the mean of exp(-κ/2 ‖U - VVᵀU‖²) over subspaces, C(κ VVᵀ) e^(-κr/2).

    Args:
        concentration: κ, not negative.
        features: d.
        rank: r.

    Source: Butler & Wood (2002), (16), for ₁F₁(r/2; d/2; κ I_r / 2).
    """
    a, b, x = rank / 2, features / 2, concentration / 2
    inside, outside = _saddle(concentration, features, rank)
    pairs = rank * (rank + 1) / 4
    curvature = b * (inside**2 / a + outside**2 / (b - a))
    exponent = a * jnp.log(inside * b / a) + (b - a) * jnp.log(outside * b / (b - a)) - x * outside
    return rank * exponent - pairs * jnp.log(curvature)


def prior_distance(
    concentration: Concentrations, features: int, rank: int
) -> Float[Array, "*batch"]:
    """Expected ‖U - VVᵀU‖² for A = κ VVᵀ: from r(d - r)/d at κ = 0 down to about r(d - r)/κ.

    This is -2 times the derivative of `log_normalizer`, written out; that of the exponent is 1 - y
    by the saddle point equation.
    """
    a, b = rank / 2, features / 2
    inside, outside = _saddle(concentration, features, rank)
    curvature = (b - a) * inside**2 + a * outside**2
    turn = (inside * outside / curvature) ** 2 * ((b - a) * inside - a * outside)
    return rank * outside + rank * (rank + 1) / 2 * turn


def _saddle(concentration: Concentrations, features: int, rank: int) -> tuple[Array, Array]:
    """Return the solution y of the saddle point equation and 1 - y, both to full precision.

    For large κ the printed y = (x - b + ((x - b)² + 4ax)^½) / 2x with x = κ/2 rounds to one. Here
    all terms are divided by x + b, so that nothing cancels or overflows.
    """
    a, b, x = rank / 2, features / 2, concentration / 2
    large = x > b
    below = 1 / (1 + x / b)  # b / (x + b)
    above = jnp.where(large, 1 - below, x / b * below)  # x / (x + b)
    root = jnp.sqrt(1 - 4 * (1 - a / b) * above * below)
    gap = jnp.where(large, above - below, below - above) + root
    inside = jnp.where(large, gap / (2 * jnp.where(large, above, 1)), 2 * a / b * below / gap)
    return inside, 2 * (1 - a / b) * below / (1 + root)


def mean_projector_weights(values: Float[Array, " d"], rank: int) -> Float[Array, " d"]:
    """Eigenvalues of E[UUᵀ], from 0 to 1 with sum r, from those of A; both descending."""
    features = len(values)
    gaps = values[:rank, None] - values[rank:]
    # In a prior with two distinct eigenvalues all r (d - r) pairs are alike, so each accounts for
    # an equal part of the distance.
    pair = jax.vmap(jax.vmap(lambda gap: prior_distance(gap, features, rank)))(gaps)
    lost = pair / (rank * (features - rank))
    return jnp.concatenate([1 - lost.sum(axis=1), lost.sum(axis=0)])


def divided_differences(
    values: Float[Array, " d"], weights: Float[Array, " d"]
) -> Float[Array, "d d"]:
    """(w_i - w_j) / (λ_i - λ_j), by which V diag(w) Vᵀ changes with the eigenvectors; 0 at ties."""
    gaps = values[:, None] - values
    clear = jnp.abs(gaps) > jnp.finfo(values.dtype).eps * len(values) * jnp.abs(values[0])
    return ratio(weights[:, None] - weights, jnp.where(clear, gaps, 0))


def concentrations(features: int, rank: int, dtype: DTypeLike) -> tuple[float, float]:
    """Return the smallest and the largest concentration that a distance can determine.

    A distance is the difference r - tr VᵀE[UUᵀ]V, with a rounding error of a few units of r.
    """
    return 1e-6, 4 * (features - rank) / float(jnp.finfo(dtype).eps)


def fitted_concentration(distance: Float[Array, ""], features: int, rank: int) -> Float[Array, ""]:
    """Return the maximum likelihood concentration, whose expected distance is `distance`.

    It is clipped to the bounds of `concentrations`, with derivative zero there.
    """
    limits = jnp.asarray(concentrations(features, rank, distance.dtype), distance.dtype)
    farthest, nearest = prior_distance(limits, features, rank)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        above = prior_distance(jnp.exp(middle), features, rank) > distance
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    # κ spans tens of orders of magnitude, hence the logarithm; 50 halvings leave less than 1e-13.
    low, high = (jnp.full(distance.shape, limit) for limit in jnp.log(limits))
    bounds = jax.lax.fori_loop(0, 50, halve, jax.lax.stop_gradient((low, high)))
    root = jax.lax.stop_gradient(jnp.exp(sum(bounds) / 2))
    # Bisection has no derivative: use that of the implicit function.
    slope = jax.lax.stop_gradient(jax.grad(prior_distance)(root, features, rank))
    within = (nearest < distance) & (distance < farthest)
    return root + ratio(distance - jax.lax.stop_gradient(distance), jnp.where(within, slope, 0))
