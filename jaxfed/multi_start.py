"""Several starts of one algorithm at once, of which the result is the best."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.contract import Algorithm, Bases, ClientsLike, Wrapper, check_count, check_instance
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.reduction import plain, wrapped
from jaxfed.core.contract.remarks import MEASURES
from jaxfed.core.round.protocol import received_shapes

# Enough rounds to tell which start leads to a good optimum.
ROUNDS = 30
# Objectives that differ by a smaller share count as equal.
TIE = 1e-3


class MultiStartServer(NamedTuple):
    """The server's state."""

    servers: PyTree  # of the algorithm, with a leading axis of starts
    best: Int[Array, ""]  # the start whose result is the run's


class Downlink(NamedTuple):
    """What the server sends."""

    downlinks: tuple[PyTree, ...]  # of the algorithm, one per start
    best: Int[Array, ""]


class Uplink(NamedTuple):
    """What a client sends."""

    uplinks: tuple[PyTree, ...]  # of the algorithm, one per start
    objectives: Float[Array, " starts"]


@final
class MultiStart(Wrapper):
    """An algorithm from several starts at once; the result is that of the lowest objective.

    Problems with many local optima are rarely solved from the first start. Some rounds tell which
    start leads to a good optimum, and a run of the algorithm itself continues from there::

        model = jf.pca.PerPCA(2, 3, start="random")
        several = jf.fit(jf.MultiStart(model, 8), clients, rounds=20, key=key)
        solution = jf.fit(model, clients, rounds=100, key=key, warm_start=several)

    Each start has messages of its own, so a round sends as many times the bits of one start; one
    number more for each start goes up, and one down. If objectives of the last round differ by at
    most a thousandth, the earlier start wins. From a warm start, all starts are the same. The
    history's objective, stopping measure and other diagnostics of the server are those of the best
    start; clients' diagnostics are means over starts.
    """

    algorithm: Algorithm
    starts: tuple[Algorithm, ...]

    def __init__(self, algorithm: Algorithm, starts: int | Sequence[Algorithm]):
        """Set up the algorithm.

        Args:
            algorithm: the algorithm that takes all rounds.
            starts: number of starts, at least 2: those of `algorithm.different_starts`, which for
                personalized PCA are `"common"`, `"local_first"` and random ones; or the algorithms
                that choose the starts, which differ from `algorithm` in their starts alone.

        Raises:
            ValueError: if an argument has another type, there are fewer than two starts, or other
                settings than the start differ. A run raises it if two starts are equal.
        """
        check_instance("algorithm", algorithm, Algorithm, "an algorithm")
        if isinstance(starts, Sequence):
            for each in starts:
                check_instance("starts", each, type(algorithm), type(algorithm).__name__)
                _check_alike(algorithm, each)
            check_count("number of starts", len(starts), least=2)
        else:
            check_count("starts", starts, least=2)
            starts = algorithm.different_starts(starts)
        self.algorithm, self.starts = algorithm, tuple(starts)

    def check(self, clients, warm_start) -> None:
        """Let the algorithm check the data and the warm start."""
        self.algorithm.check(clients, warm_start)
        if warm_start is None:
            self._check_different(clients)

    def different_starts(self, count: int) -> Sequence[Algorithm]:
        """Return copies: the starts are chosen already."""
        return [self] * count

    def _check_different(self, clients: ClientsLike) -> None:
        """Raise a `ValueError` if several starts are equal and do not depend on the key."""
        for place, one in enumerate(self.starts):
            alike = any(_equal(one, other) for other in self.starts[:place])
            if alike and not _depends_on_key(one, clients):
                raise ValueError(
                    f"starts: wanted different ones, got {one!r} twice, whose start does not "
                    "depend on the key; give fewer, or algorithms that start elsewhere"
                )

    def first_message(self, key, data, warm_start):
        """Return the algorithm's first messages, one per start."""

        def send(one: Algorithm, key) -> PyTree:
            return one.first_message(key, data, warm_start)

        # Not stacked, since messages of different algorithms may have different parts.
        return tuple(part for count, x in self._each(send, key) for part in _parts(x, count))

    def server_init(self, key, first, like, warm_start) -> MultiStartServer:
        """Return the algorithm's states."""

        def init(one: Algorithm, key, received) -> PyTree:
            return one.server_init(key, received, like, warm_start)

        states = _joined([state for _, state in self._each(init, key, first)])
        return MultiStartServer(states, jnp.zeros((), jnp.int32))

    def downlink(self, server: MultiStartServer) -> Downlink:
        """Return the algorithm's downlinks, and which start is the best."""
        downlinks = jax.vmap(self.algorithm.downlink)(server.servers)
        return Downlink(_parts(downlinks, len(self.starts)), server.best)

    def feasible(self, downlink: Downlink, data) -> Downlink:
        """Return the algorithm's downlinks as its clients use them."""
        each = (self.algorithm.feasible(one, data) for one in downlink.downlinks)
        return downlink._replace(downlinks=tuple(each))

    def client_init(self, key, downlink: Downlink, data, warm_start) -> PyTree:
        """Return the algorithm's local states, with a leading axis of starts."""

        def init(one: Algorithm, key, received) -> PyTree:
            return one.client_init(key, received, data, warm_start)

        return _joined([local for _, local in self._each(init, key, downlink.downlinks)])

    def client_step(self, key, downlink: Downlink, local, data):
        """Take the algorithm's step of every start."""

        def step(key, received, local):
            return self.algorithm.client_step(key, received, local, data)

        keys, received = self._keys(key), _stacked(downlink.downlinks)
        uplinks, local, diagnostics = jax.vmap(step)(keys, received, local)
        means = {name: values.mean() for name, values in diagnostics.items()}
        # The run's status is that of the best start.
        for name in {*MEASURES} & means.keys():
            means[name] = diagnostics[name][downlink.best]
        parts = _parts(uplinks, len(self.starts))
        return Uplink(parts, diagnostics["objective"]), local, means

    def server_step(self, key, server: MultiStartServer, uplink: Uplink):
        """Take the algorithm's step of every start, and find the best one."""
        step = jax.vmap(self.algorithm.server_step)
        servers, diagnostics = step(self._keys(key), server.servers, _stacked(uplink.uplinks))
        # Where the server computes the objective itself, as in `BlockLanczos`, that one counts.
        objectives = diagnostics.get("objective", uplink.objectives)
        least = jnp.nanmin(objectives)  # a start that fails is not the best
        # The first of those that count as equal to the least.
        best = jnp.argmax(objectives <= least + TIE * jnp.abs(least)).astype(jnp.int32)
        of_best = {name: values[best] for name, values in diagnostics.items()}
        return MultiStartServer(servers, best), {**of_best, "objective": objectives[best]}

    def client_result(self, downlink: Downlink, local, data) -> PyTree:
        """Return the algorithm's local result from the best start."""
        received, local = _one((_stacked(downlink.downlinks), local), downlink.best)
        return self.algorithm.client_result(received, local, data)

    def shared_result(self, server: MultiStartServer) -> PyTree:
        """Return the algorithm's shared result from the best start."""
        return self.algorithm.shared_result(_one(server.servers, server.best))

    def through(self) -> Algorithm:
        """Return the round that differentiates the algorithm's solutions."""
        return self.algorithm.through()

    def bases(self, server: MultiStartServer, local) -> Bases:
        """Return none: the algorithm's own round differentiates its solutions."""
        return Bases()

    def _keys(self, key):
        return jax.random.split(key, len(self.starts))

    def _each(self, function: Callable[..., PyTree], key, *received) -> list[tuple[int, PyTree]]:
        """Call a function with the algorithm of each start, its key and what it receives.

        Returns:
            For each run of algorithms in `starts` that differ at most in numbers, which are
            compiled once: how many there are, and the results with a leading axis.
        """
        keys, found, first = self._keys(key), [], 0
        for _, alike in groupby(self.starts, key=jax.tree.structure):
            algorithms = list(alike)
            last = first + len(algorithms)
            own = [_stacked(each[first:last]) for each in received]
            result = jax.vmap(function)(_stacked(algorithms), keys[first:last], *own)
            found.append((len(algorithms), result))
            first = last
        return found


def _check_alike(algorithm: Algorithm, other: Algorithm) -> None:
    """Raise a `ValueError` if other settings than the start differ, as then would the states."""
    for field in dataclasses.fields(algorithm):
        one, two = (getattr(each, field.name) for each in (algorithm, other))
        if isinstance(one, Algorithm) and isinstance(two, Algorithm):
            _check_alike(one, two)
            continue
        # Numbers may differ, since those of `algorithm` count in all rounds, but must be given in
        # both or in neither.
        alike = jax.tree.structure(one) == jax.tree.structure(two)
        if field.metadata.get("static", False):
            alike = one == two
        if field.name != "start" and not alike:
            raise ValueError(
                "starts: wanted algorithms that differ from `algorithm` in their starts alone, got "
                f"{field.name} {two} beside {one}"
            )


def _equal(one: Algorithm, other: Algorithm) -> bool:
    """Whether two algorithms are known to be equal."""
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        x is y or (is_known((x, y)) and np.array_equal(x, y)) for x, y in leaves
    )


def _depends_on_key(algorithm: Algorithm, clients: ClientsLike) -> bool:
    """Whether the algorithm's first states depend on the random key."""
    key, zero = jax.random.key(0), jnp.zeros((), jnp.int32)
    own = jax.eval_shape(lambda x: jax.tree.map(lambda leaf: leaf[0], x), clients.parts[0])
    data = jax.eval_shape(lambda x: algorithm.prepare(x, zero, 1), own)

    def first(key, data):
        return wrapped(algorithm.first_message(key, data, None))

    def server(key, received):
        return algorithm.server_init(key, received, data, None)

    def local(key, downlink, data):
        return algorithm.client_init(key, downlink, data, None)

    received = plain(received_shapes(jax.eval_shape(first, key, data)))
    state = jax.eval_shape(server, key, received)
    downlink = jax.eval_shape(algorithm.downlink, state)
    return (
        _depends_on_first(first, key, data)
        or _depends_on_first(server, key, received)
        or _depends_on_first(local, key, downlink, data)
    )


def _depends_on_first(function: Callable[..., PyTree], *arguments: PyTree) -> bool:
    """Whether a function's result may depend on its first argument, an array."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    known = {jaxpr.invars[0]}
    # Constants have a value; whatever is computed from something that depends may depend too.
    for step in jaxpr.eqns:
        if any(x in known for x in step.invars if not hasattr(x, "val")):
            known.update(step.outvars)
    return any(x in known for x in jaxpr.outvars if not hasattr(x, "val"))


def _stacked(parts: Sequence[PyTree]) -> PyTree:
    """Trees of the same structure as one with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def _one(tree: PyTree, index) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _joined(parts: Sequence[PyTree]) -> PyTree:
    """Trees of the same structure, joined along their leading axes."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _parts(tree: PyTree, count: int) -> tuple[PyTree, ...]:
    """The inverse of `_stacked`."""
    return tuple(_one(tree, i) for i in range(count))
