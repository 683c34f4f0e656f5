r"""Choose the numbers of shared and local components by tests against noise and chance.

The samples of client i are a signal of few directions plus noise. Two questions are answered one
after the other, each for all clients together:

* How many directions do the clients' signals share? Clients have different samples, so directions
  in which they agree are confirmed by samples that did not choose them. The null is the agreement
  of the same signals after each was rotated at random.
* How many more directions exceed the noise? The null of the next singular value is that of the
  same larger directions plus the same noise with random signs.

Of moments whose noise protects persons, both nulls include that noise, whose size is known.

Source: signs, Hong, Sheng & Dobriban (2020), Selecting the number of components in PCA via random
signflips; larger directions removed first, Dobriban & Owen (2019), Deterministic parallel analysis;
rotations, Feng, Jiang, Hannig & Marron (2018), Section 2.3.
"""

from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_number, checked_key
from jaxfed.contract import check_count, check_instance
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import sensitivity, terms_of
from jaxfed.core.clients.samples import check_complete_samples
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.run.runner import call_compiled
from jaxfed.linalg import Moment
from jaxfed.pca import _released_ranks
from jaxfed.pca._rank_evidence import evidence_of, last_above
from jaxfed.pca._released_ranks import Released

# A number of components is certain if the last one's score is at least that many thresholds, and
# the next one's at most a share of it.
LAST, NEXT = 1.5, 0.2


class Most(NamedTuple):
    """Numbers of components to look for."""

    shared: int
    local: int

    @property
    def eigenvectors(self) -> int:
        """Of a client's second moment."""
        return self.shared + self.local


class SuggestedRanks(NamedTuple):
    """Numbers of shared and local components, how sure they are, and the numbers behind them.

    A score is the distance from the null without this component, in standard deviations of the
    null. Scores above `threshold` are significant. Plot them against the number of the component,
    with the threshold as a line.

    Attributes:
        shared: number of shared components found.
        local: number of local components found in clients together.
        suggested: `(shared, local)`, or None if it is too weak to tell or there may be more.
        support: share of random subsets of three quarters of the clients with the same numbers.
        shared_interval: smallest and largest number of shared components in the subsets, without
            2.5 % at each end.
        local_interval: the same for local components.
        agreement: how much of clients' signals lies in the shared directions, from 0 to 1.
        chance: the mean agreement of signals rotated at random.
        shared_scores: score of each shared component.
        local_scores: score of each local component in all clients together.
        client_scores: score of each local component in each client.
        threshold: least score of a significant component.
        noise_variance: variance of each client's noise in one feature; of released moments, as a
            share of all variance.
    """

    shared: int
    local: int
    suggested: tuple[int, int] | None
    support: float
    shared_interval: tuple[int, int]
    local_interval: tuple[int, int]
    agreement: Float[np.ndarray, " most_shared"]
    chance: Float[np.ndarray, " most_shared"]
    shared_scores: Float[np.ndarray, " most_shared"]
    local_scores: Float[np.ndarray, " most_local"]
    client_scores: Float[np.ndarray, "clients most_local"]
    threshold: float
    noise_variance: Float[np.ndarray, " clients"]

    @property
    def client_local(self) -> Int[np.ndarray, " clients"]:
        """Number of local components, from the first on, that each client's samples show alone."""
        return np.cumprod(self.client_scores > self.threshold, axis=1).sum(axis=1)

    def __str__(self) -> str:
        lines = ["component  agreement  by chance  shared score  local score"]
        for i in range(max(len(self.shared_scores), len(self.local_scores))):
            cells = [" " * 9, " " * 9, " " * 12, " " * 11]
            if i < len(self.shared_scores):
                mark = "*" if i < self.shared else " "
                cells[0] = f"{self.agreement[i]:9.3f}"
                cells[1] = f"{self.chance[i]:9.3f}"
                cells[2] = f"{self.shared_scores[i]:11.1f}{mark}"
            if i < len(self.local_scores):
                cells[3] = f"{self.local_scores[i]:10.1f}{'*' if i < self.local else ' '}"
            lines.append("  ".join([f"{i + 1:9d}", *cells]).rstrip())
        found = f"{self.shared} shared and {self.local} local components"
        subsets = f"the same in {self.support:.0%} of the subsets of clients"
        end = ""
        if self.shared == len(self.shared_scores) or self.local == len(self.local_scores):
            end = "; there may be more"
        elif self.suggested is None:
            end = "; too weak to tell"
        lines.append(f"{found} score above {self.threshold:.1f} (*), {subsets}{end}")
        return "\n".join(lines)


def suggest_ranks(
    clients: Clients,
    *,
    key: Key[Array, ""],
    most_shared: int = 8,
    most_local: int = 8,
    draws: int = 32,
    subsets: int = 100,
    confidence: float = 0.99,
) -> SuggestedRanks:
    r"""Choose the numbers of shared and local components, or say that it is too weak to tell.

    1. *Noise.* Each client's singular values are compared with noise, without shared components,
       which gives the variance \(\sigma_i^2\) of its noise.
    2. *Shared components.* A direction of a client counts by its variance, up to the largest that
       noise would have, \(\sigma_i^2 (1 + \sqrt{d/n_i})^2\), and divided by it. So no client and
       no strong local component outweighs the others. The agreement of a direction is the mean of
       these weights over clients. A shared component agrees more than the same signals rotated at
       random, outside the shared components before it, and most clients have it.
    3. *Local components.* The shared directions are removed. In each client, the share of the next
       singular value in what remains is compared with its share in the null. The scores of all
       clients are added, each up to 4, so local components are those that many clients have.

    The number is that of the last significant component. A pair is suggested if both numbers are
    positive and certain: the last component's score is at least 1.5 thresholds, and the next one's
    is at most a fifth of it. Near the noise, scores of equally strong
    components fall gradually instead, and it is too weak to tell. If a number is the largest that
    was looked for, there may be more.

    Where it fails:

    * Local directions are assumed to be unrelated between clients. A direction that at most half of
      the clients have counts as local, and one that more of them have as shared.
    * A shared component that is much weaker than local ones, or ranks near the number of features,
      may not be distinguishable from chance, which looks as if there were fewer.
    * A weak component beside strong ones is not found: a pair is what the samples show.
    * With little noise, every significant component counts, however little it explains.
    * Noise must be independent between entries and symmetric; it may have heavy tails and differ
      between samples and between features. Means are not removed, so subtract each client's mean
      first, or the mean counts as a component.
    * Local components are looked for up to two thirds of the samples, or of the features that are
      not shared.
    * Two clients, or five samples of each, show only strong components: a score is at most
      \(4 \sqrt m\). With two clients, the subsets are all clients, so the support says nothing.

    Clients may have moments of `jaxfed.privacy.release_moments`, of pairs or directions. The test
    is computed from them and costs no more privacy. A direction of a client then counts by its
    eigenvalue above the median, up to the largest that noise would have. An eigenvalue in the third
    step is compared with those of directions drawn from elliptical samples, with the larger
    variances found so far and equal ones besides, to which the noise of the release is added. In
    addition, it fails where noise differs between features: a feature with more noise in all
    clients looks as a shared component.

    Everything is one compiled program. Every client counts the same, whatever its weight.

    Args:
        clients: two or more clients with samples, or with moments of `release_moments`.
        key: random key.
        most_shared: largest number of shared components to look for.
        most_local: largest number of local components to look for.
        draws: number of draws of each null.
        subsets: number of subsets of clients for the support.
        confidence: probability of no false component, if scores are normal.

    Raises:
        ValueError: if clients have neither samples nor such moments, there is only one, or a number
            is out of range.

    Example:
        >>> import jax, jaxfed as jf
        >>> data = jf.data.perpca_synthetic(
        ...     key=jax.random.key(0), clients=10, features=12, shared_rank=2, local_rank=2,
        ...     samples=100, shared_scale=2.0, local_scale=2.0, noise_variance=0.5,
        ...     local="random",
        ... )
        >>> found = jf.pca.suggest_ranks(
        ...     jf.Clients.from_samples(data.samples), key=jax.random.key(1),
        ...     most_shared=4, most_local=4,
        ... )
        >>> found.suggested
        (2, 2)
    """
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    moments = any(isinstance(part, Moment) for part in clients.parts)
    released = _released(clients) if moments else None
    if released is None:
        check_complete_samples(clients, "suggest_ranks")
    for name, count, least in (
        ("most_shared", most_shared, 1),
        ("most_local", most_local, 1),
        ("draws", draws, 8),
        ("subsets", subsets, 1),
    ):
        check_count(name, count, least=least)
    check_number("confidence", confidence, "a number from 0 to below 1", lambda x: 0 <= x < 1)
    key = checked_key("key", key)
    data: Any = clients.unbucketed().data
    present = np.flatnonzero(np.asarray(data.count) > 0)
    if len(present) < 2:
        raise ValueError(f"clients: wanted at least two with samples, got {len(present)}")

    width = clients.features if released is not None else min(data.values.shape[1:])
    most = Most(min(most_shared, width), min(most_local, width))
    # Bonferroni's correction for all components that are looked for.
    threshold = NormalDist().inv_cdf(1 - (1 - confidence) / sum(most))
    numbers = {"threshold": threshold, "draws": draws, "subsets": subsets}
    evidence = _evidence(most, clients, key=key, present=present, **numbers)
    agreement, scores = evidence.agreement, evidence.local_scores

    shared, local = (int(last_above(each, threshold)) for each in (agreement.scores, scores))
    certain = _certain(agreement.scores, shared, threshold) and _certain(scores, local, threshold)
    in_subsets = [
        last_above(each, threshold)
        for each in (agreement.subset_scores, evidence.subset_local_scores)
    ]
    return SuggestedRanks(
        shared=shared,
        local=local,
        suggested=(shared, local) if certain else None,
        support=float(np.mean((in_subsets[0] == shared) & (in_subsets[1] == local))),
        shared_interval=_interval(in_subsets[0]),
        local_interval=_interval(in_subsets[1]),
        agreement=agreement.values,
        chance=agreement.chance,
        shared_scores=agreement.scores,
        local_scores=scores,
        client_scores=evidence.noise.scores,
        threshold=threshold,
        noise_variance=evidence.noise_variance,
    )


@in_enough_precision
def _evidence(
    most: Most,
    clients: Clients,
    *,
    key: Key[Array, ""],
    present: Int[np.ndarray, " present"],
    threshold: float,
    draws: int,
    subsets: int,
) -> Any:
    """Return the scores of shared and local components, on the host."""
    dense = any(isinstance(part, Moment) for part in clients.parts)
    scored = _released_ranks.evidence_of if dense else evidence_of
    data = _released(clients) if dense else clients.unbucketed().data
    data = jax.tree.map(lambda x: x[present], data)
    arguments = data, key, threshold, tuple(most), draws, subsets
    return jax.device_get(call_compiled(scored, *arguments, static_argnums=(3, 4, 5)))


def _released(clients: Clients) -> Released:
    """Return released moments with what is known of their noise.

    Raises:
        ValueError: if moments were not released, or not of directions.
    """
    guarantee = clients.guarantee
    if guarantee is None:
        raise ValueError(
            "clients: wanted samples, as of Clients.from_samples, or moments of release_moments, "
            "whose noise is known, got other moments; give it the samples behind them"
        )
    if guarantee.rows == "clip":
        wanted = "moments of pairs or directions, as of release_moments"
        raise ValueError(f"clients: wanted {wanted}, got those of clipped rows")
    if guarantee.sharers > 1:
        wanted = "moments with noise of their own"
        raise ValueError(f"clients: wanted {wanted}, got ones whose noise clients share")
    data: Moment = clients.unbucketed().data
    assert data.dense is not None and guarantee.rows not in ("ranges", "gradients")
    far = sensitivity(data.count, guarantee.rows, 1.0, guarantee.neighbours)
    deviations = guarantee.noise_multiplier * far
    return Released(data.dense, terms_of(data.count, guarantee.rows), deviations)


def _certain(scores: Float[np.ndarray, " ranks"], rank: int, threshold: float) -> bool:
    """Whether the last component stands out, and the next one does not."""
    if rank == 0 or rank == len(scores):
        return False
    last, after = scores[rank - 1], scores[rank:].max()
    return bool(last >= LAST * threshold and after <= NEXT * last)


def _interval(ranks: Int[np.ndarray, " subsets"]) -> tuple[int, int]:
    low, high = np.quantile(ranks, [0.025, 0.975], method="inverted_cdf")
    return int(low), int(high)
