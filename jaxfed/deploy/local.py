"""Runs Flower's SuperLink and SuperNodes on this machine, to try out an app."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxfed._optional import require
from jaxfed.deploy import worker

STARTING = 120.0  # seconds for a process to be ready
STOPPING = 20.0  # seconds for a process to end when asked
ANSWERING = 180.0  # seconds for one of Flower's commands


class FlowerOptions(NamedTuple):
    """Options of Flower's processes; by default neither encryption nor authentication."""

    link: Sequence[str] = ("--insecure",)  # options of the SuperLink
    # Options of each SuperNode; one entry serves all.
    nodes: Sequence[Sequence[str]] = (("--insecure",),)
    # The line of Flower's configuration by which its commands connect to the SuperLink.
    connection: str = "insecure = true"


class LocalFederation:
    """A SuperLink and SuperNodes on this machine's loopback interface.

    Use it in a `with` block. However the block ends, all processes and the nodes' workers are then
    ended. If this process dies, they end too, except for workers, which end when idle.

    Attributes:
        link: the SuperLink, once started.
        nodes: the SuperNodes by number.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[Mapping[str, Any]],
        *,
        options: FlowerOptions | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        """Prepare everything, but start nothing yet.

        Args:
            folder: for logs and Flower's own files; not one of the user's.
            configs: each node's configuration.
            options: options of the processes.
            environment: environment of the processes; this one's by default.

        Raises:
            ImportError: if Flower is not installed.
        """
        require("flwr", extra="flower")
        self.folder, self.configs = folder.absolute(), configs
        self.options = FlowerOptions() if options is None else options
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = dict(os.environ if environment is None else environment) | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            # Many short-lived processes compile the same programs, so keep even the smallest.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            # Flower starts its own programs by name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self.port = _free_port()
        self.link: subprocess.Popen | None = None
        self.nodes: dict[int, subprocess.Popen] = {}
        connection = f'address = "127.0.0.1:{self.port}"\n{self.options.connection}\n'
        header = '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
        (home / "config.toml").write_text(header + connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        _end(list(self.nodes.values()))
        _end([] if self.link is None else [self.link])
        for config in self.configs:
            with contextlib.suppress(OSError):
                worker.end(config)

    # --- processes -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, and wait until all nodes are ready."""
        self.start_link()
        self.start_nodes(*range(len(self.configs)))

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        command = ("flower-superlink", *self.options.link, *where)
        self.link = self._start(
            (*command, "--disable-runtime-dependency-installation"), "superlink"
        )
        self._wait(self.link, "superlink", self._listens)

    def start_nodes(self, *numbers: int) -> None:
        """Start SuperNodes, or restart dead ones, and wait until they are ready."""
        options = self.options.nodes
        for number in numbers:
            where = ("--host", "127.0.0.1", "--port", str(_free_port()))
            command = (sys.executable, "-c", _NODE, *options[number % len(options)], *where)
            link = ("--superlink", f"127.0.0.1:{self.port}")
            config = ("--node-config", self._toml(f"node-{number}", self.configs[number]))
            self.log(f"node-{number}").unlink(missing_ok=True)
            self.nodes[number] = self._start((*command, *link, *config), f"node-{number}")
        for number in numbers:
            log = self.log(f"node-{number}")
            self._wait(
                self.nodes[number],
                log.stem,
                lambda log=log: "SuperNode ID:" in log.read_text("utf8"),
            )

    # --- runs ----------------------------------------------------------------------------------

    def begin(self, app: Path, config: Mapping[str, Any]) -> int:
        """Start a run of an app folder; return its number."""
        chosen = ["--run-config", self._toml("run", config)] if config else []
        return int(self.flwr("run", str(app), "here", *chosen)["run-id"])

    def wait(
        self, run: int, path: Path, seconds: float, look: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until a run has written a file.

        Args:
            run: the run's number.
            path: the file.
            seconds: how long to wait.
            look: called twice a second.

        Raises:
            ValueError: if the run fails or takes longer, with the last errors of its output.
        """
        end, checked = time.monotonic() + seconds, time.monotonic()
        while not path.exists():
            look()
            failed, late = False, time.monotonic() > end
            if time.monotonic() > checked + 30:  # asking takes seconds of CPU time
                failed, checked = "failed" in self.status(run), time.monotonic()
            if failed or late:
                words = "" if failed else f" after {seconds:g} seconds"
                with contextlib.suppress(RuntimeError):
                    lines = [x for x in self.output(run).splitlines() if "error" in x.lower()]
                    words += ": " + " ".join([*lines[-3:], *self._reasons()])
                raise ValueError(f"the run failed{words}")
            time.sleep(0.5)

    def status(self, run: int) -> str:
        """The status of a run, such as `running` or `finished:completed`."""
        return str(self.flwr("ls", "here", "--run-id", str(run))["runs"][0]["status"])

    def output(self, run: int) -> str:
        """The output of a run's server."""
        return self._command("flwr", "log", str(run), "here", "--show")

    def flwr(self, *words: str) -> Any:
        """Run one of Flower's commands and return its JSON answer.

        Raises:
            RuntimeError: if it fails.
        """
        text = self._command("flwr", *words, "--format", "json")
        start = text.find("{")  # after what Flower prints first
        answer = json.loads(text[start:]) if start >= 0 else {}
        if not answer.get("success", True):
            raise RuntimeError(f"flwr {words[0]}: {answer.get('error-message', text)}")
        return answer

    def log(self, name: str) -> Path:
        """The file with the output of `superlink` or `node-NUMBER`."""
        return self.folder / f"{name}.log"

    # --- inside --------------------------------------------------------------------------------

    def _reasons(self) -> list[str]:
        """Why nodes did not answer, which each writes to its own log only."""
        logs = [self.log(f"node-{number}") for number in self.nodes]
        found = [re.findall("no answer: .*", log.read_text("utf8", "replace")) for log in logs]
        return [lines[-1] for lines in found if lines]

    def _toml(self, name: str, config: Mapping[str, Any]) -> str:
        """Write a file with a configuration: on a command line Flower takes no quotes."""
        path = self.folder / f"{name}.toml"
        lines = [f"{key} = {_in_toml(value)}" for key, value in config.items()]
        path.write_text("\n".join(lines), "utf8")
        return str(path)

    def _command(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=ANSWERING,
            check=False,
            cwd=self.folder,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:2])}: {(done.stdout + done.stderr)[-1000:]}")
        return done.stdout

    def _start(self, command: Sequence[str], name: str) -> subprocess.Popen:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *command],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen, name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + STARTING
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                last = self.log(name).read_text("utf8", errors="replace")[-1500:]
                raise RuntimeError(f"{name} did not start: {last}")
            time.sleep(0.2)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2):
                return True
        except OSError:
            return False


def _in_toml(value: Any) -> str:
    # JSON's other escapes are TOML's too, but not those of characters outside of the basic plane.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# On Linux a process ends with its parent (PR_SET_PDEATHSIG). A process in between sets that, since
# this one may have threads and must not run Python code after a fork.
_LAUNCH = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15)
except (OSError, AttributeError):
    pass
os.execvp(sys.argv[1], sys.argv[1:])
"""


# A SuperNode of Flower 1.41 checks for messages every three seconds, and has no option for it.
_NODE = """
import contextlib, time, types
from flwr.supernode.cli import flower_supernode
with contextlib.suppress(ImportError):
    from flwr.supernode import start_client_internal as node
    node.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.2)))
flower_supernode()
"""


def family(pid: int) -> list[int]:
    """A process and all its descendants, including those in other sessions."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have just ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return found


def kill(process: subprocess.Popen, pids: Sequence[int] | None = None) -> None:
    """Kill a process and its descendants, by default the current ones."""
    for pid in family(process.pid) if pids is None else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Ask processes to end; kill those that do not, and any descendants left behind."""
    # Find descendants first, since those of a process that has ended can no longer be told from
    # others.
    families = {each: family(each.pid) for each in processes if each.poll() is None}
    for process in families:
        process.terminate()
    end = time.monotonic() + STOPPING
    for process in families:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for process, pids in families.items():
        kill(process, pids)
