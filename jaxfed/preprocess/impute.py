"""Impute missing entries with a model of shared and local components, learned in rounds."""

from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from jaxfed.contract import Algorithm, Bases, check_count
from jaxfed.core.clients.imputation import Imputation, least_variance
from jaxfed.core.clients.samples import SampleRows, check_rows
from jaxfed.core.common.printing import is_known
from jaxfed.linalg.division import ratio
from jaxfed.linalg.sums import sum_of_rows

ROUNDS = 50  # enough for imputed entries and second moments to converge
# Minimum noise of a feature, relative to the mean over features. Otherwise features that hardly
# vary would dominate all others by their tiny noise, which is estimated from the same samples.
LEAST_NOISE = 0.5
# Initial variances of local means and loadings, relative to the features' variances.
FIRST_SPREAD = 0.1
# Weight of the mean over features relative to a feature's own variance of local parts. Without it,
# some variances vanish, ever more slowly.
TYPICAL_WEIGHT = 0.2
# Share of what the model leaves, along one more component, above which larger ranks impute better.
NEXT_COMPONENT = 0.045
PRODUCTS = 4  # power iterations for it, in each round
# Ranks by default are a half and a third of the number of features, but no more than these.
MOST_SHARED, MOST_LOCAL = 30, 2

Row = Float[Array, " features"]


class ClientVariances(NamedTuple):
    """How much clients differ in each feature: the variances of their local parts."""

    mean: Row
    loadings: Row


class Model(NamedTuple):
    """The part of the model that is common to all clients."""

    mean: Row
    loadings: Float[Array, "features shared_rank"]
    noise: Row  # variances
    spread: ClientVariances


class ImputeServer(NamedTuple):
    """The server's state."""

    model: Model
    observed: Row  # share of entries that were observed


class ImputeMember(NamedTuple):
    """ONE client's prepared data; missing entries are zero."""

    values: Float[Array, "samples features"]
    observed: Bool[Array, "samples features"]
    size: Float[Array, ""]  # number of samples


class ImputeLocal(NamedTuple):
    """ONE client's part: the deviation of its mean, and its own loadings."""

    mean: Row
    loadings: Float[Array, "features local_rank"] | None  # None without local components


class First(NamedTuple):
    """Means over ONE client's samples; missing entries are zero."""

    observed: Row
    values: Row
    within: Row  # squared deviations from the client's mean
    means: Row  # squared means, times the numbers of samples


class Uplink(NamedTuple):
    """Means over ONE client's samples."""

    gradient: Float[Array, "features shared_rank"]  # of the squared error by the loadings
    curvature: Float[Array, ""]  # of the squared error by a feature's loadings; an upper bound
    error: Row  # expected squared error of the observed entries
    spread: ClientVariances


class Ranks(NamedTuple):
    """Numbers of components of ONE client."""

    shared: int
    local: int


@final
class Impute(Algorithm):
    r"""Imputation of missing entries by a model with shared and local components.

    Client i's samples are \(x = \mu + \mu_i + U z + V_i t + e\) with scores \(z, t \sim N(0, I)\),
    noise \(e_d \sim N(0, \psi_d)\), and local parts \(\mu_{id} \sim N(0, a_d)\) and
    \(V_{idk} \sim N(0, b_d)\), whose variances a and b are learned too. The fewer entries a client
    has of a feature, and the less clients differ in it, the closer its local part is to zero. Each
    round, a client takes one step of variational expectation maximization: it computes the
    posterior of the scores given the observed entries of each sample, then that of its local part.
    It sends means over its samples, from which the server computes the shared part.

    `solution.result.local` is an `Imputation` for each client. Its `transform` imputes samples, and
    its `moments` are expected second moments, which every PCA algorithm accepts.
    `jaxfed.personalize` computes those of new clients. `solution.result.shared` is one for samples
    of unknown clients. Whether entries are missing must not depend on their values. Clients need
    not have observed every feature.

    The posterior variances of local parts use \(E[t t^T] = I\) as the second moment of the scores
    of a client's samples. Noise is at least half of its mean over features, and the variances a and
    b are moved a sixth of the way towards their means. So features in unlike units are imputed
    worse: give them one size with `Standardize` first, whose `inverse_transform` returns the units.

    The history has the mean squared error of the observed entries as `objective`; a run has
    converged once what is left to gain is small beside their variance. `next_component` is the
    share of the residuals along one more component, beyond that of noise; it is negative where
    there is no more than noise.

    Source: the model of personalized PCA of Shi & Kontar (2024); missing entries as in Tipping &
    Bishop (1999) and Ilin & Raiko (2010), Practical approaches to principal component analysis in
    the presence of missing values, Section 4; learned variances as in Ozkara et al. (2023).
    """

    shared_rank: int | None = eqx.field(static=True)
    local_rank: int | None = eqx.field(static=True)

    def __init__(self, shared_rank: int | None = None, local_rank: int | None = None):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components; None for half of the number of features, at
                most 30. Components that the data do not support shrink to zero, so that too many
                do little harm.
            local_rank: number of each client's local components, in addition to its mean; None for
                two, or one with fewer than six features.

        Raises:
            ValueError: if a rank is not a whole number, or too small.
        """
        if shared_rank is not None:
            check_count("shared_rank", shared_rank)
        if local_rank is not None:
            check_count("local_rank", local_rank, least=0)
        self.shared_rank, self.local_rank = shared_rank, local_rank

    def ranks(self, features: int) -> Ranks:
        """Return the numbers of components for samples of this many features."""
        shared, local = self.shared_rank, self.local_rank
        return Ranks(
            max(1, min(MOST_SHARED, features // 2)) if shared is None else shared,
            max(1, min(MOST_LOCAL, features // 3)) if local is None else local,
        )

    @property
    def eigenvectors(self) -> int:
        """Shared and local components together; the most that there can be if ranks are None."""
        shared, local = self.shared_rank, self.local_rank
        return (MOST_SHARED if shared is None else shared) + (
            MOST_LOCAL if local is None else local
        )

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data or warm start do not fit, or nobody observed a feature."""
        check_rows(clients)
        features = clients.features
        total = sum(self.ranks(features))
        if total > features:
            raise ValueError(
                f"shared_rank + local_rank: wanted at most the number of features, {features}, got "
                f"{total}"
            )
        if all(is_known(part.values) for part in clients.parts):
            seen = sum(_times_observed(part) for part in clients.parts)
            if not np.all(seen):
                raise ValueError(
                    "clients: wanted every feature observed by some client, got none of feature "
                    f"{int(np.argmin(seen))}"
                )
        if warm_start is not None:
            self._check_warm_start(warm_start, features)

    def _check_warm_start(self, warm_start, features: int) -> None:
        wanted = features, sum(self.ranks(features))
        # New clients have no local part.
        for part in [warm_start.shared] if warm_start.local is None else warm_start:
            model = isinstance(part, Imputation)
            if not model or part.loadings.shape[-2:] != wanted:
                got = f"loadings {part.loadings.shape}" if model else type(part).__name__
                raise ValueError(
                    f"warm_start: wanted models of Impute with loadings {wanted}, got {got}"
                )

    def prepare(self, data: SampleRows, client_id, rounds) -> ImputeMember:
        """Replace missing entries by zeros, and remember where they are."""
        observed = data.observed
        values = jnp.where(observed, data.values, 0).astype(data.count.dtype)
        return ImputeMember(values, observed, data.count)

    def first_message(self, key, data: ImputeMember, warm_start) -> First:
        """Return what the common mean and the features' variances need."""
        observed, values = data.observed.astype(data.values.dtype), data.values
        count, total = sum_of_rows(observed), sum_of_rows(values)
        mean = total / jnp.maximum(count, 1)
        # About the client's mean, since squares of means hide small variances.
        within = sum_of_rows(observed * (values - mean) ** 2)
        return First(*(x / data.size for x in (count, total, within, total * mean)))

    def server_init(self, key, first: First, like, warm_start) -> ImputeServer:
        """Return random components, or the warm start's."""
        # A lossy channel may turn a number into zero.
        observed = jnp.where(first.observed > 0, first.observed, 1)
        mean, within, square = (x / observed for x in (first.values, first.within, first.means))
        between = square - mean**2
        # A lossy channel may turn a variance into a negative number.
        variance = jnp.maximum(within, 0)
        variance += jnp.where(between > 16 * jnp.finfo(mean.dtype).eps * square, between, 0)
        typical = jnp.mean(variance)
        rank = self.ranks(len(mean)).shared
        if warm_start is None:
            draw = jax.random.normal(key, (len(mean), rank), mean.dtype)
            # Half of the variance is in the components, half is noise.
            loadings = draw * jnp.sqrt(typical / (2 * rank))
        else:
            mean, loadings = warm_start.shared.mean, warm_start.shared.loadings[:, :rank]
        noise = jnp.maximum(variance, LEAST_NOISE * typical) / 2
        spread = FIRST_SPREAD * jnp.maximum(variance, jnp.finfo(mean.dtype).eps * typical)
        return ImputeServer(Model(mean, loadings, noise, ClientVariances(spread, spread)), observed)

    def downlink(self, server: ImputeServer) -> Model:
        """Return the common part of the model."""
        return server.model

    def client_init(self, key, downlink: Model, data: ImputeMember, warm_start) -> ImputeLocal:
        """Draw a local part from the prior, or return the warm start's."""
        ranks = self.ranks(data.values.shape[1])
        if warm_start is not None and warm_start.local is not None:
            own: Imputation = warm_start.local
            loadings = own.loadings[:, ranks.shared :] if ranks.local else None
            return ImputeLocal(own.mean - downlink.mean, loadings)
        zeros, spread = jnp.zeros_like(downlink.mean), downlink.spread
        if not ranks.local:
            return ImputeLocal(zeros, None)
        draw = jax.random.normal(key, (len(zeros), ranks.local), data.values.dtype)
        return ImputeLocal(zeros, draw * jnp.sqrt(spread.loadings)[:, None])

    def client_step(self, key, downlink: Model, local: ImputeLocal, data: ImputeMember):
        """Update the posterior of the scores, then that of the local part, then the message."""
        shared_rank, local_rank = self.ranks(data.values.shape[1])
        downlink = _usable(downlink)
        observed = data.observed.astype(data.values.dtype)
        values = data.values - observed * downlink.mean
        model = self._model(downlink, local, observed)
        scores = model.scores(data.values, data.observed)
        # The local mean is the loading of a last score, which is always one.
        mean = jnp.concatenate([scores.mean, jnp.ones_like(values[:, :1])], axis=1)
        second = jnp.pad(scores.covariance, ((0, 0), (0, 1), (0, 1)))
        second += mean[:, :, None] * mean[:, None, :]
        second *= jnp.any(data.observed, axis=1)[:, None, None]  # exclude padding
        # For each feature, over the samples in which it was observed.
        width = shared_rank + local_rank + 1
        gram = (observed.T @ second.reshape(-1, width**2)).reshape(-1, width, width)
        product = values.T @ mean

        spread = downlink.spread
        prior = self._local_columns(spread.loadings, spread.mean)
        own = slice(shared_rank, width)
        rest = product[:, own] - jnp.einsum(
            "dkr,dr->dk", gram[:, own, :shared_rank], downlink.loadings
        )
        # A ridge regression of each feature on the client's own scores, with the prior's precision
        # as ridge.
        precision = gram[:, own, own] / downlink.noise[:, None, None]
        precision += jnp.eye(local_rank + 1, dtype=values.dtype) / prior[:, None, :]
        found = jnp.linalg.solve(precision, (rest / downlink.noise[:, None])[..., None])[..., 0]
        local = ImputeLocal(found[:, -1], found[:, :-1] if local_rank else None)

        loadings = jnp.concatenate([downlink.loadings, found], axis=1)
        fitted = jnp.einsum("drs,ds->dr", gram, loadings)
        model = self._model(downlink, local, observed)
        variance = self._local_columns(model.loadings_variance[:, -1], model.mean_variance)
        # E v² under the posterior, from which the server estimates the prior's variances.
        squares = found**2 + variance
        # Σ E(x - wᵀs)² for each feature is Σ x² - 2 wᵀ Σ x E s + wᵀ (Σ E s sᵀ) w, plus what the
        # posterior variances of the local part add.
        error = jnp.sum(values**2, axis=0) + jnp.sum(loadings * (fitted - 2 * product), axis=1)
        error += jnp.sum(variance * jnp.diagonal(gram[:, own, own], axis1=1, axis2=2), axis=1)
        uplink = Uplink(
            (product - fitted)[:, :shared_rank] / data.size,
            _norm(second[:, :shared_rank, :shared_rank].sum(axis=0) / data.size),
            error / data.size,
            ClientVariances(squares[:, -1], squares[:, :-1].sum(axis=1) / max(1, local_rank)),
        )
        left = (values - observed * (mean @ loadings.T)) / jnp.sqrt(downlink.noise)
        rank = shared_rank + local_rank
        more = jax.lax.stop_gradient(_next_component(key, left, data.size, rank))
        # What is left to gain matters beside the variance of the samples, most of which the model
        # explains, and not beside their noise.
        number = jnp.sum(observed)
        objective, scale = jnp.sum(error) / number, jnp.sum(values**2) / number
        measured = {"objective": objective, "objective_scale": scale, "next_component": more}
        return uplink, local, measured

    def server_step(self, key, server: ImputeServer, uplink: Uplink):
        """Take a step in the shared loadings; update noise and variances."""
        model, observed = server
        # A feature observed in few samples has a correspondingly smaller curvature.
        step = ratio(uplink.gradient, uplink.curvature) / observed[:, None]
        least = LEAST_NOISE * jnp.sum(uplink.error) / jnp.sum(observed)
        noise = jnp.maximum(uplink.error / observed, least)
        spread = jax.tree.map(
            lambda x: (x + TYPICAL_WEIGHT * jnp.mean(x)) / (1 + TYPICAL_WEIGHT), uplink.spread
        )
        model = Model(model.mean, model.loadings + step, noise, spread)
        return ImputeServer(model, observed), {}

    def client_result(self, downlink: Model, local: ImputeLocal, data: ImputeMember) -> Imputation:
        """Return the model of the client's samples; that of unknown clients if it overflows."""
        finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(local)]))
        local = jax.tree.map(lambda x: jnp.where(finite, x, 0), local)
        observed = jnp.where(finite, data.observed, False).astype(data.values.dtype)
        return self._model(_usable(downlink), local, observed)

    def shared_result(self, server: ImputeServer) -> Imputation:
        """Return the model for unknown clients: local parts are zero, up to their variance."""
        model = server.model
        features = len(model.mean)
        zeros, rank = jnp.zeros_like(model.mean), self.ranks(features).local
        local = ImputeLocal(zeros, jnp.zeros((features, rank), zeros.dtype) if rank else None)
        return self._model(model, local, jnp.zeros((1, features), model.mean.dtype))

    def remarks(self, result, history) -> tuple[str, ...]:
        """Warn if the residuals have structure that another model would explain."""
        values = np.asarray(history["next_component"])
        values = values[np.isfinite(values)]  # without rounds that had no participant
        if not len(values) or (share := np.median(values[len(values) // 2 :])) <= NEXT_COMPONENT:
            return ()
        # Noise is alike in all clients, and nearly so in all features.
        return (
            f"One more component would explain {100 * share:.0f} % of the variance that the model "
            "leaves of the clients' observed entries: larger ranks impute better, or standardized "
            "samples.",
        )

    def bases(self, server: ImputeServer, local: ImputeLocal) -> Bases:
        """Return both sets of loadings, which rotate with their scores."""
        own = () if local.loadings is None else (local.loadings,)
        return Bases(shared=(server.model.loadings,), own=own)

    @property
    def energy_weighted(self) -> bool:
        """True: all clients have the same noise, so those of large variance count more."""
        return True

    def _model(
        self, model: Model, local: ImputeLocal, observed: Float[Array, "samples features"]
    ) -> Imputation:
        information = observed.sum(axis=0) / model.noise
        variances = ClientVariances(*(1 / (information + 1 / prior) for prior in model.spread))
        loadings, uncertain = model.loadings, jnp.zeros_like(model.loadings)
        if local.loadings is not None:
            own = jnp.broadcast_to(variances.loadings[:, None], local.loadings.shape)
            loadings = jnp.concatenate([loadings, local.loadings], axis=1)
            uncertain = jnp.concatenate([uncertain, own], axis=1)
        return Imputation(model.mean + local.mean, loadings, model.noise, variances.mean, uncertain)

    def _local_columns(
        self, loadings: Row, mean: Row
    ) -> Float[Array, "features local_rank_and_one"]:
        """Return a value for each local loading, and as the last one that for the local mean."""
        features = len(loadings)
        many = jnp.broadcast_to(loadings[:, None], (features, self.ranks(features).local))
        return jnp.concatenate([many, mean[:, None]], axis=1)


def _next_component(
    key: Key[Array, ""], left: Float[Array, "samples features"], size: Float[Array, ""], rank: int
) -> Float[Array, ""]:
    """Estimate the share of the residuals along one more component, beyond that of noise.

    Args:
        key: random key for the start of a power iteration.
        left: residuals in units of the noise; zero where nothing was observed.
        size: number of samples.
        rank: number of components, along which hardly anything is left.
    """
    features = left.shape[1]
    # The share has no unit, and squares of a client unlike all others would overflow.
    left = ratio(left, jnp.max(jnp.abs(left)))

    def step(vector, _):
        product = left @ ratio(vector, jnp.linalg.norm(vector))
        return product @ left, product @ product

    start = jax.random.normal(key, (features,), left.dtype)
    largest = jax.lax.scan(step, start, length=PRODUCTS)[1][-1]
    # The largest eigenvalue of noise alone, over the trace: Johnstone (2001), On the distribution
    # of the largest eigenvalue in principal components analysis.
    noise = (jnp.maximum(size, 1) ** -0.5 + max(1, features - rank) ** -0.5) ** 2
    return ratio(largest, jnp.sum(left**2)) - noise


def _times_observed(data: SampleRows) -> np.ndarray:
    """Count how often each feature was observed, with NumPy: `jit` may close over the data."""
    values, count = np.asarray(data.values), np.asarray(data.count)
    real = np.arange(values.shape[1]) < count[:, None]
    return (~np.isnan(values) & real[..., None]).sum(axis=(0, 1))


def _usable(model: Model) -> Model:
    """Make the variances positive.

    After a lossy channel, some may not be; for samples of zeros, none are.
    """

    def positive(x: Row) -> Row:
        least = jnp.finfo(x.dtype).eps * jnp.max(x)
        return jnp.maximum(x, jnp.maximum(least, least_variance(x.dtype)))

    spread = jax.tree.map(positive, model.spread)
    return model._replace(noise=positive(model.noise), spread=spread)


def _norm(second: Float[Array, "rank rank"]) -> Float[Array, ""]:
    """Return the 8-norm of the eigenvalues: bounds the largest, and is smooth if some are equal."""
    unit = jnp.trace(second)
    square = second @ second / unit**2
    fourth = square @ square
    return unit * jnp.sum(fourth**2) ** (1 / 8)
