"""Compare five algorithms on Flower's processes, with TLS and authentication, to `fit`.

    python -m bench.speed.machines --rounds 10

Three SuperNodes on this machine. Each answer is made by a process of its own, so this takes many
minutes. Prints for each algorithm whether everything is bit-equal, and the seconds a round took.
"""

import argparse
import os
import subprocess
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax
import numpy as np

import jaxfed as jf
from jaxfed.deploy.local import Local, Options

CLIENTS, SAMPLES, FEATURES = 3, (40, 30, 25), 8
LOSSLESS, CODED = "jf.channel.lossless()", "jf.channel.difference(jf.channel.quantize(3))"
NETWORK = f"jf.models.Autoencoder({FEATURES}, 2, key=jax.random.key(0))"
ALGORITHMS = {
    "PerPCA": ("jf.pca.PerPCA(2, 2, step_size=0.05)", LOSSLESS),
    "AdaptivePCA": ("jf.pca.AdaptivePCA(2, noise_variance=0.1)", LOSSLESS),
    "MaxVar": ("jf.gcca.MaxVar(2)", CODED),
    "FedAvg": (
        f"jf.generative.FedAvg({NETWORK}, jf.models.reconstruction_loss, optax.sgd(0.02), "
        "local_steps=2)",
        LOSSLESS,
    ),
    "FAPS": ("jf.pca.FAPS(2, local_steps=2)", LOSSLESS),
}
APP = """\
import jax
import numpy as np
import optax

import jaxfed as jf

CHANNEL = {channel}


def make_algorithm(config):
    return {algorithm}


def make_data(config):
    array = np.load(config["data"])
    return {holder}([array[:{entities}]])


client = jf.deploy.flower.client_app(make_algorithm, make_data, channel=CHANNEL)
server = jf.deploy.flower.server_app(
    make_algorithm, clients={clients}, rounds={rounds}, key=0, channel=CHANNEL
)
"""


def secured(folder: Path, nodes: int = CLIENTS) -> Options:
    """Make certificates and keys as the documentation does; the options that name them."""
    folder.mkdir()
    elliptic = "-newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes"
    commands = [
        f"openssl req -x509 {elliptic} -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        f"openssl req {elliptic} -subj /CN=server -keyout server.key -out server.csr",
        "printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > address",
        "openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-extfile address -out server.pem",
        *(f"ssh-keygen -q -t ecdsa -b 384 -N '' -C '' -f node-{i}" for i in range(nodes)),
    ]
    for command in commands:
        subprocess.run(command, shell=True, check=True, cwd=folder, capture_output=True, timeout=60)
    authority, server = str(folder / "ca.pem"), folder / "server"
    link = ("--ssl-ca-certfile", authority, "--ssl-certfile", f"{server}.pem")
    link += ("--ssl-keyfile", f"{server}.key", "--enable-supernode-auth")
    node = ("--root-certificates", authority, "--auth-supernode-private-key")
    keys = [(*node, str(folder / f"node-{i}")) for i in range(nodes)]
    return Options(link, keys, f'root-certificates = "{authority}"')


def start_secured(local: Local) -> None:
    """Start everything, with the nodes' keys registered."""
    local.start_link()
    for *_, key in local.options.nodes:
        local.flwr("supernode", "register", f"{key}.pub", "here")
    local.start_nodes(*range(len(local.configs)))


def arrays() -> list[np.ndarray]:
    """The clients' samples, of different lengths, with something in common."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(2, FEATURES))
    return [
        (rng.normal(size=(n, 2)) @ shared + 0.3 * rng.normal(size=(n, FEATURES))).astype("float32")
        for n in SAMPLES
    ]


def one(local: Local, folder: Path, name: str, rounds: int, limit: float) -> tuple[bool, float]:
    """Whether an algorithm's run is bit-equal to `fit`, and the seconds a round took."""
    from jaxfed.deploy.app import write_app

    algorithm, channel = ALGORITHMS[name]
    views = name == "MaxVar"
    holder = "jf.gcca.Views.from_arrays" if views else "jf.Clients.from_samples"
    app = folder / name
    write_app(app, "pooled", {"rank": 1}, clients=CLIENTS, rounds=rounds, key=0)
    source = APP.format(
        algorithm=algorithm,
        channel=channel,
        holder=holder,
        clients=CLIENTS,
        rounds=rounds,
        entities=min(SAMPLES) if views else None,
    )
    (app / "federation" / "app.py").write_text(source)
    run = local.begin(app, {"out": str(app / "out")})
    states, starts = app / "out" / "server", []

    def look() -> None:
        if not starts and any(states.glob("[0-9]*.npz")):  # the first messages have arrived
            starts.append(time.monotonic())

    local.wait(run, app / "out" / "solution.npz", limit, look)
    seconds = (time.monotonic() - (starts or [time.monotonic()])[0]) / rounds
    made = spec_from_file_location(f"federation_{name}", app / "federation" / "app.py")
    assert made is not None and made.loader is not None
    federation = module_from_spec(made)
    made.loader.exec_module(federation)
    tables = [x[: min(SAMPLES)] if views else x for x in arrays()]
    make = jf.gcca.Views.from_arrays if views else jf.Clients.from_samples
    solution = jf.fit(
        federation.make_algorithm({}),
        make(tables),
        rounds=rounds,
        key=jax.random.key(0),
        channel=federation.CHANNEL,
        backend=jf.backend.separate(),
    )
    saved = jf.load(app / "out" / "solution.npz")
    # In the order of the tree.
    with np.load(app / "out" / "solution.npz", allow_pickle=False) as stored:
        mine = [stored[key] for key in stored.files if key.split(".")[0].split("[")[0] == "shared"]
    theirs = [x for x in jax.tree.leaves(solution.result.shared) if hasattr(x, "dtype")]
    mine += [saved.history[key] for key in solution.history]
    theirs += list(solution.history.values())
    bits = [[np.asarray(x).tobytes() for x in each] for each in (mine, theirs)]  # NaN included
    equal = bits[0] == bits[1]
    return equal, seconds


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        configs = []
        for i, array in enumerate(arrays()):
            np.save(folder / f"client-{i}.npy", array)
            path = str(folder / f"client-{i}.npy")
            configs.append({"partition-id": i, "data": path, "folder": str(folder / "nodes")})
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
        options = secured(folder / "keys")
        local = Local(folder / "flower", configs, options=options, environment=environment)
        print("| algorithm | bit-equal | seconds a round |\n| --- | --- | --- |", flush=True)
        with local:
            start_secured(local)
            for name in chosen.algorithms:
                equal, seconds = one(local, folder, name, chosen.rounds, chosen.limit)
                print(f"| {name} | {'yes' if equal else 'no'} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
