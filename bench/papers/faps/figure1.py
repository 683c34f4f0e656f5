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
from papers.report import Found, Interval, Labels, Target, around, at_least, cells, draws
from papers.runs import Seeds

_LATE = f"{POWER}, rounds with one local step"
_HEARD = (1, 2, 5, 9, 10, 11, 12, 15, 40)
_RATIOS = (5, 10, 20)  # n/p
FULL = 100  # p of the paper's first instance, of n = 1000 and m = 10,000


def _size_name(ratio: int, size: int = FULL // 10) -> str:
    return f"{SSI}, n/p = {ratio}, p = {size}"


def run(
    seeds: Seeds,
    *,
    features: int = 200,
    rank: int = 20,
    heard: Sequence[int] = _HEARD,
    ratios: Sequence[int] = _RATIOS,
    full: int = FULL,
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
            # Of uniform numbers as they are: one as large as the paper's, others a tenth of that.
            for ratio, size in ((10, full), *((ratio, full // 10) for ratio in ratios)):
                shape = 8, 25 * size // 2, size * ratio
                drawn = jax.random.uniform(key, shape, jnp.float64, -1, 1)
                clients = Clients.from_samples(drawn)
                at = [*range(ratio - 1, ratio + 3)]
                at += [] if size == full else [2 * ratio, 3 * ratio]
                said = privacy.record(SubspaceIteration(size), clients, rounds=max(at), key=key)
                errors = privacy.linear_attack(said, privacy.client_matrix(clients), at=at)
                good = [k for k, error in zip(at, errors, strict=True) if error <= 1e-5]
                labels = _size_name(ratio, size), "rounds to 1e-5"
                measured.setdefault(labels, []).append(min(good, default=max(at)))
    for name, values in curves.items():
        arrays[name] = np.stack(values)
        for place, k in enumerate(heard):
            column = arrays[name][:, place]
            labels = name, f"after {k} rounds"
            if labels in REFERENCE:
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
    """Of the reference's twenty draws (`bench/reference_values.py`)."""
    reference: dict[Labels, Interval] = {("public knowledge", "any"): around(0.2783, 0.0028)}
    for k, mean, sd in (
        (1, 0.9485, 0.0021),
        (2, 0.782, 0.0038),
        (5, 0.366, 0.0041),
        (9, 0.0677, 0.0014),
    ):
        reference[SSI, f"after {k} rounds"] = around(mean, sd)
    for name, k, ends in (
        (SSI, 10, (1.3e-5, 4.36e-5, 3.67e-4)),
        (SSI, 11, (2.54e-6, 3.97e-6, 5.56e-6)),
        (SSI, 12, (1.73e-6, 2.29e-6, 4.1e-6)),
        (SSI, 15, (9.09e-7, 1.32e-6, 1.93e-6)),
        (SSI, 40, (4.49e-7, 6.08e-7, 8.79e-7)),
        (KKT, 10, (0.002, 0.00235, 0.00268)),
        (KKT, 40, (0.000174, 0.000267, 0.000516)),
        (_LATE, 10, (0.0168, 0.0233, 0.0997)),
        (_LATE, 12, (0.00154, 0.00296, 0.00649)),
    ):
        reference[name, f"after {k} rounds"] = draws(*ends)
    for name in (FIVE, PRINTED):
        for k in (5, 10, 40):
            reference[name, f"after {k} rounds"] = at_least(0.86)
    for name, least, most in (
        (_size_name(5), 5, 5),
        (_size_name(10), 10, 11),
        (_size_name(20), 60, 60),
        (_size_name(10, FULL), 11, 11),
    ):
        text = f"{least}" if least == most else f"{least} to {most}"
        reference[name, "rounds to 1e-5"] = Interval(least, most, text)
    return reference


REFERENCE = _reference()
TARGET = Target(
    run,
    title="Wang, Liu & Zhang (2022), Figure 1: data leakage",
    columns=("method", "quantity"),
    reference=REFERENCE,
    paper={
        (_size_name(ratio, size), "rounds to 1e-5"): Interval(ratio, ratio + 1, f"n/p = {ratio}")
        for ratio, size in ((10, FULL), *((ratio, FULL // 10) for ratio in _RATIOS))
    },
    notes=[
        "After n/p rounds subspace iteration has given it away, up to the conditioning of its "
        "iterates; FAPS does not to this attack, and LocalPower as soon as it is subspace "
        "iteration. Other attacks do better: see jaxfed.privacy.",
        "n/p varies with p = 10 and 1000 samples of uniform numbers, a tenth of the paper's sizes, "
        "but for its first instance, n = 1000, p = 100 and m = 10,000. Beyond about ten times p "
        "the iterates are too nearly dependent for double precision: what was not reconstructed "
        "counts with 3 n/p rounds.",
        "After just n/p rounds the equations are as many as the unknowns, and how they are "
        "conditioned is a matter of the start: the reference's errors are a factor of 28 apart. A "
        "round later they are not.",
    ],
)
