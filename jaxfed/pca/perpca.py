"""Personalized PCA: components shared by all clients and components specific to each.

min over U, V_1..V_N of  mean_i tr((I - UUᵀ - V_i V_iᵀ) S_i)  with [U, V_i] orthonormal.

Source: Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features, JMLR.
"""

from typing import Literal, NamedTuple, Self, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    check_count,
    check_flag,
    check_name,
    check_positive,
    hyperparameter,
    refuse,
)
from jaxfed.core.contract.reduction import Max
from jaxfed.linalg import Moment
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca._reduced import Reduced
from jaxfed.pca._starts import StartName, first_shared, start_message, with_starts
from jaxfed.pca.components import (
    RETRACTIONS,
    Rows,
    beside,
    best_local,
    check_fits,
    check_warm_start,
    common_local,
    deflate,
    first_components,
    mean_energies,
    moment_of,
    multiplied,
    retract,
    uncaptured,
    warn_of_few,
)
from jaxfed.pca.shrinkage import shrink


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment  # for the rounds, perhaps shrunk
    unshrunk: Moment | None  # for start and result, if `moment` is shrunk
    active: Float[Array, " local_rank"] | None  # 1 for columns in use; None means all


class Message(NamedTuple):
    """Uplink and downlink: the shared components, as rows, and what the step rule needs."""

    shared: Rows
    scalar: Float[Array, ""] | None  # up: the objective; down: the curvature


class Server(NamedTuple):
    """The server's state."""

    shared: Rows
    curvature: Float[Array, ""] | None  # one over the step size; None if that is constant
    objective: Float[Array, ""] | None  # of the previous round, if the step size can decay


class PerPCA(Algorithm):
    r"""Personalized PCA by Stiefel gradient descent.

    Each round, a client deflates its local components by the shared ones and retracts them,
    \(V \leftarrow GR(V - UU^\top V)\), takes a gradient step, and sends its copy of the shared
    components. The server averages the copies and retracts.

    Source: Shi & Kontar (2024), Algorithm 2 (Algorithm 1 is `variant="polar"` with the polar
    retraction). `variant="power"` is not in the paper: it is orthogonal iteration (Golub & Van
    Loan, Matrix Computations, Section 8.2.4) for the paper's objective.
    """

    quadratic_in_samples = True

    step_size: Float[Array, ""] | None
    decay: Float[Array, ""] | None
    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    variant: Literal["tangent", "polar", "power"] = eqx.field(static=True)
    retraction: Literal["polar", "qr"] = eqx.field(static=True)
    start: StartName = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        step_size: float | Array | None = None,
        variant: Literal["tangent", "polar", "power"] = "tangent",
        retraction: Literal["polar", "qr"] = "polar",
        start: StartName = "common",
        decay: float | Array | None = None,
        shrinkage: bool = False,
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of local components, one number for all clients or one per client
                (in the order of the clients' ids).
            step_size: step size of the gradient steps. By default one over the largest eigenvalue
                of any client's second moment (estimated from below with 32 features or more). The
                `"tangent"` variant converges for step sizes up to two over that eigenvalue.
            variant: the step of a client. `"tangent"` (choice 1 of Algorithm 2) is a step along the
                tangent part of the gradient; the client does not retract its copy of the shared
                components. Its fixed points are the stationary points of the objective. `"polar"`
                (choice 2) is a step along `S [U, V]`, retracted as a whole. It converges for any
                step size, but on noisy data its fixed point is off the stationary points, more so
                for large steps. `"power"` sets `V <- GR((I - UUᵀ) S V)` and
                `U <- GR(mean (I - VVᵀ) S U)`, without a step size, so a client of another scale
                does not slow the others. This is the step of `"tangent"` with the inverses of VᵀSV
                and of the mean of UᵀSU as step sizes, and has the same fixed points. With all
                clients in every round the objective never rises: power iteration lowers neither
                the energy in V nor `tr(UᵀBU)`, where B is the mean of (I - VVᵀ) S (I - VVᵀ). That
                trace is a lower bound on the energy that U adds to V, with equality at the old U.
                The step depends little on earlier rounds: after a round with few clients the
                components fit mainly these, and coarse compression (3 bits) can make it diverge.
            retraction: `"polar"` or `"qr"` (with positive diagonal of R). The joint step of
                `variant="polar"` always uses the polar factor.
            start: where to start without a warm start. `"common"`: what the clients' top
                components have in common, the larger ones first. Clients send
                `shared_rank + local_rank` components once, scaled to unit length, so clients of any
                scale count equally. `"local_first"`: first each client's top components, then the
                shared ones as the top eigenvectors of the mean deflated second moment, as in
                `OneShot(method="local_first")`. Clients send the deflated moments once. It often
                ends at a poor stationary point if the shared components are the larger ones. With
                32 features or more, both are approximated, by ten steps of subspace iteration at
                the clients and forty at the server. `"random"`: random components. The guide to
                privacy compares what the starts reveal.
            decay: factor on the step size whenever the mean objective has risen (exp(-1) in the
                authors' scripts). None keeps the step size.
            shrinkage: remove the noise from the second moments before the iteration (see
                `jaxfed.pca.shrink`). If local components fill most of the features and are far
                above the noise, the optimum of the objective can lie far from the true shared
                components; shrinkage keeps the iteration near them. Otherwise it does harm: it
                drops shared components that no single client can tell from noise, even if all of
                them together could. `jaxfed.pca.split_half` helps to choose. The local components
                of the result are the best ones for the observed moments.

        Raises:
            ValueError: if a rank is not a positive whole number (a local rank may be 0 for some
                clients), a name is unknown, or a step size or decay is not positive and finite or
                is given for `variant="power"`.
        """
        check_count("shared_rank", shared_rank)
        ranks = local_rank if isinstance(local_rank, tuple | list) else (local_rank,)
        for rank in ranks:
            check_count("local_rank", rank, least=1 if len(ranks) == 1 else 0)
        if not ranks or max(ranks) == 0:
            raise ValueError(f"local_rank: at least one client needs components, got {local_rank}")
        check_name("variant", variant, ("tangent", "polar", "power"))
        check_name("retraction", retraction, tuple(RETRACTIONS))
        check_name("start", start, get_args(StartName))
        check_positive("step_size", step_size, optional=True)
        check_positive("decay", decay, optional=True)
        for name, value in (("step_size", step_size), ("decay", decay)):
            if variant == "power" and value is not None:
                raise refuse(name, "None with variant='power', which has no steps", value)
        check_flag("shrinkage", shrinkage)
        self.shared_rank = shared_rank
        self.local_rank = local_rank if isinstance(local_rank, int) else tuple(local_rank)
        self.step_size, self.decay = hyperparameter(step_size), hyperparameter(decay)
        self.variant, self.retraction, self.start = variant, retraction, start
        self.shrinkage = shrinkage

    @property
    def _width(self) -> int:
        return self.local_rank if isinstance(self.local_rank, int) else max(self.local_rank)

    @property
    def _needs_curvature(self) -> bool:
        return self.step_size is None and self.variant != "power"

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the ranks or the warm start do not fit."""
        check_fits("shared_rank + local_rank", self.shared_rank + self._width, clients)
        if isinstance(self.local_rank, tuple):
            ranks = len(self.local_rank)
            if ranks != len(clients):
                raise ValueError(f"local_rank: {ranks} ranks for {len(clients)} clients")
            if not isinstance(clients.ids, Tracer) and np.asarray(clients.ids).max() >= ranks:
                raise ValueError(
                    f"local_rank: the {ranks} ranks are those of the ids 0 to {ranks - 1}, "
                    f"got clients with ids up to {np.asarray(clients.ids).max()}"
                )
        warn_of_few(int(np.min(self.local_rank)), clients)
        check_warm_start(warm_start, clients, self.shared_rank, self._width)

    def prepare(self, data, client_id, rounds):
        """Return the client's second moment, with a mask if ranks differ."""
        total = self.shared_rank + self._width
        moment = moment_of(data, rank=total, rounds=rounds)
        unshrunk = None
        if self.shrinkage:
            moment, unshrunk = shrink(moment, total), moment
        active = None
        if isinstance(self.local_rank, tuple):
            rank = jnp.asarray(self.local_rank)[client_id]
            active = (jnp.arange(self._width) < rank).astype(moment.trace.dtype)
        return Member(moment, unshrunk, active)

    def first_message(self, key, data, warm_start):
        """Return what the server starts from, and the largest eigenvalue if steps need it."""
        moment, unshrunk, active = data
        # The start comes from the observed moment even if the rounds use the shrunk one.
        moment = moment if unshrunk is None else unshrunk
        first: dict[str, PyTree] = {}
        if self._needs_curvature:
            inner = moment.row_products(first_components(moment, self._width))[1]
            first["curvature"] = Max(Moment.from_dense(inner).largest_eigenvalue())
        if warm_start is None:
            ranks = self.shared_rank, self._width
            first["moment"] = start_message(self.start, moment, *ranks, active)
        return first

    def server_init(self, key, first, like, warm_start):
        """Return the first shared components and the first curvature."""
        if warm_start is not None:
            shared = warm_start.shared.T
        else:
            dim, dtype = like.moment.dim, like.moment.trace.dtype
            shared = first_shared(first.get("moment"), self.shared_rank, key, dim, dtype)
        curvature = objective = None
        if self._needs_curvature:
            curvature = first["curvature"].astype(shared.dtype)
        if self.decay is not None:
            # Nothing is above infinity, so the first round keeps the step size. A given one becomes
            # a curvature, so that decay treats it like an automatic one.
            objective = jnp.full((), jnp.inf, shared.dtype)
            if self.step_size is not None:
                curvature = 1 / self.step_size.astype(shared.dtype)
        return Server(shared, curvature, objective)

    def client_init(self, key, downlink, data, warm_start):
        """Return the local components: the warm start's, random, or the best beside `shared`."""
        moment, unshrunk, active = data
        if warm_start is not None and warm_start.local is not None:
            # Orthogonal to the shared ones now: where the two overlap, deflation in a round would
            # leave fewer dimensions than components.
            return beside(downlink.shared.T, warm_start.local, active).T
        if warm_start is None and self.start == "random":
            # Transposed, so that rows hold the same random numbers as columns would.
            draw = jax.random.normal(key, (moment.dim, self._width), moment.trace.dtype)
            rows = orthonormalize_once(draw).T
            return rows if active is None else rows * active[:, None]
        moment = moment if unshrunk is None else unshrunk
        if warm_start is not None:
            return best_local(moment, downlink.shared.T, self._width, active).T
        return first_components(moment, self._width, active, downlink.shared)

    def downlink(self, server):
        """Return the shared components, and the curvature unless the step size is constant."""
        return Message(server.shared, server.curvature)

    def feasible(self, downlink, data):
        """Return the downlink with orthonormal components."""
        return downlink._replace(shared=retract(downlink.shared, self.retraction))

    def client_step(self, key, downlink, local, data):
        """Deflate and retract the local components, take a step, send the shared copy."""
        moment, _, active = data
        shared, curvature = downlink

        # Algorithm 2: deflate then retract, so that [U, V] is feasible at the received U.
        deflated = local - client_matmul(client_matmul(local, shared.T), shared)
        local = retract(deflated, self.retraction, active)
        w = jnp.concatenate([shared, local])
        # Components are rows within rounds (see `Rows`): with W = [U, V], these are (S W)ᵀ and
        # WᵀSW.
        sw, wsw = moment.row_products(w)
        objective = uncaptured(moment, jnp.trace(wsw))
        if self.variant == "tangent":
            # (I - P_U - P_V) S W is the tangent projection, because WᵀSW is symmetric.
            # Choice 1, (58) for the shared copy, which is not retracted before it is averaged.
            moved = w + self._step(sw - data_matmul(wsw, w, once=True), curvature)
            gap = self._gap((moved - w)[self.shared_rank :], curvature)
            # The paper retracts the local part here and again, after deflation, at the start of the
            # next round. Only its span matters, so one retraction is enough.
        elif self.variant == "power":
            by_shared, by_local = jnp.split(sw, [self.shared_rank])
            inside = client_matmul(wsw[self.shared_rank :, : self.shared_rank], shared)
            before = local
            local = retract(multiplied(local, by_local - inside), self.retraction, active)
            turned = local - client_matmul(client_matmul(local, before.T), before)
            gap = 2 * jnp.sum(turned**2) * jnp.max(jnp.diagonal(wsw))
            # The part of S U orthogonal to the new local components, not normalized.
            moved = by_shared - client_matmul(client_matmul(by_shared, local.T), local)
            moved = jnp.concatenate([moved, local])
        else:
            if active is not None:
                active = jnp.concatenate([jnp.ones(self.shared_rank, active.dtype), active])
            # Always the polar factor: QR would keep only the span of the shared copy, and the
            # average would drift to pooled PCA.
            moved = retract(w + self._step(sw, curvature), "polar", active)
            gap = self._gap((moved - w)[self.shared_rank :], curvature)
        copy, local = moved[: self.shared_rank], moved[self.shared_rank :]
        uplink = Message(copy, None if self.decay is None else objective)
        energies = mean_energies(jnp.diagonal(wsw), self.shared_rank, data.active)
        return uplink, local, {"objective": objective, "gap": gap, **energies}

    def server_step(self, key, server, uplink):
        """Retract the mean of the copies; shrink the step if the objective rose."""
        curvature, objective = server.curvature, uplink.scalar
        if self.decay is not None:
            raised = curvature / self.decay.astype(curvature.dtype)
            curvature = jnp.where(objective > server.objective, raised, curvature)
        if self.variant == "power":
            moved = multiplied(server.shared, uplink.shared)
            rest = deflate(uplink.shared.T, server.shared.T)
            energy = jnp.vdot(server.shared, uplink.shared) / self.shared_rank
            gap = 2 * ratio(jnp.sum(rest**2), energy)
        else:
            moved = uplink.shared
            gap = None
        # GR_U(mean U_i - U) in Algorithm 2: both retractions depend only on U plus their argument,
        # here the mean.
        shared = retract(moved, self.retraction)
        if gap is None:
            copy = moved if self.variant == "tangent" else shared
            gap = self._gap(copy - server.shared, server.curvature)
        server, found = Server(shared, curvature, objective), {"gap": gap}
        if curvature is not None:
            found["step_size"] = ratio(jnp.ones_like(curvature), curvature)
        return server, found

    def _gap(self, move, curvature):
        """Return what a gradient step that moves so far lowers the objective by, at first order."""
        # The objective's gradient is twice that of the step.
        square = 2 * jnp.sum(move**2)
        if curvature is None:
            assert self.step_size is not None
            return square / self.step_size.astype(square.dtype)
        return square * curvature

    def _step(self, gradient, curvature):
        """Return a gradient times the step size."""
        if curvature is None:
            assert self.step_size is not None
            return self.step_size.astype(gradient.dtype) * gradient
        return ratio(gradient, curvature)

    def client_result(self, downlink, local, data):
        """Return the local components, deflated by the final shared ones and retracted."""
        if data.unshrunk is not None:
            return best_local(data.unshrunk, downlink.shared.T, self._width, data.active)
        # Algorithm 2 returns U_R and V_(i),R, with which the last round started. Here both are
        # those after the last step, and V_(i),R+1/2 is orthogonal to U_R+1 only once it is
        # deflated.
        return beside(downlink.shared.T, local.T, data.active)

    def shared_result(self, server):
        """Return the shared components."""
        return server.shared.T

    def different_starts(self, count: int) -> list[Self]:
        """Return copies with different starts; all but a few are random."""
        return with_starts(self, count)

    @property
    def energy_weighted(self) -> bool:
        """True: a mean of second moments weights clients by their variance."""
        return True

    def remarks(self, result, history):
        """Warn if the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Return the problem in the shared components alone; for `"polar"`, the rounds themselves.

        The rounds of `"polar"` do not end at stationary points of the objective.
        """
        return self if self.variant == "polar" else Reduced(self, None, self._width)

    def bases(self, server: Server, local: Rows) -> Bases:
        """Return the shared components and each client's local ones."""
        return Bases(shared=(server.shared.T,), own=(local.mT,))
