"""Kill runs at random moments, resume them and compare their results bit for bit.

    python -m bench.robustness.kills --runs 100

The runs are `jaxfed fit`, `jaxfed sweep` and `jaxfed.grid` on tiny data, saved after each round or
block. They cover participation, difference channels, noise and masks, and callbacks that stop. The
script runs each once without interruption. It then runs each again and again, with SIGKILL at a
random moment within the time that the run takes.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROUNDS = 40


def data(folder: Path) -> None:
    """Four clients of a few samples, and three views of a few entities."""
    rng = np.random.default_rng(0)
    for kind, clients, shape in (("clients", 4, (8, 5)), ("views", 3, (12, 4))):
        (folder / kind).mkdir()
        for i in range(clients):
            np.save(folder / kind / f"{i}.npy", rng.normal(size=shape).astype(np.float32))


# --- what is run: the command line, and this file with the name of one of the programs below -----


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands by name, all but the folder of their results, which comes last."""
    jaxfed, this = [sys.executable, "-m", "jaxfed"], [sys.executable, __file__, "--program"]
    rounds = ["--rounds", str(ROUNDS), "--checkpoint-every", "1"]
    perpca = ["fit", "perpca", "--data", str(folder / "clients"), *rounds]
    perpca += ["--shared-rank", "1", "--local-rank", "1", "--participation", "2"]
    gcca = ["fit", "maxvar", "--data", str(folder / "views"), *rounds, "--rank", "2", "--bits", "3"]
    sweep = ["sweep", "hierarchicalpca", "--rank", "2", "--features", "6", "--clients", "3"]
    sweep += ["--rounds", "3", "--prior-variance", *(str(0.01 * (i + 1)) for i in range(20))]
    return {
        "fit: participation": [*jaxfed, *perpca, "--out"],
        "fit: differences": [*jaxfed, *gcca, "--out"],
        "fit: differences, participation": [*this, "differences"],
        "fit: noise": [*this, "noise"],
        "fit: masks": [*this, "masks"],
        "fit: stops early": [*this, "stops"],
        "sweep": [*jaxfed, *sweep, "--out"],
        "grid: differences": [*this, "grid"],
    }


def _clients():
    import jaxfed as jf

    values = np.random.default_rng(0).normal(size=(4, 8, 5)).astype(np.float32)
    return jf.Clients.from_samples(values)


def fitted(name: str, out: Path) -> dict[str, np.ndarray]:
    """Run `fit`, half of the clients in each round but for masks."""
    import jax

    import jaxfed as jf

    c, half = jf.channel, {"participation": jf.participation.uniform(2)}
    coded = c.difference(c.quantize(3))
    shared_noise = c.gaussian(1.0, 0.1, clients=4)
    # There are always two participants, so that this stops the run halfway.
    stop = jf.EarlyStopping("participants", patience=ROUNDS // 2 - 2)
    channel, options = {
        "differences": (coded, half),
        "noise": (c.gaussian(1.0, 0.1), half),
        "masks": (c.secure_sum(4, bits=20, bound=4.0, inner=shared_noise), {}),
        "stops": (coded, half),
    }[name]
    callbacks = [jf.EarlyStopping("objective", patience=ROUNDS // 2)]
    # Nothing is sent before the rounds, which masks could not hide.
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1, decay=0.9, start="random")

    def run() -> dict[str, np.ndarray]:
        solution = jf.fit(
            algorithm,
            _clients(),
            rounds=ROUNDS,
            key=jax.random.key(0),
            channel=jf.Wire(channel, c.lossless()),
            rounds_per_chunk=1,
            best="objective",
            callbacks=[*callbacks, stop] if name == "stops" else callbacks,
            checkpoint=jf.Checkpoint(out / "checkpoint", every=1),
            **options,
        )
        ended = solution.rounds, solution.status, solution.releases
        leaves = jax.tree.leaves((solution.result, solution.history, solution.local, ended))
        return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}

    first = run()
    if name == "stops":
        again = run()
        if any((first[leaf] != again[leaf]).any() for leaf in first):
            raise SystemExit("a run that had ended gave something else when it was called again")
    return first


def grid(out: Path) -> dict[str, np.ndarray]:
    """Runs with differences both ways and participation, one a block."""
    import jax

    import jaxfed as jf

    clients = _clients()

    def point(seed, step_size):
        solution = jf.rollout(
            jf.pca.PerPCA(1, 1, solver="gradient", step_size=step_size),
            clients,
            rounds=5,
            key=jax.random.key(seed),
            participation=jf.participation.uniform(2),
            channel=jf.channel.difference(jf.channel.quantize(3)),
        )
        return {"objective": solution.history["objective"], "shared": solution.result.shared}

    axes = {"seed": range(8), "step_size": [0.01, 0.02, 0.05, 0.1, 0.2]}
    found = jf.grid(point, axes, runs_at_once=1, folder=out / "grid")
    return {str(name): values.values for name, values in found.items()}


PROGRAMS = ("differences", "grid", "masks", "noise", "stops")


def program(name: str, out: Path) -> None:
    """Run a program, and write what it ends with."""
    out.mkdir(exist_ok=True)
    part = out / "part.npz"
    np.savez(part, **(grid(out) if name == "grid" else fitted(name, out)))
    part.replace(out / "result.npz")
    (out / "result.json").write_text("{}")


# --- the campaign --------------------------------------------------------------------------------


def started(command: list[str], out: Path, log: Path) -> subprocess.Popen:
    """A process in a group of its own."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command, str(out)], stdout=file, stderr=file, start_new_session=True
        )


def finished(command: list[str], out: Path, log: Path) -> float:
    """Run to the end; return the seconds."""
    begin = time.perf_counter()
    status = started(command, out, log).wait()
    if status != 0:
        raise SystemExit(f"{out.name} ended with {status}: {log.read_text()[-2000:]}")
    return time.perf_counter() - begin


def killed(command: list[str], out: Path, log: Path, after: float) -> bool:
    """Start, and kill after some seconds; return whether it was still running."""
    process = started(command, out, log)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def done(out: Path) -> bool:
    """Whether all results are there."""
    return (out / "result.json").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="kills, at least; default: 100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("out", nargs="?", type=Path)
    options = parser.parse_args()
    if options.program:
        program(options.program, options.out)
        return

    rng, kills, differ = random.Random(options.seed), 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        data(folder)
        known = commands(folder)
        seconds, wanted = {}, {}
        for number, (kind, command) in enumerate(known.items()):
            out, log = folder / f"whole-{number}", folder / "log"
            finished(command, folder / f"warm-{number}", log)  # compiles
            seconds[kind] = finished(command, out, log)
            wanted[kind] = (out / "result.npz").read_bytes()
            print(f"{kind}: {seconds[kind]:.1f} s without interruption", flush=True)
        number, counted = 0, dict.fromkeys(known, 0)
        while kills < options.runs:
            kind = list(known)[number % len(known)]
            out, log = folder / f"killed-{number}", folder / f"log-{number}"
            number += 1
            # Every second one is killed again and again, at most three times.
            most = rng.choice([1, 1, 2, 3])
            while not done(out) and most:
                if killed(known[kind], out, log, rng.uniform(0, seconds[kind])):
                    kills, most = kills + 1, most - 1
                    counted[kind] += 1
            if not done(out):
                finished(known[kind], out, log)
            if (out / "result.npz").read_bytes() != wanted[kind]:
                differ.append(kind)
                print(f"run {number}, {kind}: another result")
            print(f"{kills} kills, {number} runs, {len(differ)} differ", flush=True)
    print(", ".join(f"{kind}: {count} kills" for kind, count in counted.items()))
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
