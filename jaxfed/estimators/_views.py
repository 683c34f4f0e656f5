"""What estimators of several views of the same entities have in common."""

import abc
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, Self, final

import jax
import numpy as np
import sklearn
from jaxtyping import Array, Float, Key
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from jaxfed import gcca
from jaxfed._checks import check_flag, check_list, check_name, refuse
from jaxfed._numbers import precision_of
from jaxfed._optional import require
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import columns_of, in_columns, replace_names
from jaxfed.estimators._arrays import checked, mean_of
from jaxfed.estimators._components import ArrayOrFrame
from jaxfed.estimators._saved import HasRun

ViewTables = list[np.ndarray]  # of `(n, d_j)`


class ViewEstimator(BaseEstimator, HasRun):
    """Base of estimators that take a list of views, as in `cca-zoo`.

    Attributes after `fit`: `means_`, a list of `(d_j,)` arrays; `n_views_`; `n_iter_`; `summary_`;
    `saved_`, what `jaxfed.load` returns; `feature_names_in_`, if views are data frames, a list of
    the columns of each.
    """

    center: bool
    random_state: Any
    means_: list[np.ndarray]
    n_views_: int

    @abc.abstractmethod
    def _learn(self, tables: ViewTables) -> None:
        """Check the parameters, and learn from checked views; `means_` are known."""

    @abc.abstractmethod
    def _loadings(self) -> list[Float[np.ndarray, "d_j _r"]]:
        """Return each view's loadings or weights, a column for each column of `transform`."""

    @abc.abstractmethod
    def _kinds(self) -> list[list[str]]:
        """Return what the columns of each view's scores are called."""

    @abc.abstractmethod
    def _scores(self, tables: ViewTables) -> list[Float[np.ndarray, "n _r"]]:
        """Compute each view's scores."""

    @abc.abstractmethod
    def _common(self) -> int:
        """Return how many of the first scores views have in common."""

    @final
    def fit(self, views: Sequence[ArrayOrFrame], y: object = None) -> Self:
        """Learn from views, in single precision if all are single.

        Args:
            views: a list of `(n, d_j)` arrays or data frames, with the same entities in the same
                order.
            y: ignored.

        Raises:
            ValueError: if parameters or views are invalid.
        """
        check_flag("center", self.center)
        tables = _checked(views)
        columns = [columns_of(x) for x in views]
        if None not in columns:
            self.feature_names_in_ = columns
        elif hasattr(self, "feature_names_in_"):  # of an earlier fit
            del self.feature_names_in_
        with precision_of(tables[0].dtype):
            self.means_ = [mean_of(x) * self.center for x in tables]
            self.n_views_ = len(tables)
            self._learn(tables)
        return self

    @final
    def transform(self, views: Sequence[ArrayOrFrame]) -> list[Any]:
        """Compute each view's scores, for the entities of `fit` or others.

        Args:
            views: a list of `(n, d_j)` arrays or data frames, whose columns are put in the order of
                those of `fit`.

        Returns:
            A list of `(n, r_j)` arrays; data frames after `set_output(transform="pandas")`.

        Raises:
            ValueError: if the views do not match those of `fit`.
        """
        tables = self._tables(views)
        with precision_of(tables[0].dtype):
            scores = self._scores(tables)
        if self._output() != "pandas":
            return scores
        pandas = require("pandas", extra="sweep")
        return [
            pandas.DataFrame(x, index=getattr(view, "index", None), columns=names)
            for x, view, names in zip(scores, views, self.get_feature_names_out(), strict=True)
        ]

    @final
    def fit_transform(self, views: Sequence[ArrayOrFrame], y: object = None) -> list[Any]:
        """Call `fit`, and return the scores of the same views."""
        return self.fit(views, y).transform(views)

    @final
    def score(self, views: Sequence[ArrayOrFrame], y: object = None) -> float:
        """Compute the mean correlation of two views' scores, over all pairs and components.

        Only scores that views have in common count; without any, it is 0.
        """
        scores = np.stack([np.asarray(x)[:, : self._common()] for x in self.transform(views)])
        if scores.size == 0:
            return 0.0
        scores = scores - scores.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(scores, axis=1, keepdims=True)
        unit = scores / np.where(norms > 0, norms, 1)
        first, second = np.triu_indices(len(unit), 1)
        return float(np.mean(np.sum(unit[first] * unit[second], axis=1)))

    @final
    def get_feature_names_out(self, input_features: object = None) -> list[np.ndarray]:
        """Return names of the columns of each view's scores, with the number of the view.

        Args:
            input_features: ignored.

        Returns:
            A list of arrays of names, `(r_j,)`.
        """
        check_is_fitted(self)
        prefix = type(self).__name__.lower()
        return [
            np.array([f"{prefix}_view{j}_{kind}" for kind in kinds], object)
            for j, kinds in enumerate(self._kinds())
        ]

    @final
    def set_output(self, *, transform: Literal["default", "pandas"] | None = None) -> Self:
        """Choose what `transform` returns: arrays, or data frames with the index of the views.

        Args:
            transform: `"default"` or `"pandas"`; None leaves it as it is.

        Raises:
            ValueError: for other values.
        """
        if transform is not None:
            check_name("transform", transform, ("default", "pandas"))
            self._sklearn_output_config = {"transform": transform}  # which `clone` keeps
        return self

    @final
    def components_frame(self) -> list[Any]:
        """Return each view's loadings, for `FederatedGCCA` weights, as a data frame.

        Returns:
            A list of `pandas.DataFrame`, each with components as index and the names of the view's
            features as columns, `x0`, `x1` and so on where `fit` had none.

        Raises:
            ImportError: if pandas is not installed.
        """
        check_is_fitted(self)
        pandas = require("pandas", extra="sweep")
        features = getattr(self, "feature_names_in_", [None] * self.n_views_)
        return [
            pandas.DataFrame(
                x.T,
                index=pandas.Index(kinds, name="component"),
                columns=[f"x{i}" for i in range(len(x))] if names is None else list(names),
            )
            for x, kinds, names in zip(self._loadings(), self._kinds(), features, strict=True)
        ]

    @final
    def _key(self) -> Key[Array, ""]:
        return jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))

    @final
    def _clients_of(self, X: Sequence[ArrayOrFrame], groups: object) -> Clients:
        if groups is not None:
            raise refuse("groups", "None, since each view is a client", groups)
        tables = self._tables(X)
        with precision_of(tables[0].dtype):
            return replace_names(self._clients(tables), self.saved_.names)

    @final
    def _tables(self, views: Sequence[ArrayOrFrame]) -> ViewTables:
        """Check views for those of `fit`, and put their columns in its order."""
        check_is_fitted(self)
        check_list("views", views, "tables (n, d_j)")
        known = getattr(self, "feature_names_in_", [])
        named = zip_longest(views, known[: len(views)])
        tables = _checked([in_columns(x, own, f"views[{j}]") for j, (x, own) in enumerate(named)])
        if [x.shape[1] for x in tables] != [len(mean) for mean in self.means_]:
            raise ValueError(
                f"views: wanted {[len(mean) for mean in self.means_]} features, "
                f"got {[x.shape[1] for x in tables]}"
            )
        return tables

    @final
    def _clients(self, tables: ViewTables) -> gcca.Views:
        return gcca.Views.from_arrays([x - m for x, m in zip(tables, self.means_, strict=True)])

    @final
    def _output(self) -> str:
        own = getattr(self, "_sklearn_output_config", {})
        return own.get("transform", sklearn.get_config()["transform_output"])


def stacked(parts: Sequence[Float[np.ndarray, "_d _r"]]) -> Float[np.ndarray, "views d r"]:
    """Stack parts, with zero rows and columns up to the largest: runs hold arrays of one shape."""
    rows, columns = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    return np.stack([np.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1]))) for x in parts])


def _checked(views: Sequence[ArrayOrFrame]) -> ViewTables:
    check_list("views", views, "tables (n, d_j)")
    # In double precision, unless all views are single.
    alike = all(getattr(x, "dtype", None) == np.float32 for x in views)
    dtype = np.float32 if alike else np.float64
    tables = [checked(x, dtype=dtype, input_name=f"views[{j}]") for j, x in enumerate(views)]
    if len(tables) < 2:
        raise ValueError("views: wanted at least two, got one")
    check_consistent_length(*tables)
    return tables
