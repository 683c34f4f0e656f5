r"""Differential privacy of persons whose samples networks are trained on.

For the noise itself, see `jaxfed.generative.GradientNoise`.
"""

import numpy as np
from jax.core import Tracer
from scipy.stats import hypergeom

from jaxfed._checks import check_count, check_instance, check_positive, check_probability, refuse
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import GRADIENTS, Guarantee
from jaxfed.core.clients.samples import check_complete_samples
from jaxfed.generative import AdaptiveTraining, FedAvg
from jaxfed.privacy.accounting import Part, epsilon_of_parts, least_noise

# How far one row that is replaced by another moves a sum of gradients that are clipped to norm 1.
DISTANCE = 2


def training_guarantee(
    algorithm: FedAvg | AdaptiveTraining,
    clients: Clients,
    *,
    rounds: int,
    delta: float,
    rows_per_person: int = 1,
) -> Guarantee:
    r"""How far the noise in gradients protects each person behind a training.

    All that is computed from the gradients of all steps together is \((\varepsilon,
    \delta)\)-differentially private if the data of one person of one client are replaced by any
    others: the messages, the shared model, and the personal models of `AdaptiveTraining`. Numbers
    of samples are public. The client with the fewest samples has the largest \(\varepsilon\), and
    it is this one's. `jaxfed.privacy.statement` says in words what is protected, and what is not:
    above all the losses in the history, which have no noise.

    A step draws b of n samples without replacement. If each person has one row, a step moves by
    more than noise hides with probability b/n only (Balle, Barthe & Gaboardi, Theorem 11). With at
    most k rows of a person, J of them are drawn, a hypergeometric number, and move the sum of
    clipped gradients by at most 2 J C. With \(\eta = P(J > 0)\) and \(\delta_r\) the privacy
    profile of Gaussian noise whose mean moves by r standard deviations, one step has

    \[ \delta(\log(1 + \eta (e^{\varepsilon} - 1)))
    \le \sum_{j \ge 1} P(J = j) \, \delta_{2 j / z}(\varepsilon). \]

    This follows from their Theorem 2, since a draw with j of the person's rows and one without,
    where j other rows take their places, differ in j rows, and from joint convexity in the draw of
    j. Steps are composed as in `jaxfed.privacy.epsilon`.

    Args:
        algorithm: with `gradient_noise`. Within `jaxfed.aggregation.Robust`, pass the algorithm
            inside.
        clients: with the samples that it is trained on; only their numbers are used.
        rounds: rounds of the run, or the most in which one client takes part. Rounds of runs that
            continue each other, and those of several runs with the same settings, add up.
        delta: \(\delta\), the probability with which the guarantee may fail, for example below one
            over the number of persons of a client.
        rows_per_person: k, the most rows of one person at a client.

    Returns:
        The guarantee; \(\varepsilon\) is an upper bound, exact up to rounding where a step uses all
        samples.

    Raises:
        ValueError: if the algorithm has no noise in its gradients, or that of several runs; the
            clients have no samples in memory, or fewer than a batch; or a number is out of range.
        ImportError: if dp-accounting is not installed.

    Source: Balle, Barthe & Gaboardi (2018), Privacy amplification by subsampling, Theorems 2 and
    11; Abadi et al. (2016), Deep learning with differential privacy.
    """
    if not isinstance(algorithm, FedAvg | AdaptiveTraining) or algorithm.gradient_noise is None:
        wanted = "FedAvg or AdaptiveTraining of jaxfed.generative with gradient_noise"
        raise refuse("algorithm", wanted, algorithm)
    known = algorithm.gradient_noise.noise_multiplier, algorithm.gradient_noise.clip
    if any(isinstance(x, Tracer) or np.ndim(x) for x in known):
        raise refuse("algorithm", "known numbers in its gradient_noise, one of each", algorithm)
    multiplier, clip = map(float, known)
    check_positive("noise_multiplier", multiplier)
    size: int = algorithm.batch_size  # type: ignore[assignment]  # checked by the algorithm
    shares = _checked_shares(clients, size, rounds, delta, rows_per_person)
    parts = [Part(multiplier, rounds * algorithm.local_steps, shares)]
    return Guarantee(
        "row" if rows_per_person == 1 else "person",
        "replace",
        epsilon_of_parts(parts, delta, DISTANCE),
        float(delta),
        multiplier,
        GRADIENTS,
        clip,
        "sampled Gaussian",
    )


def training_noise(
    epsilon: float,
    clients: Clients,
    *,
    rounds: int,
    local_steps: int,
    batch_size: int,
    delta: float,
    rows_per_person: int = 1,
) -> float:
    r"""The noise multiplier that gives a training the wanted \(\varepsilon\).

    Args:
        epsilon: \(\varepsilon\), positive.
        clients: as in `training_guarantee`.
        rounds: as in `training_guarantee`.
        local_steps: steps of a client in a round.
        batch_size: samples of a step.
        delta: \(\delta\), as in `training_guarantee`.
        rows_per_person: as in `training_guarantee`.

    Returns:
        z, for `jaxfed.generative.GradientNoise`; at most 0.1 % above what is needed.

    Raises:
        ValueError: as in `training_guarantee`; no noise gives an epsilon or delta of zero.
        ImportError: if dp-accounting is not installed.
    """
    check_positive("epsilon", epsilon, single=True)
    check_count("local_steps", local_steps)
    check_count("batch_size", batch_size)
    shares = _checked_shares(clients, batch_size, rounds, delta, rows_per_person)
    steps = rounds * local_steps
    package = require("dp_accounting", extra="privacy")
    one = package.get_sigma_gaussian(epsilon, delta)
    enough = one * DISTANCE * len(shares) * steps**0.5
    if shares[-1] == 1:
        return enough

    def suffices(multiplier: float) -> bool:
        return epsilon_of_parts([Part(multiplier, steps, shares)], delta, DISTANCE) <= epsilon

    return least_noise(suffices, enough)


def _checked_shares(
    clients: Clients, batch_size: int, rounds: int, delta: float, rows_per_person: int
) -> tuple[float, ...]:
    """The probabilities that a batch of the smallest client has one, two ... rows of a person.

    Raises:
        ValueError: names what is unsuitable.
    """
    check_count("rounds", rounds)
    check_probability("delta", delta)
    check_count("rows_per_person", rows_per_person)
    check_instance("clients", clients, Clients, "jaxfed.Clients with samples")
    check_complete_samples(clients, "training_guarantee")
    if any(isinstance(part.count, Tracer) for part in clients.parts):
        raise refuse("clients", "known numbers of samples", clients)
    smallest = int(np.min(clients.counts))
    if batch_size > smallest:
        raise ValueError(
            f"batch_size: wanted at most the smallest client's {smallest} samples, got {batch_size}"
        )
    rows = min(rows_per_person, smallest)
    if batch_size == smallest:
        return *([0.0] * (rows - 1)), 1.0
    numbers = np.arange(1, min(rows, batch_size) + 1)
    return tuple(hypergeom.pmf(numbers, smallest, rows, batch_size).tolist())
