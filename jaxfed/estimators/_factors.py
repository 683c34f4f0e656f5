"""What the estimators of samples as products of non-negative or sparse factors have in common."""

import abc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.utils import check_random_state

from jaxfed._checks import check_whole
from jaxfed._numbers import precision_of
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.estimators import _arrays, _groups
from jaxfed.estimators._arrays import checked_samples
from jaxfed.estimators._components import ArrayOrFrame, ClientComponents, Table
from jaxfed.estimators._starts import best_of
from jaxfed.multi_start import ROUNDS


class Sizes(NamedTuple):
    """Numbers that follow from checked parameters."""

    scores: int
    features: int  # at least


class Start(NamedTuple):
    """What a run starts from."""

    algorithm: Algorithm
    warm_start: Personalized | None


class FactorsOfSamples(ClientComponents):
    """Base of estimators whose clients' rows may have missing entries (NaN)."""

    rounds: int
    tol: float | None
    n_init: int
    random_state: Any

    @abc.abstractmethod
    def _sizes(self) -> Sizes:
        """Check the parameters."""

    @abc.abstractmethod
    def _solved(self, run: Callable[..., Solution], tables: Sequence[Table]) -> Solution:
        """Learn factors of each client's samples by calling `run(algorithm, start=None)`."""

    @abc.abstractmethod
    def _other_start(
        self, algorithm: Algorithm, shared: Float[Array, "d r1"], key: Key[Array, ""]
    ) -> Start:
        """Return a random start, for shared components of this shape."""

    @abc.abstractmethod
    def _start_of(self, result: Personalized) -> Personalized:
        """Return what of a result to go on from."""

    @abc.abstractmethod
    def _centred(self, X: Table) -> Table:
        """Check samples, and subtract what is not of the model."""

    @abc.abstractmethod
    def _describe(self, solution: Solution, tables: Sequence[Table]) -> None:
        """Set the attributes from what was learned and each client's samples."""

    @final
    def fit(self, X: ArrayOrFrame, y: object = None, groups: ArrayOrFrame | None = None) -> Self:
        """Learn components, in the precision of the table: double, but for `float32`.

        Args:
            X: samples as rows, `(n, d)`; NaN marks missing entries, which do not count.
            y: ignored.
            groups: the client of each row, `(n,)`, all numbers or all names. Without groups, all
                rows belong to one client, with a warning; give all rows one label to avoid it.

        Returns:
            The estimator.

        Raises:
            ValueError: if parameters, samples or groups are invalid.
        """
        check_whole("rounds", self.rounds)
        check_whole("n_init", self.n_init)
        self._n_features_out, least = self._sizes()
        wanted = {"ensure_min_samples": 2, "ensure_min_features": least}
        X = checked_samples(self, X, True, reset=True, **wanted)
        _arrays.check_entries(X)
        labels = _groups.labels_of(groups, X, "fit")
        _arrays.check_energies(X, labels)
        self._precision = X.dtype
        with precision_of(self._precision):
            X = self._centred(X)
            self.groups_, places = np.unique(labels, return_inverse=True)
            if np.isnan(X).any():
                tables = [X[rows] for rows in rows_of_each(places)]
                clients = Clients.from_samples(tables, missing="mask")
            else:
                clients, tables = _arrays.clients_of(X, places, None)
            run = partial(self._run, clients)
            solution = self._solved(run, tables)
            self._describe(solution, tables)
            self._record(solution)
        return self

    @final
    def fit_transform(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, X: ArrayOrFrame, y: object = None, groups: ArrayOrFrame | None = None
    ) -> Table:
        """Call `fit`, and return the scores of the same samples."""
        return self.fit(X, y, groups).transform(X, groups)

    @final
    def _key(self) -> Key[Array, ""]:
        return jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))

    @final
    def _run(
        self, clients: Clients, algorithm: Algorithm, start: Personalized | None = None
    ) -> Solution:
        """Run an algorithm from a start, by default the best of several ones."""
        options: dict[str, Any] = {"rounds": int(self.rounds), "tol": self.tol}
        key = self._key()
        if start is None and self.n_init > 1:
            tried = [fit(algorithm, clients, rounds=ROUNDS, key=key)]
            shared = tried[0].result.shared
            # One after the other: one program of all starts takes longer to compile.
            for one in jax.random.split(key, int(self.n_init) - 1):
                model, begin = self._other_start(algorithm, shared, one)
                tried.append(fit(model, clients, rounds=ROUNDS, key=one, warm_start=begin))
            start = self._start_of(best_of(tried).result)
        return fit(algorithm, clients, warm_start=start, key=key, **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags
