"""Federated deep MAX-VAR GCCA in plain float64 NumPy, with the gradients by hand.

Shrestha & Fu (2023), Section V-B. A view's network is a dict of its numbers: a hidden layer `w1`,
`b1`, normalized over the batch, scaled by `s` and shifted by `t`, ReLU, a linear layer `w2`, `b2`,
and the running `mean` and `var`. Written from the formulas; it shares no code with the library.
"""

import numpy as np

EPS, MOMENTUM = 1e-5, 0.1


def polar(s):
    """The orthonormal matrix nearest to S."""
    u, _, vt = np.linalg.svd(s, full_matrices=False)
    return u @ vt


def outputs(net, x):
    """By the running statistics."""
    z = x @ net["w1"] + net["b1"]
    h = np.maximum(net["s"] * (z - net["mean"]) / np.sqrt(net["var"] + EPS) + net["t"], 0)
    return h @ net["w2"] + net["b2"]


def loss_and_gradient(net, x, target):
    """Of 1/(2b) |S(x) - target|_F^2 by the batch's statistics; and those."""
    n = len(x)
    z = x @ net["w1"] + net["b1"]
    mean = z.mean(0)
    var = ((z - mean) ** 2).mean(0)
    root = np.sqrt(var + EPS)
    normal = (z - mean) / root
    a = net["s"] * normal + net["t"]
    h = np.maximum(a, 0)
    residual = h @ net["w2"] + net["b2"] - target
    d_out = residual / n
    d_a = (d_out @ net["w2"].T) * (a > 0)
    d_normal = d_a * net["s"]
    # The mean and the variance depend on every entity of the batch.
    d_z = (d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)) / root
    gradient = {
        "w1": x.T @ d_z,
        "b1": d_z.sum(0),
        "s": (d_a * normal).sum(0),
        "t": d_a.sum(0),
        "w2": h.T @ d_out,
        "b2": d_out.sum(0),
    }
    return (residual**2).sum() / (2 * n), gradient, mean, var * n / (n - 1)


def deep_maxvar(views, nets, g, rounds, *, epochs, step_size, proximal=0.0, compress=None):
    """CuteMaxVar-Deep with full batches and plain gradient steps.

    Returns:
        G, the networks, each round's objective (the mean over the views at the start of the
        round), and the uplink's last memories.
    """
    compress = compress or (lambda v: v)
    length = len(g)
    nets = [{k: v.copy() for k, v in net.items()} for net in nets]
    root = np.sqrt(length)
    scores = [outputs(net, x) / root for net, x in zip(nets, views, strict=True)]
    memories = [m.copy() for m in scores]
    seen, objective = g.copy(), []
    for _ in range(rounds):
        objective.append(np.mean([((m - seen) ** 2).sum() / 2 for m in scores]))
        for j, (net, x) in enumerate(zip(nets, views, strict=True)):
            for _ in range(epochs):
                _, gradient, mean, var = loss_and_gradient(net, x, root * seen)
                for name, slope in gradient.items():
                    net[name] = net[name] - step_size * slope
                net["mean"] = (1 - MOMENTUM) * net["mean"] + MOMENTUM * mean
                net["var"] = (1 - MOMENTUM) * net["var"] + MOMENTUM * var
            scores[j] = outputs(net, x) / root
            memories[j] = memories[j] + compress(scores[j] - memories[j])
        total = sum(memories) / len(views)
        g = polar(total - total.mean(0) + proximal * g)
        seen = seen + compress(g - seen)
    return g, nets, np.array(objective), memories
