"""Which algorithm works with how few passes of a TPU's matrix unit, emulated on a processor.

    python -m bench.tables.precision

A TPU multiplies numbers of eight bits. For a product in single precision, it rounds the factors to
such numbers once (one pass, JAX's default there), or splits each factor into two (three passes) or
three of them (six passes, `highest`). The script replaces every product of a traced run by the
result with the number of passes that its mark requests. Products that the library marks `highest`
regardless of the user's choice stay exact; `jax.default_matmul_precision` determines the others.
The last column ignores the marks. Sums are in single precision, as on a TPU. Nothing here ran on a
TPU.

Algorithms and problem are those of `bench/tables/channels.py`.
"""

import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

import jaxfed as jf
from bench.common import machine, table
from bench.tables.channels import CASES, ROUNDS, problem

P = lax.Precision
# What the user has chosen, and whether the library's marks count.
CHOICES = {
    "highest": ("highest", True),
    "three passes": ("high", True),
    "one pass": ("bfloat16", True),
    "one pass everywhere": ("bfloat16", False),
}


def emulated(function: Callable, *, marks: bool = True) -> Callable:
    """The same function, each product computed in as many passes as it is marked with.

    Args:
        function: of arrays.
        marks: whether those of `lax.Precision.HIGHEST` count; else all is one pass.
    """

    def run(*arguments):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        result = _evaluated(program, marks, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), result)

    return run


def _evaluated(program: ClosedJaxpr, marks: bool, *arguments) -> list:
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= zip(program.jaxpr.invars, arguments, strict=True)

    def value(atom):
        return atom.val if hasattr(atom, "val") else known[atom]

    for equation in program.jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        if equation.primitive is lax.dot_general_p:
            found = [_product(*given, equation.params, marks)]
        elif plain := getattr(equation.primitive, "plain", None):  # what platforms do in own ways
            program_of_it = jax.make_jaxpr(partial(plain, **equation.params))(*given)
            found = _evaluated(program_of_it, marks, *given)
        else:
            params = equation.primitive.get_bind_params(_within(equation.params, marks))
            found = equation.primitive.bind(*given, **params)
            found = found if equation.primitive.multiple_results else [found]
        known |= zip(equation.outvars, found, strict=True)
    return [value(atom) for atom in program.jaxpr.outvars]


def _within(params, marks: bool):
    """Programs within parameters, as those of loops, in the same way."""
    if isinstance(params, ClosedJaxpr):
        return jax.make_jaxpr(partial(_evaluated, params, marks))(*params.in_avals)
    if isinstance(params, dict):
        return {name: _within(value, marks) for name, value in params.items()}
    if isinstance(params, tuple) and hasattr(params, "_fields"):
        return type(params)(*(_within(value, marks) for value in params))
    if isinstance(params, tuple):
        return tuple(_within(value, marks) for value in params)
    return params


def _product(a, b, params: dict, marks: bool):
    precision = params["precision"]
    precision = precision[0] if isinstance(precision, tuple) else precision
    dot = partial(lax.dot_general, **params | {"precision": P.HIGHEST})
    if (precision == P.HIGHEST and marks) or a.dtype != jnp.float32:
        return dot(a, b)
    a_high, b_high = _rounded(a), _rounded(b)
    product = dot(a_high, b_high)
    if precision == P.HIGH and marks:
        product += dot(a_high, _rounded(b - b_high)) + dot(_rounded(a - a_high), b_high)
    return product


def _rounded(x):
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def ends(name: str, rounds: int) -> dict[str, tuple[float, np.ndarray | None]]:
    """How runs end with each choice: the last objective, and the shared components."""
    clients, warm = problem(name)
    case = CASES[name]
    algorithm, start = case.make(), warm if case.warm else None

    def run(algorithm, clients):
        solution = jf.rollout(
            algorithm,
            clients,
            rounds=case.rounds or rounds,
            key=jax.random.key(0),
            warm_start=start,
        )
        shared = solution.result.shared
        shared = shared if isinstance(shared, jax.Array) and shared.ndim == 2 else None
        return solution.history["objective"][-1], shared

    found = {}
    leaves, structure = jax.tree.flatten((algorithm, clients))

    def flat(*leaves):
        return run(*jax.tree.unflatten(structure, leaves))

    for name, (chosen, marks) in CHOICES.items():
        with jax.default_matmul_precision(chosen):
            objective, shared = jax.jit(emulated(flat, marks=marks))(*leaves)
        components = None if shared is None else np.asarray(shared, np.float64)
        found[name] = float(objective), components
    return found


def rows(names=tuple(CASES), rounds: int = ROUNDS) -> list[dict]:
    """One row an algorithm, one column a choice."""
    result = []
    for name in names:
        found = ends(name, rounds)
        exact = found["highest"]
        row = {"algorithm": name}
        row |= {name: _cell(given, exact) for name, given in found.items()}
        result.append(row)
        jax.clear_caches()  # compiled programs hold memory maps, of which a process has so many
    return result


def measured(given, exact) -> tuple[float, float, float]:
    """How an end differs from that at full precision.

    Returns:
        How far the objective is off, relatively; the sine of the largest angle between the shared
        subspaces; how far the shared components are from orthonormal. The last two are NaN where
        there are no such components.
    """
    off = abs(given[0] / exact[0] - 1)
    if given[1] is None:
        return off, np.nan, np.nan
    if not np.all(np.isfinite(given[1])):
        return off, np.inf, np.inf
    q, reference = (np.linalg.qr(shared)[0] for shared in (given[1], exact[1]))
    sine = np.linalg.norm(q - reference @ (reference.T @ q), 2)
    return off, float(sine), float(np.linalg.norm(given[1].T @ given[1] - np.eye(q.shape[1])))


def _cell(given, exact) -> str:
    off, sine, orthonormal = measured(given, exact)
    if np.isnan(sine):
        return f"{off:.0e}"
    return f"{off:.0e}, {sine:.0e}, {orthonormal:.0e}"


def main() -> None:
    print(machine())
    names = [name for name in CASES if not sys.argv[1:] or name in sys.argv[1:]]
    print(table(rows(names)))


if __name__ == "__main__":
    main()
