"""Hierarchical-Bayes PCA in plain NumPy, from the papers, with dense inverses and loops.

Shares no code with the library. Samples are a list of `(n_i, d)` arrays in double precision; all
clients count the same.
"""

import numpy as np


def sym(a):
    return (a + a.T) / 2


def polar(w):
    left, _, right = np.linalg.svd(w, full_matrices=False)
    return left @ right


def project(x, g):
    return g - x @ sym(x.T @ g)


def moments(samples):
    return [y.T @ y / len(y) for y in samples]


def likelihood(moment, count, frame, noise):
    """n/2 (log det W + tr W^-1 S) for any frame."""
    w = frame @ frame.T + noise * np.eye(len(frame))
    return count / 2 * (np.linalg.slogdet(w)[1] + np.trace(np.linalg.solve(w, moment)))


def likelihood_gradient(moment, count, frame, noise):
    w = np.linalg.inv(frame @ frame.T + noise * np.eye(len(frame)))
    return count * (w @ frame - w @ moment @ w @ frame)


def distance(shared, frame):
    return np.sum(project(shared, frame) ** 2)


def objective(samples, shared, frames, noise, variance):
    terms = [
        likelihood(s, len(y), u, noise) + distance(shared, u) / (2 * variance)
        for y, s, u in zip(samples, moments(samples), frames, strict=True)
    ]
    return np.mean(terms)


def top(matrix, rank):
    return np.linalg.eigh(matrix)[1][:, ::-1][:, :rank]


def pooled(samples, rank):
    return top(sum(y.T @ y for y in samples), rank)


def gradient_descent(
    samples,
    shared,
    frames,
    noise,
    variance,
    rounds,
    *,
    step_size=None,
    global_step_size=None,
    half=False,
    align=True,
    spread=None,
    hyper_prior=0.0,
    dimension=1,
):
    """Algorithm 1; with `spread` that of ADEPT. Returns V, the U_i, and the prior's variance."""
    scale = 0.5 if half else 1.0
    all_moments = moments(samples)
    frames = list(frames)
    for _ in range(rounds):
        copies, distances = [], []
        for i, (y, s) in enumerate(zip(samples, all_moments, strict=True)):
            u, n = frames[i], len(y)
            if align:
                u = u @ polar(u.T @ shared)
            before = distance(shared, u)
            gradient = scale * likelihood_gradient(s, n, u, noise)
            gradient = gradient + project(shared, u) / variance
            alpha = step_size
            if alpha is None:
                curvature = scale * n / (noise * (1 + noise)) * np.linalg.eigvalsh(s)[-1]
                alpha = 1 / (curvature + 1 / variance)
            u = polar(u - alpha * project(u, gradient))
            by_shared = -project(shared, u) @ sym(shared.T @ u) / variance
            beta = variance if global_step_size is None else global_step_size
            copies.append(shared - beta * project(shared, by_shared))
            distances.append(before if spread == "gradient" else distance(shared, u))
            frames[i] = u
        shared = polar(np.mean(copies, axis=0))
        bound = 2 * hyper_prior + np.mean(distances)
        if spread == "closed_form":
            variance = bound / dimension
        elif spread == "log":
            variance = np.exp(np.log(variance) - (dimension - bound / variance) / dimension / 2)
        elif spread == "gradient":
            sigma = np.sqrt(variance)
            step = hyper_prior / dimension**2
            variance = (sigma - step * (dimension / sigma - bound / sigma**3)) ** 2
    return shared, frames, variance


def block_descent(samples, shared, noise, variance, rounds, *, half=False):
    """The best own components in turn with the best shared ones. Returns V and the U_i."""
    scale, rank = (0.5 if half else 1.0) / (noise * (1 + noise)), shared.shape[1]
    frames = []
    for _ in range(rounds):
        frames = [
            top(scale * len(y) * s + shared @ shared.T / variance, rank)
            for y, s in zip(samples, moments(samples), strict=True)
        ]
        shared = top(np.mean([u @ u.T for u in frames], axis=0), rank)
    return shared, frames


def global_training(samples, shared, noise, rounds, step_size):
    """One gradient descent for all: gradients averaged, then projected and retracted."""
    for _ in range(rounds):
        gradients = [
            likelihood_gradient(s, len(y), shared, noise)
            for y, s in zip(samples, moments(samples), strict=True)
        ]
        shared = polar(shared - step_size * project(shared, np.mean(gradients, axis=0)))
    return shared


def local_training(samples, frames, noise, rounds):
    """A gradient descent of each client alone."""
    result = []
    for y, s, u in zip(samples, moments(samples), frames, strict=True):
        step = noise * (1 + noise) / (len(y) * np.linalg.eigvalsh(s)[-1])
        for _ in range(rounds):
            u = polar(u - step * project(u, likelihood_gradient(s, len(y), u, noise)))
        result.append(u)
    return result
