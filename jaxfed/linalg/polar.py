"""Orthonormal polar factor of a tall matrix: the closest orthonormal basis, as matrix products.

`W = Q P` with `Q^T Q = I` and `P = (W^T W)^{1/2}`. The factor `Q = W P^{-1}` is found through the
small Gram matrix `G = W^T W`, whose inverse square root takes a few `r x r` products. That squares
the condition number of `W`, so the result is polished where its expected error asks for it, and
replaced by that of a singular value decomposition where the Gram matrix knows too little.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg._dispatch import inverse_sqrt_kernel
from jaxfed.linalg._factor import (
    Factors,
    checked_tall,
    differentiable,
    identity_minus_gram,
    matmul,
    squared_norm,
)

Method = Literal["newton_schulz", "eigh", "svd", "pallas"]

# XLA's processor backend multiplies a batch of such r x r matrices two to six times slower than
# the next larger multiple of 8 (bench/polar.py).
_SLOW_RANKS = (4, 5, 6, 7, 11, 14, 15)


def polar(w: Float[Array, "d r"], method: Method | None = None) -> Float[Array, "d r"]:
    r"""Orthonormal polar factor of a tall matrix, the orthonormal matrix closest to it.
    """
    w = checked_tall(w)
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)} or None, got {method!r}")
    # Half precisions have no decompositions and would not hold the constraint.
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    return _factor(wide, method or "newton_schulz")[0].astype(w.dtype)


polar_smooth = polar


def _values(w: Float[Array, "d r"], method: str) -> Factors:
    """The factor and P^{-1}, without a derivative."""
    r = w.shape[1]
    if r == 1:
        return _normalized(w)
    if method == "svd":
        return _by_svd(w)

    gram = _gram(w)
    inverse, error = _INVERSE_SQRT[method](gram)
    tolerance = 32 * jnp.finfo(w.dtype).eps * r
    state = matmul(w, inverse), inverse, error

    def polish(state):
        q, inverse, _ = state
        defect = identity_minus_gram(q)
        step = _newton_schulz_step(defect)
        return q + matmul(q, step), inverse + matmul(inverse, step), squared_norm(defect) ** 1.5

    state = lax.while_loop(lambda s: (s[2] > tolerance) & (s[2] < 1), polish, state)

    # A loop and not a `cond`: mapped over clients, a `cond` would decompose every client's matrix
    # every time, this loop does so only in the rounds in which some client needs it. What is
    # decomposed must depend on the state, or the compiler moves the decomposition before the loop.
    def decompose(state):
        q, _, error = state
        return *_by_svd(jnp.where(error <= tolerance, q, w)), jnp.zeros_like(error)

    q, inverse, _ = lax.while_loop(lambda s: ~(s[2] <= tolerance), decompose, state)
    return q, inverse


def _gram(w):
    d=w.shape[0]
    if d>32: return matmul(w.T,w)
    return sum(jnp.outer(w[i],w[i]) for i in range(d))


def _normalized(w):
    scale = jnp.max(jnp.abs(w))
    scaled = w / jnp.where(scale > 0, scale, 1)
    norm = jnp.sqrt(squared_norm(scaled))
    first = jnp.zeros_like(w).at[0].set(1)
    zero = scale == 0
    q = jnp.where(zero, first, scaled / jnp.where(zero, 1, norm))
    return q, jnp.where(zero, 0, 1 / (norm * scale))[None, None]


def _by_svd(w):
    # Scaled, because squares inside a decomposition may overflow or vanish.
    scale = jnp.max(jnp.abs(w))
    scale = jnp.where(scale == 0, 1, scale)
    u, s, vt = jnp.linalg.svd(w / scale, full_matrices=False)
    kept = s > jnp.finfo(w.dtype).eps * s[0] * w.shape[1]
    reciprocal = jnp.where(kept, 1 / jnp.where(kept, s * scale, 1), 0)
    return matmul(u, vt), matmul(vt.T * reciprocal, vt)


def _newton_schulz_step(defect):
    """(I - E)^{-1/2} - I to third order in E."""
    return defect / 2 + 0.375 * matmul(defect, defect)


def _series(defect):
    """(I - E)^{-1/2} to ninth order in E, in four products."""
    eye = jnp.eye(defect.shape[0], dtype=defect.dtype)
    square = matmul(defect, defect)
    cube = matmul(defect, square)
    high = 231 / 1024 * eye + 429 / 2048 * defect + 6435 / 32768 * square
    middle = 5 / 16 * eye + 35 / 128 * defect + 63 / 256 * square + matmul(cube, high)
    return eye + defect / 2 + 3 / 8 * square + matmul(cube, middle)


def _newton_schulz(gram):
    r = gram.shape[0]
    eps = jnp.finfo(gram.dtype).eps
    eye = jnp.eye(r, dtype=gram.dtype)
    mean = jnp.sum(gram * eye) / r
    squares = squared_norm(gram)
    spread = jnp.sqrt(jnp.maximum(squares - r * mean * mean, 0))
    scale = jnp.maximum(mean, (mean + spread) / 2)
    error = jnp.abs(squares / (scale * scale) - 2 * r * mean / scale + r)
    defect = eye - gram / scale
    padding = -r % 8 if r in _SLOW_RANKS else 0
    defect = jnp.pad(defect, ((0, padding), (0, padding)))
    eye = jnp.eye(r + padding, dtype=gram.dtype)

    def step(state):
        z, t, defect, error, _ = state
        defect = eye - matmul(t - matmul(defect, t), t)
        t = _series(defect)
        return matmul(z, t), t, defect, squared_norm(defect), error

    t = _series(defect)
    threshold = (eps * r) ** (2 / 9)
    z, _, _, error, _ = lax.while_loop(
        lambda s: (s[3] > threshold) & (s[3] < s[4]),
        step,
        (t, t, defect, error, jnp.asarray(jnp.inf, gram.dtype)),
    )
    error = error**4.5 + 2 * eps * squared_norm(z)
    return z[:r, :r] / jnp.sqrt(scale), error


def _by_eigh(gram):
    values, vectors = jnp.linalg.eigh(gram)
    safe = jnp.where(values > 0, values, 1)
    inverse = matmul(vectors * jnp.where(values > 0, lax.rsqrt(safe), 0), vectors.T)
    error = jnp.finfo(gram.dtype).eps * values[-1] * jnp.sum(jnp.where(values > 0, 1 / safe, jnp.inf))
    return inverse, error


_INVERSE_SQRT = {"newton_schulz": _newton_schulz, "eigh": _by_eigh, "pallas": inverse_sqrt_kernel}


def _rotation(inverse, n):
    r = n.shape[0]
    if r == 1:
        return jnp.zeros_like(n)
    scale = jnp.trace(inverse) / r
    inverse = inverse / jnp.where(scale > 0, scale, 1)
    right = matmul(inverse, n)
    omega = lax.custom_linear_solve(
        lambda x: matmul(inverse, x) + matmul(x, inverse),
        right - right.T,
        solve=lambda _, b: _sylvester(inverse, b),
        symmetric=True,
    )
    return (omega - omega.T) / 2


def _sylvester(s, right):
    eps = jnp.finfo(s.dtype).eps
    size = jnp.max(jnp.abs(right))
    size = jnp.where(size > 0, size, 1)
    right = right / size
    tolerance = (32 * eps) ** 2 * squared_norm(right)

    def operator(x):
        return matmul(s, x) + matmul(x, s)

    def step(state):
        x, residual, direction, old, count = state
        image = operator(direction)
        alpha = old / jnp.sum(direction * image)
        x = x + alpha * direction
        residual = residual - alpha * image
        new = squared_norm(residual)
        return x, residual, residual + new / old * direction, new, count + 1

    x, _, _, error, _ = lax.while_loop(
        lambda state: (state[3] > tolerance) & (state[4] < 16),
        step,
        (jnp.zeros_like(right), right, right, squared_norm(right), 0),
    )

    def decompose(state):
        x, error = state
        values, vectors = jnp.linalg.eigh(jnp.where(error <= tolerance, jnp.eye(s.shape[0], dtype=s.dtype), s))
        sums = values[:, None] + values[None, :]
        safe = sums > eps * values[-1]
        inner = matmul(vectors.T, matmul(right, vectors))
        x = matmul(vectors, matmul(jnp.where(safe, inner / jnp.where(safe, sums, 1), 0), vectors.T))
        return x, jnp.zeros_like(error)

    x, _ = lax.while_loop(lambda state: ~(state[1] <= tolerance), decompose, (x, error))
    return x * size


_factor = differentiable(_values, _rotation)
