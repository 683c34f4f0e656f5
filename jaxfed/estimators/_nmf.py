"""Integrative NMF with scikit-learn's interface."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from sklearn.utils.validation import check_is_fitted

from jaxfed import nmf
from jaxfed._checks import check_factor, check_whole
from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.personalize import personalize
from jaxfed.core.store.arrays import named
from jaxfed.core.store.saved import DOWNLINK
from jaxfed.estimators import _arrays, _groups
from jaxfed.estimators._arrays import checked_samples
from jaxfed.estimators._components import ArrayOrFrame, Table
from jaxfed.estimators._factors import FactorsOfSamples, Sizes, Start


class Parts(NamedTuple):
    """Non-negative components of one client."""

    shared: Float[np.ndarray, "r d"]
    local: Float[np.ndarray, "r d"]
    penalty: float

    def scores(self, samples: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n r"]:
        """Compute loadings of samples, from their observed entries."""
        with precision_of(samples.dtype):
            fitted = Personalized(*(jnp.asarray(x) for x in (self.shared.T, self.local.T[None])))
            (found,) = nmf.transform(fitted, [samples], penalty=self.penalty)
            return np.asarray(found, samples.dtype)

    def reconstructed(self, scores: Float[np.ndarray, "n r"]) -> Float[np.ndarray, "n d"]:
        """Compute samples from loadings."""
        return scores @ (self.shared + self.local)


class IntegrativeNMF(FactorsOfSamples):
    r"""Non-negative components, each with a shared part and a part of the client's own (LIGER).

    It runs `jaxfed.nmf.INMF` on the rows of each group, which must not be negative: a client's rows
    are approximately \(H_i (W + V_i)\), with W in `components_` and \(V_i\) in
    `local_components_`. `transform` returns the loadings \(H_i\), one column for both parts of a
    component, so that loadings are comparable between clients. With one client, W are
    the components of scikit-learn's `NMF`, but for their lengths.

    Attributes after `fit`:

    - `groups_`: the clients' labels, sorted, `(m,)`; other attributes have the same order.
    - `components_`: the shared parts as rows of unit length, `(r, d)`.
    - `local_components_`: the clients' own parts as rows, `(m, r, d)`.
    - `reconstruction_err_`: the Frobenius norm of what the fit leaves of the observed entries, as
      of scikit-learn's `NMF`.
    - `n_components_`, `n_iter_`: number of components; rounds after the starts.
    - `summary_`, `saved_`: the run in words, and as `jaxfed.load` returns it.

    Components are in no order, and not orthogonal, so there are no shares of variance and no
    likelihood. To choose `n_components` or `penalty`, hide entries of the samples (NaN), and
    compare them with `inverse_transform(transform(X, groups), groups)`.

    Source: Welch et al. (2019), Single-cell multi-omic integration compares and contrasts features
    of brain cell identity, Cell 177.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        penalty: float = 5.0,
        rounds: int = 2000,
        tol: float | None = 1e-5,
        n_init: int = 6,
        random_state: Any = None,
    ):
        """Set up the estimator.

        Args:
            n_components: number of components.
            penalty: weight λ of the penalty of the clients' own parts; large values make clients
                share more.
            rounds: maximum number of rounds.
            tol: stop once further rounds would lower the objective by at most this fraction; None
                runs all rounds.
            n_init: number of starts: non-negative parts of singular vectors, then random ones. With
                more than one, thirty rounds of each come before `rounds` of the best one.
            random_state: a seed or a `numpy.random.RandomState`.
        """
        self.n_components, self.penalty = n_components, penalty
        self.rounds, self.tol, self.n_init = rounds, tol, n_init
        self.random_state = random_state

    def _sizes(self):
        check_whole("n_components", self.n_components)
        check_factor("penalty", self.penalty, single=True)
        return Sizes(int(self.n_components), int(self.n_components))

    def _solved(self, run, tables):
        return run(nmf.INMF(int(self.n_components), float(self.penalty)))

    def _other_start(self, algorithm, shared, key):
        return Start(dataclasses.replace(algorithm, start="random"), None)

    def _start_of(self, result):
        return result

    def _centred(self, X):
        _check_non_negative(X)
        return X

    def _describe(self, solution, tables):
        shared, local = (np.asarray(x, np.float64) for x in solution.result)
        self.components_, self.local_components_ = shared.T, local.swapaxes(1, 2)
        self.n_components_ = self._n_features_out
        penalty = float(self.penalty)
        self._models = [Parts(self.components_, own, penalty) for own in self.local_components_]
        self._anybody = self._models[0]  # whose client is known even without groups, if it is one
        if len(tables) > 1:
            nothing = np.zeros_like(self.components_)
            self._anybody = Parts(self.components_, nothing, penalty)
        found = nmf.transform(solution, list(tables))
        left = [
            table - model.reconstructed(np.asarray(own, float))
            for table, own, model in zip(tables, found, self._models, strict=True)
        ]
        self.reconstruction_err_ = float(np.sqrt(sum(np.nansum(x * x) for x in left)))

    def _parted(self, X: ArrayOrFrame, groups: ArrayOrFrame | None) -> _groups.Parted:
        check_is_fitted(self)
        X = checked_samples(self, X, True, reset=False)
        _arrays.check_entries(X)
        _check_non_negative(X)
        return _groups.Parted(X, X, self._groups_of(X, groups))

    def _new_model(self, table: Table) -> Parts:
        with precision_of(self._precision):
            sent = named(DOWNLINK, jnp.asarray(self.components_))
            clients = Clients.from_samples([table], missing="mask")
            penalty = self._anybody.penalty  # of `fit`, whatever was set afterwards
            algorithm = nmf.INMF(self.n_components_, penalty)
            found = personalize(algorithm, self.saved_._replace(downlink=sent), clients)
        (own,) = np.asarray(found.local, np.float64)
        return Parts(self.components_, own.T, penalty)

    def _local_of(self, model: Parts) -> Float[np.ndarray, "r d"]:
        return model.local

    def _result(self) -> Personalized:
        return Personalized(self.components_.T, self.local_components_.swapaxes(1, 2))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags


def _check_non_negative(X: Table) -> None:
    """Refuse negative samples, in words that scikit-learn's checks look for.

    Raises:
        ValueError: names the least entry.
    """
    negative = X[X < 0]
    if negative.size:
        raise ValueError(
            f"X: wanted non-negative samples, got {negative.min():.3g}. Negative values in data"
        )
