"""Integrative NMF in plain NumPy, one client, sample and component after the other.

Written for reading beside the papers of LIGER, Welch et al. (2019) and Gao et al. (2021), with
cells in rows: X_i = H_i (W + V_i), all factors non-negative.
"""

import numpy as np
from scipy.optimize import nnls


def loadings(x, mask, w, v, penalty):
    """The best h ≥ 0 for each sample, on its observed entries."""
    found = []
    for row, seen in zip(x, mask, strict=True):
        left = np.vstack([(w + v).T[seen], np.sqrt(penalty) * v.T])
        right = np.concatenate([row[seen], np.zeros(v.shape[1])])
        found.append(nnls(left, right)[0])
    return np.array(found)


def ratio(rise, curvature):
    """A step; components without loadings stay as they are."""
    return rise / curvature if curvature > 0 else 0 * rise


def objective(x, mask, w, v, h, penalty):
    """Of one client."""
    rest = np.where(mask, x - h @ (w + v), 0)
    return (rest**2).sum() + penalty * ((h @ v) ** 2).sum()


def rounds(xs, masks, w, vs, penalty, count):
    """W, the V_i and the objective in each round, a mean over clients.

    In each round loadings, then W, then the V_i, by one sweep over components each. In place of
    masked entries `xs` have any numbers.
    """
    w, vs, objectives = w.copy(), [v.copy() for v in vs], []
    for _ in range(count):
        hs = [loadings(x, m, w, v, penalty) for x, m, v in zip(xs, masks, vs, strict=True)]
        each = zip(xs, masks, vs, hs, strict=True)
        objectives.append(np.mean([objective(x, m, w, v, h, penalty) for x, m, v, h in each]))
        full = [np.where(m, x, h @ (w + v)) for x, m, h, v in zip(xs, masks, hs, vs, strict=True)]
        for j in range(len(w)):
            rise = sum(h[:, j] @ (x - h @ (w + v)) for x, h, v in zip(full, hs, vs, strict=True))
            w[j] = np.maximum(w[j] + ratio(rise, sum(h[:, j] @ h[:, j] for h in hs)), 0)
        for x, h, v in zip(full, hs, vs, strict=True):
            for j in range(len(w)):
                rise = h[:, j] @ (x - h @ w - (1 + penalty) * h @ v)
                v[j] = np.maximum(v[j] + ratio(rise, (1 + penalty) * h[:, j] @ h[:, j]), 0)
    return w, vs, np.array(objectives)
