"""Personalized PCA in plain NumPy: loops over clients, dense moments, full SVDs.

Written for reading beside the paper, N. Shi and R. Al Kontar, "Personalized PCA: Decoupling
Shared and Unique Features", JMLR 25 (2024). Equation numbers are the paper's. Rows are samples,
nothing is centred, S_i = Y_i^T Y_i / n_i, and every client weighs 1/N whatever its n_i.

A list of client samples holds arrays (n_i, d); a list of local components holds arrays
(d, r2_i), whose ranks may differ.
"""

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """Shared (d, r1) and local (d, r2_i) components, objective and step size of every round."""

    shared: np.ndarray
    locals_: list
    objective: np.ndarray
    step_sizes: np.ndarray


def moment(y):
    """S = Y^T Y / n."""
    return y.T @ y / len(y)


def projector(w):
    """P_W = W W^T for orthonormal columns."""
    return w @ w.T


def polar(w):
    """Polar factor W (W^T W)^(-1/2) (17), by the full SVD."""
    left, _, right = np.linalg.svd(w, full_matrices=True)
    rank = w.shape[1]
    return left[:, :rank] @ right


def qr_positive(w):
    """Q of the QR factorization whose R has a positive diagonal, so that Q(U) = U."""
    q, r = np.linalg.qr(w)
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


RETRACTIONS = {"polar": polar, "qr": qr_positive}


def top(s, rank):
    """Eigenvectors of the `rank` largest eigenvalues of a symmetric matrix, largest first."""
    _, vectors = np.linalg.eigh(s)
    return vectors[:, ::-1][:, :rank]


def deflate(s, w):
    """(I - P_W) S (I - P_W)."""
    complement = np.eye(len(s)) - projector(w)
    return complement @ s @ complement


def best_local(s, shared, rank):
    """The best V for given U: top eigenvectors of (I - P_U) S (I - P_U)."""
    return top(deflate(s, shared), rank)


def perpca(
    samples,
    shared,
    locals_,
    *,
    step_size,
    rounds,
    variant="tangent",
    retraction="polar",
    participants=None,
    decrease_on_rise=False,
):
    """Algorithm 2; `variant` "tangent" is its choice 1, "polar" its choice 2, "power" neither.

    One round, with GR_X(xi) = retraction(X + xi):

        every client:   V_i <- GR(V_i - U U^T V_i)
          tangent:      G = (I - P_U - P_V) S_i [U, V_i]
                        U_i <- U + step G_U             (not retracted)
                        V_i <- GR(V_i + step G_V)
          polar:        [U_i, V_i] <- GR([U, V_i] + step S_i [U, V_i])
          power:        V_i <- the same span as (I - P_U) S_i V_i
                        U_i <- (I - P_V) S_i U
        server:         U <- GR(mean of the U_i)

    G is the projection of S_i W on the tangent space at W = [U, V], because W^T S_i W is
    symmetric. The V_i of the last round are no longer orthogonal to the last U, so they are
    deflated and retracted once more before they are returned.

    Args:
        samples: list of (n_i, d).
        shared: (d, r1), orthonormal.
        locals_: list of (d, r2_i); they need not be feasible, the first deflation sees to that.
        step_size: the ascent step (for half the gradient of (7), S_i W), not used by "power".
        rounds: number of rounds.
        variant: "tangent" (choice 1), "polar" (choice 2) or "power".
        retraction: "polar" or "qr", used at all three places.
        participants: per round, the indices of the clients that take part; the server averages
            over them and the others keep their V_i. None: everybody, always.
        decrease_on_rise: the authors' rule. After every round the loss
            sum_i ||Y_i - Y_i P_[U, V_i]||_F^2 / sum_i n_i (clients weigh n_i) is taken at the
            new U and the V_i deflated against it; if it is larger than after the round before,
            the step size is multiplied by exp(-1) for all the rounds to come. The round that
            made the loss rise is kept, and the first round has nothing to compare with.

    Returns:
        Result: `objective[t]` and `step_sizes[t]` are (7), divided by the number of clients,
        after round t and the step size used in it.
    """
    retract = RETRACTIONS[retraction]
    s = [moment(y) for y in samples]
    counts = np.array([len(y) for y in samples])
    shared, locals_ = np.array(shared), [np.array(v) for v in locals_]
    identity = np.eye(len(shared))
    r1 = shared.shape[1]
    objectives, step_sizes, last_loss = [], [], np.inf
    for t in range(rounds):
        active = range(len(samples)) if participants is None else participants[t]
        step_sizes.append(step_size)
        uplinks = []
        for i in active:
            v = retract(locals_[i] - shared @ (shared.T @ locals_[i]))
            w = np.concatenate([shared, v], axis=1)
            if variant == "tangent":
                tangent = (identity - projector(shared) - projector(v)) @ s[i] @ w
                uplinks.append(shared + step_size * tangent[:, :r1])
                locals_[i] = retract(v + step_size * tangent[:, r1:])
            elif variant == "polar":
                w = retract(w + step_size * s[i] @ w)
                uplinks.append(w[:, :r1])
                locals_[i] = w[:, r1:]
            elif variant == "power":
                product = (identity - projector(shared)) @ s[i] @ v
                locals_[i] = np.linalg.svd(product, full_matrices=False)[0]
                uplinks.append((identity - projector(locals_[i])) @ s[i] @ shared)
            else:
                raise ValueError(f"variant must be 'tangent', 'polar' or 'power', not {variant!r}")
        shared = retract(sum(uplinks) / len(uplinks))
        feasible = [retract(v - shared @ (shared.T @ v)) for v in locals_]
        objectives.append(objective(samples, shared, feasible))
        errors = reconstruction_errors(samples, shared, feasible)
        loss = np.sum(counts * errors) / np.sum(counts)
        if decrease_on_rise and loss > last_loss:
            step_size = step_size * np.exp(-1.0)
        last_loss = loss
    locals_ = [retract(v - shared @ (shared.T @ v)) for v in locals_]
    return Result(shared, locals_, np.array(objectives), np.array(step_sizes))


def algorithm1(samples, shared, locals_, *, step_size, rounds):
    """Algorithm 1, written out on its own: every retraction is the polar factor."""
    s = [moment(y) for y in samples]
    half = [np.array(v) for v in locals_]
    u = np.array(shared)
    r1 = u.shape[1]
    for _ in range(rounds):
        total = np.zeros_like(u)
        for i in range(len(samples)):
            v = polar(half[i] - u @ u.T @ half[i])
            w = np.hstack([u, v])
            w = polar(w + step_size * s[i] @ w)
            total += w[:, :r1]
            half[i] = w[:, r1:]
        u = polar(total / len(samples))
    return u, [polar(v - u @ u.T @ v) for v in half]


def objective(samples, shared, locals_):
    """(7) divided by N: the mean over clients of (tr U^T S_i U + tr V_i^T S_i V_i) / 2."""
    total = 0.0
    for y, v in zip(samples, locals_, strict=True):
        s = moment(y)
        total += 0.5 * (np.trace(shared.T @ s @ shared) + np.trace(v.T @ s @ v))
    return total / len(samples)


def reconstruction_errors(samples, shared, locals_):
    """(29) before its mean over clients: ||Y_i - Y_i (P_U + P_Vi)||_F^2 / n_i for every i."""
    return np.array(
        [
            np.sum((y - y @ (projector(shared) + projector(v))) ** 2) / len(y)
            for y, v in zip(samples, locals_, strict=True)
        ]
    )


def subspace_errors(shared, locals_, true_shared, true_locals):
    """The two terms of (30): ||P_U - Pi_g||_F^2 and the mean of ||P_Vi - Pi_i||_F^2."""
    local = [
        np.sum((projector(v) - projector(t)) ** 2)
        for v, t in zip(locals_, true_locals, strict=True)
    ]
    return np.sum((projector(shared) - projector(true_shared)) ** 2), np.mean(local)


def misalignment(locals_):
    """theta = 1 - lambda_max(mean of P_Vi) (11)."""
    mean = sum(projector(v) for v in locals_) / len(locals_)
    return 1.0 - np.linalg.eigvalsh(mean)[-1]


def client_distances(locals_):
    """rho_ij = ||P_Vi - P_Vj||_F^2 / r2 (31); for unequal ranks, over the mean of the two."""
    m = len(locals_)
    rho = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            gap = projector(locals_[i]) - projector(locals_[j])
            rho[i, j] = 2 * np.sum(gap**2) / (locals_[i].shape[1] + locals_[j].shape[1])
    return rho


def kkt_violation(samples, shared, locals_):
    """Norms of the two parts of (24), whose slice is to be read 1:r1.

    Returns:
        ||1/N sum_i G_i,U||_F and sqrt(1/N sum_i ||G_i,V||_F^2), with the parallel gradients
        G_i = (I - P_U - P_Vi) S_i [U, V_i] (21).
    """
    identity = np.eye(len(shared))
    mean, local = np.zeros_like(shared), 0.0
    for y, v in zip(samples, locals_, strict=True):
        rest = (identity - projector(shared) - projector(v)) @ moment(y)
        mean += rest @ shared / len(samples)
        local += np.sum((rest @ v) ** 2) / len(samples)
    return np.linalg.norm(mean), np.sqrt(local)


def local_pca(samples, rank):
    """indivPCA: every client's own top eigenvectors."""
    return [top(moment(y), rank) for y in samples]


def pooled_pca(samples, rank, weights="samples"):
    """CPCA: top eigenvectors of the moment of all samples together.

    Args:
        samples: list of (n_i, d).
        rank: number of components.
        weights: "samples" pools the rows, so that client i weighs n_i (the paper's CPCA);
            "clients" weighs every S_i alike.
    """
    if weights == "samples":
        return top(moment(np.concatenate(samples)), rank)
    return top(sum(moment(y) for y in samples) / len(samples), rank)


def one_shot_projector(samples, r1, r2):
    """distPCA with the paper's second shot (7.1.2).

    Clients send their top r1 + r2 eigenvectors; the server's U is the top r1 left singular
    vectors of them side by side; clients take their top r2 from the moment deflated by U.
    """
    stacked = np.concatenate([top(moment(y), r1 + r2) for y in samples], axis=1)
    shared = np.linalg.svd(stacked)[0][:, :r1]
    return shared, [best_local(moment(y), shared, r2) for y in samples]


def one_shot_spectrum(samples, r1, r2):
    """The start of Qu et al. (2002): as `one_shot_projector`, but eigenvalues travel too.

    U = top r1 eigenvectors of the mean of the best rank r1 + r2 approximations of S_i.
    """
    d = samples[0].shape[1]
    mean = np.zeros((d, d))
    for y in samples:
        values, vectors = np.linalg.eigh(moment(y))
        values, vectors = values[-(r1 + r2) :], vectors[:, -(r1 + r2) :]
        mean += (vectors * values) @ vectors.T / len(samples)
    shared = top(mean, r1)
    return shared, [best_local(moment(y), shared, r2) for y in samples]


def local_first(samples, r1, r2):
    """Local components first, then the shared ones from what they leave.

    V_i = top r2 eigenvectors of S_i; U = top r1 eigenvectors of the mean of the S_i deflated by
    V_i on both sides; then every V_i again, the best one for this U.
    """
    first = local_pca(samples, r2)
    rest = [deflate(moment(y), v) for y, v in zip(samples, first, strict=True)]
    shared = top(sum(rest) / len(rest), r1)
    return shared, [best_local(moment(y), shared, r2) for y in samples]


def exact_local(samples, shared, r2, rounds):
    """Alternating exact solver of (7), an oracle: its fixed points satisfy (24).

    V_i = top r2 eigenvectors of (I - P_U) S_i (I - P_U); U = top r1 eigenvectors of
    mean_i (I - P_Vi) S_i (I - P_Vi), and so on.
    """
    s = [moment(y) for y in samples]
    r1 = shared.shape[1]
    locals_ = [best_local(si, shared, r2) for si in s]
    for _ in range(rounds):
        shared = top(sum(deflate(si, v) for si, v in zip(s, locals_, strict=True)) / len(s), r1)
        locals_ = [best_local(si, shared, r2) for si in s]
    return shared, locals_


def robust_pca(m, weight=None, *, tolerance=1e-7, max_iterations=1000):
    """Principal component pursuit, M = L + E with min ||L||_* + weight ||E||_1.

    Candes, Li, Ma, Wright (2011), by the inexact augmented Lagrangian method: alternate
    singular-value shrinkage for L, entrywise shrinkage for E, and a multiplier step, with a
    penalty that grows geometrically.

    Args:
        m: matrix.
        weight: weight of the sparse part; default 1 / sqrt(max(m.shape)).
        tolerance: stop when ||M - L - E||_F <= tolerance ||M||_F.
        max_iterations: at most so many iterations.

    Returns:
        L and E.
    """
    weight = 1.0 / np.sqrt(max(m.shape)) if weight is None else weight
    spectral = np.linalg.norm(m, 2)
    multiplier = m / max(spectral, np.max(np.abs(m)) / weight)
    penalty, growth = 1.25 / spectral, 1.5
    sparse = np.zeros_like(m)
    low = np.zeros_like(m)
    for _ in range(max_iterations):
        left, values, right = np.linalg.svd(m - sparse + multiplier / penalty, full_matrices=False)
        low = (left * np.maximum(values - 1.0 / penalty, 0.0)) @ right
        rest = m - low + multiplier / penalty
        sparse = np.sign(rest) * np.maximum(np.abs(rest) - weight / penalty, 0.0)
        gap = m - low - sparse
        multiplier = multiplier + penalty * gap
        penalty = min(growth * penalty, 1e7 / spectral)
        if np.linalg.norm(gap) <= tolerance * np.linalg.norm(m):
            break
    return low, sparse
