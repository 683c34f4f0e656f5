"""Compile every algorithm for an absent TPU and GPU, with the devices' own compilers.

    python -m bench.tables.accelerator_matrix  # everything, for hours; writes the table
    python -m bench.tables.accelerator_matrix v5e:2x2 PerPCA # some of it, printed

Needs `pip install -e '.[aot]'`. Each row is a run of ten rounds, forward or its gradient with
respect to the data, with messages of one kind. It shows the megabytes of code and of temporaries on
one device, the all-reduces in the program, and the processor seconds for compiling. Nothing runs on
a device.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxfed as jf
from bench.common import replace_table, table
from bench.tables.channels import CASES, CODED, C, problem
from jaxfed.planning.targets import Compiled, Target, compiled, target

ROUNDS = 10
TARGETS = ("v5e:2x2", "h100")
MANY = ("v5e:2x2", "v5e:4x4", "h100:8")  # over which clients are spread
WAYS: dict[str, Callable[[int], Any]] = {
    "lossless": lambda clients: C.lossless(),
    "difference of 3 bits": lambda clients: C.difference(C.quantize(3)),
    "entropy-coded": lambda clients: C.difference(CODED),
    "masks": lambda clients: jf.Wire(
        C.secure_sum(clients, bits=20, bound=4.0),
        C.lossless(),
        C.lossless(),
    ),
}
DIRECTIONS = ("forward", "gradient")
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "accelerators.md"
MARKS = "<!-- table -->\n", "<!-- end -->"


class Program(NamedTuple):
    """A jitted function and its arguments."""

    function: Any
    arguments: tuple


def program(
    case_name: str, way: str, direction: str, backend: Any = None, rounds: int = ROUNDS
) -> Program:
    """A run of an algorithm.

    Args:
        case_name: the algorithm, one of those that the channels' table has.
        way: what its messages go through, by name.
        direction: `"forward"`, or `"gradient"` by the clients' data.
        backend: how clients are mapped; `vmap` by default.
        rounds: how many, where it has more than one.
    """
    clients, warm = problem(case_name)
    case = CASES[case_name]
    data, rest = eqx.partition(clients, eqx.is_inexact_array)
    channel = WAYS[way](len(clients))

    def run(data, algorithm, start, key):
        solution = jf.rollout(
            algorithm,
            eqx.combine(data, rest),
            rounds=case.rounds or rounds,
            key=key,
            channel=channel,
            warm_start=start,
            backend=backend or jf.backend.vmap(),
        )
        return solution.history["objective"][-1], solution.result

    function = run
    if direction == "gradient":

        def loss(*arguments):
            # Of what is learned too: an objective may be had without the last steps.
            objective, result = run(*arguments)
            return objective + sum(jnp.sum(x**2) for x in jax.tree.leaves(result))

        function = jax.grad(loss)
    start = warm if case.warm else None
    return Program(jax.jit(function), (data, case.make(), start, jax.random.key(0)))


def sweep(points: int = 64) -> Program:
    """PerPCA with so many step sizes at once."""
    clients, warm = problem("PerPCA, gradient")

    def one(step_size, clients, warm):
        algorithm = jf.pca.PerPCA(3, 2, solver="gradient", step_size=step_size)
        return jf.rollout(
            algorithm, clients, rounds=ROUNDS, key=jax.random.key(0), warm_start=warm
        ).history["objective"]

    mapped = jax.jit(jax.vmap(one, in_axes=(0, None, None)))
    return Program(mapped, (jnp.linspace(0.01, 0.1, points), clients, warm))


def compile_for(place: Target, given: Program) -> Compiled:
    """Compile a program, its arguments on all devices alike."""
    return compiled(given.function, *given.arguments, target=place)


def row(place: Target, name: str, way: str, direction: str, make: Callable[[], Program]) -> dict:
    """What one compilation gives, or why there is none."""
    start_time = time.process_time()
    cells: dict[str, Any] = {"target": place.name, "run": name, "messages": way, "": direction}
    empty = dict.fromkeys(("code MB", "temporaries MB", "all-reduces", "processor s"), "")
    try:
        found = compile_for(place, make())
    except ValueError as refused:  # what the library itself refuses, before anything is compiled
        return cells | empty | {"note": str(refused).split(";")[0]}
    except jax.errors.JaxRuntimeError as failed:
        return cells | empty | {"note": "FAILS: " + str(failed).splitlines()[0][:120]}
    memory = found.program.memory_analysis()
    return cells | {
        "code MB": round(memory.generated_code_size_in_bytes / 1e6, 2),
        "temporaries MB": round(memory.temp_size_in_bytes / 1e6, 2),
        "all-reduces": found.all_reduces,
        "processor s": round(time.process_time() - start_time, 1),
        "note": "",
    }


def matrix(places: tuple[str, ...], names: tuple[str, ...]) -> Iterator[dict]:
    """One row a compilation."""
    cases = [case for case in CASES if not names or case in names]
    for place in map(target, places):
        for case in cases:
            for way in WAYS:
                for direction in DIRECTIONS:
                    yield row(
                        place,
                        case,
                        way,
                        direction,
                        lambda case=case, way=way, direction=direction: program(
                            case, way, direction
                        ),
                    )
            jax.clear_caches()
        if not names or "sweep" in names:
            yield row(place, "64 step sizes of PerPCA", "lossless", "forward", sweep)
    for place in map(target, MANY if not names or "shard" in names else ()):
        for case in ("PerPCA, gradient", "MaxVar", "FedAvg"):
            yield row(
                place,
                f"{case}, sharded",
                "lossless",
                "forward",
                lambda case=case, place=place: program(
                    case, "lossless", "forward", jf.backend.shard(place.mesh())
                ),
            )


def main() -> None:
    """Print the rows, and write the page's table where nothing is left out."""
    places = tuple(x for x in sys.argv[1:] if x.partition(":")[0] in ("v5e", "h100", "v6e", "v5p"))
    names = tuple(x for x in sys.argv[1:] if x not in places)
    rows = []
    for found in matrix(places or TARGETS, names):
        print(found, flush=True)
        rows.append(found)
    print(table(rows))
    if not sys.argv[1:]:
        replace_table(PAGE, MARKS, rows)


if __name__ == "__main__":
    main()
