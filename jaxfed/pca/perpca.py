"""Personalized PCA: components shared by all clients and components specific to each.

min over U, V_1..V_N of  mean_i tr((I - UUᵀ - V_i V_iᵀ) S_i)  with [U, V_i] orthonormal.

Source: Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features, JMLR.
"""

from typing import Any, Literal, NamedTuple, Self, final, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from jaxfed._checks import check_number
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
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Max
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.pca import _ascent
from jaxfed.pca._descent import Active, Descent, DescentServer, Message, Retraction, Variant
from jaxfed.pca._reduced import Penalty, Reduced, evaluate, limit_of
from jaxfed.pca._shared_and_local import SharedAndLocal
from jaxfed.pca._starts import StartName, common_message, first_shared, start_message
from jaxfed.pca.components import (
    RETRACTIONS,
    Frame,
    Rows,
    beside,
    best_local,
    check_fits,
    check_warm_start,
    first_components,
    moment_of,
    retract,
    warn_of_few,
)
from jaxfed.pca.shrinkage import shrink

Scalar = Float[Array, ""]
Solver = Literal["quasi_newton", "gradient"]

# Defaults of the quasi-Newton server: number of pairs, and penalty on weak local variance.
PAIRS, PENALTY = 20, 0.03


class PerPCAMember(NamedTuple):
    """ONE client's prepared data."""

    moment: Moment  # for the rounds, perhaps shrunk
    unshrunk: Moment | None  # for start and result, if `moment` is shrunk
    active: Active  # 1 for columns in use; None means all
    # For the quasi-Newton server, and otherwise None:
    limit: Scalar | None = None  # of the local penalty, a variance
    fingerprint: Scalar | None = None  # pseudo-random, derived from the client's id and its data
    rows: Rows | None = None  # the first components, if the start's message is made of the same

    @property
    def observed(self) -> Moment:
        """The moment without shrinkage."""
        return self.moment if self.unshrunk is None else self.unshrunk


@final
class PerPCA(SharedAndLocal):
    r"""Personalized PCA: components shared by all clients, and local ones of each client.

    Two solvers find the same components:

    * `"quasi_newton"`: for given shared components, a client's best local ones are the top
      eigenvectors of its second moment deflated by the shared ones. What remains is a function of
      the shared subspace, which the server maximizes by limited-memory BFGS: clients report its
      value and gradient, in one thin message a round. There is no step size to choose, and it takes
      a small fraction of the rounds. Its messages are four numbers longer, and a client computes an
      eigendecomposition each round.
    * `"gradient"`, the paper's: each round, a client deflates its local components by the shared
      ones and retracts them, \(V \leftarrow GR(V - UU^\top V)\), takes a gradient step, and sends
      its copy of the shared components. The server averages the copies and retracts.

    With `"quasi_newton"`, local variance counts
    \(g(\lambda) = \lambda - \tau c (1 - (1 + \lambda / 2c)^{-2})\), where τ is the penalty and c is
    ten times the variance of the weakest of the client's top `shared_rank + local_rank` components.
    Weak components count the fraction τ less; strong ones count τ c less, whatever their variance.
    The penalty is not in the paper; with `local_penalty=0`, the solutions of both solvers are the
    same.

    The quasi-Newton server compares values and gradients only between rounds with the same
    participants. A trial that other clients evaluate is accepted, and steps become shorter with the
    number of such rounds. If a few clients are absent occasionally, pairs from the rounds in
    between still determine the direction. If participants are drawn anew each round, there are no
    pairs, and the steps are those of gradient ascent with momentum.

    Source: Shi & Kontar (2024), Algorithm 2 (Algorithm 1 is `variant="polar"` with the polar
    retraction). `variant="power"` is not in the paper: it is orthogonal iteration (Golub & Van
    Loan, Matrix Computations, Section 8.2.4) for the paper's objective. Eliminating the local
    components, for `"quasi_newton"`, is variable projection (Golub & Pereyra 1973).
    """

    quadratic_in_samples = True

    step_size: Scalar | None
    decay: Scalar | None
    local_penalty: Scalar | None
    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    solver: Solver = eqx.field(static=True)
    start: StartName = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)
    memory: int | None = eqx.field(static=True)
    variant: Variant | None = eqx.field(static=True)
    retraction: Retraction | None = eqx.field(static=True)
    number: Int[Array, ""] | None = eqx.field(init=False)  # of the round; None before

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        solver: Solver = "quasi_newton",
        start: StartName = "common",
        shrinkage: bool = False,
        local_penalty: float | Array | None = None,
        memory: int | None = None,
        variant: Variant | None = None,
        step_size: float | Array | None = None,
        retraction: Retraction | None = None,
        decay: float | Array | None = None,
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of local components, one number for all clients or one per client
                (in the order of the clients' ids).
            solver: `"quasi_newton"` or `"gradient"`; see the class.
            start: where to start without a warm start. `"common"`: what the clients' top
                components have in common, the larger ones first. Clients send
                `shared_rank + local_rank` components once, scaled to unit length, so clients of any
                scale count equally. `"local_first"`: first each client's top components, then the
                shared ones as the top eigenvectors of the mean deflated second moment, as in
                `OneShot(method="local_first")`. Clients send the deflated moments once. It often
                ends at a poor stationary point if the shared components are the larger ones. With
                32 features or more, both are approximated, by ten steps of subspace iteration at
                the clients and forty at the server. `"random"`: random components. The guide to
                privacy compares what the starts reveal. To try several, see `jaxfed.MultiStart`.
            shrinkage: remove the noise from the second moments before the iteration (see
                `jaxfed.pca.shrink`). If local components fill most of the features and are far
                above the noise, the optimum of the objective can lie far from the true shared
                components; shrinkage keeps the iteration near them. Otherwise it does harm: it
                drops shared components that no single client can tell from noise, even if all of
                them together could. `jaxfed.pca.split_half` helps to choose. The local components
                of the result are the best ones for the observed moments.
            local_penalty: for `"quasi_newton"`, the fraction τ, from 0 to below 1, by which weak
                local variance counts less than shared variance; 0.03 by default. 0 gives the
                objective of the paper. If clients are alike, all splits of the same components
                explain the same variance, and without a penalty the optimum fits the noise. The
                default then shares the larger components, and hardly changes the result where
                clients differ. The reported objective is the variance that is left, without the
                penalty.
            memory: for `"quasi_newton"`, the number of pairs of steps and gradient changes that the
                server keeps, each as large as two messages; 20 by default.
            variant: for `"gradient"`, the step of a client. `"tangent"`, the default (choice 1 of
                Algorithm 2), is a step along the tangent part of the gradient; the client does not
                retract its copy of the shared components. Its fixed points are the stationary
                points of the objective. `"polar"` (choice 2) is a step along `S [U, V]`, retracted
                as a whole. It converges for any step size, but on noisy data its fixed point is off
                the stationary points, more so for large steps. `"power"` sets
                `V <- GR((I - UUᵀ) S V)` and `U <- GR(mean (I - VVᵀ) S U)`, without a step size, so
                a client of another scale does not slow the others. This is the step of `"tangent"`
                with the inverses of VᵀSV and of the mean of UᵀSU as step sizes, and has the same
                fixed points. With all clients in every round the objective never rises: power
                iteration lowers neither the energy in V nor `tr(UᵀBU)`, where B is the mean of
                (I - VVᵀ) S (I - VVᵀ). That trace is a lower bound on the energy that U adds to V,
                with equality at the old U. The step depends little on earlier rounds: after a round
                with few clients the components fit mainly these, and coarse compression (3 bits)
                can make it diverge.
            step_size: for `"gradient"`, the step size. By default one over the largest eigenvalue
                of any client's second moment (estimated from below with 32 features or more). The
                `"tangent"` variant converges for step sizes up to two over that eigenvalue.
            retraction: for `"gradient"`, `"polar"`, the default, or `"qr"` (with positive diagonal
                of R). The joint step of `variant="polar"` always uses the polar factor.
            decay: for `"gradient"`, a factor on the step size whenever the mean objective has risen
                (exp(-1) in the authors' scripts). None keeps the step size.

        Raises:
            ValueError: if a rank or the memory is not a positive whole number (a local rank may be
                0 for some clients), a name is unknown, a step size or decay is not positive and
                finite, the penalty is negative or not below one, or an argument is given that the
                solver or `variant="power"` does not have.
        """
        check_count("shared_rank", shared_rank)
        ranks = local_rank if isinstance(local_rank, tuple | list) else (local_rank,)
        for rank in ranks:
            check_count("local_rank", rank, least=1 if len(ranks) == 1 else 0)
        if not ranks or max(ranks) == 0:
            raise ValueError(f"local_rank: at least one client needs components, got {local_rank}")
        check_name("solver", solver, get_args(Solver))
        check_name("start", start, get_args(StartName))
        check_flag("shrinkage", shrinkage)
        steps = {"step_size": step_size, "decay": decay}
        of_gradient = {"variant": variant, "retraction": retraction, **steps}
        of_newton = {"local_penalty": local_penalty, "memory": memory}
        for name, value in (of_newton if solver == "gradient" else of_gradient).items():
            if value is not None:
                raise refuse(name, f"None with solver={solver!r}, which has none", value)
        check_count("memory", PAIRS if memory is None else memory)
        if local_penalty is not None:
            wanted = "a number of at least 0 and below 1"
            check_number("local_penalty", local_penalty, wanted, lambda x: (x >= 0) & (x < 1))
        check_name("variant", variant or "tangent", get_args(Variant))
        check_name("retraction", retraction or "polar", tuple(RETRACTIONS))
        for name, value in steps.items():
            check_positive(name, value, optional=True)
            if variant == "power" and value is not None:
                raise refuse(name, "None with variant='power', which has no steps", value)
        self.shared_rank = shared_rank
        self.local_rank = local_rank if isinstance(local_rank, int) else tuple(local_rank)
        self.solver, self.start, self.shrinkage = solver, start, shrinkage
        self.local_penalty, self.memory = hyperparameter(local_penalty), memory
        self.step_size, self.decay = hyperparameter(step_size), hyperparameter(decay)
        self.variant, self.retraction, self.number = variant, retraction, None

    @property
    def _width(self) -> int:
        return self.local_rank if isinstance(self.local_rank, int) else max(self.local_rank)

    @property
    def _descent(self) -> Descent | None:
        """The rules of gradient steps; None for the quasi-Newton server."""
        if self.solver == "quasi_newton":
            return None
        names = self.variant or "tangent", self.retraction or "polar"
        return Descent(self.shared_rank, *names, self.step_size, self.decay)

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
        kept = None if self.solver == "quasi_newton" else self._width
        check_warm_start(warm_start, clients, self.shared_rank, kept)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> PerPCAMember:
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
        member = PerPCAMember(moment, unshrunk, active)
        if self.solver == "gradient":
            return member
        rows = first_components(moment, total)
        same = self.start == "common" and active is None and not self.shrinkage
        return member._replace(
            limit=limit_of(moment, rows, active),
            fingerprint=_ascent.fingerprint(client_id, moment.trace),
            rows=rows if same else None,
        )

    def at_round(self, number: Int[Array, ""]) -> Self:
        """Return the algorithm with the number of a round, which marks its messages."""
        if self.solver == "gradient":
            return self
        return eqx.tree_at(lambda x: x.number, self, number, is_leaf=lambda x: x is None)

    def first_message(self, key, data: PerPCAMember, warm_start) -> dict[str, PyTree]:
        """Return what the server starts from, and the largest eigenvalue if steps need it."""
        # The start comes from the observed moment even if the rounds use the shrunk one.
        moment = data.observed
        first: dict[str, PyTree] = {}
        if self._descent is not None and self._descent.needs_curvature:
            inner = moment.row_products(first_components(moment, self._width))[1]
            first["curvature"] = Max(Moment.from_dense(inner).largest_eigenvalue())
        if warm_start is None and self.start == "common" and data.rows is not None:
            first["moment"] = common_message(moment, data.rows)
        elif warm_start is None:
            ranks = self.shared_rank, self._width
            first["moment"] = start_message(self.start, moment, *ranks, data.active)
        return first

    def server_init(self, key, first: dict[str, Any], like: PerPCAMember, warm_start):
        """Return the first shared components, and what the solver keeps beside them."""
        if warm_start is not None:
            shared = jnp.asarray(warm_start.shared).T
        else:
            dim, dtype = like.moment.dim, like.moment.trace.dtype
            shared = first_shared(first.get("moment"), self.shared_rank, key, dim, dtype)
        if self._descent is not None:
            return self._descent.first_state(shared, first.get("curvature"))
        return _ascent.first_state(shared, PAIRS if self.memory is None else self.memory)

    def client_init(self, key, downlink, data: PerPCAMember, warm_start) -> Rows | None:
        """Return the local components for gradient steps; otherwise each round computes them."""
        if self.solver == "quasi_newton":
            return None
        moment, shared = data.observed, downlink.shared
        if warm_start is not None and warm_start.local is not None:
            # Orthogonal to the shared ones now: where the two overlap, deflation in a round would
            # leave fewer dimensions than components.
            return beside(shared.T, warm_start.local, data.active).T
        if warm_start is not None:
            return best_local(moment, shared.T, self._width, data.active).T
        if self.start == "random":
            draw = jax.random.normal(key, (moment.dim, self._width), moment.trace.dtype)
            rows = orthonormalize_once(draw).T
            return rows if data.active is None else rows * data.active[:, None]
        return first_components(moment, self._width, data.active, shared)

    def downlink(self, server: DescentServer | _ascent.AscentServer) -> Message | Frame:
        """Return the shared components, for gradient steps with the curvature if that varies."""
        if isinstance(server, DescentServer):
            return Message(server.shared, server.curvature)
        return server.components.T

    def feasible(self, downlink: Message | Frame, data):
        """Return the downlink with orthonormal components."""
        if isinstance(downlink, Message):
            retraction = self.retraction or "polar"
            return downlink._replace(shared=retract(downlink.shared, retraction))
        return polar(downlink)

    def client_step(self, key, downlink, local, data):
        """Take a gradient step, or evaluate the objective and its gradient at a trial point."""
        if self._descent is not None:
            return self._descent.client_step(downlink, local, data.moment, data.active)
        penalty = Penalty(self._penalty, data.limit)
        part, found = evaluate(data.moment, downlink, self._width, data.active, penalty)
        mark = data.fingerprint
        uplink = _ascent.message(part.product, downlink, part.value, mark, self.number)
        return uplink, local, found

    def server_step(self, key, server, uplink):
        """Average and retract, or accept or reject a trial and take the next step."""
        if self._descent is not None:
            return self._descent.server_step(server, uplink)
        return _ascent.ascend(server, uplink, self.number)

    def for_other_data(
        self, server: DescentServer | _ascent.AscentServer
    ) -> _ascent.AscentServer | None:
        """Return a quasi-Newton state without a value to compare the next one with."""
        return None if isinstance(server, DescentServer) else _ascent.for_other_data(server)

    def client_result(self, downlink, local: Rows | None, data: PerPCAMember):
        """Return the local components beside the final shared ones."""
        shared = downlink.shared.T if isinstance(downlink, Message) else downlink
        if local is None or data.unshrunk is not None:
            return best_local(data.observed, shared, self._width, data.active)
        # Algorithm 2 returns U_R and V_(i),R, with which the last round started. Here both are
        # those after the last step, and V_(i),R+1/2 is orthogonal to U_R+1 only once it is
        # deflated.
        return beside(shared, local.T, data.active)

    def shared_result(self, server: DescentServer | _ascent.AscentServer) -> Frame:
        """Return the shared components."""
        return server.shared.T if isinstance(server, DescentServer) else server.components.T

    @property
    def _penalty(self) -> Scalar:
        return hyperparameter(PENALTY) if self.local_penalty is None else self.local_penalty

    def through(self) -> Algorithm:
        """Return the problem in the shared components alone; for `"polar"`, the rounds themselves.

        The rounds of `"polar"` do not end at stationary points of the objective.
        """
        if self.variant == "polar":
            return self
        return Reduced(self, None if self.solver == "gradient" else self._penalty, self._width)

    def bases(self, server, local: Rows | None) -> Bases:
        """Return the components; none for `"quasi_newton"`."""
        if local is None:  # the server's state remembers earlier rounds: see `through`
            return Bases()
        return Bases(shared=(server.shared.T,), own=(local.mT,))
