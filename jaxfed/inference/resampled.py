"""Runs an algorithm on many resamples of its clients at once."""

from functools import partial
from typing import Any, Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxfed._checks import check_whole
from jaxfed.contract import (
    Algorithm,
    ClientsLike,
    Personalized,
    Wrapper,
    check_count,
    check_instance,
    refuse,
)
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import IncompleteSamples
from jaxfed.core.contract.reduction import Max, Mean, Sum, is_part
from jaxfed.core.contract.remarks import ENERGIES
from jaxfed.gcca.views import View
from jaxfed.inference.weights import (
    FEWEST,
    Drawn,
    check_enough,
    check_resampled,
    client_weight,
    redrawn,
    reweighted,
    row_weights,
    rows_of,
)
from jaxfed.linalg import Moment

Of = Literal["samples", "clients"]


class PerResample(NamedTuple):
    """Part of a message that reductions do not treat number by number, once per resample."""

    parts: tuple[PyTree, ...]


@final
class Resampled(Wrapper):
    """An algorithm on many resamples of its clients at once; its results have an axis of resamples.

    Clients draw the weights of their samples, or their own weights, from `seed`, their id and the
    number of the resample. So nothing about the weights is sent, and every engine can run it. A
    round sends as many times the bits of one run as there are resamples.

    A resample multiplies rows by the roots of random weights. To an algorithm whose
    `quadratic_in_samples` is True, such as those of `jf.pca` and `jf.gcca.MaxVar`, this is the same
    as drawing rows again. All views have the same weights, since their rows are the same entities.
    `jaxfed.inference.bootstrap` runs it in blocks from a solution.
    """

    algorithm: Algorithm
    state: PyTree
    seed: Int[Array, ""]
    first: Int[Array, ""]
    resamples: int = eqx.field(static=True)
    common: bool = eqx.field(static=True)  # whether `state` and the warm start are those of one run
    clients: int | None = eqx.field(static=True)

    def __init__(
        self,
        algorithm: Algorithm,
        resamples: int,
        *,
        seed: int | Int[Array, ""] = 0,
        first: int | Int[Array, ""] = 0,
        state: PyTree = None,
        states: PyTree = None,
        clients: int | None = None,
    ):
        """Set up the algorithm.

        Args:
            algorithm: the algorithm to run.
            resamples: number of resamples, at least 2.
            seed: seed of all weights.
            first: number of the first resample, so that several runs have different resamples.
            state: the server's state from which all resamples start, what
                `algorithm.for_other_data(solution.server)` returns for the solution that is passed
                as warm start. By default, each resample starts as the algorithm does, and a warm
                start is a solution of `Resampled`.
            states: in place of it, the state of each resample, with a leading axis: that of the
                solution of `Resampled` that is passed as warm start, `solution.server`.
            clients: the number of clients, to resample clients instead of samples.

        Raises:
            ValueError: if an argument has another type, a number is too small, or the algorithm
                does not declare `quadratic_in_samples`, such as networks.
        """
        check_instance("algorithm", algorithm, Algorithm, "an algorithm")
        if not algorithm.quadratic_in_samples:
            raise refuse(
                "algorithm",
                "one that sees samples through second moments or cross products alone, and says so "
                "by quadratic_in_samples",
                type(algorithm).__name__,
            )
        check_count("resamples", resamples, least=2)
        for name, number in (("seed", seed), ("first", first)):
            if not isinstance(number, jax.Array):
                check_whole(name, number, least=0)
            elif number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
                raise refuse(name, "a whole number of at least 0", number)
        if clients is not None:
            check_count("clients", clients, least=FEWEST)
            if not algorithm.energy_weighted:
                raise refuse(
                    "clients",
                    "None for an algorithm whose clients' weights are not those of their second "
                    "moments",
                    f"{clients} with {type(algorithm).__name__}",
                )
        self.algorithm, self.resamples, self.clients = algorithm, resamples, clients
        self.seed, self.first = (jnp.asarray(x, jnp.int32) for x in (seed, first))
        if state is not None and states is not None:
            raise refuse("states", "None beside state", states)
        self.state, self.common = state if states is None else states, state is not None

    @property
    def quadratic_in_samples(self) -> bool:
        """False: resamples are not resampled again."""
        return False

    @property
    def energy_weighted(self) -> bool:
        """False: what the algorithm's run warned about need not be said again."""
        return False

    def check(self, clients: ClientsLike, warm_start) -> None:
        """Refuse data without rows, or with too few, and let the algorithm check them."""
        for part in clients.parts:
            if isinstance(part, Drawn) and isinstance(clients, Clients):
                clients = resample(self, clients, 0)
                continue
            check_resampled(part)
            if self.clients is None:
                check_enough(part)
            elif isinstance(part, View):
                raise refuse("clients", "None for views, of which each is needed", self.clients)
        if self.clients is not None and self.clients != len(clients):
            raise refuse("clients", f"{len(clients)}, all clients", self.clients)
        if warm_start is not None and not self.common:
            # What is not a result of as many resamples has other shapes, which are refused below.
            first = (
                jax.tree.map(lambda x: x[0] if x.ndim else x, warm_start.shared),
                jax.tree.map(lambda x: x[:, 0] if x.ndim > 1 else x, warm_start.local),
            )
            warm_start = Personalized(*first)
        self.algorithm.check(clients, warm_start)

    @property
    def numbers(self) -> Int[Array, " resamples"]:
        """The numbers of the resamples."""
        return self.first + jnp.arange(self.resamples)

    def weights(
        self, data: PyTree, client_id: Int[ArrayLike, ""], number: Int[ArrayLike, ""]
    ) -> Float[Array, "..."]:
        """Return the weights of ONE client's rows in one resample, or that of the client.

        Moments of rows that were drawn before have the weight 1.
        """
        key = jax.random.key(self.seed)
        if not isinstance(data, View):  # whose rows are entities, and the same in all views
            key = jax.random.fold_in(key, client_id)
        if self.clients is not None:
            return client_weight(key, number, self.clients, data.count.dtype)
        if isinstance(data, Moment):
            return jnp.ones_like(data.count)
        return row_weights(key, number, jnp.asarray(rows_of(data)), data.values.shape[-2])

    def prepare(self, data, client_id, rounds):
        """Return what the algorithm prepares of each resample."""

        def one(data, number):
            resample = reweighted(data, self.weights(data, client_id, number))
            return self.algorithm.prepare(resample, client_id, rounds)

        if isinstance(data, Drawn):
            return jax.vmap(one)(data.moments, self.numbers)
        return jax.vmap(one, (None, 0))(data, self.numbers)

    def first_message(self, key, data, warm_start):
        """Return the algorithm's first messages, unless resamples go on from a state."""
        if self.state is not None:
            return None
        send = jax.vmap(partial(self.algorithm.first_message, key), (0, self._axes(warm_start, 0)))
        return self._messages(send(data, warm_start))

    def server_init(self, key, first, like, warm_start) -> PyTree:
        """Return the algorithm's states."""
        if self.common:
            shape = (self.resamples,)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, shape + jnp.shape(x)), self.state)
        if self.state is not None:
            return self.state
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like)

        def init(received, warm_start):
            return self.algorithm.server_init(key, received, one, warm_start)

        axes = (0, self._axes(warm_start, 1))
        return jax.vmap(init, axes, axis_size=self.resamples)(_stacked(first), warm_start)

    def downlink(self, server) -> PyTree:
        """Return the algorithm's downlinks."""
        return jax.vmap(self.algorithm.downlink)(server)

    def feasible(self, downlink, data) -> PyTree:
        """Return the algorithm's downlinks as its clients use them."""
        return jax.vmap(self.algorithm.feasible)(downlink, data)

    def client_init(self, key, downlink, data, warm_start) -> PyTree:
        """Return the algorithm's local states."""
        init = partial(self.algorithm.client_init, key)
        return jax.vmap(init, (0, 0, self._axes(warm_start, 0)))(downlink, data, warm_start)

    def client_step(self, key, downlink, local, data):
        """Take the algorithm's step on each resample, with the same random key."""

        def step(downlink, local, data):
            return self.algorithm.client_step(key, downlink, local, data)

        uplinks, local, diagnostics = jax.vmap(step)(downlink, local, data)
        # Energies are those of one model's components, of which the run's status speaks.
        kept = {name: x for name, x in diagnostics.items() if name not in ENERGIES}
        return self._messages(uplinks), local, jax.tree.map(jnp.mean, kept)

    def server_step(self, key, server, uplink):
        """Take the algorithm's step for each resample."""
        step = jax.vmap(partial(self.algorithm.server_step, key))
        server, diagnostics = step(server, _stacked(uplink))
        means = jax.tree.map(jnp.mean, dict(diagnostics))
        # A tolerance is met once the slowest resample meets it.
        for name in ("gap", "stopping_measure"):
            if name in means:
                means[name] = jnp.max(diagnostics[name])
        return server, means

    def client_result(self, downlink, local, data) -> PyTree:
        """Return the algorithm's local results."""
        return jax.vmap(self.algorithm.client_result)(downlink, local, data)

    def shared_result(self, server) -> PyTree:
        """Return the algorithm's shared results."""
        return jax.vmap(self.algorithm.shared_result)(server)

    def remarks(self, result, history) -> tuple[str, ...]:
        """Return none: the algorithm's are those of one model."""
        return ()

    def through(self) -> Algorithm:
        """Refuse implicit derivatives.

        Raises:
            ValueError: always.
        """
        raise refuse("adjoint", "one run's algorithm for an implicit derivative", self)

    def _axes(self, warm_start: Personalized | None, local: int) -> Personalized | None:
        """Return the axes of resamples in a warm start, for `jax.vmap`."""
        return None if warm_start is None or self.common else Personalized(0, local)

    def _messages(self, message: PyTree) -> PyTree:
        """Split a message of all resamples into parts that reductions treat correctly."""

        def one(part: Any) -> Any:
            if not is_part(part) or isinstance(part, Mean | Sum | Max):
                return part
            return PerResample(tuple(_row(part, i) for i in range(self.resamples)))

        return jax.tree.map(one, message, is_leaf=is_part)


def resample(draws: Resampled, clients: Clients, place: int | Int[Array, ""]) -> Clients:
    """Return the clients of one resample of a block, with other samples, their weights or moments.

    If clients are drawn, they have other weights instead.

    Args:
        draws: the resamples.
        clients: the clients, or what was drawn of each before.
        place: place of the resample in the block, counted from 0.
    """
    data, number = clients.data, draws.first + place
    if isinstance(data, Drawn):
        data = jax.tree.map(lambda x: x[:, place], data.moments)
    if draws.clients is None and isinstance(data, IncompleteSamples):
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(draws.seed)))(clients.ids)
        data = jax.vmap(redrawn, (0, None, 0))(keys, number, data)
        return eqx.tree_at(lambda x: x.data, clients, data)
    weights = jax.vmap(draws.weights, (0, 0, None))(data, clients.ids, number)
    if draws.clients is None:
        return eqx.tree_at(lambda x: x.data, clients, jax.vmap(reweighted)(data, weights))
    weights = clients.weights * weights
    return eqx.tree_at(lambda x: (x.data, x.weights), clients, (data, weights / weights.sum()))


def _row(tree: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)


def _stacked(received: PyTree) -> PyTree:
    """Return what the server received, with a leading axis of resamples throughout."""

    def one(node: Any) -> Any:
        if not isinstance(node, PerResample):
            return node
        return jax.tree.map(lambda *parts: jnp.stack(parts), *node.parts)

    return jax.tree.map(one, received, is_leaf=lambda x: isinstance(x, PerResample))
