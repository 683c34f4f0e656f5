"""Any algorithm as a Flower app: clients keep their data and states on their own machines.

Server and clients call the functions of `jaxfed.fit` and exchange messages. Flower starts a process
for each answer of a client, which takes seconds to import JAX unless there is a
`jaxfed.deploy.worker`, so choose algorithms that need few rounds.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxfed import _names
from jaxfed import channel as channels
from jaxfed import participation as participations
from jaxfed._checks import (
    check_callable,
    check_count,
    check_instance,
    check_name,
    check_number,
    check_options,
    checked_key,
    checked_path,
    checked_weights,
    is_whole,
    refuse,
)
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.files import locked
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.arguments import EVERYBODY, LOSSLESS, check_loop, check_rounds
from jaxfed.core.run.compiling import enable_compilation_cache
from jaxfed.core.wire import calls as wire_calls
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.deploy.exchange import Exchange
from jaxfed.deploy.federation import Settings
from jaxfed.deploy.messages import (
    NodeError,
    Packet,
    failing_as,
    logging_warnings,
    packet_of,
    refusal,
    reply_of,
)
from jaxfed.deploy.node import Node
from jaxfed.deploy.server import RunServer
from jaxfed.deploy.store import home_of, make_private
from jaxfed.linalg.precision import precise
from jaxfed.privacy.ledger import Ledger
from jaxfed.privacy.moments import release_moments
from jaxfed.privacy.once import release_once

Config = Mapping[str, Any]  # Flower's run or node configuration: strings and numbers by name
Precision = Literal["single", "double"]


def server_app(
    make_algorithm: Callable[[Config], Algorithm],
    *,
    clients: int,
    rounds: int,
    key: int | Key[Array, ""],
    channel: channels.Channel | Wire = LOSSLESS,
    participation: participations.Participation | None = None,
    warm_start: Callable[[Config], Personalized] | None = None,
    weights: Literal["equal", "samples"] | Sequence[float] = "equal",
    tol: float | None = None,
    deadline: float | None = None,
    at_least: int | None = None,
    patience: float = 600.0,
    precision: Precision | None = None,
    out: str | Path = "jaxfed-run",
) -> Any:
    """Create the server as a `flwr.serverapp.ServerApp`.

    On machines of one kind with the same versions, it learns bit for bit what `jaxfed.fit` learns
    from the same clients with `backend=jaxfed.backend.separate()`. It sees what clients send for
    the algorithm, and each client's id, and the shapes and number of its data.

    Args:
        make_algorithm: returns the algorithm, given Flower's run configuration; the same as the
            clients'.
        clients: number of clients to wait for before the first round.
        rounds: number of rounds; an upper limit with `tol`.
        key: random key or its seed, which the server passes on to the clients.
        channel: channels of the messages, as in `jaxfed.fit`; the same as the clients'.
        participation: which clients are asked in each round; all by default.
        warm_start: returns a result to start from, given the run configuration; its local part is
            ignored.
        weights: the clients' weights, as in `jaxfed.Clients.from_samples`; numbers are in order of
            the ids. The same as the clients' if messages are masked.
        tol: stop once the algorithm's stopping measure is at most this.
        deadline: seconds that a round may take. Clients that are late or gone are absent from it,
            as in `jaxfed.participation.mask`, and may take part in the next. None waits for all.
        at_least: with a deadline, number of answers required; the round continues until it has
            them. By default as many as share the channel's noise, otherwise 1, or all for an
            algorithm that needs every client.
        patience: seconds to wait for enough clients or answers before the run ends with an error.
        precision: of all numbers, `"single"` or `"double"`; by default JAX's, which is single
            unless `jax_enable_x64` is set. The same as the clients'.
        out: folder of this run alone, for the state after each round, from which a restarted server
            continues, and for `solution.npz`, which `jaxfed.load` reads. Its owner alone can read
            it. `out` in the run configuration overrides it.

    Returns:
        The app. Running it raises a `TimeoutError` if too few clients answer, a `ValueError` if too
        many do not fit or refuse, or `out` belongs to another run, a `BlockingIOError` if another
        server uses `out`, and a `FloatingPointError` if the run diverges.

    Raises:
        ValueError: if arguments do not fit together.
        ImportError: if Flower is not installed.
    """
    _check_functions("run", make_algorithm=make_algorithm, warm_start=warm_start)
    check_count("clients", clients)
    check_rounds(rounds)
    wire = checked_wire(channel)
    participants = EVERYBODY if participation is None else participation
    check_instance(
        "participation", participants, participations.Participation, "one of jaxfed.participation"
    )
    raw = _checked_weights(weights, clients)
    check_loop(tol, None, 1)
    precision = _checked_precision(precision)
    limits = {"patience": patience} | ({} if deadline is None else {"deadline": deadline})
    for name, seconds in limits.items():
        check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
    if at_least is not None:
        check_count("at_least", at_least)
        if deadline is None:
            raise refuse("at_least", "None without a deadline: all are waited for", at_least)
        if at_least < (sharers := wire_calls.sharers(wire.up)):
            raise refuse("at_least", f"as many as share the channel's noise, {sharers}", at_least)
    seeded = is_whole(key) and 0 <= key < 2**32
    seed = jax.random.key(int(key)) if seeded else checked_key("key", key)
    place = checked_path("out", out)
    flwr = require("flwr.serverapp", extra="flower")
    app = flwr.ServerApp()

    @app.main()
    @_computing_in(precision)
    @logging_warnings()
    def main(grid: Any, context: Any) -> None:
        enable_compilation_cache()
        _show_rounds()
        config = dict(context.run_config)
        algorithm = _algorithm(make_algorithm, config)
        least = at_least
        if deadline is not None:
            everybody = clients if algorithm.needs_everybody else 1
            least = max(least or wire_calls.sharers(wire.up), everybody)
        settings = Settings(
            algorithm=algorithm,
            wire=wire,
            warm_start=None if warm_start is None else warm_start(config)._replace(local=None),
            clients=clients,
            rounds=rounds,
            key=seed,
            participants=participants,
            weights=raw,
            tol=tol,
            deadline=deadline,
            at_least=least,
            patience=patience,
            out=Path(config.get("out", place)).absolute(),
        )
        make_private(settings.out, settings.out / "server")
        # Two servers would mix their rounds.
        with locked(settings.out / "server", "out", private=True):
            RunServer(settings, Exchange(grid)).solve()

    return app


def client_app(
    make_algorithm: Callable[[Config], Algorithm],
    make_data: Callable[[Config], Clients],
    *,
    channel: channels.Channel | Wire = LOSSLESS,
    warm_start: Callable[[Config], Personalized] | None = None,
    weights: Literal["equal", "samples"] | Sequence[float] = "equal",
    precision: Precision | None = None,
    folder: str | Path | None = None,
) -> Any:
    """Create a client as a `flwr.clientapp.ClientApp`.

    Its data and its state stay on its machine. It writes the state after each round to disk before
    it answers, so that a machine that is killed and restarted continues where it was. At the end
    its own model is in `result.npz` in the run's folder there, which `jaxfed.load` reads.

    Args:
        make_algorithm: returns the algorithm, given Flower's run configuration; the same as the
            server's.
        make_data: returns `Clients` with this client alone, given Flower's node configuration;
            called anew in each run. Its `partition-id` is the client's id, a unique non-negative
            integer. With `epsilon` and `delta` there, a `jaxfed.privacy.Ledger` in the client's
            folder counts its noisy messages of all runs, and the client gives none beyond that.
        channel: channels of the messages; the same as the server's.
        warm_start: returns a result to start from, given the node configuration, with this client's
            local part without an axis of clients.
        weights: how the server weights clients; must equal its `weights` if messages are masked.
            The client then computes its own weight, so that the server cannot give all others zero.
            Without masks, only the server uses weights.
        precision: as for the server. Tables of doubles need `"double"` to lose no digits.
        folder: where to keep states; by default the node configuration's `folder`, or `.jaxfed` in
            the user's home.

    Returns:
        The app.

    Raises:
        ValueError: if arguments are unsuitable.
        ImportError: if Flower is not installed.
    """
    _check_functions("run", make_algorithm=make_algorithm)
    _check_functions("node", make_data=make_data, warm_start=warm_start)
    wire, raw = checked_wire(channel), _checked_weights(weights, np.size(weights))
    precision = _checked_precision(precision)
    place = None if folder is None else checked_path("folder", folder)
    flwr = require("flwr.clientapp", extra="flower")
    app = flwr.ClientApp()

    # A worker, like other engines, answers many messages in one process. The next run has its own
    # data, which may be newer.
    @lru_cache(maxsize=1)
    def nodes_of(run: int) -> Callable[[str, str], Node]:
        return cache(node)

    def node(run_config: str, node_config: str) -> Node:
        own = json.loads(node_config)
        client_id = _partition(own)
        with failing_as("algorithm"):
            algorithm = _algorithm(make_algorithm, json.loads(run_config))
            start = None if warm_start is None else warm_start(own)
        with failing_as("data"):
            data = make_data(own)
        states = place or Path(own.get("folder", Path.home() / ".jaxfed"))
        with failing_as("configuration"):
            ledger = _ledger(own, home_of(states, client_id))
        with failing_as("data"):
            return Node(client_id, algorithm, data, wire, start, states, raw, ledger)

    @_computing_in(precision)
    @logging_warnings()
    def answer(asked: Packet, run: int, run_config: Config, node_config: Config) -> Packet:
        # Without the cache, a new process for a message or a run would compile everything again.
        enable_compilation_cache()
        configs = (run_config, node_config)
        # Flower would send the words of an exception to the server.
        try:
            made = nodes_of(run)(*(json.dumps(dict(config), sort_keys=True) for config in configs))
            return made.answer(asked)
        except Exception as error:
            return refusal(error)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        configs = (context.run_config, context.node_config)
        return reply_of(answer(packet_of(message), context.run_id, *configs), message)

    app.answer = answer  # for `jaxfed.deploy.worker`, which does not use Flower's messages
    return app


def released(
    config: Config, clients: Clients, *, epsilon: float, delta: float, **options: Any
) -> Clients:
    r"""Release a machine's data once, for `make_data`, with noise that protects each person.

    All messages of all runs are then computed from this one release, `jaxfed.privacy.release_once`
    in the client's folder, so they cost no more. Other data or options are another release. The
    `jaxfed.privacy.Ledger` in `persons.jsonl` there counts releases, and allows them as long as all
    together stay within `epsilon` and `delta`: those of the node configuration, which the site
    chooses, or else those of this call, which allow one release.

    The model that a node writes has local components of the release. Better ones come from the raw
    data, at the site: `jaxfed.pca.fit_local(jaxfed.load("result.npz"), clients)`.

    Args:
        config: the node configuration.
        clients: with this client's samples.
        epsilon: \(\varepsilon\) of the release.
        delta: \(\delta\) of the release.
        options: further arguments of `jaxfed.privacy.release_moments`, such as `person`. Here,
            `noise` is `"opendp"` by default, unless there is a `key`, which is for trials.

    Returns:
        The client with its released moment, for `make_data` to return.

    Raises:
        ValueError: as `release_moments`.
        ImportError: if OpenDP is not installed: `pip install 'jaxfed[privacy]'`.
    """
    check_options(options, release_moments, without=("clients", "epsilon", "delta", "ledger"))
    states = Path(config.get("folder", Path.home() / ".jaxfed"))
    check_instance("clients", clients, Clients, "jaxfed.Clients with one client")
    number = _partition(config)
    home = home_of(states, number)
    make_private(states, home)
    # The noise of a key is then that of `release_moments` of all clients.
    own = replace(clients, ids=jnp.full(len(clients), number, jnp.int32))
    limits = {"epsilon": config.get("epsilon", epsilon), "delta": config.get("delta", delta)}
    ledger = Ledger(home / "persons.jsonl", **limits)
    noise = "opendp" if options.get("key") is None else "jax"
    given = {"epsilon": epsilon, "delta": delta, "ledger": ledger, "noise": noise, **options}
    return release_once(home / "release.npz", own, **given)


def _checked_precision(precision: Precision | None) -> Precision | None:
    if precision is not None:
        check_name("precision", precision, ("single", "double"))
    return precision


@contextlib.contextmanager
def _computing_in(precision: Precision | None) -> Iterator[None]:
    """Compute with numbers of this precision, and multiply in all of their bits."""
    with precise(), contextlib.ExitStack() as chosen:
        if precision is not None:
            chosen.enter_context(jax.enable_x64(precision == "double"))
        yield


def _check_functions(config: str, **functions: Any) -> None:
    for name, function in functions.items():
        if name != "warm_start" or function is not None:
            optional = " or None" if name == "warm_start" else ""
            check_callable(name, function, f"a function of the {config} configuration{optional}")


def _partition(config: Config) -> int:
    """The client's id in a node configuration.

    Raises:
        NodeError: if there is none.
    """
    given = config.get("partition-id")
    if not is_whole(given) or not 0 <= given < 2**31:
        wanted = "partition-id=NUMBER, a whole number from 0"
        raise NodeError("configuration", f"node configuration: wanted {wanted}, got {given!r}")
    return int(given)


def _ledger(config: Config, home: Path) -> Ledger | None:
    """What counts a client's messages, if the node configuration limits them."""
    if "epsilon" not in config:
        return None
    if "delta" not in config:
        raise ValueError("node configuration: wanted delta=NUMBER beside epsilon, got none")
    limits = {"epsilon": config["epsilon"], "delta": config["delta"]}
    return Ledger(home / "ledger.jsonl", **limits)


def _checked_weights(weights: Any, clients: int) -> Any:
    if isinstance(weights, str):
        check_name("weights", weights, ("equal", "samples"))
        return weights
    raw = checked_weights(weights, clients)
    if not raw.sum() > 0:
        raise refuse("weights", "non-negative numbers, not all of them zero", weights)
    return raw.tolist()


def _algorithm(make: Callable[[Config], Algorithm], config: Config) -> Algorithm:
    algorithm = make(config)
    if not isinstance(algorithm, Algorithm):
        raise refuse("make_algorithm", "a jaxfed algorithm", algorithm)
    return algorithm


def _show_rounds() -> None:
    # Flower's log of a run is the output of its process.
    log = logging.getLogger("jaxfed.deploy")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


__dir__ = _names.public_names(__name__)
