"""Matrix factorizations with shared and local components, for samples with missing entries."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxfed import pca
from jaxfed._checks import check_factor, check_flag, check_number, check_whole
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.personalize import personalize
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.arrays import named
from jaxfed.core.store.saved import DOWNLINK
from jaxfed.estimators import _arrays, _groups
from jaxfed.estimators._components import ArrayOrFrame, Table
from jaxfed.estimators._factors import FactorsOfSamples, Sizes, Start
from jaxfed.estimators._normal import Learned, described, moment_of_samples
from jaxfed.estimators._scores import Likelihoods, Scores
from jaxfed.pca.hmf import Message

# Of normal errors, one in 16,000 exceeds four standard deviations, and the median one is 0.6745.
GROSS, MEDIAN = 4.0, 0.6745
REFITS = 3  # that estimate the threshold


class SharedAndLocalFactors(  # pyright: ignore[reportIncompatibleMethodOverride]
    FactorsOfSamples, Scores
):
    """Base of matrix factorizations with orthonormal shared and local components.

    Attributes after `fit`:

    - `groups_`: the clients' labels, sorted, `(m,)`; other attributes have the same order.
    - `shared_rank_`, `local_rank_`: the numbers of components.
    - `components_`: the shared components as rows, `(r1, d)`.
    - `local_components_`: the clients' local components as rows, `(m, r2, d)`.
    - `mean_`: what is subtracted from samples, `(d,)`.
    - `explained_variance_ratio_`: for each column of `transform`, the sum of its squares over all
      samples of `fit`, divided by that of these samples minus `mean_`, whose missing entries, and
      those in a sparse part, are those that the factors fit.
    - `noise_variance_`: variance of the observed entries of all samples outside their client's
      components.
    - `n_iter_`, `summary_`, `saved_`: rounds after the starts; the run in words, and as
      `jaxfed.load` returns it.
    """

    shared_rank: int
    local_rank: int
    center: bool

    @abc.abstractmethod
    def _middle(self, X: Table) -> Float[np.ndarray, " d"]:
        """Return what `center` subtracts from samples, each feature of which has an entry."""

    @abc.abstractmethod
    def _fitted(self, solution: Solution, tables: Sequence[Table]) -> Sequence[Table]:
        """Return each client's samples of `fit` with fitted values for what is not believed."""

    @abc.abstractmethod
    def _model(self) -> Algorithm:
        """Return what `fit` has run."""

    @abc.abstractmethod
    def _sent(self, shared: Any) -> Any:
        """Return what the server sends to clients."""

    @abc.abstractmethod
    def _without_doubt(
        self, table: Table, basis: Float[np.ndarray, "d r"]
    ) -> Float[np.ndarray, "n d"]:
        """Replace entries of centred samples that are missing, or not believed, by fitted ones."""

    @abc.abstractmethod
    def _doubts(self, X: Table) -> bool:
        """Whether some entries may have to be replaced."""

    @property
    @final
    def _takes_missing(self) -> bool:
        return True

    @final
    def _sizes(self):
        check_whole("shared_rank", self.shared_rank)
        check_whole("local_rank", self.local_rank)
        check_flag("center", self.center)
        # What later calls use, whatever is set after `fit`.
        self.shared_rank_, self.local_rank_ = int(self.shared_rank), int(self.local_rank)
        rank = self.shared_rank_ + self.local_rank_
        return Sizes(rank, rank)

    @final
    def _other_start(self, algorithm, shared, key):
        drawn = jnp.linalg.qr(jax.random.normal(key, shared.shape, shared.dtype))[0]
        return Start(algorithm, Personalized(drawn, None))

    @final
    def _start_of(self, result):
        # As for other starts, so that one program serves both.
        return Personalized(result.shared, None)

    @final
    def _centred(self, X):
        self.mean_ = np.zeros(X.shape[1], X.dtype)
        if not self.center:
            return X
        some = ~np.isnan(X).all(axis=0)
        self.mean_[some] = self._middle(X[:, some])
        return X - self.mean_

    @final
    def _describe(self, solution, tables):
        shared, local = (np.asarray(x, np.float64) for x in solution.result)
        fitted = self._fitted(solution, tables)
        counts = np.asarray([len(table) for table in tables], float)
        found = described(Learned(shared, local, True), fitted, counts, moment_of_samples)
        # Fitted values have no noise.
        believed = sum(int(np.sum(own == table)) for own, table in zip(fitted, tables, strict=True))
        share = max(believed, 1) / sum(table.size for table in tables)
        self._beside = True
        self._models = [law._replace(noise=law.noise / share) for law in found.laws]
        self._anybody = found.law._replace(noise=found.law.noise / share)
        self.components_ = found.shared.T
        self.local_components_ = found.local.swapaxes(1, 2)
        self.noise_variance_ = found.noise_variance / share
        self.explained_variance_ratio_ = found.variance_ratio

    @final
    def _new_components(self, tables):
        known = Personalized(jnp.asarray(self.components_.T), None)
        found = pca.fit_local(known, list(tables), self.local_rank_).local
        return np.asarray(found, np.float64)

    @final
    def _completed(
        self, X: Table, groups: ArrayOrFrame | None, parts: Sequence[_groups.Group]
    ) -> Table:
        _arrays.check_entries(X)
        if not self._doubts(X):
            return X
        completed, mean = X.copy(), self.mean_.astype(X.dtype)
        for rows, model in parts:
            table = X[rows] - mean
            basis = self._basis_for(table) if model is None else model.basis
            replaced = self._without_doubt(table, basis)
            # What is believed stays as it is, without another rounding.
            completed[rows] = np.where(replaced == table, X[rows], replaced + mean)
        return completed

    def _basis_for(self, table: Table) -> Float[np.ndarray, "d r"]:
        """Return the components of a new client, from samples with gaps or gross errors."""
        clients = Clients.from_samples([table], missing="mask")
        shared = jnp.asarray(self.components_)
        known = self.saved_._replace(downlink=named(DOWNLINK, self._sent(shared)))
        found = personalize(self._model(), known, clients)
        return np.concatenate([self.components_.T, np.asarray(found.local[0], np.float64)], axis=1)


class HeterogeneousMF(  # pyright: ignore[reportIncompatibleMethodOverride]
    SharedAndLocalFactors, Likelihoods
):
    """Shared and local components of clients' samples of which entries may be missing (HMF).

    It runs `jaxfed.pca.HMF` on the rows of each group: only observed entries count, also in
    `transform`, which finds scores by least squares. So
    `inverse_transform(transform(X, groups), groups)` has values for missing entries; those of a
    sample with hardly more observed entries than components are poor. Without missing entries, the
    components are nearly those of `PersonalizedPCA`, but they leave the least squared error of all
    samples: each sample counts the same, not each client, and no component counts less.

    Source: Shi, Fattahi & Al Kontar (2023), Heterogeneous matrix factorization: when features
    differ by datasets, arXiv:2305.17744.
    """

    def __init__(
        self,
        shared_rank: int = 1,
        local_rank: int = 1,
        *,
        rounds: int = 500,
        tol: float | None = 1e-6,
        n_init: int = 6,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.
            rounds: maximum number of rounds.
            tol: stop once further rounds would lower the squared error by at most this fraction;
                None runs all rounds.
            n_init: number of starts: what the clients' top components have in common, then random
                ones. With more than one, thirty rounds of each come before `rounds` of
                the best one.
            center: whether to subtract the mean of each feature's observed entries.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.shared_rank, self.local_rank, self.rounds = shared_rank, local_rank, rounds
        self.tol, self.n_init, self.center = tol, n_init, center
        self.random_state = random_state

    def _middle(self, X) -> Any:
        return np.nanmean(X, axis=0, dtype=np.float64)

    def _model(self):
        return pca.HMF(self.shared_rank_, self.local_rank_)

    def _solved(self, run: Callable[..., Solution], tables):
        return run(self._model())

    def _sent(self, shared):
        return Message(shared, None)

    def _fitted(self, solution, tables):
        if not any(np.isnan(table).any() for table in tables):
            return tables
        return [np.asarray(x) for x in pca.complete(solution, list(tables))]

    def _doubts(self, X):
        return bool(np.isnan(X).any())

    def _without_doubt(self, table, basis):
        known = Personalized(jnp.asarray(basis.astype(table.dtype)), None)
        return np.asarray(pca.complete(known, table), table.dtype)


class TripleComponentMF(SharedAndLocalFactors):
    """Shared and local components of clients' samples with gross errors in some entries (TCMF).

    It runs `jaxfed.pca.TCMF` on the rows of each group: their matrix is a shared low-rank part, a
    local one, a sparse part of gross errors or anomalies, and noise. `transform` computes scores of
    the low-rank parts, `inverse_transform` these parts, and `sparse_part` the gross errors. Entries
    may be missing.

    `threshold_` is the smallest gross error, in units of the data. There is no likelihood of gross
    errors, and so no `score`: to choose ranks, look at `explained_variance_ratio_`.

    Source: Shi, Fattahi & Al Kontar (2024), Triple component matrix factorization: untangling
    global, local, and noisy components, JMLR 25.
    """

    def __init__(
        self,
        shared_rank: int = 1,
        local_rank: int = 1,
        *,
        threshold: float | None = None,
        decay: float = 0.9,
        rounds: int = 500,
        tol: float | None = 1e-6,
        n_init: int = 6,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.
            threshold: the smallest gross error, in units of the data, above the noise; 0 for
                samples without noise. None takes four standard deviations of the noise, as the
                median error of three fits in a row tells them.
            decay: factor between the thresholds of two rounds, above 0 and below 1: the nearer to
                1, the more rounds, and the more errors it withstands.
            rounds: maximum number of rounds.
            tol: stop once further rounds would lower the objective by at most this fraction; None
                runs all rounds.
            n_init: number of starts, as for `HeterogeneousMF`.
            center: whether to subtract the mean of each feature's entries that are within four
                standard deviations of its median, as the median distance to that tells them.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.shared_rank, self.local_rank, self.threshold = shared_rank, local_rank, threshold
        self.decay, self.rounds, self.tol, self.n_init = decay, rounds, tol, n_init
        self.center, self.random_state = center, random_state

    def sparse_part(
        self, X: ArrayOrFrame, groups: ArrayOrFrame | None = None
    ) -> Float[np.ndarray, "n d"]:
        """Return the gross errors of samples: what exceeds the low-rank parts by `threshold_`.

        Args:
            X: samples as rows, `(n, d)`.
            groups: the client of each row, `(n,)`, as for `transform`.

        Returns:
            Gross errors, `(n, d)`; zero elsewhere, and where entries are missing.

        Raises:
            ValueError: if samples or groups are invalid.
        """
        X, cleaned, _ = self._parted(X, groups)
        return np.where(np.isnan(X), 0, X - cleaned)

    def _middle(self, X) -> Any:
        middle = np.nanmedian(X, axis=0)
        far = X - middle
        near = np.abs(far) <= GROSS / MEDIAN * np.nanmedian(np.abs(far), axis=0)
        # Of a constant feature, the mean of differences is zero without rounding.
        return middle + np.nanmean(np.where(near, far, np.nan), axis=0, dtype=np.float64)

    def _model(self):
        ranks = self.shared_rank_, self.local_rank_
        return pca.TCMF(*ranks, self.threshold_, decay=float(self.decay))

    def _solved(self, run: Callable[..., Solution], tables):
        check_factor("threshold", self.threshold, optional=True, single=True)
        check_number(
            "decay", self.decay, "a number above 0 and below 1", lambda x: (x > 0) & (x < 1)
        )
        if self.threshold is not None:
            self.threshold_ = float(self.threshold)
            return run(self._model())
        self.threshold_ = float(_upper_quartiles(np.concatenate(tables).reshape(1, -1))[0, 0])
        start = None
        for _ in range(REFITS):
            found = run(self._model(), start)
            start = self._start_of(found.result)
            self.threshold_ = self._gross(found, tables)
        return run(self._model(), start)

    def _gross(self, solution: Solution, tables: Sequence[Table]) -> float:
        """Return the threshold of gross errors by the median error of a fit."""
        cleaned = self._fitted(solution, tables)
        scores = pca.transform(solution, cleaned)
        low_rank = pca.inverse_transform(solution, scores)
        every = np.concatenate(tables)
        varying = np.fmax.reduce(every) > np.fmin.reduce(every)  # constant features have no noise
        if not varying.any():
            return 0.0
        errors = np.abs(every - np.concatenate([np.asarray(x) for x in low_rank]))[:, varying]
        features = errors.shape[1]
        left = max(1 - self._n_features_out / features, 1 / features)
        return float(GROSS / MEDIAN * np.nanmedian(errors) / np.sqrt(left))

    def _sent(self, shared):
        return shared

    def _fitted(self, solution, tables):
        cleaned = np.asarray(solution.local.cleaned)
        return [x[: len(table)] for x, table in zip(cleaned, tables, strict=True)]

    def _doubts(self, X):
        return True

    def _without_doubt(self, table, basis):
        seen, basis = ~np.isnan(table), basis.astype(table.dtype)
        values = np.where(seen, table, 0)
        threshold = _first_thresholds(table)
        cleaned = _cleaned(values, seen, np.zeros_like(values), threshold)
        for _ in range(int(self.rounds)):
            low_rank = (cleaned @ basis) @ basis.T
            threshold = self.decay * threshold + (1 - self.decay) * self.threshold_
            before, cleaned = cleaned, _cleaned(values, seen, low_rank, threshold)
            change = np.abs(cleaned - before).max(initial=0)
            settled = np.all(np.abs(threshold - self.threshold_) <= 1e-3 * self.threshold_)
            if settled and change <= np.finfo(values.dtype).eps * np.abs(cleaned).max(initial=0):
                break
        return cleaned


def _first_thresholds(table: Table) -> Float[np.ndarray, "n 1"]:
    """Return each sample's first threshold, of its own entries as a client's in `TCMF`."""
    return 3 * _upper_quartiles(table)


def _upper_quartiles(table: Table) -> Float[np.ndarray, "n 1"]:
    """Return the upper quartile of each row's magnitudes that are not zero, as `TCMF` does."""
    sizes = np.abs(table)
    some = (sizes > 0).any(axis=1, keepdims=True)
    return np.nanquantile(np.where(some & (sizes == 0), np.nan, sizes), 0.75, axis=1, keepdims=True)


def _cleaned(
    values: Table,
    seen: Bool[np.ndarray, "n d"],
    low_rank: Table,
    threshold: Float[np.ndarray, "n 1"],
) -> Table:
    """Return samples with the low-rank parts' entries for missing ones and gross errors."""
    return np.where(seen & (np.abs(values - low_rank) <= threshold), values, low_rank)
