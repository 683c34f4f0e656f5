"""Generalized CCA with the interface of multiview libraries: a list of views."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from jaxfed import gcca
from jaxfed._checks import check_flag, check_list, check_whole, refuse
from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import columns_of, in_columns, replace_names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.fit import fit
from jaxfed.estimators._arrays import checked, mean_of
from jaxfed.estimators._saved import HasRun
from jaxfed.estimators._scores import ArrayOrFrame
from jaxfed.gcca.factors import factored


class FederatedGCCA(BaseEstimator, HasRun):
    """Scores on which views of the same entities agree; each view stays with its client.

    It runs `jaxfed.gcca.MaxVar`, started by one round of `jaxfed.gcca.MVLSA`. `fit` and `transform`
    take a list of views, as in `cca-zoo`.

    Attributes after `fit`: `weights_`, a list of `(d_j, r)` arrays; `means_`, a list of `(d_j,)`
    arrays; `representation_`, the common representation of the entities, `(n, r)`, orthonormal;
    `n_views_`; `n_iter_`; `summary_`; `saved_`, what `jaxfed.load` returns; `feature_names_in_`, if
    views are data frames, a list of the columns of each.

    Source: Shrestha & Fu (2023), Communication-efficient federated linear and deep generalized
    canonical correlation analysis.
    """

    solver: Literal["gradient", "exact"] | None

    def __init__(
        self,
        n_components: int = 1,
        *,
        ridge: float = 0.0,
        solver: Literal["gradient", "exact"] | None = None,
        rounds: int = 50,
        tol: float | None = None,
        center: bool = True,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            n_components: number of components.
            ridge: weight of the maps' squared norms; needed for views with as many features as
                entities.
            solver: a client's update in each round; by default that of `jaxfed.gcca.MaxVar`.
            rounds: maximum number of rounds.
            tol: stop once further rounds would lower the objective by at most this fraction; None
                stops at 1e-10, or once only rounding errors would change; with gradient steps,
                it runs all rounds.
            center: whether to subtract each view's means.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.n_components, self.ridge, self.solver = n_components, ridge, solver
        self.rounds, self.tol, self.center = rounds, tol, center
        self.random_state = random_state

    def fit(self, views: Sequence[ArrayOrFrame], y: object = None) -> Self:
        """Learn maps.

        Args:
            views: a list of `(n, d_j)` arrays or data frames, with the same entities in the same
                order.
            y: ignored.

        Raises:
            ValueError: if parameters or views are invalid.
        """
        for name in ("n_components", "rounds"):
            check_whole(name, getattr(self, name))
        check_flag("center", self.center)
        tables = _checked(views)
        columns = [columns_of(x) for x in views]
        if None not in columns:
            self.feature_names_in_ = columns
        elif hasattr(self, "feature_names_in_"):  # of an earlier fit
            del self.feature_names_in_
        with precision_of(tables[0].dtype):
            self._fit(tables)
        return self

    def _fit(self, tables: list[np.ndarray]) -> None:
        self.means_ = [mean_of(x) * self.center for x in tables]
        clients = self._views(tables)
        key = jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))
        rank = int(self.n_components)
        algorithm = gcca.MaxVar(rank, solver=self.solver, ridge=self.ridge)
        tol = self.tol
        if self.solver != "gradient":  # whose steps take the views themselves
            clients = factored(clients)
            tol = max(1e-10, 16 * float(np.finfo(tables[0].dtype).eps)) if tol is None else tol
        options = {"rounds": int(self.rounds), "key": key, "tol": tol}
        start = fit(gcca.MVLSA(rank), clients, rounds=1, key=key)
        solution = fit(algorithm, clients, warm_start=start, **options)
        self.n_views_ = len(tables)
        self._record(solution)
        self.representation_ = np.asarray(solution.result.shared, np.float64)
        self.weights_ = [
            np.asarray(q[: x.shape[1]], np.float64)
            for q, x in zip(solution.result.local, tables, strict=True)
        ]

    def transform(self, views: Sequence[ArrayOrFrame]) -> list[Float[np.ndarray, "n r"]]:
        """Compute each view's scores, for the entities of `fit` or others.

        Args:
            views: a list of `(n, d_j)` arrays or data frames, whose columns are put in the order of
                those of `fit`.

        Returns:
            A list of `(n, r)` arrays, whose mean is the common representation.

        Raises:
            ValueError: if the views do not match those of `fit`.
        """
        tables = self._tables(views)
        with precision_of(tables[0].dtype):
            return [np.asarray(x) for x in gcca.transform(self._result(), self._views(tables))]

    def fit_transform(
        self, views: Sequence[ArrayOrFrame], y: object = None
    ) -> list[Float[np.ndarray, "n r"]]:
        """Call `fit`, and return the scores of the same views."""
        return self.fit(views, y).transform(views)

    def score(self, views: Sequence[ArrayOrFrame], y: object = None) -> float:
        """Compute the mean correlation of two views' scores, over all pairs and components."""
        scores = np.stack(self.transform(views))
        scores = scores - scores.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(scores, axis=1, keepdims=True)
        unit = scores / np.where(norms > 0, norms, 1)
        first, second = np.triu_indices(len(unit), 1)
        return float(np.mean(np.sum(unit[first] * unit[second], axis=1)))

    def _result(self) -> Personalized:
        # Runs hold maps of one shape: those of narrow views end with zero rows.
        widest = max(map(len, self.weights_))
        local = np.stack([np.pad(q, ((0, widest - len(q)), (0, 0))) for q in self.weights_])
        return Personalized(jnp.asarray(self.representation_), jnp.asarray(local))

    def _clients_of(self, X: Sequence[ArrayOrFrame], groups: object) -> Clients:
        if groups is not None:
            raise refuse("groups", "None, since each view is a client", groups)
        tables = self._tables(X)
        with precision_of(tables[0].dtype):
            return replace_names(self._views(tables), self.saved_.names)

    def _tables(self, views: Sequence[ArrayOrFrame]) -> list[np.ndarray]:
        """Check views for those of `fit`, and put their columns in its order."""
        check_is_fitted(self)
        check_list("views", views, "tables (n, d_j)")
        known = getattr(self, "feature_names_in_", [])
        named = zip_longest(views, known[: len(views)])
        tables = _checked([in_columns(x, own, f"views[{j}]") for j, (x, own) in enumerate(named)])
        if [x.shape[1] for x in tables] != [len(q) for q in self.weights_]:
            raise ValueError(
                f"views: wanted {[len(q) for q in self.weights_]} features, "
                f"got {[x.shape[1] for x in tables]}"
            )
        return tables

    def _views(self, tables: list[np.ndarray]) -> gcca.Views:
        return gcca.Views.from_arrays([x - m for x, m in zip(tables, self.means_, strict=True)])


def _checked(views: Sequence[ArrayOrFrame]) -> list[np.ndarray]:
    check_list("views", views, "tables (n, d_j)")
    # In double precision, unless all views are single.
    alike = all(getattr(x, "dtype", None) == np.float32 for x in views)
    dtype = np.float32 if alike else np.float64
    tables = [checked(x, dtype=dtype, input_name=f"views[{j}]") for j, x in enumerate(views)]
    if len(tables) < 2:
        raise ValueError("views: wanted at least two, got one")
    check_consistent_length(*tables)
    return tables
