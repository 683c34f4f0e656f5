"""`jaxfed fit ... --shared-rank 0.4`: numbers of components by the variance they explain."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax

from jaxfed import pca
from jaxfed._checks import is_whole
from jaxfed.cli._options import flag_of
from jaxfed.core.clients.clients import Clients
from jaxfed.pca.variance_ranks import check_rank, rank_below_all, shared_and_local_ranks

Ranks = Mapping[str, int]
Rule = Callable[[Clients, Mapping[str, float]], Ranks]


def shared_and_local(clients: Clients, given: Mapping[str, float]) -> Ranks:
    """Of all variance, that in shared components, and that in shared and local ones together."""
    return dict(zip(given, shared_and_local_ranks(clients, *given.values()), strict=True))


def under_a_prior(clients: Clients, given: Mapping[str, float]) -> Ranks:
    """Of each client's variance, that in as many principal components of its own, not all."""
    return {name: rank_below_all(name, clients, share) for name, share in given.items()}


def of_each(clients: Clients, given: Mapping[str, float]) -> Ranks:
    """Of each client's variance, that in as many principal components of its own."""
    return {x: pca.ranks_for_variance(clients, 0, share).local for x, share in given.items()}


def of_all(clients: Clients, given: Mapping[str, float]) -> Ranks:
    """Of all variance, that in as many principal components of all samples."""
    return {x: pca.ranks_for_variance(clients, share, None).shared for x, share in given.items()}


ABOUT = {
    "shared_rank": "or a share in (0, 1) of the variance of all training samples as they are "
    "fitted, which the fewest that explain it are to explain",
    "local_rank": "or the share that shared and local components are to explain together",
    "rank": "or a share in (0, 1) of the variance of the training samples as they are fitted, "
    "which the fewest that explain it are to explain",
}


def given_in(arguments: SimpleNamespace, rule: Rule | None) -> dict[str, float]:
    """The numbers of components, if some of them are shares; otherwise nothing.

    Raises:
        ValueError: if one is neither a number nor a share, or other options exclude shares.
    """
    if rule is None:
        return {}
    given = {name: getattr(arguments, name) for name in ABOUT if hasattr(arguments, name)}
    if all(map(is_whole, given.values())):
        return {}
    for name, value in given.items():
        check_rank(name, value, private=getattr(arguments, "epsilon", None) is not None)
        if not is_whole(value) and jax.process_count() > 1:
            raise ValueError(
                f"{flag_of(name)}: wanted a whole number with --processes, none of which has all "
                f"clients' samples, got {value}"
            )
    return given


def in_words(found: Ranks) -> dict[str, int]:
    """The numbers, in words."""
    kinds = (name.removesuffix("rank").replace("_", " ") for name in found)
    return dict(zip((f"{kind}components" for kind in kinds), found.values(), strict=True))
