"""Principal components within block Krylov spaces, in plain dense NumPy.

No recurrence, no restart, no locking: the space is written down and the pooled matrix is
projected onto it. Rows are samples; the pooled matrix is `C = sum_i A_i^T A_i`.
"""

import numpy as np


def pooled(samples):
    """C, the sum of all samples' products."""
    stacked = np.concatenate(samples)
    return stacked.T @ stacked


def krylov_basis(c, start, blocks):
    """Orthonormal basis of span [B, C B, ..., C^(blocks-1) B]."""
    basis = np.linalg.qr(start)[0]
    newest = basis
    for _ in range(blocks - 1):
        # Powers of C times a basis of the newest block span the same space, and keep their digits.
        fresh = c @ newest
        for _ in range(3):
            fresh = fresh - basis @ (basis.T @ fresh)
        newest = np.linalg.qr(fresh)[0]
        basis = np.concatenate([basis, newest], axis=1)
    return basis


def best_within(c, basis, rank):
    """Rayleigh-Ritz: the components within a space that capture the most."""
    _, vectors = np.linalg.eigh(basis.T @ c @ basis)
    return basis @ vectors[:, ::-1][:, :rank]


def captured(c, z):
    """f(Z) = tr(Z^T C Z)."""
    return np.trace(z.T @ c @ z)


def kkt_violation(c, z):
    """|(I - Z Z^T) C Z|_F / tr C."""
    product = c @ z
    return np.linalg.norm(product - z @ (z.T @ product)) / np.trace(c)


def principal_components(samples, rank):
    """The top right singular vectors of all samples."""
    return np.linalg.svd(np.concatenate(samples))[2][:rank].T


def rounds_by_change(values, tol=1e-10):
    """Rounds until f changes by at most `tol` of itself, rule (27) of Wang, Liu & Zhang (2022)."""
    values = np.asarray(values)
    small = np.flatnonzero(np.abs(np.diff(values)) <= tol * values[1:])
    return small[0] + 2 if len(small) else None
