r"""What a curious server learns of one client, from the messages that an algorithm really sends.

For research. The server follows the protocol, keeps what passes through its hands, and tries to
compute one client's matrix \(C_i = A_i A_i^\top\) from it:

* **linear reconstruction** (`linear_attack`): take every message for a product,
  \(Y_k = C_i Z_k\), and solve for the matrix of minimum norm. Exact once the \(Z_k\) span all
  features, if the messages are products;
* **restarts** (`restart_attack`): the same, but the server chooses the \(Z_k\), by starting the
  protocol again and again and looking at the first round only, where also messages that hide the
  part of the product within the span of \(Z_k\) determine the matrix up to a multiple of the
  identity;
* **first messages** (`first_message_attack`): some algorithms send a second moment, or a factor
  of one, before the first round;
* **norms** (`norm_leak`): a multiplier or a step size can tell \(|A_i|_2^2\).

Under secure summation the server sees only the sum over the clients; `summed=True` runs the same
attack on that. A client's share of the sum cannot be told apart, whatever the algorithm, but the
sum itself may be all of the pooled matrix.

Errors are \(|\Phi - C_i|_F / |C_i|_F\). An error of one is no knowledge at all; when clients are
alike, the pooled matrix over the number of clients (`public_guess`) is a guess to compare with.

Source: Wang, Liu & Zhang (2022), Seeking consensus on subspaces in federated principal component
analysis, Proposition 2 and the problem before it. The attacks are not the strongest conceivable:
a small error proves a leak, a large one proves nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxfed import channel
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.common.checks import (
    check_flag,
    check_instance,
    check_positive,
    check_whole,
    checked_key,
    checked_table,
    host_array,
    is_real,
    refuse,
)
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.linalg import Moment
from jaxfed.privacy.transcript import LOSSLESS, Transcript, check_client, record

Matrix = Float[np.ndarray, "features features"]
Frames = Float[np.ndarray, "rounds features rank"]

# ---------------------------------------------------------------------------------------------
# What the server wants to know, and how near it comes.


def _checked_frames(inputs: Frames, outputs: Frames) -> tuple[Frames, Frames]:
    """What was sent and what came back, on the host; refused where the two do not fit."""
    found = []
    for name, given in (("inputs", inputs), ("outputs", outputs)):
        wanted = "numbers of shape (rounds, features, rank)"
        frames = host_array(name, given, wanted)
        if not is_real(frames.dtype) or frames.ndim != 3 or not frames.size:
            raise refuse(name, wanted, given)
        found.append(frames)
    if found[0].shape != found[1].shape:
        raise refuse("outputs", f"the shape {found[0].shape} of inputs", outputs)
    return found[0], found[1]


def client_matrix(clients: Clients, client: int = 0) -> Matrix:
    """The secret: one client's sum of products, `C_i = A_i A_iᵀ`, in double precision."""
    check_client(clients, client)
    data: Any = jax.tree.map(lambda x: x[client], clients.data)
    if isinstance(data, Samples):
        rows = np.asarray(data.values, np.float64)
        return rows.T @ rows
    moment: Moment = data
    return np.asarray(moment.matrix(), np.float64) * float(moment.count)


def public_guess(clients: Clients, client: int = 0) -> float:
    """Error of the pooled matrix over the number of clients, as a guess at one client's."""
    check_client(clients, client)
    matrices = [client_matrix(clients, i) for i in range(len(clients))]
    return relative_error(np.mean(matrices, axis=0), matrices[client])


def relative_error(estimate: Matrix, truth: Matrix, *, calibrated: bool = False) -> float:
    r"""Error of an estimate, \(|\Phi - C|_F / |C|_F\).

    Args:
        estimate: \(\Phi\).
        truth: C.
        calibrated: that of the best \(a \Phi + b I\) instead, as if the attacker knew two numbers
            more; it is never above one.

    Returns:
        The error; NaN if the truth is zero.
    """
    truth = checked_table("truth", truth)
    estimate = checked_table("estimate", estimate)
    if estimate.shape != truth.shape:
        raise refuse("estimate", f"the shape {truth.shape} of truth", estimate)
    check_flag("calibrated", calibrated)
    norm = np.linalg.norm(truth)
    if norm == 0:
        return float("nan")
    if calibrated:
        terms = np.stack([estimate.ravel(), np.eye(len(truth)).ravel()], axis=1)
        weights = np.linalg.lstsq(terms, truth.ravel(), rcond=None)[0]
        estimate = (terms @ weights).reshape(truth.shape)
    return float(np.linalg.norm(estimate - truth) / norm)


# ---------------------------------------------------------------------------------------------
# Attacks.


def minimum_norm(inputs: Frames, outputs: Frames) -> Matrix:
    r"""The matrix \(\Phi\) of least Frobenius norm with \(\Phi Z_k = Y_k\) for all k.

    Args:
        inputs: the \(Z_k\).
        outputs: the \(Y_k\).

    Returns:
        \(\Phi\), symmetric or not; in the sense of least squares where there is none.

    Source: Wang, Liu & Zhang (2022), Section 1.1.
    """
    inputs, outputs = _checked_frames(inputs, outputs)
    z, y = np.concatenate(list(inputs), axis=1), np.concatenate(list(outputs), axis=1)
    # The blocks of converging methods are nearly dependent, and every digit counts.
    return np.linalg.lstsq(z.T, y.T, rcond=np.finfo(z.dtype).eps)[0].T


def outside_span(inputs: Frames, outputs: Frames, *, tol: float = 1e-11) -> Matrix:
    r"""The symmetric \(\Phi\) with \((I - Z_k Z_k^\top) \Phi Z_k = (I - Z_k Z_k^\top) Y_k\).

    For messages that are products but for something within the span of \(Z_k\). Multiples of the
    identity are in the null space of these equations: the trace is set to zero.

    Args:
        inputs: the \(Z_k\), with orthonormal columns.
        outputs: the \(Y_k\).
        tol: of the conjugate gradients, relative.

    Returns:
        \(\Phi\), in the sense of least squares.
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

    wanted = adjoint(outputs)
    phi, rest = np.zeros_like(wanted), wanted
    direction, square = rest, np.sum(rest**2)
    enough = tol**2 * square
    for _ in range(10 * len(wanted)):
        if square <= enough:
            break
        image = adjoint(products(direction))
        step = square / np.sum(direction * image)
        phi, rest = phi + step * direction, rest - step * image
        previous, square = square, np.sum(rest**2)
        direction = rest + square / previous * direction
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

    Every part of a message that has the shape of a part of the broadcast is tried; the errors are
    those of the part that gives most away in the end.

    Args:
        transcript: the messages.
        truth: the client's matrix, from `client_matrix`.
        summed: use the aggregate in place of the client's own messages.
        calibrated: see `relative_error`.
        at: after which rounds, counted from one; by default all that are not skipped.
        skip: leave out so many of the first rounds, where messages are known to be no products,
            as those of `LocalPower` with several local steps.

    Returns:
        One error for each of these rounds; NaN if no message has such a shape.
    """
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
    r"""Error of the reconstruction from first rounds with starts that the server chooses.

    Both `minimum_norm` and `outside_span` are tried.

    Args:
        algorithm: one that takes a warm start with `algorithm.rank` shared components, or
            `shared_rank`.
        clients: whom to attack.
        key: random key, also of the chosen starts.
        client: position of the client.
        restarts: how many; by default as many as span all features.
        summed: use the aggregates in place of the client's own messages.
        calibrated: see `relative_error`.
        norm_factor: what the server makes of calibration by itself where messages contain
            \(\beta Z\) with \(\beta\) this multiple of \(|A_i|_2^2\), as those of `FAPS`: the
            multiple of the identity is chosen so that the largest eigenvalue is right.
        channel: as in `record`.

    Returns:
        The smaller error.

    Raises:
        ValueError: if the algorithm has no rank, and as `record`.
    """
    check_instance("algorithm", algorithm, Algorithm, "a jaxfed algorithm")
    check_client(clients, client)
    key = checked_key("key", key)
    check_whole("restarts", 1 if restarts is None else restarts)
    check_flag("summed", summed)
    check_flag("calibrated", calibrated)
    check_positive("norm_factor", norm_factor, optional=True, single=True)
    checked_wire(channel)
    rank = getattr(algorithm, "rank", None) or getattr(algorithm, "shared_rank", None)
    if rank is None:
        raise ValueError(f"algorithm: {type(algorithm).__name__} has no shared components")
    features = clients.features
    number = -(-features // rank) if restarts is None else restarts
    dtype = clients.weights.dtype
    inputs, outputs = [], []
    for own in jax.random.split(key, number):
        chosen = jnp.linalg.qr(jax.random.normal(own, (features, rank), dtype))[0]
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
        within = np.mean([np.trace(a.T @ b) / rank for a, b in zip(z, y, strict=True)])
        shift = within / norm_factor - np.linalg.eigvalsh(guesses[1])[-1]
        guesses[1] = guesses[1] + shift * np.eye(features)
        calibrated = False
    return min(relative_error(guess, truth, calibrated=calibrated) for guess in guesses)


def first_message_attack(transcript: Transcript, truth: Matrix, *, summed: bool = False) -> float:
    """Error of what the message before the first round says of the client's matrix.

    Parts that are symmetric matrices, packed triangles of one, or thin factors are tried.

    Args:
        transcript: the messages.
        truth: the client's matrix.
        summed: use the aggregate in place of the client's own message.

    Returns:
        The smallest error up to scale and a multiple of the identity; one if nothing is sent.
    """
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
        factor: the messages are taken to have \(Z^\top Y = \beta I\) in the end, with \(\beta\)
            this multiple of \(|A_i|_2^2\), as those of `FAPS` with `penalty=factor`.
        summed: use the aggregates in place of the client's own messages.

    Returns:
        The smallest relative error over the numbers that are sent and the two norms.
    """
    norms = np.array([np.trace(truth), np.linalg.eigvalsh(truth)[-1]])
    messages = (
        (transcript.first_total, transcript.total)
        if summed
        else (transcript.first, transcript.sent)
    )
    guesses = [leaf for leaf in jax.tree.leaves(messages[0]) if leaf.ndim == 0]
    if factor is not None:
        for z, y in _frames(transcript, summed):
            guesses += [np.median(np.diag(a.T @ b)) / factor for a, b in zip(z, y, strict=True)]
    errors = [np.abs(guess / norms - 1).min() for guess in guesses if norms.min() > 0]
    return float(min(errors, default=np.inf))


def _rounds(transcript: Transcript) -> range:
    return range(1, len(jax.tree.leaves(transcript.received)[0]) + 1)


def _frames(transcript: Transcript, summed: bool) -> list[tuple[Frames, Frames]]:
    """Parts of broadcast and answer of the same shape that are frames, features first."""

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
