"""Federations over Flower's own processes on this machine, and the nodes' workers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxfed as jf
from bench.speed.machines import secured, start_secured
from tests.deploy.federation import alone, same
from tests.examples import draw_samples
from tests.helpers import ROOT, blocks

pytest.importorskip("flwr")
from jaxfed.deploy import worker
from jaxfed.deploy.app import write_app
from jaxfed.deploy.local import LocalFederation, family, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLIENTS = 3


@pytest.fixture(autouse=True)
def double():
    """As in the apps that are written."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def clients():
    """Three clients of different lengths."""
    return draw_samples().take(np.arange(CLIENTS))


def configs(folder, clients):
    """Each client's file on its machine, and where it keeps its states."""
    found = []
    for i in range(CLIENTS):
        np.save(folder / f"client-{i}.npy", np.asarray(alone(clients, i).data.values[0]))
        found.append(
            {
                "partition-id": i,
                "data": str(folder / f"client-{i}.npy"),
                "folder": str(folder / "nodes"),
            }
        )
    return found


def end_session(leader):
    """End all that a shell has started, Flower's own sessions included."""
    everybody = [p for p in Path("/proc").glob("[0-9]*") if session_of(p) == leader]
    found = {pid for p in everybody for pid in family(int(p.name))}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(3)


def session_of(entry):
    """Of a process in /proc."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError, IndexError):
        return None


def finish(local, run, out, seconds):
    """Wait for a run's end."""
    local.wait(run, out / "solution.npz", seconds)
    return jf.load(out / "solution.npz")


def test_tls_and_node_authentication(tmp_path, environment, clients):
    started = time.monotonic()
    app = tmp_path / "app"
    settings = {"shared_rank": 2, "local_rank": 2, "solver": "gradient", "step_size": 0.05}
    write_app(app, "PerPCA", settings, clients=CLIENTS, rounds=3, key=0)
    nodes = configs(tmp_path, clients)
    nodes[1]["worker"] = False  # its messages' processes answer themselves
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    options = secured(tmp_path / "keys")
    with LocalFederation(
        tmp_path / "flower", nodes, options=options, environment=environment
    ) as local:
        start_secured(local)
        run = local.begin(app, {"out": str(app / "out")})
        saved = finish(local, run, app / "out", 240)
        with_worker = [(worker._place(node) / ".lock").exists() for node in nodes]
        assert with_worker == [True, False, True]
    assert not any((worker._place(node) / "socket").exists() for node in nodes)
    print(f"{time.monotonic() - started:.0f} seconds")
    algorithm = jf.pca.PerPCA(**settings)
    solution = jf.fit(
        algorithm, clients, rounds=3, key=jax.random.key(0), backend=jf.backend.separate()
    )
    np.testing.assert_array_equal(saved.result.shared, solution.result.shared)
    for name, values in solution.history.items():
        np.testing.assert_array_equal(saved.history[name], values, name)
    for i in range(CLIENTS):
        (path,) = (tmp_path / "nodes").glob(f"*/client-{i}/result.npz")
        same(path, solution.result.local[i : i + 1], "local")


def wait_for(path, seconds):
    """Until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} is not there after {seconds} seconds"
        time.sleep(0.2)


def test_a_killed_node_and_a_killed_server(tmp_path, environment, clients):
    app = tmp_path / "app"
    settings = {"shared_rank": 2, "local_rank": 2, "solver": "gradient", "step_size": 0.05}
    write_app(app, "PerPCA", settings, clients=CLIENTS, rounds=6, key=0)
    code = app / "federation" / "app.py"
    text = code.read_text()
    assert "key=0," in text
    code.write_text(text.replace("key=0,", "key=0, deadline=150,"))
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    states = app / "out" / "server"
    with LocalFederation(
        tmp_path / "flower", configs(tmp_path, clients), environment=environment
    ) as local:
        local.start()
        local.begin(app, {"out": str(app / "out")})
        wait_for(states / "00000001.npz", 200)
        kill(local.nodes[2])
        wait_for(states / "00000002.npz", 200)
        local.start_nodes(2)
        wait_for(states / "00000004.npz", 200)
        # The server's own process crashes; the SuperLink stays.
        for pid in family(local.link.pid):
            with contextlib.suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        saved = finish(local, local.begin(app, {"out": str(app / "out")}), app / "out", 300)
    present = np.asarray(saved.history["present"])
    assert not present[1:3, 2].all() and present[:, :2].all() and present[-1].all()
    solution = jf.fit(
        jf.pca.PerPCA(**settings),
        clients,
        rounds=6,
        key=jax.random.key(0),
        backend=jf.backend.separate(),
        participation=jf.participation.mask(present),
    )
    np.testing.assert_array_equal(saved.result.shared, solution.result.shared)
    np.testing.assert_array_equal(saved.history["objective"], solution.history["objective"])


def test_a_killed_superlink(tmp_path, environment, clients):
    """With its state in a file it knows its nodes again; the run goes on where it was."""
    app = tmp_path / "app"
    settings = {"shared_rank": 2, "local_rank": 2, "solver": "gradient", "step_size": 0.05}
    write_app(app, "PerPCA", settings, clients=CLIENTS, rounds=3, key=0)
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    nodes, options = configs(tmp_path, clients), secured(tmp_path / "keys")
    database = ("--database", str(tmp_path / "superlink.db"))
    options = options._replace(link=(*options.link, *database))
    states = app / "out" / "server"
    with LocalFederation(
        tmp_path / "flower", nodes, options=options, environment=environment
    ) as local:
        start_secured(local)
        first = local.begin(app, {"out": str(app / "out")})
        wait_for(states / "00000001.npz", 300)
        kill(local.link)
        assert all(node.poll() is None for node in local.nodes.values())
        assert not (app / "out" / "solution.npz").exists()
        before = max(int(path.stem) for path in states.glob("*.npz"))
        local.start_link()
        second = local.begin(app, {"out": str(app / "out")})
        saved = finish(local, second, app / "out", 300)
        assert f"goes on after round {before}" in local.output(second)
        assert "failed" in local.status(first)
    solution = jf.fit(
        jf.pca.PerPCA(**settings),
        clients,
        rounds=3,
        key=jax.random.key(0),
        backend=jf.backend.separate(),
    )
    np.testing.assert_array_equal(saved.result.shared, solution.result.shared)
    np.testing.assert_array_equal(saved.history["objective"], solution.history["objective"])
    assert saved.history["present"].all()


PAGE = ROOT / "docs" / "guides" / "machines.md"


def test_the_pages_trials_keep_out_of_the_runs_folder():
    """The run, in the same folder, would take a finished trial for itself and return its model."""
    trials = re.findall(r"jaxfed deploy try --app (\S+)([^\n`]*)", PAGE.read_text())
    assert len(trials) == 2
    for app, options in trials:
        (out,) = re.findall(r"--out (\S+)", options)
        assert Path(out) != Path(app, "out")


def test_the_page_of_the_documentation(tmp_path, environment, clients):
    """Its commands on real machines, word for word, but that all machines are this one."""
    for i, config in enumerate(configs(tmp_path, clients)):
        Path(config["data"]).rename(tmp_path / f"data-{i}.npy")
    lines = []
    for source in blocks(PAGE, "bash"):
        if source.startswith("pip") or "--masks" in source:
            continue  # `.ci/tasks.py` runs these
        source = source.replace("\\\n", " ")
        for line in source.splitlines():
            if line.startswith(("flower-superlink", "flower-supernode")):
                name = line.split()[0]
                line = f"{line} > {name}-$N.log 2>&1 &"
                # What stands for the eye that sees that it is ready.
                ready = "SuperNode ID" if "supernode" in name else "Uvicorn running"
                seen = f"grep -q '{ready}' {name}-$N.log"
                line += f"\nfor i in $(seq 400); do {seen} && break; sleep 0.3; done; {seen}"
            lines.append(line)
    script = "\n".join(lines)
    each = script[script.index("# On each machine") : script.index("# On your own")]
    loop = f"for N in 0 1 2; do\n{each}\ndone\n"
    script = script.replace(each, loop)
    script += "\ntimeout 450 sh -c 'until [ -e app/out/solution.npz ]; do sleep 0.5; done'\n"
    environment |= {
        "FLWR_HOME": str(tmp_path / "flwr"),
        "HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
    }
    process = subprocess.Popen(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=580)
        assert process.returncode == 0, said[-3000:]
        assert jf.load(tmp_path / "app" / "out" / "solution.npz").rounds == 3
    finally:
        end_session(process.pid)
        for i in range(CLIENTS):
            names = {"data": f"data-{i}.npy", "folder": f"states-{i}"}
            paths = {name: str(tmp_path / file) for name, file in names.items()}
            worker.end({"partition-id": i} | paths)
