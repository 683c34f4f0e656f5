"""Choose between algorithms by whether two halves of the samples give the same shared components.

The objective cannot tell: if the shared variance is small, its optimum on few noisy samples may be
far from the truth, and even held-out reconstruction may improve on the way there. Components that
fit noise differ between the halves; true ones do not.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Key

from jaxfed._checks import check_list, check_options, checked_key
from jaxfed.contract import Algorithm, check_count, check_instance
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.run.fit import fit
from jaxfed.metrics import projector_distance
from jaxfed.pca.components import check_data


def split_half(
    algorithms: Sequence[Algorithm],
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    **arguments: Any,
) -> tuple[int, np.ndarray]:
    """Fit each algorithm to the even and to the odd rows of every client, and compare.

    Args:
        algorithms: candidates, e.g. `PerPCA` with and without shrinkage.
        clients: clients with at least two samples each.
        rounds: rounds of each fit.
        key: random key.
        **arguments: passed to `fit`.

    Returns:
        `(best, disagreement)`: the index of the candidate whose halves agree best, and each
        candidate's `‖P_a - P_b‖²_F` of the shared components, between 0 and twice the shared rank.
        Above about 1, the shared components are noise.

    Raises:
        ValueError: if there are no candidates, the data are not samples (moments cannot be split),
            or a client has fewer than two samples.
    """
    check_options(arguments, fit, without=("algorithm", "clients", "rounds", "key"))
    check_list("algorithms", algorithms, "candidates")
    for algorithm in algorithms:
        check_instance("algorithms", algorithm, Algorithm, "a list of algorithms")
    check_count("rounds", rounds)
    key = checked_key("key", key)
    check_data(clients)
    if not isinstance(clients.parts[0], Samples):
        raise ValueError("clients: split_half needs samples, second moments cannot be split")
    clients.layout.check_in_memory("split_half")
    counts = clients.counts
    if int(counts.min()) < 2:
        raise ValueError(
            f"clients: each needs at least two samples, client {int(counts.argmin())} has one"
        )

    def half(first: int, part: Samples) -> Samples:
        # Padding rows stay last in both halves. Of an odd number of samples, the even rows are one
        # more.
        return Samples(part.values[:, first::2], (part.count + 1 - first) // 2)

    halves = [
        eqx.tree_at(lambda c: c.data, clients, clients.layout.over_parts(partial(half, first)))
        for first in (0, 1)
    ]
    disagreement = np.asarray(
        [
            projector_distance(
                *[
                    fit(algorithm, half, rounds=rounds, key=key, **arguments).result.shared
                    for half in halves
                ]
            )
            for algorithm in algorithms
        ]
    )
    return int(np.argmin(np.where(np.isnan(disagreement), np.inf, disagreement))), disagreement
