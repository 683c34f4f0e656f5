"""The base class of the PCA estimators."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self, final

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.utils import check_random_state

from jaxfed import aggregation, inference
from jaxfed._checks import check_name, is_whole, refuse
from jaxfed._numbers import precision_of
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.units import exceed_single_precision
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.core.run.update import update
from jaxfed.estimators import _arrays, _groups, _release
from jaxfed.estimators._arrays import checked_samples, client_labels
from jaxfed.estimators._completion import Completion, Imputed, impute_of
from jaxfed.estimators._components import ArrayOrFrame, Table
from jaxfed.estimators._normal import (
    Learned,
    ScoreMoment,
    described,
    moment_of_matrix,
    moment_of_samples,
)
from jaxfed.estimators._saved import on_device, on_host
from jaxfed.estimators._scores import Likelihoods
from jaxfed.estimators._stream import check_forgetting, summary_of, taken_in
from jaxfed.privacy.ledger import Ledger

Basis = Float[np.ndarray, "d _r"]


class ClientPCA(Likelihoods):
    """Base of the PCA estimators.

    Attributes after `fit` or `partial_fit`:

    - `groups_`: the clients' labels, sorted, `(m,)`; other attributes have the same order.
    - `n_components_`, or `shared_rank_` and `local_rank_`: the numbers of components.
    - `components_`: the shared components, or the centre of the prior, as rows, `(r1, d)`.
    - `local_components_`: the clients' local components as rows, `(m, r2, d)`; r2 may be 0.
    - `mean_`: what is subtracted from samples, `(d,)`: their mean; with `robust=True`, the median
      of the clients' means.
    - `scale_`: what samples minus `mean_` are divided by, `(d,)`, in double precision; None with
      `scale="none"`. All other attributes, scores and likelihoods are those of scaled samples, as
      in scikit-learn's `make_pipeline(StandardScaler(), PCA())`.
    - `explained_variance_ratio_`: for each column of `transform`, the sum of its squares over all
      samples, divided by that of the samples minus `mean_`: as of scikit-learn's `PCA`.
    - `explained_variance_`: the mean of the same squares, before `whiten`.
    - `noise_variance_`: variance of all samples in a direction outside their client's components.
    - `n_iter_`, `summary_`, `saved_`: rounds; the run in words, and as `jaxfed.load` returns it.
    - `far_groups_`: with `robust=True`, the labels of clients that were far from the others.
    - `guarantee_`: what `epsilon` guarantees, a `jaxfed.privacy.Guarantee`; None without it.

    With `epsilon`, the guarantee covers `components_` (and `prior_variance_`), and no other
    attribute. `local_components_` and `transform` come from `components_` and the client's own
    rows, without noise; `explained_variance_ratio_`, `noise_variance_` and likelihoods from the
    rows of all clients. So hand out `components_`, and neither these nor the fitted estimator.
    """

    rounds: int
    robust: bool = False
    bootstrap: int = 0
    epsilon: float | None = None
    delta: float = 1e-5
    noise: Literal["jax", "opendp"] = "jax"
    ledger: Ledger | None = None
    semidefinite: ClassVar[bool] = False  # whether the model needs such moments of a release
    center: bool
    scale: Literal["none", "shared"]
    forgetting: float | None
    impute: tuple[int, int] | Literal["auto"] | None
    tol: float | None = None
    stops_at_rounding: ClassVar[bool] = False  # without a tolerance
    random_state: Any
    _completion: Completion | None

    @abc.abstractmethod
    def _sizes(self) -> tuple[int, int]:
        """Return the number of scores and the least number of features, for checked parameters."""

    @abc.abstractmethod
    def _numbers(self, clients: Clients, *given: float) -> Sequence[int]:
        """Return numbers of components where some are given as shares of the variance."""

    @abc.abstractmethod
    def _solved(self, run: Callable[..., Solution], clients: Clients) -> Solution:
        """Learn components by calling `run(algorithm)`."""

    @abc.abstractmethod
    def _learned(self, solution: Solution, clients: Clients) -> Learned:
        """Return the components of a solution."""

    # --- scikit-learn's methods --------------------------------------------------------------

    @final
    def fit(
        self,
        X: ArrayOrFrame,
        y: object = None,
        groups: ArrayOrFrame | None = None,
        person: ArrayOrFrame | None = None,
        sample_weight: ArrayOrFrame | None = None,
    ) -> Self:
        """Learn components, in the precision of the table: double, but for `float32`.

        With weights, it is double throughout.

        Args:
            X: samples as rows, `(n, d)`.
            y: ignored.
            groups: the client of each row, `(n,)`, all numbers or all names. Without groups, all
                rows belong to one client, with a warning; give all rows one label to avoid it.
            person: with `epsilon`, the person whose row each is, `(n,)`, all numbers or all names;
                by default, each row is another person's.
            sample_weight: how often each row counts, `(n,)`, not negative: rows of weight two count
                as if they were there twice. `fit` then learns from the clients' second moments,
                `(d + 1, d + 1)` each, which excludes `epsilon`, `impute` and `bootstrap`. Where
                clients count equally, a client's weights matter only relative to each other.

        Returns:
            The estimator.

        Raises:
            ValueError: if parameters, samples, groups, persons or weights are invalid, or `epsilon`
                does not cover what was asked. This is said before anything is released.
        """
        _release.check(self, person)
        X, labels = self._checked(X, groups, first=True, method="fit")
        self._seen, self._solution, self._completion, self._precision = None, None, None, X.dtype
        X, labels, weights = self._weighted(X, labels, sample_weight)
        if weights is not None:  # moments are squares, which single precision may not hold
            self._precision = np.dtype(float)
        with precision_of(self._precision):
            # From moments: imputed samples vary less than true ones.
            if self.impute is not None or weights is not None:
                self._go_on(X, labels, weights)
                self._seen = self._solution = None
                return self
            self.groups_, places = np.unique(labels, return_inverse=True)
            mean = scale = None
            if self.center or self._scales:
                mean = _arrays.median_of_means(X, places) if self.robust else _arrays.mean_of(X)
                scale = _arrays.scale_of(X, places, mean, self.robust) if self._scales else None
            mean = mean if self.center else None
            self.mean_ = np.zeros(X.shape[1], X.dtype) if mean is None else mean
            self.scale_ = scale
            clients, tables = _arrays.clients_of(X, places, mean, scale)
            sent = clients
            if self.epsilon is not None:
                key = None if self.random_state is None else self._key()
                sent = _release.released(self, clients, places, person, key)
            solution = self._run(sent)
            self._describe(solution, clients, tables, moment_of_samples, sent)
            self._assess(solution, clients, None)
        return self

    @final
    def partial_fit(
        self,
        X: ArrayOrFrame,
        y: object = None,
        groups: ArrayOrFrame | None = None,
        sample_weight: ArrayOrFrame | None = None,
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
            sample_weight: how often each row counts, `(n,)`, as in `fit`.

        Returns:
            The estimator.

        Raises:
            ValueError: if parameters, samples, groups or weights are invalid.
        """
        if self.epsilon is not None:
            wanted = "None in partial_fit, which keeps moments without noise"
            raise refuse("epsilon", wanted, self.epsilon)
        if self.bootstrap:
            raise refuse("bootstrap", "0 in partial_fit, which keeps moments", self.bootstrap)
        seen = getattr(self, "_seen", None)
        X, labels = self._checked(X, groups, first=seen is None, method="partial_fit")
        if seen is not None and (fault := _groups.other_type(self.groups_, labels)):
            raise ValueError(fault)
        if seen is None:
            self._seen = self._solution = self._completion = None
        self._precision = np.dtype(float)
        X, labels, weights = self._weighted(X.astype(float), labels, sample_weight)
        with precision_of(self._precision):
            self._go_on(X, labels, weights)
        return self

    @final
    def fit_transform(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: ArrayOrFrame,
        y: object = None,
        groups: ArrayOrFrame | None = None,
        person: ArrayOrFrame | None = None,
        sample_weight: ArrayOrFrame | None = None,
    ) -> Table:
        """Call `fit`, and return the scores of the same samples."""
        return self.fit(X, y, groups, person, sample_weight).transform(X, groups)

    # --- internals -----------------------------------------------------------------------------

    def _checked(
        self, X: ArrayOrFrame, groups: ArrayOrFrame | None, *, first: bool, method: str
    ) -> tuple[Table, np.ndarray]:
        """Check parameters, samples and groups; return the samples and their labels."""
        _groups.check_parameters(self, self._ranks())
        check_name("scale", self.scale, ("none", "shared"))
        check_forgetting(self.forgetting)
        impute = impute_of(self.impute)
        if first:
            self._set_ranks([int(x) if is_whole(x) else 1 for x in self._given_ranks()])
        self._n_features_out, least = self._sizes()
        # The number of features of later samples is compared with that of the first ones.
        if impute is not None:
            least = max(least, sum(impute.ranks(0)))
        wanted = {"ensure_min_samples": 2, "ensure_min_features": least} if first else {}
        incomplete = (self.impute if first else self._completion) is not None
        X = checked_samples(self, X, incomplete, reset=first, **wanted)
        labels = _groups.labels_of(groups, X, method)
        _arrays.check_energies(X, labels)
        return X, labels

    def _weighted(self, X: Table, labels: np.ndarray, sample_weight: Any) -> _arrays.Rows:
        """Return the rows that count, and how much."""
        if sample_weight is None:
            return _arrays.Rows(X, labels, None)
        for name, kept in (("epsilon", None), ("impute", None), ("bootstrap", 0)):
            if (given := getattr(self, name)) != kept:
                raise refuse(name, f"{kept} with sample_weight", given)
        return _arrays.weighted(X, labels, sample_weight)

    def _go_on(self, X: Table, labels: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Learn components from moments of new and earlier samples."""
        impute, imputed = impute_of(self.impute), None
        if self._seen is None and impute is not None:
            robust = self._aggregated(impute, len(np.unique(labels)))
            imputed = Completion.learned(
                X, labels, robust, self.center, self.robust, self._scales, self._key()
            )
            self._completion = imputed.completion
        seen = taken_in(
            on_device(self._seen),
            X,
            labels,
            self.forgetting,
            self.center,
            self.robust,
            self._scales,
            self._completion,
            weights,
        )
        now = summary_of(seen, self.center, self.robust, self._scales)
        solution = self._run(now.clients, on_device(self._solution))
        self.groups_, self.mean_, self.scale_ = now.labels, now.mean, now.scale
        self._seen, self._solution = on_host(seen), on_host(solution)
        self._describe(solution, now.clients, now.moments, moment_of_matrix)
        if imputed is not None:
            scaled = (X - self.mean_) / (1 if self.scale_ is None else self.scale_)
            places = np.unique(labels, return_inverse=True)[1]
            tables = [scaled[rows] for rows in rows_of_each(places)]
            clients = Clients.from_samples(tables, missing="mask")
            self._assess(solution, clients, imputed)

    def _assess(self, solution: Solution, clients: Clients, imputed: Imputed | None) -> None:
        """Set standard errors and intervals, if they were requested.

        Args:
            solution: what was learned.
            clients: the samples minus the mean.
            imputed: what completes them, if entries are missing.
        """
        if self.bootstrap:
            self.confidence_ = inference.confidence(
                solution,
                clients,
                key=jax.random.fold_in(self._key(), 1),
                resamples=int(self.bootstrap),
                impute=None if imputed is None else imputed.about(self.mean_),
            )
            self.components_std_ = self.confidence_.axes_std.T

    @property
    def _scales(self) -> bool:
        return self.scale == "shared"

    def _key(self) -> Key[Array, ""]:
        return jax.random.key(check_random_state(self.random_state).randint(2**31 - 1))

    def _aggregated(self, algorithm: Algorithm, clients: int) -> Algorithm:
        return _groups.robust(algorithm, clients) if self.robust else algorithm

    def _run(self, clients: Clients, before: Solution | None = None) -> Solution:
        """Learn components, starting from those of an earlier solution if there is one."""
        options: dict[str, Any] = {"rounds": int(self.rounds), "key": self._key()}

        def tol(algorithm: Any) -> float | None:
            if self.tol is not None or not self.stops_at_rounding:
                return self.tol
            # Of the precision in which `fit` computes, which that of the table may not allow.
            double = exceed_single_precision(algorithm, clients)
            return 16 * float(np.finfo(np.float64 if double else self._precision).eps)

        if before is not None:
            return update(before, clients, tol=tol(before.algorithm), **options)
        if not all(map(is_whole, self._given_ranks())):
            self._set_ranks(self._numbers(clients, *self._given_ranks()))
            self._n_features_out, _ = self._sizes()

        def run(algorithm: Algorithm, **more: Any) -> Solution:
            aggregated = self._aggregated(algorithm, len(clients))
            own: dict[str, Any] = {"tol": tol(aggregated)}
            return fit(aggregated, clients, **(own | options | more))

        return self._solved(run, clients)

    def _describe(
        self,
        solution: Solution,
        clients: Clients,
        data: Sequence[np.ndarray] | np.ndarray,
        moment_of: Callable[[np.ndarray, Basis], ScoreMoment],
        sent: Clients | None = None,
    ) -> None:
        """Set the attributes from what was learned and each client's data.

        Args:
            solution: what was learned.
            clients: the clients.
            data: of each client.
            moment_of: as for `described`.
            sent: the clients as the run saw them, if that is something else.
        """
        if self.robust:
            far = aggregation.far_clients(solution, clients.ids)
            self.far_groups_ = self.groups_[np.isin(clients.ids, far)]
        learned = self._learned(solution, clients)
        self.guarantee_ = None if sent is None else sent.guarantee
        if sent is not None and self.guarantee_ is not None:
            shared = learned.shared @ _release.axes_of(sent, learned.shared)
            self.components_ = shared.T
            learned = Learned(
                shared, self._new_components(list(data)), learned.beside, settled=True
            )
        found = described(learned, data, np.asarray(clients.counts, float), moment_of)
        self._beside = learned.beside
        self.components_ = found.shared.T
        self.local_components_ = found.local.swapaxes(1, 2)
        self._record(solution)
        self.noise_variance_ = found.noise_variance
        self.explained_variance_ = found.variance
        laws = [*found.laws, found.law]
        *self._models, self._anybody = map(self._whitened, laws) if self.whiten else laws
        self.explained_variance_ratio_ = found.variance_ratio

    @property
    @final
    def _takes_missing(self) -> bool:
        return self._completion is not None

    @final
    def _completed(self, X, groups, parts):
        if self._completion is None:
            return X
        return self._completion.completed(X, None if groups is None else client_labels(groups, X))

    def _ranks(self) -> list[str]:
        """Name the parameters that are numbers of components, shared ones first."""
        names = self.get_params(deep=False)
        return sorted((x for x in names if "rank" in x or "n_comp" in x), reverse=True)

    def _given_ranks(self) -> list[Any]:
        return [getattr(self, name) for name in self._ranks()]

    def _set_ranks(self, ranks: Sequence[int]) -> None:
        for name, rank in zip(self._ranks(), ranks, strict=True):
            setattr(self, f"{name}_", int(rank))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.impute is not None
        return tags
