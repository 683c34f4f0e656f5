"""Polar factors of many small matrices: `jaxfed.linalg.polar` against a batched SVD.

    python -m bench.speed.polar

The inputs are those of a round: every client's orthonormal basis after a tangent step of length
0.5, in single precision. The function is mapped over the clients by `vmap` under `jit`, 20 times in
one compiled loop like that of a run, so that the overhead of a call does not count. Programs with a
star are compiled with `xla_cpu_multi_thread_eigen=False`, which keeps each product on one thread;
that option makes little difference here. Gradient columns give the time of one evaluation with its
gradient over that of one evaluation: medians of the ratios within each turn. `--gradient` measures
only these, without the batched SVD, which takes most of the time.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import every_turn, machine, table
from jaxfed.linalg import orthonormalize, polar

SHAPES = [
    (100, 15, 12),
    (200, 30, 10),
    (100, 100, 20),
    (100, 784, 20),
    (200, 784, 10),
    (1000, 15, 12),
    (10000, 30, 5),
]
TURNS = 20  # per compiled call
OPTIONS = {"": None, "*": {"xla_cpu_multi_thread_eigen": False}}


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


def with_gradient(w):
    q, pullback = jax.vjp(jax.vmap(polar), w)
    return pullback(q * jnp.arange(q.shape[-1], dtype=q.dtype))[0]


def looped(function):
    """`TURNS` evaluations, each near `w` and each waiting for the one before."""

    def run(w):
        return jax.lax.scan(lambda q, _: (function(w + 1e-3 * q), None), w, length=TURNS)[0]

    return run


def error(q):
    """The largest |Q^T Q - I|_F of any client."""
    return float(jnp.max(jnp.linalg.norm(q.mT @ q - jnp.eye(q.shape[-1]), axis=(1, 2))))


def ratio(times, above, below, clock="cpu"):
    """Median over the turns of the ratio of two times."""
    return float(np.median(times[above][clock] / times[below][clock]))


def row(shape, repeats, gradient):
    """One line of the table, or of the gradient's."""
    w = retraction_case(jax.random.key(0), *shape)
    functions = {"polar": jax.vmap(polar)}
    if not gradient:
        functions |= {"svd": jax.vmap(svd_polar)}
    compiled = {
        name + star: jax.jit(looped(function)).lower(w).compile(compiler_options=options)
        for name, function in functions.items()
        for star, options in (OPTIONS if not gradient else {"": None}).items()
    }
    compiled["gradient"] = jax.jit(looped(with_gradient)).lower(w).compile()
    times = every_turn({name: partial(program, w) for name, program in compiled.items()}, repeats)
    cells = {"(clients, d, r)": shape}
    cells |= {f"{n} ms": f"{1e3 * np.median(times[n]['cpu']) / TURNS:.2f}" for n in compiled}
    if not gradient:
        cells |= {
            "svd / polar": ratio(times, "svd", "polar"),
            "starred": ratio(times, "svd*", "polar*"),
            "by the clock": ratio(times, "svd", "polar", "wall"),
        }
    cells["gradient / polar"] = ratio(times, "gradient", "polar")
    cells["gradient / polar, by the clock"] = ratio(times, "gradient", "polar", "wall")
    if not gradient:
        cells |= {f"error {name}": f"{error(compiled[name](w)):.0e}" for name in ("svd", "polar")}
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each program")
    parser.add_argument("--gradient", action="store_true", help="the gradient's ratios alone")
    given = parser.parse_args()
    print(machine())
    print("processor time in ms; ratios of processor time and of the clock; errors |QᵀQ - I|_F\n")
    print(table([row(shape, given.repeats, given.gradient) for shape in SHAPES]))


if __name__ == "__main__":
    main()
