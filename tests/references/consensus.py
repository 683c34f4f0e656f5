"""Federated PCA by consensus in plain float64 NumPy, with dense n x n matrices, client by client.

Wang, Liu & Zhang (2022), Seeking consensus on subspaces in federated principal component analysis.
Written from the formulas for tests of the library; it shares no code with it, and forms every
matrix that the library is careful not to form.

`samples` is a list of arrays `(m_i, n)`: A_i of the paper is `samples[i].T`.
"""

from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """What a run was."""

    iterates: list  # Z^(0), Z^(1), ...
    captured: list  # f(Z^(k)) = sum_i |A_i^T Z^(k)|_F^2, of all but the last
    local_steps: list  # of each round: one number per client


def qr_positive(w):
    """Q of the QR factorization with a positive diagonal of R."""
    q, r = np.linalg.qr(w)
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def projector(w):
    """The projection onto the columns' span; the columns are orthonormal."""
    return w @ w.T


def grams(samples):
    """A_i A_i^T of every client."""
    return [y.T @ y for y in samples]


def rounds_by_27(captured, tol=1e-10):
    """The first k at which rule (27) is met, or None."""
    for k in range(1, len(captured)):
        if abs(captured[k] - captured[k - 1]) <= tol * captured[k]:
            return k
    return None


def scaled_kkt_violation(samples, z):
    """|(I - Z Z^T) A A^T Z|_F / |A|_F^2."""
    c = sum(grams(samples))
    return np.linalg.norm((np.eye(len(c)) - projector(z)) @ c @ z) / np.trace(c)


def singular_values(samples, rank):
    """The largest singular values of the pooled matrix, and its left singular vectors."""
    u, s, _ = np.linalg.svd(np.concatenate(samples).T, full_matrices=False)
    return s[:rank], u[:, :rank]


def relative_singular_value_error(samples, z):
    """|Sigma_k - Sigma*|_F / |Sigma*|_F, Sigma_k the singular values of A^T Z."""
    best, _ = singular_values(samples, z.shape[1])
    found = np.linalg.svd(np.concatenate(samples) @ z, compute_uv=False)
    return np.linalg.norm(found - best) / np.linalg.norm(best)


def subspace_iteration(samples, start, rounds):
    """Equation (2)."""
    z, run = start, Run([start], [], [])
    for _ in range(rounds):
        products = [c @ z for c in grams(samples)]
        run.captured.append(sum(np.linalg.norm(y @ z) ** 2 for y in samples))
        z = qr_positive(sum(products))
        run.iterates.append(z)
    return run


def local_power(samples, start, rounds, steps=8, alignment="none"):
    """Several products at each client; the number is halved every round down to one."""
    z, run = start, Run([start], [], [])
    for _ in range(rounds):
        total = 0.0
        reference = None
        for c in grams(samples):
            q = z
            for _ in range(steps - 1):
                q = qr_positive(c @ q)
            reference = q if reference is None else reference
            rotation = np.eye(z.shape[1])
            if alignment == "sign":
                rotation = np.diag(np.where(np.sum(q * reference, axis=0) < 0, -1.0, 1.0))
            elif alignment == "procrustes":
                left, _, right = np.linalg.svd(q.T @ reference)
                rotation = left @ right
            total = total + c @ q @ rotation
        run.captured.append(sum(np.linalg.norm(y @ z) ** 2 for y in samples))
        run.local_steps.append([steps] * len(samples))
        z = qr_positive(total)
        run.iterates.append(z)
        steps = max(steps // 2, 1)
    return run


def faps(
    samples,
    start,
    rounds,
    *,
    rule="fixed",
    steps=5,
    tol=None,
    penalty=0.15,
    growth=0.1,
    first_x=None,
):
    """Algorithm 1 with dense multipliers.

    In round k everything uses beta^(k); (25) makes beta^(k+1) of it, for the round after.
    """
    matrices = grams(samples)
    eye = np.eye(len(start))
    z, run = start, Run([start], [], [])
    xs = [z if first_x is None else x for x in (first_x or [None] * len(samples))]
    betas = [penalty * np.linalg.norm(y, 2) ** 2 for y in samples]
    history = [[] for _ in samples]

    def multiplier(c, x):
        p = projector(x)
        return -p @ c @ (eye - p) - (eye - p) @ c @ p  # (8)

    def violation(h, x):
        return np.linalg.norm((eye - projector(x)) @ h @ x)

    for k in range(rounds):
        total, counts = np.zeros_like(z), []
        for i, c in enumerate(matrices):
            beta = betas[i]
            history[i].append(np.linalg.norm(projector(xs[i]) - projector(z)))
            if growth and k > 0 and k % 5 == 0 and history[i][k - 5] <= 1.01 * history[i][k]:
                betas[i] = (1 + growth) * beta  # (25)
            if not c.any():
                counts.append(0)
                continue
            h = c + multiplier(c, xs[i]) + beta * projector(z)  # (12)
            x, taken, first = xs[i], 0, violation(h, xs[i])
            while taken < (steps if rule == "fixed" else 500):
                new, taken = qr_positive(h @ x), taken + 1
                change, x = np.linalg.norm(new - x), new
                if rule == "relative_change" and change <= tol * np.linalg.norm(new):
                    break
                if rule == "sufficient_decrease" and violation(h, x) <= max(
                    tol * first, 1e-15 * np.linalg.norm(h @ x)
                ):
                    break
            counts.append(taken)
            xs[i] = x
            total += (beta * projector(x) - multiplier(c, x)) @ z  # (18)
        run.captured.append(sum(np.linalg.norm(y @ z) ** 2 for y in samples))
        run.local_steps.append(counts)
        z = qr_positive(total)
        run.iterates.append(z)
    return run
