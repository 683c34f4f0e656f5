"""Triple component matrix factorization: shared, local and sparse parts of the clients' matrices.

min over U, U_i, V_i, W_i, S_i of  mean_i [ ‖Y_i - V_i Uᵀ - W_i U_iᵀ - S_i‖² + λ² ‖S_i‖₀ ] / 2
    with Uᵀ U_i = 0,

where the rows of Y_i are a client's samples and ‖S‖₀ is the number of entries that are not zero.
Errors are summed over observed entries.

Source: Shi, Fattahi & Al Kontar (2024), Triple component matrix factorization: untangling global,
local, and noisy components, JMLR 25.
"""

from typing import NamedTuple, Self, final, get_args

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxfed._checks import check_number
from jaxfed.contract import (
    Bases,
    check_count,
    check_factor,
    check_name,
    check_positive,
    hyperparameter,
)
from jaxfed.core.clients import samples
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca._shared_and_local import SharedAndLocal
from jaxfed.pca._starts import StartName, first_shared, start_message
from jaxfed.pca.components import (
    Rows,
    best_local,
    check_room,
    check_warm_start,
    deflate,
    mean_energies,
    multiplied,
    retract,
    warn_of_few,
)

Scalar = Float[Array, ""]
Table = Float[Array, "samples features"]

# The automatic first threshold, in multiples of the upper quartile of a client's magnitudes without
# zeros: of normal numbers it is 3.5 standard deviations.
FIRST = 3.0


class TCMFMember(NamedTuple):
    """ONE client's prepared data."""

    values: Table  # missing entries are zero
    observed: Bool[Array, "samples features"]
    first_threshold: Scalar


class TCMFLocal(NamedTuple):
    """ONE client's state.

    Attributes:
        cleaned: the samples without the sparse part; entries in that, and missing ones, are those
            of the low-rank parts.
        threshold: magnitude above which an error belongs to the sparse part.
        rounds: number of rounds so far; None if every round renews the sparse part.
    """

    cleaned: Table
    threshold: Scalar
    rounds: Int[Array, ""] | None


@final
class TCMF(SharedAndLocal):
    r"""Triple component matrix factorization by alternating minimization.

    A client's matrix of samples is \(Y \approx V U^\top + W U_i^\top + S\), with shared components
    U, local components \(U_i\) orthogonal to them, the client's scores V and W, and a sparse part S
    of gross errors or anomalies. Alternately, all clients factorize \(Y - S\) together, and each
    moves to S what the factors miss by more than a threshold \(\lambda\), which falls:

    .. math::

        S \leftarrow \mathrm{hard}_\lambda(Y - V U^\top - W U_i^\top), \qquad
        \lambda \leftarrow \rho \lambda + (1 - \rho) \lambda_\infty

    In a round of the factorization, a client computes its best local components and scores beside
    U, the top eigenvectors of the deflated \((Y - S)^\top (Y - S)\), and the server takes a step of
    orthogonal iteration, as in `PerPCA(solver="gradient", variant="power")`:
    \(U \leftarrow GR(\mathrm{mean} (I - U_i U_i^\top) (Y - S)^\top (Y - S) U)\).

    Samples may have missing entries (`Clients.from_samples(missing="mask")`), which count as errors
    that are known in advance. At a solution, entries in S have no influence: the factors are those
    of `HMF` with these entries missing.

    `solution.local.cleaned` holds the clients' samples without S, `(clients, samples, features)`;
    entries in S, and missing ones, are those of the low-rank parts. So S is
    `samples - solution.local.cleaned`, and the data may not be in buckets.

    `robust_pca` splits a single matrix into a low-rank and a sparse part.

    Source: Shi, Fattahi & Al Kontar (2024), Algorithm 1, with \(\varepsilon = (1 - \rho)
    \lambda_\infty\). The paper takes any solver of the joint factorization. The automatic first
    thresholds, which differ between clients, are not in the paper.
    """

    threshold: Float[Array, ""]
    first_threshold: Float[Array, ""] | None
    decay: Float[Array, ""]
    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)
    inner_rounds: int = eqx.field(static=True)
    start: StartName = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int,
        threshold: float | Array,
        *,
        first_threshold: float | Array | None = None,
        decay: float | Array = 0.9,
        inner_rounds: int = 1,
        start: StartName = "common",
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.
            threshold: final threshold, in units of the data: the smallest gross error. Set it above
                the noise, for example to four of its standard deviations. For samples without
                noise, 0 recovers the parts exactly; errors then fall at the rate of `decay`.
            first_threshold: threshold before the first round, in units of the data. It should be
                about the largest magnitude of the low-rank parts: below, large entries of these
                count as errors at first; far above, the first components fit the errors. By
                default each client uses three times the upper quartile of its magnitudes, without
                zeros, which errors in less than a quarter of the entries hardly change.
            decay: factor ρ between thresholds, below 1. The nearer to 1, the more rounds, and the
                more errors it withstands.
            inner_rounds: number of rounds of the factorization per threshold. With many, the
                factorization converges in between.
            start: where to start without a warm start, as in `PerPCA`; missing entries, and those
                above the first threshold, count as zeros.

        Raises:
            ValueError: if a rank or `inner_rounds` is not a positive whole number, a threshold is
                not finite or negative (the first one: or zero), `decay` is not between 0 and 1, or
                the start is unknown.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        check_factor("threshold", threshold)
        check_positive("first_threshold", first_threshold, optional=True)
        check_number("decay", decay, "a number above 0 and below 1", lambda x: (x > 0) & (x < 1))
        check_count("inner_rounds", inner_rounds)
        check_name("start", start, get_args(StartName))
        self.shared_rank, self.local_rank, self.start = shared_rank, local_rank, start
        self.threshold = hyperparameter(threshold)
        self.first_threshold = hyperparameter(first_threshold)
        self.decay, self.inner_rounds = hyperparameter(decay), inner_rounds

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the data, the ranks or the warm start do not fit."""
        samples.check_rows(clients)
        check_room("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)
        warn_of_few(self.local_rank, clients)
        check_warm_start(warm_start, clients, self.shared_rank, self.local_rank)

    def prepare(self, data: samples.SampleRows, client_id, rounds) -> TCMFMember:
        """Replace missing entries by zeros, and compute the first threshold."""
        observed = data.observed
        values = jnp.where(observed, data.values, 0).astype(data.count.dtype)
        if self.first_threshold is None:
            # Zeros, as in features that are constant, do not tell how large the others are.
            magnitudes = lax.stop_gradient(jnp.where(values != 0, jnp.abs(values), jnp.nan))
            # A client without samples, such as padding, has no quartile.
            first = FIRST * jnp.nan_to_num(jnp.nanquantile(magnitudes, 0.75))
        else:
            first = self.first_threshold.astype(values.dtype)
        return TCMFMember(values, observed, first)

    def first_message(self, key, data: TCMFMember, warm_start) -> Gram | Symmetric | None:
        """Return what the server starts from."""
        if warm_start is not None:
            return None
        moment = _moment(_first(data))
        return start_message(self.start, moment, self.shared_rank, self.local_rank)

    def server_init(self, key, first, like, warm_start) -> Rows:
        """Return the first shared components."""
        if warm_start is not None:
            return warm_start.shared.T
        values = like.values
        return first_shared(first, self.shared_rank, key, values.shape[1], values.dtype)

    def client_init(self, key, downlink: Rows, data: TCMFMember, warm_start) -> TCMFLocal:
        """Return the samples without the entries above the first threshold."""
        rounds = None if self.inner_rounds == 1 else jnp.zeros((), jnp.int32)
        return TCMFLocal(_first(data), data.first_threshold, rounds)

    def downlink(self, server: Rows) -> Rows:
        """Return the shared components, as rows."""
        return server

    def feasible(self, downlink: Rows, data):
        """Return the downlink with orthonormal components."""
        return retract(downlink, "polar")

    def client_step(self, key, downlink: Rows, local: TCMFLocal, data: TCMFMember):
        """Factorize the samples without their sparse part, renew that, and take a step."""
        shared = downlink.T
        own = best_local(_moment(local.cleaned), shared, self.local_rank)
        components = jnp.concatenate([shared, own], axis=1)
        scores = data_matmul(local.cleaned, components)
        low_rank = client_matmul(scores, components.T)

        before, local = local, self._renewed(local, low_rank, data)
        # Entries in S are those of the low-rank parts in `cleaned`, so they add no error here.
        rest = data.observed * (local.cleaned - low_rank)
        errors = data.observed & (local.cleaned != data.values)
        objective = jnp.sum(rest**2) + local.threshold**2 * jnp.sum(errors)
        # With the renewed S, but the local components from before it.
        product = _moment(local.cleaned).mv(shared)
        # What a smaller threshold, and the sparse part that follows it, still change.
        change = (before.threshold**2 - local.threshold**2) * jnp.sum(errors)
        gap = (change + jnp.sum((local.cleaned - before.cleaned) ** 2)) / 2
        found = {"objective": objective / 2, "gap": gap}
        found |= mean_energies(jnp.sum(scores**2, axis=0), self.shared_rank, None)
        return deflate(product, own).T, local, found

    def server_step(self, key, server: Rows, uplink: Rows):
        """Take a step of orthogonal iteration."""
        energy = jnp.vdot(server, uplink) / self.shared_rank
        gap = jnp.sum(ratio(deflate(uplink.T, server.T), energy) ** 2) * energy
        return retract(multiplied(server, uplink), "polar"), {"gap": gap}

    def client_result(self, downlink: Rows, local: TCMFLocal, data: TCMFMember):
        """Return the best local components of the samples without their sparse part."""
        return best_local(_moment(local.cleaned), downlink.T, self.local_rank)

    def shared_result(self, server: Rows):
        """Return the shared components."""
        return server.T

    def bases(self, server: Rows, local: TCMFLocal) -> Bases:
        """Return the shared components."""
        return Bases(shared=(server.T,))

    def through(self) -> Self:
        """Return the algorithm itself, if every round renews the sparse part.

        Raises:
            ValueError: if `inner_rounds` is more than one: some rounds then change no client.
        """
        if self.inner_rounds > 1:
            raise ValueError(
                "adjoint: wanted TCMF(inner_rounds=1) for an implicit derivative, "
                f"got {self.inner_rounds}"
            )
        return self

    def _renewed(self, local: TCMFLocal, low_rank: Table, data: TCMFMember) -> TCMFLocal:
        """Return the state with a smaller threshold, and the sparse part that belongs to it."""
        decay, final = (x.astype(low_rank.dtype) for x in (self.decay, self.threshold))
        threshold = decay * local.threshold + (1 - decay) * final
        renewed = TCMFLocal(_without_errors(data, low_rank, threshold), threshold, None)
        if local.rounds is None:
            return renewed
        rounds = local.rounds + 1
        is_last = rounds % self.inner_rounds == 0
        return TCMFLocal(
            jnp.where(is_last, renewed.cleaned, local.cleaned),
            jnp.where(is_last, renewed.threshold, local.threshold),
            rounds,
        )


def _moment(table: Table) -> Moment:
    """Return YᵀY: errors are summed over entries."""
    return Moment.from_samples(table, 1)


def _without_errors(data: TCMFMember, low_rank: Table, threshold: Scalar) -> Table:
    """Return Y - S, where S is zero except at missing entries and errors above the threshold."""
    small = jnp.abs(data.values - low_rank) <= threshold
    return jnp.where(data.observed & small, data.values, low_rank)


def _first(data: TCMFMember) -> Table:
    """Return the samples before the first round, when the low-rank parts are zero."""
    return _without_errors(data, jnp.zeros_like(data.values), data.first_threshold)
