"""Federations over Flower's own processes on this machine; each message is a new process."""

import subprocess
import time

import jax
import numpy as np
import pytest
from test_contract import draw_samples
from test_flower import alone, same

import jaxfed as jf

pytest.importorskip("flwr")
from jaxfed.deploy.app import write_app
from jaxfed.deploy.local import Local, Secured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLIENTS = 3


def secured(folder):
    """Certificates and keys, by the commands of the documentation."""
    folder.mkdir()
    commands = [
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 2 "
        "-subj /CN=ca -keyout ca.key -out ca.pem",
        "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj /CN=link "
        "-keyout server.key -out server.csr",
        "printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > san",
        "openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-extfile san -out server.pem",
        *(f"ssh-keygen -q -t ecdsa -b 384 -N '' -C '' -f node-{i}" for i in range(CLIENTS)),
    ]
    for command in commands:
        subprocess.run(command, shell=True, check=True, cwd=folder, capture_output=True, timeout=60)
    nodes = [folder / f"node-{i}" for i in range(CLIENTS)]
    return Secured(folder / "ca.pem", folder / "server.pem", folder / "server.key", nodes)


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
                "partition-id": i, "data": str(folder / f"client-{i}.npy"),
                "folder": str(folder / "nodes"),
            }
        )  # fmt: skip
    return found


def finish(local, run, out, seconds):
    """Wait for a run's end."""
    end = time.monotonic() + seconds
    asked = time.monotonic()
    while not (out / "solution.npz").exists():
        assert time.monotonic() < end, local.output(run)[-3000:]
        if time.monotonic() > asked + 30:  # each question takes seconds of processor time
            assert "failed" not in local.status(run), local.output(run)[-3000:]
            asked = time.monotonic()
        time.sleep(0.5)
    return jf.load(out / "solution.npz")


def test_tls_and_node_authentication(tmp_path, environment, clients):
    started = time.monotonic()
    app = tmp_path / "app"
    settings = {"shared_rank": 2, "local_rank": 2, "step_size": 0.05}
    write_app(app, "PerPCA", settings, clients=CLIENTS, rounds=3, key=0)
    nodes = configs(tmp_path, clients)
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    with Local(
        tmp_path / "flower", nodes, secured=secured(tmp_path / "keys"), environment=environment
    ) as local:
        run = local.begin(app, {})
        saved = finish(local, run, app / "out", 240)
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
        same(path, solution.result.local[i], "local")
