"""The base class of the PCA estimators."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeAlias, final

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from jaxfed import aggregation
from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.core.run.update import update
from jaxfed.estimators import _arrays, _groups
from jaxfed.estimators._arrays import checked, checked_samples, client_labels
from jaxfed.estimators._completion import Completion, check_impute
from jaxfed.estimators._normal import (
    Learned,
    Normal,
    ScoreMoment,
    axes,
    beside,
    described,
    moment_of_matrix,
    moment_of_samples,
)
from jaxfed.estimators._saved import HasRun, on_device, on_host
from jaxfed.estimators._stream import check_forgetting, summary_of, taken_in
from jaxfed.preprocess import Impute

ArrayOrFrame: TypeAlias = Any  # whatever scikit-learn converts: arrays, lists, data frames
Table = Float[np.ndarray, "n d"]
Basis = Float[np.ndarray, "d _r"]


class ClientPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, HasRun):
    """Base of the PCA estimators.

    Attributes after `fit` or `partial_fit`:

    - `groups_`: the clients' labels, sorted, `(m,)`; other attributes have the same order.
    - `components_`: the shared components, or the centre of the prior, as rows, `(r1, d)`.
    - `local_components_`: the clients' local components as rows, `(m, r2, d)`; r2 may be 0.
    - `mean_`: the mean that is subtracted from samples, `(d,)`.
    - `explained_variance_ratio_`: for each column of `transform`, the sum of its squares over all
      samples, divided by that of the samples minus `mean_`: as of scikit-learn's `PCA`.
    - `noise_variance_`: variance of all samples in a direction outside their client's components.
    - `n_iter_`, `summary_`, `saved_`: rounds; the run in words, and as `jaxfed.load` returns it.
    - `far_groups_`: with `robust=True`, the labels of clients that were far from the others.
    """

    rounds: int
    robust: bool = False
    center: bool
    forgetting: float | None
    impute: tuple[int, int] | None
    tol: float | None = None
    stops_at_rounding: ClassVar[bool] = False  # without a tolerance
    random_state: Any
    n_features_in_: int
    _precision: Any  # of the table

    @abc.abstractmethod
    def _sizes(self) -> tuple[int, int]:
        """Return the number of scores and the least number of features, for checked parameters."""

    @abc.abstractmethod
    def _solved(self, run: Callable[..., Solution], clients: Clients) -> Solution:
        """Learn components by calling `run(algorithm)`."""

    @abc.abstractmethod
    def _learned(self, solution: Solution, clients: Clients) -> Learned:
        """Return the components of a solution."""

    @abc.abstractmethod
    def _new_components(self, table: Table) -> Basis:
        """Return local components for the samples of a client that was not in `fit`."""

    # --- scikit-learn's methods --------------------------------------------------------------

    @final
    def fit(self, X: ArrayOrFrame, y: object = None, groups: ArrayOrFrame | None = None) -> Self:
        """Learn components, in the precision of the table: double, but for `float32`.

        Args:
            X: samples as rows, `(n, d)`.
            y: ignored.
            groups: the client of each row, `(n,)`, all numbers or all names. Without groups, all
                rows belong to one client, with a warning; give all rows one label to avoid it.

        Returns:
            The estimator.

        Raises:
            ValueError: if parameters, samples or groups are invalid.
        """
        X, labels = self._checked(X, groups, first=True, method="fit")
        self._seen, self._solution, self._completion, self._precision = None, None, None, X.dtype
        with precision_of(self._precision):
            if self.impute is not None:  # from moments: imputed samples vary less than true ones
                self._go_on(X, labels)
                self._seen = self._solution = None
                return self
            self.groups_, places = np.unique(labels, return_inverse=True)
            self.mean_ = _arrays.mean_of(X) if self.center else np.zeros(X.shape[1], X.dtype)
            clients, tables = _arrays.clients_of(X, places, self.mean_ if self.center else None)
            self._describe(self._run(clients), clients, tables, moment_of_samples)
        return self

    @final
    def partial_fit(
        self, X: ArrayOrFrame, y: object = None, groups: ArrayOrFrame | None = None
    ) -> Self:
        """Learn components from new samples and the moments of samples from earlier calls.

        The first call is like `fit`, in double precision whatever the table. Later calls continue
        from the components learned before, with at most `rounds` rounds on means and second moments
        of all samples, a `(d + 1, d + 1)` matrix per client. `forgetting` is the share of the new
        samples. Clients may be new, and clients without new samples stay. `fit` keeps no moments,
        so the next call is a first one again. The first call's model imputes missing entries.

        Args:
            X: new samples as rows, `(n, d)`.
            y: ignored.
            groups: the client of each row, `(n,)`, as in `fit`.

        Returns:
            The estimator.

        Raises:
            ValueError: if parameters, samples or groups are invalid.
        """
        seen = getattr(self, "_seen", None)
        X, labels = self._checked(X, groups, first=seen is None, method="partial_fit")
        if seen is not None and (fault := _groups.other_type(self.groups_, labels)):
            raise ValueError(fault)
        if seen is None:
            self._seen = self._solution = self._completion = None
        self._precision = np.dtype(float)
        with precision_of(self._precision):
            self._go_on(X.astype(float), labels)
        return self

    @final
    def transform(self, X: ArrayOrFrame, groups: ArrayOrFrame | None = None) -> Table:
        """Compute the scores of samples, for the shared and then for the client's local components.

        Local components differ between clients, so local scores are comparable only within one
        client. For a client that was not in `fit`, local components are learned from the given
        samples, with a warning. Without `groups`, local scores are zero, unless there was only one
        client in `fit`; a warning is raised if clients have local components.

        Args:
            X: samples as rows, `(n, d)`.
            groups: the client of each row, `(n,)`.

        Returns:
            Scores, `(n, r)`.

        Raises:
            ValueError: if samples or groups are invalid.
        """
        _, X, parts = self._parted(X, groups)
        if self.local_components_.shape[1] > 0:
            _groups.warn_of_new(groups, parts, self.groups_)
        scores = np.zeros((len(X), self._n_features_out), X.dtype)
        for rows, law in parts:  # samples without a client have fewer scores; others stay zero
            basis = (self._new_law(X[rows]) if law is None else law).basis
            scores[rows, : basis.shape[1]] = X[rows] @ basis.astype(X.dtype)
        return scores

    @final
    def fit_transform(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, X: ArrayOrFrame, y: object = None, groups: ArrayOrFrame | None = None
    ) -> Table:
        """Call `fit`, and return the scores of the same samples."""
        return self.fit(X, y, groups).transform(X, groups)

    @final
    def inverse_transform(self, X: ArrayOrFrame, groups: ArrayOrFrame | None = None) -> Table:
        """Reconstruct samples from scores.

        Args:
            X: scores as rows, `(n, r)`.
            groups: the client of each row, `(n,)`; every client must have been in `fit` or
                `personalize`.

        Returns:
            Samples, `(n, d)`.

        Raises:
            ValueError: if scores are invalid or a client is unknown.
        """
        check_is_fitted(self)
        X = checked(X, dtype=[np.float64, np.float32])
        if X.shape[1] != self._n_features_out:
            raise ValueError(f"X: wanted {self._n_features_out} scores a row, got {X.shape[1]}")
        found = np.zeros((len(X), self.n_features_in_), X.dtype)
        for rows, law in self._groups_of(X, groups):
            if law is None:
                (label, *_) = client_labels(groups, X)[rows]
                raise ValueError(
                    f"groups: {label!r} was not in fit; learn its components by "
                    "personalize(X, groups)"
                )
            found[rows] = X[rows][:, : law.basis.shape[1]] @ law.basis.T
        return found + self.mean_.astype(found.dtype)

    @final
    def score_samples(
        self, X: ArrayOrFrame, groups: ArrayOrFrame | None = None
    ) -> Float[np.ndarray, " n"]:
        """Compute the log-likelihood of each sample.

        A client's samples are normally distributed, with their covariance within its components and
        variance `noise_variance_` in all other directions. For a client that was not in `fit`, each
        half of its samples (every other row) is scored with components learned from the other half.
        Missing entries are left out of the likelihood.

        Args:
            X: samples as rows, `(n, d)`.
            groups: the client of each row, `(n,)`.

        Returns:
            Log-likelihoods, `(n,)`.

        Raises:
            ValueError: if samples or groups are invalid.
        """
        X, completed, parts = self._parted(X, groups)
        found = np.zeros(len(X))
        for rows, law in parts:
            # Scoring samples with components learned from them would favour high ranks.
            halves = [rows] if law is not None or len(rows) < 2 else [rows[::2], rows[1::2]]
            for i, half in enumerate(halves):
                other = law or self._law
                if law is None and len(rows) > 1:
                    other = self._new_law(completed[halves[1 - i]])
                found[half] = other.log_likelihood(X[half])
        return found

    @final
    def score(
        self,
        X: ArrayOrFrame,
        y: object = None,
        groups: ArrayOrFrame | None = None,
        sample_weight: ArrayOrFrame | None = None,
    ) -> float:
        """Compute the mean of `score_samples`, to be maximized in a search over ranks.

        `sample_weight`, `(n,)`, weights the mean. Reconstruction error is not suitable: it
        decreases with every component.
        """
        return float(np.average(self.score_samples(X, groups), weights=sample_weight))

    @final
    def personalize(self, X: ArrayOrFrame, groups: ArrayOrFrame) -> Self:
        """Learn the local components of new clients from their samples; nothing else changes.

        Args:
            X: samples as rows, `(n, d)`.
            groups: the client of each row, `(n,)`; known clients stay unchanged.

        Returns:
            The estimator.

        Raises:
            ValueError: if samples or groups are invalid.
        """
        check_is_fitted(self)
        labels = client_labels(groups, X)
        if fault := _groups.other_type(self.groups_, labels):
            raise ValueError(fault)
        _, X, parts = self._parted(X, groups)
        new = {labels[rows[0]]: self._new_law(X[rows]) for rows, law in parts if law is None}
        known = dict(zip(self.groups_, self._laws, strict=True)) | new
        self.groups_ = np.array(sorted(known))  # as in `fit`, the order of everything else
        self._laws = [known[label] for label in self.groups_]
        first = len(self.components_) if self._beside else 0
        self.local_components_ = np.stack([law.basis[:, first:].T for law in self._laws])
        return self

    # --- internals -----------------------------------------------------------------------------

    def _checked(
        self, X: ArrayOrFrame, groups: ArrayOrFrame | None, *, first: bool, method: str
    ) -> tuple[Table, np.ndarray]:
        """Check parameters, samples and groups; return the samples and their labels."""
        _groups.check_parameters(self, ("rounds", *self._ranks()))
        check_forgetting(self.forgetting)
        check_impute(self.impute)
        self._n_features_out, least = self._sizes()
        # The number of features of later samples is compared with that of the first ones.
        least = max(least, sum(self.impute or ()))
        wanted = {"ensure_min_samples": 2, "ensure_min_features": least} if first else {}
        incomplete = (self.impute if first else self._completion) is not None
        X = checked_samples(self, X, incomplete, reset=first, **wanted)
        if groups is None:
            _groups.warn("got none, so all samples are treated as one client's", method)
        return X, np.zeros(len(X), int) if groups is None else client_labels(groups, X)

    def _go_on(self, X: Table, labels: np.ndarray) -> None:
        """Learn components from moments of new and earlier samples."""
        if self._seen is None and self.impute is not None:
            impute = self._aggregated(Impute(*self.impute), len(np.unique(labels)))
            self._completion = Completion.learned(X, labels, impute, self.center, self._key())
        seen = taken_in(
            on_device(self._seen), X, labels, self.forgetting, self.center, self._completion
        )
        now = summary_of(seen, self.center)
        solution = self._run(now.clients, on_device(self._solution))
        self.groups_, self.mean_ = now.labels, now.mean
        self._seen, self._solution = on_host(seen), on_host(solution)
        self._describe(solution, now.clients, now.moments, moment_of_matrix)

    def _key(self) -> Key[Array, ""]:
        return jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))

    def _aggregated(self, algorithm: Algorithm, clients: int) -> Algorithm:
        return _groups.robust(algorithm, clients) if self.robust else algorithm

    def _run(self, clients: Clients, before: Solution | None = None) -> Solution:
        """Learn components, starting from those of an earlier solution if there is one."""
        options: dict[str, Any] = {"rounds": int(self.rounds), "key": self._key(), "tol": self.tol}
        if self.tol is None and self.stops_at_rounding:
            options["tol"] = 16 * float(np.finfo(self._precision).eps)
        if before is not None:
            return update(before, clients, **options)

        def run(algorithm: Algorithm, **more: Any) -> Solution:
            return fit(self._aggregated(algorithm, len(clients)), clients, **(options | more))

        return self._solved(run, clients)

    def _describe(
        self,
        solution: Solution,
        clients: Clients,
        data: Sequence[np.ndarray] | np.ndarray,
        moment_of: Callable[[np.ndarray, Basis], ScoreMoment],
    ) -> None:
        """Set the attributes from what was learned and each client's data."""
        if self.robust:
            far = aggregation.far_clients(solution, clients.ids)
            self.far_groups_ = self.groups_[np.isin(clients.ids, far)]
        learned = self._learned(solution, clients)
        found = described(learned, data, np.asarray(clients.counts, float), moment_of)
        self._beside, self._laws, self._law = learned.beside, found.laws, found.law
        self.components_ = found.shared.T
        self.local_components_ = found.local.swapaxes(1, 2)
        self._record(solution)
        self.noise_variance_ = found.noise_variance
        self.explained_variance_ratio_ = found.variance_ratio

    def _result(self) -> Personalized:
        local = self.local_components_.swapaxes(1, 2)
        return Personalized(self.components_.T, local if local.size else None)

    def _ranks(self) -> list[str]:
        return [name for name in self.get_params(deep=False) if "rank" in name or "n_comp" in name]

    def _new_law(self, table: Table) -> Normal:
        with precision_of(self._precision):
            local = self._new_components(table)
        if local.size:
            local = local @ axes(local, moment_of_samples(table, local).scores)
        basis = beside(self.components_.T, local) if self._beside else local
        return Normal.fitted(basis, moment_of_samples(table, basis), self.noise_variance_)

    def _parted(self, X: ArrayOrFrame, groups: ArrayOrFrame | None) -> _groups.Parted:
        check_is_fitted(self)
        X = checked_samples(self, X, self._completion is not None, reset=False)
        completed, mean = X, self.mean_.astype(X.dtype)
        if self._completion is not None:
            with precision_of(self._precision):
                labels = None if groups is None else client_labels(groups, X)
                completed = self._completion.completed(X, labels)
        return _groups.Parted(X - mean, completed - mean, self._groups_of(X, groups))

    def _groups_of(self, X: Table, groups: ArrayOrFrame | None) -> list[_groups.Group]:
        has_own = self.local_components_.shape[1] > 0
        return _groups.groups_of(
            X, groups, _groups.KnownClients(self.groups_, self._laws, self._law, has_own)
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.impute is not None
        return tags
