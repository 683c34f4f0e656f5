"""What completes samples with missing entries: a Gaussian model of each client's samples."""

from dataclasses import replace
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed._checks import check_instance
from jaxfed._numbers import checked_rows
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.learned import in_learned_columns, matched, of_client
from jaxfed.core.clients.names import DataFrame, Names
from jaxfed.core.clients.samples import IncompleteSamples, SampleRows
from jaxfed.core.common.buckets import in_order, layout_of, parts_of
from jaxfed.core.common.printing import is_known
from jaxfed.linalg import Moment
from jaxfed.linalg.precision import precise
from jaxfed.linalg.sums import unit_of


class ScorePosterior(NamedTuple):
    """The posterior of the scores of ONE client's samples."""

    mean: Float[Array, "samples rank"]
    covariance: Float[Array, "samples rank rank"]


def least_variance(dtype: Any) -> float:
    """So small that the inverse, times a hundred million samples, does not overflow."""
    return 2.0**27 * float(jnp.finfo(dtype).tiny)


@final
class Imputation(eqx.Module):
    r"""A Gaussian model by which missing entries of samples are completed.

    A sample is \(x = \mu + W z + e\) with scores \(z \sim N(0, I)\) and noise
    \(e_d \sim N(0, \psi_d)\), where mean and loadings are known up to a variance. What
    `jaxfed.preprocess.Impute` learns: `solution.result.local` has a model of each client,
    `solution.result.shared` is one for samples of anybody. Works under `jit`, `vmap` and `grad`.

    What was learned from clients with names has them as `names`: clients with names may come in any
    order, and so may their named features. Without names on either side, as of a model made from
    arrays, clients and features count by position.
    """

    mean: Float[Array, "*clients features"]
    loadings: Float[Array, "*clients features rank"]
    noise: Float[Array, "*clients features"]  # variances
    mean_variance: Float[Array, "*clients features"]
    loadings_variance: Float[Array, "*clients features rank"]
    # Set on every instance: else two of them would differ as types of pytrees.
    names: Names = eqx.field(static=True, default_factory=Names, init=False)

    def scores(
        self, values: Float[Array, "samples features"], observed: Bool[Array, "samples features"]
    ) -> ScorePosterior:
        """The posterior of the scores, given what was observed of ONE client's samples.

        Source: Tipping & Bishop (1999), Probabilistic principal component analysis, Appendix B, for
        the observed entries of each sample alone.
        """
        features, rank = self.loadings.shape
        # In a unit of the noise, in which no inverse overflows.
        unit = unit_of(jnp.sqrt(jax.lax.stop_gradient(self.noise)))
        loadings, noise = self.loadings / unit, self.noise / unit / unit
        noise = jnp.maximum(noise, least_variance(noise.dtype))
        precision = jnp.where(observed, 1 / noise, 0)
        # Entry (r, s) of the second moment of a feature's loadings.
        moment = loadings[:, :, None] * loadings[:, None, :]
        variance = self.loadings_variance / unit / unit
        moment += variance[:, :, None] * jnp.eye(rank, dtype=moment.dtype)
        information = (precision @ moment.reshape(features, -1)).reshape(-1, rank, rank)
        # The prior's identity keeps it positive definite for samples without a single observed
        # entry, as padding rows are.
        factor = jnp.linalg.cholesky(information + jnp.eye(rank, dtype=moment.dtype))
        inverse = jax.scipy.linalg.solve_triangular(
            factor, jnp.broadcast_to(jnp.eye(rank, dtype=moment.dtype), factor.shape), lower=True
        )
        covariance = jnp.einsum("nrs,nrt->nst", inverse, inverse)
        centred = jnp.where(observed, values - self.mean, 0) / unit
        projected = (precision * centred) @ loadings
        return ScorePosterior(jnp.einsum("nrs,ns->nr", covariance, projected), covariance)

    def transform(
        self,
        samples: Clients | Float[ArrayLike, "... features"] | DataFrame | LabelledArray,
        *,
        client: int | str | None = None,
    ) -> Any:
        """Samples with the conditional means in place of missing entries.

        Args:
            samples: `jaxfed.Clients` of samples in any layout; or rows `(..., features)`, in which
                NaN stands for a missing entry, or a data frame of them, whose columns are put in
                the order of the features.
            client: name or position of whose rows they are, where each client has a model of its
                own.

        Returns:
            Clients or rows, complete, with features in the order in which they were learned; what
            was observed changes only to the precision in use.
            Clients with missing entries then have `imputed` set, since tests and intervals need
            samples that were observed.

        Raises:
            ValueError: for what holds no samples, other clients or features, and rows of nobody.
        """
        if isinstance(samples, Clients):
            known, clients = matched(self, samples)
            data = clients.layout.mapped(known._completed_rows, complete=True)
            return replace(clients, data=data, imputed=_have_gaps(clients))
        samples = in_learned_columns(self, samples)
        axes = f"... {self.mean.shape[-1]}"
        rows = checked_rows("samples", samples, axes, finite=True, missing=True)
        own, table = of_client(self, client), rows.reshape(-1, rows.shape[-1])
        with precise():
            return _completed(own, table).reshape(rows.shape).astype(rows.dtype)

    def moments(self, clients: Clients) -> Clients:
        """Clients with the conditional expectations of their second moments, given their samples.

        These include the covariances of what is missing, without which variances come out too
        small. Every algorithm that takes second moments takes them.

        Args:
            clients: of samples in memory.

        Returns:
            Clients with a matrix `(features, features)` each, the same ids and weights.

        Raises:
            ValueError: for what holds no samples in memory, and other clients or features.
        """
        check_instance("clients", clients, Clients, "jaxfed.Clients")
        known, clients = matched(self, clients)
        clients.layout.check_in_memory("second moments")
        layout = layout_of(clients.data)
        places = (slice(None),) if layout is None else layout.places
        with precise():
            found = [
                _moments(known._at(own, len(part.count)), part)
                for part, own in zip(parts_of(clients.data), places, strict=True)
            ]
        return eqx.tree_at(lambda c: c.data, clients, in_order(layout, found))

    def _at(self, places: Any, clients: int) -> "Imputation":
        """The models of clients at these positions."""
        if self.mean.ndim > 1:
            places = places if isinstance(places, slice) else jnp.asarray(places)
            return jax.tree.map(lambda x: x[places], self)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (clients, *x.shape)), self)

    def _completed_rows(self, values: Any, places: Any) -> Array:
        with precise():
            return jax.vmap(_completed)(self._at(places, len(values)), jnp.asarray(values))


@jax.jit
def _completed(
    model: Imputation, values: Float[Array, "samples features"]
) -> Float[Array, "samples features"]:
    observed = ~jnp.isnan(values)
    known = jnp.where(observed, values, 0).astype(model.mean.dtype)
    expected = model.scores(known, observed).mean @ model.loadings.T + model.mean
    return jnp.where(observed, known, expected)


@jax.jit
def _moments(models: Imputation, data: SampleRows) -> Moment:
    # One client after the other, so that only one's covariances exist at a time.
    return jax.lax.map(lambda one: _moment(*one), (models, data))


def _moment(model: Imputation, data: SampleRows) -> Moment:
    """The conditional expectation of ONE client's second moment."""
    observed = data.observed
    known = jnp.where(observed, data.values, 0).astype(data.count.dtype)
    missing = ((data.mask[:, None] > 0) & ~observed).astype(known.dtype)
    scores = model.scores(known, observed)
    values = known + missing * (scores.mean @ model.loadings.T + model.mean)
    # The outer products of these rows sum to the covariance of the missing entries, but for the
    # noise.
    factor = jnp.einsum("dr,nrs->nsd", model.loadings, jnp.linalg.cholesky(scores.covariance))
    factor = (factor * missing[:, None]).reshape(-1, values.shape[1])
    # Noise, and the uncertainty of means and loadings, are independent from feature to feature, so
    # they add to the diagonal alone.
    squares = scores.mean**2 + jnp.diagonal(scores.covariance, axis1=1, axis2=2)
    alone = model.noise + model.mean_variance + squares @ model.loadings_variance.T
    total = values.T @ values + factor.T @ factor + jnp.diag(jnp.sum(missing * alone, axis=0))
    return Moment.from_dense(total / data.count, data.count)


def _have_gaps(clients: Clients) -> bool:
    """Whether some entries of samples are missing; also if that is unknown."""

    def has_gaps(part: Any) -> bool:
        if not isinstance(part, IncompleteSamples):
            return False
        return not is_known(part.values) or bool(np.isnan(np.asarray(part.values)).any())

    return any(map(has_gaps, clients.parts))
