"""Algorithms whose means over clients are replaced by a robust aggregate of group means."""

from collections.abc import Mapping
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jaxfed._checks import check_count, check_flag, check_instance
from jaxfed.aggregation.messages import GroupMessage, Received, Sender, aggregated
from jaxfed.aggregation.rules import Rule, Shares, biweight
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import Algorithm, ClientsLike
from jaxfed.core.contract.bases import Bases
from jaxfed.core.contract.wrapper import Wrapper

# Groups at more than this multiple of the median distance from the aggregate count as far.
FAR = 3.0


class RobustMember(NamedTuple):
    """One client's prepared data."""

    data: PyTree
    group: Int[Array, ""]


class RobustServer(NamedTuple):
    """The server's state."""

    server: PyTree  # of the algorithm
    distances: Shares  # of the groups from the last aggregate, in units of the median one


@final
class Robust(Wrapper):
    """An algorithm whose means over clients are replaced by a robust aggregate of group means.

    A bare array in a message, which is a mean, becomes the aggregate of the groups' means, and a
    `Sum` the aggregate of their means times the number of participants. Each part of a message is
    aggregated on its own, since large differences between clients in one part would hide small lies
    in another. A part wrapped in `Mean` remains a plain mean.

    Second moments, such as those of a start, other symmetric matrices and `Gram` products are means
    too. They are sent as upper triangles, and the server holds those of all groups. A `Max` before
    the rounds, such as that of curvatures, becomes twice the median over groups if that is smaller.
    Other parts of a message, such as `Gather`, have no robust form and are refused.

    Groups are fixed: a client's group is its id modulo their number. Every bad client spoils its
    group, so there must be more than twice as many groups as bad clients. With as many groups as
    clients, each client is alone in its group. The server sees the groups' means: fewer groups hide
    their members better. Messages are one or two numbers longer than the algorithm's.

    A client whose message is not finite counts as absent, and the run continues; `not_finite` in
    the history is the share of such clients by weight.

    Derivatives leave out how the basis of a start rotates with the data. Means do not depend on
    that, but robust aggregates do: by about 3e-4 of the derivative with `biweight`, more with the
    rules that are not `rotation_equivariant`. From a random or a warm start, unrolled derivatives
    are exact.

    No aggregate can recognise a client that moves its data within the spread of honest clients.
    Objectives in the history are plain means of what clients report; a client whose message is not
    finite adds 0 to them.
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
            algorithm: algorithm that sends means or sums in its rounds.
            rule: rule that aggregates the groups' means; by default `biweight()`.
            groups: number of groups, at least 3.
            masked: send sums for all groups, all zero except the client's own, so that
                `jaxfed.channel.secure_sum` can hide which client sent what. Messages are `groups`
                times as large.

        Raises:
            ValueError: if an argument has another type, or there are fewer than three groups.
        """
        check_instance("algorithm", algorithm, Algorithm, "an algorithm")
        rule = biweight() if rule is None else rule
        check_instance("rule", rule, Rule, "a rule such as biweight()")
        check_count("groups", groups, least=3)
        check_flag("masked", masked)
        self.algorithm, self.rule, self.groups, self.masked = algorithm, rule, groups, masked

    @property
    def energy_weighted(self) -> bool:
        """False: the influence of every client is bounded."""
        return False

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if a group has no clients, or the algorithm refuses the data."""
        # Without local parts, these may be any number of new clients of a run that has ended.
        if warm_start is None or warm_start.local is not None:
            self._check_groups(clients)
        self.algorithm.check(clients, warm_start)

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

    def inner_server(self, server: RobustServer) -> PyTree:
        """Return the algorithm's state."""
        return server.server

    def inner_data(self, data: RobustMember) -> PyTree:
        """Return the algorithm's data."""
        return data.data

    def prepare(self, data, client_id, rounds) -> RobustMember:
        """Return what the algorithm prepares, and the client's group."""
        return RobustMember(
            self.algorithm.prepare(data, client_id, rounds), client_id % self.groups
        )

    def first_message(self, key, data: RobustMember, warm_start) -> PyTree:
        """Return the algorithm's message, with means and sums sent to the client's group."""
        message = self.algorithm.first_message(key, data.data, warm_start)
        return self._sent(message, data.group, _all_finite(message), first=True)

    def server_init(self, key, first: PyTree, like: RobustMember, warm_start) -> RobustServer:
        """Return the algorithm's state, from the aggregate of the first messages."""
        received = Received(first, jnp.zeros(self.groups))
        if isinstance(first, GroupMessage):
            received = aggregated(first, self.rule, self.groups)
        server = self.algorithm.server_init(key, received.message, like.data, warm_start)
        real = [x.dtype for x in jax.tree.leaves(server) if jnp.issubdtype(x.dtype, jnp.floating)]
        return RobustServer(server, received.distances.astype(jnp.result_type(jnp.float32, *real)))

    def client_step(self, key, downlink, local, data: RobustMember):
        """Take the algorithm's step, with means and sums sent to the client's group."""
        uplink, local, diagnostics = self.algorithm.client_step(key, downlink, local, data.data)
        finite = _all_finite((uplink, diagnostics))
        diagnostics = {k: jnp.where(finite, x, 0) for k, x in diagnostics.items()}
        absent = (~finite).astype(diagnostics["objective"].dtype)
        sent = self._sent(uplink, data.group, finite)
        return sent, local, {**diagnostics, "not_finite": absent}

    def server_step(self, key, server: RobustServer, uplink: GroupMessage):
        """Take the algorithm's step with the aggregate."""
        # If the rounds send no messages, distances stay those of the first messages.
        received = Received(None, server.distances)
        if uplink is not None:
            received = aggregated(uplink, self.rule, self.groups)
        after, diagnostics = self.algorithm.server_step(key, server.server, received.message)
        distances = received.distances.astype(server.distances.dtype)
        far = jnp.sum(distances > FAR).astype(distances.dtype)
        return RobustServer(after, distances), {**diagnostics, "far_groups": far}

    def for_other_data(self, server: RobustServer) -> RobustServer | None:
        """Return the algorithm's state as a start on other data."""
        inner = self.algorithm.for_other_data(server.server)
        return None if inner is None else RobustServer(inner, server.distances)

    def bases(self, server: RobustServer, local) -> Bases:
        """Return the algorithm's bases.

        Raises:
            ValueError: if the algorithm cannot be differentiated by its own round, or the aggregate
                depends on how bases are rotated, which an implicit derivative leaves out.
        """
        found = self.inner_bases(server, local)
        turns = any(basis.shape[-1] > 1 for basis in found.shared)
        if turns and not self.rule.rotation_equivariant:
            raise ValueError(
                "adjoint: wanted a rule that rotates with the components, such as biweight, for an "
                f"implicit derivative, got {type(self.rule).__name__}"
            )
        return found

    def remarks(self, result, history) -> tuple[str, ...]:
        """Return the algorithm's warnings, and warn about lost messages and far groups."""
        found = self.algorithm.remarks(result, history)
        lost, far = (last_known(history, name) for name in ("not_finite", "far_groups"))
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
        self, message: PyTree, group: Int[Array, ""], finite: Bool[Array, ""], first: bool = False
    ) -> PyTree:
        name = type(self.algorithm).__name__
        return Sender(group, self.groups, self.masked).sent(message, finite, first=first, name=name)


def last_known(history: Mapping[str, np.ndarray], name: str) -> float:
    """Return the last entry that is a number, zero if none is; it is NaN where nobody took part."""
    values = np.asarray(history[name], float)
    return float(next(iter(values[np.isfinite(values)][::-1]), 0.0))


def _all_finite(tree: PyTree) -> Bool[Array, ""]:
    found = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack([jnp.array(True), *found]))
