"""Alignment across views of digits nothing was learned from: cost and accuracy by bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxfed import fit
from jaxfed.gcca import MVLSA, MaxVar, Views, cost
from papers.drawing import curves as curves_drawn
from papers.gcca._digits import read_digits
from papers.gcca._linear import FULL, first_at, saved, wire_of
from papers.intervals import at_least
from papers.report import Found, Labels
from papers.runs import Seeds

RANK, BITS, INNER = 10, 3, 20
HELD_OUT, BATCH = 300, 200  # of 2,000 entities
QUANTIZED = f"{BITS} bits"
START, AC, COST, END = "AC at the start", "AC in the end", "cost in the end", "cost / full's"
GOAL = 0.9  # of the way from the start to full precision's end
BY_COST, BY_AC = "compression ratio by the cost", "compression ratio by AC"


def alignment(views: Sequence[np.ndarray], maps: Float[np.ndarray, "views d r"]) -> float:
    """The paper's AC: how often an entity is nearest to itself, over all pairs of views."""
    scores = [x @ q[: x.shape[1]] for x, q in zip(views, maps, strict=True)]
    pairs = [(a, b) for i, a in enumerate(scores) for j, b in enumerate(scores) if i != j]
    nearest = [((b**2).sum(1) - 2 * a @ b.T).argmin(axis=1) for a, b in pairs]
    return float(np.mean(np.array(nearest) == np.arange(len(scores[0]))))


def run(
    seeds: Seeds,
    *,
    data: Path | None = None,
    rounds: int = 30,
    held_out: int = HELD_OUT,
    batch: int = BATCH,
    rank: int = RANK,
) -> Found:
    """Learn from most of the entities in full precision and quantized, and align the others."""
    measured: dict[Labels, list[float]] = {}
    curves: dict[str, list[Any]] = {}
    with jax.enable_x64(True):
        whole, _ = read_digits(data)
        widths = np.asarray(whole.data.count).astype(int)
        tables = [np.asarray(x)[:, :d] for x, d in zip(whole.data.values, widths, strict=True)]
        for seed in seeds:
            order = np.random.default_rng(seed).permutation(len(tables[0]))
            views = Views.from_arrays([x[order[held_out:]] for x in tables])
            others = [x[order[:held_out]] for x in tables]
            algorithm = MaxVar(rank, solver="gradient", inner_steps=INNER, batch_size=batch)
            costs, aligned = {}, {}
            for name, bits in ((FULL, None), (QUANTIZED, BITS)):
                costs[name], aligned[name] = _learning(algorithm, views, others, bits, seed, rounds)
                curves.setdefault(f"cost | {name}", []).append(costs[name])
                curves.setdefault(f"AC | {name}", []).append(aligned[name])
            full, quantized = costs[FULL], costs[QUANTIZED]
            goal = full[0] + GOAL * (full[-1] - full[0])
            hits, goal_of_hits = aligned[FULL], aligned[FULL][0] * (1 - GOAL)
            goal_of_hits += GOAL * hits[-1]
            by_cost = saved(first_at(quantized, goal), first_at(full, goal), BITS)
            # A rising curve is one that falls upside down.
            at = {name: first_at(-curve, -goal_of_hits) for name, curve in aligned.items()}
            for labels, value in (
                ((FULL, START), hits[0]),
                ((FULL, COST), full[-1]),
                ((FULL, AC), hits[-1]),
                ((QUANTIZED, END), quantized[-1] / full[-1]),
                ((QUANTIZED, AC), aligned[QUANTIZED][-1]),
                ((QUANTIZED, BY_COST), by_cost),
                ((QUANTIZED, BY_AC), saved(at[QUANTIZED], at[FULL], BITS)),
            ):
                measured.setdefault(labels, []).append(value)
    gained = np.subtract(measured[FULL, AC], measured[FULL, START])
    lost = np.subtract(measured[QUANTIZED, AC], measured[FULL, AC])
    statements = {
        "AC gained over the start": (gained, at_least(0.1)),
        "AC with 3 bits above full precision's": (lost, at_least(-0.01)),
    }
    positions = 1 + np.arange(rounds + 1)
    panels = {
        ("", x, quantity): {
            name: (positions * scale[name], np.mean(curves[f"{quantity} | {name}"], axis=0))
            for name in (FULL, QUANTIZED)
        }
        for quantity in ("cost", "AC")
        for x, scale in (
            ("position", {FULL: 1, QUANTIZED: 1}),
            ("bits per variable", {FULL: 32, QUANTIZED: BITS}),
        )
    }
    return Found(
        measured,
        claims=statements,
        notes=[
            f"Rank {rank}, {INNER} steps with batches of {batch} a round, {rounds} rounds, "
            f"{held_out} of {len(tables[0])} entities to align, drawn anew for each seed; AC is "
            f"{1 / held_out:.4f} by chance. Goals are {GOAL:.0%} of the way from the start to full "
            "precision's end."
        ],
        figures={"figure9": curves_drawn(panels, ("log", "linear"))},
        arrays={name: np.stack(values) for name, values in curves.items()},
    )


def _learning(
    algorithm: MaxVar,
    views: Views,
    others: Sequence[np.ndarray],
    bits: int | None,
    seed: int,
    rounds: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Costs, and how well the others are aligned, at the start and after each round."""
    key = jax.random.key(seed)
    first = MVLSA(algorithm.rank, view_rank=algorithm.rank)
    start = fit(first, views, rounds=1, key=key)
    maps = [start.result.local]
    solution = fit(
        algorithm,
        views,
        rounds=rounds,
        key=key,
        warm_start=start,
        channel=wire_of(bits),
        metrics=lambda result: {"cost": cost(views, *result)},
        callbacks=[lambda solution: maps.append(solution.result.local)],
        rounds_per_chunk=1,
    )
    costs = np.append(cost(views, *start.result), solution.history["cost"])
    return costs, np.array([alignment(others, np.asarray(local)) for local in maps])
