"""A tenth of the clients in each round, with and without memory of the others' messages.

    python -m bench.tables.participation [--draws 3]

Errors after 100 rounds, as means over draws: the squared distance between the projectors of true
and learned components (of all clients, for hierarchical models), and for views the cost over the
least one. A star marks results whose status says, in any draw, that the run did not converge.
"""

import argparse

import jax
import numpy as np

import jaxfed as jf
from bench.tables import answers, priors, view_problems
from jaxfed.core.run.status import Status

ROUNDS, CLIENTS = 100, 40
MEMORY = jf.channel.difference
COLUMNS = {
    "all clients": (False, jf.channel.lossless()),
    "a tenth": (True, jf.channel.lossless()),
    "a tenth, `difference(lossless())`": (True, MEMORY(jf.channel.lossless())),
    "a tenth, `difference(quantize(3))`": (True, MEMORY(jf.channel.quantize(3))),
}


def cases(seed: int):
    """Name, algorithm, clients and error of each row."""
    family = answers.FAMILIES["balanced"]
    drawn, ranks = answers.draw(family, seed), answers.ranks(family)
    clients = jf.Clients.from_samples(drawn.samples)

    def error(run: jf.Solution) -> float:
        return answers.error(run.result.shared, drawn.shared)

    yield "PerPCA, gradient", jf.pca.PerPCA(*ranks, solver="gradient"), clients, error
    yield "PerPCA", jf.pca.PerPCA(*ranks), clients, error
    values, frames = priors.drawn(seed, CLIENTS, 0.25, priors.SPREADS["similar"])
    clients = jf.Clients.from_samples(values)

    def distance(run: jf.Solution) -> float:
        found = np.asarray(run.result.local).mT @ frames
        return float(2 * (priors.RANK - np.sum(found**2) / len(frames)))

    for model in (jf.pca.HierarchicalPCA, jf.pca.EmpiricalBayesPCA):
        yield model.__name__, model(priors.RANK), clients, distance
    problem = view_problems.easy(seed)
    least = view_problems.least_cost(problem.views)

    def cost(run: jf.Solution) -> float:
        return view_problems.cost_of(problem.views, run.result.shared) / least

    yield "MaxVar, two of four views", jf.gcca.MaxVar(view_problems.RANK), problem.views, cost


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=3)
    found: dict[str, dict[str, list[tuple[float, bool]]]] = {}
    for seed in range(parser.parse_args().draws):
        for name, algorithm, clients, error in cases(seed):
            some = jf.participation.uniform(max(2, len(clients) // 10))
            for column, (few, channel) in COLUMNS.items():
                run = jf.fit(
                    algorithm,
                    clients,
                    rounds=ROUNDS,
                    key=jax.random.key(seed),
                    channel=channel,
                    participation=some if few else None,
                )
                end = error(run), bool(run.status == Status.converged)
                found.setdefault(name, {}).setdefault(column, []).append(end)
    print("| algorithm | " + " | ".join(COLUMNS) + " |")
    print("| --- " + "| ---: " * len(COLUMNS) + "|")
    for name, row in found.items():
        cells = []
        for ends in row.values():
            errors, good = zip(*ends, strict=True)
            cells.append(f"{np.mean(errors):.3g}" + "*" * (not all(good)))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
