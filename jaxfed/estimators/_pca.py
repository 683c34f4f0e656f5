"""The estimators of the PCA family, one class per model."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import pca
from jaxfed._checks import check_count, check_positive
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.estimators._clients import ClientPCA
from jaxfed.estimators._normal import Learned
from jaxfed.estimators._starts import best_of
from jaxfed.inference.weights import FEWEST
from jaxfed.linalg import Moment
from jaxfed.multi_start import ROUNDS
from jaxfed.pca.likelihood import estimated, joint_moment, precision, variances_message
from jaxfed.pca.one_shot import FirstShared
from jaxfed.pca.variance_ranks import rank_below_all, shared_and_local_ranks
from jaxfed.privacy.ledger import Ledger


class PersonalizedPCA(ClientPCA):
    """Shared components, and local components for each client.

    It runs `jaxfed.pca.PerPCA` on the rows of each group. See `transform` for the meaning of
    local scores and for clients that were not in `fit`.

    With `bootstrap`, `fit` also sets `components_std_`, the standard errors of the entries of
    `components_`, and `confidence_`, a `jaxfed.inference.Confidence` whose clients are `groups_`.

    Source: Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features, JMLR.
    """

    shared_rank_: int
    local_rank_: int

    def __init__(
        self,
        shared_rank: float = 1,
        local_rank: float = 1,
        *,
        rounds: int = 100,
        n_init: int = 6,
        shrinkage: bool = False,
        robust: bool = False,
        center: bool = True,
        scale: Literal["none", "shared"] = "none",
        whiten: bool = False,
        forgetting: float | None = None,
        impute: tuple[int, int] | Literal["auto"] | None = None,
        bootstrap: int = 0,
        epsilon: float | None = None,
        delta: float = 1e-5,
        noise: Literal["jax", "opendp"] = "jax",
        ledger: Ledger | None = None,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            shared_rank: number of shared components; or a share in (0, 1) of all variance, and
                `fit` uses as many as `jaxfed.pca.ranks_for_variance` finds.
            local_rank: number of each client's local components; or the share of the variance that
                shared and local components are to explain together, with at least one local one.
            rounds: number of rounds.
            n_init: number of starts: what the clients' top components have in common, then random
                ones. With more than one, thirty rounds of each come before `rounds` of the best
                one. Without a clear difference, clients share the components that are largest in
                all of them. With one start, a second `fit` takes a third of the time, but may end
                at a poor optimum if samples are few or have heavy tails.
            shrinkage: remove the noise from the second moments first.
            robust: aggregate messages with `jaxfed.aggregation.Robust`, each client as a group of
                its own, so that a few faulty clients do little harm. This needs at least three
                clients. The mean that is subtracted is then the median of the clients' means.
            center: whether to subtract the mean of all samples.
            scale: "shared" divides each feature by its standard deviation over all samples, as
                `jaxfed.preprocess.Standardize` and scikit-learn's `StandardScaler` do, with
                `robust` by the root of the median of the clients' mean squares about the median of
                their means; "none" divides by nothing. Features that are constant up to rounding
                are divided by the magnitude of their mean, and zeros by one. `partial_fit` uses the
                deviations of all samples so far, but with `impute` always those of the entries that
                were observed in its first call. A client has no scale of its own, since samples of
                unknown clients would have none.
            whiten: whether `transform` divides scores by the root of their mean square: shared ones
                over all samples, local ones over their client's, and what noise alone explains by
                the root of `noise_variance_`.
            forgetting: the share, in (0, 1], of the new samples in each `partial_fit`; None forgets
                nothing, so that all samples count equally.
            impute: numbers of shared and local components of the model that imputes missing entries
                (NaN), or "auto" for those of `jaxfed.preprocess.Impute`; None refuses missing
                entries. Samples of clients that were not in `fit` are imputed by a model for
                unknown clients.
            bootstrap: number of resamples of each client's samples from which `fit` computes
                standard errors and intervals, such as 200; 0 for none. With `impute`, each resample
                is imputed anew. Moments cannot be resampled, so it excludes `partial_fit`. Mean and
                scale are taken as known.
            epsilon: release each client's second moment once, with noise that protects each person,
                and learn from it, see `jaxfed.privacy.release_moments`; None adds no noise. What it
                does not cover is refused: `center`, so subtract each client's own mean from its
                rows first, `scale`, `shrinkage`, `robust`, `forgetting`, `impute`, `bootstrap` and
                `partial_fit`. Each `fit` is another release, in a search too, and guarantees add
                up.
            delta: probability that the guarantee fails, with `epsilon`.
            noise: generator of the noise, with `epsilon`, as for `jaxfed.privacy.release_moments`:
                "jax" for simulations, or "opendp" for real data, exactly sampled from the system's
                randomness (`pip install 'jaxfed[privacy]'`), whatever `random_state`.
            ledger: the budget that each release counts against, with `epsilon`; a release beyond it
                is refused before anything is computed.
            random_state: a seed or a `numpy.random.RandomState`. With `epsilon`, whoever knows it
                can draw the noise again and subtract it: set it in simulations alone, where the
                noise is that of `release_moments` with the key
                `jax.random.key(check_random_state(random_state).randint(2**31 - 1))`. With None,
                noise is from the system's randomness.
        """
        self.shared_rank, self.local_rank, self.rounds = shared_rank, local_rank, rounds
        self.n_init, self.shrinkage, self.robust = n_init, shrinkage, robust
        self.center, self.scale, self.whiten = center, scale, whiten
        self.forgetting, self.impute = forgetting, impute
        self.bootstrap, self.epsilon, self.delta = bootstrap, epsilon, delta
        self.noise, self.ledger, self.random_state = noise, ledger, random_state

    def _sizes(self):
        check_count("n_init", self.n_init)
        check_count("bootstrap", self.bootstrap, least=0)
        scores = self.shared_rank_ + self.local_rank_
        return scores, scores

    def _numbers(self, clients, *given):
        return shared_and_local_ranks(clients, *given)

    def _solved(self, run, clients):
        if self.bootstrap and np.min(clients.counts) < FEWEST:
            raise ValueError(
                f"groups: wanted {FEWEST} samples of each client or more with bootstrap, got "
                f"{int(np.min(clients.counts))}"
            )
        ranks = self.shared_rank_, self.local_rank_
        model = pca.PerPCA(*ranks, shrinkage=self.shrinkage)
        if self.n_init == 1:
            return run(model)
        # One after the other, since a second program would take longer to compile than it saves.
        first = run(FirstShared(model), rounds=1).result.shared
        rng = np.random.default_rng(np.asarray(jax.random.key_data(self._key())))
        draws = rng.standard_normal((int(self.n_init) - 1, *first.shape)).astype(first.dtype)
        starts = [first, *map(jnp.asarray, np.linalg.qr(draws)[0])]
        tried = [run(model, warm_start=Personalized(x, None), rounds=ROUNDS) for x in starts]
        best = best_of(tried)
        return run(model, warm_start=Personalized(best.result.shared, None))

    def _learned(self, solution, clients):
        shared, local = map(_host, solution.result)
        return Learned(shared, local, True)

    def _new_components(self, tables):
        known = Personalized(jnp.asarray(self.components_.T), None)
        return _host(pca.fit_local(known, list(tables), self.local_rank_).local)


class FederatedPCA(ClientPCA):
    """Principal components of all clients' samples together, without pooling them.

    It runs `jaxfed.pca.BlockLanczos`: the server sees sums of products, and a few rounds suffice.
    With `epsilon` it runs `jaxfed.pca.Pooled`, since the server has all that clients released.

    Source: Golub & Underwood (1977), The block Lanczos method for computing eigenvalues.
    """

    stops_at_rounding = True
    n_components_: int

    def __init__(
        self,
        n_components: float = 1,
        *,
        rounds: int = 50,
        tol: float | None = None,
        center: bool = True,
        scale: Literal["none", "shared"] = "none",
        whiten: bool = False,
        forgetting: float | None = None,
        impute: tuple[int, int] | Literal["auto"] | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        noise: Literal["jax", "opendp"] = "jax",
        ledger: Ledger | None = None,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            n_components: number of components; or a share in (0, 1) of all variance, and `fit` uses
                the fewest that explain it.
            rounds: maximum number of rounds.
            tol: stop once the captured variance changes by at most this fraction, and the violation
                of the optimality condition is at most this share of all variance; None stops once
                only rounding errors would change.
            center: whether to subtract the mean of all samples.
            scale: "shared" divides each feature by its standard deviation over all samples, as
                `jaxfed.preprocess.Standardize` and scikit-learn's `StandardScaler` do; "none"
                divides by nothing. Features that are constant up to rounding are divided by
                the magnitude of their mean, and zeros by one.
                `partial_fit` uses the deviations of all samples so far, but with `impute` always
                those of the entries that were observed in its first call. A client has no scale of
                its own, since samples of unknown clients would have none.
            whiten: whether `transform` divides scores by the root of their mean square: shared ones
                over all samples, local ones over their client's, and what noise alone explains by
                the root of `noise_variance_`.
            forgetting: the share, in (0, 1], of the new samples in each `partial_fit`; None forgets
                nothing, so that all samples count equally.
            impute: numbers of shared and local components of the model that imputes missing entries
                (NaN), or "auto" for those of `jaxfed.preprocess.Impute`; None refuses missing
                entries. Samples of clients that were not in `fit` are imputed by a model for
                unknown clients.
            epsilon: release each client's second moment once, with noise that protects each person,
                and learn from it, see `jaxfed.privacy.release_moments`; None adds no noise. What it
                does not cover is refused: `center`, so subtract each client's own mean from its
                rows first, `scale`, `forgetting`, `impute` and `partial_fit`. Each `fit` is another
                release, in a search too, and guarantees add up.
            delta: probability that the guarantee fails, with `epsilon`.
            noise: generator of the noise, with `epsilon`, as for `jaxfed.privacy.release_moments`:
                "jax" for simulations, or "opendp" for real data, exactly sampled from the system's
                randomness (`pip install 'jaxfed[privacy]'`), whatever `random_state`.
            ledger: the budget that each release counts against, with `epsilon`; a release beyond it
                is refused before anything is computed.
            random_state: a seed or a `numpy.random.RandomState`. With `epsilon`, whoever knows it
                can draw the noise again and subtract it: set it in simulations alone, where the
                noise is that of `release_moments` with the key
                `jax.random.key(check_random_state(random_state).randint(2**31 - 1))`. With None,
                noise is from the system's randomness.
        """
        self.n_components, self.rounds, self.tol = n_components, rounds, tol
        self.center, self.scale, self.whiten = center, scale, whiten
        self.forgetting, self.impute = forgetting, impute
        self.epsilon, self.delta, self.noise = epsilon, delta, noise
        self.ledger, self.random_state = ledger, random_state

    def _sizes(self):
        return self.n_components_, self.n_components_

    def _numbers(self, clients, *given):
        return [pca.ranks_for_variance(clients, *given, total=None).shared]

    def _solved(self, run, clients):
        if self.epsilon is not None:
            return run(pca.Pooled(self.n_components_), rounds=1, tol=None)
        return run(pca.BlockLanczos(self.n_components_))

    def _learned(self, solution, clients):
        shared = _host(solution.result.shared)
        return Learned(shared, np.zeros((len(solution.ids), len(shared), 0)), True)

    def _new_components(self, tables):
        return np.zeros((len(tables), tables[0].shape[1], 0))


class HierarchicalBayesPCA(ClientPCA):
    """Components of each client under a common prior, which supports clients with few samples.

    It runs `jaxfed.pca.HierarchicalPCA`. `components_` is the prior's centre, and
    `local_components_` holds each client's components. A client that was not in `fit` gets the most
    likely components for its samples under the prior, whose variance is `prior_variance_`.

    With `epsilon`, the prior is learned from the release, so that the guarantee also covers
    `prior_variance_`. A client then finds its components at home, with variances of noise and
    scores from its own rows. Noise of the release makes clients look more different than they are:
    the learned prior is wider than without, at ε = 1 and 500 rows of 20 features 1.6 times, and
    supports clients less.

    Source: Ozkara, Huang & Diggavi (2023); Ozkara, Huang, Zhou & Diggavi, ADEPT.
    """

    semidefinite = True
    n_components_: int

    def __init__(
        self,
        n_components: float = 1,
        *,
        noise_variance: float | None = None,
        prior_variance: float | None = None,
        rounds: int = 30,
        robust: bool = False,
        center: bool = True,
        scale: Literal["none", "shared"] = "none",
        whiten: bool = False,
        forgetting: float | None = None,
        impute: tuple[int, int] | Literal["auto"] | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        noise: Literal["jax", "opendp"] = "jax",
        ledger: Ledger | None = None,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            n_components: number of each client's components, less than the number of features; or
                the share in (0, 1) of the variance that as many principal components of each client
                explain.
            noise_variance: noise variance of each feature, if scores have variance one; None to
                estimate both, which needs a client with more samples than components.
            prior_variance: variance of clients' components around the shared ones; None to learn
                it.
            rounds: number of rounds.
            robust: aggregate messages with `jaxfed.aggregation.Robust`, each client as a group of
                its own, so that a few faulty clients do little harm. This needs at least three
                clients. The mean that is subtracted is then the median of the clients' means.
            center: whether to subtract the mean of all samples.
            scale: "shared" divides each feature by its standard deviation over all samples, as
                `jaxfed.preprocess.Standardize` and scikit-learn's `StandardScaler` do, with
                `robust` by the root of the median of the clients' mean squares about the median of
                their means; "none" divides by nothing. Features that are constant up to rounding
                are divided by the magnitude of their mean, and zeros by one. `partial_fit` uses the
                deviations of all samples so far, but with `impute` always those of the entries that
                were observed in its first call. A client has no scale of its own, since samples of
                unknown clients would have none.
            whiten: whether `transform` divides scores by the root of their mean square: shared ones
                over all samples, local ones over their client's, and what noise alone explains by
                the root of `noise_variance_`.
            forgetting: the share, in (0, 1], of the new samples in each `partial_fit`; None forgets
                nothing, so that all samples count equally.
            impute: numbers of shared and local components of the model that imputes missing entries
                (NaN), or "auto" for those of `jaxfed.preprocess.Impute`; None refuses missing
                entries. Samples of clients that were not in `fit` are imputed by a model for
                unknown clients.
            epsilon: release each client's second moment once, with noise that protects each person,
                and learn from it, see `jaxfed.privacy.release_moments`; None adds no noise. What it
                does not cover is refused: `center`, so subtract each client's own mean from its
                rows first, `scale`, `robust`, `forgetting`, `impute`, `noise_variance` and
                `partial_fit`. Each `fit` is another release, in a search too, and guarantees add
                up.
            delta: probability that the guarantee fails, with `epsilon`.
            noise: generator of the noise, with `epsilon`, as for `jaxfed.privacy.release_moments`:
                "jax" for simulations, or "opendp" for real data, exactly sampled from the system's
                randomness (`pip install 'jaxfed[privacy]'`), whatever `random_state`.
            ledger: the budget that each release counts against, with `epsilon`; a release beyond it
                is refused before anything is computed.
            random_state: a seed or a `numpy.random.RandomState`. With `epsilon`, whoever knows it
                can draw the noise again and subtract it: set it in simulations alone, where the
                noise is that of `release_moments` with the key
                `jax.random.key(check_random_state(random_state).randint(2**31 - 1))`. With None,
                noise is from the system's randomness.
        """
        self.n_components, self.noise_variance = n_components, noise_variance
        self.prior_variance, self.rounds, self.robust = prior_variance, rounds, robust
        self.center, self.scale, self.whiten = center, scale, whiten
        self.forgetting, self.impute = forgetting, impute
        self.epsilon, self.delta, self.noise = epsilon, delta, noise
        self.ledger, self.random_state = ledger, random_state

    def _sizes(self):
        for name in ("noise_variance", "prior_variance"):
            check_positive(name, getattr(self, name), optional=True)
        return self.n_components_, self.n_components_ + 1

    def _numbers(self, clients, *given):
        return [rank_below_all("n_components", clients, *given)]

    def _solved(self, run, clients):
        variances = self.noise_variance, self.prior_variance
        return run(pca.HierarchicalPCA(self.n_components_, *variances, solver="eigenvectors"))

    def _learned(self, solution, clients):
        def last(name, given):
            return float(solution.history[name][-1]) if given is None else float(given)

        self.prior_variance_ = last("prior_variance", self.prior_variance)
        # Of the likelihood; `noise_variance_` is the variance that the fitted components leave.
        scores = None if self.noise_variance is None else 1.0
        found = last("noise_variance", self.noise_variance), last("score_variance", scores)
        # Those of a release are of directions of rows.
        self._variances = found if self.epsilon is None else None
        shared, local = map(_host, solution.result)
        return Learned(shared, local, False)

    def _new_components(self, tables):
        def of_one(table):
            moment = Moment.from_samples(jnp.asarray(table))
            variances = self._variances
            if variances is None:
                own = variances_message(moment, self.n_components_)
                variances = estimated(own, self.n_components_, moment.dim)
            weight = precision(jnp.asarray(float(len(table))), *variances)
            shared = jnp.asarray(np.asarray(self.components_).T, moment.trace.dtype)
            joint = joint_moment(moment, weight, shared, self.prior_variance_)
            return joint.top(self.n_components_)[1]

        return np.stack([_host(of_one(table)) for table in tables])


def _host(array: Any) -> np.ndarray:
    """Copy orthonormal columns to the host in double precision."""
    return np.asarray(array, np.float64)
