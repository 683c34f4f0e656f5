"""Attack each algorithm's messages: the table of `docs/guides/privacy.md`.

    python -m bench.tables.privacy

Errors are relative, up to a scale and a multiple of the identity. Bold ones are below a twentieth.
Errors below a hundredth are printed as bounds, because only rounding limits them, and rounding
differs between processors.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import machine
from jaxfed import privacy
from papers.synthetic import spectrum_synthetic

FEATURES, RANK, CLIENTS, SAMPLES, DECAY = 100, 10, 8, 500, 1.02
ROUNDS, RESTARTS, CLIENT, SEED = 40, 10, 1, 0
NOISE, PRIOR = 0.5, 0.1


class Row(NamedTuple):
    """An algorithm of the table."""

    name: str
    algorithm: jf.Algorithm
    rounds: int = ROUNDS  # one where there is nothing more
    skip: int = 0  # rounds whose messages are known to be no products
    restarts: int = RESTARTS


def rows(rank: int = RANK, rounds: int = ROUNDS) -> list[Row]:
    """The table's algorithms."""
    pca = jf.pca
    hierarchical = pca.HierarchicalPCA
    table = [Row("`Local`", pca.Local(rank), 1), Row("`Pooled`", pca.Pooled(rank), 1)]
    half = max(1, rank // 2)
    for method in ("projector", "spectrum", "local_first"):
        name = f"`OneShot({half}, {half}, method={method!r})`".replace("'", '"')
        table.append(Row(name, pca.OneShot(half, half, method=method), 1))
    for local in sorted({rank, max(1, rank // 2), max(1, rank // 5)}, reverse=True):
        # Step sizes are set: an automatic one comes from the first messages.
        settled = pca.PerPCA(rank, local, solver="gradient", step_size=100.0)
        table.append(Row(f"`PerPCA`, gradient, local rank {local}", settled, rounds))
    fewest = max(1, rank // 5)
    table += [
        Row(
            f"`PerPCA`, gradient, local rank {fewest}, {4 * RESTARTS} restarts",
            pca.PerPCA(rank, fewest, solver="gradient", step_size=100.0),
            rounds,
            restarts=4 * RESTARTS,
        ),
        *[
            Row(
                f'`PerPCA(solver="gradient", start="{start}")`, local rank {rank}',
                pca.PerPCA(rank, rank, solver="gradient", step_size=100.0, start=start),
                rounds,
            )
            for start in ("local_first", "random")
        ],
        Row(f"`PerPCA`, local rank {rank}", pca.PerPCA(rank, rank), rounds),
        Row("`HierarchicalPCA`, given prior", hierarchical(rank, NOISE, PRIOR), rounds),
        Row(
            '`HierarchicalPCA(solver="eigenvectors")`',
            hierarchical(rank, NOISE, PRIOR, solver="eigenvectors"),
            rounds,
        ),
        Row("`HierarchicalPCA`", pca.HierarchicalPCA(rank, NOISE, initial_variance=PRIOR), rounds),
        Row("`EmpiricalBayesPCA`", pca.EmpiricalBayesPCA(rank, NOISE), rounds),
        Row("`SubspaceIteration`", pca.SubspaceIteration(rank), rounds),
        Row("`LocalPower`, from its last halving on", pca.LocalPower(rank), rounds, skip=3),
        Row("`BlockLanczos`", pca.BlockLanczos(rank), rounds),
        Row("`FAPS`", pca.FAPS(rank), rounds),
        Row('`FAPS(stop="kkt")`', pca.FAPS(rank, stop="kkt"), rounds),
    ]
    return table


def draw(features: int = FEATURES, samples: int = SAMPLES) -> jf.Clients:
    """Clients that are alike."""
    drawn = spectrum_synthetic(
        jax.random.key(SEED),
        clients=CLIENTS,
        features=features,
        samples=samples,
        decay=DECAY,
        dtype=jnp.float64,
    )
    return jf.Clients.from_samples(drawn.samples)


def attacked(row: Row, clients: jf.Clients, at: tuple[int, ...] = (10, ROUNDS)) -> dict[str, float]:
    """The errors of all attacks; NaN where nothing is sent that could be attacked."""
    key, truth = jax.random.key(SEED), privacy.client_matrix(clients, CLIENT)
    transcript = privacy.record(
        row.algorithm, clients, rounds=row.rounds + row.skip, key=key, client=CLIENT
    )
    sends_first = bool(jax.tree.leaves(transcript.first))
    first = privacy.first_message_attack(transcript, truth) if sends_first else 1.0
    errors: dict[str, float] = {"first message": math.nan if first == 1 else first}
    sums = [privacy.first_message_attack(transcript, truth, summed=True)] if sends_first else []
    for k in at:
        name = f"{k} rounds"
        errors[name] = math.nan
        if row.rounds > 1:
            options = {"calibrated": True, "at": [k + row.skip], "skip": row.skip}
            errors[name] = float(privacy.linear_attack(transcript, truth, **options)[0])
            summed = privacy.linear_attack(transcript, truth, summed=True, **options)
            sums.append(float(summed[0]))
    errors["restarts"] = math.nan
    if row.rounds > 1:
        errors["restarts"] = privacy.restart_attack(
            row.algorithm, clients, key=key, client=CLIENT, restarts=row.restarts
        )
    errors["sums only"] = min(sums, default=math.nan)
    return errors


def cell(error: float, missing: str) -> str:
    """A number as the table prints it."""
    if math.isnan(error):
        return missing
    if error >= 0.01:
        # The attacks are searches, whose second digit depends on the processor.
        return f"**{error:.1g}**" if error < 0.05 else f"{error:.1f}"
    bound = max(math.floor(math.log10(max(error, 1e-300))) + 1, -13)
    return f"**<1e{bound}**"


def line(row: Row, errors: dict[str, float]) -> str:
    """A row of the table, in Markdown."""
    missing = {"first message": "no", "sums only": "no"}
    cells = [cell(error, missing.get(name, "–")) for name, error in errors.items()]
    return f"| {' | '.join([row.name, *cells])} |"


def main() -> None:
    """Print the table."""
    print(machine(), flush=True)
    jax.config.update("jax_enable_x64", True)
    clients = draw()
    truth, pooled = privacy.client_matrix(clients, CLIENT), privacy.public_guess(clients, CLIENT)
    identity = privacy.relative_error(np.eye(FEATURES), truth, calibrated=True)
    print(f"Seed {SEED}; the identity scores {identity:.1f}, the pooled matrix {pooled:.1f}.")
    for i, row in enumerate(rows()):
        errors = attacked(row, clients)
        if i == 0:
            print(
                f"| algorithm | {' | '.join(errors)} |\n| {' | '.join('---' for _ in range(6))} |"
            )
        print(line(row, errors), flush=True)


if __name__ == "__main__":
    main()
