"""ADEPT on a linear two-layer autoencoder, client by client, with its gradients by hand."""

import numpy as np

from tests.references.fedavg import loss


def penalty(personal, mean, spread, xi):
    """Negative logarithm of the prior."""
    return sum(
        (np.log(s) + (2 * xi + (w - m) ** 2) / (2 * s**2)).sum()
        for w, m, s in zip(personal, mean, spread, strict=True)
    )


def slope(personal, mean, spread, xi):
    """The penalty's derivative with respect to the spread."""
    return [
        1 / s - (2 * xi + (w - m) ** 2) / s**3
        for w, m, s in zip(personal, mean, spread, strict=True)
    ]


def by_norm(gradient, limit):
    """Clip the norm over all arrays."""
    norm = np.sqrt(sum((g**2).sum() for g in gradient))
    return [g * min(1, limit / norm) if norm else g for g in gradient]


def by_largest(gradient, limit):
    """Clip the largest absolute entry of all arrays."""
    largest = max(np.abs(g).max() for g in gradient)
    return [g * min(1, limit / largest) if largest else g for g in gradient]


def adept(
    parameters,
    tables,
    weights,
    *,
    rounds,
    local_steps,
    step_size,
    global_step_size,
    spread_step_size,
    xi,
    initial_spread,
    prior_weight=None,
    lazy_rounds=2,
    clip=np.inf,
    spread_clip=np.inf,
    bounds=(1e-3, 100.0),
    momentum=0.0,
    published=False,
    proximal=False,
    present=None,
):
    """Personal models, the global model, the spread, and each round's objective.

    `present[t][i]` says whether client i takes part in round t. The server adds the mean of the
    changes of those who do, by their weights.
    """
    clients = range(len(tables))
    mean = [p.copy() for p in parameters]
    spread = [np.full_like(p, initial_spread) for p in parameters]
    personal = [[p.copy() for p in parameters] for _ in clients]
    velocity = [[np.zeros_like(p) for p in parameters] for _ in clients]
    collected = [[np.zeros_like(p) for p in parameters] for _ in clients]
    taken = [0 for _ in clients]
    objective = []
    for t in range(rounds):
        here = [i for i in clients if present is None or present[t][i]]
        next_mean, next_spread = [p.copy() for p in mean], [s.copy() for s in spread]
        value = 0.0
        for i in here:
            x, share = tables[i], weights[i] / sum(weights[j] for j in here)
            factor = 1 / len(x) if prior_weight is None else prior_weight
            theta, mu, sigma = personal[i], [p.copy() for p in mean], [s.copy() for s in spread]
            value += weights[i] * (loss(theta, x)[0] + factor * penalty(theta, mu, sigma, xi))

            gradient = slope(theta, mu, sigma, xi)
            if published:
                gradient = [c + g for c, g in zip(collected[i], gradient, strict=True)]
                collected[i] = gradient
            if taken[i] >= lazy_rounds and proximal:
                # Part of the way from the variance to the square that was observed, at slope 1/2s.
                sigma = [
                    np.clip(
                        s + spread_step_size * (2 * xi + (w - m) ** 2 - s**2) / (2 * s), *bounds
                    )
                    for w, m, s in zip(theta, mu, sigma, strict=True)
                ]
            elif taken[i] >= lazy_rounds:
                if published:
                    gradient = [by_largest([g], spread_clip)[0] for g in gradient]
                    collected[i] = [np.zeros_like(g) for g in gradient]
                else:
                    gradient = by_norm(gradient, spread_clip)
                sigma = [
                    np.clip(s - spread_step_size * g, *bounds)
                    for s, g in zip(sigma, gradient, strict=True)
                ]
            taken[i] += 1

            for h in range(local_steps):
                if published:
                    # Once for the step's own loss, and but for the first, for the update's.
                    times = factor if h == 0 else 1 + factor
                    collected[i] = [
                        c + times * g
                        for c, g in zip(collected[i], slope(theta, mu, sigma, xi), strict=True)
                    ]
                gradient = [
                    g + (0 if proximal else factor) * (w - m) / s**2
                    for g, w, m, s in zip(loss(theta, x)[1], theta, mu, sigma, strict=True)
                ]
                gradient = (by_largest if published else by_norm)(gradient, clip)
                velocity[i] = [momentum * v + g for v, g in zip(velocity[i], gradient, strict=True)]
                theta = [w - step_size * v for w, v in zip(theta, velocity[i], strict=True)]
                if proximal:
                    # Where precisions add: 1 of the step's own, t of the prior's.
                    pulls = [step_size * factor / s**2 for s in sigma]
                    theta = [
                        (w + t * m) / (1 + t) for w, m, t in zip(theta, mu, pulls, strict=True)
                    ]
                    mu = [
                        (1 - global_step_size) * m + global_step_size * w
                        for w, m in zip(theta, mu, strict=True)
                    ]
                    continue
                if published:
                    gradient = [2 * (m - w) for w, m in zip(theta, mu, strict=True)]
                    gradient = by_largest(gradient, clip)
                else:
                    gradient = [(m - w) / s**2 for w, m, s in zip(theta, mu, sigma, strict=True)]
                    gradient = by_norm(gradient, clip)
                mu = [m - global_step_size * g for m, g in zip(mu, gradient, strict=True)]
            personal[i] = theta
            next_mean = [a + share * (m - b) for a, m, b in zip(next_mean, mu, mean, strict=True)]
            next_spread = [
                a + share * (s - b) for a, s, b in zip(next_spread, sigma, spread, strict=True)
            ]
        mean, spread = next_mean, [np.clip(s, *bounds) for s in next_spread]
        objective.append(value / sum(weights[i] for i in here))
    return personal, mean, spread, np.array(objective)
