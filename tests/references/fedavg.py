"""Federated averaging of a linear two-layer autoencoder, with its gradients by hand."""

import numpy as np


def loss(parameters, x):
    """Mean squared length of the residual, and its gradient."""
    w1, b1, w2, b2 = parameters
    code = x @ w1.T + b1
    residual = code @ w2.T + b2 - x
    back = 2 * residual / len(x)
    inner = back @ w2
    gradient = [inner.T @ x, inner.sum(0), back.T @ code, back.sum(0)]
    return np.mean(np.sum(residual**2, axis=1)), gradient


def federated_averaging(
    parameters, tables, weights, *, rounds, local_steps, step_size, proximal=0.0, momentum=None
):
    """Parameters after the rounds and the objective at each round's start.

    With `momentum` = (rate, decay) the server takes heavy-ball steps.
    """
    shared, objective = [p.copy() for p in parameters], []
    velocity = [np.zeros_like(p) for p in shared]
    for _ in range(rounds):
        mean = [np.zeros_like(p) for p in shared]
        objective.append(sum(w * loss(shared, x)[0] for w, x in zip(weights, tables, strict=True)))
        for weight, x in zip(weights, tables, strict=True):
            own = [p.copy() for p in shared]
            for _ in range(local_steps):
                gradient = loss(own, x)[1]
                own = [
                    p - step_size * (g + proximal * (p - s))
                    for p, g, s in zip(own, gradient, shared, strict=True)
                ]
            mean = [m + weight * (p - s) for m, p, s in zip(mean, own, shared, strict=True)]
        if momentum is None:
            shared = [s + m for s, m in zip(shared, mean, strict=True)]
        else:
            rate, decay = momentum
            velocity = [decay * v - m for v, m in zip(velocity, mean, strict=True)]
            shared = [s - rate * v for s, v in zip(shared, velocity, strict=True)]
    return shared, np.array(objective)
