"""Any algorithm as a Flower app: clients on their own machines, their data and states with them.

Server and clients call the functions of `jaxfed.fit`, and exchange messages. For each answer of a
client Flower starts a process, which takes seconds to import JAX if there is no
`jaxfed.deploy.worker`: choose algorithms that need few rounds.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
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
    checked_key,
    checked_path,
    checked_weights,
    is_whole,
    refuse,
)
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.arguments import EVERYBODY, LOSSLESS, check_loop, check_rounds
from jaxfed.core.run.compiling import enable_compilation_cache
from jaxfed.core.wire.wire import Wire, checked_wire
from jaxfed.deploy.exchange import Exchange
from jaxfed.deploy.federation import Settings
from jaxfed.deploy.messages import Packet, packet_of, reply_of
from jaxfed.deploy.node import Node
from jaxfed.deploy.server import Server
from jaxfed.linalg.precision import precise

Config = Mapping[str, Any]  # Flower's run or node configuration: texts and numbers by name


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
    out: str | Path = "jaxfed-run",
) -> Any:
    """The server, as a `flwr.serverapp.ServerApp`.

    What it learns is bit for bit what `jaxfed.fit` learns of the same clients with
    `backend=jaxfed.backend.separate()`, on machines of one kind with the same versions. Of a
    client it sees what the algorithm sends, and what the client says of itself: its id, the shapes
    of its data and their number.

    Args:
        make_algorithm: the algorithm, from Flower's run configuration; the same as the clients'.
        clients: how many there must be before the first round.
        rounds: how many rounds; at most that many with `tol`.
        key: random key, or the seed of one; the clients get it from here.
        channel: what messages go through, as in `jaxfed.fit`; the same as the clients'.
        participation: who is asked in each round; everybody by default.
        warm_start: a result to start from, from the run configuration; its local part is not used.
        weights: of clients, as in `jaxfed.Clients.from_samples`; numbers are by ascending id.
        tol: stop once the algorithm's stopping measure is at most this.
        deadline: seconds a round may take. Who is late or gone is absent in this round, as in
            `jaxfed.participation.mask`, and is welcome in the next. None: all are waited for.
        at_least: with a deadline, how many must have answered; the round goes on until they have.
            1 by default, and all of them for an algorithm that needs everybody.
        patience: seconds to wait for enough clients or answers before the run ends with an error.
        out: a folder for the state after each round, from which a server that is started again
            goes on, and for `solution.npz`, which `jaxfed.load` reads. The run configuration's
            `out` goes before it.

    Returns:
        The app. Running it raises a `TimeoutError` where too few clients answer, a `ValueError`
        where one does not fit or refuses, and a `FloatingPointError` where the run diverges.

    Raises:
        ValueError: for arguments that do not fit together.
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
    limits = {"patience": patience} | ({} if deadline is None else {"deadline": deadline})
    for name, seconds in limits.items():
        check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
    if at_least is not None:
        check_count("at_least", at_least)
        if deadline is None:
            raise refuse("at_least", "None without a deadline: all are waited for", at_least)
    seeded = is_whole(key) and 0 <= key < 2**32  # pyright: ignore[reportOperatorIssue]
    seed = jax.random.key(int(key)) if seeded else checked_key("key", key)  # pyright: ignore[reportArgumentType]
    place = checked_path("out", out)
    flwr = require("flwr.serverapp", extra="flower")
    app = flwr.ServerApp()

    @app.main()
    @precise()
    def main(grid: Any, context: Any) -> None:
        enable_compilation_cache()
        _show_rounds()
        config = dict(context.run_config)
        algorithm = _algorithm(make_algorithm, config)
        least = at_least
        if deadline is not None:
            everybody = clients if algorithm.needs_everybody else 1
            least = max(least or 1, everybody)
        settings = Settings(
            algorithm=algorithm,
            wire=wire,
            start=None if warm_start is None else warm_start(config)._replace(local=None),
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
        Server(settings, Exchange(grid)).solve()

    return app


def client_app(
    make_algorithm: Callable[[Config], Algorithm],
    make_data: Callable[[Config], Clients],
    *,
    channel: channels.Channel | Wire = LOSSLESS,
    warm_start: Callable[[Config], Personalized] | None = None,
    folder: str | Path | None = None,
) -> Any:
    """A client, as a `flwr.clientapp.ClientApp`.

    Its data and its state stay on its machine. The state after each round is on its disk before
    the answer is sent, so that a machine that is killed and started again goes on where it was.
    Its own model is `result.npz` in the run's folder there, in the end; `jaxfed.load` reads it.

    Args:
        make_algorithm: the algorithm, from Flower's run configuration; the same as the server's.
        make_data: from Flower's node configuration, `Clients` that are this one client alone;
            called anew in each run.
            `partition-id` there is the client's id, a whole number of at least 0; all differ.
        channel: what messages go through; the same as the server's.
        warm_start: a result to start from, from the node configuration, with this client's own
            local part, without an axis of clients.
        folder: where states are kept; by default the node configuration's `folder`, or
            `.jaxfed` in the user's home.

    Returns:
        The app.

    Raises:
        ValueError: for arguments that do not fit.
        ImportError: if Flower is not installed.
    """
    _check_functions("run", make_algorithm=make_algorithm)
    _check_functions("node", make_data=make_data, warm_start=warm_start)
    wire = checked_wire(channel)
    place = None if folder is None else checked_path("folder", folder)
    flwr = require("flwr.clientapp", extra="flower")
    app = flwr.ClientApp()

    # A worker and other engines answer many messages in one process. The next run has data of its
    # own, which may be newer.
    @lru_cache(maxsize=1)
    def nodes_of(run: int) -> Callable[[str, str], Node]:
        return cache(node)

    def node(run_config: str, node_config: str) -> Node:
        own = json.loads(node_config)
        if "partition-id" not in own:
            raise ValueError("node configuration: wanted partition-id=NUMBER, got none")
        algorithm = _algorithm(make_algorithm, json.loads(run_config))
        states = place or Path(own.get("folder", Path.home() / ".jaxfed"))
        start = None if warm_start is None else warm_start(own)
        return Node(int(own["partition-id"]), algorithm, make_data(own), wire, start, states)

    @precise()
    def answer(asked: Packet, run: int, run_config: Config, node_config: Config) -> Packet:
        # Another process, for a message or a run, would compile everything again.
        enable_compilation_cache()
        configs = (run_config, node_config)
        made = nodes_of(run)(*(json.dumps(dict(config), sort_keys=True) for config in configs))
        return made.answer(asked)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        configs = (context.run_config, context.node_config)
        return reply_of(answer(packet_of(message), context.run_id, *configs), message)

    app.answer = answer  # for `jaxfed.deploy.worker`, which has no messages of Flower's
    return app


def _check_functions(config: str, **functions: Any) -> None:
    for name, function in functions.items():
        if name != "warm_start" or function is not None:
            optional = " or None" if name == "warm_start" else ""
            check_callable(name, function, f"a function of the {config} configuration{optional}")


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
    # Flower's log of a run is what its process writes.
    log = logging.getLogger("jaxfed.deploy")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


__dir__ = _names.public_names(__name__)
