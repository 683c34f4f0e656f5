"""Federated MAX-VAR GCCA in plain float64 NumPy, view by view.

Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized canonical
correlation analysis. Written from the formulas for tests of the library; it shares no code with it.
"""

import numpy as np


def polar(s):
    """The orthonormal matrix nearest to S."""
    u, _, vt = np.linalg.svd(s, full_matrices=False)
    return u @ vt


def cost(views, g, q):
    """1/2 sum_j |X_j Q_j / sqrt(L) - G|_F^2."""
    root = np.sqrt(len(g))
    return sum(np.sum((x @ w / root - g) ** 2) for x, w in zip(views, q, strict=True)) / 2


def optimum(views, rank):
    """The least cost, its G, and all eigenvalues of sum_j X_j X_j^+, formed as it is written."""
    total = np.sum([x @ np.linalg.pinv(x) for x in views], axis=0)
    values, vectors = np.linalg.eigh((total + total.T) / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    return (len(views) * rank - values[:rank].sum()) / 2, vectors[:, :rank], values


def mvlsa(views, rank, view_rank):
    """G from the views' best approximations of rank `view_rank`, with the Q_j of these."""
    pieces = []
    for x in views:
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        kept = np.arange(len(s)) < np.sum(s[:view_rank] > 1e-10 * s[0])
        pieces.append((u[:, kept], s[kept], vt[kept]))
    g = np.linalg.svd(np.concatenate([u for u, _, _ in pieces], axis=1))[0][:, :rank]
    return g, [np.sqrt(len(g)) * vt.T @ ((u.T @ g) / s[:, None]) for u, s, vt in pieces]


def quantize(v, levels, chances, contraction=1.0):
    """sign * level * scale / (s tau), rounded up where the chance is below the fraction."""
    scale = np.abs(v).max()
    if scale == 0:
        return np.zeros_like(v)
    a = levels * np.abs(v) / scale
    level = np.floor(a) + (chances < a - np.floor(a))
    return np.sign(v) * level * scale / (levels * contraction)


def maxvar(
    views, g, q, rounds, *, inner_steps=10, proximal=0.0, batch=None, compress=None, rng=None
):
    """AltMaxVar, or CuteMaxVar where `compress(v)` is what is left of a change.

    Returns:
        G, the list of Q_j, and the costs: that of the start and one after each round.
    """
    compress = compress or (lambda v: v)
    length = len(g)
    root = np.sqrt(length)
    bounds = [np.linalg.norm(x, 2) ** 2 / length for x in views]
    q = [w.copy() for w in q]
    uplinks = [x @ w / root for x, w in zip(views, q, strict=True)]
    seen = g.copy()
    costs = [cost(views, g, q)]
    for _ in range(rounds):
        for j, x in enumerate(views):
            for _ in range(inner_steps):
                rows = np.arange(length) if rng is None else rng.permutation(length)[:batch]
                part = x[rows]
                residual = part @ q[j] / root - seen[rows]
                gradient = part.T @ residual / root * (length / len(part))
                q[j] = q[j] - gradient / bounds[j]
            uplinks[j] = uplinks[j] + compress(x @ q[j] / root - uplinks[j])
        g = polar(sum(uplinks) / len(views) + proximal * g)
        seen = seen + compress(g - seen)
        costs.append(cost(views, g, q))
    return g, q, np.array(costs)


# --- clients that have seen some of the entities -------------------------------------------------


def counts_of(places, length):
    """How many clients have seen each entity: the diagonal of K."""
    return np.sum([np.isin(np.arange(length), own) for own in places], axis=0).astype(float)


def optimum_of_some(views, places, length, rank):
    """The least cost under G'KG = J I, and its G: K^-1/2 eigenvectors, all formed as written."""
    k, total = counts_of(places, length), np.zeros((length, length))
    for x, own in zip(views, places, strict=True):
        total[np.ix_(own, own)] += x @ np.linalg.pinv(x)
    scale = 1 / np.sqrt(k)
    values, vectors = np.linalg.eigh(scale[:, None] * total * scale)
    top = np.argsort(values)[::-1][:rank]
    g = np.sqrt(len(views)) * scale[:, None] * vectors[:, top]
    return len(views) * (rank - values[top].sum()) / 2, g


def cost_of_some(views, places, g, q):
    """1/2 sum_j |X_j Q_j / sqrt(L) - D_j G|_F^2, of the rows that each client has."""
    root = np.sqrt(len(g))
    fits = zip(views, places, q, strict=True)
    return sum(np.sum((x @ w / root - g[own]) ** 2) for x, own, w in fits) / 2


def run_some(views, places, g, q, rounds, *, solve, proximal=0.0):
    """Alternating minimization: maps by `solve(x, target, q)`, then G by sums and counts.

    G minimizes the cost, and `proximal` times J/2 of its own change weighted by K / J, under
    G'KG = J I: G = sqrt(J) K^-1/2 polar(K^-1/2 (sums + proximal K G)).
    """
    length, clients = len(g), len(views)
    k, q = counts_of(places, length)[:, None], list(q)
    costs = [cost_of_some(views, places, g, q)]
    for _ in range(rounds):
        sums = proximal * k * g
        for j, (x, own) in enumerate(zip(views, places, strict=True)):
            q[j] = solve(x, g[own], q[j])
            sums[own] += x @ q[j] / np.sqrt(length)
        g = np.sqrt(clients / k) * polar(sums / np.sqrt(k))
        costs.append(cost_of_some(views, places, g, q))
    return g, q, np.array(costs)
