"""Rounds that solvers of the same objective need to come near its best value, by family.

    python -m bench.speed.solvers [FAMILY ...] [--data DIR]

`FAMILIES` lists the families; by default, the script runs all. A gap is (objective - best) / unit.
The best value is the lowest value of all solvers and of a random start. The unit is the best value
itself or, for likelihoods, which have no zero, the difference between the common start and the best
value. L-BFGS-B is SciPy's, on the pooled objective with the local components eliminated and the
shared ones as a polar factor; the script counts its evaluations. Digits, wine and breast cancer
come from scikit-learn. With `--data DIR`, the script also reads six views of digits from
DIR/mfeat/mfeat.npz, and nine speakers from the files JapaneseVowels_*.ts of the UCI archive (the
wheel of aeon contains them) in DIR/japanese_vowels; without it, it leaves these problems out.

A cell contains the rounds to 1e-2, 1e-3 and 1e-4, as medians of the draws, or – if most draws do
not get there within the solver's rounds; the processor milliseconds of a round, without
compilation; and the number of draws that end more than 1e-2 above the best value.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import jaxfed as jf
from bench.common import machine
from bench.speed import objectives
from bench.speed.objectives import Array, Objective, Problem

GAPS = 1e-2, 1e-3, 1e-4
STARTS = 2


class Solver(NamedTuple):
    """A federated algorithm, and how many rounds it gets."""

    make: Callable[[Problem], jf.Algorithm]
    rounds: int
    # The family's objective before each round, from a history.
    objective: Callable[..., Array] = lambda problem, history: history["objective"]


class Family(NamedTuple):
    """Solvers of one objective, and problems for them."""

    problems: Callable[[Path | None], Iterator[Problem]]
    objective: Objective
    solvers: dict[str, Solver]


def per_pca(make: Callable[[int, int], jf.Algorithm]) -> Callable[[Problem], jf.Algorithm]:
    return lambda p: make(int(p.settings[0]), int(p.settings[1]))


def adaptive_objective(problem: Problem, history: dict[str, Array]) -> Array:
    """The history's objective, and the hyper prior's part at the variance of each round."""
    after = history["prior_variance"]
    first = jnp.broadcast_to(problem.settings[2], (len(after), 1))
    variance = jnp.concatenate([first, after[:, :-1]], axis=1)
    dimension, hyper_prior = objectives.adaptive_constants(problem)
    return history["objective"] + dimension * jnp.log(variance) / 2 + hyper_prior / variance


def hierarchical(solver: str) -> Callable[[Problem], jf.Algorithm]:
    return lambda p: jf.pca.HierarchicalPCA(int(p.settings[0]), *p.settings[1:], solver=solver)


def adaptive(solver: str) -> Callable[[Problem], jf.Algorithm]:
    return lambda p: jf.pca.HierarchicalPCA(
        int(p.settings[0]),
        p.settings[1],
        initial_variance=p.settings[2],
        hyper_prior=objectives.adaptive_constants(p)[1],
        solver=solver,
    )


def bayes(solver: str) -> Callable[[Problem], jf.Algorithm]:
    return lambda p: jf.pca.EmpiricalBayesPCA(int(p.settings[0]), p.settings[1], solver=solver)


def max_var(**options) -> Callable[[Problem], jf.Algorithm]:
    return lambda p: jf.gcca.MaxVar(int(p.settings[0]), **options)


FAMILIES = {
    "pca": Family(
        objectives.pca_problems,
        objectives.PCA,
        {
            "PerPCA, gradient": Solver(per_pca(partial(jf.pca.PerPCA, solver="gradient")), 600),
            "PerPCA": Solver(per_pca(partial(jf.pca.PerPCA, local_penalty=0.0)), 150),
        },
    ),
    "hierarchical": Family(
        partial(objectives.likelihood_problems, (0.1, 0.01, 0.001)),
        objectives.HIERARCHICAL,
        {
            "gradient": Solver(hierarchical("gradient"), 300),
            "eigenvectors": Solver(hierarchical("eigenvectors"), 150),
            "quasi_newton": Solver(hierarchical("quasi_newton"), 50),
        },
    ),
    "adaptive": Family(
        partial(objectives.likelihood_problems, (0.1,)),
        objectives.ADAPTIVE,
        {
            "gradient": Solver(adaptive("gradient"), 300, adaptive_objective),
            "eigenvectors": Solver(adaptive("eigenvectors"), 150, adaptive_objective),
            "quasi_newton": Solver(adaptive("quasi_newton"), 50, adaptive_objective),
        },
    ),
    "empirical_bayes": Family(
        partial(objectives.likelihood_problems, (0.1,)),
        objectives.EMPIRICAL_BAYES,
        {"em": Solver(bayes("em"), 150), "quasi_newton": Solver(bayes("quasi_newton"), 50)},
    ),
    "gcca": Family(
        objectives.view_problems,
        objectives.VIEWS,
        {
            "gradient": Solver(max_var(solver="gradient"), 300),
            "exact": Solver(max_var(memory=0), 300),
            "exact, memory=4": Solver(max_var(), 60),
        },
    ),
}


# --- runs ----------------------------------------------------------------------------------------


COMPILED: dict[object, Callable] = {}


def rounds_of(problem: Problem, solver: Solver) -> tuple[Array, float]:
    """Objectives `(draws, rounds)` before each round, and seconds that one round of one takes."""

    def one(algorithm, clients, start):
        return jf.rollout(
            algorithm, clients, rounds=solver.rounds, key=jax.random.key(0), warm_start=start
        ).history

    given = solver.make(problem), problem.clients, problem.starts
    # Problems that differ in numbers alone share a program.
    kind = solver.rounds, jax.tree.structure(given), str(jax.eval_shape(lambda x: x, given))
    if kind not in COMPILED:
        COMPILED[kind] = jax.jit(jax.vmap(one, in_axes=(None, 0, 0))).lower(*given).compile()
    began = time.process_time()
    history = jax.block_until_ready(COMPILED[kind](*given))
    seconds = time.process_time() - began
    objective = np.asarray(solver.objective(problem, history))
    return objective, seconds / objective.size


def evaluations_of(family: Family, problem: Problem) -> list[list[tuple[Array, float]]]:
    """By draw and seed: the lowest objectives until each evaluation of L-BFGS-B, seconds of one."""
    objective, settings = family.objective, problem.settings
    ranks = tuple(x if isinstance(x, int) else None for x in settings)
    kind = objective.value, ranks, problem.clients.data.values.shape
    if kind not in COMPILED:
        # Problems that differ in numbers alone share this program too.
        def value(vector, matrices, numbers):
            given = tuple(x if r is None else r for r, x in zip(ranks, numbers, strict=True))
            return objective.value(problem._replace(settings=given), vector, matrices)

        COMPILED[kind] = jax.jit(jax.value_and_grad(value))
    program = partial(COMPILED[kind], numbers=settings)
    lower, upper = (None, None) if objective.bounds is None else objective.bounds(problem)
    options = {"maxfun": 400, "maxiter": 400, "maxcor": 10, "ftol": 1e-13, "gtol": 1e-8}

    def one(matrices, start):
        values: list[float] = []

        def evaluate(vector):
            value, gradient = program(vector, matrices)
            values.append(float(value))
            return values[-1], np.asarray(gradient)

        bounds = [(None, None)] * (len(start) - 1) + [(lower, upper)]
        jax.block_until_ready(program(start, matrices))
        began = time.process_time()
        minimize(evaluate, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return np.minimum.accumulate(values), (time.process_time() - began) / len(values)

    found = []
    for draw in range(len(problem.clients.ids)):
        clients = jax.tree.map(lambda x, draw=draw: x[draw], problem.clients)
        matrices = objective.matrices(clients)
        starts = [objective.begin(problem, matrices, seed) for seed in range(STARTS)]
        found.append([one(matrices, start) for start in starts])
    return found


def first_within(objective: Array, limit: float) -> float:
    """The first round, or infinity."""
    found = np.flatnonzero(objective <= limit)
    return float(found[0]) if len(found) else np.inf


def row_of(family: Family, problem: Problem) -> dict[str, str]:
    """Of each solver: rounds to the gaps, medians over draws, its time, and where draws end."""
    draws = range(len(problem.clients.ids))
    runs = {name: rounds_of(problem, solver) for name, solver in family.solvers.items()}
    pooled = evaluations_of(family, problem)
    best = np.array([min(values.min() for values, _ in of_draw) for of_draw in pooled])
    best = np.minimum(best, np.min([x.min(axis=1) for x, _ in runs.values()], axis=0))
    first = next(iter(runs.values()))[0][:, 0]
    units = best if family.objective.relative else first - best
    traces = {name: (list(x), seconds) for name, (x, seconds) in runs.items()}
    seconds = float(np.mean([of_draw[0][1] for of_draw in pooled]))
    traces["L-BFGS-B, pooled"] = [of_draw[0][0] for of_draw in pooled], seconds
    row = {"problem": problem.kind}
    for name, (values, seconds) in traces.items():
        cells = []
        for gap in GAPS:
            found = [first_within(values[i], best[i] + gap * units[i]) for i in draws]
            median = float(np.median(found))
            cells.append(f"{median:.0f}" if np.isfinite(median) else "–")
        above = sum(values[i][-1] > best[i] + 1e-2 * units[i] for i in draws)
        row[name] = f"{' / '.join(cells)}; {1e3 * seconds:.2g} ms"
        row[name] += f"; {above} of {len(draws)} above" if above else ""
    return row


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows as a table in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--data", type=Path, metavar="DIR")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"FAMILY: wanted some of {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    if options.data is None:
        print("without --data: neither the speakers nor the six views of digits; see --help")
    jax.config.update("jax_enable_x64", True)
    print(machine())
    for name in options.families or FAMILIES:
        family = FAMILIES[name]
        rows = [row_of(family, problem) for problem in family.problems(options.data)]
        print(f"\n{name}\n\n{markdown(rows)}", flush=True)


if __name__ == "__main__":
    main()
