"""Personalized Tucker decomposition in plain NumPy, one client and one mode after the other.

Written for reading beside J. Hu, N. Shi, R. Al Kontar and H. Yan, "Personalized Tucker
Decomposition: Modeling Commonality and Peculiarity on Tensor Data" (2023): residuals are whole
tensors, Y - C x_1 U_1 ... x_K U_K, and cores are kept beside the factors.
"""

import numpy as np


def mode_product(tensors, matrix, mode):
    """Every tensor, along the first axis, times a matrix from the left in a mode."""
    return np.moveaxis(
        np.einsum("...a,ba->...b", np.moveaxis(tensors, mode + 1, -1), matrix), -1, mode + 1
    )


def tucker(cores, factors):
    """C x_1 U_1 ... x_K U_K."""
    for k, factor in enumerate(factors):
        cores = mode_product(cores, factor, k)
    return cores


def core(tensors, factors):
    """Y x_1 U_1^T ... x_K U_K^T."""
    return tucker(tensors, [factor.T for factor in factors])


def unfolded(tensors, mode):
    """All tensors' columns in a mode side by side."""
    return np.moveaxis(tensors, mode + 1, 0).reshape(tensors.shape[mode + 1], -1)


def products(residual, factors, mode):
    """W W^T of the residual times all other modes' transposed factors."""
    others = [np.eye(len(f)) if k == mode else f.T for k, f in enumerate(factors)]
    w = unfolded(tucker(residual, others), mode)
    return w @ w.T


def eigenvectors(matrix, rank):
    """The top ones."""
    return np.linalg.eigh(matrix)[1][:, ::-1][:, :rank]


def passes(samples, u, v, orthogonal, rho, count):
    """U, V of every client, and each pass's objective at its end.

    `samples` holds a client's tensors along the first axis, `u` a factor for each mode, `v` such a
    list for each client. Clients count equally, by the means over their samples.
    """
    samples = [y / np.sqrt(len(y)) for y in samples]
    u, v, clients, objectives = list(u), [list(own) for own in v], range(len(samples)), []
    d = [core(samples[i], v[i]) for i in clients]
    c = [core(samples[i] - tucker(d[i], v[i]), u) for i in clients]
    for _ in range(count):
        for k in range(len(u)):
            rest = [samples[i] - tucker(d[i], v[i]) for i in clients]
            mean = np.mean([products(r, u, k) for r in rest], axis=0)
            u[k] = eigenvectors(mean + 2 * rho * u[k] @ u[k].T, u[k].shape[1])
            for i in clients:
                w = products(samples[i] - tucker(c[i], u), v[i], k) + 2 * rho * v[i][k] @ v[i][k].T
                outside = np.eye(len(u[k])) - (u[k] @ u[k].T if k in orthogonal else 0)
                v[i][k] = eigenvectors(outside @ w @ outside, v[i][k].shape[1])
                c[i] = core(rest[i], u)
                d[i] = core(samples[i] - tucker(c[i], u), v[i])
        left = [samples[i] - tucker(core(samples[i], u), u) - tucker(d[i], v[i]) for i in clients]
        objectives.append(np.mean([np.sum(r**2) for r in left]))
    return u, v, objectives
