"""What estimators with orthonormal components do with samples: scores, and likelihoods."""

import abc
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Float
from sklearn.utils.validation import check_is_fitted

from jaxfed._numbers import precision_of
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.estimators import _groups
from jaxfed.estimators._arrays import checked_samples
from jaxfed.estimators._components import ArrayOrFrame, ClientComponents, Table
from jaxfed.estimators._normal import Normal, axes, beside, moment_of_samples

Bases = Float[np.ndarray, "m d r2"]


class Scores(ClientComponents):
    """Scores and reconstructions by orthonormal components of centred, maybe scaled, samples."""

    mean_: Float[np.ndarray, " d"]
    noise_variance_: float
    _precision: Any  # of the table
    _models: list[Normal]
    _beside: bool
    explained_variance_: Float[np.ndarray, " r"]
    whiten: bool = False

    @abc.abstractmethod
    def _new_components(self, tables: Sequence[Table]) -> Bases:
        """Return clients' local components beside `components_`, from their own samples alone."""

    @property
    @abc.abstractmethod
    def _takes_missing(self) -> bool:
        """Whether samples may have missing entries."""

    @abc.abstractmethod
    def _completed(
        self, X: Table, groups: ArrayOrFrame | None, parts: Sequence[_groups.Group]
    ) -> Table:
        """Return samples with values for what is missing, or not believed; the same if nothing is.

        Args:
            X: samples as rows, NaN where entries are missing.
            groups: the client of each row.
            parts: the rows of each client, and its model.
        """

    @final
    def _new_model(self, table: Table) -> Normal:
        with precision_of(self._precision):
            (local,) = self._new_components([table])
        if local.size:
            local = local @ axes(local, moment_of_samples(table, local).scores)
        basis = beside(self.components_.T, local) if self._beside else local
        law = Normal.fitted(basis, moment_of_samples(table, basis), self.noise_variance_)
        # As of the clients that were in `fit`, whatever was set afterwards.
        return law if self._models[0].units is None else self._whitened(law)

    @final
    def _whitened(self, law: Normal) -> Normal:
        """Give scores a mean square of one."""
        units = np.sqrt(np.diagonal(law.within))
        if self._beside:  # shared scores have one unit for all clients
            shared = self.explained_variance_[: len(self.components_)]
            units[: len(shared)] = np.sqrt(np.maximum(shared, self.noise_variance_))
        return law._replace(units=units)

    @final
    def _local_of(self, model: Normal) -> Float[np.ndarray, "r2 d"]:
        return model.basis[:, len(self.components_) if self._beside else 0 :].T

    @final
    def _result(self) -> Personalized:
        local = self.local_components_.swapaxes(1, 2)
        return Personalized(self.components_.T, local if local.size else None)

    @final
    def _parted(self, X: ArrayOrFrame, groups: ArrayOrFrame | None) -> _groups.Parted:
        check_is_fitted(self)
        X = checked_samples(self, X, self._takes_missing, reset=False)
        parts = self._groups_of(X, groups)
        with precision_of(self._precision):
            completed = self._completed(X, groups, parts)
        mean, scale = self.mean_.astype(X.dtype), getattr(self, "scale_", None)

        def moved(samples: Table) -> Table:
            centred = samples - mean
            return centred if scale is None else (centred / scale).astype(X.dtype)

        own = moved(X)
        return _groups.Parted(own, own if completed is X else moved(completed), parts)


class Likelihoods(Scores):
    """Likelihoods of samples, which are normally distributed about `mean_`."""

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
                other = law or self._anybody
                if law is None and len(rows) > 1:
                    other = self._new_model(completed[halves[1 - i]])
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
