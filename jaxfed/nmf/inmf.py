r"""Integrative NMF: shared and local non-negative components of clients' samples (LIGER).

.. math::
    \min_{W, V_i, H_i \ge 0} \sum_i \|X_i - H_i (W + V_i)\|^2 + \lambda \sum_i \|H_i V_i\|^2

The rows of X_i are a client's samples, as cells, and those of W and V_i components, as metagenes.

Source: Welch et al. (2019), Single-cell multi-omic integration compares and contrasts features of
brain cell identity, Cell 177. In minibatches: Gao et al. (2021), Iterative single-cell multi-omic
integration using online learning, Nature Biotechnology 39.
"""

import dataclasses
from typing import Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import (
    Algorithm,
    check_count,
    check_factor,
    check_name,
    check_positive,
    hyperparameter,
    refuse,
)
from jaxfed.core.clients import samples
from jaxfed.core.common.printing import is_known
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.linalg.svd import svd
from jaxfed.nmf._nonnegative import (
    Rows,
    hals_sweep,
    lengths_of,
    loadings_of,
    longer_parts,
    unit_of,
)

# Columns of the sketch that the start comes from: at least LEAST, so that runs of different ranks
# up to 12 begin at the same components.
LEAST, OVERSAMPLING = 32, 8

Start = Literal["svd", "random"]
Columns = Float[Array, "features rank"]
Sketch = Float[Array, "features width"]


class INMFMember(NamedTuple):
    """ONE client's prepared data."""

    values: Float[Array, "samples features"]  # missing entries are zero
    observed: Bool[Array, "samples features"] | None  # None if nothing is missing
    size: Float[Array, ""]  # number of samples


class Products(NamedTuple):
    """Products of loadings H and samples X, which updates of components depend on."""

    gram: Float[Array, "rank rank"]  # HᵀH
    samples: Rows  # HᵀX; in messages HᵀX - HᵀH V_i


class INMFLocal(NamedTuple):
    """ONE client's state."""

    components: Rows  # V_i
    products: Products  # of this pass over the samples
    earlier: Products | None  # of the pass before; None without batches
    rounds: Int[Array, ""]  # that the client took part in


@final
class INMF(Algorithm):
    r"""Integrative non-negative matrix factorization (LIGER), also in minibatches.

    Samples are explained by non-negative loadings of components, each the sum of a shared part and
    the client's own part: \(X_i \approx H_i (W + V_i)\). The penalty λ keeps the own parts small.

    In each round, a client updates its own parts by one sweep of hierarchical alternating least
    squares (HALS), then computes its loadings by non-negative least squares. It sends the products
    \(H_i^\top H_i\) and \(H_i^\top X_i - H_i^\top H_i V_i\), and the server updates the shared
    parts by one sweep with the mean products. The objective never rises. Loadings are not kept:
    `jaxfed.nmf.transform` computes them from the result.

    The history has the mean over clients of \(\|X_i - H_i (W + V_i)\|^2 + \lambda \|H_i V_i\|^2\).
    Large clients therefore count more, as in the paper.

    Samples may have missing entries (`Clients.from_samples(missing="mask")`). Loadings then fit
    the observed entries, and the products replace missing entries by their fitted values. The
    objective counts only observed entries, and still never rises.

    By default, the shared parts start at the non-negative parts of the leading right singular
    vectors of all samples, as in NNDSVD, and own parts at zero. The server finds the vectors in the
    mean of the clients' products \(X_i^\top X_i \Omega\) with a fixed thin matrix \(\Omega\).
    Which part of a vector is taken, the positive or the negative one, depends on their lengths
    alone, because the left singular vectors stay with the clients.

    The shared parts of the result have unit length. They are `(features, rank)`, like each
    client's own parts.

    Source: Welch et al. (2019) and, for `batches`, Gao et al. (2021), whose updates these are; for
    the start, Boutsidis & Gallopoulos (2008), SVD based initialization: a head start for
    nonnegative matrix factorization, and Halko, Martinsson & Tropp (2011), Finding structure with
    randomness.
    """

    penalty: Float[Array, ""]
    active_rank: Float[Array, ""] | None
    rank: int = eqx.field(static=True)
    batches: int = eqx.field(static=True)
    start: Start = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        penalty: float | Array = 5.0,
        *,
        active_rank: float | Array | None = None,
        batches: int = 1,
        start: Start = "svd",
    ):
        """Set up the algorithm.

        Args:
            rank: number of components k.
            penalty: weight λ of the penalty of the clients' own parts.
            active_rank: number of components in use, all by default. The others are zero. Runs that
                differ in it share one compiled program.
            batches: number of parts of each client's samples. Each round uses the next part: every
                `batches`-th sample. Products then include those of earlier rounds, up to two passes
                ago, as in online iNMF.
            start: `"svd"`, as above, or `"random"`: shared parts are drawn uniformly and own parts
                from the client's samples, both by the run's key.

        Raises:
            ValueError: if the rank or the number of batches is not a positive whole number, the
                penalty is negative or not finite, the active rank is not positive or is above the
                rank, or the start is unknown.
        """
        check_count("rank", rank)
        check_factor("penalty", penalty)
        check_positive("active_rank", active_rank, optional=True)
        check_count("batches", batches)
        check_name("start", start, ("svd", "random"))
        self.rank, self.batches, self.start = rank, batches, start
        self.penalty = hyperparameter(penalty)
        self.active_rank = hyperparameter(active_rank)
        if is_known(self.active_rank) and np.max(np.asarray(self.active_rank)) > rank:
            raise refuse("active_rank", f"at most rank={rank}", active_rank)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the data, the rank or the warm start do not fit."""
        samples.check_rows(clients)
        if self.rank > clients.features:
            raise ValueError(
                f"rank: {self.rank} components do not fit into {clients.features} features"
            )
        for part in clients.parts:
            # Of NumPy, for clients that are constants of a traced function.
            known = np.asarray(part.values) if is_known(part.values) else np.zeros(1)
            if negative := known[known < 0].tolist():
                raise refuse("clients", "samples without negative numbers", negative[0])
        check_warm_start_shapes(warm_start, clients, self.rank)

    def prepare(self, data: samples.SampleRows, client_id, rounds) -> INMFMember:
        """Replace missing entries by zeros."""
        if isinstance(data, samples.Samples):
            return INMFMember(data.values, None, data.count)
        return INMFMember(jnp.where(data.observed, data.values, 0), data.observed, data.count)

    def first_message(self, key, data: INMFMember, warm_start) -> Sketch | None:
        """Return the product of the second moment with a thin matrix, which is the same for all."""
        if warm_start is not None or self.start == "random":
            return None
        features, dtype = data.values.shape[-1], data.size.dtype
        width = min(features, max(LEAST, 2 * self.rank + OVERSAMPLING))
        normal = np.random.default_rng(0).standard_normal((features, width))
        thin = jnp.asarray(np.linalg.qr(normal)[0], dtype)
        filled = _filled(data)
        return data_matmul(filled.T, data_matmul(filled, thin))

    def server_init(self, key, first: Sketch | None, like: INMFMember, warm_start) -> Rows:
        """Return the warm start's shared parts, or those of the chosen start, of unit length."""
        if warm_start is not None:
            return self._active(warm_start.shared.T)
        if first is not None:
            return self._active(unit_of(longer_parts(svd(first)[0][:, : self.rank].T)))
        features, dtype = like.values.shape[-1], like.size.dtype

        def one(number):
            return jax.random.uniform(jax.random.fold_in(key, number), (features,), dtype)

        return self._active(unit_of(jax.vmap(one)(jnp.arange(self.rank))))

    def client_init(self, key, downlink: Rows, data: INMFMember, warm_start) -> INMFLocal:
        """Return the warm start's own parts, zeros, or samples at random, of unit length."""
        if warm_start is not None and warm_start.local is not None:
            components = warm_start.local.T
        elif self.start == "svd":
            components = jnp.zeros_like(downlink)
        else:

            def one(number):
                return jax.random.uniform(jax.random.fold_in(key, number), (), data.size.dtype)

            draws = jax.vmap(one)(jnp.arange(self.rank))
            rows = jnp.floor(draws * data.size).astype(jnp.int32)
            components = unit_of(data.values[rows].astype(data.size.dtype))
        empty = jnp.zeros((self.rank, self.rank), downlink.dtype)
        none = Products(empty, jnp.zeros_like(downlink))
        earlier = none if self.batches > 1 else None
        return INMFLocal(self._active(components), none, earlier, jnp.zeros((), jnp.int32))

    def downlink(self, server: Rows) -> Rows:
        """Return the shared parts."""
        return server

    def client_step(self, key, downlink: Rows, local: INMFLocal, data: INMFMember):
        """Update the own parts and the loadings, and send their products."""
        # Own parts first, from the products of the last round's H and the W received since. Each
        # update of V_i, H_i and W lowers the objective given the others, so it never rises.
        own = self._own_parts(downlink, local)
        batch = self._batch(data, local.rounds)
        values = batch.values.astype(own.dtype)
        loadings = loadings_of(downlink, own, self.penalty, values, batch.observed)
        found = loadings.values
        filled = values
        if batch.observed is not None:
            # With missing entries at their fitted values, the squared error of whole samples equals
            # that of the observed entries now and bounds it after any update. So sweeps that lower
            # it lower both.
            filled = jnp.where(batch.observed, values, client_matmul(found, downlink + own))
        # As if all samples of the client were like those of the batch.
        scale = ratio(data.size, batch.size)
        new = Products(client_matmul(found.T, found), data_matmul(found.T, filled))
        local = self._with(local, jax.tree.map(lambda x: scale * x, new), batch.size)
        gram, product = _together(local)
        uplink = Products(gram, product - client_matmul(gram, own))
        objective = scale * (jnp.sum(values**2) - jnp.sum(loadings.gain))
        return uplink, local._replace(components=own), {"objective": objective}

    def server_step(self, key, server: Rows, uplink: Products):
        """Update the shared parts."""
        return hals_sweep(server, uplink.gram, uplink.samples), {}

    def client_result(self, downlink: Rows, local: INMFLocal, data: INMFMember) -> Columns:
        """Return the own parts, updated to the last shared ones, in units of their lengths."""
        # Both parts of a component are divided by the length of the shared one; loadings take it
        # up.
        return ratio(self._own_parts(downlink, local), lengths_of(downlink)).T

    def shared_result(self, server: Rows) -> Columns:
        """Return the shared parts, of unit length."""
        return ratio(server, lengths_of(server)).T

    @property
    def stochastic(self) -> bool:
        """Whether rounds use different batches."""
        return self.batches > 1

    @property
    def eigenvectors(self) -> int:
        """The rank: sums of squares lose features in small units as those of eigenvectors do."""
        return self.rank

    @property
    def quadratic_in_samples(self) -> bool:
        """Whether all samples take part in each round; two equal ones may be in other batches."""
        return self.batches == 1

    def different_starts(self, count: int) -> list["INMF"]:
        """Return copies with different starts; all but the first are random."""
        return [self, *[dataclasses.replace(self, start="random")] * (count - 1)]

    @property
    def energy_weighted(self) -> bool:
        """True: a mean of sums of squares weights clients by their squares."""
        return True

    def through(self) -> Algorithm:
        """Return this algorithm, whose rounds have a fixed point without batches.

        Raises:
            ValueError: if rounds use different batches.
        """
        if self.batches > 1:
            raise ValueError(
                "adjoint: wanted INMF(batches=1) for an implicit derivative, since rounds of "
                f"different batches have no fixed point, got {self.batches}"
            )
        return self

    def _active(self, components: Rows) -> Rows:
        """Set the components that are not in use to zero."""
        if self.active_rank is None:
            return components
        return jnp.where(jnp.arange(self.rank)[:, None] < self.active_rank, components, 0)

    def _own_parts(self, shared: Rows, local: INMFLocal) -> Rows:
        """Update the own parts by one sweep; those of components that are not used become zero."""
        gram, product = _together(local)
        # Given H and W, ‖X - H (W + V)‖² + λ ‖H V‖² is least where (1 + λ) HᵀH V = HᵀX - HᵀH W.
        weight = (1 + self.penalty).astype(gram.dtype)
        rest = product - client_matmul(gram, shared)
        found = hals_sweep(local.components, weight * gram, rest)
        found = jnp.where(jnp.diagonal(gram)[:, None] > 0, found, 0)
        # Before the client's first round there are no products to fit.
        return jnp.where(local.rounds > 0, found, local.components)

    def _batch(self, data: INMFMember, number: Int[Array, ""]) -> INMFMember:
        """Return a batch, with zero rows where there are no more samples."""
        if self.batches == 1:
            return data
        rows = number % self.batches
        rows += self.batches * jnp.arange(-(-len(data.values) // self.batches))
        there = rows < data.size

        def chosen(x: Array) -> Array:
            # Rows of zeros get loadings of zero and add nothing to the products.
            return jnp.where(there[:, None], x.at[rows].get(mode="clip"), jnp.zeros((), x.dtype))

        observed = None if data.observed is None else chosen(data.observed)
        return INMFMember(chosen(data.values), observed, jnp.sum(there, dtype=data.size.dtype))

    def _with(self, local: INMFLocal, new: Products, size: Float[Array, ""]) -> INMFLocal:
        """Add the products of a batch, and forget those of the pass before the last.

        The weights of earlier batches are those of the authors' code.
        """
        number = local.rounds
        if local.earlier is None:
            return local._replace(products=new, rounds=number + 1)
        past = number.astype(size.dtype)
        weight = jnp.where(number > 1, (past - 1) / jnp.maximum(past, 1), ratio(past, size))
        ends = (number + 1) % self.batches == 0

        def earlier(one, before):
            return weight * jnp.where(ends, one, before)

        def recent(one, new):
            return jnp.where(ends, 0, weight * one) + new

        return INMFLocal(
            local.components,
            jax.tree.map(recent, local.products, new),
            jax.tree.map(earlier, local.products, local.earlier),
            number + 1,
        )


def _together(local: INMFLocal) -> Products:
    """Return the products of this pass and the one before."""
    if local.earlier is None:
        return local.products
    return jax.tree.map(jnp.add, local.products, local.earlier)


def check_warm_start_shapes(warm_start, clients, rank: int) -> None:
    """Refuse a warm start of other shapes.

    Raises:
        ValueError: names the part, and both shapes.
    """
    if warm_start is None:
        return
    wanted: dict[str, tuple[int, ...]] = {"shared": (clients.features, rank)}
    if warm_start.local is not None:
        wanted["local"] = (len(clients), clients.features, rank)
    for name, shape in wanted.items():
        part = getattr(warm_start, name)
        if jnp.shape(part) != shape:
            raise ValueError(
                f"warm_start: wanted {name} components of shape {shape}, got {jnp.shape(part)}"
            )


def _filled(data: INMFMember) -> Float[Array, "samples features"]:
    """Return ONE client's samples; missing entries are the feature's mean times the sample's level.

    A sample's level is the sum of its observed entries by that of the means of these features.
    """
    values = data.values.astype(data.size.dtype)
    if data.observed is None:
        return values
    observed = data.observed.astype(values.dtype)
    means = ratio(jnp.sum(values, axis=0), jnp.sum(observed, axis=0))
    # Zero for padding.
    levels = ratio(jnp.sum(values, axis=1), observed @ means)
    return jnp.where(data.observed, values, levels[:, None] * means)
