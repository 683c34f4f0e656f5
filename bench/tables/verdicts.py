"""What runs say of themselves: silent misses and false alarms of the status.

    python -m bench.tables.verdicts [channels | tolerances] [--quick] [--seeds 21 22 23]

Ordinary problems with known answers (`bench.tables.answers`, `priors` and `view_problems`), with
all clients or a tenth of them in a round, through five channels, after 100 rounds. A run says
something unless it ends as converged. A miss says nothing, although its objective or its error
exceeds the best known one by more than 10 %; of an error, one hundredth of the largest possible one
is allowed as well. A false alarm says something, although the objective exceeds the best known one
by less than 0.1 % and the error by less than 10 %, or, where errors alone count, by less than 2 %,
and the shared components are those of the run with the best known answer, to one hundredth of the
largest possible squared distance.
`tolerances`: how far the objective exceeds the best known one where a lossless run of all clients
stopped by `tol`, relative to it and divided by `tol`. One is the stated gap.

`--quick` takes half of the problems. The rules were settled on the draw of seed 0, so rates are of
other seeds.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf
from bench.common import label
from bench.tables import answers, priors, view_problems
from jaxfed.core.run.solution import name_of
from jaxfed.core.run.status import Status

ROUNDS, LONG = 100, 1000
TOLERANCES = (1e-3, 1e-5)
FAMILIES = (
    "balanced",
    "local strong",
    "heavy tails",
    "shared strong",
    "not centred",
    "alike",
    "alike, many samples",
    "exact moments",
    "fewer samples than features",
)
COARSE, RANDOM = jf.channel.quantize(3), jf.channel.random_k(0.25)
CHANNELS = {
    "lossless": jf.channel.lossless(),
    "quantize(3)": COARSE,
    "difference(quantize(3))": jf.channel.difference(COARSE),
    "random_k(0.25)": RANDOM,
    "error_feedback(random_k(0.25))": jf.channel.error_feedback(RANDOM),
}
# Objectives that exceed the best by more, and errors, count as misses; those by less, as right.
FAR, NEAR, ALONE, SMALL = 1.1, 1.001, 1.02, 0.01


class Measured(NamedTuple):
    """How far a result is from the truth."""

    objective: float  # zero if errors alone count
    error: float


class Problem(NamedTuple):
    """Clients, what is fitted to them, and how the result is judged."""

    name: str
    algorithm: jf.Algorithm
    clients: jf.Clients
    measure: Callable[[jf.Solution], Measured]
    largest: float  # error


class Ended(NamedTuple):
    """How one run ended."""

    status: str
    miss: bool
    false_alarm: bool


def personalized(seed: int, quick: bool) -> Iterator[Problem]:
    """Shared and local components."""
    for name in FAMILIES[:4] if quick else FAMILIES:
        family = answers.FAMILIES[name]
        drawn = answers.draw(family, seed)
        ranks = answers.ranks(family)

        def measure(run: jf.Solution, drawn=drawn, ranks=ranks) -> Measured:
            shared = np.asarray(run.result.shared)
            left = answers.residual(drawn.samples, shared, ranks[1])
            return Measured(left, answers.error(run.result.shared, drawn.shared))

        clients = jf.Clients.from_samples(drawn.samples)
        for algorithm in (jf.pca.PerPCA(*ranks, solver="gradient"), jf.pca.PerPCA(*ranks)):
            yield Problem(name, algorithm, clients, measure, 2.0 * ranks[0])


def hierarchical(seed: int, quick: bool) -> Iterator[Problem]:
    """Components of clients that scatter around common ones."""
    for kind in ("similar",) if quick else tuple(priors.SPREADS):
        values, frames = priors.drawn(seed, 40, 0.25, priors.SPREADS[kind])

        def measure(run: jf.Solution, frames=frames) -> Measured:
            found = np.asarray(run.result.local).mT @ frames
            return Measured(0.0, float(2 * (priors.RANK - np.sum(found**2) / len(frames))))

        clients = jf.Clients.from_samples(values)
        for model in (jf.pca.HierarchicalPCA, jf.pca.EmpiricalBayesPCA):
            yield Problem(kind, model(priors.RANK), clients, measure, 2.0 * priors.RANK)


def views(seed: int, quick: bool) -> Iterator[Problem]:
    """Views of the same entities."""
    for name in ("easy", "ill-conditioned") if quick else tuple(view_problems.PROBLEMS):
        problem = view_problems.PROBLEMS[name](seed)

        def measure(run: jf.Solution, problem=problem) -> Measured:
            return Measured(view_problems.cost_of(problem.views, run.result.shared), 0.0)

        yield Problem(name, jf.gcca.MaxVar(view_problems.RANK), problem.views, measure, 1.0)


def ended(problem: Problem, seed: int) -> Iterator[tuple[str, str, Ended]]:
    """Who took part, the channel and the end, for all runs on a problem."""
    key, clients = jax.random.key(seed), problem.clients
    goal = jf.fit(problem.algorithm, clients, rounds=LONG, key=key)
    best, rank = problem.measure(goal), goal.result.shared.shape[1]
    few = jf.participation.uniform(max(2, len(clients) // 10))
    for who, participation in (("all", None), ("a tenth", few)):
        for name, channel in CHANNELS.items():
            run = jf.fit(
                problem.algorithm,
                clients,
                rounds=ROUNDS,
                key=key,
                channel=channel,
                participation=participation,
                throw=False,
            )
            found = problem.measure(run)
            says = not bool(run.status == Status.converged)
            allowed = FAR * best.error + SMALL * problem.largest
            wrong = found.error > allowed or not np.isfinite(found.objective + found.error)
            miss = not says and (wrong or found.objective > FAR * best.objective)
            near = FAR if best.objective else ALONE
            right = found.objective <= NEAR * best.objective and found.error <= near * best.error
            apart = answers.error(run.result.shared, np.asarray(goal.result.shared, float))
            alarm = says and right and apart <= SMALL * 2 * rank
            status = name_of(run.status)
            if miss or alarm:
                print(
                    f"{problem.name}, {problem.algorithm!r}, {who}, {name}: {status}", found, best
                )
            yield who, name, Ended(status, miss, alarm)


def beyond_tolerance(problem: Problem, seed: int) -> Iterator[tuple[float, bool, float]]:
    """The tolerance, whether a run stopped by it, and its excess as a multiple of it."""
    key, algorithm = jax.random.key(seed), problem.algorithm
    if isinstance(algorithm, jf.pca.PerPCA) and algorithm.solver == "quasi_newton":
        # With a penalty, it does not minimize the objective that is reported and compared.
        algorithm = jf.pca.PerPCA(algorithm.shared_rank, algorithm.local_rank, local_penalty=0.0)
    # In double precision, where rounding does not hide what is left of a small tolerance.
    with jax.enable_x64(True):
        clients = jax.tree.map(
            lambda x: x.astype("float64") if x.dtype == np.float32 else x, problem.clients
        )
        best = problem.measure(jf.fit(algorithm, clients, rounds=LONG, key=key))
        for tol in TOLERANCES:
            run = jf.fit(algorithm, clients, rounds=LONG, key=key, tol=tol, throw=False)
            excess = problem.measure(run).objective / best.objective - 1
            yield tol, bool(run.status == Status.converged), excess / tol


def tolerances(seeds: Sequence[int], quick: bool) -> None:
    """Print how far runs stop above the optimum."""
    found: dict[tuple[str, float], list[tuple[bool, float]]] = {}
    for problems in (personalized, views):
        for draws in zip(*(problems(seed, quick) for seed in seeds), strict=True):
            for seed, problem in zip(seeds, draws, strict=True):
                for tol, stopped, multiple in beyond_tolerance(problem, seed):
                    name = label(problem.algorithm)
                    found.setdefault((name, tol), []).append((stopped, multiple))
                    if stopped and multiple > 1:
                        print(f"{problem.name}, {problem.algorithm!r}, {tol}: {multiple:.2g} x tol")
            jax.clear_caches()
    print("| algorithm | tolerance | runs | stopped by it | beyond it | largest multiple |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for (name, tol), runs in found.items():
        stops = [multiple for stopped, multiple in runs if stopped]
        far = sum(multiple > 1 for multiple in stops)
        largest = max(stops, default=np.nan)
        print(f"| `{name}` | {tol:.0e} | {len(runs)} | {len(stops)} | {far} | {largest:.2g} |")


def channels(seeds: Sequence[int], quick: bool) -> None:
    """Print how runs through channels end."""
    found: dict[tuple[str, str], list[Ended]] = {}
    for problems in (personalized, hierarchical, views):
        # One problem's draws share compiled programs, of which a process can hold only so many.
        for draws in zip(*(problems(seed, quick) for seed in seeds), strict=True):
            for seed, problem in zip(seeds, draws, strict=True):
                for who, channel, end in ended(problem, seed):
                    found.setdefault((channel, who), []).append(end)
            jax.clear_caches()
    print("| channel | clients | runs | ends | silent misses | false alarms |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    for (channel, who), ends in found.items():
        names = Counter(end.status.replace("_", " ") for end in ends)
        counted = ", ".join(f"{number} {name}" for name, number in names.most_common())
        misses, alarms = (sum(getattr(x, y) for x in ends) for y in ("miss", "false_alarm"))
        print(f"| `{channel}` | {who} | {len(ends)} | {counted} | {misses} | {alarms} |")
    every = [end for ends in found.values() for end in ends]
    misses, alarms = (np.mean([getattr(x, y) for x in every]) for y in ("miss", "false_alarm"))
    print(f"\nSilent misses: {100 * misses:.1f} %; false alarms: {100 * alarms:.1f} %.")


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="channels", choices=("channels", "tolerances"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23])
    parsed = parser.parse_args()
    part = {"channels": channels, "tolerances": tolerances}[parsed.part]
    part(parsed.seeds, parsed.quick)


if __name__ == "__main__":
    main()
