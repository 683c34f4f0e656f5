"""Releases of second moments with noise that protects each person."""

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, UInt32

from jaxfed._checks import (
    check_flag,
    refuse,
)
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import (
    Neighbours,
    Rows,
    people_in,
    sensitivity,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment
from jaxfed.linalg.precision import precise
from jaxfed.privacy._contributions import FEWEST, released
from jaxfed.privacy._exact import with_exact_noise
from jaxfed.privacy.ledger import Ledger
from jaxfed.privacy.releases import MARGIN, checked_release, guarantee_of


def release_moments(
    clients: Clients,
    *,
    epsilon: float,
    delta: float,
    rows: Rows = "pairs",
    bound: float | None = None,
    neighbours: Neighbours = "replace",
    person: Sequence[ArrayLike | Sequence[object]] | None = None,
    semidefinite: bool = False,
    sharers: int = 1,
    noise: Literal["jax", "opendp"] = "jax",
    ledger: Ledger | None = None,
    key: Key[Array, ""] | UInt32[Array, " 2"] | None = None,
) -> Clients:
    r"""Release each client's second moment once, with noise that protects each of its persons.

    The noise is added at the client, so that neither the server nor other clients need be trusted.
    Whatever is computed from the released moments, by any algorithm in any number of rounds, costs
    no more privacy. Local components are best computed at home from the raw samples, which then
    never leave: `jaxfed.pca.fit_local(solution, clients)`.

    A moment is a mean over P persons of what their rows become, or over the floor of P/2 disjoint
    pairs of persons:

    * `"pairs"`: \((x - y) / |x - y|\) of a row x and a row y of the other person. It needs neither
      a centre nor a bound, and ignores outliers.
    * `"directions"`: \(x / |x|\). Samples must be centred by a centre that is public.
    * `"clip"`: \(x \min(1, C / |x|)\), centred in the same way, with a public bound C.

    Of elliptical data, all three have the eigenvectors of the covariance, in the same order.

    One person changes one term, by a positive semi-definite matrix of trace at most \(C^2\), in
    place of another: the moment moves by at most \(\Delta = \sqrt2 C^2 / P\) (add or remove:
    \(C^2 / P\)); with pairs, C = 1, and the floor of P/2 is in place of P. An odd person is left
    out. All permutations give the same bound, so that privacy does not rest on how persons are
    paired.
    The noise is Gaussian with the standard deviation \(\sigma \Delta\) on the diagonal and
    \(\sigma \Delta / \sqrt2\) beside it, with \(\sigma\) of the analytic Gaussian mechanism.

    With noise, a moment may have negative eigenvalues and even a negative trace. Left as it is, it
    is unbiased, and `PerPCA`, `OneShot`, `Pooled` and `Local` find the best components, which do
    not depend on the signs. Likelihoods and step sizes do: set `semidefinite` for
    `PerPCA(solver="gradient")`, `HierarchicalPCA`, `EmpiricalBayesPCA`, `FAPS`, and where the other
    consensus algorithms do not converge.

    Where the sum of all moments is enough, as for `Pooled`, clients can share the noise: with
    `sharers`, k, each adds only \(1 / \sqrt k\) of it, and the sum over k clients has what one
    client's release would have. Single moments are then protected by masks alone. So runs are
    refused on such clients unless they send sums of moments and nothing else, as `Pooled` does,
    through `jaxfed.channel.secure_sum`. In a pooled moment, all persons count equally.

    Args:
        clients: clients with samples, divided by public scales if features have different units.
        epsilon: \(\varepsilon\), for each client's release. A person with rows at several clients
            is protected less.
        delta: \(\delta\), below one over a client's number of persons.
        rows: what a row contributes.
        bound: C, for `"clip"`.
        neighbours: `"replace"`: one person's data may be any other. `"add_remove"`: they may be
            missing; the number of persons is public all the same.
        person: for each client, whose row each row is, by numbers or names. A person's rows count
            as much together as another's single row. By default each row is another person's.
        semidefinite: whether each moment is projected onto positive semi-definite matrices, after
            the noise, which costs no privacy; not with `sharers`, since sums of such moments are
            no longer those of the noisy ones.
        sharers: k, the fewest clients whose moments are added up, and that add their noise and keep
            it secret. By default each client's noise protects its own release.
        noise: `"jax"` draws noise from JAX's generator, in floating-point numbers: for simulations,
            and fast. `"opendp"` samples it exactly, on a grid, from the system's cryptographic
            generator, by OpenDP (`pip install 'jaxfed[privacy]'`): for real data. It takes some 10
            microseconds an entry, no key, and no `jit`.
        ledger: the budget that pays for the release, before anything is computed; not within `jit`
            and `vmap`.
        key: random key, which must stay secret and be new for each release; a client's noise folds
            in its id. None takes one from the system's randomness, which nobody can draw again; not
            within `jit` and `vmap`.

    Returns:
        Clients with moments, as of `Clients.from_moments`, with their numbers of persons as counts
        and their earlier weights, both of which are public. `released.guarantee` says what they
        guarantee, and `statement` says it in words.

    Raises:
        ValueError: if an argument is unsuitable; clients have fewer than four persons, or rows that
            are all equal (all zero without pairs); weights depend on numbers of rows that `person`
            protects; or the budget does not suffice. This is said before anything is spent.

    Source: Balle & Wang (2018), Improving the Gaussian mechanism for differential privacy,
    Algorithm 1, for the noise; Kim & Jung (2025), arXiv 2507.15232, for directions and pairs;
    Visuri, Koivunen & Oja (2000), Sign and rank covariance matrices.
    """
    several = person is not None
    guarantee = guarantee_of(epsilon, delta, rows, bound, neighbours, sharers, several=several)
    check_flag("semidefinite", semidefinite)
    if semidefinite and sharers > 1:
        raise refuse("semidefinite", "False with sharers", semidefinite)
    release = checked_release("release_moments", guarantee, clients, person, noise, ledger, key)
    guarantee, whole, codes, people, key, exact, _ = release
    data: Samples = whole.data
    _check_data(data, people, rows)
    dtype = data.count.dtype
    if bound is not None:
        _check_bound(bound, dtype)
    release.pay()
    far = sensitivity(people, rows, 1.0 if bound is None else float(bound), neighbours)
    # With the guarantee, so that one key gives releases of other kinds other noise.
    key = jax.random.fold_in(key, zlib.crc32(repr(guarantee).encode()))
    keys = jax.vmap(lambda own: jax.random.fold_in(key, own))(whole.ids)
    share = guarantee.noise_multiplier / sharers**0.5
    deviations = (MARGIN * share * far).astype(dtype)
    with jax.enable_x64(True) if exact else nullcontext():
        # In double precision, where one person moves a moment no further by rounding.
        known = np.float64 if exact else dtype
        matrices = released(
            rows,
            1.0 if bound is None else float(bound),
            jnp.zeros_like(deviations, known) if exact else deviations,
            data.values.astype(known),
            codes,
            people.astype(known),
            keys,
        )
    if exact:
        sizes = np.asarray(deviations, float)
        drawn = [
            with_exact_noise(matrix, size, guarantee.noise_multiplier)
            for matrix, size in zip(np.asarray(matrices), sizes.tolist(), strict=True)
        ]
        matrices = jnp.asarray(np.stack(drawn), dtype)
    if semidefinite:
        matrices = _projected(matrices)
    if sharers > 1:  # else a person in one pair of few would move the sum further than others
        people = people_in(people, rows)
    moments = jax.vmap(Moment.from_dense)(matrices, people)
    return Clients(moments, whole.ids, whole.weights, guarantee=guarantee, names=whole.names)


@jax.jit
@precise()
def _projected(
    matrices: Float[Array, "clients features features"],
) -> Float[Array, "clients features features"]:
    values, vectors = jnp.linalg.eigh(matrices)
    roots = vectors * jnp.sqrt(jnp.maximum(values, 0))[:, None]
    return roots @ roots.mT


def _check_bound(bound: float, dtype: Any) -> None:
    """Refuse a bound whose square, divided by many persons, the precision cannot hold."""
    limits = jnp.finfo(dtype)
    least, most = 1e6 * float(limits.tiny) ** 0.5, 1e-6 * float(limits.max) ** 0.5
    if not least <= bound <= most:
        wanted = f"a number from {least:.0e} to {most:.0e} in {np.dtype(dtype).name}"
        raise refuse("bound", f"{wanted}; divide rows and bound by a public unit", bound)


def _check_data(data: Samples, people: Array, rows: Rows) -> None:
    """Refuse clients of too few persons, or whose rows have no directions."""
    if any(map(is_traced, (data.values, data.count, people))):
        return
    values = np.asarray(data.values.astype(data.count.dtype))
    for i, (number, count) in enumerate(
        zip(np.asarray(people), np.asarray(data.count), strict=True)
    ):
        if number < FEWEST:
            raise ValueError(
                f"clients: wanted at least {FEWEST} persons each, got {int(number)} at position {i}"
            )
        own = values[i, : int(count)]
        if rows == "pairs" and (own == own[0]).all():
            raise ValueError(
                f"clients: wanted rows that differ, got {int(count)} equal ones at position {i}"
            )
        if rows != "pairs" and not own.any():
            raise ValueError(f"clients: wanted rows that are not all zero, got those of {i}")
