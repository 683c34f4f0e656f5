"""What the estimators of principal components have in common."""

import abc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np
from jaxtyping import ArrayLike, Float
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from jaxfed._names import caller
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import check_flag, check_whole
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.estimators._arrays import checked, checked_samples
from jaxfed.estimators._normal import Normal, noise_outside, principal

Table = Float[np.ndarray, "n d"]
Basis = Float[np.ndarray, "d r"]


class Learned(NamedTuple):
    """What a model learned."""

    shared: Basis  # in the order of their variance; of a sample whose client is not known
    own: Float[np.ndarray, "m d r2"]  # what each client has beside them, or in place of them
    beside: bool  # which of both
    solution: Solution


class ClientPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, abc.ABC):
    """What the estimators have in common; a subclass says what is learned from clients.

    Attributes of a fitted one:

    - `groups_`: the clients' labels, sorted, `(m,)`; what follows is in this order.
    - `components_`: the shared components as rows, `(r1, d)`, for a prior its centre.
    - `local_components_`: the clients' own as rows, `(m, r2, d)`; r2 is 0 where nothing is local.
    - `mean_`: what is subtracted from samples, `(d,)`.
    - `explained_variance_ratio_`: of each column of `transform`, its share of the variance, the
      mean over the clients.
    - `noise_variance_`: in each direction outside of a client's components.
    - `n_iter_`: rounds that ran.
    - `summary_`: what ran, how it ended and what it cost.
    """

    rounds: int
    center: bool
    random_state: Any
    n_features_in_: int

    @abc.abstractmethod
    def _columns(self) -> int:
        """How many scores a sample has."""

    @abc.abstractmethod
    def _spare(self) -> int:
        """How many features more than scores there must be."""

    @abc.abstractmethod
    def _learned(self, run: Callable[..., Solution], tables: list[Table]) -> Learned:
        """Learn, with `run(algorithm)`."""

    @abc.abstractmethod
    def _newcomer(self, table: Table) -> Basis:
        """The best own components for samples of a client that is not known, or none."""

    # --- scikit-learn's methods --------------------------------------------------------------

    @final
    def fit(self, X: ArrayLike, y: None = None, groups: ArrayLike | None = None) -> Self:
        """Learn components.

        Args:
            X: samples as rows, `(n, d)`.
            y: nothing.
            groups: whose each row is, `(n,)`, all numbers or all names. Without them all rows are
                of one client, and a warning says so; one label for all rows is the way without.

        Returns:
            The estimator.

        Raises:
            ValueError: for parameters or samples that do not fit.
        """
        for name in ("rounds", *self._ranks()):
            check_whole(name, getattr(self, name))
        check_flag("center", self.center)
        wanted = self._columns() + self._spare()
        X = checked_samples(self, X, reset=True, ensure_min_samples=2, ensure_min_features=wanted)
        if groups is None:
            _warn("got none, so that all samples are taken for one client's", "fit")
        labels = np.zeros(len(X), int) if groups is None else _labels(groups, X)
        self.groups_, places = np.unique(labels, return_inverse=True)
        self.mean_ = X.mean(axis=0) if self.center else np.zeros(X.shape[1])
        tables = [X[places == i] - self.mean_ for i in range(len(self.groups_))]

        clients = Clients.from_samples(tables)
        key = jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))
        run = partial(fit, clients=clients, rounds=int(self.rounds), key=key)
        shared, own, beside, solution = self._learned(run, tables)
        shared = principal(shared, tables)
        own = np.stack([principal(v, [x]) for v, x in zip(own, tables, strict=True)])

        self.components_, self.local_components_ = shared.T, own.swapaxes(1, 2)
        self._beside = beside
        self._n_features_out = self._columns()
        self.n_iter_, self.summary_ = solution.rounds, solution.summary()
        bases = np.stack([self._basis(own_part) for own_part in own])
        self.noise_variance_ = noise_outside(bases, tables)
        self._laws = [
            Normal.fitted(basis, x, self.noise_variance_)
            for basis, x in zip(bases, tables, strict=True)
        ]
        together = np.concatenate(tables)
        self._law = Normal.fitted(shared, together, noise_outside(shared[None], [together]))
        if len(tables) == 1:
            (self._law,) = self._laws
        total = np.mean([np.sum(x**2) / len(x) for x in tables])
        variances = np.mean([np.diagonal(law.within) for law in self._laws], axis=0)
        self.explained_variance_ratio_ = variances / total if total > 0 else 0 * variances
        return self

    @final
    def transform(self, X: ArrayLike, groups: ArrayLike | None = None) -> Table:
        """The scores of samples, in the shared components and then in their client's own.

        The own components of different clients are different ones, so their columns tell samples
        of one client apart and not clients. A client that was not there in `fit` gets own
        components from the samples at hand. Without `groups`, samples have scores in the shared
        components alone, and zeros for the others, unless all were of one client in `fit`; where
        clients have components of their own, a warning says so.

        Args:
            X: samples as rows, `(n, d)`.
            groups: whose each row is, `(n,)`.

        Returns:
            Scores, `(n, r)`.

        Raises:
            ValueError: for samples or groups that do not fit.
        """
        X, parts = self._parted(X, groups)
        scores = np.zeros((len(X), self._n_features_out), X.dtype)
        for rows, law in parts:
            basis = (self._of_newcomer(X[rows]) if law is None else law).basis
            scores[rows, : basis.shape[1]] = X[rows] @ basis
        return scores

    @final
    def fit_transform(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, X: ArrayLike, y: None = None, groups: ArrayLike | None = None
    ) -> Table:
        """`fit`, and the scores of the same samples."""
        return self.fit(X, y, groups).transform(X, groups)

    @final
    def inverse_transform(self, X: ArrayLike, groups: ArrayLike | None = None) -> Table:
        """The samples that scores stand for.

        Args:
            X: scores as rows, `(n, r)`.
            groups: whose each row is, `(n,)`, all of them known: those that were there in `fit`,
                or have been given to `personalize`.

        Returns:
            Samples, `(n, d)`.

        Raises:
            ValueError: for scores that do not fit, and groups that are not known.
        """
        check_is_fitted(self)
        X = checked(X, dtype=[np.float64, np.float32])
        if X.shape[1] != self._n_features_out:
            raise ValueError(f"X: wanted {self._n_features_out} scores a row, got {X.shape[1]}")
        found = np.zeros((len(X), self.n_features_in_), X.dtype)
        for rows, law in self._laws_of(X, groups):
            if law is None:
                (label, *_) = _labels(groups, X)[rows]
                raise ValueError(
                    f"groups: {label!r} was not there in fit; personalize(X, groups) makes its "
                    "components known"
                )
            found[rows] = X[rows][:, : law.basis.shape[1]] @ law.basis.T
        return found + self.mean_

    @final
    def score_samples(self, X: ArrayLike, groups: ArrayLike | None = None) -> Table:
        """The log-likelihood of each sample.

        Under a normal law with the covariance that a client's samples have within its components,
        and the same variance `noise_variance_` in all other directions. Samples of a client that
        was not there in `fit` are judged by what the other half of them tells, every other row.

        Args:
            X: samples as rows, `(n, d)`.
            groups: whose each row is, `(n,)`.

        Returns:
            `(n,)`.

        Raises:
            ValueError: for samples or groups that do not fit.
        """
        X, parts = self._parted(X, groups)
        found = np.zeros(len(X))
        for rows, law in parts:
            halves = [rows] if law is not None or len(rows) < 2 else [rows[::2], rows[1::2]]
            for i, half in enumerate(halves):
                own = law or (self._law if len(rows) < 2 else self._of_newcomer(X[halves[1 - i]]))
                found[half] = own.log_likelihood(X[half])
        return found

    @final
    def score(self, X: ArrayLike, y: None = None, groups: ArrayLike | None = None) -> float:
        """The mean of `score_samples`, which a search over ranks maximizes.

        The reconstruction error will not do for that: it falls with every component.
        """
        return float(np.mean(self.score_samples(X, groups)))

    @final
    def personalize(self, X: ArrayLike, groups: ArrayLike) -> Self:
        """Make new clients known: their own components, from their samples; nothing else moves.

        Args:
            X: samples as rows, `(n, d)`.
            groups: whose each row is, `(n,)`; clients that are known already stay as they are.

        Returns:
            The estimator.

        Raises:
            ValueError: for samples or groups that do not fit.
        """
        check_is_fitted(self)
        if (said := self._other_type(_labels(groups, X))) is not None:
            raise ValueError(f"groups: {said}")
        X, parts = self._parted(X, groups)
        labels = _labels(groups, X)
        new = {labels[rows[0]]: self._of_newcomer(X[rows]) for rows, law in parts if law is None}
        known = dict(zip(self.groups_, self._laws, strict=True)) | new
        self.groups_ = np.array(sorted(known))
        self._laws = [known[label] for label in self.groups_]
        first = len(self.components_) if self._beside else 0
        self.local_components_ = np.stack([law.basis[:, first:].T for law in self._laws])
        return self

    # --- what they are made of ---------------------------------------------------------------

    def _ranks(self) -> list[str]:
        return [name for name in self.get_params(deep=False) if "rank" in name or "n_comp" in name]

    def _basis(self, own: Basis) -> Basis:
        """All components of a client."""
        shared = np.asarray(self.components_).T
        return np.concatenate([shared, own], axis=1) if self._beside else own

    def _of_newcomer(self, table: Table) -> Normal:
        basis = self._basis(principal(self._newcomer(table), [table]))
        return Normal.fitted(basis, table, self.noise_variance_)

    def _parted(
        self, X: ArrayLike, groups: ArrayLike | None
    ) -> tuple[Table, list[tuple[np.ndarray, Normal | None]]]:
        check_is_fitted(self)
        X = checked_samples(self, X, reset=False)
        return X - self.mean_.astype(X.dtype), list(self._laws_of(X, groups))

    def _other_type(self, labels: np.ndarray) -> str | None:
        """What to say of labels that cannot be known, 0 being another label than "0"."""
        wanted, got = _kind(self.groups_), _kind(labels)
        return None if wanted == got else f"wanted {wanted}, as in fit, got {got}"

    def _laws_of(
        self, X: Table, groups: ArrayLike | None
    ) -> Iterator[tuple[np.ndarray, Normal | None]]:
        """The rows of each client and its law, None where it is not known."""
        if groups is None:
            if len(self.groups_) > 1 and self.local_components_.shape[1]:
                _warn(
                    f"got none, so that samples are of none of the {len(self.groups_)} clients, "
                    "without components of their own",
                    "transform", "score",
                )  # fmt: skip
            yield np.arange(len(X)), self._law
            return
        labels, places = np.unique(_labels(groups, X), return_inverse=True)
        if (said := self._other_type(labels)) is not None:
            warnings.warn(
                f"groups: {said}, so that all samples are of clients that were not there",
                stacklevel=caller(),
            )
        known = dict(zip(self.groups_, self._laws, strict=True))
        for i, label in enumerate(labels):
            yield np.flatnonzero(places == i), known.get(label)


def _labels(groups: ArrayLike | None, X: ArrayLike) -> np.ndarray:
    # Of a list, NumPy would make texts of numbers beside texts.
    given: Any = groups if hasattr(groups, "dtype") else np.asarray(groups, object)
    if np.ndim(given) != 1:
        raise ValueError(f"groups: wanted one label for each row, got shape {np.shape(given)}")
    labels = checked(given, ensure_2d=False, dtype=None, input_name="groups")
    if labels.dtype == object:
        kinds = {next((k for k in (Real, str) if isinstance(x, k)), type(x)) for x in labels}
        if len(kinds) > 1 or type(None) in kinds:
            names = ", ".join(sorted({type(label).__name__ for label in labels}))
            raise ValueError(
                f"groups: wanted labels that are all numbers or all names, got {names}"
            )
        if kinds <= {Real, str}:
            labels = np.asarray(labels.tolist())
    check_consistent_length(X, labels)
    return labels


def _kind(labels: np.ndarray) -> str:
    return "numbers" if labels.dtype.kind in "biuf" else "names"


def _warn(what: str, *methods: str) -> None:
    requests = ", ".join(f"set_{method}_request(groups=True)" for method in methods)
    warnings.warn(
        f"groups: {what}; give the label of each row's client. Pipelines and searches pass it on "
        f"after sklearn.set_config(enable_metadata_routing=True) and the estimator's {requests}",
        stacklevel=caller(),
    )
