"""Kill servers, nodes and workers of deployed runs at random moments, and compare bit for bit.

    python -m bench.robustness.machine_kills --kills 30

Three nodes run on this machine, with and without masks. Whatever is killed is started again: a
node, its worker, or the server's process, after which the run is begun again with the same folder.
A run must end with what `fit` learns from the same data, or be refused in words, which the script
prints and counts.
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxfed as jf
from jaxfed.deploy.app import write_app
from jaxfed.deploy.local import LocalFederation, family, kill

CLIENTS, ROUNDS, BOUND = 3, 10, 64.0
SETTINGS: dict[str, Any] = {"rank": 2}
PATIENCE = 900.0  # seconds for a run to end
WAYS = {"lossless": None, "masks": BOUND}


def files(folder: Path) -> list[np.ndarray]:
    """One array a client, also as a file."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(8, 5)) for _ in range(CLIENTS)]
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array)
    return arrays


def expected(arrays: list[np.ndarray], masks: float | None) -> np.ndarray:
    """What `fit` learns."""
    channel = jf.channel.lossless()
    if masks is not None:
        channel = jf.Wire(jf.channel.secure_sum(CLIENTS, bits=32, bound=masks), channel)
    solution = jf.fit(
        jf.pca.SubspaceIteration(**SETTINGS),
        jf.Clients.from_samples(arrays),
        rounds=ROUNDS,
        key=jax.random.key(0),
        channel=channel,
        backend=jf.backend.separate(),
    )
    return np.asarray(solution.result.shared)


class Trial:
    """One app on its federation, with a folder of results for each run."""

    def __init__(self, folder: Path, name: str, data: Path):
        """Write the app; start nothing."""
        self.app, self.folder, self.data, self.out = folder / f"app-{name}", folder, data, folder
        settings = {"clients": CLIENTS, "rounds": ROUNDS, "key": 0, "masks": WAYS[name]}
        write_app(self.app, "SubspaceIteration", SETTINGS, **settings)

    def federation(self, number: int) -> LocalFederation:
        """Nodes with new folders, for the run of this number."""
        self.out = self.folder / f"out-{self.app.name}-{number}"
        common = {"folder": str(self.out / "nodes")}
        configs = [
            {"partition-id": i, "data": str(self.data / f"{i}.npy"), **common}
            for i in range(CLIENTS)
        ]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs")}
        place = self.folder / f"flower-{self.app.name}-{number}"
        return LocalFederation(place, configs, environment=dict(os.environ) | cache)

    def begin(self, local: LocalFederation) -> int:
        """Begin the run, or continue it."""
        return local.begin(self.app, {"out": str(self.out)})

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return (self.out / "solution.npz").exists()


def strike(local: LocalFederation, what: str, rng: random.Random) -> bool:
    """Kill a node, a worker or the server; return whether there was one."""
    if what == "node":
        number = rng.randrange(CLIENTS)
        kill(local.nodes[number])
        time.sleep(rng.uniform(0, 1))
        local.start_nodes(number)
        return True
    assert local.link is not None
    everybody = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    rng.shuffle(everybody)
    found = everybody if what == "worker" else family(local.link.pid)
    name = b"flwr-serverapp" if what == "server" else b"worker.serve"
    killed = 0
    for pid in found:
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_bytes() and _is_ours(pid, local):
                os.kill(pid, signal.SIGKILL)
                killed += 1
                if what == "worker":
                    break
    return bool(killed)


def _is_ours(pid: int, local: LocalFederation) -> bool:
    """Whether a process belongs to this federation, by its environment."""
    wanted = f"FLWR_HOME={local.environment['FLWR_HOME']}".encode()
    return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def struck(trial: Trial, number: int, kills: int, rng: random.Random) -> tuple[list[str], str]:
    """Run to the end with some kills; return what was killed, and why the run was refused."""
    done: list[str] = []
    with trial.federation(number) as local:
        local.start()
        run, end = trial.begin(local), time.monotonic() + PATIENCE
        while not trial.ended:
            if len(done) < kills:
                time.sleep(rng.uniform(0, 8))
                what = rng.choice(["node", "worker", "server"])
                if not trial.ended and strike(local, what, rng):
                    done.append(what)
                    if what == "server":
                        run = trial.begin(local)
                continue
            time.sleep(1)
            if "failed" in local.status(run):
                lines = [x for x in local.output(run).splitlines() if "Error" in x]
                return done, lines[-1] if lines else "failed without words"
            if time.monotonic() > end:
                raise SystemExit(f"{trial.out.name}: after {', '.join(done)} it did not end")
        return done, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="at least; default: 30")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # as in the app that is written
    rng, counted, runs, refused, differ = random.Random(options.seed), {}, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays = files(folder)
        trials = {way: Trial(folder, way, folder) for way in WAYS}
        wanted = {way: expected(arrays, masks) for way, masks in WAYS.items()}
        for way, trial in trials.items():  # compiles
            struck(trial, 0, 0, rng)
            shared = jf.load(trial.out / "solution.npz").result.shared
            assert (shared == wanted[way]).all(), f"{way} differs without kills"
            print(f"{way}: as in one process", flush=True)
        while sum(counted.values()) < options.kills:
            way = list(WAYS)[runs % len(WAYS)]
            runs += 1
            done, words = struck(trials[way], runs, rng.choice([1, 2, 3]), rng)
            for what in done:
                counted[what] = counted.get(what, 0) + 1
            if words:
                refused += 1
            elif (jf.load(trials[way].out / "solution.npz").result.shared != wanted[way]).any():
                differ += 1
            print(f"run {runs}, {way}: {', '.join(done)} killed; {words or 'ended'}", flush=True)
    kinds = ", ".join(f"{count} of {what}s" for what, count in counted.items())
    print(
        f"{sum(counted.values())} kills ({kinds}), {runs} runs, {refused} refused, {differ} differ"
    )
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
