"""Sparse views, scaled down: cost by bits."""

from papers.gcca._linear import VIEW_RANK, costs_of, drawn, first_at, saved
from papers.report import Found, Labels
from papers.runs import Seeds

RATIO, END = "compression ratio", "end cost / full precision's"


def run(seeds: Seeds, *, draws: int = 2, rounds: int = 100, reduction: int = 10) -> Found:
    """All draws of a seed in one compiled call for each number of bits."""
    measured: dict[Labels, list[float]] = {}
    entities, features, latent = 50_000 // (2 * reduction), 2000 // reduction, 200 // reduction
    # As many entries of each row of Z and of A as in the large setting.
    densities = (min(1.0, 0.01 * reduction), min(1.0, 5e-4 * reduction), min(1.0, 1e-3 * reduction))
    setting = {"entities": entities, "features": features, "latent": latent}
    for keys, views, start in drawn(seeds, draws, noise=0.1, densities=densities, **setting):
        means = {
            bits: costs_of(views, start, keys, bits, batch=entities // 10, rounds=rounds).mean(0)
            for bits in (None, 3, 4, 5)
        }
        goal = 1.1 * means[None].min()
        full = first_at(means[None], goal)
        for bits in (3, 4, 5):
            ratio = saved(first_at(means[bits], goal), full, bits)
            measured.setdefault((f"{bits} bits", RATIO), []).append(ratio)
            ratio = means[bits][-1] / means[None][-1]
            measured.setdefault((f"{bits} bits", END), []).append(ratio)
    return Found(
        measured,
        notes=[
            f"Scaled: {entities} entities, {features} features, {latent} latent dimensions and "
            f"batches of {entities // 10} instead of 50000, 2000, 200 and 5000; starts from views "
            f"of rank {VIEW_RANK} instead of 50; densities "
            f"{densities}; {draws} draws a seed instead of 5."
        ],
    )
