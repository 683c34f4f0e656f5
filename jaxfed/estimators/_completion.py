"""Impute missing entries of samples given to estimators."""

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import is_whole, refuse
from jaxfed._names import caller
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.estimators._arrays import median_of_means, scale_of
from jaxfed.preprocess import Imputation
from jaxfed.preprocess.impute import ROUNDS, Impute

Table = Float[np.ndarray, "n d"]


class Completion(NamedTuple):
    """A model for each known client, and one for all other clients."""

    labels: np.ndarray  # of the clients
    origin: Float[np.ndarray, " d"]  # subtracted from samples first
    unit: Float[np.ndarray, " d"]  # by which samples are divided then
    models: Personalized

    @classmethod
    def learned(
        cls,
        X: Table,
        labels: np.ndarray,
        impute: Algorithm,
        center: bool,
        robust: bool,
        scale: bool,
        key: Key[Array, ""],
    ) -> "Imputed":
        """Learn the models.

        Args:
            X: samples as rows.
            labels: the client of each row.
            impute: `jaxfed.preprocess.Impute`, or one with a robust aggregate.
            center: whether to subtract the mean of the observed entries.
            robust: whether to subtract the median of the clients' means instead.
            scale: whether to divide by the standard deviations of the observed entries.
            key: random key of the run.

        Raises:
            ValueError: if a sample or a feature has no observed entry.

        Warns:
            UserWarning: if larger ranks would impute better.
        """
        for axis, what in enumerate(("feature", "sample")):
            empty = np.isnan(X).all(axis=axis)
            if empty.any():
                wanted = f"X: wanted an observed entry of every {what}"
                raise ValueError(f"{wanted}, got none of {what} {np.argmax(empty)}")
        present, places = np.unique(labels, return_inverse=True)
        origin = np.zeros(X.shape[1])
        if center or scale:
            origin = median_of_means(X, places) if robust else np.nanmean(X, axis=0)
        unit = scale_of(X, places, origin, robust) if scale else np.ones(X.shape[1])
        tables = [(X[rows] - origin) / unit for rows in rows_of_each(places)]
        clients = Clients.from_samples(tables, missing="mask")
        solution = fit(impute, clients, rounds=ROUNDS, key=key)
        for remark in impute.remarks(solution.result, solution.history):
            warnings.warn(f"impute: {remark}", UserWarning, stacklevel=caller())
        # On the host, where copies keep their precision.
        return Imputed(cls(present, origin, unit, jax.device_get(solution.result)), solution)

    def completed(self, X: Table, labels: np.ndarray | None) -> Table:
        """Replace missing entries by their conditional means.

        Args:
            X: samples as rows.
            labels: the client of each row; None if unknown.
        """
        if not np.isnan(X).any():
            return X
        places = _places(X, labels)
        models, clients = self._models(labels), self._clients(X, places)
        found = np.empty_like(X)
        every, imputed = np.arange(len(X)), np.asarray(models.transform(clients).data.values)
        for rows, values in zip(rows_of_each(places), imputed, strict=True):
            found[rows] = values[: len(every[rows]), :-1]
        return np.where(np.isnan(X), (found * self.unit + self.origin).astype(X.dtype), X)

    def moments(self, X: Table, labels: np.ndarray) -> Clients:
        """Compute the clients' expected second moments of ((sample - origin) / unit, 1)."""
        return self._models(labels).moments(self._clients(X, _places(X, labels)))

    def _clients(self, X: Table, places: Int[np.ndarray, " n"]) -> Clients:
        """Make clients from samples, each with an additional entry of one."""
        rows = np.column_stack([(X - self.origin) / self.unit, np.ones(len(X))])
        tables = [rows[own] for own in rows_of_each(places)]
        return Clients.from_samples(tables, missing="mask")

    def _models(self, labels: np.ndarray | None) -> Imputation:
        """Return a model for each label in order, for samples with an additional entry of one."""
        known = {label: place for place, label in enumerate(self.labels.tolist())}
        if labels is None:  # the only client's, if there is one
            chosen = [0 if len(known) == 1 else -1]
        else:
            chosen = [known.get(label, -1) for label in np.unique(labels).tolist()]
        anybody, own = self.models
        # The model for other clients comes last.
        each = jax.tree.map(
            lambda x, y: jnp.concatenate([x, y[None]])[jnp.asarray(chosen)], own, anybody
        )
        # The additional entries have mean one, and zero loadings and variances. They are never
        # missing, so their noise counts for nothing but the unit, which is that of the others.
        ends = zip(jax.tree.leaves(each), (1.0, 0.0, each.noise[:, :1], 0.0, 0.0), strict=True)
        return Imputation(
            *(
                jnp.concatenate([x, jnp.broadcast_to(end, x[:, :1].shape)], axis=1, dtype=x.dtype)
                for x, end in ends
            )
        )


class Imputed(NamedTuple):
    """What completes samples, and the run that learned it."""

    completion: Completion
    solution: Solution

    def about(self, mean: Float[np.ndarray, " d"]) -> Solution:
        """Return the solution for samples minus this mean, in the completion's units."""
        change = (self.completion.origin - mean) / self.completion.unit
        means = [part.mean for part in self.solution.result]
        moved = [x + jnp.asarray(change, x.dtype) for x in means]
        return eqx.tree_at(lambda x: [part.mean for part in x.result], self.solution, moved)


def impute_of(given: object) -> Impute | None:
    """Return what the parameter `impute` of an estimator asks for.

    Raises:
        ValueError: for other values than None, "auto" and two numbers of components.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "auto":
        return Impute()
    ranks: Any = given if isinstance(given, tuple | list) else ()
    if len(ranks) != 2 or not all(map(is_whole, ranks)) or ranks[0] < 1 or ranks[1] < 0:
        wanted = 'None, "auto" or two numbers of components, (shared, local)'
        raise refuse("impute", wanted, given)
    return Impute(*map(int, ranks))


def _places(X: Table, labels: np.ndarray | None) -> Int[np.ndarray, " n"]:
    if labels is None:
        return np.zeros(len(X), int)
    return np.unique(labels, return_inverse=True)[1]
