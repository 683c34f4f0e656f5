"""Flower's processes on this machine, for trying out: started, watched, and ended again."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxfed._optional import require

STARTING = 120.0  # seconds for a process to be ready
STOPPING = 20.0  # and to end when it is asked to
ANSWERING = 180.0  # and for one of Flower's commands


class Secured(NamedTuple):
    """Files for TLS and node authentication."""

    ca: Path  # certificate of who signed the server's
    certificate: Path
    key: Path
    nodes: Sequence[Path]  # private keys, with the public ones beside them as `.pub`


class Local:
    """A SuperLink and SuperNodes on this machine's loopback.

    Use it in a `with` block: in the end, however that comes, all its processes are ended. They end
    too if this process dies.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[Mapping[str, Any]],
        *,
        secured: Secured | None = None,
        database: bool = False,
        environment: Mapping[str, str] | None = None,
    ):
        """Prepare.

        Args:
            folder: for logs and Flower's own files; not one of the user's.
            configs: each node's configuration.
            secured: with TLS and node authentication; without, neither, on loopback only.
            database: whether the SuperLink keeps its state in a file, `superlink.db`, and so knows
                its nodes and runs when it is started again.
            environment: of the processes; this one's by default.

        Raises:
            ImportError: if Flower is not installed.
        """
        require("flwr", extra="flower")
        self.folder, self.configs, self.secured = folder.absolute(), configs, secured
        self.folder.mkdir(parents=True, exist_ok=True)
        self.database = self.folder / "superlink.db" if database else None
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        self.environment = dict(os.environ if environment is None else environment) | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            # Flower starts its own programs by their names.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self.port = _free_port()
        self.link: subprocess.Popen | None = None
        self.nodes: list[subprocess.Popen | None] = [None] * len(configs)
        (home / "config.toml").write_text(self._connection())

    def __enter__(self) -> Self:
        try:
            self.start_link()
            self._register()
            for number in range(len(self.configs)):
                self.start_node(number, wait=False)
            for number in range(len(self.configs)):
                self._until_ready(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # --- processes -----------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it answers; again, after it was killed."""
        safety = ["--insecure"]
        if self.secured is not None:
            safety = [
                "--ssl-ca-certfile", str(self.secured.ca),
                "--ssl-certfile", str(self.secured.certificate),
                "--ssl-keyfile", str(self.secured.key),
                "--enable-supernode-auth",
            ]  # fmt: skip
        command = [
            "flower-superlink", *safety, "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation",
            *(["--database", str(self.database)] if self.database else []),
        ]  # fmt: skip
        self.link = self._start(command, "superlink")
        self._wait(self.link, "superlink", self._healthy)

    def start_node(self, number: int, *, wait: bool = True) -> None:
        """Start a SuperNode, as a machine that comes back."""
        safety = ["--insecure"]
        if self.secured is not None:
            safety = [
                "--root-certificates", str(self.secured.ca),
                "--auth-supernode-private-key", str(self.secured.nodes[number]),
            ]  # fmt: skip
        config = " ".join(
            f"{name}={json.dumps(value)}" for name, value in self.configs[number].items()
        )
        command = [
            "flower-supernode", *safety, "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(_free_port()), "--node-config", config,
        ]  # fmt: skip
        self.log(f"node-{number}").unlink(missing_ok=True)
        self.nodes[number] = self._start(command, f"node-{number}")
        if wait:
            self._until_ready(number)

    def kill_node(self, number: int) -> None:
        """As a power cut would: the node and all it has started."""
        process, self.nodes[number] = self.nodes[number], None
        if process is not None:
            _kill(process)

    def kill_link(self) -> None:
        """As a power cut would: the SuperLink, and the server that runs in it."""
        process, self.link = self.link, None
        if process is not None:
            _kill(process)

    def kill_server(self) -> None:
        """As a crash of the server's own process would; the SuperLink stays."""
        for pid in _family(self.link.pid) if self.link is not None else ():
            with contextlib.suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all, the nodes first."""
        alive = [process for process in self.nodes if process is not None]
        _end(alive)
        _end([self.link] if self.link is not None else [])
        self.nodes, self.link = [None] * len(self.configs), None

    # --- runs ----------------------------------------------------------------------------------

    def begin(self, app: Path, config: Mapping[str, Any]) -> int:
        """Start a run of an app folder; its number."""
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        chosen = ["--run-config", words] if words else []
        told = self.flwr("run", str(app), "here", *chosen)
        return int(told["run-id"])

    def status(self, run: int) -> str:
        """Of a run, such as `running` or `finished:completed`."""
        told = self.flwr("ls", "here", "--run-id", str(run))
        return str(told["runs"][0]["status"])

    def output(self, run: int) -> str:
        """What the server of a run has written."""
        command = ["flwr", "log", str(run), "here", "--show"]
        return self._command(command)

    def flwr(self, *words: str) -> Any:
        """One of Flower's commands, and what it tells as JSON.

        Raises:
            RuntimeError: if it fails.
        """
        told = self._command(["flwr", *words, "--format", "json"])
        start = told.find("{")
        found = json.loads(told[start:]) if start >= 0 else {}
        if not found.get("success", True):
            raise RuntimeError(f"flwr {words[0]}: {found.get('error-message', told)}")
        return found

    def log(self, name: str) -> Path:
        """What `superlink` or `node-NUMBER` has written."""
        return self.folder / f"{name}.log"

    # --- how -----------------------------------------------------------------------------------

    def _connection(self) -> str:
        lines = ['[superlink]\ndefault = "here"\n\n[superlink.here]']
        lines.append(f'address = "127.0.0.1:{self.port}"')
        if self.secured is None:
            lines.append("insecure = true")
        else:
            lines.append(f'root-certificates = "{self.secured.ca}"')
        return "\n".join(lines) + "\n"

    def _register(self) -> None:
        for key in self.secured.nodes if self.secured is not None else ():
            self.flwr("supernode", "register", f"{key}.pub", "here")

    def _command(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=ANSWERING,
            check=False, cwd=self.folder,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:2])}: {(done.stdout + done.stderr)[-1000:]}")
        return done.stdout

    def _start(self, command: Sequence[str], name: str) -> subprocess.Popen:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *command], env=self.environment, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _until_ready(self, number: int) -> None:
        process, log = self.nodes[number], self.log(f"node-{number}")
        assert process is not None
        self._wait(process, f"node-{number}", lambda: "SuperNode ID:" in log.read_text("utf8"))

    def _wait(self, process: subprocess.Popen, name: str, ready: Any) -> None:
        end = time.monotonic() + STARTING
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                last = self.log(name).read_text("utf8", errors="replace")[-1500:]
                raise RuntimeError(f"{name} did not start: {last}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        kind, context = "http", None
        if self.secured is not None:
            kind, context = "https", ssl.create_default_context(cafile=str(self.secured.ca))
        try:
            address = f"{kind}://127.0.0.1:{self.port}/health"
            with urllib.request.urlopen(address, timeout=2, context=context) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# On Linux a process is ended when the one that started it is (PR_SET_PDEATHSIG). By a process in
# between: this one may have threads, which a fork of it must not meet.
_LAUNCH = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15)
except (OSError, AttributeError):
    pass
os.execvp(sys.argv[1], sys.argv[1:])
"""


def _family(pid: int) -> list[int]:
    """A process and all that it has started, and those, in sessions of their own too."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += parents.get(one, [])
    return found


def _kill(process: subprocess.Popen) -> None:
    for pid in _family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Ask them to end; kill by its number what does not."""
    families = {process: _family(process.pid) for process in processes}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    end = time.monotonic() + STOPPING
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for process, family in families.items():
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
