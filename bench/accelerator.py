"""Everything that waits for hardware, as ratios within one run.

    python bench/accelerator.py           # on the TPU or GPU that JAX finds
    python bench/accelerator.py --tiny    # anywhere, to see that it runs: its ratios mean nothing

What the compiler's counts lead one to expect is in `docs/guides/hardware.md`.
"""

import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxfed_kernels import (
    inverse_sqrt,
    inverse_sqrt_reference,
    second_moment,
    second_moment_reference,
)
from timing import machine, table, turns

import jaxfed as jf


class Size(NamedTuple):
    """How large the problems are."""

    copied: int  # numbers
    moments: list[tuple[int, int, int, int]]  # clients, samples, features, rank
    matrices: list[tuple[int, int]]  # how many, and their rank
    federation: tuple[int, int, int]  # clients, samples, features
    runs: int  # of a sweep
    rounds: int
    repeats: int


FULL = Size(
    2**28, [(50, 2048, 784, 24), (16, 4096, 1024, 16), (1000, 1024, 64, 8)],
    [(10_000, 3), (10_000, 10), (1_000, 32)], (64, 2048, 784), 64, 50, 15,
)  # fmt: skip
TINY = Size(2**12, [(2, 256, 128, 3)], [(130, 3)], (3, 300, 128), 3, 2, 1)


def wall(repeats: int, **rivals) -> dict[str, float]:
    """Median seconds of each, compiled, in turns."""
    compiled = {name: jax.jit(f).lower(*given).compile() for name, (f, *given) in rivals.items()}
    calls = {name: partial(compiled[name], *given) for name, (_, *given) in rivals.items()}
    return {name: clocks["wall"] for name, clocks in turns(calls, repeats).items()}


def seconds_per_byte(size: Size) -> float:
    """Of copying: each number is read and written."""
    numbers = jnp.arange(size.copied, dtype=jnp.float32)
    return wall(size.repeats, copy=(lambda x: x + 1, numbers))["copy"] / (2 * numbers.nbytes)


def moments(size: Size, byte: float) -> list[dict]:
    """The second-moment product in one pass over the samples, against two and against reading."""
    rows = []
    for clients, samples, features, rank in size.moments:
        key = jax.random.key(0)
        x = jax.random.normal(key, (clients, samples, features))
        w = jax.random.normal(key, (clients, rank, features))
        half = x.astype(jnp.bfloat16)
        taken = wall(
            size.repeats,
            plain=(second_moment_reference, x, w),
            kernel=(_kernel(second_moment), x, w),
            half=(_kernel(second_moment), half, w),
        )
        rows.append(
            {
                "clients, samples, features, rank": f"{clients}, {samples}, {features}, {rank}",
                "kernel / plain": taken["kernel"] / taken["plain"],
                "bfloat16 / plain": taken["half"] / taken["plain"],
                "kernel / reading": taken["kernel"] / (byte * x.nbytes),
                "plain / reading": taken["plain"] / (byte * x.nbytes),
            }
        )
    return rows


def roots(size: Size, byte: float) -> list[dict]:
    """Inverse square roots with the batch along the lanes, against operations of their own."""
    rows = []
    for batch, rank in size.matrices:
        w = jax.random.normal(jax.random.key(0), (batch, 4 * rank, rank))
        gram = w.mT @ w
        taken = wall(
            size.repeats,
            plain=(inverse_sqrt_reference, gram),
            kernel=(_kernel(inverse_sqrt), gram),
            eigh=(jnp.linalg.eigh, gram),
        )
        rows.append(
            {
                "matrices, rank": f"{batch}, {rank}",
                "kernel / plain": taken["kernel"] / taken["plain"],
                "kernel / eigenvalues": taken["kernel"] / taken["eigh"],
                "kernel / reading and writing": taken["kernel"] / (2 * byte * gram.nbytes),
            }
        )
    return rows


def _kernel(kernel):
    """It, or where there is no TPU what interprets it."""
    return kernel if jax.default_backend() == "tpu" else partial(kernel, interpret=True)


def _federation(size: Size) -> jf.Clients:
    clients, samples, features = size.federation
    # Their variances fall, so that there are components to find.
    x = jax.random.normal(jax.random.key(1), (clients, samples, features))
    return jf.Clients.from_samples(x / jnp.sqrt(1 + jnp.arange(features)))


def sweeps(size: Size) -> list[dict]:
    """Step sizes in one call against one call each, the program compiled before either."""
    clients = _federation(size)
    steps = jnp.geomspace(0.01, 0.1, size.runs)

    def run(step):
        algorithm = jf.pca.PerPCA(2, 2, step_size=step, start="random")
        return jf.rollout(algorithm, clients, rounds=size.rounds, key=jax.random.key(0)).history[
            "objective"
        ]

    one = jax.jit(run).lower(steps[0]).compile()
    taken = turns(
        {
            "together": partial(jax.jit(jax.vmap(run)).lower(steps).compile(), steps),
            "one by one": lambda: [one(step) for step in steps],
        },
        size.repeats,
    )
    ratio = taken["together"]["wall"] / taken["one by one"]["wall"]
    return [{"settings": size.runs, "one call / one by one": ratio}]


def rounds(size: Size, byte: float) -> list[dict]:
    """A round from samples against reading them once: its roofline."""
    clients = _federation(size)
    rows = []
    for algorithm in (
        jf.pca.SubspaceIteration(8),
        jf.pca.PerPCA(4, 4, step_size=0.1, start="random"),
    ):

        def run(clients, length, algorithm=algorithm):
            return jf.rollout(algorithm, clients, rounds=length, key=jax.random.key(0)).result

        taken = wall(
            size.repeats,
            short=(partial(run, length=size.rounds), clients),
            long=(partial(run, length=2 * size.rounds), clients),
        )
        a_round = (taken["long"] - taken["short"]) / size.rounds
        rows.append(
            {
                "algorithm": type(algorithm).__name__,
                "milliseconds a round": 1e3 * a_round,
                "round / reading": a_round / (byte * clients.data.values.nbytes),
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    """Measure and print."""
    size = TINY if "--tiny" in arguments else FULL
    if size is FULL and jax.default_backend() == "cpu":
        sys.exit("no TPU or GPU was found; --tiny runs anywhere, and its ratios mean nothing")
    print(machine())
    byte = seconds_per_byte(size)
    print(f"copy: {1e-9 / byte:.0f} GB/s")
    if size is TINY or jax.default_backend() == "tpu":  # the kernels are for TPUs
        print(table(moments(size, byte)))
        print(table(roots(size, byte)))
    print(table(sweeps(size)))
    print(table(rounds(size, byte)))


if __name__ == "__main__":
    main(sys.argv[1:])
