"""Algorithms whose means over clients are replaced by a robust aggregate of group means."""

from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._checks import check_count, check_flag, check_instance
from jaxfed.aggregation.rules import Biweight, Rows, Rule, Shares, distances, weighted_quantile
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract import fixed_point
from jaxfed.core.contract.algorithm import Algorithm, ClientsLike
from jaxfed.core.contract.bases import Bases
from jaxfed.core.contract.fixed_point import DifferentiatedThrough, HasBases
from jaxfed.core.contract.groups import Groups
from jaxfed.core.contract.reduction import Max, Mean, Part, Sum, is_part, plain
from jaxfed.core.contract.remarks import HasRemarks

# Groups at more than this multiple of the median distance from the aggregate are listed as far.
FAR = 3.0
# A step for curvatures up to this multiple of the median one; see `Robust`.
CURVATURE = 2.0
# Parts of fewer numbers than about this count less in distances.
FEW = 10


# What becomes of a part of a message. It holds the part as it is sent, and its reduction after.
class _Averaged(eqx.Module):
    value: Any


class _Summed(eqx.Module):
    value: Any


class _Largest(eqx.Module):
    value: Any


def _is_kind(node: object) -> bool:
    return isinstance(node, _Averaged | _Summed | _Largest)


class Message(NamedTuple):
    """A message whose means and sums are sent to the client's group."""

    parts: PyTree
    weight: PyTree  # a one, of which the server receives what groups weigh
    participants: PyTree  # a one, of which it receives how many clients of a group take part


class Member(NamedTuple):
    """One client's prepared data."""

    data: PyTree
    group: Int[Array, ""]


class Server(NamedTuple):
    """The server's state."""

    server: PyTree  # of the algorithm
    distances: Shares  # of the groups from the last aggregate, in units of the median one


@final
class Robust(Algorithm, DifferentiatedThrough, HasBases, HasRemarks):
    """An algorithm whose means over clients are replaced by a robust aggregate of group means.

    A bare array of a message, a mean, becomes the aggregate of the groups' means, and a `Sum` the
    aggregate of their means times the number of participants. The parts of one message are
    aggregated together, each in units of its own spread, so that a group that is far from the
    others in one part has little influence on all. A part that is named a `Mean` stays one. Before
    the rounds, a `Max`, as of curvatures, becomes twice the median over groups if that is smaller;
    other parts, as the moments of a start, stay as they are and are not robust: pass a
    `warm_start=` instead, as from `jaxfed.pca.OneShot(method="median")`.

    Groups are fixed: a client's is its id modulo their number. Every bad client spoils its group,
    so there must be more than twice as many groups as bad clients; with as many groups as clients
    each is alone. The server sees the means of groups: with fewer groups, each hides its members
    better. Messages are larger than the algorithm's by one or two numbers.

    A client whose message is not finite counts as absent, and the run goes on; the history's
    `not_finite` is the share of such clients by weight.

    No aggregate can recognise a client that moves its data within the spread of honest ones.
    Objectives in the history are plain means of what the clients report; a client whose message is
    not finite adds 0 to them.
    """

    algorithm: Algorithm
    rule: Rule
    groups: int = eqx.field(static=True)
    masked: bool = eqx.field(static=True)

    def __init__(
        self,
        algorithm: Algorithm,
        rule: Rule | None = None,
        *,
        groups: int,
        masked: bool = False,
    ):
        """Set up the algorithm.

        Args:
            algorithm: sends means or sums in its rounds.
            rule: aggregates the groups' means; by default `Biweight()`.
            groups: number of groups, at least 3.
            masked: send the sums of all groups, of which all but the client's own are zero, so that
                `jaxfed.channel.secure_sum` can hide who sends what. Messages are `groups` times as
                large.

        Raises:
            ValueError: for an argument of another type, or fewer than three groups.
        """
        check_instance("algorithm", algorithm, Algorithm, "an algorithm")
        rule = Biweight() if rule is None else rule
        check_instance("rule", rule, Rule, "a rule such as Biweight()")
        check_count("groups", groups, least=3)
        check_flag("masked", masked)
        self.algorithm, self.rule, self.groups, self.masked = algorithm, rule, groups, masked

    @property
    def needs_everybody(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every client must take part in each round: if the algorithm needs it."""
        return self.algorithm.needs_everybody

    @property
    def energy_weighted(self) -> bool:
        """Whether a client's influence grows with the energy of its samples: it is bounded."""
        return False

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for groups without clients, or what the algorithm refuses."""
        # Without local parts, these may be new clients of a run that has ended, and any few.
        if start is None or start.local is not None:
            self._check_groups(clients)
        self.algorithm.check(clients, start)

    def _check_groups(self, clients: ClientsLike) -> None:
        if self.groups > len(clients):
            raise ValueError(
                f"groups: wanted at most the number of clients, {len(clients)}, got {self.groups}"
            )
        if is_known(clients.ids):
            ids = np.asarray(clients.ids)
            empty = self.groups - len(np.unique(ids % self.groups))
            if empty:
                raise ValueError(
                    "groups: wanted clients in each, by ids modulo their number, got "
                    f"{empty} of {self.groups} groups without any; take fewer groups, or ids from "
                    f"0 to {len(ids) - 1}"
                )

    def at_round(self, number):
        """The algorithm as it is in one round."""
        return eqx.tree_at(lambda x: x.algorithm, self, self.algorithm.at_round(number))

    def prepare(self, data, client_id, rounds) -> Member:
        """What the algorithm prepares, and the client's group."""
        return Member(self.algorithm.prepare(data, client_id, rounds), client_id % self.groups)

    def first_message(self, key, data: Member, start) -> PyTree:
        """The algorithm's, with means and sums sent to the client's group."""
        message = self.algorithm.first_message(key, data.data, start)
        if not jax.tree.leaves(message):
            return message
        return self._sent(message, data.group, _all_finite(message), first=True)

    def server_init(self, key, first: PyTree, like: Member, start) -> Server:
        """The algorithm's state, from the aggregate of the first messages."""
        received = self._received(first).message if isinstance(first, Message) else first
        server = self.algorithm.server_init(key, received, like.data, start)
        real = [x.dtype for x in jax.tree.leaves(server) if jnp.issubdtype(x.dtype, jnp.floating)]
        return Server(server, jnp.zeros(self.groups, jnp.result_type(jnp.float32, *real)))

    def downlink(self, server: Server):
        """The algorithm's."""
        return self.algorithm.downlink(server.server)

    def client_init(self, key, downlink, data: Member, start):
        """The algorithm's."""
        return self.algorithm.client_init(key, downlink, data.data, start)

    def client_step(self, key, downlink, local, data: Member):
        """The algorithm's, with means and sums sent to the client's group."""
        uplink, local, diagnostics = self.algorithm.client_step(key, downlink, local, data.data)
        finite = _all_finite((uplink, diagnostics))
        diagnostics = {k: jnp.where(finite, x, 0) for k, x in diagnostics.items()}
        absent = (~finite).astype(diagnostics["objective"].dtype)
        sent = self._sent(uplink, data.group, finite)
        return sent, local, {**diagnostics, "not_finite": absent}

    def server_step(self, key, server: Server, uplink: Message):
        """The algorithm's, on the aggregate."""
        received = self._received(uplink)
        after, diagnostics = self.algorithm.server_step(key, server.server, received.message)
        distances = received.distances.astype(server.distances.dtype)
        far = jnp.sum(distances > FAR).astype(distances.dtype)
        return Server(after, distances), {**diagnostics, "far_groups": far}

    def client_result(self, downlink, local, data: Member):
        """The algorithm's."""
        return self.algorithm.client_result(downlink, local, data.data)

    def shared_result(self, server: Server):
        """The algorithm's."""
        return self.algorithm.shared_result(server.server)

    def through(self) -> Algorithm:
        """The round of the same algorithm, perhaps with other settings, aggregated as here.

        Two algorithms that have the same solutions with means of their messages have different
        ones with robust aggregates, so another algorithm's round would give a wrong derivative.

        Raises:
            ValueError: if the algorithm is differentiated by another, because its own state has a
                memory.
        """
        inner = fixed_point.through(self.algorithm)
        if type(inner) is type(self.algorithm):
            return Robust(inner, self.rule, groups=self.groups, masked=self.masked)
        if isinstance(self.algorithm, HasBases):  # of its own state, which is then a point
            return self
        raise ValueError(
            "adjoint: wanted an algorithm that can be differentiated by its own round for a robust "
            f"aggregate, got {type(self.algorithm).__name__}; take adjoint.unrolled()"
        )

    def bases(self, server: Server, local) -> Bases:
        """The algorithm's."""
        return fixed_point.bases(self.algorithm, server.server, local)

    def remarks(self, result, history) -> tuple[str, ...]:
        """The algorithm's, and how many groups are far from the aggregate."""
        inner = self.algorithm
        found = inner.remarks(result, history) if isinstance(inner, HasRemarks) else ()
        lost, far = (
            float(np.asarray(history[name])[-1]) if len(history[name]) else 0.0
            for name in ("not_finite", "far_groups")
        )
        if lost > 0:
            found += (
                f"Messages of {lost:.3g} of the clients, by weight, were not finite and did not "
                "count.",
            )
        if far > 0:
            found += (
                f"{far:.0f} of {self.groups} groups of clients were more than {FAR:g} times as far "
                "from the aggregate as the median group; see jaxfed.aggregation.far_clients.",
            )
        return found

    def _sent(
        self,
        message: PyTree,
        group: Int[Array, ""],
        finite: Bool[Array, ""],
        first: bool = False,
    ) -> Message:
        def one(part: Part | Array) -> PyTree:
            if not is_part(part):
                return self._grouped(_Averaged, part, group)
            if isinstance(part, Sum):
                return self._grouped(_Summed, part.value, group)
            if isinstance(part, Max) and first:
                return self._grouped(_Largest, part.value, group)
            if isinstance(part, Mean) or first:
                return part
            raise ValueError(
                "algorithm: wanted means and sums in the rounds' messages for a robust aggregate, "
                f"got {type(part).__name__} from {type(self.algorithm).__name__}"
            )

        parts = jax.tree.map(one, _present(message, finite), is_leaf=is_part)
        kinds = jax.tree.leaves(parts, is_leaf=_is_kind)
        weighted, plainly = (
            any(isinstance(x, kind) for x in kinds) for kind in (_Averaged | _Largest, _Summed)
        )
        one_ = finite.astype(jnp.result_type(*jax.tree.leaves(plain(message))))
        weight = self._grouped(_Averaged, one_, group, limit=1.0).value if weighted else None
        participants = self._grouped(_Summed, one_, group, limit=1.0).value if plainly else None
        return Message(parts, weight, participants)

    def _grouped(
        self, kind: type, value: PyTree, group: Int[Array, ""], limit: float | None = None
    ) -> PyTree:
        """Parts of a kind, each sent to the client's group."""
        weighted = kind is not _Summed

        def one(x: Array) -> eqx.Module:
            if not self.masked:
                return kind(Groups(x, self.groups, weighted, limit))
            own = (jnp.arange(self.groups) == group).reshape(-1, *[1] * x.ndim)
            return kind((Mean if weighted else Sum)(jnp.where(own, x, 0)))

        return jax.tree.map(one, value)

    def _received(self, received: Message) -> "_Received":
        """The message with aggregates in place of the sums of groups."""
        nodes, structure = jax.tree.flatten(received.parts, is_leaf=_is_kind)
        grouped = [i for i, node in enumerate(nodes) if _is_kind(node)]
        if not grouped:
            return _Received(received.parts, jnp.zeros(self.groups))
        total = received.participants if received.weight is None else received.weight
        # Groups without participants do not count. Lossy channels may leave others less than zero.
        there = total > 1e-3 * total.max()
        shares = jnp.where(there, total, 0) / jnp.where(there, total, 0).sum()

        def means(node: Any) -> Rows:
            mass: Any = received.participants if isinstance(node, _Summed) else received.weight
            rows = node.value.reshape(self.groups, -1)
            # Both are masked before they are divided: derivatives of what does not count are zero.
            return jnp.where(there[:, None], rows, 0) / jnp.where(there, mass, 1)[:, None]

        rows = {i: means(nodes[i]) for i in grouped}
        spreads = {i: _spread(rows[i], shares) for i in grouped}
        joint = [i for i in grouped if not isinstance(nodes[i], _Largest)]
        values, lengths = {}, jnp.zeros_like(shares)
        if joint:
            scaled = jnp.concatenate([spreads[i].scaled(rows[i]) for i in joint], axis=1)
            found = self.rule.aggregate(scaled, shares)
            lengths = distances(scaled, found)
            lengths = lengths / weighted_quantile(lengths[:, None], shares, 0.5)
            ends = np.cumsum([rows[i].shape[1] for i in joint])[:-1]
            values = dict(zip(joint, jnp.split(found, ends), strict=True))
        for i in grouped:
            node, spread = nodes[i], spreads[i]
            if isinstance(node, _Largest):
                value = jnp.minimum(CURVATURE * spread.center, rows[i].max(0))
            else:
                value = spread.center + spread.scale * values[i]
            if isinstance(node, _Summed):
                value = value * jnp.where(there, received.participants, 0).sum()
            nodes[i] = value.reshape(node.value.shape[1:])
        message = jax.tree.unflatten(structure, nodes)
        return _Received(message, jnp.where(there, lengths, 0))


def _all_finite(tree: PyTree) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))


def _present(message: PyTree, finite: Bool[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(finite, x, 0), message)


class _Received(NamedTuple):
    message: PyTree
    distances: Shares


class _Spread(NamedTuple):
    center: Float[Array, " numbers"]
    scale: Float[Array, ""]

    def scaled(self, rows: Rows) -> Rows:
        """Deviations from the center, in units of the scale."""
        # Further away than this no rule tells groups apart, and squares of larger numbers overflow.
        most = float(jnp.finfo(rows.dtype).max) ** 0.4
        return jnp.clip((rows - self.center) / self.scale, -most, most)


def _spread(rows: Rows, shares: Shares) -> _Spread:
    """The coordinate-wise median of groups, and their median distance from it.

    Distances of few numbers vary more around their median, by which a single number would decide
    over all the others: the fewer, the larger the unit.
    """
    center = weighted_quantile(rows, shares, 0.5)
    lengths = jnp.linalg.norm(jax.lax.stop_gradient(rows - center), axis=1)
    numbers = rows.shape[1]
    scale = weighted_quantile(lengths[:, None], shares, 0.5)[0] * ((numbers + FEW) / numbers) ** 0.5
    return _Spread(center, jnp.where(scale > 0, scale, 1))
