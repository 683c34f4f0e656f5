"""Releases of second moments with noise that protects each person."""

import os
import warnings
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
    check_instance,
    check_name,
    check_number,
    check_positive,
    checked_key,
    checked_labels,
    is_list,
    refuse,
)
from jaxfed._names import caller
from jaxfed._optional import require
from jaxfed.core.clients.checks import is_traced
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import (
    DISCRETE,
    NEIGHBOURS,
    ROWS,
    Guarantee,
    Neighbours,
    Rows,
    sensitivity,
)
from jaxfed.core.clients.samples import Samples, check_complete_samples
from jaxfed.core.common.processes import is_tracing
from jaxfed.linalg import Moment
from jaxfed.linalg.precision import precise
from jaxfed.privacy._contributions import FEWEST, released
from jaxfed.privacy._exact import with_exact_noise
from jaxfed.privacy._gaussian import noise_of
from jaxfed.privacy.ledger import Ledger

# So that rounding in single precision, of noise and of lengths, leaves no less noise than asked.
MARGIN = 1 + 1e-6


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
            the noise, which costs no privacy.
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
    check_name("noise", noise, ("jax", "opendp"))
    exact = noise == "opendp"
    guarantee = guarantee_of(epsilon, delta, rows, bound, neighbours, several=person is not None)
    if exact:
        guarantee = guarantee._replace(mechanism=DISCRETE)
        require("opendp", extra="privacy")
    check_instance("clients", clients, Clients, "jaxfed.Clients with samples")
    check_flag("semidefinite", semidefinite)
    check_complete_samples(clients, "release_moments")
    if ledger is not None:
        check_instance("ledger", ledger, Ledger, "a jaxfed.privacy.Ledger")
    # There, one line would be written, or one key be drawn, for many releases.
    again = is_tracing((clients, key))
    if again and ledger is not None:
        raise refuse("ledger", "None within jit and vmap, which may release again", ledger)
    if exact and (again or key is not None):
        raise refuse("key", "None with noise='opendp', and no jit or vmap", key)
    if again and key is None:
        raise refuse("key", "a random key within jit and vmap, which may release again", key)
    key = _secret_key() if key is None else checked_key("key", key)
    if clients.guarantee is not None:
        raise refuse("clients", "samples that are not released yet", clients)
    whole = clients.unbucketed()
    data: Samples = whole.data
    codes, people = persons_of(whole, person)
    _check_data(data, people, rows)
    _check_delta(delta, people)
    if person is not None:
        _check_weights(whole)
    dtype = data.count.dtype
    if bound is not None:
        _check_bound(bound, dtype)
    if ledger is not None:
        ledger.spend(guarantee, whole)
    far = sensitivity(people, rows, 1.0 if bound is None else float(bound), neighbours)
    # With the guarantee, so that one key gives releases of other kinds other noise.
    key = jax.random.fold_in(key, zlib.crc32(repr(guarantee).encode()))
    keys = jax.vmap(lambda own: jax.random.fold_in(key, own))(whole.ids)
    deviations = (MARGIN * guarantee.noise_multiplier * far).astype(dtype)
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


def _secret_key() -> Key[Array, ""]:
    words = jnp.asarray(np.frombuffer(os.urandom(8), np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def guarantee_of(
    epsilon: float,
    delta: float,
    rows: Rows = "pairs",
    bound: float | None = None,
    neighbours: Neighbours = "replace",
    *,
    several: bool,
) -> Guarantee:
    """The guarantee of a release with these arguments, and `several` rows of a person.

    Raises:
        ValueError: if an argument is unsuitable.
    """
    check_positive("epsilon", epsilon, single=True)
    check_number("delta", delta, "a number between 0 and 1", lambda x: (x > 0) & (x < 1))
    check_name("rows", rows, ROWS)
    check_name("neighbours", neighbours, NEIGHBOURS)
    if rows == "clip":
        check_positive("bound", bound, single=True)
    elif bound is not None:
        raise refuse("bound", f"None with rows={rows!r}, whose rows have length one", bound)
    for name, given in (("epsilon", epsilon), ("delta", delta), ("bound", bound)):
        if is_traced(given):
            raise refuse(name, "a known number, since the noise is computed from it", given)
    return Guarantee(
        "person" if several else "row",
        neighbours,
        float(epsilon),
        float(delta),
        noise_of(float(epsilon), float(delta)),
        rows,
        None if bound is None else float(bound),
    )


def persons_of(clients: Clients, person: object) -> tuple[Array, Array]:
    """Whose row each is, as numbers from 0 on, and each client's number of persons.

    Raises:
        ValueError: if there is not one label for each row.
    """
    data: Samples = clients.data
    rows = data.values.shape[1]
    if person is None:
        numbers = jnp.arange(rows)
        return jnp.where(data.mask > 0, numbers, rows), data.count
    if not is_list(person) or len(person) != len(clients):
        raise refuse("person", f"{len(clients)} arrays of labels, one for each client", person)
    if is_traced(data.count):
        raise refuse("person", "None where the clients are traced", person)
    codes = np.full((len(clients), rows), rows, np.int32)
    people = np.zeros(len(clients))
    for i, (own, count) in enumerate(zip(person, np.asarray(data.count), strict=True)):
        found = _labels(f"person[{i}]", own, int(count))
        codes[i, : int(count)] = found
        people[i] = len(np.unique(found))
    return jnp.asarray(codes), jnp.asarray(people, data.count.dtype)


def _labels(name: str, given: object, rows: int) -> np.ndarray:
    labels = np.asarray(given, object) if is_list(given) else given
    gaps = [] if not isinstance(labels, np.ndarray) else labels.ravel().tolist()
    for place, label in enumerate(gaps):
        if label is None or label != label or label == "":
            raise ValueError(
                f"{name}: wanted whose row each of {rows} rows is, got a gap at row {place}"
            )
    found = checked_labels(name, given, rows)
    return np.unique(found, return_inverse=True)[1].reshape(-1)


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


def _check_delta(delta: float, people: Array) -> None:
    if is_traced(people):
        return
    most = float(np.max(np.asarray(people)))
    if delta > 1 / most:
        warnings.warn(
            f"delta: {delta:g} is above one over the {most:g} persons of a client: a mechanism "
            "that publishes one of them at random would satisfy it",
            stacklevel=caller(),
        )


def _check_weights(clients: Clients) -> None:
    weights, counts = np.asarray(clients.weights, float), np.asarray(clients.counts, float)
    if np.ptp(weights) > 1e-5 * weights.max() and np.allclose(
        weights / weights.sum(), counts / counts.sum(), rtol=1e-5
    ):
        raise ValueError(
            "clients: wanted weights that do not tell numbers of rows, which person protects, got "
            "weights='samples'"
        )
