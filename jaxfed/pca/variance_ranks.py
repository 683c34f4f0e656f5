"""Choose the numbers of shared and local components by the variance that they explain."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfed._checks import check_number, check_whole, is_whole, refuse
from jaxfed.contract import check_count, check_instance
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples, other_data
from jaxfed.core.common.printing import is_known
from jaxfed.linalg import Moment

Spectrum = Float[np.ndarray, " features"]
Basis = Float[np.ndarray, "features shared"]


class VarianceRanks(NamedTuple):
    """Numbers of shared and local components, and the shares of the variance that they explain."""

    shared: int
    local: int
    shared_share: float  # of the shared components alone
    share: float  # of shared and local components together


class _Table(NamedTuple):
    """One client's rows, or the second moment of rows, in double precision."""

    values: Float[np.ndarray, "n_or_features features"]
    samples: float
    dense: bool

    def moment(self) -> Float[np.ndarray, "features features"]:
        """The sum of products of the rows."""
        return self.samples * self.values if self.dense else self.values.T @ self.values

    def spectrum(self, without: Basis) -> Spectrum:
        """Eigenvalues of the sum of products without a subspace, descending, padded with zeros."""
        rows = self.values - (self.values @ without) @ without.T
        if self.dense:
            rows = rows - without @ (without.T @ rows)
            found = self.samples * np.linalg.eigvalsh(rows)[::-1]
        else:
            found = np.linalg.svd(rows, compute_uv=False) ** 2
        return np.pad(np.maximum(found, 0), (0, rows.shape[1] - len(found)))


def ranks_for_variance(
    clients: Clients, shared: float = 0.5, total: float | None = 0.9
) -> VarianceRanks:
    """Choose the fewest components that explain a share of the clients' variance.

    The shared components are the principal components of all samples together. The local ones are,
    in each client, those of its samples without the shared part. Every sample counts the same. With
    these numbers, `PerPCA` explains at least as much if clients have equally many samples, because
    it chooses shared and local components together. Its shared ones alone may explain less, because
    what few clients have becomes local.

    A share says how much is explained, and not how much of it is signal: noise adds components.
    `suggest_ranks` tests components against noise and chance. Means are not removed, so subtract
    each client's mean first, or the mean counts as a component.

    This is computed in double precision on the host, from eigenvalues of the samples or moments of
    all clients in one place. It is not a federated algorithm.

    Args:
        clients: with samples or second moments.
        shared: the share in (0, 1) of all variance that shared components explain, or their number,
            which may be 0.
        total: the share in (0, 1) that shared and local components explain together, or the number
            of local components; None for no local components.

    Returns:
        The numbers of components. `local` is 0 if the shared ones explain enough.

    Raises:
        ValueError: if a share or number is out of range, clients have other data than samples and
            second moments, or all of these are zero.

    Example:
        >>> import jax, jaxfed as jf
        >>> data = jf.data.perpca_synthetic(
        ...     key=jax.random.key(0), clients=10, features=12, shared_rank=2, local_rank=2,
        ...     samples=100, shared_scale=2.0, local_scale=2.0, noise_variance=0.01,
        ...     local="random",
        ... )
        >>> found = jf.pca.ranks_for_variance(jf.Clients.from_samples(data.samples), 2, 0.95)
        >>> found.local
        2
    """
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    clients.layout.check_in_memory("ranks_for_variance")
    for name, given in (("shared", shared), ("total", total)):
        if is_whole(given):
            check_count(name, given, least=0, most=clients.features)
        elif given is not None or name == "shared":
            wanted = "a number of components or a share in (0, 1)"
            check_number(name, given, wanted, lambda x: 0 < x < 1)
    shares = not is_whole(shared) and not is_whole(total)
    if shares and total is not None and total < shared:
        raise refuse("total", f"at least the share of the shared components, {shared:g}", total)
    tables = _tables(clients)
    energy = sum(np.trace(x.values) * x.samples if x.dense else np.sum(x.values**2) for x in tables)
    if not energy > 0:
        raise ValueError("clients: wanted samples with a positive variance, got zeros alone")
    values, vectors = _together(tables)
    rank = int(shared) if is_whole(shared) else _fewest(values, 0, shared * energy)
    along = float(values[:rank].sum())
    local, inside = 0, along
    if total is not None:
        basis = vectors[:, :rank]
        left = np.sum([table.spectrum(basis) for table in tables], axis=0)
        local = int(total) if is_whole(total) else _fewest(left, along, total * energy)
        inside += float(left[:local].sum())
    return VarianceRanks(rank, local, along / energy, inside / energy)


def check_rank(argument: str, given: object, *, private: bool) -> None:
    """Refuse what is neither a number of components nor a share of the variance.

    Args:
        argument: its name.
        given: the number, at least 1, or the share.
        private: whether noise protects persons, which covers no shares.

    Raises:
        ValueError: names the argument.
    """
    if is_whole(given):
        check_whole(argument, given)
    elif not isinstance(given, float | np.floating):
        raise refuse(argument, "a whole number of components, or a share in (0, 1)", given)
    elif private:
        raise refuse(argument, "a whole number with epsilon, which covers no shares", given)
    else:
        wanted = "a number of components, or a share of the variance in (0, 1)"
        check_number(argument, given, wanted, lambda x: 0 < x < 1)


def shared_and_local_ranks(clients: Clients, shared: float, local: float) -> list[int]:
    """The numbers of shared and of local components, of which there is at least one.

    Args:
        clients: with samples or second moments.
        shared: `shared_rank`, a number or a share.
        local: `local_rank`, a number, or the share that both explain together.

    Raises:
        ValueError: if the shared ones explain a larger share, or take all features.
    """
    if not is_whole(shared) and not is_whole(local) and local < shared:
        raise refuse("local_rank", f"at least the share of shared_rank, {shared}", local)
    found = ranks_for_variance(clients, shared, local)
    if found.shared >= clients.features:
        wanted = f"a smaller share, which leaves some of {clients.features} components local"
        raise refuse("shared_rank", wanted, shared)
    return [found.shared, min(max(found.local, 1), clients.features - found.shared)]


def rank_below_all(argument: str, clients: Clients, given: float) -> int:
    """The number of each client's components, less than that of features.

    Args:
        argument: its name.
        clients: with samples or second moments.
        given: a share.

    Raises:
        ValueError: if the share takes all components.
    """
    found = ranks_for_variance(clients, 0, given)
    if found.local >= clients.features:
        wanted = f"a smaller share, which takes fewer than all {clients.features} components"
        raise refuse(argument, wanted, given)
    return found.local


def _tables(clients: Clients) -> Sequence[_Table]:
    """The clients' data, of size about one."""
    found = []
    for part in clients.parts:
        if not isinstance(part, Samples | Moment):
            raise other_data("samples or second moments", part)
        dense = isinstance(part, Moment)
        data = part.dense if dense else part.values
        if not is_known(data) or not is_known(part.count):
            raise ValueError("clients: wanted arrays, got tracers; call this outside of jax.jit")
        counts = np.asarray(part.count, float)
        for values, count in zip(np.asarray(data, float), counts, strict=True):
            found.append(_Table(values if dense else values[: int(count)], float(count), dense))
    size = max((np.max(np.abs(x.values), initial=0) for x in found), default=0)
    return [x._replace(values=x.values / size) for x in found] if size > 0 else found


def _together(
    tables: Sequence[_Table],
) -> tuple[Float[np.ndarray, " found"], Float[np.ndarray, "features found"]]:
    """Eigenvalues and -vectors of the sum of all products, descending; some zeros are left out."""
    rows = sum(0 if x.dense else len(x.values) for x in tables)
    if any(x.dense for x in tables) or rows >= tables[0].values.shape[1]:
        values, vectors = np.linalg.eigh(np.sum([x.moment() for x in tables], axis=0))
        return np.maximum(values[::-1], 0), vectors[:, ::-1]
    _, singular, right = np.linalg.svd(
        np.concatenate([x.values for x in tables]), full_matrices=False
    )
    return singular**2, right.T


def _fewest(values: Float[np.ndarray, " found"], start: float, wanted: float) -> int:
    """How many leading values make a sum large enough; rounding alone adds none."""
    sums = start + np.concatenate([[0.0], np.cumsum(values)])
    enough = sums >= wanted * (1 - np.finfo(float).eps * len(values))
    return int(np.argmax(enough)) if enough.any() else len(values)
