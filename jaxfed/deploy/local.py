"""Flower's SuperLink and SuperNodes on this machine, to try an app out without others."""

import contextlib
import json
import os
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
STOPPING = 20.0  # and to end when it is asked to
ANSWERING = 180.0  # and for one of Flower's commands


class Options(NamedTuple):
    """Options of Flower's processes: by default neither encryption nor authentication."""

    link: Sequence[str] = ("--insecure",)  # options of the SuperLink
    # Options of each SuperNode; all the same if there is one entry.
    nodes: Sequence[Sequence[str]] = (("--insecure",),)
    # The line of Flower's configuration by which its commands reach the SuperLink.
    connection: str = "insecure = true"


class Local:
    """A SuperLink and SuperNodes on this machine's loopback.

    Use it in a `with` block: in the end, however that comes, all its processes are ended, and the
    nodes' workers. They end too if this process dies, but for workers, which end when idle.

    Attributes:
        link: the SuperLink, once it was started.
        nodes: the SuperNodes by number.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[Mapping[str, Any]],
        *,
        options: Options | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        """Start nothing yet.

        Args:
            folder: for logs and Flower's own files; not one of the user's.
            configs: each node's configuration.
            options: of the processes.
            environment: of the processes; this one's by default.

        Raises:
            ImportError: if Flower is not installed.
        """
        require("flwr", extra="flower")
        self.folder, self.configs = folder.absolute(), configs
        self.options = Options() if options is None else options
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
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
        """Start SuperNodes, also again after they died, and wait until they are ready."""
        options = self.options.nodes
        for number in numbers:
            where = ("--host", "127.0.0.1", "--port", str(_free_port()))
            command = (sys.executable, "-c", _NODE, *options[number % len(options)], *where)
            link = ("--superlink", f"127.0.0.1:{self.port}")
            config = ("--node-config", _in_toml(self.configs[number]))
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
        """Start a run of an app folder; its number."""
        chosen = ["--run-config", _in_toml(config)] if config else []
        return int(self.flwr("run", str(app), "here", *chosen)["run-id"])

    def wait(
        self, run: int, path: Path, seconds: float, look: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until a run has written a file.

        Args:
            run: its number.
            path: the file.
            seconds: how long to wait.
            look: called twice a second.

        Raises:
            ValueError: if the run fails, or takes longer, with the last errors of its output.
        """
        end, checked = time.monotonic() + seconds, time.monotonic()
        while not path.exists():
            look()
            failed, late = False, time.monotonic() > end
            if time.monotonic() > checked + 30:  # to ask takes seconds of a processor
                failed, checked = "failed" in self.status(run), time.monotonic()
            if failed or late:
                words = "" if failed else f" after {seconds:g} seconds"
                with contextlib.suppress(RuntimeError):
                    lines = [x for x in self.output(run).splitlines() if "error" in x.lower()]
                    words += ": " + " ".join(lines[-3:])
                raise ValueError(f"the run did not end well{words}")
            time.sleep(0.5)

    def status(self, run: int) -> str:
        """Of a run, such as `running` or `finished:completed`."""
        return str(self.flwr("ls", "here", "--run-id", str(run))["runs"][0]["status"])

    def output(self, run: int) -> str:
        """What the server of a run has written."""
        return self._command("flwr", "log", str(run), "here", "--show")

    def flwr(self, *words: str) -> Any:
        """One of Flower's commands, and its answer in JSON.

        Raises:
            RuntimeError: if it fails.
        """
        text = self._command("flwr", *words, "--format", "json")
        start = text.find("{")  # behind what Flower prints before
        answer = json.loads(text[start:]) if start >= 0 else {}
        if not answer.get("success", True):
            raise RuntimeError(f"flwr {words[0]}: {answer.get('error-message', text)}")
        return answer

    def log(self, name: str) -> Path:
        """The file with the output of `superlink` or `node-NUMBER`."""
        return self.folder / f"{name}.log"

    # --- inside --------------------------------------------------------------------------------

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


def _in_toml(config: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# On Linux a process is ended when the one that started it is (PR_SET_PDEATHSIG). A process in
# between sets that: this one may have threads, and must not run Python code in a fork of itself.
_LAUNCH = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15)
except (OSError, AttributeError):
    pass
os.execvp(sys.argv[1], sys.argv[1:])
"""


# A SuperNode of Flower 1.41 looks for messages every three seconds, and has no option for that.
_NODE = """
import contextlib, time, types
from flwr.supernode.cli import flower_supernode
with contextlib.suppress(ImportError):
    from flwr.supernode import start_client_internal as node
    node.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.2)))
flower_supernode()
"""


def family(pid: int) -> list[int]:
    """A process and all its descendants, also those in sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have just ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:  # which grows on the way
        found += children.get(one, [])
    return found


def kill(process: subprocess.Popen, pids: Sequence[int] | None = None) -> None:
    """Kill a process and its descendants, by default those of now."""
    for pid in family(process.pid) if pids is None else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Ask processes to end, and kill those that do not, and what they leave behind."""
    families = {each: family(each.pid) for each in processes if each.poll() is None}
    for process in families:
        process.terminate()
    end = time.monotonic() + STOPPING
    for process in families:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for process, pids in families.items():
        kill(process, pids)
