r"""What a curious server learns of one client, and what noise guarantees that it does not.

**Attacks**, on the messages that an algorithm really sends.

The server follows the protocol, keeps what passes through its hands, and tries to compute one
client's matrix \(C_i = A_i A_i^\top\) from it:

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

**Guarantees**: `epsilon` and `noise_multiplier` account for the noise of `jaxfed.channel.gaussian`
by the package `dp-accounting`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jaxfed._optional import require
from jaxfed.core import aggregation, backend, channel, run
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.channel import triple as pair  # temporary
from jaxfed.core.clients import Clients, Samples
from jaxfed.core.rounds import begin, one_round, prepared
from jaxfed.linalg import Moment

Matrix = Float[np.ndarray, "features features"]
Frames = Float[np.ndarray, "rounds features rank"]


class Transcript(NamedTuple):
    """What passed between a server and one client, as NumPy arrays in double precision.

    Attributes:
        features: number of features.
        first: the client's message before the first round.
        first_total: the aggregate of all clients' first messages.
        received: what the server broadcast, leading axis = rounds.
        sent: what the client sent back, leading axis = rounds.
        total: the aggregate of all clients' messages, leading axis = rounds.
    """

    features: int
    first: PyTree
    first_total: PyTree
    received: PyTree
    sent: PyTree
    total: PyTree


def record(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    client: int = 0,
    warm_start: run.Solution | Personalized | None = None,
    channel: channel.Channels = channel.lossless(),
) -> Transcript:
    """Run an algorithm, and keep what one client and the server say to each other.

    The rounds are those of `jaxfed.rollout` with the same arguments. Messages are what the
    receiver makes of the payload, so that a channel's losses are in them; of a masked one, as if it
    were the sum.

    Args:
        algorithm: what to run.
        clients: whom to run it on; everybody takes part.
        rounds: how many rounds.
        key: random key.
        client: position of the client that is listened to.
        warm_start: as in `jaxfed.rollout`.
        channel: as in `jaxfed.rollout`.

    Returns:
        The messages.

    Raises:
        ValueError: if there is no such client, and as `jaxfed.rollout`.
    """
    if not isinstance(client, int | np.integer) or not 0 <= client < len(clients):
        raise ValueError(f"client: wanted a number below {len(clients)}, got {client!r}")
    up, down = pair(channel)
    tapped = _Tap(up), _Tap(down)
    problem, start = run.problem_of(
        algorithm, clients, rounds, key, warm_start, tapped, None, backend.vmap()
    )
    problem = _prepare(problem, rounds)
    first, first_total = _first(problem, start)
    received, sent, total = _double(_listened(problem, start, client, rounds))
    return Transcript(
        features=clients.features,
        first=_double(jax.tree.map(lambda x: x[client], first)),
        first_total=_double(first_total),
        received=received,
        sent=sent,
        total=total,
    )


class _Tapped(NamedTuple):
    inner: PyTree  # the channel's own memory
    follower: PyTree  # that of a receiver who follows this one sender
    seen: PyTree  # the last message


class _Tap(channel.Channel):
    """A channel that remembers the last message as its receiver understood it."""

    inner: channel.Channel

    @property
    def cumulative(self):
        return self.inner.cumulative

    @property
    def private(self):
        return self.inner.private

    @property
    def adds_up(self):
        return self.inner.adds_up

    def check(self, clients, participants, rules):
        self.inner.check(clients, participants, rules)

    def seated(self, memory, seat):
        return memory._replace(inner=self.inner.seated(memory.inner, seat))

    def memory(self, message):
        inner = self.inner.memory(message)
        return _Tapped(inner, inner, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message))

    def encode(self, key, message, memory):
        payload, inner = self.inner.encode(key, message, memory.inner)
        seen, follower = self.inner.receive(self.inner.decode(payload), memory.follower)
        return payload, _Tapped(inner, follower, seen)

    def decode(self, payload):
        return self.inner.decode(payload)

    def receive(self, decoded, memory):
        message, inner = self.inner.receive(decoded, memory.inner)
        return message, _Tapped(inner, memory.follower, message)


def _messages(problem, start, client: int, rounds: int) -> tuple[PyTree, PyTree, PyTree]:
    """Of each round the broadcast, what the client sent and the aggregate."""

    def listen(state, _):
        state, _ = one_round(problem, state)
        # What the tap remembers of the broadcast, at the client and at the aggregating server.
        own = jax.tree.map(lambda x: x[client], state.uplink_memory.seen)
        return state, (state.downlink_copy.seen, own, state.uplink_mean_memory.seen)

    state = begin(problem, start)
    # An aggregate need not look like a message: where messages are stacked, it has one for each.
    after = jax.eval_shape(lambda state: one_round(problem, state)[0], state)
    seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), after.uplink_mean_memory.seen)
    state = eqx.tree_at(lambda state: state.uplink_mean_memory.seen, state, seen)
    return jax.lax.scan(listen, state, length=rounds)[1]


def _first_messages(problem, start) -> tuple[PyTree, PyTree]:
    """Everybody's first message, and their aggregate."""
    rules, clients = problem.algorithm.start_aggregation, problem.clients
    key = jax.random.fold_in(problem.key, 0)

    def work(data, client_id, weight, local_start):
        own = None if start is None else Personalized(start.shared, local_start)
        message, _ = client_start(problem, key, data, own, client_id)
        return message, aggregation.split(rules, message, weight)

    local_start = None if start is None else start.local
    first, parts = jax.vmap(work)(clients.data, clients.ids, clients.weights, local_start)
    return first, aggregation.join(rules, backend.reduced(parts))


# Compiled once for all records of a shape.
_prepare, _first = jax.jit(prepared, static_argnums=1), jax.jit(_first_messages)
_listened = jax.jit(_messages, static_argnums=3)


def _double(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# ---------------------------------------------------------------------------------------------
# What noise guarantees.

Adjacency = Literal["replace", "zero_out"]


def epsilon(
    noise_multiplier: float,
    rounds: int,
    *,
    delta: float,
    participants: int | None = None,
    clients: int | None = None,
    adjacency: Adjacency = "replace",
) -> float:
    r"""The \(\varepsilon\) of a run whose uplink is `jaxfed.channel.gaussian`.

    The run's messages are \((\varepsilon, \delta)\)-differentially private with respect to all
    that one client has: any two data sets of a client give them nearly the same distribution.
    Single messages are, with `clients=1` in that channel; else only their sums are.

    With the number of participants, those of a round are drawn by `jaxfed.participation.uniform`,
    and \(\varepsilon\) is smaller, but only for who sees sums and does not know whose: not for the
    server that drew them. Leave the numbers out for that one.

    Not covered are the warm start, weights and settings, if the clients' data had a say in them;
    the history's diagnostics, which have no noise, and a tolerance that stops by them; the clients'
    own, personal results; and what is special to floating-point noise or, after `secure_sum`, to
    rounding and clipping noisy numbers.

    Args:
        noise_multiplier: z, the standard deviation of the noise over the norm that messages are
            clipped to, in each round.
        rounds: how many there are.
        delta: the probability that is tolerated of no guarantee, say below one over the number of
            clients.
        participants: how many of the clients are drawn in each round, without replacement.
        clients: how many there are.
        adjacency: what one client may do: `"replace"` its data by any other, or `"zero_out"` its
            messages, with all participating, which is half as far.

    Returns:
        \(\varepsilon\): exact where all take part, else an upper bound.

    Raises:
        ValueError: for arguments outside their ranges, and a zero-out together with a draw.
        ImportError: if dp-accounting is missing.

    Source: Balle & Wang (2018), Theorem 8, where all take part; else Wang, Balle & Kasiviswanathan
    (2019), Theorem 27.
    """
    _check_positive(noise_multiplier=noise_multiplier)
    share = _checked_share(rounds, delta, participants, clients, adjacency)
    return _epsilon(noise_multiplier, rounds, delta, share, adjacency)


def noise_multiplier(
    epsilon: float,
    rounds: int,
    *,
    delta: float,
    participants: int | None = None,
    clients: int | None = None,
    adjacency: Adjacency = "replace",
) -> float:
    r"""The noise multiplier that gives a run a wanted \(\varepsilon\), see `epsilon`.

    Args:
        epsilon: \(\varepsilon\), positive.
        rounds: as in `epsilon`, like all others.
        delta: as there.
        participants: as there.
        clients: as there.
        adjacency: as there.

    Returns:
        z: exact where all take part, else at most a thousandth above what is needed.

    Raises:
        ValueError: as there; in particular for an epsilon or a delta of zero, which no Gaussian
            noise has.
        ImportError: if dp-accounting is missing.
    """
    _check_positive(epsilon=epsilon)
    share = _checked_share(rounds, delta, participants, clients, adjacency)
    package = require("dp_accounting", extra="privacy")
    needed = package.get_sigma_gaussian(epsilon, delta) * _distance(adjacency) * rounds**0.5
    if share == 1:
        return needed
    enough = needed
    while _epsilon(enough / 2, rounds, delta, share, adjacency) <= epsilon:
        enough /= 2
    low = enough / 2
    while enough / low > 1.001:
        middle = (low * enough) ** 0.5
        if _epsilon(middle, rounds, delta, share, adjacency) <= epsilon:
            enough = middle
        else:
            low = middle
    return enough


def _epsilon(
    multiplier: float, rounds: int, delta: float, share: float, adjacency: Adjacency
) -> float:
    package = require("dp_accounting", extra="privacy")
    deviation = multiplier / _distance(adjacency)
    # As many rounds with this noise are one with so much less.
    known = package.get_epsilon_gaussian(deviation / rounds**0.5, delta)
    if share == 1 or known == 0:
        return float(known)
    rdp = require("dp_accounting.rdp", extra="privacy")
    accountant = rdp.RdpAccountant(neighboring_relation=package.NeighboringRelation.REPLACE_ONE)
    event = package.GaussianDpEvent(deviation)
    accountant.compose(package.SampledWithoutReplacementDpEvent(1, share, event), rounds)
    # The bound is loose where there is much noise, and a draw never harms.
    return float(min(known, accountant.get_epsilon(delta)))


def _distance(adjacency: Adjacency) -> int:
    """How far a client can move a sum of messages that are clipped to norm one."""
    return 2 if adjacency == "replace" else 1


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
            raise ValueError(f"{name}: wanted a positive number, got {value!r}")


def _checked_share(rounds, delta, participants, clients, adjacency) -> float:
    """The share of clients that take part, once all that says what is asked is checked."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds: wanted a positive whole number, got {rounds!r}")
    if not isinstance(delta, int | float) or not 0 < delta < 1:
        raise ValueError(f"delta: wanted a number between 0 and 1, got {delta!r}")
    if adjacency not in ("replace", "zero_out"):
        raise ValueError(f"adjacency: wanted one of replace, zero_out, got {adjacency!r}")
    if participants is None and clients is None:
        return 1.0
    if not (isinstance(participants, int) and isinstance(clients, int)) or not (
        1 <= participants <= clients
    ):
        raise ValueError(
            "participants, clients: wanted two whole numbers, the first from 1 to the second, got "
            f"{participants!r} and {clients!r}"
        )
    if participants < clients and adjacency != "replace":
        raise ValueError(
            f"adjacency: wanted replace where {participants} of {clients} clients are drawn, "
            f"got {adjacency!r}"
        )
    return participants / clients


# ---------------------------------------------------------------------------------------------
# What the server wants to know, and how near it comes.


def client_matrix(clients: Clients, client: int = 0) -> Matrix:
    """The secret: one client's sum of products, `C_i = A_i A_iᵀ`, in double precision."""
    data: Any = jax.tree.map(lambda x: x[client], clients.data)
    if isinstance(data, Samples):
        rows = np.asarray(data.values, np.float64)
        return rows.T @ rows
    moment: Moment = data
    return np.asarray(moment.matrix(), np.float64) * float(moment.count)


def public_guess(clients: Clients, client: int = 0) -> float:
    """Error of the pooled matrix over the number of clients, as a guess at one client's."""
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
    channel: channel.Channels = channel.lossless(),
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
    rank = getattr(algorithm, "rank", None) or getattr(algorithm, "shared_rank", None)
    if rank is None:
        raise ValueError(f"algorithm: {type(algorithm).__name__} has no shared components")
    features = clients.features
    number = -(-features // rank) if restarts is None else restarts
    dtype = clients.weights.dtype
    inputs, outputs = [], []
    for own in jax.random.split(key, number):
        chosen = jnp.linalg.qr(jax.random.normal(own, (features, rank), dtype))[0]
        start = Personalized(chosen, jnp.zeros((len(clients), features, 0), dtype))
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
        if leaf.ndim == 3 or leaf.size == 0:  # a stack has every single client's message
            continue
        if leaf.shape == (features, features):
            guess = leaf
        elif leaf.ndim == 2 and len(leaf) == features:
            guess = leaf @ leaf.T
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
    """Parts of broadcast and answer of the same shape, frames of the features."""

    def frames(tree):
        return [
            leaf
            for leaf in jax.tree.leaves(tree)
            if leaf.ndim == 3 and leaf.shape[1] == transcript.features and leaf.shape[2] > 0
        ]

    answers = frames(transcript.total if summed else transcript.sent)
    return [
        (asked, answer)
        for asked in frames(transcript.received)
        for answer in answers
        if asked.shape == answer.shape
    ]
