"""Reconstruct a client's matrix from its messages, by rounds and by problem size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

import papers
from jaxfed import Algorithm, Clients, Personalized, metrics, privacy
from jaxfed.pca import FAPS, SubspaceIteration
from jaxfed.plot.drawing import colour
from papers.drawing import graphs, legend
from papers.faps import _problems as problems
from papers.faps._problems import FIVE, KKT, POWER, PRINTED, SSI, power, printed
from papers.report import Found, Labels, cells
from papers.runs import Seeds
from papers.synthetic import spectrum_synthetic

_LATE = f"{POWER}, rounds with one local step"
_ROUNDS = (1, 2, 5, 9, 10, 11, 12, 15, 40)
SMALL = 1e-5  # the error by which a matrix counts as given away
_SIZE = 100  # p of (b), where n is from 10 p to 50 p and m = 10,000


def run(
    seeds: Seeds,
    *,
    features: int = 200,
    rank: int = 20,
    at_rounds: Sequence[int] = _ROUNDS,
    ratios: Sequence[int] = (10, 20, 30, 40, 50),
    size: int = _SIZE,
) -> Found:
    """Reconstruct a client's matrix from what it says and hears."""
    methods: dict[str, Algorithm] = {}
    curves: dict[str, list[np.ndarray]] = {}
    measured: dict[Labels, Any] = {}
    arrays: dict[str, Any] = {}
    with jax.enable_x64(True):
        for seed in seeds:
            key = jax.random.key(seed)
            drawn = spectrum_synthetic(
                key, clients=8, features=features, samples=1000, rotate=False, dtype=jnp.float64
            )
            clients = Clients.from_samples(drawn.samples)
            truth = privacy.client_matrix(clients)
            methods = {
                SSI: SubspaceIteration(rank, stop="objective"),
                POWER: power(rank),
                FIVE: FAPS(rank, stop="objective"),
            }
            methods[PRINTED] = printed(rank)
            for name, algorithm in methods.items():
                transcript = privacy.record(algorithm, clients, rounds=max(at_rounds), key=key)
                error = privacy.linear_attack(transcript, truth, at=at_rounds)
                curves.setdefault(name, []).append(error)
                if name == POWER:
                    # Only the rounds with one local step, from the fourth on.
                    late = transcript._replace(
                        received=jax.tree.map(lambda x: x[3:], transcript.received),
                        sent=jax.tree.map(lambda x: x[3:], transcript.sent),
                    )
                    later = [k for k in at_rounds if k <= max(at_rounds) - 3]
                    error = privacy.linear_attack(late, truth, at=later)
                    curves.setdefault(_LATE, []).append(
                        np.pad(error, (0, len(at_rounds) - len(later)), constant_values=np.nan)
                    )
                if name == SSI:
                    frames = [transcript.received[k - 1] for k in at_rounds]
                    kkt = [
                        metrics.scaled_kkt_violation(Personalized(z, None), drawn.samples)
                        for z in frames
                    ]
                    curves.setdefault(KKT, []).append(np.asarray(kkt))
            guess = privacy.public_guess(clients)
            measured.setdefault(("public knowledge", "any"), []).append(guess)
        keys = problems.few_of(seeds).keys()
        for ratio in ratios:
            label = f"{SSI}, n/p = {ratio}, p = {size}", "rounds to 1e-5"
            leaks = [_leak(key, ratio, size, curve=ratio == ratios[0]) for key in keys]
            measured[label] = [leak.needed for leak in leaks]
            if ratio == ratios[0]:
                large, given_away = f"n = {ratio * size}, p = {size}", leaks
    known = papers.known("faps/figure1")
    for name, values in curves.items():
        arrays[name] = np.stack(values)
        for place, k in enumerate(at_rounds):
            column = arrays[name][:, place]
            labels = name, f"after {k} rounds"
            if labels in known:
                measured[labels] = column
    arrays["rounds"] = np.asarray(at_rounds)

    def draw() -> Any:
        axes, beside = graphs(
            [
                ("what a client's messages give away", "rounds", "error"),
                (f"{SSI}, {large}", "rounds", "error"),
            ]
        )
        pairs = (("error", [x.errors for x in given_away]), (KKT, [x.kkt for x in given_away]))
        for name, values in pairs:
            middle = np.median(values, axis=0)
            beside.loglog(given_away[0].rounds, middle, marker="o", markersize=3, label=name)
        legend(beside, 6)
        for i, (name, values) in enumerate(curves.items()):
            middle = np.median(np.stack(values), axis=0)
            axes.loglog(at_rounds, middle, color=colour(i), marker="o", markersize=3, label=name)
        legend(axes, 6)
        return axes.figure

    return Found(
        cells(measured, by="median"),
        notes=[
            f"Scaled: n = {features}, p = {rank}, ratio 1.01, 8 clients of 1000 samples. Relative "
            "error of a client's A_i A_iᵀ, reconstructed with the smallest norm from its messages; "
            "public knowledge is the mean over clients."
        ],
        figures={"figure1": draw},
        arrays=arrays,
    )


class Leak(NamedTuple):
    """What subspace iteration gives away of one client's uniform numbers."""

    needed: int  # rounds to a small error: n/p or more, 3 n/p if none is
    rounds: list[int]
    errors: np.ndarray  # after these rounds
    kkt: list[float]  # how far the iterate is from optimal then


def _leak(key: Key[Array, ""], ratio: int, size: int, *, curve: bool) -> Leak:
    drawn = jax.random.uniform(key, (8, 25 * size // 2, size * ratio), jnp.float64, -1, 1)
    clients, last = Clients.from_samples(drawn), 3 * ratio
    transcript = privacy.record(SubspaceIteration(size), clients, rounds=last, key=key)
    truth = privacy.client_matrix(clients)
    more = [ratio, ratio + 1, last]
    rounds = sorted({*more, *(k for k in _ROUNDS if k < last)}) if curve else [last]
    errors = privacy.linear_attack(transcript, truth, at=rounds)
    # Errors fall from round to round: where the last is large, all are.
    if not curve and errors[-1] <= SMALL:
        rounds, errors = more, privacy.linear_attack(transcript, truth, at=more)
    enough = (k for k, error in zip(rounds, errors, strict=True) if k >= ratio and error <= SMALL)
    kkt = [
        metrics.scaled_kkt_violation(Personalized(transcript.received[k - 1], None), drawn)
        for k in rounds
    ]
    return Leak(next(enough, last), rounds, errors, [float(x) for x in kkt])
