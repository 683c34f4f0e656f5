r"""What an honest but curious server can compute about one client from an algorithm's messages.

For research. The server follows the protocol, records all messages, and tries to compute one
client's matrix \(C_i = A_i A_i^\top\):

* **linear reconstruction** (`linear_attack`): assume that every message is a product,
  \(Y_k = C_i Z_k\), and solve for the matrix of minimum norm. This is exact if messages are
  products and the \(Z_k\) span all features;
* **restarts** (`restart_attack`): the server chooses the \(Z_k\), by restarting the protocol many
  times and using only first rounds. Even messages that hide the part of the product within the
  span of \(Z_k\) then determine the matrix up to a multiple of the identity;
* **first messages** (`first_message_attack`): some algorithms send a second moment or a factor of
  it before the first round;
* **norms** (`norm_leak`): a multiplier or a step size can reveal \(|A_i|_2^2\).

Under secure summation, the server sees only sums over the clients; `summed=True` attacks these. A
client's share of a sum is hidden, but the sum may reveal the whole pooled matrix.

Errors are \(|\Phi - C_i|_F / |C_i|_F\). An error of one means that nothing was learned. If clients
are similar, compare with the error of the pooled matrix divided by the number of clients
(`public_guess`).

Source: Wang, Liu & Zhang (2022), Seeking consensus on subspaces in federated principal component
analysis, Proposition 2 and the problem before it. Stronger attacks may exist: a small error proves
a leak, but a large one proves nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jaxtyping import Array, Float, Key

from jaxfed import channel
from jaxfed._checks import (
    check_instance,
    check_positive,
    check_whole,
    checked_table,
    host_array,
    is_real,
    refuse,
)
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.wire.wire import Wire
from jaxfed.linalg import Moment
from jaxfed.privacy.transcript import LOSSLESS, Transcript, check_client, record

Matrix = Float[np.ndarray, "features features"]
Frames = Float[np.ndarray, "rounds features rank"]

# ---------------------------------------------------------------------------------------------
# The secret, and errors of guesses at it.


def _checked_frames(inputs: Frames, outputs: Frames) -> tuple[Frames, Frames]:
    wanted = "numbers of shape (rounds, features, rank)"
    z, y = host_array("inputs", inputs, wanted), host_array("outputs", outputs, wanted)
    for name, frames in (("inputs", z), ("outputs", y)):
        if not is_real(frames.dtype) or frames.ndim != 3 or not frames.size:
            raise refuse(name, wanted, frames)
    if z.shape != y.shape:
        raise refuse("outputs", f"the shape {z.shape} of inputs", outputs)
    return z, y


def client_matrix(clients: Clients, client: int = 0) -> Matrix:
    """The secret: one client's matrix `C_i = A_i A_iᵀ`, in double precision."""
    check_client(clients, client)
    data: Any = jax.tree.map(lambda x: x[client], clients.data)
    if isinstance(data, Samples):
        rows = np.asarray(data.values, np.float64)
        return rows.T @ rows
    moment: Moment = data
    return np.asarray(moment.matrix(), np.float64) * float(moment.count)


def public_guess(clients: Clients, client: int = 0) -> float:
    """Error of the pooled matrix, divided by the number of clients, as a guess at one client's."""
    check_client(clients, client)
    matrices = [client_matrix(clients, i) for i in range(len(clients))]
    return relative_error(np.mean(matrices, axis=0), matrices[client])


def _check_transcript(transcript: object) -> None:
    check_instance("transcript", transcript, Transcript, "what jaxfed.privacy.record returned")


def relative_error(estimate: Matrix, truth: Matrix, *, calibrated: bool = False) -> float:
    r"""Error of an estimate, \(|\Phi - C|_F / |C|_F\).

    Args:
        estimate: \(\Phi\).
        truth: C.
        calibrated: use the best \(a \Phi + b I\) instead, as if the attacker knew two more numbers;
            this error is never above one.

    Returns:
        The error; NaN if the truth is zero.
    """
    truth = checked_table("truth", truth)
    estimate = checked_table("estimate", estimate)
    if estimate.shape != truth.shape:
        raise refuse("estimate", f"the shape {truth.shape} of truth", estimate)
    norm = np.linalg.norm(truth)
    if norm == 0:
        return float("nan")
    if calibrated:
        # Of similar lengths, so that a small estimate is not taken for rounding.
        unit = np.abs(estimate).max(initial=0)
        terms = np.stack([(estimate / (unit or 1)).ravel(), np.eye(len(truth)).ravel()], axis=1)
        weights = np.linalg.lstsq(terms, truth.ravel(), rcond=None)[0]
        estimate = (terms @ weights).reshape(truth.shape)
    return float(np.linalg.norm(estimate - truth) / norm)


# ---------------------------------------------------------------------------------------------
# Attacks.


def minimum_norm(inputs: Frames, outputs: Frames) -> Matrix:
    r"""The matrix \(\Phi\) of minimum Frobenius norm with \(\Phi Z_k = Y_k\) for all k.

    Args:
        inputs: the \(Z_k\).
        outputs: the \(Y_k\).

    Returns:
        \(\Phi\), which need not be symmetric; a least-squares solution if there is no exact one.

    Source: Wang, Liu & Zhang (2022), Section 1.1.
    """
    inputs, outputs = _checked_frames(inputs, outputs)
    z, y = np.concatenate(list(inputs), axis=1), np.concatenate(list(outputs), axis=1)
    # The blocks of converging methods are nearly dependent, so keep the smallest singular values.
    return np.linalg.lstsq(z.T, y.T, rcond=np.finfo(z.dtype).eps)[0].T


def outside_span(inputs: Frames, outputs: Frames, *, tol: float = 1e-11) -> Matrix:
    r"""The symmetric \(\Phi\) with \((I - Z_k Z_k^\top) \Phi Z_k = (I - Z_k Z_k^\top) Y_k\).

    For messages that differ from products only within the span of \(Z_k\). Multiples of the
    identity solve the homogeneous equations, so the trace is set to zero.

    Args:
        inputs: the \(Z_k\), with orthonormal columns.
        outputs: the \(Y_k\).
        tol: relative tolerance of the conjugate gradients.

    Returns:
        \(\Phi\), a least-squares solution.
    """
    inputs, outputs = _checked_frames(inputs, outputs)
    check_positive("tol", tol, single=True)
    side_by_side = np.concatenate(list(inputs), axis=1)

    def adjoint(frames):
        apart = frames - inputs @ (inputs.mT @ frames)
        total = np.concatenate(list(apart), axis=1) @ side_by_side.T
        return (total + total.T) / 2

    def products(matrix):
        both = matrix @ side_by_side
        return np.moveaxis(both.reshape(len(both), *inputs.shape[::2]), 1, 0)

    def normal(vector):
        return adjoint(products(vector.reshape(wanted.shape))).ravel()

    # The normal equations in operator form: as a matrix they would have features^4 entries.
    wanted = adjoint(outputs)
    equations: Any = scipy.sparse.linalg.LinearOperator((wanted.size,) * 2, normal)
    solution, _ = scipy.sparse.linalg.cg(
        equations, wanted.ravel(), rtol=tol, maxiter=10 * len(wanted)
    )
    phi = solution.reshape(wanted.shape)
    return phi - np.trace(phi) / len(phi) * np.eye(len(phi))


def linear_attack(
    transcript: Transcript,
    truth: Matrix,
    *,
    summed: bool = False,
    calibrated: bool = False,
    at: Sequence[int] | None = None,
    skip: int = 0,
) -> Float[np.ndarray, " rounds"]:
    """Error of the linear reconstruction after each round.

    Tries every part of a message that has the shape of a part of the broadcast, and returns the
    errors of the part that reveals most in the end.

    Args:
        transcript: the messages.
        truth: the client's matrix, from `client_matrix`.
        summed: attack the aggregate instead of the client's messages.
        calibrated: see `relative_error`.
        at: rounds after which to compute the error, counted from one; by default all.
        skip: number of first rounds to ignore, in which messages are known not to be products, as
            in `LocalPower` with several local steps.

    Returns:
        One error per round; NaN if no message has such a shape.
    """
    _check_transcript(transcript)
    pairs = _frames(transcript, summed)
    rounds = list(_rounds(transcript))[skip:] if at is None else list(at)
    errors = [
        [
            relative_error(minimum_norm(z[skip:k], y[skip:k]), truth, calibrated=calibrated)
            for k in rounds
        ]
        for z, y in pairs
    ]
    return np.asarray(min(errors, key=lambda e: min(e), default=[np.nan] * len(rounds)))


def restart_attack(
    algorithm: Algorithm,
    clients: Clients,
    *,
    key: Key[Array, ""],
    client: int = 0,
    restarts: int | None = None,
    summed: bool = False,
    calibrated: bool = True,
    norm_factor: float | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
) -> float:
    r"""Error of the reconstruction from first rounds with starts chosen by the server.

    Tries both `minimum_norm` and `outside_span`.

    Args:
        algorithm: takes a warm start with `algorithm.rank` or `shared_rank` shared components.
        clients: the clients of the run.
        key: random key, also of the chosen starts.
        client: position of the client to attack.
        restarts: number of restarts; by default enough to span all features.
        summed: attack the aggregates instead of the client's messages.
        calibrated: see `relative_error`.
        norm_factor: set this if messages contain \(\beta Z\) with \(\beta\) this multiple of
            \(|A_i|_2^2\), like those of `FAPS`. The server then calibrates by itself: it
            chooses the multiple of the identity that gives the right largest eigenvalue.
        channel: as in `record`.

    Returns:
        The smaller error.

    Raises:
        ValueError: if the algorithm has no rank, and as in `record`.
    """
    check_client(clients, client)
    check_whole("restarts", 1 if restarts is None else restarts)
    check_positive("norm_factor", norm_factor, optional=True, single=True)
    rank = getattr(algorithm, "rank", None) or getattr(algorithm, "shared_rank", None)
    if rank is None:
        raise ValueError(f"algorithm: {type(algorithm).__name__} has no shared components")
    features = clients.features
    number = -(-features // rank) if restarts is None else restarts
    dtype = clients.weights.dtype
    inputs, outputs = [], []
    for start_key in jax.random.split(key, number):
        chosen = jnp.linalg.qr(jax.random.normal(start_key, (features, rank), dtype))[0]
        start = Personalized(chosen, None)
        transcript = record(
            algorithm, clients, rounds=1, key=key, client=client, warm_start=start, channel=channel
        )
        pairs = _frames(transcript, summed)
        if not pairs:
            return float("nan")
        inputs.append(pairs[0][0][0])
        outputs.append(pairs[0][1][0])
    z, y = np.stack(inputs), np.stack(outputs)
    truth = client_matrix(clients, client)
    guesses = [minimum_norm(z, y), outside_span(z, y)]
    if norm_factor is not None:
        # Messages contain βZ, so the trace of ZᵀY over the rank is β in the mean.
        within = np.mean([np.trace(a.T @ b) / rank for a, b in zip(z, y, strict=True)])
        shift = within / norm_factor - np.linalg.eigvalsh(guesses[1])[-1]
        guesses[1] = guesses[1] + shift * np.eye(features)
        calibrated = False
    return min(relative_error(guess, truth, calibrated=calibrated) for guess in guesses)


def first_message_attack(transcript: Transcript, truth: Matrix, *, summed: bool = False) -> float:
    """Error of the client's matrix as revealed by the message before the first round.

    Tries parts that are symmetric matrices, packed triangles of one, or thin factors.

    Args:
        transcript: the messages.
        truth: the client's matrix.
        summed: attack the aggregate instead of the client's message.

    Returns:
        The smallest error, up to scale and a multiple of the identity; one if nothing is sent.
    """
    _check_transcript(transcript)
    features = transcript.features
    errors = [1.0]
    for leaf in jax.tree.leaves(transcript.first_total if summed else transcript.first):
        if leaf.shape == (features, features):
            guess = leaf
        elif leaf.ndim == 2 and features in leaf.shape:
            factor = leaf if len(leaf) == features else leaf.T
            guess = factor @ factor.T
        elif leaf.shape == (features * (features + 1) // 2,):
            guess = np.zeros((features, features))
            guess[np.triu_indices(features)] = leaf
            guess = guess + np.triu(guess, 1).T
        else:
            continue
        errors.append(relative_error(guess, truth, calibrated=True))
    return min(errors)


def norm_leak(
    transcript: Transcript, truth: Matrix, *, factor: float | None = None, summed: bool = False
) -> float:
    r"""Relative error of the best guess at \(|A_i|_F^2\), \(|A_i|_2^2\) or their means.

    Args:
        transcript: the messages.
        truth: the client's matrix.
        factor: assume that messages converge to \(Z^\top Y = \beta I\) with \(\beta\) this multiple
            of \(|A_i|_2^2\), as in `FAPS` with `penalty=factor`.
        summed: attack the aggregates instead of the client's messages.

    Returns:
        The smallest relative error over all numbers sent and the two norms.
    """
    _check_transcript(transcript)
    truth = checked_table("truth", truth)
    norms = np.array([np.trace(truth), np.linalg.eigvalsh(truth)[-1]])
    messages = (
        (transcript.first_total, transcript.total)
        if summed
        else (transcript.first, transcript.sent)
    )
    # Any single number that is sent may be one of the norms.
    guesses = [leaf for leaf in jax.tree.leaves(messages[0]) if leaf.ndim == 0]
    if factor is not None:
        for z, y in _frames(transcript, summed):
            guesses += [np.median(np.diag(a.T @ b)) / factor for a, b in zip(z, y, strict=True)]
    errors = [np.abs(guess / norms - 1).min() for guess in guesses if norms.min() > 0]
    return float(min(errors, default=np.inf))


def _rounds(transcript: Transcript) -> range:
    return range(1, len(jax.tree.leaves(transcript.received)[0]) + 1)


def _frames(transcript: Transcript, summed: bool) -> list[tuple[Frames, Frames]]:
    """Pairs of frames of the same shape in broadcasts and answers, with the feature axis first."""

    def frames(tree):
        turned = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 3]
        turned = [x if x.shape[1] == transcript.features else x.mT for x in turned]
        return [x for x in turned if x.shape[1] == transcript.features]

    answers = frames(transcript.total if summed else transcript.sent)
    return [
        (asked, answer)
        for asked in frames(transcript.received)
        for answer in answers
        if asked.shape == answer.shape
    ]
