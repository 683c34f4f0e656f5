r"""Personalized Tucker decomposition: shared and local factors in each mode of tensor samples.

.. math:: Y_i \approx C_i \times_1 U_1 \dots \times_K U_K + D_i \times_1 V_{i,1} \dots
    \times_K V_{i,K}, \qquad U_k^T V_{i,k} = 0 \text{ in each orthogonal mode } k

The cores \(C_i\) and \(D_i\) hold one small tensor for each sample, and all factors have
orthonormal columns. One orthogonal mode makes both parts orthogonal, so the best cores are products
of samples with factors, and the squared error is the energy that these products leave.

Source: Hu, Shi, Al Kontar & Yan (2023), Personalized Tucker decomposition: modeling commonality and
peculiarity on tensor data, arXiv:2309.03439.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed._checks import is_list, is_whole
from jaxfed.contract import Algorithm, Bases, check_count, check_factor, hyperparameter, refuse
from jaxfed.core.clients.samples import Samples, other_data
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.triangle import to_triangle
from jaxfed.pca._starts import common_message
from jaxfed.pca._tucker import (
    ModeFactors,
    Pair,
    Scalar,
    TuckerMember,
    Updates,
    energy,
    factors_of,
    kronecker_product,
    nearest,
    replaced,
    second,
)
from jaxfed.pca.components import (
    Frame,
    check_warm_start,
    common_local,
    first_components,
    moment_received,
)

T = TypeVar("T")
LocalFrame = Float[Array, "features local_rank"]


class TuckerServer(NamedTuple):
    """The server's state."""

    factors: ModeFactors


@final
class PerTucker(Updates):
    r"""Personalized Tucker decomposition by block coordinate descent.

    A sample is a tensor with K modes, such as an image, stored as a row of features. A round
    updates the shared factor of one mode, so K rounds update all of them:

    * Each client multiplies its samples by the shared factors of all other modes, after subtracting
      its local part, and sends the second moment of the result in the round's mode: a symmetric
      matrix as large as that mode.
    * The server takes the top eigenvectors of the mean second moment as shared factor \(U_k\).
    * At the beginning of the next round, each client updates its factor \(V_{i,k}\) in the same
      way, orthogonal to \(U_k\) if the mode is an orthogonal one.

    The components of the result are the Kronecker products \(U_1 \otimes \dots \otimes U_K\) of
    factors, which are orthonormal, so all functions for results of `PerPCA` apply. The shared
    factors are also in the solution's `server.factors`. Compared with components of `PerPCA`, a
    client has the sum of the modes' sizes times ranks as parameters instead of their product, so it
    needs fewer samples. Any orthonormal components can be a warm start: each factor then starts
    from the top eigenvectors of their unfoldings.

    The objective is the mean squared error of a sample, as for `PerPCA`; with `weights="samples"`
    it is the paper's sum over all samples. It may rise between rounds, because a shared factor is
    updated before the local ones that must be orthogonal to it. A tolerance applies to the largest
    turn of any shared factor at its last update. Messages belong to another mode each round, so
    differences of messages (`jf.channel.difference`) are as large as the messages.

    Source: Hu, Shi, Al Kontar & Yan (2023), arXiv:2309.03439, and the authors' code. The start is
    not theirs: it takes the directions in each mode that most clients have among their top ones.
    """

    proximal: Float[Array, ""]
    shape: tuple[int, ...] = eqx.field(static=True)
    shared_ranks: tuple[int, ...] = eqx.field(static=True)
    local_ranks: tuple[int, ...] = eqx.field(static=True)
    orthogonal_modes: tuple[int, ...] = eqx.field(static=True)
    mode: Int[Array, ""] | None = eqx.field(init=False)  # of the round

    def __init__(
        self,
        shape: tuple[int, ...],
        shared_ranks: tuple[int, ...],
        local_ranks: tuple[int, ...],
        *,
        orthogonal_modes: tuple[int, ...] | None = None,
        proximal: float | Array = 0.0,
    ):
        """Set up the algorithm.

        Args:
            shape: size of each mode of a sample, e.g. height and width. The features of a sample
                are its entries in row-major order.
            shared_ranks: number of columns of the shared factor of each mode.
            local_ranks: number of columns of each client's factor of each mode.
            orthogonal_modes: modes, counted from 0, in which local factors are orthogonal to the
                shared one; by default all.
            proximal: weight of the squared distance ‖UUᵀ - U'U'ᵀ‖² between the subspaces of a
                factor before and after an update, relative to the squared error of a sample. A
                positive weight makes steps smaller; the authors prove convergence for such steps.

        Raises:
            ValueError: if sizes or ranks are not positive whole numbers, one for each mode; factors
                do not fit into a mode; a mode is unknown, repeated, or there is none; or the weight
                is negative or not finite.
        """
        self.shape = _for_modes("shape", shape)
        self.shared_ranks = _for_modes("shared_ranks", shared_ranks, self.shape)
        self.local_ranks = _for_modes("local_ranks", local_ranks, self.shape)
        chosen = tuple(self.modes) if orthogonal_modes is None else orthogonal_modes
        known = is_list(chosen) and all(is_whole(k) and k in self.modes for k in chosen)
        if not known or not chosen or len(set(chosen)) < len(chosen):
            wanted = f"different modes from 0 to {len(self.shape) - 1}, at least one"
            raise refuse("orthogonal_modes", wanted, orthogonal_modes)
        self.orthogonal_modes = tuple(chosen)
        for k in self.orthogonal_modes:
            total, size = self.shared_ranks[k] + self.local_ranks[k], self.shape[k]
            if total > size:
                raise ValueError(
                    f"shared_ranks + local_ranks: wanted at most {size} orthonormal columns in the "
                    f"orthogonal mode {k}, got {total}"
                )
        check_factor("proximal", proximal)
        self.proximal, self.mode = hyperparameter(proximal), None

    @property
    def eigenvectors(self) -> int:
        """Shared and local components together."""
        return math.prod(self.shared_ranks) + math.prod(self.local_ranks)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the data or the warm start do not fit."""
        for part in clients.parts:
            if not isinstance(part, Samples):
                raise other_data("Clients.from_samples or Clients.from_source", part)
        if clients.features != math.prod(self.shape):
            raise ValueError(
                f"shape: wanted {clients.features} entries, as many as features, got {self.shape}"
            )
        check_warm_start(
            warm_start, clients, math.prod(self.shared_ranks), math.prod(self.local_ranks)
        )

    def at_round(self, number: Int[Array, ""]) -> "PerTucker":
        """Return the algorithm with the mode of a round."""
        mode = (number - 1) % len(self.shape)
        return eqx.tree_at(lambda x: x.mode, self, mode, is_leaf=lambda x: x is None)

    def first_message(self, key, data: TuckerMember, warm_start) -> tuple[Gram, ...] | None:
        """Return a message about the client's top directions in each mode."""
        if warm_start is not None:
            return None
        messages = []
        for k in self.modes:
            rank = min(self.shared_ranks[k] + self.local_ranks[k], self.shape[k])
            moment = Moment.from_dense(second(data.values, k))
            messages.append(common_message(moment, first_components(moment, rank)))
        return tuple(messages)

    def server_init(self, key, first, like, warm_start) -> TuckerServer:
        """Return factors of the directions common to most clients, or the warm start's."""
        if warm_start is None:
            each = zip(first, self.shared_ranks, strict=True)
            factors = tuple(moment_received(x).top(rank)[1] for x, rank in each)
        else:
            factors = factors_of(warm_start.shared, self.shape, self.shared_ranks)
        return TuckerServer(factors)

    def downlink(self, server: TuckerServer) -> ModeFactors:
        """Return the shared factors."""
        return server.factors

    def client_init(
        self, key, downlink: ModeFactors, data: TuckerMember, warm_start
    ) -> ModeFactors:
        """Return the warm start's local factors, or the best ones of each mode by itself."""
        if warm_start is None or warm_start.local is None:
            return self.first_local(downlink, data)
        return self.aligned(
            downlink, factors_of(warm_start.local, self.shape, self.local_ranks)
        ).local

    def feasible(self, downlink: ModeFactors, data):
        """Return the downlink with orthonormal components."""
        return tuple(polar(factor) for factor in downlink)

    def client_step(self, key, downlink: ModeFactors, local: ModeFactors, data: TuckerMember):
        """Update the local factor of the last round's mode, and send the moment of this round's."""
        pair = self.aligned(downlink, local)

        def step(k: int) -> tuple[Array, ModeFactors, Scalar]:
            # The server has updated the last round's mode since, so its local factors follow first;
            # `aligned` has only projected them.
            last = (k - 1) % len(self.shape)
            updated = self.update_local(last, data, pair, local[last])
            moment = self.shared_moment(k, data, Pair(pair.shared, updated.local))
            # Both parts are orthogonal in at least one mode, so their energies add up.
            captured = updated.captured + energy(moment, pair.shared[k])
            missing = max(self.shape) - len(moment)  # messages of all modes have one size
            return to_triangle(jnp.pad(moment, (0, missing))), updated.local, captured

        upper, local, captured = self._in_mode(step)
        return Symmetric(upper), local, {"objective": jnp.maximum(data.energy - captured, 0)}

    def server_step(self, key, server: TuckerServer, uplink: Array):
        """Update the shared factor of this round's mode."""
        moment = moment_received(uplink).matrix()

        def step(k: int) -> TuckerServer:
            size, before = self.shape[k], server.factors[k]
            factor = self.update_shared(k, moment[:size, :size], before)
            return TuckerServer(replaced(server.factors, k, factor))

        return self._in_mode(step), {}

    def client_result(self, downlink: ModeFactors, local: ModeFactors, data: TuckerMember) -> Frame:
        """Update all local factors once more, and return their products."""
        return kronecker_product(self.update_all_local(downlink, local, data))

    def shared_result(self, server: TuckerServer) -> Frame:
        """Return the products of the shared factors."""
        return kronecker_product(server.factors)

    @property
    def energy_weighted(self) -> bool:
        """True: a mean of squared errors weights clients by their variance."""
        return True

    def remarks(self, result, history):
        """Warn if the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Return rounds that update all factors, with the same fixed points."""
        ranks = self.shared_ranks, self.local_ranks
        return AllModes(self.proximal, self.shape, *ranks, self.orthogonal_modes)

    def _in_mode(self, step: Callable[[int], T]) -> T:
        """Take the step of this round's mode."""
        assert self.mode is not None
        return jax.lax.switch(self.mode, [partial(step, k) for k in self.modes])


@final
class AllModes(Updates):
    """Rounds that update the factors of all modes, for derivatives of solutions.

    The states are the solution's components: one basis each, instead of one for each mode.
    """

    proximal: Float[Array, ""]
    shape: tuple[int, ...] = eqx.field(static=True)
    shared_ranks: tuple[int, ...] = eqx.field(static=True)
    local_ranks: tuple[int, ...] = eqx.field(static=True)
    orthogonal_modes: tuple[int, ...] = eqx.field(static=True)

    def server_init(self, key, first, like, warm_start) -> Frame:
        """Return the shared components of the solution."""
        assert warm_start is not None
        return warm_start.shared

    def downlink(self, server: Frame) -> Frame:
        """Return the shared components."""
        return server

    def client_init(self, key, downlink: Frame, data: TuckerMember, warm_start) -> LocalFrame:
        """Return the local components of the solution."""
        assert warm_start is not None
        return warm_start.local

    def client_step(self, key, downlink: Frame, local: LocalFrame, data: TuckerMember):
        """Update all local factors, and send the second moments of all modes."""
        shared = factors_of(downlink, self.shape, self.shared_ranks)
        own = factors_of(local, self.shape, self.local_ranks)
        own = self.update_all_local(shared, own, data)
        moments = [self.shared_moment(k, data, Pair(shared, own)) for k in self.modes]
        uplink = tuple(Symmetric(to_triangle(x)) for x in moments)
        rest = data.energy - energy(moments[0], shared[0])
        # Eigenvectors may change signs or turn from round to round, and a fixed point must not.
        return uplink, nearest(kronecker_product(own), local), {"objective": rest}

    def server_step(self, key, server: Frame, uplink):
        """Update all shared factors."""
        before = factors_of(server, self.shape, self.shared_ranks)
        each = enumerate(zip(uplink, before, strict=True))
        updated = [self.update_shared(k, moment_received(x).matrix(), u) for k, (x, u) in each]
        return nearest(kronecker_product(tuple(updated)), server), {}

    def bases(self, server: Frame, local: LocalFrame) -> Bases:
        """Return the shared components and a client's local ones."""
        return Bases(shared=(server,), own=(local,))


def _for_modes(name: str, given: object, most: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return one positive whole number for each mode, at most the mode's size."""
    if not is_list(given) or not given:
        raise refuse(name, "whole numbers, one for each mode", given)
    for number in given:
        check_count(name, number)
    if most is not None:
        if len(given) != len(most):
            raise refuse(name, f"{len(most)} whole numbers, one for each mode", given)
        if any(rank > size for rank, size in zip(given, most, strict=True)):
            raise refuse(name, f"at most the sizes of the modes, {most}", given)
    return tuple(given)
