"""Polar factors of many small matrices: `jaxfed.linalg.polar` against a batched SVD.

Run `python bench/polar.py`. The case is that of a round: every client's basis U after a tangent
step of length 0.5, in single precision, mapped over the clients by `vmap` under `jit`. All functions
of one shape are timed in turn, many times, and medians taken, so that what else the machine does
falls on all of them alike: read the ratios. A star marks programs compiled with
`xla_cpu_multi_thread_eigen=False`, which keeps small products on one thread.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jaxfed.linalg import orthonormalize, polar

SHAPES = [
    (100, 15, 12),
    (200, 30, 10),
    (100, 100, 20),
    (100, 784, 20),
    (1000, 15, 12),
    (10000, 30, 5),
]
ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}


def svd_polar(w):
    u, _, vt = jnp.linalg.svd(w, full_matrices=False)
    return u @ vt


def retraction_case(key, clients, features, rank):
    """Orthonormal bases, each moved by 0.5 along a random tangent direction."""
    first, second = jax.random.split(key)
    u = jax.vmap(orthonormalize)(jax.random.normal(first, (clients, features, rank)))
    step = jax.random.normal(second, u.shape)
    step = step - u @ (u.mT @ step)
    return u + 0.5 * step / jnp.linalg.norm(step, axis=(1, 2), keepdims=True)


def error(q):
    return jnp.max(jnp.linalg.norm(q.mT @ q - jnp.eye(q.shape[-1]), axis=(1, 2)))


def gradient(w):
    q, pullback = jax.vjp(jax.vmap(polar), w)
    return pullback(q * jnp.arange(q.shape[-1], dtype=q.dtype))[0]


def programs(w):
    """Compiled programs by name."""
    on_one_thread = jax.default_backend() == "cpu"
    functions = {
        "svd": (jax.vmap(svd_polar), None),
        "polar": (jax.vmap(polar), None),
        "with gradient": (gradient, None),
    }
    if on_one_thread:
        functions |= {
            "svd*": (jax.vmap(svd_polar), ONE_THREAD),
            "polar*": (jax.vmap(polar), ONE_THREAD),
        }
    return {
        name: jax.jit(function).lower(w).compile(compiler_options=options)
        for name, (function, options) in functions.items()
    }


def measure(functions, w, repeats):
    """Median processor and wall time of each program, in milliseconds."""
    times = {name: ([], []) for name in functions}
    for function in functions.values():
        jax.block_until_ready(function(w))
    for _ in range(repeats):
        for name, function in functions.items():
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(function(w))
            times[name][0].append(1e3 * (time.process_time() - cpu))
            times[name][1].append(1e3 * (time.perf_counter() - wall))
    return {name: tuple(map(statistics.median, pair)) for name, pair in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timings of each program")
    repeats = parser.parse_args().repeats

    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; processor / wall time in ms")
    names = ["svd", "svd*", "polar", "polar*", "with gradient"]
    print(f"{'(clients, d, r)':>16}" + "".join(f"{name:>19}" for name in names), end="")
    print(f"{'svd/polar':>11}{'svd*/polar*':>13}{'error svd':>11}{'polar':>9}")
    for shape in SHAPES:
        w = retraction_case(jax.random.key(0), *shape)
        functions = programs(w)
        times = measure(functions, w, repeats)
        print(f"{shape!s:>16}", end="")
        for name in names:
            cell = "{:.2f} / {:.2f}".format(*times[name]) if name in times else "-"
            print(f"{cell:>19}", end="")
        for star, width in (("", 11), ("*", 13)):
            known = "svd" + star in times
            ratio = f"{times['svd' + star][0] / times['polar' + star][0]:.1f}" if known else "-"
            print(f"{ratio:>{width}}", end="")
        print(
            f"{error(functions['svd'](w)):>11.0e}{error(functions['polar'](w)):>9.0e}", flush=True
        )


if __name__ == "__main__":
    main()
