"""Resident workers: who reaches them, whom they answer, and what is lost with them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import jaxfed as jf
from tests.examples import draw_samples

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from jaxfed.cli import main
from jaxfed.deploy import worker
from jaxfed.deploy.messages import Packet, message_of, packet_of
from tests.deploy.federation import Federation, alone, check_equal
from tests.deploy.flower_grid import LocalGrid

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets")

# Stands for an app: tells who answers, and does what a message says.
APP = """
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

from jaxfed.deploy.messages import Packet


def answer(asked, run, run_config, node_config):
    words = dict(asked.words)
    if "dies" in words and not Path(words["dies"]).exists():
        Path(words["dies"]).touch()
        os.kill(os.getpid(), 9)
    if "raises" in words:
        raise {"ValueError": ValueError, "OSError": OSError}[words["raises"]]("as it was told")
    if "warns" in words:
        logging.getLogger("jaxfed.deploy").warning(words["warns"])
    begin = time.monotonic()
    time.sleep(words.get("takes", 0))
    found = {"process": os.getpid(), "edition": 1, "begin": begin, "end": time.monotonic()}
    return Packet({**words, **found}, asked.parts)


client = SimpleNamespace(answer=answer)
"""


class Machine:
    """A node with an app, in the place of Flower's processes."""

    def __init__(self, folder, name, source=APP, **config):
        self.code = folder / name / name / "app.py"
        self.code.parent.mkdir(parents=True)
        (self.code.parent / "__init__.py").touch()
        self.code.write_text(source)
        sys.path.insert(0, str(folder / name))
        self.app = worker.client_app(f"{name}.app:client", idle=60)
        self.config = {"partition-id": 0, "data": str(folder)} | config
        self.run, self.run_config = 1, {"out": "somewhere"}

    def ask(self, parts=(), **words):
        """The words of the answer."""
        message = message_of(Packet(words, parts), 5, "round")
        message.metadata.__dict__["_message_id"] = "message"
        context = Context(self.run, 5, self.config, RecordDict(), self.run_config)
        answer = packet_of(self.app(message, context))
        assert answer.parts == list(parts)
        return answer.words

    @property
    def place(self):
        """The folder of the worker."""
        return worker._place(self.config)

    def serve(self, idle=60.0):
        """A worker in a thread of this process, which has imported JAX already."""
        thread = threading.Thread(target=worker.serve, args=(self.config,), kwargs={"idle": idle})
        thread.start()
        until(lambda: not thread.is_alive() or (self.place / "socket").exists())
        return thread


def until(done):
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def machine(tmp_path, request, monkeypatch):
    """A machine, whose worker ends with the test."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="jf-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(sys, "path", list(sys.path))
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 5
        made = Machine(tmp_path, f"app_{abs(hash(request.node.name))}")  # imported once
        yield made
        (Path(folder) / f"jaxfed-{os.geteuid()}").chmod(0o700)
        worker.end(made.config)
    monkeypatch.undo()


@pytest.mark.slow
def test_a_worker_outlives_the_process_that_started_it(machine, caplog):
    """It answers with other processes' words and bytes, and ends when it is told to."""
    first = machine.ask(parts=[b"some", b"", bytes(10**6)], kind="hello", warns="as told")
    assert first["process"] != os.getpid() and first["kind"] == "hello"
    assert caplog.messages == ["jaxfed: as told"]  # in the log of the SuperNode, too
    assert machine.ask()["process"] == first["process"]
    worker.end(machine.config)
    assert not (machine.place / "socket").exists()


def test_the_process_of_a_message_imports_no_jax(machine):
    thread = machine.serve()
    code = f"""
import sys
sys.path.insert(0, {str(machine.code.parents[1])!r})
import jaxfed as jf
from jaxfed.deploy.messages import Packet
from types import SimpleNamespace
made = jf.deploy.worker.client_app({machine.app.app!r})
context = SimpleNamespace(run_id=1, run_config={{}}, node_config={machine.config!r})
answer = jf.deploy.worker._answer(made.app, Packet({{}}), context, 60.0)
print(answer.words["process"], [x for x in ("jax", "equinox", "scipy") if x in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"{os.getpid()} []"
    assert thread.is_alive()


def test_nobody_else_reaches_the_socket(machine):
    machine.serve()
    modes = {path: path.stat().st_mode & 0o777 for path in machine.place.iterdir()}
    assert modes[machine.place / "socket"] == 0o600
    assert machine.place.stat().st_mode & 0o777 == 0o700
    assert machine.place.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell who it is")
def test_another_user_is_refused(monkeypatch):
    one, other = socket.socketpair()
    me = os.geteuid()
    with one, other, monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(PermissionError, match=f"this user, got one of {me}"):
            worker._checked(one)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_answer_even_past_the_folder(machine):
    thread = machine.serve()
    path = machine.place / "socket"
    code = f"""
import os, socket
from multiprocessing.connection import Connection
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as found:
    found.connect({str(path)!r})
    print(found.recv(1))
"""

    def asked():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "PermissionError" in asked().stderr
    places = (path, *path.parents[:3])
    modes = [place.stat().st_mode for place in places]
    for place in places:
        place.chmod(0o777)
    assert asked().stdout == "b''\n"
    for place, mode in zip(places, modes, strict=True):
        place.chmod(mode)
    assert thread.is_alive() and machine.ask()["process"] == os.getpid()


def test_a_folder_that_others_may_enter_holds_no_worker(machine, caplog):
    machine.place.parent.chmod(0o755)
    assert machine.ask()["process"] == os.getpid()
    assert "wanted a folder of this user alone" in caplog.text
    with pytest.raises(PermissionError):
        worker.serve(machine.config)


@pytest.mark.slow
def test_other_code_ends_a_worker(machine):
    before = machine.ask()
    assert before["edition"] == 1
    machine.code.write_text(APP.replace('"edition": 1', '"edition": 2'))
    after = machine.ask()
    assert after["edition"] == 2 and after["process"] != before["process"]


@pytest.mark.parametrize("what", ["run", "configuration", "environment", "directory", "jaxfed"])
def test_what_an_answer_depends_on_ends_a_worker(machine, monkeypatch, tmp_path, what):
    thread = machine.serve()
    assert machine.ask()["process"] == os.getpid()
    started = []

    def start(config, idle):
        started.append(config)
        raise OSError("none is started here")

    monkeypatch.setattr(worker, "_start", start)
    if what == "run":
        machine.run = 2
    elif what == "configuration":
        machine.run_config["out"] = "elsewhere"
    elif what == "environment":
        monkeypatch.setenv("JAX_ENABLE_X64", "yes")
    elif what == "directory":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setattr(worker, "versions", lambda: {"jaxfed": "another"})
    machine.ask()
    assert len(started) == 1
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_other_users_do_not_see_the_configuration(machine):
    machine.config["password"] = "hidden words"
    process = machine.ask()["process"]
    line = Path(f"/proc/{process}/cmdline").read_text()
    assert "worker.serve" in line
    assert "hidden" not in line and str(machine.config["data"]) not in line


@pytest.mark.slow
def test_a_worker_that_is_killed_is_followed_by_another(machine, tmp_path):
    """In the middle of a message, which the other one answers."""
    second = machine.ask(dies=str(tmp_path / "dead"))["process"]
    assert (tmp_path / "dead").exists() and second != os.getpid()
    os.kill(second, signal.SIGKILL)  # its socket is left
    assert machine.ask()["process"] not in (second, os.getpid())


def test_without_a_worker_the_process_of_the_message_answers(machine, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert machine.ask()["process"] == os.getpid()
    assert f"{worker.ATTEMPTS} are gone; see {machine.place / 'log'}" in caplog.text
    caplog.clear()
    machine.config["worker"] = False
    assert machine.ask()["process"] == os.getpid() and not caplog.text


@pytest.mark.slow
def test_an_idle_worker_ends(machine):
    thread = machine.serve(idle=0.5)
    for _ in range(4):
        time.sleep(0.2)
        machine.ask()
    assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive() and not (machine.place / "socket").exists()


def test_two_messages_at_once_are_answered_one_after_the_other(machine):
    machine.serve()
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: machine.ask(takes=0.2, id=i)}))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i]["id"] for i in range(2)] == [0, 1]
    first, second = sorted(found.values(), key=lambda words: words["begin"])
    assert first["end"] <= second["begin"]


def test_one_node_has_one_worker(machine):
    machine.serve()
    with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
        worker.serve(machine.config)
    assert machine.ask()["process"] == os.getpid()


def test_of_what_the_app_raises_the_words_stay(machine, caplog):
    thread = machine.serve()
    for name in ("ValueError", "OSError"):
        assert machine.ask(raises=name) == {"kind": "refusal", "code": "failed"}
    words = "no answer: as it was told"  # the worker's, the SuperNode's
    assert caplog.messages == [words, f"jaxfed: {words}"] * 2
    assert thread.is_alive()


def test_who_dies_in_the_middle_of_a_question_ends_nothing(machine):
    machine.serve()
    for words in (b"", b"\0\0\0\x07{", b"\0\0\0\x02{}"[:5]):
        with socket.socket(socket.AF_UNIX) as found:
            found.connect(str(machine.place / "socket"))
            found.sendall(words)
    assert machine.ask()["process"] == os.getpid()


def test_wrong_arguments():
    for app in ("federation.app", ":client", "federation.app:", None):
        with pytest.raises(ValueError, match=r"app: wanted package\.module:name"):
            worker.client_app(app)
    with pytest.raises(ValueError, match="idle: wanted a positive number of seconds, got 0"):
        worker.client_app("federation.app:client", idle=0)


def test_the_command(machine, capsys):
    config = f'partition-id=0 data="{machine.config["data"]}"'
    command = ["deploy", "worker", "--node-config", config]
    assert main([*command, "--idle", "0.1"]) == 0
    thread = machine.serve()
    assert main(command) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    for _ in range(2):  # there may be none
        assert main([*command, "--end"]) == 0
    thread.join(10)
    assert not thread.is_alive()
    command[-1] = "partition-id=zero"
    assert main(command) == 2
    assert "node-config: " in capsys.readouterr().err


SOURCE = """
import os
from pathlib import Path

import numpy as np

import jaxfed as jf


def make_algorithm(config):
    return jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05)


def make_data(config):
    return jf.Clients.from_samples([np.load(config["data"])])


client = jf.deploy.flower.client_app(
    make_algorithm, make_data, channel=jf.channel.difference(jf.channel.quantize(3))
)
answer = client.answer


def dying(asked, run, run_config, node_config):
    flag = Path(f"{node_config['data']}-{asked.words.get('round')}")
    dies = node_config["partition-id"] == 2 and asked.words.get("round") in (2, 3)
    if dies and not flag.exists():
        flag.touch()
        if asked.words["round"] == 2:
            answer(asked, run, run_config, node_config)  # its state is on the disk
        os.kill(os.getpid(), 9)
    return answer(asked, run, run_config, node_config)


client.answer = dying
"""


@pytest.mark.slow
def test_workers_that_are_killed_lose_and_double_nothing(machine, tmp_path):
    """Before it computes, after it has computed, and between two messages."""
    clients = draw_samples().take(np.arange(3))
    channel = jf.channel.difference(jf.channel.quantize(3))
    algorithm = jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.05)
    federation = Federation(tmp_path, algorithm, clients, channel=channel)
    machine.code.write_text(SOURCE)
    configs = []
    for i in range(3):
        path = tmp_path / f"client-{i}.npy"
        np.save(path, np.asarray(alone(clients, i).data.values[0]))
        configs.append({"partition-id": i, "data": str(path), "folder": str(tmp_path / "nodes")})
    killed = []

    def trouble(node, message, answer):
        if packet_of(message).words.get("round") == 4 and node == 100:
            killed.append(int((worker._place(configs[0]) / ".lock").read_text().split()[1]))
            os.kill(killed[0], signal.SIGKILL)
        return [answer]

    federation.grid = LocalGrid([machine.app] * 3, {}, configs, trouble)
    try:
        check_equal(federation, federation.run(6), federation.fit(6))
    finally:
        for config in configs:
            worker.end(config)
    assert killed and len(list(tmp_path.glob("client-2.npy-*"))) == 2
    assert f"{machine.code.parent.name}.app" not in sys.modules  # no answer was made here
