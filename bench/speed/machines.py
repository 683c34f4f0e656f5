"""Compare five algorithms on Flower's processes, with TLS and authentication, to `fit`.

    python -m bench.speed.machines --rounds 10

Three SuperNodes run on this machine. The script prints the time of a round, by the clock and as
processor time of all processes, for a client that returns each message unchanged, for `PerPCA` with
a resident worker at each node, and for `PerPCA` without workers. It then prints the time of each
algorithm with workers, and whether all results are equal bit for bit.
"""

import argparse
import contextlib
import math
import os
import subprocess
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf
from jaxfed.deploy.app import write_app
from jaxfed.deploy.local import FlowerOptions, LocalFederation, family

CLIENTS, SAMPLES, FEATURES = 3, (40, 30, 25), 8
LOSSLESS, CODED = "jf.channel.lossless()", "jf.channel.difference(jf.channel.quantize(3))"
NETWORK = f"jf.models.Autoencoder({FEATURES}, 2, key=jax.random.key(0))"
ALGORITHMS = {
    "PerPCA, gradient": ("jf.pca.PerPCA(2, 2, solver='gradient', step_size=0.05)", LOSSLESS),
    "HierarchicalPCA": ("jf.pca.HierarchicalPCA(2, noise_variance=0.1)", LOSSLESS),
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
# The least that Flower's processes can do.
UNCHANGED = """\
import time
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from jaxfed.deploy.messages import Packet, message_of

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    return Message(message.content, reply_to=message)


@server.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    (out / "server").mkdir(parents=True)
    for number in range({rounds} + 1):
        while len(nodes := list(grid.get_node_ids())) < {clients}:
            time.sleep(0.2)
        packet = Packet({{"round": number}}, [bytes(128)])
        asked = set(grid.push_messages([message_of(packet, x, "round") for x in nodes]))
        while asked:
            time.sleep(0.2)
            asked -= {{x.metadata.reply_to_message_id for x in grid.pull_messages(list(asked))}}
        (out / "server" / f"{{number:08d}}.npz").touch()
    (out / "solution.npz").touch()
"""


class Cost(NamedTuple):
    """What something takes, in seconds."""

    clock: float
    processors: float  # of all processes together


def secured(folder: Path, nodes: int = CLIENTS) -> FlowerOptions:
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
    return FlowerOptions(link, keys, f'root-certificates = "{authority}"')


def start_secured(local: LocalFederation) -> None:
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


def used(local: LocalFederation) -> float:
    """Seconds of processors that all processes of a federation have had, with those that ended."""
    assert local.link is not None
    parents = [local.link.pid, *(node.pid for node in local.nodes.values())]
    pids = {pid for parent in parents for pid in family(parent)}
    for entry in Path("/proc").glob("[0-9]*"):  # workers, which are nobody's children
        with contextlib.suppress(OSError):
            if str(local.folder.parent) in (entry / "cmdline").read_text():
                pids.add(int(entry.name))
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run(local: LocalFederation, app: Path, limit: float) -> Cost:
    """Run an app, and measure its rounds behind the first, which compiles."""
    number = local.begin(app, {"out": str(app / "out")})
    seen: dict[int, Cost] = {}

    def look() -> None:
        done = max((int(path.stem) for path in app.glob("out/server/[0-9]*.npz")), default=0)
        if done and done not in seen:
            seen[done] = Cost(time.monotonic(), used(local))

    local.wait(number, app / "out" / "solution.npz", limit, look)
    first, last = min(seen), max(seen)
    if first == last:
        return Cost(math.nan, math.nan)
    return Cost(*((b - a) / (last - first) for a, b in zip(seen[first], seen[last], strict=True)))


def write(folder: Path, source: str, rounds: int, component: str = "client") -> Path:
    """An app folder of this source, whose client is found in the module `component`."""
    write_app(folder, "pooled", {"rank": 1}, clients=CLIENTS, rounds=rounds, key=0)
    (folder / "federation" / "app.py").write_text(source)
    project = folder / "pyproject.toml"
    text = project.read_text().replace("federation.client:", f"federation.{component}:")
    project.write_text(text)
    return folder


def source_of(name: str, rounds: int) -> str:
    """The module of an algorithm's app."""
    algorithm, channel = ALGORITHMS[name]
    views = name == "MaxVar"
    return APP.format(
        algorithm=algorithm,
        channel=channel,
        holder="jf.gcca.Views.from_arrays" if views else "jf.Clients.from_samples",
        clients=CLIENTS,
        rounds=rounds,
        entities=min(SAMPLES) if views else None,
    )


def costs(local: LocalFederation, folder: Path, rounds: int, limit: float) -> None:
    """Print what a round costs, and what Flower alone takes of it."""
    print("| client | seconds a round | of processors |\n| --- | --- | --- |", flush=True)
    unchanged = UNCHANGED.format(clients=CLIENTS, rounds=rounds)
    perpca = source_of("PerPCA, gradient", rounds)
    for name, source, component in (
        ("returns its message", unchanged, "app"),
        ("with a worker", perpca, "client"),
        ("without", perpca, "app"),
    ):
        cost = run(local, write(folder / name, source, rounds, component), limit)
        print(f"| {name} | {cost.clock:.1f} | {cost.processors:.1f} |", flush=True)
    print()


def one(
    local: LocalFederation, folder: Path, name: str, rounds: int, limit: float
) -> tuple[bool, Cost]:
    """Whether an algorithm's run is bit-equal to `fit`, and what a round took."""
    app = write(folder / name, source_of(name, rounds), rounds)
    cost = run(local, app, limit)
    made = spec_from_file_location(f"federation_{name}", app / "federation" / "app.py")
    assert made is not None and made.loader is not None
    federation = module_from_spec(made)
    made.loader.exec_module(federation)
    views = name == "MaxVar"
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
    return bits[0] == bits[1], cost


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=ALGORITHMS)
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
        local = LocalFederation(
            folder / "flower", configs, options=options, environment=environment
        )
        with local:
            start_secured(local)
            costs(local, folder, chosen.rounds, chosen.limit)
            print("| algorithm | bit-equal | seconds a round | of processors |", flush=True)
            print("| --- | --- | --- | --- |", flush=True)
            for name in chosen.algorithms:
                equal, cost = one(local, folder, name, chosen.rounds, chosen.limit)
                words = "yes" if equal else "no"
                print(
                    f"| {name} | {words} | {cost.clock:.1f} | {cost.processors:.1f} |", flush=True
                )


if __name__ == "__main__":
    main()
