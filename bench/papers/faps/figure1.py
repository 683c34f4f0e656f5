"""What the messages of one client give away, over the rounds and over sizes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import Algorithm, Clients, metrics, privacy
from jaxfed import data as datasets
from jaxfed.pca import FAPS, SubspaceIteration
from jaxfed.plot._figure import colour
from papers.drawing import graphs, legend
from papers.faps._problems import FIVE, KKT, POWER, PRINTED, SSI, power, printed
from papers.report import (
    Found,
    Interval,
    Labels,
    Target,
    about,
    at_least,
    between,
    cells,
    near,
    within,
)
from papers.runs import Seeds

_LATE = f"{POWER}, rounds with one local step"
_HEARD = (1, 2, 5, 9, 10, 11, 12, 15, 40)
_RATIOS = (5, 10, 20)  # n/p


def run(
    seeds: Seeds,
    *,
    features: int = 200,
    rank: int = 20,
    heard: Sequence[int] = _HEARD,
    ratios: Sequence[int] = _RATIOS,
) -> Found:
    """Reconstruct a client's matrix from what it says and hears."""
    methods: dict[str, Algorithm] = {}
    curves: dict[str, list[np.ndarray]] = {}
    measured: dict[Labels, Any] = {}
    arrays: dict[str, Any] = {}
    with jax.enable_x64(True):
        for seed in seeds:
            key = jax.random.key(seed)
            drawn = datasets.spectrum_synthetic(
                key, clients=8, features=features, samples=1000, rotate=False, dtype=jnp.float64
            )
            clients = Clients.from_samples(drawn.samples)
            truth = privacy.client_matrix(clients)
            methods = {SSI: SubspaceIteration(rank), POWER: power(rank), FIVE: FAPS(rank)}
            methods[PRINTED] = printed(rank)
            for name, algorithm in methods.items():
                said = privacy.record(algorithm, clients, rounds=max(heard), key=key)
                error = privacy.linear_attack(said, truth, at=heard)
                curves.setdefault(name, []).append(error)
                if name == POWER:
                    # Only the rounds with one local step, from the fourth on.
                    late = said._replace(
                        received=jax.tree.map(lambda x: x[3:], said.received),
                        sent=jax.tree.map(lambda x: x[3:], said.sent),
                    )
                    later = [k for k in heard if k <= max(heard) - 3]
                    error = privacy.linear_attack(late, truth, at=later)
                    curves.setdefault(_LATE, []).append(np.pad(error, (0, len(heard) - len(later)),
                                                               constant_values=np.nan))  # fmt: skip
                if name == SSI:
                    frames = [said.received[k - 1] for k in heard]
                    kkt = [metrics.scaled_kkt_violation(drawn.samples, z) for z in frames]
                    curves.setdefault(KKT, []).append(np.asarray(kkt))
            guess = privacy.public_guess(clients)
            measured.setdefault(("public knowledge", "any"), []).append(guess)
            for ratio in ratios:
                # As in the paper but for a tenth of the sizes, of uniform numbers as they are.
                shape = 8, 125, 10 * ratio
                drawn = jax.random.uniform(key, shape, jnp.float64, -1, 1)
                clients = Clients.from_samples(drawn)
                said = privacy.record(SubspaceIteration(10), clients, rounds=3 * ratio, key=key)
                at = (*range(ratio - 1, ratio + 3), 2 * ratio, 3 * ratio)
                errors = privacy.linear_attack(said, privacy.client_matrix(clients), at=at)
                good = [k for k, error in zip(at, errors, strict=True) if error <= 1e-5]
                labels = f"{SSI}, n/p = {ratio}", "rounds to 1e-5"
                measured.setdefault(labels, []).append(min(good, default=3 * ratio))
    for name, values in curves.items():
        arrays[name] = np.stack(values)
        for place, k in enumerate(heard):
            column = arrays[name][:, place]
            labels = name, f"after {k} rounds"
            if labels in REFERENCE or (name == KKT and k in (10, 40)):
                measured[labels] = column
    arrays["rounds"] = np.asarray(heard)

    def draw() -> Any:
        axes = next(iter(graphs([("what a client's messages give away", "rounds", "error")])))
        for i, (name, values) in enumerate(curves.items()):
            middle = np.median(np.stack(values), axis=0)
            axes.loglog(heard, middle, color=colour(i), marker="o", markersize=3, label=name)
        legend(axes, 6)
        return axes.figure

    return Found(
        cells(measured, by="median"),
        notes=[
            f"Scaled: n = {features}, p = {rank}, ratio 1.01, 8 clients of 1000 samples. Relative "
            "error of a client's A_i A_iᵀ, reconstructed with the smallest norm from its messages; "
            "public knowledge is the mean over clients.",
        ],
        figures={"figure1": draw},
        arrays=arrays,
    )


def _reference() -> dict[Labels, Interval]:
    reference: dict[Labels, Interval] = {("public knowledge", "any"): near(0.28, 0.03)}
    for k, error in ((1, 0.95), (2, 0.78), (5, 0.37), (9, 0.066)):
        reference[SSI, f"after {k} rounds"] = within(error, 0.1)
    reference[SSI, "after 10 rounds"] = between(1e-5, 2.3e-5)
    reference[SSI, "after 15 rounds"] = about(8e-7)
    reference[SSI, "after 40 rounds"] = about(4e-7)
    reference[_LATE, "after 10 rounds"] = about(2.7e-2, 5)
    reference[_LATE, "after 12 rounds"] = about(1.0e-2, 5)
    for name in (FIVE, PRINTED):
        for k in (5, 10, 40):
            reference[name, f"after {k} rounds"] = at_least(0.86)
    for ratio in _RATIOS:
        labels = f"{SSI}, n/p = {ratio}", "rounds to 1e-5"
        reference[labels] = Interval(ratio, ratio + 1, f"n/p = {ratio}")
    return reference


REFERENCE = _reference()
TARGET = Target(
    run,
    title="Wang, Liu & Zhang (2022), Figure 1: data leakage",
    columns=("method", "quantity"),
    reference=REFERENCE,
    notes=[
        "After n/p rounds subspace iteration has given it away, up to the conditioning of its "
        "iterates; FAPS does not to this attack, and LocalPower as soon as it is subspace "
        "iteration. Other attacks do better: see jaxfed.privacy.",
        "n/p varies with p = 10 and 1000 samples of uniform numbers, a tenth of the paper's "
        "sizes. Single numbers of the reference are allowed a tenth of themselves or, where "
        "rounding decides, a factor of two, and of five for LocalPower. "
        "Beyond about ten times p the iterates are too nearly dependent for double "
        "precision: what was not reconstructed counts with 3 n/p rounds.",
    ],
)
