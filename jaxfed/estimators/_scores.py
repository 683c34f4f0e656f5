"""What estimators do with samples once they have components."""

import abc
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, final

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import listing, replace_names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.estimators import _groups
from jaxfed.estimators._arrays import checked, checked_samples, client_labels, clients_of
from jaxfed.estimators._completion import Completion
from jaxfed.estimators._normal import Normal, axes, beside, moment_of_samples
from jaxfed.estimators._saved import HasRun

ArrayOrFrame: TypeAlias = Any  # whatever scikit-learn converts: arrays, lists, data frames
Table = Float[np.ndarray, "n d"]
Bases = Float[np.ndarray, "m d r2"]


class Scores(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, HasRun):
    """Scores, reconstructions and likelihoods by what `fit` of a subclass has set."""

    n_features_in_: int
    components_: Float[np.ndarray, "r1 d"]
    local_components_: Float[np.ndarray, "m r2 d"]
    mean_: Float[np.ndarray, " d"]
    groups_: np.ndarray
    noise_variance_: float
    _precision: Any  # of the table
    _completion: Completion | None
    _laws: list[Normal]
    _law: Normal
    _beside: bool
    _n_features_out: int

    @abc.abstractmethod
    def _new_components(self, tables: Sequence[Table]) -> Bases:
        """Return clients' local components beside `components_`, from their own samples alone."""

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

    def _result(self) -> Personalized:
        local = self.local_components_.swapaxes(1, 2)
        return Personalized(self.components_.T, local if local.size else None)

    def _clients_of(self, X: ArrayOrFrame, groups: ArrayOrFrame | None) -> Clients:
        check_is_fitted(self)
        if groups is None and len(self.groups_) > 1:
            raise ValueError("groups: wanted the label of each row's client, got None")
        _, X, parts = self._parted(X, groups)
        places = np.zeros(len(X), int)
        for i, part in enumerate(parts):
            places[part.rows] = i
        if groups is not None:
            present = np.unique(client_labels(groups, X))
            if not np.array_equal(present, self.groups_):
                wanted, got = (listing([*map(str, x.tolist())]) for x in (self.groups_, present))
                raise ValueError(f"groups: wanted those of fit, {wanted}, got {got}")
        with precision_of(X.dtype):
            return replace_names(clients_of(X, places, None)[0], self.saved_.names)

    def _new_law(self, table: Table) -> Normal:
        with precision_of(self._precision):
            (local,) = self._new_components([table])
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
