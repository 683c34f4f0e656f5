"""Generalized CCA with the interface of multiview libraries: a list of views."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxfed import gcca
from jaxfed._checks import check_whole
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.fit import fit
from jaxfed.estimators._views import ViewEstimator, stacked
from jaxfed.gcca.factors import factored


class FederatedGCCA(ViewEstimator):
    """Scores on which views of the same entities agree; each view stays with its client.

    It runs `jaxfed.gcca.MaxVar`, started by one round of `jaxfed.gcca.MVLSA`. `fit` and `transform`
    take a list of views, as in `cca-zoo`; the mean of the views' scores is the common
    representation.

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

    def _learn(self, tables):
        for name in ("n_components", "rounds"):
            check_whole(name, getattr(self, name))
        clients, key = self._clients(tables), self._key()
        rank = int(self.n_components)
        algorithm = gcca.MaxVar(rank, solver=self.solver, ridge=self.ridge)
        tol = self.tol
        if self.solver != "gradient":  # whose steps take the views themselves
            clients = factored(clients)
            tol = max(1e-10, 16 * float(np.finfo(tables[0].dtype).eps)) if tol is None else tol
        options = {"rounds": int(self.rounds), "key": key, "tol": tol}
        start = fit(gcca.MVLSA(rank), clients, rounds=1, key=key)
        solution = fit(algorithm, clients, warm_start=start, **options)
        self._record(solution)
        self.representation_ = np.asarray(solution.result.shared, np.float64)
        weights = np.asarray(solution.result.local, np.float64)
        self.weights_ = [q[: x.shape[1]] for q, x in zip(weights, tables, strict=True)]

    def _loadings(self):
        return self.weights_

    def _kinds(self):
        return [[f"{i}" for i in range(self._common())]] * self.n_views_

    def _scores(self, tables):
        return [np.asarray(x) for x in gcca.transform(self._result(), self._clients(tables))]

    def _common(self):
        return self.representation_.shape[1]

    def _result(self) -> Personalized:
        local = jnp.asarray(stacked(self.weights_))
        return Personalized(jnp.asarray(self.representation_), local)
