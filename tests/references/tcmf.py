"""Triple component matrix factorization in plain NumPy, epoch by epoch.

Written for reading beside the paper, N. Shi, S. Fattahi and R. Al Kontar, "Triple Component Matrix
Factorization: Untangling Global, Local, and Noisy Components" (2024), Algorithm 1:
M_i = U_g V_ig^T + U_il V_il^T + S_i with samples in the columns of M_i. The subroutine JIMF, which
the paper leaves open, is orthogonal iteration in U_g with the best U_il, V_ig and V_il beside it.
"""

import numpy as np

# Directions without energy stay as they are.
KEPT = np.finfo(float).eps ** 0.5


def hard(matrix, threshold):
    """Entries above the threshold, and zeros."""
    return np.where(np.abs(matrix) > threshold, matrix, 0)


def best(matrix, ug, rank):
    """U_l and the low-rank part of one matrix, for a given orthonormal U_g."""
    rest = matrix - ug @ (ug.T @ matrix)
    ul = np.linalg.svd(rest)[0][:, :rank]
    return ul, ug @ (ug.T @ matrix) + ul @ (ul.T @ matrix)


def polar(matrix):
    """The orthonormal matrix closest to one."""
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def rounds(matrices, masks, ug, rank, thresholds, decay, count, inner=1):
    """U_g after some rounds, a list of S_i, and the objective in each round.

    `thresholds` are the final one and each client's first. Missing entries, which the paper does
    not have, are in S_i whatever their size; `matrices` have any finite numbers there.
    """
    final, first = thresholds
    sparse = [
        np.where(mask, hard(m, lam), m) for m, mask, lam in zip(matrices, masks, first, strict=True)
    ]
    lams, objectives = list(first), []
    for number in range(1, count + 1):
        found = [best(m - s, ug, rank) for m, s in zip(matrices, sparse, strict=True)]
        if number % inner == 0:  # the end of an epoch
            # As lam <- rho lam + eps, with eps = (1 - rho) final.
            lams = [decay * lam + (1 - decay) * final for lam in lams]
            sparse = [
                np.where(mask, hard(m - low, lam), m - low)
                for m, mask, (_, low), lam in zip(matrices, masks, found, lams, strict=True)
            ]
        steps, objective = [], 0
        for m, mask, s, (ul, low), lam in zip(matrices, masks, sparse, found, lams, strict=True):
            objective += (mask * (m - low - s) ** 2).sum() / 2
            objective += lam**2 / 2 * np.count_nonzero(mask * s)
            step = (m - s) @ (m - s).T @ ug
            steps.append(step - ul @ ul.T @ step)
        objectives.append(objective / len(matrices))
        mean = np.mean(steps, axis=0)
        ug = polar(mean + KEPT * np.trace(ug.T @ mean) / ug.shape[1] * ug)
    return ug, sparse, np.array(objectives)
