"""The error to expect of shared components from released moments, before anything is spent."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from jaxfed._checks import check_count, check_positive, is_list, refuse
from jaxfed.core.clients.guarantee import Neighbours, Rows, sensitivity
from jaxfed.privacy._contributions import FEWEST
from jaxfed.privacy._gaussian import noise_of
from jaxfed.privacy.releases import check_terms

DRAWS = 4e6  # numbers drawn for the mean of what a row becomes
MOST = 10**12  # persons


def expected_error(
    persons: int,
    features: int,
    clients: int,
    *,
    shared_variances: Sequence[float],
    local_variances: Sequence[float] = (),
    noise_variance: float,
    epsilon: float | None,
    delta: float,
    rows: Rows = "pairs",
    neighbours: Neighbours = "replace",
    bound: float | None = None,
    sharers: int = 1,
) -> float:
    r"""Predict the error of shared components from moments of `release_moments`, from no data.

    Samples are normal, with these variances along each client's orthogonal components. The error is
    that of `jaxfed.pca.PerPCA` with the true ranks at its optimum, or of `Pooled` without local
    components. It includes the error of finitely many samples.

    To first order, an entry of a moment beside the diagonal has the variance
    \(v_j = s^2 / 2 + \kappa_j / N\): noise, with \(s = \sigma \Delta\), and samples, with
    \(\kappa_j\) the mean square of a row's entry and N the number of terms in a moment. With
    \(g_j\) the gap between the mean moment along a shared component and along none,

    \[ |P_{\hat U} - P_U|_F^2 / 2 \approx
    \sum_j \frac{v_j}{m g_j^2} \frac{(d - r_1)^2}{d - r_1 - r_2 m / (m - 1)}, \]

    of which no term exceeds \(1 - r_1 / d\), that of a random subspace. It is the error of a
    component that does not vary more than the noise. The last factor is the number of directions
    for errors: a client cannot see one within its local components.

    Args:
        persons: number of persons of each client.
        features: d, the number of features.
        clients: m, the number of clients.
        shared_variances: along the \(r_1\) shared components.
        local_variances: along the \(r_2\) local components of a client, which point in random
            directions.
        noise_variance: along all other directions.
        epsilon: \(\varepsilon\); None for moments without noise.
        delta: \(\delta\).
        rows: as for `release_moments`.
        neighbours: as for `release_moments`.
        bound: as for `release_moments`, on the scale of the variances.
        sharers: as for `release_moments`; above one only without local components.

    Returns:
        \(\sqrt{r_1 - |U^\top \hat U|_F^2}\), the root mean square over draws. Measured errors were
        within a factor of 1.5 of it.

    Raises:
        ValueError: if an argument is out of range, components do not fit into the features, or
            there is one client with local components.

    Source: first-order perturbation of eigenvectors (Anderson 1963, Asymptotic theory for principal
    component analysis); Benaych-Georges & Nadakuditi (2011), The eigenvalues and eigenvectors of
    finite, low rank perturbations of large random matrices, where noise is large.
    """
    check_count("persons", persons, least=FEWEST, most=MOST)
    check_count("features", features)
    check_count("clients", clients)
    shared = _variances("shared_variances", shared_variances, 1)
    local = _variances("local_variances", local_variances, 0)
    check_positive("noise_variance", noise_variance, single=True)
    check_positive("epsilon", epsilon, single=True, optional=True)
    check_terms(delta, rows, bound, neighbours)
    check_count("sharers", sharers)
    if sharers > 1 and len(local):
        wanted = "1 with local components, which sums of moments do not tell from shared ones"
        raise refuse("sharers", wanted, sharers)
    if sharers > clients:
        raise refuse("sharers", f"at most the {clients} clients", sharers)
    free = features - len(shared)
    if free <= len(local):
        raise refuse("features", f"more than {len(shared) + len(local)}, the components", features)
    if len(local) and clients == 1:
        raise refuse("clients", "at least two where there are local components", clients)
    rest = np.full(free - len(local), float(noise_variance))
    along, beside, squares = _of_rows((*shared, *local, *rest), rows, bound)
    along, squares = along[: len(shared)], squares[: len(shared)]
    size = 1.0 if bound is None else float(bound)
    deviation = 0.0
    if epsilon is not None:
        far = float(sensitivity(float(persons), rows, size, neighbours))
        deviation = noise_of(float(epsilon), float(delta)) * far
    terms = persons // 2 if rows == "pairs" else persons
    variances = squares / terms + deviation**2 / 2 / sharers
    # The share of a direction's clients that see it. With few clients, it varies by direction.
    hidden = len(local) * clients / max(clients - 1, 1) / free
    seen = free / max(1 - hidden, 1e-9)
    # Noise of more variance than a component takes its place.
    gaps = np.maximum(along - beside, 1e-150)
    angles = variances / clients * seen / gaps**2
    return float(np.sqrt(np.minimum(angles, 1 - len(shared) / features).sum()))


def persons_needed(
    error: float,
    features: int,
    clients: int,
    *,
    shared_variances: Sequence[float],
    local_variances: Sequence[float] = (),
    noise_variance: float,
    epsilon: float | None,
    delta: float,
    rows: Rows = "pairs",
    neighbours: Neighbours = "replace",
    bound: float | None = None,
    sharers: int = 1,
) -> int:
    """Compute how many persons each client needs for an error, the inverse of `expected_error`.

    Args:
        error: the largest error, as `expected_error` returns it.
        features: as for `expected_error`, like all other arguments.
        clients: number of clients.
        shared_variances: along the shared components.
        local_variances: along a client's local components.
        noise_variance: along all other directions.
        epsilon: of the release; None for moments without noise.
        delta: of the release.
        rows: what a row contributes.
        neighbours: what one person may change.
        bound: of a row's length with `"clip"`.
        sharers: number of clients that share the noise.

    Returns:
        The smallest number of persons, at least four.

    Raises:
        ValueError: as `expected_error`, or if even 10^12 persons do not suffice.
    """
    check_positive("error", error, single=True)

    def of(persons: int) -> float:
        return expected_error(
            persons,
            features,
            clients,
            shared_variances=shared_variances,
            local_variances=local_variances,
            noise_variance=noise_variance,
            epsilon=epsilon,
            delta=delta,
            rows=rows,
            neighbours=neighbours,
            bound=bound,
            sharers=sharers,
        )

    if of(FEWEST) <= error:
        return FEWEST
    low = high = FEWEST
    while of(high) > error:
        low, high = high, 2 * high
        if high > MOST:
            raise refuse("error", f"one that {MOST:g} persons reach, {of(MOST):.2g}", error)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if of(middle) <= error else (middle, high)
    return high


def _variances(name: str, given: object, least: int) -> np.ndarray:
    if not is_list(given) and not isinstance(given, np.ndarray):
        raise refuse(name, "a list of positive numbers", given)
    for number in given:
        check_positive(name, number, single=True)
    if len(given) < least:
        raise refuse(name, "a list of positive numbers, at least one", given)
    return np.asarray(given, float).reshape(-1)


@lru_cache(maxsize=8)  # for `persons_needed`
def _of_rows(
    variances: tuple[float, ...], rows: Rows, bound: float | None
) -> tuple[np.ndarray, float, np.ndarray]:
    """Moments of what a normal row becomes, estimated from draws that are always the same.

    Returns:
        Its moment along each component, its moment along no component, and the mean square of its
        product of the two.
    """
    rng = np.random.default_rng(0)
    draws = max(1000, math.ceil(DRAWS / len(variances)))
    x = rng.standard_normal((draws, len(variances))) * np.sqrt(variances)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    # Differences of normal rows have the same directions.
    x *= np.minimum(1, bound / norm) if rows == "clip" and bound is not None else 1 / norm
    x **= 2
    none = x[:, np.asarray(variances) == variances[-1]].mean(axis=1)
    return x.mean(axis=0), float(none.mean()), (x * none[:, None]).mean(axis=0)
