"""Time kernels, decompositions, rounds and sweeps on an accelerator, as ratios.

    python -m bench.speed.accelerator         # on the TPU or GPU that JAX finds
    python -m bench.speed.accelerator --tiny  # anywhere, to test the script; ratios mean nothing

`docs/guides/hardware.md` gives the times that the compiler's counts predict, and those of an H100.
GPUs have no kernel for second moments.
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

import jaxfed as jf
from bench.common import label, machine, table, turns
from jaxfed.core.run.compiling import GPU_OPTIONS

PLATFORM = jax.default_backend()
OPTIONS = GPU_OPTIONS if PLATFORM == "gpu" else {}  # as in `jaxfed.fit`


class Size(NamedTuple):
    """How large the problems are."""

    copied: int  # numbers
    moments: list[tuple[int, int, int, int]]  # clients, samples, features, rank
    matrices: list[tuple[int, int]]  # how many, and their rank
    tall: list[tuple[int, int, int]]  # how many, their rows and columns
    federation: tuple[int, int, int]  # clients, samples, features
    runs: int  # of a sweep
    rounds: int
    repeats: int


FULL = Size(
    2**28,
    [(50, 2048, 784, 24), (16, 4096, 1024, 16), (1000, 1024, 64, 8)],
    [(100, 5), (10_000, 3), (10_000, 10), (1_000, 32)],
    [(100, 784, 5), (1_000, 64, 5)],
    (64, 2048, 784),
    64,
    50,
    15,
)
TINY = Size(2**12, [(2, 256, 128, 3)], [(130, 3)], [(3, 30, 2)], (3, 300, 128), 3, 2, 1)


def compiled(function, *given):
    """For these arguments, as `jaxfed.fit` does it."""
    return jax.jit(function).lower(*given).compile(compiler_options=OPTIONS)


def wall(repeats: int, **rivals) -> dict[str, float]:
    """Median seconds of each, compiled, in turns."""
    programs = {name: compiled(*rival) for name, rival in rivals.items()}
    calls = {name: partial(programs[name], *given) for name, (_, *given) in rivals.items()}
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
        kernel = second_moment_reference if PLATFORM == "gpu" else _tpu_kernel(second_moment)
        taken = wall(
            size.repeats,
            plain=(second_moment_reference, x, w),
            kernel=(kernel, x, w),
            half=(kernel, half, w),
        )
        row = {
            "clients, samples, features, rank": f"{clients}, {samples}, {features}, {rank}",
            "plain / reading": taken["plain"] / (byte * x.nbytes),
            "bfloat16 / plain": taken["half"] / taken["plain"],
        }
        if PLATFORM != "gpu":
            row["kernel / plain"] = taken["kernel"] / taken["plain"]
            row["kernel / reading"] = taken["kernel"] / (byte * x.nbytes)
        rows.append(row)
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
            kernel=(_root_kernel(), gram),
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


def _tpu_kernel(kernel):
    """It, or where there is no TPU what interprets it."""
    return kernel if PLATFORM == "tpu" else partial(kernel, interpret=True)


def _root_kernel():
    if PLATFORM == "gpu":
        from jaxfed_kernels.inverse_sqrt_cuda import compiles_here, inverse_sqrt_cuda

        return inverse_sqrt_cuda if compiles_here() else inverse_sqrt_reference
    return _tpu_kernel(inverse_sqrt)


def decompositions(size: Size) -> list[dict]:
    """Singular values and bases of many tall matrices, against JAX's own."""
    rows = []
    for batch, features, rank in size.tall:
        w = jax.random.normal(jax.random.key(0), (batch, features, rank))
        taken = wall(
            max(1, size.repeats // 5),
            svd=(jax.vmap(jf.linalg.svd), w),
            own_svd=(partial(jnp.linalg.svd, full_matrices=False), w),
            basis=(jax.vmap(jf.linalg.orthonormalize), w),
            own_qr=(jnp.linalg.qr, w),
            polar=(jax.vmap(jf.linalg.polar), w),
        )
        rows.append(
            {
                "matrices, rows, columns": f"{batch}, {features}, {rank}",
                "svd ms": 1e3 * taken["svd"],
                "svd / jnp.linalg.svd": taken["svd"] / taken["own_svd"],
                "orthonormalize ms": 1e3 * taken["basis"],
                "orthonormalize / jnp.linalg.qr": taken["basis"] / taken["own_qr"],
                "polar ms": 1e3 * taken["polar"],
            }
        )
    return rows


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
        algorithm = jf.pca.PerPCA(2, 2, solver="gradient", step_size=step, start="random")
        return jf.rollout(algorithm, clients, rounds=size.rounds, key=jax.random.key(0)).history[
            "objective"
        ]

    one = compiled(run, steps[0])
    taken = turns(
        {
            "together": partial(compiled(jax.vmap(run), steps), steps),
            "one by one": lambda: [one(step) for step in steps],
        },
        max(1, size.repeats // 5),
    )
    ratio = taken["together"]["wall"] / taken["one by one"]["wall"]
    return [{"settings": size.runs, "one call / one by one": ratio}]


def rounds(size: Size, byte: float) -> list[dict]:
    """A round from samples against reading them once: its roofline."""
    clients = _federation(size)
    rows = []
    for algorithm in (
        jf.pca.SubspaceIteration(8),
        jf.pca.PerPCA(4, 4, solver="gradient", step_size=0.1, start="random"),
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
                "algorithm": label(algorithm),
                "milliseconds a round": 1e3 * a_round,
                "round / reading": a_round / (byte * clients.data.values.nbytes),
            }
        )
    return rows


def main(arguments: list[str]) -> None:
    """Measure and print."""
    size = TINY if "--tiny" in arguments else FULL
    if size is FULL and PLATFORM == "cpu":
        sys.exit("no TPU or GPU was found; --tiny runs anywhere, and its ratios mean nothing")
    print(machine())
    byte = seconds_per_byte(size)
    print(f"copy: {1e-9 / byte:.0f} GB/s")
    print(table(moments(size, byte)))
    print(table(roots(size, byte)))
    print(table(decompositions(size)))
    print(table(rounds(size, byte)))
    print(table(sweeps(size)))


if __name__ == "__main__":
    main(sys.argv[1:])
