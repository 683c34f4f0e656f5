"""What estimators of clients' rows do with samples, whatever their model is."""

import abc
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, final

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from jaxfed._numbers import precision_of
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import listing, replace_names
from jaxfed.estimators import _groups
from jaxfed.estimators._arrays import checked, client_labels, clients_of
from jaxfed.estimators._groups import Model
from jaxfed.estimators._saved import HasRun

ArrayOrFrame: TypeAlias = Any  # whatever scikit-learn converts: arrays, lists, data frames
Table = Float[np.ndarray, "n d"]


class ClientComponents(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, HasRun):
    """Scores and reconstructions by the clients' models that `fit` of a subclass has set."""

    n_features_in_: int
    scale_: Float[np.ndarray, " d"] | None
    components_: Float[np.ndarray, "r1 d"]
    local_components_: Float[np.ndarray, "m r2 d"]
    groups_: np.ndarray
    _models: list[Any]  # of the clients, in the order of `groups_`
    _anybody: Any  # of samples without a client
    _n_features_out: int

    @abc.abstractmethod
    def _parted(self, X: ArrayOrFrame, groups: ArrayOrFrame | None) -> _groups.Parted:
        """Check samples and groups, and return what the clients' models take."""

    @abc.abstractmethod
    def _new_model(self, table: Table) -> Model:
        """Return the model of a client that was not in `fit`, from its own samples alone."""

    @abc.abstractmethod
    def _local_of(self, model: Any) -> Float[np.ndarray, "r2 d"]:
        """Return the local components of a client's model."""

    @final
    def transform(self, X: ArrayOrFrame, groups: ArrayOrFrame | None = None) -> Table:
        """Compute the scores of samples, for the shared and then for the client's local components.

        Where each component has a shared and a local part, there is one score for both. Local
        components differ between clients, so local scores are comparable only within one client.
        For a client that was not in `fit`, local components are learned from the given samples,
        with a warning. Without `groups`, local components do not count and their scores are zero,
        unless there was only one client in `fit`; a warning is raised if clients have local
        components.

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
        for rows, model in parts:  # samples without a client may have fewer scores
            own = (self._new_model(X[rows]) if model is None else model).scores(X[rows])
            scores[rows, : own.shape[1]] = own
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
        for rows, model in self._groups_of(X, groups):
            if model is None:
                (label, *_) = client_labels(groups, X)[rows]
                raise ValueError(
                    f"groups: {label!r} was not in fit; learn its components by "
                    "personalize(X, groups)"
                )
            found[rows] = model.reconstructed(X[rows])
        scale = getattr(self, "scale_", None)
        if scale is not None:
            found = (found * scale).astype(found.dtype)
        return found + np.asarray(getattr(self, "mean_", 0), found.dtype)

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
        new = {labels[rows[0]]: self._new_model(X[rows]) for rows, model in parts if model is None}
        known = dict(zip(self.groups_, self._models, strict=True)) | new
        self.groups_ = np.array(sorted(known))  # as in `fit`, the order of everything else
        self._models = [known[label] for label in self.groups_]
        self.local_components_ = np.stack([self._local_of(model) for model in self._models])
        return self

    @final
    def components_frame(self) -> Any:
        """Return the clients' local components as a data frame.

        For shared components, use `pandas.DataFrame(model.components_, columns=frame.columns)`.

        Returns:
            A `pandas.DataFrame` with the client and the number of the component as index, and the
            names of features as columns, `x0`, `x1` and so on where `fit` had none. The loadings of
            one client are `frame.loc[client]`.

        Raises:
            ImportError: if pandas is not installed.
            ValueError: if clients have no local components.
        """
        check_is_fitted(self)
        _, rank, d = self.local_components_.shape
        if rank == 0:
            raise ValueError("components_frame: wanted local components, got shared ones alone")
        pandas = require("pandas", extra="sweep")
        rows = pandas.MultiIndex.from_product(
            [self.groups_, range(rank)], names=["client", "component"]
        )
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(d)])
        return pandas.DataFrame(self.local_components_.reshape(-1, d), index=rows, columns=names)

    def get_feature_names_out(self, input_features: ArrayOrFrame | None = None) -> np.ndarray:
        """Return names of the columns of `transform`, such as `personalizedpca_local0`.

        Where there are scores of both shared and local components, names tell which is which.

        Args:
            input_features: ignored, but for their number.

        Returns:
            Names, `(r,)`.

        Raises:
            ValueError: if `input_features` are not as many as the features of `fit`.
        """
        names = super().get_feature_names_out(input_features)
        shared, local = len(self.components_), self.local_components_.shape[1]
        if not local or len(names) != shared + local:  # one kind, or one score for both
            return names
        kinds: Sequence[str] = ["shared"] * shared + ["local"] * local
        places = [*range(shared), *range(local)]
        prefix = type(self).__name__.lower()
        return np.array([f"{prefix}_{x}{i}" for x, i in zip(kinds, places, strict=True)], object)

    @final
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

    @final
    def _groups_of(self, X: Table, groups: ArrayOrFrame | None) -> list[_groups.Group]:
        has_own = self.local_components_.shape[1] > 0
        known = _groups.KnownClients(self.groups_, self._models, self._anybody, has_own)
        return _groups.groups_of(X, groups, known)
