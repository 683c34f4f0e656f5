"""A round of PerPCA as its authors compute it: NumPy, one client after another.

Written anew after the published scripts. It keeps the operations that determine their cost, even
where cheaper ones exist: it recomputes the second moment of every client in every round, computes
the polar factor from a full d × d singular value decomposition and a product with a d × r rectangle
that has ones on its diagonal, copies U for every client, and evaluates a loss that orthonormalizes
[U, V_i] column by column in Python and projects the samples through a d × d matrix.

Run it with one BLAS thread (`OPENBLAS_NUM_THREADS=1`), because more threads slow small products
down. As a script, it prints the processor time of a round at three sizes.
"""

import copy

import numpy as np


def authors_round(samples, U, Vs, eta, with_loss, variant="tangent"):
    """One round of Algorithm 2 of Shi & Kontar (2024).

    Args:
        samples: list of `(n_i, d)` arrays.
        U: shared components, `(d, r1)`.
        Vs: list of local components, `(d, r2)`.
        eta: step size for `S_i W`. The published scripts ascend along `2 S_i W` with half of it.
        with_loss: also evaluate the loss after the round, as the published scripts always do.
        variant: "tangent" (choice 1) or "polar" (choice 2).

    Returns:
        New U, new list of V_i (to be deflated by their next round), and the loss or None.
    """
    copies = [copy.deepcopy(U) for _ in samples]
    new_locals = []
    for k, y in enumerate(samples):
        copies[k], v = _client(y, copies[k], Vs[k], eta / 2, variant)
        new_locals.append(v)
    shared = np.linalg.qr(sum(copies) / len(samples))[0]
    # LAPACK's sign of the columns; the span, and with it the next round, does not depend on it.
    loss = _loss(samples, shared, new_locals) if with_loss else None
    return shared, new_locals, loss


def _client(y, u, v, eta, variant):
    s = y.T @ y / len(y)
    v = _polar(v - u @ u.T @ v)
    r1 = u.shape[1]
    w = np.concatenate((u, v), axis=1)
    descent = -2 * s @ w
    if variant == "tangent":
        w = w - eta * (descent - w @ (descent.T @ w + w.T @ descent) / 2)
        return w[:, :r1], _polar(w[:, r1:])
    w = _polar(w - eta * descent)
    return w[:, :r1], w[:, r1:]


def _polar(w):
    left, _, right = np.linalg.svd(w, full_matrices=True)
    return left @ np.eye(*w.shape) @ right


def _loss(samples, u, locals_):
    squared = 0.0
    for y, v in zip(samples, locals_, strict=True):
        basis = _gram_schmidt(np.concatenate((u, v), axis=1))
        squared += np.sum((y.T - basis @ basis.T @ y.T) ** 2)
    return squared / sum(map(len, samples))


def _gram_schmidt(basis):
    columns = basis.T
    for i, column in enumerate(columns):
        for earlier in columns[:i]:
            column -= (column * earlier).sum() * earlier
        column /= np.sqrt((column**2).sum())
    return basis


def main() -> None:
    """Processor milliseconds of a round, the least and the median of some rounds."""
    import time

    for m, n, d, r1, r2 in ((100, 1000, 15, 2, 10), (100, 200, 100, 5, 5), (50, 120, 784, 10, 10)):
        rng = np.random.default_rng(0)
        samples = [rng.standard_normal((n, d)) for _ in range(m)]
        start = np.linalg.qr(rng.standard_normal((d, r1)))[0]
        for variant in ("tangent", "polar"):
            for with_loss in (False, True):
                u, locals_ = start, [rng.standard_normal((d, r2)) for _ in range(m)]
                spent = []
                for _ in range(5 if d > 500 else 15):
                    before = time.process_time()
                    u, locals_, _ = authors_round(samples, u, locals_, 0.05, with_loss, variant)
                    spent.append(1e3 * (time.process_time() - before))
                print(
                    f"{(m, n, d, r1, r2)!s:26} {variant:8} loss {with_loss!s:6}"
                    f"min {min(spent):8.1f}  median {np.median(spent):8.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
