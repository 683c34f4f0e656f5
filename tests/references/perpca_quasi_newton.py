"""Riemannian limited-memory BFGS for personalized PCA in plain NumPy, minimising f = -F.

The two-loop recursion of Nocedal & Wright (2006), Algorithm 7.4, with every pair projected to the
horizontal space of the point where it is used; loops over clients and pairs, dense projectors.
Rows are samples; every client weighs 1/N.
"""

import numpy as np

from tests.references.perpca import best_local, moment, polar, projector


def value_and_gradient(moments, shared, ranks, penalty=0.0):
    """f = -mean_i max_V [tr UᵀSU + Σ g(λ)] / 2 and its Riemannian gradient at U.

    g(λ) = λ - τ c (1 - (1 + λ / 2c)⁻²) with c ten times the weakest of all variances in the model.
    """
    value, gradient = 0.0, np.zeros_like(shared)
    for s, rank in zip(moments, ranks, strict=True):
        local, c = best_local(s, shared, rank), 10 * weakest(s, shared.shape[1] + rank)
        variances = np.diag(local.T @ s @ local)
        own = np.sum(variances - penalty * c * (1 - (1 + variances / 2 / c) ** -2))
        value -= (np.trace(shared.T @ s @ shared) + own) / 2
        slopes = 1 - penalty * (1 + variances / 2 / c) ** -3
        gradient -= (np.eye(len(s)) - projector(shared) - local * slopes @ local.T) @ s @ shared
    return value / len(moments), gradient / len(moments)


def weakest(s, count):
    """The last of the largest eigenvalues."""
    return np.linalg.eigvalsh(s)[-count]


def residual(moments, shared, ranks):
    """The mean variance that the shared and the best local components leave."""
    energy = np.mean([np.trace(s) for s in moments])
    return energy + 2 * value_and_gradient(moments, shared, ranks)[0]


def direction(pairs, gradient, scale):
    """The way down: minus the approximate inverse of the Hessian times the gradient."""
    pairs = [(s, y) for s, y in pairs if np.sum(s * y) > 0]
    q, shares = gradient.copy(), []
    for s, y in reversed(pairs):
        shares.append(np.sum(s * q) / np.sum(s * y))
        q = q - shares[-1] * y
    r = q / scale
    if pairs:
        s, y = pairs[-1]
        r = q * np.sum(s * y) / np.sum(y * y)
    for (s, y), share in zip(pairs, reversed(shares), strict=True):
        r = r + s * (share - np.sum(y * r) / np.sum(s * y))
    return -r


def quasi_newton(samples, shared, ranks, rounds, memory=10, reach=0.5, penalty=0.0):
    """The points that are evaluated, f at them, and whether each was accepted.

    A trial is accepted if f falls by 1e-4 of what the slope promises, or after three that were not.
    """
    moments = [moment(y) for y in samples]
    points, values, accepted, pairs = [], [], [], []
    base = trial = shared
    base_value, base_gradient, p = np.inf, np.zeros_like(shared), np.zeros_like(shared)
    step, refused = 0.0, 0
    for _ in range(rounds):
        value, gradient = value_and_gradient(moments, trial, ranks, penalty)
        # Without the projection at U, which changes no gradient but the norms below.
        products = []
        for s, rank in zip(moments, ranks, strict=True):
            local, c = best_local(s, trial, rank), 10 * weakest(s, trial.shape[1] + rank)
            slopes = 1 - penalty * (1 + np.diag(local.T @ s @ local) / 2 / c) ** -3
            products.append((np.eye(len(s)) - local * slopes @ local.T) @ s @ trial)
        scale = np.mean(np.linalg.norm(products, axis=(1, 2)))
        points.append(trial)
        values.append(value)
        slope, change = 0.0, 0.0
        good, learned = True, False
        if points[1:]:
            slope = np.sum(base_gradient * p)
            good = refused == 3 or value <= base_value + 1e-4 * step * slope
            here = trial if good else base
            horizontal = np.eye(len(here)) - projector(here)
            s = horizontal @ (step * p)
            y = horizontal @ (gradient - base_gradient)
            learned = np.sum(s * y) > 1e-6 * np.linalg.norm(gradient) * np.sum(s * s)
            pairs = [(horizontal @ a, horizontal @ b) for a, b in pairs]
            if learned:
                pairs = [*pairs, (s, y)][-memory:]
            change = value - base_value
        accepted.append(good)
        if good:
            base, base_value, base_gradient, refused = trial, value, gradient, 0
        else:
            refused += 1
        if good or learned:
            p = direction(pairs, base_gradient, scale)
            step = min(1.0, reach / np.linalg.norm(p))
        else:
            # The lowest point of the parabola through value, slope and new value.
            step *= np.clip(step * slope / (2 * (step * slope - change)), 0.1, 0.5)
        trial = polar(base + step * p)
    return np.array(points), np.array(values), np.array(accepted)
