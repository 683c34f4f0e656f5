"""Error with a learned prior variance as heterogeneity grows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import papers
from jaxfed import rollout
from jaxfed.pca import EmpiricalBayesPCA, HierarchicalPCA
from papers.hierarchical import _laws as laws
from papers.hierarchical.descent import GlobalProbabilisticPCA, LocalProbabilisticPCA
from papers.intervals import at_least, at_most
from papers.report import Found, Labels
from papers.runs import Seeds

VARIANCES = (0.001, 0.01, 0.04, 0.1, 0.2, 1.0)
FIXED = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3)

LEARNED = "learned variance"
BAYES = "empirical Bayes, approximate"  # its likelihood is


def _adapted(*, prior_variance, seed, law):
    """Errors of every method, and the variances that two of them learn."""
    key, rank = jax.random.key(seed), law["rank"]
    data, given = laws.drawn(key, prior_variance, **law)

    def error(algorithm, rounds):
        solution = rollout(algorithm, given, rounds=rounds, key=key)
        spread = solution.history.get("prior_variance", jnp.zeros(rounds))
        return laws.error_of(solution.result, data, given), spread[-1]

    make = partial(HierarchicalPCA, rank, laws.NOISE)
    adaptive = partial(
        HierarchicalPCA, rank, laws.NOISE, initial_variance=0.1, solver="eigenvectors"
    )
    # A third of the sampling variance for 2ξ/D, where Corollary 4.6 wants 0.17 of it.
    sampling = laws.NOISE * (1 + laws.NOISE) / law["samples"]
    safe = rank * (law["features"] - rank) * sampling / 6
    strengths = jnp.asarray([0.75, 1.875, 3.0])
    printed, spread = jax.lax.map(
        lambda xi: error(adaptive(hyper_prior=xi, dimension="frame"), 40), strengths
    )
    fixed = jax.lax.map(lambda x: error(make(x, solver="eigenvectors"), 20)[0], jnp.asarray(FIXED))
    bayes, estimate = error(EmpiricalBayesPCA(rank, laws.NOISE), 40)
    default, _ = error(adaptive(hyper_prior=safe), 40)
    local, _ = error(LocalProbabilisticPCA(rank, laws.NOISE), 60)
    everybody, _ = error(GlobalProbabilisticPCA(rank, laws.NOISE), 2)
    return {
        laws.LOCAL: local,
        laws.GLOBAL: everybody,
        "ADEPT, xi = 0.75": printed[0],
        "ADEPT, xi = 1.875": printed[1],
        "ADEPT, xi = 3": printed[2],
        "ADEPT, default": default,
        BAYES: bayes,
        "best fixed variance": fixed.min(),
        f"ADEPT, xi = 1.875, {LEARNED}": spread[1],
        f"{BAYES}, {LEARNED}": estimate,
    }


def run(seeds: Seeds) -> Found:
    """All variances and seeds, for few and for more samples."""
    variances, known = list(VARIANCES), papers.known("adept/figure2")
    measured: dict[Labels, Any] = {}
    statements, panels = {}, {}
    for samples, clients in ((20, 200), (100, 100)):
        law = {"clients": clients, "features": 30, "rank": 10, "samples": samples}
        found = laws.swept(_adapted, {"prior_variance": variances, "seed": list(seeds)}, law=law)
        for (variance, name), values in laws.by_method(found).items():
            quantity = LEARNED if name.endswith(LEARNED) else "error"
            name = name.removesuffix(f", {LEARNED}")
            measured[samples, variance, name, quantity] = values
        panels[f"n = {samples}"] = found[[name for name in found if not name.endswith(LEARNED)]]
        values = laws.values_of(panels[f"n = {samples}"])
        best, ends = (
            values["best fixed variance"],
            np.minimum(values[laws.LOCAL], values[laws.GLOBAL]),
        )
        excess = {
            "ADEPT, default, over the best fixed variance": ("ADEPT, default", best, 0.05),
            f"{BAYES}, over the best fixed variance": (BAYES, best, 0.01),
            f"{BAYES}, over the better of local and global": (BAYES, ends, 0.01),
        }
        for text, (name, other, most) in excess.items():
            excesses = values[name] / other - 1
            statements[f"n = {samples}: {text}: most"] = -laws.least(-excesses), at_most(most)
    values = laws.values_of(panels["n = 20"])
    gained = laws.margins(values | {laws.OURS: values["ADEPT, xi = 1.875"]})
    local, everybody, ours = (
        known[20, 0.04, name, "error"] for name in (laws.LOCAL, laws.GLOBAL, "ADEPT, xi = 1.875")
    )
    statements |= {
        "ADEPT, xi = 1.875, smallest in the middle (0.04): margin": (
            gained[2],
            laws.at_least_half(min(local, everybody) - ours),
        ),
        "ADEPT, xi = 1.875, smallest everywhere: least margin": (laws.least(gained), at_least(0)),
    }
    return Found(
        measured,
        claims=statements,
        figures={"adept_figure2": laws.picture(panels, "prior_variance")},
        arrays=laws.curves_of(panels),
    )
