"""`jaxfed deploy`: an app folder for Flower, and a trial of it on this machine."""

import argparse
import ast
import contextlib
import pkgutil
import sys
import time
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxfed._optional import require
from jaxfed.core.common.checks import refuse
from jaxfed.core.store.saved import load

FILE = ".npy"


def add_parser(subparsers) -> None:
    """Add the command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "deploy",
        help="run on separate machines, by Flower",
        description="An app folder for Flower, and a trial of it on this machine.",
    )
    commands = parser.add_subparsers(metavar="new | try", required=True)
    new = commands.add_parser(
        "new",
        help="write an app folder",
        description="Write a folder that `flwr run` takes: an algorithm, where each machine has "
        "its data, and the settings of a run, in a few lines to be changed.",
    )
    new.add_argument("folder", type=Path, metavar="DIR", help="goes here; empty or not there yet")
    new.add_argument("--algorithm", required=True, metavar="NAME", help="such as perpca")
    new.add_argument(
        "--set", dest="settings", nargs="+", default=[], metavar="NAME=VALUE",
        help="settings of the algorithm",
    )  # fmt: skip
    new.add_argument("--nodes", type=int, default=3, metavar="N", help="machines (default: 3)")
    new.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds (default: 20)")
    new.add_argument("--seed", type=int, default=0, metavar="N", help="of the run (default: 0)")
    new.set_defaults(run=run_new)
    trial = commands.add_parser(
        "try",
        help="run an app folder on this machine alone",
        description="Start a SuperLink and SuperNodes on this machine's loopback, without TLS and "
        "authentication; run, show the result, and end them all. Each message is a new process: a "
        "round takes seconds.",
    )
    trial.add_argument(
        "--app", type=Path, default=Path(), metavar="DIR", help="the app folder (default: this one)"
    )
    trial.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help=f"a {FILE} file for each node"
    )
    trial.add_argument("--nodes", type=int, default=3, metavar="N", help="machines (default: 3)")
    trial.add_argument("--out", type=Path, metavar="DIR", help="results (default: out in the app)")
    trial.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="seconds at most (default: 1800)"
    )
    trial.set_defaults(run=run_try)


def run_new(arguments: argparse.Namespace) -> int:
    """Write an app folder.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments that do not fit.
        OSError: if it cannot be written.
    """
    from jaxfed.deploy.app import write_app

    write_app(
        arguments.folder, arguments.algorithm, dict(map(_setting, arguments.settings)),
        clients=arguments.nodes, rounds=arguments.rounds, key=arguments.seed,
    )  # fmt: skip
    print(f"wrote {arguments.folder / 'federation' / 'app.py'}")
    print(f"try it here: jaxfed deploy try --app {arguments.folder} --data DIR")
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, equal, value = text.partition("=")
    if not equal or not name.isidentifier():
        raise refuse("settings", "NAME=VALUE", text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def run_try(arguments: argparse.Namespace) -> int:
    """Run an app folder here.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments that do not fit, an app that cannot be imported, and a run that
            fails, with its last words.
        ImportError: if Flower is not installed.
    """
    from jaxfed.deploy.local import Local

    app = arguments.app.absolute()
    if not (app / "pyproject.toml").exists():
        raise refuse("app", "a folder that `jaxfed deploy new` wrote", str(app))
    if arguments.nodes < 1:
        raise refuse("nodes", "at least one", arguments.nodes)
    files = sorted(arguments.data.absolute().glob(f"*{FILE}"))
    if len(files) < arguments.nodes:
        raise ValueError(
            f"data: wanted a {FILE} file for each of {arguments.nodes} nodes, got {len(files)} in "
            f"{arguments.data}"
        )
    out = (arguments.out or app / "out").absolute()
    if (out / "solution.npz").exists():
        raise refuse("out", "a folder without an earlier result", str(out))
    _check_app(app)
    configs = [
        {
            "partition-id": number, "num-partitions": arguments.nodes, "data": str(file),
            "folder": str(out / "nodes"),
        }
        for number, file in enumerate(files[: arguments.nodes])
    ]  # fmt: skip
    with TemporaryDirectory(prefix="jaxfed-") as folder:
        print(f"starts a SuperLink and {len(configs)} SuperNodes", flush=True)
        with Local(Path(folder), configs) as local:
            run = local.begin(app, {"out": str(out)})
            _watch(local, run, out, arguments.timeout)
    print(load(out / "solution.npz").summary())
    print(f"the shared model: {out / 'solution.npz'}")
    for path in sorted((out / "nodes").glob("*/client-*/result.npz")):
        print(f"the model of {path.parent.name}: {path}")
    return 0


def _check_app(folder: Path) -> None:
    """Refuse an app that cannot be imported: Flower's processes would take long to say so.

    Raises:
        ValueError: with what importing it raises.
        ImportError: if Flower is not installed.
    """
    require("flwr", extra="flower")
    sys.path.insert(0, str(folder))
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf8"))
        components = project["tool"]["flwr"]["app"]["components"]
        for name in ("serverapp", "clientapp"):
            pkgutil.resolve_name(components[name])
    except Exception as error:
        raise ValueError(
            f"app: wanted one that can be imported, got {folder}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(folder))


def _watch(local: Any, run: int, out: Path, seconds: float) -> None:
    """Show a run's rounds until it ends."""
    end, asked, shown = time.monotonic() + seconds, time.monotonic(), -1
    while not (out / "solution.npz").exists():
        rounds = [int(path.stem) for path in (out / "server").glob("[0-9]*.npz")]
        if rounds and max(rounds) > shown:
            shown = max(rounds)
            print(f"round {shown}" if shown else "first messages", flush=True)
        now = time.monotonic()
        failed = now > asked + 15 and "failed" in local.status(run)
        if now > asked + 15:
            asked = time.monotonic()
        if failed or now > end:
            words = "" if failed else f" after {seconds:g} seconds"
            with contextlib.suppress(RuntimeError):
                lines = local.output(run).splitlines()
                last = [line for line in lines if "Error" in line or "error" in line][-3:]
                words += ": " + " ".join(last)
            raise ValueError(f"the run did not end well{words}")
        time.sleep(0.5)
