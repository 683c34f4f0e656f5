"""A node's resident worker, which keeps JAX, programs and data from one message to the next.

Flower starts a process for each message. That process does not import JAX; it passes the message to
the worker over a socket. If there is no worker, it starts one; if there can be none, it computes
the answer itself.

A worker belongs to one run. It answers only processes with the same code, configuration and
versions. On a message from any other process it exits, and that process starts its own worker.
Killing a worker loses nothing: a client's state is on disk before its answer is sent, and the same
question gets the same answer.
"""

import contextlib
import hashlib
import json
import logging
import os
import pkgutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxfed import _names
from jaxfed._optional import require
from jaxfed._refusals import refuse
from jaxfed._versions import versions
from jaxfed.core.common.files import locked
from jaxfed.deploy.messages import Packet, packet_of, refusal, reply_of

LOG = logging.getLogger("jaxfed.deploy")
IDLE = 600.0  # seconds without a message after which a worker exits
STARTING = 60.0  # seconds that a new worker has to start listening
RELAYED = "jaxfed: "  # before what a worker logs, in the log of its SuperNode
ATTEMPTS = 3  # workers that may fail on one message before its own process answers
# Settings of JAX and Python. The rest of the environment may differ from shell to shell.
VARIABLES = ("JAX", "XLA", "CUDA", "PYTHON")
Config = Mapping[str, Any]  # Flower's run or node configuration


def client_app(app: str, *, idle: float = IDLE) -> Any:
    """Create a `flwr.clientapp.ClientApp` that passes messages to a resident worker.

    Call it in a module that does not import JAX, such as the one `jaxfed deploy new` writes. With
    `worker=false` in the node configuration, the app computes the answers itself.

    Args:
        app: where to import the result of `jaxfed.deploy.flower.client_app` from, as
            `"package.module:name"`.
        idle: seconds without a message after which the worker exits.

    Returns:
        The app.

    Raises:
        ValueError: if `app` is not such a path, or `idle` is not positive.
        ImportError: if Flower is not installed.
    """
    if not isinstance(app, str) or not all(app.partition(":")):
        raise refuse("app", "package.module:name", app)
    if not isinstance(idle, int | float) or not idle > 0:
        raise refuse("idle", "a positive number of seconds", idle)
    made = require("flwr.clientapp", extra="flower").ClientApp()

    @made.train()
    def train(message: Any, context: Any) -> Any:
        try:
            answer = _answer(app, packet_of(message), context, idle)
        except Exception as error:  # whose words Flower would send to the server
            answer = refusal(error)
        return reply_of(answer, message)

    made.app = app  # lets callers check that it can be imported
    return made


def serve(node_config: Config, *, idle: float = IDLE) -> None:
    """Run a node's worker until it is told to exit or has been idle for too long.

    Args:
        node_config: the node configuration of its SuperNode.
        idle: seconds without a message after which it exits.

    Raises:
        OSError: if the node already has a worker, or cannot have one here.
    """
    place = _place(node_config)
    with locked(place, "worker"), _listening(place / "socket", idle) as listener:
        # Processes that connect while JAX is imported wait.
        from jaxfed.deploy import flower as flower

        last = _answer_all(listener)
    # Only now that lock and socket are free, let the process without an answer know: it starts a
    # worker of its own.
    if last is not None:
        last.close()


def end(node_config: Config) -> None:
    """Tell a node's worker to exit, after it has answered earlier messages.

    Args:
        node_config: the node configuration of its SuperNode.

    Raises:
        OSError: if the node cannot have a worker here.
    """
    nobody = suppress(FileNotFoundError, ConnectionError, EOFError)
    with nobody, _connection(node_config) as connection:
        connection.send_bytes(b"{}")
        connection.recv_bytes()


# --- in the process of a message -----------------------------------------------------------------


def _answer(app: str, asked: Packet, context: Any, idle: float) -> Packet:
    node_config, run_config = dict(context.node_config), dict(context.run_config)
    if node_config.get("worker", True):
        folder = _folder_of(app)
        run = {
            "app": app,
            "folder": str(folder),
            "code": _digest(folder),
            "run": context.run_id,
            "run_config": run_config,
            "node_config": node_config,
        }
        try:
            return _ask({**run, **_surroundings()}, asked, idle)
        except OSError as error:
            LOG.warning("no worker answers, so this process does: %s", error)
    return pkgutil.resolve_name(app).answer(asked, context.run_id, run_config, node_config)


def _ask(run: Mapping[str, Any], asked: Packet, idle: float) -> Packet:
    """Return the worker's answer.

    Raises:
        OSError: if no worker answers.
    """
    for _ in range(ATTEMPTS):
        # A worker that was killed, was idle, or belongs to another run does not answer.
        gone = suppress(ConnectionError, EOFError)
        with gone, _started(run["node_config"], idle) as connection:
            for part in (json.dumps(run).encode(), asked.head.encode(), asked.body):
                connection.send_bytes(part)
            head, body, warned = (connection.recv_bytes() for _ in range(3))
            for line in json.loads(warned):  # the log of a SuperNode is read more often
                LOG.warning("%s%s", RELAYED, line)
            return Packet.read(head.decode(), body)
    raise OSError(f"{ATTEMPTS} are gone; see {_place(run['node_config']) / 'log'}")


def _started(node_config: Config, idle: float) -> Connection:
    """Connect to the worker, and start it if there is none."""
    process, limit = None, time.monotonic() + STARTING
    while True:
        try:
            return _connection(node_config)
        except (FileNotFoundError, ConnectionRefusedError):
            if process is None:
                process = _start(node_config, idle)
            elif process.poll() is not None or time.monotonic() > limit:
                raise ConnectionError from None
            time.sleep(0.02)


def _start(node_config: Config, idle: float) -> subprocess.Popen:
    """Start a worker that outlives this process and its SuperNode."""
    code = "import json, sys; from jaxfed.deploy import worker; "
    code += "worker.serve(json.load(sys.stdin), idle=float(sys.argv[1]))"
    with (_place(node_config) / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(idle)],
            # All users see a process's arguments, and nobody what it reads.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(node_config).encode())
    return process


def _folder_of(app: str) -> Path:
    """Return the folder of the Python path from which an app is imported."""
    spec = find_spec(app.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        raise refuse("app", "one that can be imported", app)
    return Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]


# --- in the worker -------------------------------------------------------------------------------


def _answer_all(listener: socket.socket) -> Connection | None:
    """Answer until the worker has to exit; return the connection that got no answer, if any."""
    surroundings, run = _surroundings(), None
    while True:
        try:
            connection = _checked(listener.accept()[0])
        except TimeoutError:
            return None
        except PermissionError as error:
            LOG.warning("%s", error)
            continue
        with suppress(OSError, EOFError):  # the other process was killed
            wanted = json.loads(connection.recv_bytes())
            # The first message decides which run this worker belongs to, if it comes from the same
            # code, versions and environment.
            if run is None and surroundings.items() <= wanted.items():
                sys.path.insert(0, wanted["folder"])
                run = wanted
            if run is None or run != wanted:
                return connection
            head, body = connection.recv_bytes().decode(), connection.recv_bytes()
            with _warnings() as warned:
                answer = _answer_one(run, head, body)
            for part in (answer.head.encode(), answer.body, json.dumps(warned).encode()):
                connection.send_bytes(part)
        connection.close()


def _answer_one(run: Mapping[str, Any], head: str, body: bytes) -> Packet:
    try:
        app = pkgutil.resolve_name(run["app"])
        configs = run["run_config"], run["node_config"]
        return app.answer(Packet.read(head, body), run["run"], *configs)
    except Exception as error:
        return refusal(error)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged meanwhile; they stay in the log."""
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            found.append(record.getMessage())
        return True

    LOG.addFilter(note)
    try:
        yield found
    finally:
        LOG.removeFilter(note)


@contextmanager
def _listening(path: Path, idle: float) -> Iterator[socket.socket]:
    # The caller holds the folder's lock, so no worker is listening there.
    path.unlink(missing_ok=True)  # left by a worker that was killed
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        # Before `listen`, so that nobody else can connect.
        path.chmod(0o600)
        listener.settimeout(idle)
        listener.listen()
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


# --- in both -------------------------------------------------------------------------------------


def _surroundings() -> dict[str, Any]:
    """Return what answers depend on, apart from the run."""
    return {
        "python": sys.executable,
        "versions": versions(),
        "jaxfed": _digest(Path(__file__).parents[1]),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        "directory": os.getcwd(),
    }


def _digest(folder: Path) -> str:
    """Return a digest of all files below a folder, except Python's compiled files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    each = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()


def _place(node_config: Config) -> Path:
    """Return the folder of a node's worker, which nobody else may enter.

    Raises:
        OSError: if this user cannot have one, or this system has no Unix sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("worker: this system has no Unix sockets")
    # A temporary folder, because a socket's path may have no more than 100 characters.
    folder = Path(tempfile.gettempdir()) / f"jaxfed-{os.geteuid()}"
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"worker: wanted a folder of this user alone, got {folder}")
    words = json.dumps(dict(node_config), sort_keys=True)
    place = folder / hashlib.sha256(words.encode()).hexdigest()[:16]
    place.mkdir(0o700, exist_ok=True)
    return place


def _connection(node_config: Config) -> Connection:
    """Connect to a node's worker.

    Raises:
        OSError: if there is none.
    """
    with closing(socket.socket(socket.AF_UNIX)) as found:
        found.connect(str(_place(node_config) / "socket"))
        return _checked(found)


def _checked(found: socket.socket) -> Connection:
    """Return the connection of a socket if the process at its other end belongs to this user.

    Raises:
        PermissionError: if it belongs to another user.
    """
    with closing(found):
        if hasattr(socket, "SO_PEERCRED"):  # on Linux; elsewhere the folder keeps others out
            size = struct.calcsize("3i")
            peer = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            if (user := struct.unpack("3i", peer)[1]) != os.geteuid():
                raise PermissionError(f"worker: wanted a process of this user, got one of {user}")
        return Connection(found.detach())


__dir__ = _names.public_names(__name__)
