"""`jaxfed deploy`: write a Flower app, try it on this machine, or manage a node's worker."""

import ast
import pkgutil
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from cyclopts import App

from jaxfed._checks import refuse
from jaxfed._names import natural
from jaxfed._optional import require
from jaxfed.cli._common import DELTA, PERSON, SHARERS, rounds
from jaxfed.cli._options import define, option
from jaxfed.core.store.saved import load
from jaxfed.deploy import worker
from jaxfed.deploy.store import states
from jaxfed.deploy.worker import IDLE

TABLES = (".npy", ".csv", ".parquet")  # suffixes of the files in a site's folder


def run_new(arguments: SimpleNamespace) -> None:
    """Write an app folder."""
    from jaxfed.deploy.app import write_app

    write_app(
        arguments.folder,
        arguments.algorithm,
        dict(map(_setting, arguments.set)),
        clients=arguments.nodes,
        rounds=arguments.rounds,
        key=arguments.seed,
        masks=arguments.masks,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        person=arguments.person,
        sharers=arguments.sharers,
    )
    print(f"wrote {arguments.folder / 'federation' / 'app.py'}")
    print(f"try it here: jaxfed deploy try --app {arguments.folder} --data DIR --out TRIAL")


def _setting(text: str) -> tuple[str, Any]:
    name, equal, value = text.partition("=")
    if not equal or not name.isidentifier():
        raise refuse("settings", "NAME=VALUE", text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def run_try(arguments: SimpleNamespace) -> None:
    """Run an app folder on this machine."""
    from jaxfed.deploy.local import LocalFederation

    app = (arguments.app or Path()).absolute()
    if not (app / "pyproject.toml").exists():
        raise refuse("app", "a folder that `jaxfed deploy new` wrote", str(app))
    if arguments.nodes < 1:
        raise refuse("nodes", "at least one", arguments.nodes)
    sites = _sites(arguments.data.absolute())
    if len(sites) < arguments.nodes:
        raise ValueError(
            "data: wanted a .npy, .csv, .parquet or .h5ad file, or a folder of tables, for each of "
            f"{arguments.nodes} nodes, got {len(sites)} in {arguments.data}"
        )
    out = (arguments.out or app / "out").absolute()
    if (out / "solution.npz").exists():
        raise refuse("out", "a folder without an earlier result", str(out))
    _check_app(app)
    configs = [
        {
            "partition-id": number,
            "num-partitions": arguments.nodes,
            "data": str(site),
            "folder": str(out / "nodes"),
        }
        for number, site in enumerate(sites[: arguments.nodes])
    ]
    with TemporaryDirectory(prefix="jaxfed-") as folder:
        print(f"starts a SuperLink and {len(configs)} SuperNodes", flush=True)
        with LocalFederation(Path(folder), configs) as local:
            local.start()
            run = local.begin(app, {"out": str(out)})
            rounds = _Rounds(out / "server")
            local.wait(run, out / "solution.npz", arguments.timeout, rounds)
            warned = _warnings([local.log(f"node-{i}") for i in range(len(configs))])
    print(load(out / "solution.npz").summary())
    print(f"the shared model: {out / 'solution.npz'}")
    for path in sorted((out / "nodes").glob("*/client-*/result.npz")):
        print(f"the model of {path.parent.name}: {path}")
    for words, nodes in warned.items():
        print(f"warning of {', '.join(nodes)}: {words}")


def _sites(folder: Path) -> list[Path]:
    """The files of a folder, one for each node; if there are none, its folders of tables."""

    def files(folder: Path, *suffixes: str) -> list[Path]:
        return [path for path in folder.iterdir() if path.suffix.lower() in suffixes]

    if not folder.is_dir():
        raise refuse("data", "a folder", str(folder))
    folders = [path for path in folder.iterdir() if path.is_dir() and files(path, *TABLES)]
    return sorted(
        files(folder, ".npy", ".h5ad", *TABLES) or folders, key=lambda path: natural(path.name)
    )


def _warnings(logs: Sequence[Path]) -> dict[str, list[str]]:
    """The nodes that warn in the same words; of words that differ in numbers alone, the last."""
    found: dict[str, list[str]] = {}
    for log in logs:
        lines = re.findall(f"{worker.RELAYED}(.*)", log.read_text("utf8", errors="replace"))
        for words in {re.sub(r"\d+", "", line): line for line in lines}.values():
            found.setdefault(words, []).append(log.stem)
    return found


def run_worker(arguments: SimpleNamespace) -> None:
    """Run a node's worker, or end it."""
    flwr = require("flwr.common.config", extra="flower")
    try:
        config = flwr.parse_config_args([arguments.node_config])
    except Exception as error:
        raise ValueError(f"node-config: {error}") from error
    if arguments.end:
        worker.end(config)
    else:
        worker.serve(config, idle=arguments.idle)


def _check_app(folder: Path) -> None:
    """Refuse an app that cannot be imported, which Flower's processes would report only late."""
    require("flwr", extra="flower")
    sys.path.insert(0, str(folder))
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf8"))
        components = project["tool"]["flwr"]["app"]["components"]
        for name in ("serverapp", "clientapp"):
            found = pkgutil.resolve_name(components[name])
            if hasattr(found, "app"):  # the app that its worker imports
                pkgutil.resolve_name(found.app)
    except Exception as error:
        raise ValueError(
            f"app: wanted one that can be imported, got {folder}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(folder))


class _Rounds:
    """Prints the rounds that a server has saved, each once, and when the last may end."""

    def __init__(self, folder: Path):
        self._store, self._shown = states(folder), -1
        self._times: dict[int, float] = {}  # when rounds were first seen

    def __call__(self) -> None:
        done = max(self._store.numbers(), default=-1)
        if done <= self._shown:
            return
        self._shown, self._times[done] = done, time.monotonic()
        if not done:
            print("first messages", flush=True)
            return
        saved = self._store.load(done)
        assert saved is not None  # the newest stays
        rounds, objective = saved.header["run"]["rounds"], saved.arrays["history objective"][-1]
        words = [f"round {done} of {rounds}"]
        if not np.isnan(objective):  # as under masks
            words.append(f"objective {objective:.6g}")
        first = min(self._times)
        if done > first:
            seconds = (self._times[done] - self._times[first]) / (done - first)
            words.append(f"{seconds:.1f} s a round")
            if done < rounds:
                words.append(f"about {seconds * (rounds - done):.0f} s left")
        print(", ".join(words), flush=True)


NODES = option("--nodes", int, "number of machines", 3)
NEW = [
    option("folder", Path, "folder to write, empty or new"),
    option("--algorithm", str, "name of the algorithm, such as perpca"),
    option("--set", tuple[str, ...], "settings of the algorithm", (), metavar="NAME=VALUE..."),
    NODES,
    rounds(20),
    option("--seed", int, "seed of the run", 0),
    option(
        "--masks",
        float,
        "hide messages under masks that cancel in their sum; the largest magnitude of a number in "
        "a message, for a mean after multiplication by the client's weight; default: no masks",
        None,
        metavar="BOUND",
    ),
    option(
        "--epsilon",
        float,
        "release each machine's data once, as a second moment with noise that protects each "
        "person; default: no noise",
        None,
    ),
    DELTA,
    PERSON,
    SHARERS,
]
TRY = [
    option("--app", Path, "the app folder; default: the current one", None),
    option("--data", Path, "folder with a table or a .npy file, or a folder of tables, a node"),
    NODES,
    option("--out", Path, "folder for the results; default: out in the app folder", None),
    option("--timeout", float, "seconds after which to give up the run", 1800.0),
]
WORKER = [
    option(
        "--node-config",
        str,
        "node configuration of the SuperNode, in the same form as given to it",
        metavar="'NAME=VALUE ...'",
    ),
    option("--idle", float, "seconds without a message until it exits", IDLE),
    option("--end", bool, "end the running worker instead", False),
]
ABOUT = {
    "new": """write an app folder

    Write a folder for flwr run: an algorithm, where each machine finds its data, and the settings
    of a run, in a few lines for you to change.""",
    "try": """run an app folder on this machine alone

    Start a SuperLink and SuperNodes on this machine's loopback, without TLS or authentication, run
    the app, show the result and stop all of them. Each message starts a process, so a round takes
    seconds.""",
    "worker": """start or end a node's worker

    Run the worker of a SuperNode on this machine. A worker keeps JAX, programs and data between the
    messages of a run. The first message of a run starts a worker if there is none; this command
    starts one earlier, or ends it.""",
}
command = App("deploy")
command.command(define(run_new, {"": NEW}, ABOUT["new"]), name="new")
command.command(define(run_try, {"": TRY}, ABOUT["try"]), name="try")
command.command(define(run_worker, {"": WORKER}, ABOUT["worker"]), name="worker")
