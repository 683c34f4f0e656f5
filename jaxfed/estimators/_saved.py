"""What estimators keep and say of the run that they are the result of."""

import abc
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from sklearn.exceptions import ConvergenceWarning

from jaxfed._names import caller
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import Names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.remarks import Words
from jaxfed.core.run.result import saved_of
from jaxfed.core.run.solution import Solution
from jaxfed.core.store.saved import Saved, ended_badly

WORDS = Words(rounds="rounds=")


class HasRun(abc.ABC):
    """An estimator with the record of a run."""

    _run_record: Saved
    n_iter_: int

    @abc.abstractmethod
    def _result(self) -> Personalized:
        """Return what was learned, as a run returns it."""

    @abc.abstractmethod
    def _clients_of(self, X: Any, groups: Any) -> Clients:
        """Return the clients of `fit` as its run saw them, from samples as `fit` takes them.

        Raises:
            ValueError: if samples or groups are invalid, or not of the clients of `fit`.
        """

    def _record(self, solution: Solution) -> None:
        """Keep the record of a run without its models, which the estimator's attributes hold.

        Warns:
            ConvergenceWarning: if the run did not converge.
        """
        self.n_iter_ = int(solution.rounds)
        record = saved_of(solution, words=WORDS)
        self._run_record = record._replace(result=Personalized(None, None))
        if ended_badly(self._run_record.status, self._run_record.history):
            warnings.warn(record.remarks[0], ConvergenceWarning, stacklevel=caller())

    @property
    def saved_(self) -> Saved:
        """What was learned and how, in the form that `jaxfed.load` returns.

        Functions that take a solution's result take the estimator as well. Samples must be centred.
        The clients' names are their labels as text.
        """
        found = self._run_record._replace(result=self._result())
        columns = getattr(self, "feature_names_in_", None)
        features = None if columns is None else _texts(columns)
        labels = getattr(self, "groups_", None)  # in the order of local components
        if labels is None:
            return found._replace(ids=None, names=Names(None, features))
        names = Names(tuple(map(str, labels.tolist())), features)
        return found._replace(ids=np.arange(len(labels)), clients=len(labels), names=names)

    @property
    def summary_(self) -> str:
        """A summary of the run."""
        return self.saved_.summary()


def _texts(names: Any) -> tuple[Any, ...]:
    """Names of features as texts; of views, those of each view."""
    return tuple(_texts(x) if isinstance(x, tuple) else str(x) for x in names)


def on_host(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Part a tree into its arrays, on the host, where copies keep their precision, and the rest."""
    arrays, rest = eqx.partition(tree, lambda x: isinstance(x, jax.Array) and not _is_key(x))
    return jax.device_get(arrays), rest


def on_device(parts: tuple[PyTree, PyTree] | None) -> Any:
    """Undo `on_host`."""
    return None if parts is None else eqx.combine(jax.tree.map(jnp.asarray, parts[0]), parts[1])


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
